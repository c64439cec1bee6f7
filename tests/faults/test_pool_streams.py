"""Streams of a shared pool whose process is killed: the next pool goes on where they ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from pool_models import LargeOutputs, large_output

from conftest import await_that
from pools import await_end, connected, pool_pid
from service_streamer import Streamer, WorkerLost
from service_streamer.pool.pool_protocol import pack
from stream_models import Countdown, Resumed

Shared = Callable[..., Streamer]

FOR_EVER = 10**9


def kill_pool(streamer: Streamer) -> None:
    streamer.wait_ready()  # what has come may have been enough until here
    pid = pool_pid()
    os.kill(pid, signal.SIGKILL)
    assert await_end(pid, 60)


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
    streamer = shared(LargeOutputs, 4, shared="a")
    stream = streamer.stream({"n": 12, "item": bytearray(100_000)}, max_buffered=4)
    got = [next(stream) for _ in range(5)]
    kill_pool(streamer)
    got += [next(stream) for _ in range(2)]
    kill_pool(streamer)
    got += stream
    assert got == [large_output(made) for made in range(1, 13)]


def test_streams_are_held_and_closed_without_a_pool(shared: Shared) -> None:
    streamer = shared(Resumed, 4, shared="a")
    resting, left, late = (
        streamer.stream({"n": FOR_EVER}, timeout=None, max_buffered=4) for _ in range(3)
    )
    got = [next(resting)]
    assert next(left) == next(late) == 1
    pid = pool_pid()
    os.kill(pid, signal.SIGSTOP)  # what is said to it now it never reads
    left.close()
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: streamer.stats().in_flight == 2)
    late.close()
    await_that(lambda: streamer.stats().in_flight == 1)
    got += [next(resting) for _ in range(1000)]
    assert got == [*range(1, 1002)]
    resting.close()
    await_that(lambda: streamer.stats().in_flight == 0)


def test_a_stream_of_which_no_output_has_come_begins_again(shared: Shared) -> None:
    streamer = shared(Countdown, 4, shared="a")
    quiet = streamer.stream({"n": 3, "every": FOR_EVER}, timeout=None)
    kill_pool(streamer)
    assert [*quiet] == []


def test_a_pool_whose_model_has_no_resume_cannot_go_on_with_a_stream(shared: Shared) -> None:
    shared(Countdown, 4, shared="a").wait_ready()
    with connected("a") as peer:
        peer.send((1, [pack(10)], None, None, None, [pack(1)]))
        failure = peer.receive_kind(1)[1]
    assert isinstance(failure.exception(), WorkerLost)
    assert "the model has no resume" in failure.text
