"""Exceptions of this package's own at either end of a pool: they end what they touch, no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_preparations import break_outputs, break_packing, break_submit, break_timing

import models
from conftest import await_that
from pools import FakePool, ask_pool, connected, fake_pool
from service_streamer import InternalError, Streamer, WorkerStartTimeout
from service_streamer.pool.pool_protocol import (
    ANSWER,
    ASK,
    HOLD_STREAM,
    WITHDRAW,
    WORKERS,
    pack,
)
from service_streamer.testing import Gate
from stream_models import Countdown

Shared = Callable[..., Streamer]

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
    """How often one was logged with its traceback; the pool's log is a little late."""
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
    are_calls = [(7,), (7, 8, 9, 10)]
    for nonsense in (*are_calls, (HOLD_STREAM,), (-77,), 5, ()):
        with connected("a") as peer:
            peer.send(nonsense)
            failures = [message[1] for message in peer.receive_all() if message[0] == 7]
        assert len(failures) == (nonsense in are_calls)
        assert all(BUG in failure.text for failure in failures)
    gate.let_through()
    assert future.result() == [1]
    assert streamer.backend.pool_pid == pid  # type: ignore[attr-defined]
    assert logged(log) >= 1


@pytest.mark.parametrize("broken", [break_submit, break_timing, break_packing])
def test_a_pool_that_fails_at_a_call_fails_that_call_and_goes_on(
    broken: Callable[[], None], shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        peer.send((1, [pack(10**9)], None, None, None, []))
        assert logged(log) == 1  # it has not read so many outputs that the stream is to rest
        while len(answer := peer.receive()) == 2:
            pass
        assert f"{BUG}: LookupError: of ours" in answer[1].text
    assert [*streamer.stream(3)] == [1, 2, 3]
    await_that(lambda: streamer.stats().in_flight == 0)
