"""What could lose a call or leave something behind, with workers of any kind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import models
from service_streamer import ModelError, Streamer
from service_streamer.testing import Gate

Build = Callable[..., Any]


class Keyed:
    """A sequence with keys of its own, as a pandas Series is."""

    def __init__(self, **items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        return iter(self.items.values())

    def __getitem__(self, key: str) -> Any:
        return self.items[key]


class Hazards:
    def test_odd_exceptions_of_the_model_reach_their_callers(self, build: Build) -> None:
        streamer = build(models.misbehave)
        # It does not unpickle, so a ModelError replaces it when it comes from a process.
        with pytest.raises((models.FrozenError, ModelError), match="3"):
            streamer.predict(["raise frozen"])
        with pytest.raises(models.WordedError) as worded:
            streamer.predict(["raise worded"])
        assert str(worded.value) == "error 5", "as it was, and not worded again for each crossing"
        with pytest.raises(StopIteration):
            streamer.predict(["raise stop"])
        assert streamer.predict(["fine"]) == ["fine"]

    def test_apredict_raises_runtime_error_when_the_model_raises_stop_iteration(
        self, build: Build
    ) -> None:
        streamer = build(models.misbehave)

        async def main() -> list[Any]:
            calls = [streamer.apredict([item]) for item in ("raise stop", "fine")]
            return await asyncio.gather(*calls, return_exceptions=True)

        first, second = asyncio.run(main())
        assert isinstance(first, RuntimeError)
        assert "StopIteration" in str(first)
        assert second == ["fine"] or isinstance(second, RuntimeError), "they may share the batch"

    def test_a_batch_is_read_in_its_order_whatever_its_keys(self, build: Build) -> None:
        streamer = build(models.double)
        assert streamer.predict(Keyed(seven=1)) == [2]  # type: ignore[arg-type]
        assert streamer.predict(Keyed(seven=1, nine=2)) == [2, 4]  # type: ignore[arg-type]

    def test_a_closed_loop_is_not_kept(self, build: Build) -> None:
        streamer = build(models.echo)
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(streamer.apredict([1])) == [1]
        streamer.predict([1])  # the threads have let go of the former call by now
        reference = weakref.ref(loop)
        loop.close()
        del loop
        gc.collect()
        assert reference() is None

    def test_streamer_takes_a_timeout_of_a_year(self, build: Build) -> None:
        streamer = build(models.echo, worker_timeout=3e7)
        assert streamer.predict([1]) == [1]
        future = streamer.submit([2])
        streamer.close(timeout=3e7)
        assert future.result() == [2]

    def test_a_future_s_error_is_the_same_each_time(self, build: Build) -> None:
        future = build(models.misbehave).submit(["raise"])
        assert future.exception() is future.exception()
        with pytest.raises(models.DetailedError) as caught:
            future.result()
        assert caught.value is future.exception()

    def test_wait_returns_when_a_call_fails(self, build: Build, gate: Gate) -> None:
        with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
            never = streamer.submit([1])
            gate.await_arrival()
            failed = build(models.misbehave).submit(["raise"])
            done, _ = concurrent.futures.wait(
                [never, failed], return_when=concurrent.futures.FIRST_EXCEPTION
            )
            assert done == {failed}
            gate.let_through()
