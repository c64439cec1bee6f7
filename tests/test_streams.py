"""Streams end to end: outputs as they come, whoever asks for them, and what becomes of faults."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cases import long_cases
from conftest import await_that
from contract.streams import StreamForms, Streams
from service_streamer import (
    AsyncStream,
    ModelError,
    Overloaded,
    PredictTimeout,
    Stream,
    Streamer,
    StreamerError,
    ThreadedStreamer,
    WorkerLost,
)
from service_streamer.testing import Gate
from stream_models import Countdown, Resumed
from walk.world import World

Build = Callable[..., Any]


def gated(gate: Gate) -> type[Countdown]:
    """For a ThreadedStreamer, whose models have no init arguments."""

    class Gated(Countdown):
        def init_model(self) -> None:  # type: ignore[override]
            super().init_model(gate)

    return Gated


class TestStreams(Streams):
    @pytest.fixture(params=["thread", "process", *long_cases("shared")])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        """test_redis_streams.py has those over Redis."""
        return request.param


class TestStreamForms(StreamForms):
    @pytest.fixture
    def kind(self) -> str:
        return "thread"

    def test_stream_that_the_garbage_collector_ends_does_not_interrupt_the_engine(
        self, build: Build
    ) -> None:
        """It may run in any thread, in the middle of a change of what the engine holds."""
        streamer = build(batch_size=1)
        engine = streamer.engine
        stream = streamer.stream(10**9)
        next(stream)
        with engine.lock:
            del stream
            gc.collect()
        assert [*streamer.stream(2)] == [1, 2]
        assert streamer.stats().cancelled == 1


def outputs_of(stream: Stream | AsyncStream) -> Any:
    """What its consumer waits for."""
    return stream._outputs


def whole(stream: Stream, gate: Gate) -> list[int]:
    """All outputs of a stream that begins when the one before it has gone.

    It steps until its worker is told, which may be late: so the gate lets through what it takes.
    """
    await_that(lambda: gate.let_through() or outputs_of(stream).is_over)
    return [*stream]


@pytest.mark.parametrize("how", ["wait_for", "timeout", "default", "task"])
def test_a_wait_that_is_cancelled_leaves_the_stream_open(gate: Gate, how: str) -> None:
    """Who sends something to a client now and then, while no output comes, waits like that."""

    async def wait(stream: AsyncStream) -> Any:
        if how == "wait_for":
            return await asyncio.wait_for(anext(stream), 0)
        if how == "timeout":
            async with asyncio.timeout(0):
                return await anext(stream)
        task = asyncio.ensure_future(anext(stream, None) if how == "default" else anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    async def consume(streamer: ThreadedStreamer) -> list[int]:
        stream = streamer.astream(2)
        for output in (1, 2):
            for _ in range(2):
                with pytest.raises((TimeoutError, asyncio.CancelledError)):
                    await wait(stream)
            gate.let_through(1)
            assert await anext(stream) == output
        assert [output async for output in stream] == []
        forgotten = streamer.astream(10**9)  # and who has waited like that and goes frees the place
        gate.let_through(1)
        await anext(forgotten)
        with pytest.raises((TimeoutError, asyncio.CancelledError)):
            await wait(forgotten)
        del forgotten
        await asyncio.sleep(0)  # until then asyncio keeps what was raised
        gc.collect()
        gate.let_through(3)
        return [output async for output in streamer.astream(2)]

    with ThreadedStreamer(gated(gate), batch_size=1) as streamer:
        assert asyncio.run(consume(streamer)) == [1, 2]


def test_a_task_keeps_nothing_of_the_streams_that_it_has_left(gate: Gate) -> None:
    callbacks: list[Any] = []

    class Task(asyncio.Task[Any]):
        def add_done_callback(self, callback: Any, **options: Any) -> None:
            callbacks.append(callback)
            super().add_done_callback(callback, **options)

    async def main(streamer: ThreadedStreamer) -> None:
        asyncio.get_running_loop().set_task_factory(lambda loop, coro: Task(coro, loop=loop))
        await asyncio.create_task(leave_some(streamer))

    async def leave_some(streamer: ThreadedStreamer) -> None:
        callbacks.clear()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0), streamer.astream(1) as stream:
                    await anext(stream)
        assert len(callbacks) == 1

    with ThreadedStreamer(gated(gate)) as streamer:
        asyncio.run(main(streamer))
        gate.let_through(9)


@pytest.mark.parametrize("how", ["helper", "restarted"])
def test_a_stream_whose_task_was_cancelled_does_not_look_whole_to_another(
    gate: Gate, how: str
) -> None:
    """``wait_for`` of Python 3.11 makes a task of a coroutine; or a reader is started again."""

    async def read(stream: AsyncStream, outputs: list[int]) -> None:
        while True:
            outputs.append(await anext(stream))

    async def consume(streamer: ThreadedStreamer) -> None:
        stream = streamer.astream(10**9)
        gate.let_through(1)
        outputs = [await anext(stream)]
        task = asyncio.create_task(read(stream, outputs))
        await asyncio.sleep(0)  # it waits
        if how == "helper":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0)
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(2):
            with pytest.raises(StreamerError, match="was cancelled and has ended"):
                await read(stream, outputs)
        assert outputs == [1]
        assert outputs_of(stream).cancelled_in is None, "a cycle, by the frames of the task"
        gate.let_through(3)
        assert [output async for output in streamer.astream(2)] == [1, 2], "the place is free"

    with ThreadedStreamer(gated(gate), batch_size=1) as streamer:
        asyncio.run(consume(streamer))


def test_a_task_that_waits_again_may_hand_the_stream_on(gate: Gate) -> None:
    async def first(stream: AsyncStream) -> AsyncStream:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(stream)
        gate.let_through(1)
        await anext(stream)
        return stream

    async def main(streamer: ThreadedStreamer) -> list[int]:
        stream = await asyncio.create_task(first(streamer.astream(3)))
        gate.let_through(2)
        return [output async for output in stream]

    with ThreadedStreamer(gated(gate)) as streamer:
        assert asyncio.run(main(streamer)) == [2, 3]


def test_a_thread_whose_wait_is_interrupted_goes_on_unless_it_ends(gate: Gate) -> None:
    class Interrupt(BaseException):
        """As gevent's Timeout is."""

    class GreenletExit(BaseException):
        """As gevent's of that name."""

    def interrupted_by(kind: type[BaseException], stream: Stream) -> None:
        def interrupt(*_: object) -> None:
            raise kind

        def send() -> None:
            while not outputs_of(stream).seat.locked():
                os.sched_yield()
            signal.pthread_kill(main, signal.SIGUSR1)

        main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, interrupt)
        thread = threading.Thread(target=send)
        thread.start()
        try:
            with pytest.raises(kind):
                next(stream)
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    with ThreadedStreamer(gated(gate), batch_size=1) as streamer:
        stream = streamer.stream(2)
        interrupted_by(Interrupt, stream)
        gate.let_through(2)
        assert [*stream] == [1, 2]
        for _ in range(2):
            gate.await_arrival()
        for kind in (KeyboardInterrupt, SystemExit, GreenletExit):
            ended = streamer.stream(10**9)
            gate.await_arrival()  # so that it takes one of the permits, and leaves none behind
            interrupted_by(kind, ended)
            gate.let_through(3)
            assert [*streamer.stream(2)] == [1, 2]
            for _ in range(2):
                gate.await_arrival()
            for _ in range(2):  # what has come does not look whole
                with pytest.raises(StreamerError, match=f"{kind.__name__} interrupted"):
                    next(ended)


def test_when_the_time_ends_a_stream_fails_after_what_has_come(gate: Gate) -> None:
    with ThreadedStreamer(gated(gate), batch_size=1) as streamer:
        stream = streamer.stream(10**9, timeout=1000)
        gate.let_through(1)
        assert next(stream) == 1
        core = streamer.engine
        with core.lock:
            core.clock = lambda: time.monotonic() + 1000
        streamer.engine.transport.wakeup()
        with pytest.raises(PredictTimeout):
            next(stream)
        assert whole(streamer.stream(2), gate) == [1, 2]


def test_an_output_that_cannot_be_sent_ends_its_stream_alone() -> None:
    with Streamer(Countdown, batch_size=4) as streamer:
        good = streamer.stream(5)
        bad = streamer.stream({"n": 5, "unsendable_at": 2})
        assert next(bad) == 1
        with pytest.raises(ModelError, match="cannot be sent from the worker"):
            next(bad)
        assert [*good] == [1, 2, 3, 4, 5]
        with pytest.raises(ModelError, match="cannot be sent from the worker"):
            streamer.predict([{"n": 5, "unsendable_at": 2}])
        assert [*streamer.stream(1)] == [1]


def test_what_a_dead_worker_had_begins_again_unless_outputs_were_handed_out(gate: Gate) -> None:
    with Streamer(Countdown, batch_size=8, model_init_args=[gate]) as streamer:
        handed = streamer.stream(10**9)
        gate.let_through(1)
        assert next(handed) == 1
        killer = streamer.submit([{"n": 1, "kill_at": 1}])
        joined = streamer.submit([3])
        gate.let_through(100)
        with pytest.raises(WorkerLost):
            list(handed)
        assert joined.result() == [[1, 2, 3]]
        with pytest.raises(WorkerLost):
            killer.result()


@pytest.mark.long
def test_a_death_counts_against_each_of_very_many_items_that_ran() -> None:
    count = 520  # ids of 511 fit into a page of memory
    with Streamer(Countdown, batch_size=count, worker_timeout=None) as streamer:
        streamer.wait_ready()
        futures = [streamer.submit([8]) for _ in range(count - 1)]
        killer = streamer.submit([{"n": 8, "kill_at": 2}])
        assert all(future.exception() is None for future in futures)
        assert isinstance(killer.exception(), WorkerLost)
        assert streamer.stats().restarts == 3, "twice with all others, and once alone"


def test_a_stream_goes_on_with_another_worker_if_the_model_can_resume(gate: Gate) -> None:
    with Streamer(Resumed, batch_size=8, model_init_args=[gate]) as streamer:
        streams = [streamer.stream({"n": 6, "kill_at": 4 if number else 9}) for number in range(2)]
        gate.let_through(1000)
        assert [*streams[0]] == [1, 2, 3, 4, 5, 6]
        assert [next(streams[1]) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(WorkerLost):  # it kills each worker that goes on with it
            next(streams[1])


def test_a_consumer_that_lags_fails_alone_if_it_wants_to(gate: Gate) -> None:
    with ThreadedStreamer(gated(gate), batch_size=2) as streamer:
        slow = streamer.stream(1000, max_buffered=3, fails_behind=True)
        quick = streamer.stream(6)
        gate.let_through(1000)
        assert [*quick] == [1, 2, 3, 4, 5, 6]
        assert [next(slow) for _ in range(3)] == [1, 2, 3]
        with pytest.raises(Overloaded, match=r"^3 outputs of the stream wait"):
            next(slow)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_item_that_rests_does_not_keep_its_worker_from_being_replaced(overlap: bool) -> None:
    """Its outputs wait for the consumer, as far as these are not too many."""
    with Streamer(Countdown, batch_size=2) as streamer:
        slow = streamer.stream(600, timeout=None, max_buffered=8)
        endless = streamer.stream(10**9, timeout=None, max_buffered=8)
        for stream in (slow, endless):
            assert [next(stream) for _ in range(9)] == [*range(1, 10)]
        streamer.restart_workers(60, overlap=overlap)
        assert [*slow] == [*range(10, 601)]
        with pytest.raises(Overloaded, match="outputs of the stream wait for their consumer"):
            list(endless)
        assert [*streamer.stream(2)] == [1, 2]


def test_who_waits_for_an_output_goes_on_when_the_stream_is_closed(gate: Gate) -> None:
    with ThreadedStreamer(gated(gate)) as streamer:
        stream = streamer.stream(10**9)
        got: list[list[int]] = []
        thread = threading.Thread(target=lambda: got.append([*stream]))
        thread.start()
        while not outputs_of(stream).seat.locked():
            os.sched_yield()
        stream.close()
        thread.join()
        assert got == [[]]

        async def main() -> list[int]:
            stream = streamer.astream(10**9)

            async def consume() -> list[int]:
                return [output async for output in stream]

            task = asyncio.create_task(consume())
            while outputs_of(stream)._waiter is None:
                await asyncio.sleep(0)
            assert not stream.is_ready
            await stream.aclose()
            assert stream.is_ready
            return await task

        assert asyncio.run(main()) == []
        gate.let_through(10)


def test_two_that_wait_for_one_stream_are_told(gate: Gate) -> None:
    """Both could not be woken by one output."""
    with ThreadedStreamer(gated(gate)) as streamer:
        stream = streamer.stream(1)
        got: list[list[int]] = []
        thread = threading.Thread(target=lambda: got.append([*stream]))
        thread.start()
        while not outputs_of(stream).seat.locked():
            os.sched_yield()
        with pytest.raises(RuntimeError, match="another thread waits"):
            next(stream)
        gate.let_through(1)
        thread.join()
        assert got == [[1]]

        async def main() -> int:
            stream = streamer.astream(1)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task waits"):
                await anext(stream)
            gate.let_through(1)
            return await first

        assert asyncio.run(main()) == 1


def test_another_loop_is_refused_and_the_stream_stays_open(gate: Gate) -> None:
    async def main(streamer: ThreadedStreamer) -> list[int]:
        stream = streamer.astream(1)

        async def elsewhere() -> None:
            await anext(stream)

        with pytest.raises(RuntimeError, match="made in another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        gate.let_through(1)
        return [output async for output in stream]

    with ThreadedStreamer(gated(gate)) as streamer:
        assert asyncio.run(main(streamer)) == [1]


def test_an_item_rests_with_its_next_worker_too() -> None:
    """Which does not know of it: so if outputs come all the same, it is told again."""
    world = World(places=2, resumes=True, batch_size=2)
    world.do(("ready", 0))
    world.do(("stream", None, 0, "", 4))
    for _ in range(2):
        for _ in range(8):
            world.do(("step", 0, 0))
        assert world.resting
        world.do(("lose", 0, 0))
        assert not world.resting
        world.do(("ready", 0))
    world.finish()
    world.dispose()
