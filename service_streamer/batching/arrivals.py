"""Expected arrivals: learned by watching, which costs nothing.

The calls that arrive soon after the results of a batch went out are counted. As many are expected
after the next batch. So are the calls that follow the first one of a burst. Nothing is ever delayed
to find out.
"""

from __future__ import annotations

import math
from collections import deque

from .tuning import (
    BURST_FACTOR,
    BURST_SHARE,
    CHANCE,
    LEARNING_RATE,
    RATE_BATCHES,
    WATCH_SHARE,
)

__all__ = ["ArrivalForecast"]


class _Watch:
    """Counts the calls that arrive after one batch's results went out."""

    __slots__ = ("answered", "arrived", "closes_at", "first_at", "last_arrival", "opened_at")

    def __init__(self, answered: int, opened_at: float, closes_at: float) -> None:
        self.answered = answered
        self.arrived = 0
        self.opened_at = opened_at
        self.first_at = opened_at  # when it became the oldest one
        self.last_arrival = opened_at
        self.closes_at = closes_at


class ArrivalForecast:
    """How many calls are about to arrive, and until when a free worker should wait for them.

    Calls and not items are counted, since callers come back: one whose calls have ten
    items and one in turn is still one caller.

    Times are in seconds of any one monotonic clock, given as ``now``. Not thread-safe.

    Args:
        round_trip: how long results take to callers, and their next calls back, seconds: so much
            longer they are watched for.

    Attributes:
        call_size: items of a call, of late.
        closedness: from 0, where calls come whenever they come, to 1, where those who are answered
            call again at once: what comes within the watches, beyond what would come anyway.
    """

    __slots__ = (
        "_burst",
        "_burst_ends_at",
        "_burst_gap",
        "_burst_gap_limit",
        "_burst_size",
        "_calls",
        "_counted_at",
        "_excess",
        "_gap",
        "_last_event",
        "_possible",
        "_rate",
        "_return_rate",
        "_round_trip",
        "_watches",
        "call_size",
        "closedness",
    )

    def __init__(self, round_trip: float = 0.0) -> None:
        self._round_trip = round_trip
        self._watches: deque[_Watch] = deque()
        self._return_rate = 0.0  # calls that come back, per call answered
        self._gap = 0.0  # seconds from one that comes back to the next
        self._burst: _Watch | None = None
        self._burst_size = 0.0  # calls that follow the first of a burst
        self._burst_gap = 0.0
        self._burst_gap_limit = 0.0  # what is further apart is no burst, seconds
        self._burst_ends_at = 0.0
        self._last_event = -math.inf  # when the last arrived, or answers went out after that
        self._calls = 0  # that arrived since
        self._counted_at = 0.0
        self._rate = 0.0  # calls per second, of late
        self._excess = self._possible = 0.0  # calls of a watch beyond the rate, and at most
        self.call_size = 1.0
        self.closedness = 0.0

    def answered(self, calls: int, duration: float, now: float) -> None:
        """A batch that took ``duration`` seconds is back; the results of ``calls`` calls go out."""
        self._end_watches(now)
        passed = now - self._counted_at
        if passed > 0.0:
            weight = passed / (passed + RATE_BATCHES * duration)
            self._rate += (self._calls / passed - self._rate) * weight
            self._calls, self._counted_at = 0, now
        if calls:
            closes_at = now + WATCH_SHARE * duration + self._round_trip
            self._watches.append(_Watch(calls, now, closes_at))
            self._last_event = now

    def arrived(self, size: int, now: float) -> None:
        """A call of ``size`` items arrived. It is put down to the oldest answers still watched."""
        self.call_size += (size - self.call_size) * LEARNING_RATE
        self._calls += 1
        self._last_event = now
        burst = self._burst
        if burst is not None:
            if now <= burst.closes_at:
                burst.arrived += 1
                burst.last_arrival = now
                burst.closes_at = min(now + self._burst_gap_limit, self._burst_ends_at)
            else:
                self._learn_burst(burst)
        watches = self._watches
        if watches and watches[0].closes_at <= now:
            self._end_watches(now)
        if watches:
            watch = watches[0]
            watch.arrived += 1
            watch.last_arrival = now
            if watch.arrived == watch.answered:
                self._learn(now)

    def is_watching(self, now: float) -> bool:
        """Whether callers that were answered may be about to call again."""
        watches = self._watches
        return bool(watches) and self.closedness > 0.0 and watches[-1].closes_at > now

    def began(self, duration: float, now: float) -> None:
        """A call arrived while nothing was under way; a batch of it takes ``duration`` seconds."""
        if self._burst is not None:
            if now <= self._burst.closes_at:
                return  # it is one of them, after a part of them was sent
            self._learn_burst(self._burst)
        self._burst_gap_limit = BURST_SHARE * duration
        self._burst_ends_at = now + WATCH_SHARE * duration
        self._burst = _Watch(0, now, now + self._burst_gap_limit)

    def expected(self, now: float) -> float:
        """How many calls are about to come, after ``time_passed(now)``. Changes nothing."""
        expected, rate = 0.0, self._return_rate
        if self.closedness:
            for watch in self._watches:
                missing = rate * watch.answered - watch.arrived
                if missing > 0.0:
                    expected += missing
            expected *= self.closedness
        burst = self._burst
        if burst is not None and now <= burst.closes_at:
            return max(expected, self._burst_size - burst.arrived)
        return expected

    def wait_until(self, missing: float, worth: float, now: float) -> float:
        """Until when to wait for some of the expected calls; ``now`` or before for not at all.

        A call that is late may not come at all. So the wait for it is never longer than its worth.

        Args:
            missing: calls to wait for; no more than are expected.
            worth: the longest wait for them that pays, seconds.
        """
        burst, watches = self._burst, self._watches
        if burst is not None:
            gap, closes_at = self._burst_gap, burst.closes_at
        elif watches:
            gap, closes_at = self._gap, watches[-1].closes_at
        else:
            return now
        return now if missing * gap >= worth else min(closes_at, self._last_event + worth)

    def time_passed(self, now: float) -> None:
        """Learn from the watches that have ended by ``now``."""
        watches, burst = self._watches, self._burst
        if watches and watches[0].closes_at <= now:
            self._end_watches(now)
        if burst is not None and burst.closes_at < now:
            self._learn_burst(burst)

    def _end_watches(self, now: float) -> None:
        watches = self._watches
        while watches and watches[0].closes_at <= now:
            self._learn(watches[0].closes_at)

    def _learn(self, now: float) -> None:
        """The oldest watch has ended: what comes from now on is put down to the next."""
        watches = self._watches
        watch = watches.popleft()
        if watches and watches[0].opened_at < now:
            watches[0].first_at = now
        rate = watch.arrived / watch.answered
        self._return_rate += (rate - self._return_rate) * LEARNING_RATE
        by_chance = min(self._rate * (now - watch.first_at), float(watch.answered))
        self._excess += (watch.arrived - by_chance - self._excess) * LEARNING_RATE
        self._possible += (watch.answered - by_chance - self._possible) * LEARNING_RATE
        if self._possible > 0.0:
            # What is little may be chance, too.
            excess = self._excess / self._possible
            self.closedness = min(1.0, max(0.0, (excess - CHANCE) / (1.0 - CHANCE)))
        self._gap += (_gap(watch, self._gap) - self._gap) * LEARNING_RATE

    def _learn_burst(self, burst: _Watch) -> None:
        self._burst = None
        by_chance = self._rate * (burst.last_arrival - burst.opened_at)
        size = burst.arrived if burst.arrived > BURST_FACTOR * by_chance else 0
        self._burst_size += (size - self._burst_size) * LEARNING_RATE
        self._burst_gap += (_gap(burst, self._burst_gap) - self._burst_gap) * LEARNING_RATE


def _gap(watch: _Watch, default: float) -> float:
    """Seconds from one arrival to the next; the default if there was none."""
    if not watch.arrived:
        return default
    return (watch.last_arrival - watch.opened_at) / watch.arrived
