"""The clock of another host, as the driver of workers on Ray learns it."""

from __future__ import annotations

import math

import pytest

from service_streamer.ray.clock import RemoteClock


def test_clocks_of_one_host_are_one() -> None:
    clock = RemoteClock()
    clock.learn(sent=100.0, received=100.004)
    assert clock.local(99.5) == 99.5


def test_a_clock_that_is_ahead_or_behind_is_learned_from_the_fastest_message() -> None:
    for ahead in (-5000.0, 7.0):
        clock = RemoteClock()
        for delay in (0.4, 0.002, 0.3):
            clock.learn(sent=ahead + 10.0, received=10.0 + delay)
        assert clock.local(ahead + 9.0) == pytest.approx(9.002, abs=1e-4)


def test_a_clock_that_was_learned_long_ago_counts_less() -> None:
    """Clocks run apart, and a fast message of yesterday would be believed for ever."""
    clock = RemoteClock()
    clock.learn(sent=1000.0, received=0.0)
    drifted = 3600.0 * 5e-5
    clock.learn(sent=4600.0 - drifted, received=3600.0)
    assert clock.local(4600.0 - drifted) == pytest.approx(3600.0, abs=1e-6)


def test_a_time_that_was_never_stays_never() -> None:
    clock = RemoteClock()
    clock.learn(sent=1000.0, received=0.0)
    assert clock.local(-math.inf) == -math.inf
