"""Streams of a shared pool whose process is killed: the next pool goes on where they ended."""

from __future__ import annotations

import collections
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from conftest import await_that
from service_streamer import PredictTimeout, Streamer, WorkerLost
from service_streamer.pool.visits import ask_pool, await_end
from service_streamer.remote import open_calls
from service_streamer.testing import Gate
from stream_models import Countdown, Resumed

Shared = Callable[..., Streamer]

FOR_EVER = 10**9


def kill_pool(streamer: Streamer) -> None:
    streamer.wait_ready()  # what has come may have been enough until here
    pid: int = ask_pool("a", "status")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert await_end(pid, 60)


class Large(Resumed):
    """Its outputs are so large that they come through shared memory, all but every third."""

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        return [(large(made), is_last) for made, is_last in super().step(states)]

    def resume(self, item: dict[str, Any], outputs: list[Any]) -> dict[str, Any]:
        assert outputs == [large(made) for made in range(1, len(outputs) + 1)]
        outputs[0][0] += 1  # it may write there, too
        return {**item, "made": len(outputs)}


def large(made: int) -> bytearray:
    return bytearray(made.to_bytes(4, "little") * (25_000 if made % 3 else 2))


def test_streams_go_on_with_the_next_pool(shared: Shared) -> None:
    streamer = shared(Resumed, 4, shared="a")
    streams = [streamer.stream({"n": 600}, timeout=None, max_buffered=16) for _ in range(3)]
    got = [[next(stream)] for stream in streams]
    for wanted in (100, 200):
        for outputs, stream in zip(got, streams, strict=True):
            while len(outputs) < wanted:
                outputs.append(next(stream))
        kill_pool(streamer)
    for outputs, stream in zip(got, streams, strict=True):
        assert [*outputs, *stream] == [*range(1, 601)]
    assert [*streamer.stream({"n": 3})] == [1, 2, 3]


def test_outputs_in_shared_memory_go_to_the_next_pool(shared: Shared) -> None:
    streamer = shared(Large, 4, shared="a")
    stream = streamer.stream({"n": 12, "item": bytearray(100_000)}, max_buffered=4)
    got = [next(stream) for _ in range(5)]
    kill_pool(streamer)
    got += [next(stream) for _ in range(2)]
    kill_pool(streamer)
    got += stream
    assert got == [large(made) for made in range(1, 13)]


def test_who_rests_and_who_leaves_do_so_without_a_pool(shared: Shared) -> None:
    streamer = shared(Resumed, 4, shared="a")
    calls = streamer._backend._calls  # type: ignore[attr-defined]
    resting, left, late = (
        streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=4) for _ in range(3)
    )
    got = [next(resting)]
    assert next(left) == next(late) == 1
    await_that(lambda: len(calls.held()) == 3)
    pid: int = ask_pool("a", "status")["pid"]
    os.kill(pid, signal.SIGSTOP)  # what is said to it now it never reads
    left.close()
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: streamer.stats().in_flight == 2)
    late.close()
    await_that(lambda: streamer.stats().in_flight == 1)
    got += [next(resting) for _ in range(1000)]
    assert got == [*range(1, 1002)]
    await_that(lambda: len(calls.held()) == 1)
    resting.close()
    await_that(lambda: streamer.stats().in_flight == 0)


def test_time_ends_for_a_stream_that_has_gone_on(
    shared: Shared, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = shared(Resumed, 4, shared="a", model_init_args=(gate,))
    stream = streamer.stream({"n": FOR_EVER}, timeout=3000)
    gate.let_through(2)
    assert [next(stream), next(stream)] == [1, 2]
    for _ in range(3):
        gate.await_arrival()
    kill_pool(streamer)
    gate.await_arrival()  # with the next pool
    timer = streamer._backend._timer  # type: ignore[attr-defined]
    monkeypatch.setattr(timer, "_clock", lambda: time.monotonic() + 3600)
    timer.look()
    with pytest.raises(PredictTimeout):
        next(stream)
    await_that(lambda: not len(streamer._backend._calls))  # type: ignore[attr-defined]
    gate.let_through(1000)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (Countdown, {}, "handed out[;,] (and )?the model has no resume"),
        (Resumed, {"retry": False}, "retry is False"),
    ],
)
def test_streams_that_cannot_go_on_are_lost(
    shared: Shared, model: Any, options: dict[str, Any], why: str
) -> None:
    streamer = shared(model, 4, shared="a", **options)
    stream = streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=16)
    assert next(stream) == 1
    kill_pool(streamer)
    with pytest.raises(WorkerLost, match=why):
        collections.deque(stream, 0)
    assert [*streamer.stream({"n": 3})] == [1, 2, 3]


def test_a_stream_of_which_no_output_has_come_begins_again(shared: Shared) -> None:
    streamer = shared(Countdown, 4, shared="a")
    quiet = streamer.stream({"n": 3, "every": FOR_EVER}, timeout=None)
    kill_pool(streamer)
    assert [*quiet] == []


def test_the_next_pool_finds_out_if_the_model_has_no_resume(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = shared(Countdown, 4, shared="a")
    calls = streamer._backend._calls  # type: ignore[attr-defined]
    disconnected = calls.disconnected

    def disconnected_early(*, may_rerun: bool) -> Any:
        calls.resumes = None  # as if the pool had died before it could say so
        return disconnected(may_rerun=may_rerun)

    monkeypatch.setattr(calls, "disconnected", disconnected_early)
    calls.resumes = None
    stream = streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=16)
    assert next(stream) == 1
    kill_pool(streamer)
    with pytest.raises(WorkerLost, match="and the model has no resume"):
        collections.deque(stream, 0)


def test_streams_with_much_behind_them_are_lost(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_calls, "_MOST_KEPT", 30)
    streamer = shared(Resumed, 4, shared="a")
    stream = streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=16)
    assert next(stream) == 1
    await_that(lambda: len(streamer._backend._calls.held()) == 1)  # type: ignore[attr-defined]
    kill_pool(streamer)
    with pytest.raises(WorkerLost, match="handed out; they are too large to keep"):
        collections.deque(stream, 0)


@pytest.mark.long
def test_many_streams_outlive_pool_after_pool(shared: Shared) -> None:
    streamers = [shared(Resumed, 16, shared="a", worker_num=2) for _ in range(2)]
    got = dict.fromkeys(range(12), 0)
    wrong: list[Any] = []
    is_enough = threading.Event()

    def consume(which: int) -> None:
        with streamers[which % 2].stream({"n": FOR_EVER}, timeout=None) as stream:
            for number in stream:
                got[which] += 1
                if number != got[which]:
                    wrong.append((which, number))
                if is_enough.is_set():
                    return

    threads = [threading.Thread(target=consume, args=(which,)) for which in got]
    for thread in threads:
        thread.start()

    def await_progress() -> None:
        before = dict(got)
        await_that(lambda: all(got[which] > before[which] for which in got))

    for _ in range(5):
        await_progress()
        kill_pool(streamers[0])
    await_progress()
    is_enough.set()
    for thread in threads:
        thread.join()
    assert not wrong
