"""Connections to a shared pool that break, or are not read, while both ends live."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pool_models
import pool_preparations
import pytest
from pool_preparations import break_outputs, break_packing, break_submit, break_timing

import models
from conftest import await_that
from pools import FakePool, ask_pool, connected, fake_pool, folder, greeting, pool_pid
from service_streamer import InternalError, Streamer, WorkerStartTimeout
from service_streamer.observe.record import CallOptions
from service_streamer.pool.pool_protocol import (
    ANSWER,
    ASK,
    HOLD_STREAM,
    RELEASED,
    WITHDRAW,
    WORKERS,
    pack,
)
from service_streamer.testing import Gate
from stream_models import Countdown

Shared = Callable[..., Streamer]


@pytest.fixture
def lasting(shared: Shared) -> Iterator[Shared]:
    """Builds clients of a pool that lasts while its only client has no connection."""

    def lasting(*args: Any, **options: Any) -> Streamer:
        return shared(*args, **{"shared": "a", "linger": 60, **options})

    yield lasting
    ask_pool("a", "stop", False)


def cut(streamer: Streamer) -> None:
    """End the only connection of this process from outside, as a debugger could."""
    client: Any = streamer.pool_client
    ended = threading.Event()
    client.when_workers_change(ended.set)
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the descriptor of this list
            if os.readlink(each).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as connection:
                    if connection.getpeername() == str(folder() / "a.sock"):
                        connection.shutdown(socket.SHUT_RDWR)
    ended.wait()
    await_that(lambda: client.pool_pid is not None)


def test_open_calls_are_sent_again_after_a_broken_connection(lasting: Shared, gate: Gate) -> None:
    streamer = lasting(models.gated(gate), 1)
    streamer.wait_ready()
    pid = pool_pid()
    futures = [streamer.submit([0])]
    gate.await_arrival()
    futures += [streamer.submit([n]) for n in range(1, 5)]
    await_that(lambda: streamer.stats().pending >= 3)
    for _ in range(2):
        cut(streamer)
        await_that(lambda: streamer.stats().pending >= 4)  # what is being computed, too
    gate.let_through(20)
    for future in futures:
        assert future.result() == [1]
    await_that(lambda: (stats := streamer.stats()).pending == stats.in_flight == 0)
    assert pool_pid() == pid


# -- clients that read late, or say what cannot be done


def stream_call(number: int, item: int = 10**9) -> Any:
    return number, [pack(item)], None, (*CallOptions(stream=True),), None


def test_streams_are_held_while_their_client_is_behind(shared: Shared) -> None:
    streamer = shared(pool_models.Crowded, 8, shared="a")
    streamer.wait_ready()
    with streamer.stream(10**9, timeout=None) as stream, connected("a") as peer:

        def await_hold(calls: int) -> None:
            """Until the peer has so many, and steps are of our stream alone."""
            await_that(lambda: [n for _, n in ask_pool("a", "status")["clients"]] == [1, calls])
            await_that(lambda: {next(stream) for _ in range(100)} == {1})

        peer.send(stream_call(1), stream_call(2))
        await_hold(2)
        peer.send(stream_call(3))  # one that begins then
        await_hold(3)
        peer.send((HOLD_STREAM, 3))
        while next(stream) != 3:  # the first two go on
            peer.receive_frame()


def test_a_stream_goes_on_if_its_client_catches_up_just_when_it_is_held(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(path := tmp_path / "may hold")
    monkeypatch.setattr(
        "service_streamer.pool.pool_protocol.preparation",
        functools.partial(pool_preparations.hold_late, path),
    )
    shared(Countdown, 4, shared="a").wait_ready()
    with connected("a") as peer:
        peer.send(stream_call(1, 20_000))
        path.write_bytes(b"as soon as the pool reads")
        while len(peer.receive()) == 2:  # to the end of the stream
            pass


@pytest.fixture
def memory() -> Iterator[int]:
    """Of a client's large items."""
    descriptor = os.memfd_create("a client's")
    os.truncate(descriptor, 1 << 20)
    yield descriptor
    os.close(descriptor)


def test_a_call_whose_items_cannot_be_read_fails_alone(shared: Shared, memory: int) -> None:
    shared(models.double, shared="a").wait_ready()
    with connected("a", memory=memory) as peer:
        peer.send((1, [(b"nonsense",)], None, None, None), (2, pack(4), None))
        answers = dict((peer.receive_kind(n)[:2]) for n in (1, 2))
    assert "ValueError" in answers[1].text
    assert pickle.loads(answers[2]) == 8


def test_a_client_that_keeps_results_leaves_room_for_others(shared: Shared, memory: int) -> None:
    streamer = shared(pool_models.memory_each, 1, shared="a", shared_memory_limit=32 << 20)
    streamer.predict([bytearray(100_000)])  # from the first large item on, it is used

    def kept(peer: Any, count: int) -> list[tuple[int, int]]:
        """Where in shared memory so many results are; the others come with the messages."""
        found = []
        for _ in range(count):
            peer.send((1, pack(1), None))
            [outcome] = peer.receive_kind(1)[1]
            if type(outcome) is tuple:
                found.append(outcome[:2])
        return found

    with connected("a", memory=memory) as greedy, connected("a", memory=memory) as other:
        blocks = kept(greedy, 20)
        assert 2 <= len(blocks) < 10
        assert kept(greedy, 1) == []
        assert len(kept(other, 2)) == 2
        greedy.send((RELEASED, 0, blocks))
        assert len(kept(greedy, 1)) == 1


def test_a_pool_stays_as_long_as_a_client_has_wished_that_left_at_once(shared: Shared) -> None:
    streamer = shared(models.double, shared="a", linger=0)
    streamer.wait_ready()
    pid, fingerprint = pool_pid(), ask_pool("a", "status")["fingerprint"]
    os.kill(pid, signal.SIGSTOP)
    with greeting("a", fingerprint, linger=60):
        pass
    os.kill(pid, signal.SIGCONT)
    streamer.stats()
    streamer.close()
    assert pool_pid() == pid
    ask_pool("a", "stop", False)


# -- questions that have to wait for the workers


def threads(streamer: Streamer) -> int:
    """How many the process of the pool has."""
    streamer.stats()
    pid = streamer.backend.pool_pid  # type: ignore[attr-defined]
    return len(os.listdir(f"/proc/{pid}/task"))


def test_questions_that_wait_have_no_threads_and_go_with_their_clients(
    shared: Shared, gate: Gate
) -> None:
    streamer = shared(models.GatedInit, 1, shared="a", model_init_args=(gate,))
    before = threads(streamer)
    for _ in range(3):
        with connected("a", makes_calls=False) as peer:
            for number in range(1, 21):
                peer.send((ASK, number, "wait_ready", (None,)))
            peer.send((ASK, 99, "stats", ()))
            assert peer.receive()[:2] == (ANSWER, 99)  # the pool has read the others before
            assert threads(streamer) == before
    with connected("a", makes_calls=False) as peer:
        for number in range(1, 5):
            peer.send((ASK, number, "wait_ready", (None,)))
        peer.send((WITHDRAW, 2))
        peer.send((ASK, 5, "wait_ready", (0.001,)))
        kind, number, failure = peer.receive()
        assert (kind, number) == (ANSWER, 5)
        assert isinstance(failure.exception(), WorkerStartTimeout)
        gate.let_through()
        assert [peer.receive() for _ in range(3)] == [(ANSWER, n, None) for n in (1, 3, 4)]
    streamer.wait_ready()
    assert streamer.predict([1]) == [1]
    assert threads(streamer) == before


# -- exceptions of this package's own: they end what they touch, no more


BUG = "this is a bug in it"


# -- at the client


@pytest.fixture
def pool(shared: Shared) -> Iterator[FakePool]:
    with fake_pool("a") as pool:
        yield pool


def bugs(caplog: pytest.LogCaptureFixture) -> int:
    """How often one was logged with its traceback, and at a level that wakes people."""
    return sum(
        BUG in each.getMessage() and each.levelno == logging.CRITICAL and bool(each.exc_info)
        for each in caplog.records
    )


def test_a_client_that_fails_at_an_answer_fails_that_call_and_goes_on(
    shared: Shared, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    streamer = shared(models.double, shared="a")
    first, second = streamer.submit([1]), streamer.submit([2])
    with pool.accepted() as peer:
        touched, other = peer.receive()[0], peer.receive()[0]
        peer.send((touched, pack(2)))  # an output, of a call that is no stream
        with pytest.raises(InternalError, match=BUG):
            first.result()
    with pool.accepted() as peer:
        assert peer.receive()[0] == other  # which is sent again
        peer.send((other, pack(4), None))
        assert second.result() == [4]
        third = streamer.submit([3])
        peer.send((peer.receive()[0], pack(6), None))
        assert third.result() == [6]
        assert bugs(caplog) == 1
        streamer.close()


@pytest.mark.parametrize("nonsense", [(WORKERS,), (5,), 5, (ANSWER, 1)])
def test_a_client_that_fails_at_nobody_knows_what_fails_all_and_goes_on(
    nonsense: Any, shared: Shared, pool: FakePool, caplog: pytest.LogCaptureFixture
) -> None:
    streamer = shared(models.double, shared="a")
    futures = [streamer.submit([n]) for n in range(2)]
    with pool.accepted() as peer:
        for _ in futures:
            peer.receive()
        peer.send(nonsense)
        for future in futures:
            with pytest.raises(InternalError, match=BUG):
                future.result()
    later = streamer.submit([3])  # until then it does not connect: it would fail again
    with pool.accepted() as peer:
        peer.send((peer.receive()[0], pack(6), None))
        assert later.result() == [6]
        streamer.close()
    assert bugs(caplog) > 0


def test_a_question_is_taken_back_when_its_time_is_over(shared: Shared, pool: FakePool) -> None:
    streamer = shared(models.double, shared="a")
    future = streamer.submit([1])
    with pool.accepted() as peer:
        number = peer.receive()[0]
        with pytest.raises(WorkerStartTimeout):
            streamer.wait_ready(0)
        kind, asked, method, arguments = peer.receive()
        assert (kind, method, arguments) == (ASK, "wait_ready", (0,))
        assert peer.receive() == (WITHDRAW, asked)
        peer.send((number, pack(2), None))
        assert future.result() == [2]
        streamer.close()


# -- at the pool


def logged(path: Path) -> int:
    """How often one was logged with its traceback; the pool may log it a little late."""
    await_that(lambda: "Traceback" in path.read_text())
    return path.read_text().count(f"CRITICAL: the shared pool failed; {BUG}\nTraceback")


def test_a_pool_that_fails_at_a_message_drops_that_client_only(
    shared: Shared, gate: Gate, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    streamer = shared(models.gated(gate), 1, shared="a", pool_log=log)
    future = streamer.submit([1])
    gate.await_arrival()
    pid = streamer.backend.pool_pid  # type: ignore[attr-defined]
    for bytes_ in (b"x" * 100, b"\0" * 8, (5).to_bytes(8, "little") + b"hello", b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(folder() / "a.sock"))
            connection.sendall(bytes_)
    are_calls = [(7,), (7, 8, 9, 10)]
    for nonsense in (*are_calls, (HOLD_STREAM,), (-77,), 5, ()):
        with connected("a") as peer:
            peer.send(nonsense)
            failures = [message[1] for message in peer.receive_all() if message[0] == 7]
        assert len(failures) == (nonsense in are_calls)
        assert all(BUG in failure.text for failure in failures)
    await_that(lambda: len(ask_pool("a", "status")["clients"]) == 1)
    gate.let_through()
    assert future.result() == [1]
    assert streamer.backend.pool_pid == pid  # type: ignore[attr-defined]
    assert logged(log) >= 1


@pytest.mark.parametrize("broken", [break_submit, break_timing, break_packing])
def test_a_pool_that_fails_at_a_call_fails_that_call_and_goes_on(
    broken: Callable[..., None], shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", broken)
    log = tmp_path / "log"
    # It lasts while its only client connects again.
    streamer = shared(models.double, shared="a", pool_log=log, linger=60)
    with pytest.raises(InternalError, match=f"{BUG}: LookupError: of ours"):
        streamer.predict([1])
    pid = ask_pool("a", "status")["pid"]
    assert streamer.predict([2]) == [4]
    assert ask_pool("a", "stop", False) == pid
    assert logged(log) == 1


def test_a_pool_that_fails_at_an_output_fails_that_stream_and_goes_on(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", break_outputs)
    log = tmp_path / "log"
    streamer = shared(Countdown, 4, shared="a", pool_log=log)
    streamer.wait_ready()
    with connected("a") as peer:
        peer.send(stream_call(1))
        assert logged(log) == 1  # it has not read so many outputs that the stream is to rest
        while len(answer := peer.receive()) == 2:
            pass
        assert f"{BUG}: LookupError: of ours" in answer[1].text
    assert [*streamer.stream(3)] == [1, 2, 3]
    await_that(lambda: streamer.stats().in_flight == 0)
