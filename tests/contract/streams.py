"""Outputs as they come, with workers of any kind."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import models
from service_streamer import InvalidInput, StreamerForked
from stream_models import Countdown, Summed

Build = Callable[..., Any]


class Stops(Countdown):
    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        raise StopIteration("of the model")


def kept() -> int:
    """Calls and streams that there are, in any state."""
    gc.collect()
    names = {"Call", "RemoteCall", "Stream", "ThreadOutputs"}
    return sum(type(each).__qualname__ in names for each in gc.get_objects())


class Counts:
    @pytest.fixture
    def build(self, build: Build) -> Build:
        """Builds a streamer of ``Countdown`` with eight slots, unless a test says otherwise."""

        def make(model: Any = Countdown, **options: Any) -> Any:
            return build(model, **{"batch_size": 8, **options})

        return make


class Streams(Counts):
    has_timings = True

    def test_outputs_come_one_by_one_to_a_thread(self, build: Build) -> None:
        streamer = build()
        with streamer.stream(10**9) as endless:
            assert next(endless) == 1
            assert endless.timing is None
        assert next(endless, None) is None, "it was closed"
        stream = streamer.stream(300)
        assert [*stream] == [*range(1, 301)]
        assert [*stream] == []
        if self.has_timings:
            timing: Any = stream.timing
            assert timing.first_output > 0
            assert 0 <= timing.between_outputs <= timing.longest_between

    def test_outputs_come_one_by_one_to_a_task(self, build: Build) -> None:
        streamer = build()

        async def consume(n: int) -> list[int]:
            return [output async for output in streamer.astream(n)]

        async def main() -> list[list[int]]:
            return await asyncio.gather(*map(consume, range(1, 12)))

        assert asyncio.run(main()) == [[*range(1, n + 1)] for n in range(1, 12)]

    def test_predict_and_submit_get_all_outputs_joined(self, build: Build) -> None:
        assert build().predict([2, 3]) == [[1, 2], [1, 2, 3]]
        summed = build(Summed)
        assert summed.predict([3, 4]) == [6, 10]
        future = summed.submit([5])
        assert future.result() == [15]
        if self.has_timings:
            timing: Any = future.timing
            assert 0 < timing.first_output <= timing.total
            assert 0 < timing.longest_between <= timing.computed
        assert [*summed.stream(3)] == [1, 2, 3], "a stream is not joined"

    def test_stream_that_raises_fails_alone_after_its_outputs(self, build: Build) -> None:
        streamer = build()
        bad = streamer.stream({"n": 5, "raise_at": 3})
        good = [streamer.stream(4) for _ in range(6)]
        assert (next(bad), next(bad)) == (1, 2)
        with pytest.raises(ValueError, match="cannot make 3"):
            next(bad)
        assert [*bad] == []
        assert all([*stream] == [1, 2, 3, 4] for stream in good)

    def test_stream_that_is_invalid_or_cannot_begin_fails_alone(self, build: Build) -> None:
        streamer = build()
        good = [streamer.stream(2) for _ in range(3)]
        with pytest.raises(InvalidInput, match=r"^too long$"):
            next(streamer.stream({"n": 1, "invalid": "too long"}))
        with pytest.raises(ValueError, match="cannot begin"):
            next(streamer.stream({"n": 1, "raise_at_start": True}))
        assert all([*stream] == [1, 2] for stream in good)

    def test_stream_is_paused_when_its_consumer_lags(self, build: Build) -> None:
        """If it did not, too many outputs would wait, and the stream would fail."""
        streamer = build(batch_size=2)
        slow = streamer.stream(10**6, max_buffered=64)
        for _ in range(3):
            assert len([*streamer.stream(400)]) == 400
        assert not slow._outputs.is_over
        assert [next(slow) for _ in range(500)] == [*range(1, 501)]
        slow.close()
        assert [*streamer.stream(1)] == [1]

    def test_streams_are_paused_when_they_fill_all_slots(self, build: Build) -> None:
        streamer = build(batch_size=2)
        slow = [streamer.stream(60, max_buffered=2) for _ in range(4)]
        got: list[list[int]] = [[] for _ in slow]
        for _ in range(60):
            for stream, outputs in zip(slow[:2], got, strict=False):
                outputs.append(next(stream))
        got[2], got[3] = [*slow[2]], [*slow[3]]
        assert got == [[*range(1, 61)]] * 4

    def test_many_streams_that_are_dropped_leave_nothing(self, build: Build) -> None:
        streamer = build()
        for number in range(120):  # in turn before an output, after one, and closed
            stream = streamer.stream(10**9, max_buffered=3)
            if number % 3:
                next(stream)
            if number % 3 == 2:
                stream.close()
            del stream
            if number == 59:
                before = kept()
        assert [*streamer.stream(2)] == [1, 2]
        stats = streamer.stats()
        assert stats.pending == 0
        assert stats.cancelled >= 80  # one that is dropped at once may not be sent at all
        assert kept() < before + 30

    def test_stream_is_refused_in_a_fork_and_continues_in_the_parent(self, build: Build) -> None:
        streamer = build()
        stream = streamer.stream(500, max_buffered=64)
        assert next(stream) == 1
        child = os.fork()
        if not child:
            refused = 0
            for _ in range(3):  # also those that have come already
                try:
                    next(stream)
                except StreamerForked:
                    refused += 1
            del stream
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert [*stream] == [*range(2, 501)]


class StreamForms(Counts):
    """What is done where outputs are read."""

    def test_a_model_without_steps_is_a_stream_of_one_output(self, build: Build) -> None:
        streamer = build(models.double)
        assert [*streamer.stream(4)] == [8]

        async def main() -> list[Any]:
            return [output async for output in streamer.astream(5)]

        assert asyncio.run(main()) == [10]

    def test_stream_leaves_out_outputs_that_are_none(self, build: Build) -> None:
        streamer = build()
        assert [*streamer.stream({"n": 6, "every": 3})] == [3, 6]
        assert streamer.predict([{"n": 6, "every": 2}]) == [[2, 4, 6]]
        assert [*streamer.stream({"n": 2, "every": 3})] == []

    def test_task_frees_its_slot_when_it_is_cancelled_and_its_exception_is_kept(
        self, build: Build
    ) -> None:
        """Its exception holds the frames of the task, and these hold the stream."""
        streamer = build(batch_size=1)
        streams: list[weakref.ref[Any]] = []

        async def consume(begun: asyncio.Event, limit: float | None = None) -> None:
            stream = streamer.astream(10**9)
            streams.append(weakref.ref(stream))
            async with asyncio.timeout(limit):
                await anext(stream)
                begun.set()
                async for _ in stream:
                    pass

        async def main() -> None:
            for _ in range(2):
                begun = asyncio.Event()
                task = asyncio.create_task(consume(begun))
                await begun.wait()
                task.cancel()
                (error,) = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(error, asyncio.CancelledError)
                assert streams[-1]() is not None
                assert [output async for output in streamer.astream(2)] == [1, 2]
            del error
            async for _ in streamer.astream(10**9):
                break  # who leaves frees the slot, too
            assert [output async for output in streamer.astream(2)] == [1, 2]

        asyncio.run(main())
        gc.collect()
        assert [stream() for stream in streams] == [None, None]

    def test_stream_refuses_max_buffered_of_zero(self, build: Build) -> None:
        streamer = build()
        with pytest.raises(ValueError, match="max_buffered"):
            streamer.stream(1, max_buffered=0)

    def test_close_drains_a_stream_that_its_own_thread_reads(self, build: Build) -> None:
        streamer = build()
        stream = streamer.stream(500, timeout=None, max_buffered=8)
        assert [next(stream) for _ in range(9)] == [*range(1, 10)]
        streamer.close()
        assert [*stream] == [*range(10, 501)]

    def test_threads_that_read_one_stream_get_each_output_once(self, build: Build) -> None:
        """Those that would wait beside another one are told; they ask again."""
        stream = build().stream(600, timeout=None, max_buffered=16)
        got: list[int] = []

        def read() -> None:
            while True:
                try:
                    got.extend(stream)
                    return
                except RuntimeError:
                    with stream._outputs.seat:  # until the other one has gone on
                        pass

        with ThreadPoolExecutor(3) as threads:
            for reading in [threads.submit(read) for _ in range(3)]:
                reading.result()
        assert sorted(got) == [*range(1, 601)]

    def test_stream_raises_runtime_error_when_the_model_raises_stop_iteration(
        self, build: Build
    ) -> None:
        streamer = build(Stops)
        with pytest.raises(RuntimeError, match="the model raised StopIteration") as caught:
            list(streamer.stream(1))
        assert isinstance(caught.value.__cause__, StopIteration)

        async def main() -> list[int]:
            return [output async for output in streamer.astream(1)]

        with pytest.raises(RuntimeError, match="the model raised StopIteration"):
            asyncio.run(main())
