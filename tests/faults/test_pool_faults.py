"""A shared pool whose process, workers and clients are killed or stopped while others call."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pool_models
import pytest
from fault_processes import GONE, Watch, await_line, descendants, running
from pool_models import echo_or_pid

import models
from cases import long_cases
from conftest import await_that
from pools import Peer, ask_pool, await_end, connected, folder, pool_names, pool_pid
from serve_process import until, workers
from service_streamer import PredictTimeout, Streamer, StreamerBroken, StreamerClosed, WorkerLost
from service_streamer.pool.pool_protocol import PROTOCOL, Hello, pack, times
from service_streamer.testing import Gate
from stream_models import Countdown, Resumed

Shared = Callable[..., Streamer]

#: Calls until it reads a line; then says what it had answers to. No call may fail.
CALLERS = """
    import itertools, sys, threading
    import models
    from service_streamer import Streamer

    answered, lock = set(), threading.Lock()
    is_over = threading.Event()

    def call(thread):
        for n in itertools.count(thread, 8):
            item = f"{name}-{n}"
            (result,) = streamer.predict([item])
            assert result == 2 * item, result
            with lock:
                answered.add(item)
                if len(answered) == 50:
                    print("under load", flush=True)
            if is_over.is_set():
                return

    if __name__ == "__main__":
        name = sys.argv[1]
        streamer = Streamer(models.double, 8, shared="a", linger=0, worker_timeout=None)
        threads = [threading.Thread(target=call, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        for _ in range(2):  # more of them, after what has happened meanwhile
            target = len(answered) + 50
            while len(answered) < target:
                threading.Event().wait(0.01)
        is_over.set()
        for thread in threads:
            thread.join()
        streamer.close()
        print("answers", *answered, flush=True)
"""


Callers = list[subprocess.Popen[str]]


@pytest.fixture
def callers(tmp_path: Path, shared: Shared) -> Iterator[Callable[..., Callers]]:
    """Starts processes that call a pool until they are told to end."""
    with contextlib.ExitStack() as stack:

        def start(count: int) -> Callers:
            started = []
            for n in range(count):
                folder = tmp_path / f"caller{n}"
                folder.mkdir()
                started.append(stack.enter_context(running(CALLERS, folder, f"c{n}")))
            for each in started:
                await_line(each, "under load")
            return started

        yield start


def end(processes: Callers) -> set[str]:
    """End those that live; what was answered to them."""
    found: set[str] = set()
    alive = [each for each in processes if each.poll() is None]
    for each in alive:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    for each in alive:
        out, err = each.communicate()
        assert each.returncode == 0, err
        assert "Traceback" not in err
        [answers] = [line for line in out.splitlines() if line.startswith("answers ")]
        found.update(answers.split()[1:])
    return found


@pytest.mark.parametrize("victims", ["all", *long_cases("pool", "worker", "client")])
def test_a_death_under_load_loses_no_call(victims: str, callers: Callable[..., Callers]) -> None:
    calls = callers(3)
    pid = pool_pid()
    with Watch({pid, *descendants(pid)}) as family:
        if victims in ("worker", "all"):
            for worker in workers(pid):
                os.kill(worker, signal.SIGKILL)
        if victims in ("client", "all"):
            calls[0].kill()
            calls[0].wait()
        if victims in ("pool", "all"):
            os.kill(pid, signal.SIGKILL)
            assert family.alive_after(GONE) == []
        assert len(end(calls)) >= 2 * 100
        assert family.alive_after(GONE) == []  # nobody is left


def test_clients_go_on_with_a_pool_that_has_given_up_its_name(
    callers: Callable[..., Callers], shared: Shared
) -> None:
    calls = callers(2)
    old = ask_pool("a", "replace")
    other = shared(models.echo, shared="a")  # a new version, say
    assert other.predict([1]) == [1]
    assert pool_pid() != old
    assert end(calls)
    assert await_end(old, GONE)
    assert other.predict([2]) == [2]


def test_a_client_that_came_while_a_pool_gave_up_its_name_finds_the_next_one(
    shared: Shared,
) -> None:
    """It is refused for no difference from a pool that has given up its name."""
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(folder() / "a.sock"))
        old = ask_pool("a", "replace")
        await_that(lambda: not pool_names())
        with contextlib.closing(Peer(connection)) as peer:
            peer.begin()
            peer.send((*Hello(PROTOCOL, {"model": "another"}, 0.0),))
            with contextlib.suppress(EOFError):
                peer.begun()
            assert peer.receive_all() == [], "no word, and no refusal, before the end"
    assert streamer.predict([2]) == [4]
    assert streamer.pool_client.pool_pid == old  # type: ignore[union-attr]


def test_a_client_that_does_not_read_holds_up_nobody(shared: Shared) -> None:
    streamer = shared(pool_models.large_or_small, 8, shared="a")
    streamer.wait_ready()
    with connected("a") as stopped:
        stopped.send(*((number, pack("large"), None) for number in range(1, 201)))
        await_that(lambda: streamer.stats().answered == 200)  # its answers wait in the pool
        for n in range(100):
            assert streamer.predict([f"small {n}"]) == [f"small {n}"]
        unread = {*range(1, 201)}
        while unread:
            unread.discard(stopped.receive()[0])


def test_a_pool_that_is_stopped_lets_calls_time_out_and_is_said_not_to_answer(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = shared(models.double, shared="a", linger=0)
    streamer.predict([1])
    pid = pool_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(times, "answer", 0.1)
            with pytest.raises(PredictTimeout, match=r"within 0\.1 s; is its process stopped\?"):
                streamer.stats()
        with pytest.raises(PredictTimeout, match=r"no result within 0\.1 s \(pool"):
            streamer.predict([2], timeout=0.1)
        future = streamer.submit([3], timeout=0.1)
        assert isinstance(future.exception(), PredictTimeout)
        waiting = streamer.submit([4])
        large = streamer.submit([b"x" * 10_000_000])  # more than the socket takes
    finally:
        os.kill(pid, signal.SIGCONT)
    assert waiting.result() == [8]
    assert len(large.result()[0]) == 20_000_000
    assert pool_pid() == pid


def test_the_directory_of_pools_is_made_again(shared: Shared) -> None:
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    pid = pool_pid()
    for each in folder().iterdir():
        each.unlink()
    folder().rmdir()
    os.kill(pid, signal.SIGKILL)
    assert streamer.predict([2]) == [4]
    pid = pool_pid()
    runtime = folder().parent
    runtime.rename(f"{runtime}-moved")  # before: the next pool is started at once
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StreamerBroken, match="is gone, and the one that it was in"):
        streamer.predict([3])
    Path(f"{runtime}-moved").rename(runtime)
    assert streamer.predict([4]) == [8]


def test_a_working_directory_that_was_removed(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    streamer = shared(models.process_ids, shared="a")
    (worker,) = streamer.predict([1])
    folder.rmdir()
    os.kill(worker, signal.SIGKILL)
    assert streamer.predict([2]) != [worker]  # the pool carries on
    os.kill(pool_pid(), signal.SIGKILL)
    assert streamer.predict([3]), "this process starts the next pool"


# -- pools that cannot serve


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """From its call on, pools of new clients fail so; they are started again soon."""

    def failing(*errors: Exception | int | None) -> Path:
        starts = tmp_path / "starts"
        prepare = functools.partial(pool_models.fail_in_turn, starts, errors)
        monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", prepare)
        return starts

    monkeypatch.setattr(times, "failing", 0.0)
    monkeypatch.setattr(times, "between_failures", 0.01)
    return failing


IS_AWAY = ConnectionError("no cluster\n  at all")
Failing = Callable[..., Path]


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ([ValueError("no address")], "has ended before it could serve; ValueError: no address$"),
        ([IS_AWAY] * 3, "has ended 3 times .*; ConnectionError: no cluster at all$"),
    ],
)
def test_a_pool_that_cannot_serve_is_told_with_its_reason(
    shared: Shared, failing: Failing, errors: list[Exception], says: str
) -> None:
    failing(*errors)
    streamer = shared(models.double, shared="a")
    with pytest.raises(StreamerBroken, match=says):
        streamer.predict([1])
    assert streamer.predict([2]) == [4]


@pytest.mark.long
def test_a_pool_that_can_serve_no_more_is_not_told_with_the_reason_of_another(
    shared: Shared, failing: Failing
) -> None:
    failing(IS_AWAY, IS_AWAY, None, IS_AWAY, *[3] * 4)
    streamer = shared(models.double, shared="a")
    assert streamer.predict([1]) == [2], "it waits a little for the other side"
    os.kill(pool_pid(), signal.SIGKILL)
    says = "has ended 5 times before it could serve; its log says why"
    with pytest.raises(StreamerBroken, match=says):
        streamer.predict([1])
    assert streamer.predict([2]) == [4]


def test_pools_that_are_killed_at_their_start_are_replaced(
    shared: Shared, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "failing", 300.0)
    starts = failing(*[3] * 5)
    assert shared(models.double, shared="a").predict([1]) == [2]
    assert starts.stat().st_size == 6


# -- streams


FOR_EVER = 10**9


def test_a_stream_begins_again_with_the_next_pool_if_no_output_has_come_and_fails_otherwise(
    shared: Shared,
) -> None:
    streamer = shared(Resumed, 4, shared="a")
    quiet = streamer.stream({"n": 3, "every": FOR_EVER}, timeout=None)
    begun, left, late = (
        streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=4) for _ in range(3)
    )
    assert next(begun) == next(left) == next(late) == 1
    streamer.wait_ready()
    pid = pool_pid()
    os.kill(pid, signal.SIGSTOP)  # what is said to it now it never reads
    left.close()
    os.kill(pid, signal.SIGKILL)
    assert [*quiet] == []
    with pytest.raises(WorkerLost, match="outputs of it were handed out"):
        list(begun)
    late.close()
    assert streamer.stats().in_flight == 0


# -- large items and results, and what is left of them


MB = 1 << 20


def filled(value: int, size: int = 100_000) -> Any:
    return np.full(size, value, "u1")


def memories(pid: int) -> int:
    """How many memories of ours a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:service_streamer")


def touched(pid: int) -> int:
    """How much of them it has ever looked at, kB."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.findall(r"memfd:service_streamer.*?\nRss: +(\d+) kB", text, re.DOTALL)
    assert found
    return sum(map(int, found))


def worker_pids(streamer: Streamer) -> list[int]:
    return [pid for pid in streamer.predict([None]) if pid is not None]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_the_pool_does_not_touch_the_data(shared: Shared) -> None:
    streamers = [shared(echo_or_pid, shared="a") for _ in range(2)]
    for n in range(20):
        for streamer in streamers:
            item = filled(n, MB)
            assert (streamer.predict([item])[0] == item).all()
    assert touched(pool_pid()) == 0


CLIENT = """
    import os, sys
    import numpy as np
    from service_streamer import Streamer
    from pool_models import echo_or_pid

    if __name__ == "__main__":
        streamer = Streamer(echo_or_pid, shared="a", linger=0)
        kept = streamer.predict([np.full(1 << 20, n, "u1") for n in range(4)])
        print("ready", flush=True)
        sys.stdin.readline()
"""


def test_results_are_kept_when_their_streamer_is_closed_and_the_pool_goes_on(
    shared: Shared,
) -> None:
    streamer = shared(echo_or_pid, shared="a")
    streamer.wait_ready()
    pid = pool_pid()
    streamer.predict([filled(1)])  # after the question, whose connection is closed by now
    before = open_files(pid)
    leaving = shared(echo_or_pid, shared="a")
    kept = leaving.predict([filled(7)])
    leaving.close()
    for n in range(20):
        streamer.predict([filled(n)])
    assert (kept[0] == 7).all()
    assert open_files(pid) > before, "it waits for them"
    kept.clear()
    await_that(lambda: open_files(pid) == before)


def test_nothing_of_a_client_that_was_killed_is_left(shared: Shared, tmp_path: Path) -> None:
    streamer = shared(echo_or_pid, shared="a")
    (worker,) = worker_pids(streamer)
    pid = pool_pid()
    streamer.predict([filled(1)])  # after the question, whose connection is closed by now

    def state() -> tuple[int, ...]:
        return memories(worker), open_files(worker), memories(pid), open_files(pid)

    before = state()
    for _ in range(3):
        with running(CLIENT, tmp_path) as client:
            await_line(client, "ready")
            assert (memories(worker), memories(pid)) == (before[0] + 1, before[2])
            client.kill()
        await_that(lambda: state() == before)
    assert (streamer.predict([filled(2)])[0] == 2).all()


def test_the_memory_of_a_dead_worker_is_unmapped(shared: Shared) -> None:
    streamer = shared(echo_or_pid, shared="a")
    gc.collect()  # what earlier tests have left is unmapped now, and not in the midst
    before = memories(os.getpid())
    for n in range(3):
        (kept,) = streamer.predict([filled(n)])
        assert memories(os.getpid()) == before + 1
        (worker,) = worker_pids(streamer)
        os.kill(worker, signal.SIGKILL)
        await_that(lambda dead=worker: worker_pids(streamer) != [dead])
        assert (kept == n).all()
        del kept
        streamer.predict([n])  # tells the pool what was read
        streamer.predict([n])
        await_that(lambda: memories(os.getpid()) == before)


# -- told to end by a signal, as by systemd, while clients still call


def has_its_name(name: str, pid: int) -> bool:
    try:
        return pool_pid(name) == pid
    except (OSError, EOFError):
        return False


def test_a_service_that_is_told_to_end_finishes_what_it_has(shared: Shared) -> None:
    streamer = shared(Countdown, 4, shared="a", retry=False, linger=60)
    stream = streamer.stream(500, timeout=None, max_buffered=16)
    assert next(stream) == 1
    pid = pool_pid("a")
    with Watch({pid, *descendants(pid)}) as family:
        os.killpg(os.getpgid(pid), signal.SIGTERM)  # its workers get it, too
        await_that(lambda: not has_its_name("a", pid))
        assert [*stream] == [*range(2, 501)]
        assert [*streamer.stream(3)] == [1, 2, 3]  # its requests may need more
        assert streamer.pool_client.pool_pid == pid  # type: ignore[union-attr]
        other = shared(models.double, shared="a")  # of the service's next processes
        assert other.predict([1]) == [2]
        assert pool_pid("a") != pid
        streamer.close()
        assert family.alive_after(GONE) == []  # at once, though it was to linger
    assert other.predict([2]) == [4]


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_pool_at_once(shared: Shared, gate: Gate, last: int) -> None:
    streamer = shared(models.gated(gate), shared="a")
    future = streamer.submit([1])
    gate.await_arrival()
    pid = pool_pid("a")
    os.kill(pid, signal.SIGTERM)
    await_that(lambda: not has_its_name("a", pid))
    assert not future.done()
    os.kill(pid, last)
    assert isinstance(future.exception(), StreamerClosed)
    assert await_end(pid, GONE)


def test_a_pool_ends_if_its_only_client_has_ended_before_it_began(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "may begin"
    os.mkfifo(path)
    # It begins late, as on a host that is busy; and would wait for its first client for ever.
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", path.read_bytes)
    monkeypatch.setattr(times, "first_client", 1e6)
    monkeypatch.setattr(times, "visit", 0.01)  # it does not answer before it begins
    streamer = shared(models.double, shared="a")
    await_that(lambda: pool_names() == ["a"])
    streamer.close()
    path.write_text("now")
    until(lambda: not pool_names())


def test_a_call_without_end_does_not_keep_a_pool(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "term_grace", 0.01)
    monkeypatch.setattr(times, "term_drain", 0.01)
    streamer = shared(Countdown, 4, shared="a")
    stream = streamer.stream(10**9, timeout=None)
    assert next(stream) == 1
    pid = pool_pid("a")
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(StreamerClosed):
        for _ in stream:
            pass
    assert await_end(pid, GONE)
