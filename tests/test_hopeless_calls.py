"""Calls that cannot be computed in their time are refused at once, and change nothing else."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from conftest import await_that
from service_streamer import PredictTimeout, ThreadedStreamer

#: The model computes at most so many items a second.
RATE = 200.0


def slow(batch: list[Any]) -> list[Any]:
    time.sleep(len(batch) / RATE)
    return batch


def test_refused_streams_take_nothing_from_the_calls_that_wait() -> None:
    """Half of them are dropped at once, and exceptions keep the others."""
    with ThreadedStreamer(slow, batch_size=2, worker_timeout=0.05) as streamer:
        futures = [streamer.submit([number]) for number in range(400)]
        await_that(lambda: streamer.stats().answered >= 100)
        errors = []
        for number in range(100):
            with pytest.raises(PredictTimeout) as caught:
                streamer.stream("item")
            if number % 2:
                errors.append(caught.value)
        errors.clear()
        gc.collect()
        assert [future.result(timeout=60) for future in futures] == [[n] for n in range(400)]
        assert streamer.submit(["fresh"]).result(timeout=60) == ["fresh"]
        stats = streamer.stats()
        assert (stats.pending, stats.in_flight) == (0, 0)
        assert (stats.answered, stats.rejected, stats.cancelled) == (401, 100, 0)
