"""What workers measure: metrics, timings and ceilings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

import device_models
import models
from service_streamer import Histogram, ManagedModel
from service_streamer.testing import Gate

Build = Callable[..., Any]


def told(histogram: Histogram) -> dict[float, int]:
    """How many by the bound of their bucket, without the empty ones."""
    bounds = [*histogram.bounds, math.inf]
    return {
        bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count
    }  # fmt: skip


class Padded(ManagedModel):
    """Tells the padding of batches of texts, and what it is told to for "tell" items."""

    def init_model(self) -> None:
        self.padding = "longest"  # type: ignore[assignment]  # of a model that means another thing

    def predict(self, batch: list[Any]) -> list[Any]:
        if isinstance(batch[0], str):
            longest = max(map(len, batch))
            self.padding = 1 - sum(map(len, batch)) / (longest * len(batch))
        elif batch[0] is not Ellipsis:
            self.padding = batch[0]
        return batch


def bad(batch: list[Any]) -> list[Any]:
    raise ValueError("bad")


def keeps_busy(batch: list[float]) -> list[float]:
    until = time.monotonic() + max(batch)
    while time.monotonic() < until:
        pass
    return batch


class Figures:
    def test_metrics_have_the_padding_that_a_model_reports(self, build: Build) -> None:
        streamer = build(Padded)
        streamer.predict([...])
        assert streamer.metrics.padding.count == 0
        streamer.predict(["a", "abcd", "abcd"])
        streamer.predict(["abcd", "abcd"])
        padding = streamer.metrics.padding
        assert (told(padding), padding.total) == ({0: 1, 0.3: 1}, 0.25)
        for no_share in (1, True, 1.5, -0.5, math.nan, b"1.0", None, [0.5]):
            streamer.predict([no_share])
        assert streamer.metrics.padding.count == 2
        streamer.predict([1.0])
        assert streamer.metrics.padding.count == 3
        assert streamer.metrics.sizes.count == 12

    def test_the_metrics_of_a_streamer_are_a_copy(self, build: Build) -> None:
        streamer = build(models.echo, 4)
        before = streamer.metrics
        assert before.sizes.count == 0
        streamer.predict(list(range(4)))
        assert before.sizes.count == 0
        now = streamer.metrics
        assert told(now.sizes) == {4: 1}
        assert now.queued.count == now.inference.count == now.batch.count == 1
        assert 0 <= now.inference.total <= now.batch.total

    def test_metrics_count_a_batch_when_the_model_raised(self, build: Build) -> None:
        streamer = build(bad)
        with pytest.raises(ValueError, match="bad"):
            streamer.predict([1, 2])
        metrics = streamer.metrics
        assert told(metrics.sizes) == {2: 1}
        assert metrics.inference.total > 0
        stats = streamer.stats()
        assert (stats.accepted, stats.answered, stats.failed) == (1, 0, 1)
        assert "failed 1" in repr(streamer)

    @pytest.mark.parametrize("options", [{}, {"length": len}, {"length": "builtins:len"}])
    def test_many_short_items_are_computed_at_once_after_long_ones_ran_out(
        self, build: Build, options: dict[str, Any]
    ) -> None:
        streamer = build(device_models.Padding, batch_size=64, max_latency=5.0, **options)
        assert streamer.predict(["x" * 100] * 16) == [4] * 16
        assert streamer.stats().ceilings == {0: 400.0}
        assert max(streamer.predict(["x" * 5] * 64)) > 4
        assert "Set max_batch_cost to 400" in streamer.explain()

    def test_worker_finds_its_ceiling_by_texts_that_the_model_names(self, build: Build) -> None:
        streamer = build(device_models.NamesTexts, batch_size=16, max_latency=5.0)
        assert streamer.predict(list(range(16))) == [4] * 16
        assert streamer.stats().ceilings == {0: 4}

    def test_timing_has_what_a_worker_measured(self, build: Build, gate: Gate) -> None:
        streamer = build(models.gated(gate))
        streamer.wait_ready()
        first = streamer.submit(["first"])
        gate.await_arrival()
        second = streamer.submit(["second"])
        assert first.timing is second.timing is None
        gate.let_through(2)
        second.result()
        timings = [first.timing, second.timing]
        for timing in timings:
            assert timing is not None
            assert min(timing[:4]) >= 0
            assert timing[4:] == (None, None, None), "it has no steps"
            # The worker's clock is ours, or it would have got all of the rest.
            assert timing.sent > 0
            assert timing.returned > 0
        assert first.timing is not None
        assert second.timing is not None
        assert second.timing.queued > 0, "it waited while the first one was computed"

    def test_computed_is_what_the_model_took(self, build: Build) -> None:
        streamer = build(keeps_busy)
        streamer.wait_ready()
        future = streamer.submit([0.01])
        future.result()
        assert future.timing is not None
        assert future.timing.total > future.timing.computed >= 0.01
