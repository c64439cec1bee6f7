"""``await streamer.apredict``: on real event loops, with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import models
from conftest import AnyStreamer
from contract.calls import AsyncCalls
from service_streamer import Streamer, ThreadedStreamer
from service_streamer.testing import Gate

Build = Callable[..., AnyStreamer]


class TestAsyncCalls(AsyncCalls):
    """With workers of every kind."""


def test_cancelling_the_task_withdraws_the_call(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        busy = streamer.submit([0])
        gate.await_arrival()

        async def main() -> None:
            task = asyncio.create_task(streamer.apredict([1]))
            await asyncio.sleep(0)
            assert "pending 1" in repr(streamer)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "pending 0" in repr(streamer)

        asyncio.run(main())
        gate.let_through()
        busy.result()


@pytest.mark.parametrize("kind", [Streamer, ThreadedStreamer])
def test_a_batch_that_nobody_waits_for_any_more_is_ended(kind: Any, gate: Gate) -> None:

    class Unending(models.Unending):
        """A thread is given no arguments."""

        def init_model(self) -> None:
            super().init_model(gate)

    of_kind = {Streamer: (models.Unending, {"model_init_args": (gate,)})}
    model, options = of_kind.get(kind, (Unending, {}))
    with kind(model, batch_size=2, **options) as streamer:

        async def main() -> None:
            tasks = [asyncio.create_task(streamer.apredict([item])) for item in (0, 1)]
            await asyncio.to_thread(gate.await_arrival)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert await streamer.apredict([2]) == [2]

        gate.let_through()
        asyncio.run(main())
        stats = streamer.stats()
        assert (stats.cancelled, stats.failed, stats.restarts) == (2, 0, 0)


def test_what_is_answered_from_the_cache_is_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wake a thread that has nothing to send."""
    flushes: list[None] = []
    with ThreadedStreamer(models.echo, cache_size=1) as streamer:
        flush = streamer.backend.flush
        monkeypatch.setattr(streamer.backend, "flush", lambda: flushes.append(flush()))
        for _ in range(2):
            assert asyncio.run(streamer.apredict([1])) == [1]
        assert len(flushes) == 1


def test_a_future_is_awaited_as_one_of_asyncio(gate: Gate) -> None:
    async def main(streamer: ThreadedStreamer) -> None:
        good, bad, late = (asyncio.wrap_future(streamer.submit([n])) for n in (1, 0, 2))
        late.cancel()
        gate.let_through(9)
        assert await good == [1.0]
        with pytest.raises(ZeroDivisionError):
            await bad
        assert late.cancelled()

    def predict(batch: list[int]) -> list[float]:
        gate.go_through()
        return [1 / item for item in batch]

    with ThreadedStreamer(predict, batch_size=1) as streamer:
        asyncio.run(main(streamer))


def test_a_batch_s_results_cross_into_the_loop_at_once(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:

        async def main() -> int:
            loop = asyncio.get_running_loop()
            crossings: list[Any] = []
            call_soon = loop.call_soon_threadsafe
            tasks = [asyncio.create_task(streamer.apredict([0]))]
            await asyncio.sleep(0)
            await asyncio.to_thread(gate.await_arrival)
            tasks += [asyncio.create_task(streamer.apredict([i])) for i in range(64)]
            await asyncio.sleep(0)

            def count(callback: Any, *args: Any, **kwargs: Any) -> Any:
                crossings.append(callback)
                return call_soon(callback, *args, **kwargs)

            loop.call_soon_threadsafe = count  # type: ignore[method-assign]
            last = streamer.submit([0])
            gate.let_through(3)
            # The loop is busy until all the others are answered, so it takes nothing up meanwhile.
            assert last.result() == [1]
            assert await asyncio.gather(*tasks) == [[1]] + [[64]] * 64
            return len(crossings)

        assert asyncio.run(main()) == 1
