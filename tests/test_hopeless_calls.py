"""Calls that cannot be computed in their time are refused at once, and change nothing else."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import await_that
from service_streamer import PredictTimeout, ThreadedStreamer

#: The model computes at most so many items a second.
RATE = 200.0
#: So many wait, which takes twice the time of a new call: too long for machines that stall.
MANY = 4000
TIME = 10.0


def slow(batch: list[Any]) -> list[Any]:
    time.sleep(len(batch) / RATE)
    return batch


@contextlib.contextmanager
def overloaded(**call: Any) -> Iterator[ThreadedStreamer]:
    """A streamer that knows its speed, and whose queue is long."""
    with ThreadedStreamer(slow, batch_size=2) as streamer:
        futures = [streamer.submit([number], **call) for number in range(MANY)]
        await_that(lambda: streamer.stats().answered >= 100)
        yield streamer
        for future in futures:
            future.cancel()


def is_refused(streamer: ThreadedStreamer, **call: Any) -> bool:
    expired = streamer.stats().rejected
    try:
        streamer.submit(["new"], **call)
    except PredictTimeout:
        return streamer.stats().rejected > expired
    return False


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


@pytest.mark.parametrize(
    "call",
    [
        {"timeout": TIME},
        {"timeout": TIME, "priority": 1},
        {"timeout": TIME, "tenant": "one"},
    ],
)
def test_a_call_with_a_timeout_is_refused_behind_its_equals(call: dict[str, Any]) -> None:
    with overloaded(**call) as streamer:
        assert is_refused(streamer, **call)


def test_one_call_with_a_priority_does_not_end_the_refusals() -> None:
    with ThreadedStreamer(slow, batch_size=2, worker_timeout=TIME) as streamer:
        streams = []

        def open_many() -> None:
            for number in range(MANY):
                streams.append(streamer.stream(number))

        with contextlib.suppress(PredictTimeout):  # once the speed is known
            open_many()
        await_that(lambda: streamer.stats().answered >= 100)
        streamer.submit(["first"], priority=1)
        with pytest.raises(PredictTimeout, match="could not be computed"):
            open_many()
        for stream in streams:
            stream.close()


def test_a_call_that_others_wait_behind_is_not_refused() -> None:
    with overloaded(timeout=60.0) as streamer:
        assert not is_refused(streamer, timeout=TIME), "the nearest deadline goes first"
        assert not is_refused(streamer, timeout=TIME, tenant="another")


def test_a_long_queue_of_one_tenant_refuses_only_its_own_calls() -> None:
    with overloaded(timeout=TIME, tenant="one") as streamer:
        assert not is_refused(streamer, timeout=TIME, tenant="another")
        assert is_refused(streamer, timeout=TIME, tenant="one")
