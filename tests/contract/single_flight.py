"""Calls that share computations, and the cache, with workers of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

import models
from conftest import AnyStreamer
from service_streamer import Future, ManagedModel, StreamerClosed
from service_streamer.testing import Gate

Build = Callable[..., Any]


class Counting(ManagedModel):
    """Waits at a gate, and tells each item how many of its kind were computed in this worker."""

    def init_model(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.counts: dict[str, int] = {}

    def predict(self, batch: list[Any]) -> list[Any]:
        if self.gate is not None:
            self.gate.go_through()
        if "bad" in batch:
            raise ValueError("bad item")
        outputs = []
        for item in batch:
            self.counts[item] = self.counts.get(item, 0) + 1
            outputs.append([item, self.counts[item]])
        return outputs


def results(futures: list[Future]) -> list[Any]:
    return [future.result() for future in futures]


class Counted:
    @pytest.fixture
    def counting(self, kind: str, build: Build) -> Callable[..., AnyStreamer]:
        """A streamer of the kind for the model above."""

        def make(gate: Gate | None = None, **options: Any) -> AnyStreamer:
            if kind == "thread":
                model = Counting()
                model.init_model(gate)
                return build(model.predict, **options)
            return build(Counting, model_init_args=(gate,), **options)

        return make


class SharedComputations(Counted):
    def test_items_in_flight_are_computed_once(self, counting: Build, gate: Gate) -> None:
        streamer = counting(gate, deduplicate=True)
        first = streamer.submit(["a", "b", "a"])
        gate.await_arrival()
        others = [streamer.submit(["b", "a"]) for _ in range(3)]
        gate.let_through()
        assert first.result() == [["a", 1], ["b", 1], ["a", 1]]
        assert results(others) == [[["b", 1], ["a", 1]]] * 3
        assert streamer.stats().deduplicated == 7
        assert "deduplicated 7" in repr(streamer)
        assert "deduplicated 7" in streamer.stats().gist
        gate.let_through()
        assert streamer.predict(["a"]) == [["a", 2]], "it is not in flight any more"

    def test_results_are_kept_in_a_cache(self, counting: Build) -> None:
        streamer = counting(cache_size=2)
        assert streamer.predict(["a"]) == [["a", 1]]
        assert streamer.predict(["a", "b"]) == [["a", 1], ["b", 1]]
        assert streamer.submit(["a"]).done(), "it is answered at once"
        assert streamer.stats().cached == 2
        assert streamer.predict(["c", "b"]) == [["c", 1], ["b", 1]]
        assert streamer.predict(["a"]) == [["a", 2]], "it was the oldest of three"
        streamer.clear_cache()
        assert streamer.predict(["b"]) == [["b", 2]]

    def test_failure_reaches_all_its_calls_and_is_not_cached(
        self, counting: Build, gate: Gate
    ) -> None:
        streamer = counting(gate, cache_size=9)
        first = streamer.submit(["bad"])
        gate.await_arrival()
        second = streamer.submit(["bad"])
        gate.let_through(9)
        errors = [first.exception(), second.exception()]
        assert [type(error) for error in errors] == [ValueError, ValueError]
        assert errors[0] is not errors[1], "or the tracebacks of callers would mix"
        with pytest.raises(ValueError, match="bad item"):
            streamer.predict(["bad"])
        assert streamer.stats().cached == 0

    def test_many_threads_get_their_own_results(self, build: Build) -> None:
        streamer = build(models.double, deduplicate=True, cache_size=20)

        def call(seed: int) -> None:
            for i in range(40):
                items = [(seed * i + k) % 37 for k in range(3)]
                assert streamer.predict(items) == [2 * item for item in items]

        with ThreadPoolExecutor(16) as threads:
            for calls in [threads.submit(call, seed) for seed in range(1, 17)]:
                calls.result()
        assert not streamer.backend.computations


class CallsThatShare(Counted):
    """What the client decides. That of Redis does not extend calls as an engine does."""

    def test_every_item_is_computed_when_deduplicate_is_off(
        self, counting: Build, gate: Gate
    ) -> None:
        streamer = counting(gate)
        futures = [streamer.submit(["a", "a"])]
        gate.await_arrival()
        futures.append(streamer.submit(["a"]))
        gate.let_through(2)
        assert results(futures) == [[["a", 1], ["a", 2]], [["a", 3]]]
        assert streamer.stats().deduplicated == 0

    def test_other_calls_are_answered_when_the_first_is_cancelled(
        self, counting: Build, gate: Gate
    ) -> None:
        streamer = counting(gate, deduplicate=True)
        blocker = streamer.submit(["blocker"])
        gate.await_arrival()
        first, second = streamer.submit(["a"]), streamer.submit(["a"])
        assert not second.running()
        assert first.cancel()
        third = streamer.submit(["a"])
        gate.let_through(9)
        assert results([blocker, second, third]) == [[["blocker", 1]], [["a", 1]], [["a", 1]]]
        with pytest.raises(CancelledError):
            first.result()

    def test_predict_does_not_wait_for_the_loop_that_it_blocks(self, build: Build) -> None:
        """The first call is made in this pass of the loop, and the second one shares it."""
        streamer = build(models.double, deduplicate=True)

        async def main() -> None:
            call = asyncio.ensure_future(streamer.apredict([1], timeout=None))
            await asyncio.sleep(0)
            assert streamer.predict([1], timeout=None) == [2]
            assert await call == [2]

        asyncio.run(main())

    def test_thread_does_not_wait_for_a_loop_that_has_nothing_to_flush_yet(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        streamer = build(models.double, deduplicate=True)
        inner = streamer.backend._inner
        submit, others = inner.submit, []

        def boarded_meanwhile(*args: Any, **kwargs: Any) -> None:
            if not others:
                others.append(streamer.submit([1]))  # another thread's, as it were
            submit(*args, **kwargs)

        monkeypatch.setattr(inner, "submit", boarded_meanwhile)

        async def main() -> None:
            call = asyncio.ensure_future(streamer.apredict([1], timeout=None))
            await asyncio.sleep(0)
            assert others[0].result(timeout=240) == [2]
            assert await call == [2]

        asyncio.run(main())

    def test_close_ends_all_calls_that_share_an_item(self, counting: Build, gate: Gate) -> None:
        streamer = counting(gate, cache_size=5)
        futures = [streamer.submit(["a", item], timeout=1e6) for item in "abc"]
        gate.await_arrival()
        streamer.close(drain=False)
        for future in futures:
            with pytest.raises(StreamerClosed):
                future.result()
        with pytest.raises(StreamerClosed):
            streamer.predict(["a"])
        gate.let_through(9)

    def test_options_of_sharing_are_checked(self, build: Build) -> None:
        for options, error, text in (
            ({"deduplicate": 1}, TypeError, "deduplicate must be True or False"),
            ({"cache_size": -1}, ValueError, "cache_size must be a whole number of at least 0"),
            ({"cache_size": 1.5}, TypeError, "cache_size must be a whole number"),
            ({"cache_size": 1, "cache_ttl": 0}, ValueError, "cache_ttl must be a number of secon"),
            ({"cache_ttl": 1}, ValueError, "cache_ttl is of no use without a cache"),
        ):
            with pytest.raises(error, match=text):
                build(models.echo, **options)
