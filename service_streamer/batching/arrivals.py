"""Expected arrivals: learned by watching, which costs nothing.

The calls that arrive soon after the results of a batch went out are counted. As many are expected
after the next batch. So are the calls that follow the first one of a burst. Nothing is ever delayed
to find out.
"""

from __future__ import annotations

import math
from collections import deque

from . import tuning

_NEVER = -math.inf


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

    def __init__(self, round_trip: float = 0.0) -> None:
        self._round_trip = round_trip
        self._watches: deque[_Watch] = deque()
        self._return_rate = 0.0  # calls that come back, per call answered
        self._gap = 0.0  # seconds from one that comes back to the next
        # Of the burst that may be going on: no object, since every lone call begins one.
        self._burst_closes_at = _NEVER  # before which another one belongs to it; if there is one
        self._burst_arrived = 0  # calls after the first
        self._burst_began_at = self._burst_last_at = 0.0
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
        watches = self._watches
        if watches and watches[0].closes_at <= now:
            self._end_watches(now)
        passed = now - self._counted_at
        if passed > 0.0:
            weight = passed / (passed + tuning.RATE_BATCHES * duration)
            self._rate += (self._calls / passed - self._rate) * weight
            self._calls, self._counted_at = 0, now
        if calls:
            closes_at = now + tuning.WATCH_SHARE * duration + self._round_trip
            watches.append(_Watch(calls, now, closes_at))
            self._last_event = now

    def arrived(self, size: int, now: float) -> None:
        """A call of ``size`` items arrived. It is put down to the oldest answers still watched."""
        if size != self.call_size:
            self.call_size += (size - self.call_size) * tuning.LEARNING_RATE
        self._calls += 1
        self._last_event = now
        closes_at = self._burst_closes_at
        if now <= closes_at:
            self._burst_arrived += 1
            self._burst_last_at = now
            self._burst_closes_at = min(now + self._burst_gap_limit, self._burst_ends_at)
        elif closes_at > _NEVER:
            self._learn_burst()
        watches = self._watches
        if watches and watches[0].closes_at <= now:
            self._end_watches(now)
        if watches:
            watch = watches[0]
            watch.arrived += 1
            watch.last_arrival = now
            if watch.arrived == watch.answered:
                self._learn(now)

    def began(self, duration: float, now: float) -> float:
        """The call that has just arrived found nothing waiting: a burst may have begun.

        Not while callers that were answered may be about to call again.

        Args:
            duration: of a batch of it, seconds.

        Returns:
            How many calls are about to come; as ``expected``.
        """
        watches = self._watches
        if watches and self.closedness > 0.0 and watches[-1].closes_at > now:
            return self.expected(now)
        if self._burst_closes_at == _NEVER:  # else it is one of them, after a part of them was sent
            gap = self._burst_gap_limit = tuning.BURST_SHARE * duration
            self._burst_ends_at = now + tuning.WATCH_SHARE * duration
            self._burst_began_at = self._burst_last_at = now
            self._burst_closes_at = now + gap
            self._burst_arrived = 0
            if not watches:
                return self._burst_size
        return self.expected(now)

    def expected(self, now: float) -> float:
        """How many calls are about to come, after ``time_passed(now)``. Changes nothing."""
        expected, rate = 0.0, self._return_rate
        if self.closedness:
            for watch in self._watches:
                missing = rate * watch.answered - watch.arrived
                if missing > 0.0:
                    expected += missing
            expected *= self.closedness
        if now <= self._burst_closes_at:
            return max(expected, self._burst_size - self._burst_arrived)
        return expected

    def wait_until(self, missing: float, worth: float, now: float) -> float:
        """Until when to wait for some of the expected calls; ``now`` or before for not at all.

        A call that is late may not come at all. So the wait for it is never longer than its worth.

        Args:
            missing: calls to wait for; no more than are expected.
            worth: the longest wait for them that pays, seconds.
        """
        watches, closes_at = self._watches, self._burst_closes_at
        if closes_at > _NEVER:
            gap = self._burst_gap
        elif watches:
            gap, closes_at = self._gap, watches[-1].closes_at
        else:
            return now
        return now if missing * gap >= worth else min(closes_at, self._last_event + worth)

    def time_passed(self, now: float) -> None:
        """Learn from the watches that have ended by ``now``."""
        watches = self._watches
        if watches and watches[0].closes_at <= now:
            self._end_watches(now)
        if _NEVER < self._burst_closes_at < now:
            self._learn_burst()

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
        arrived, answered = watch.arrived, watch.answered
        self._return_rate += (arrived / answered - self._return_rate) * tuning.LEARNING_RATE
        # Without ``min`` and ``max``, which take longer: every call of a lone caller comes here.
        by_chance = self._rate * (now - watch.first_at)
        if by_chance > answered:
            by_chance = float(answered)
        self._excess += (arrived - by_chance - self._excess) * tuning.LEARNING_RATE
        possible = self._possible
        self._possible = possible = (
            possible + (answered - by_chance - possible) * tuning.LEARNING_RATE
        )
        if possible > 0.0:
            # What is little may be chance, too.
            closedness = (self._excess / possible - tuning.CHANCE) / (1.0 - tuning.CHANCE)
            self.closedness = 0.0 if closedness < 0.0 else 1.0 if closedness > 1.0 else closedness
        if arrived:
            gap = (watch.last_arrival - watch.opened_at) / arrived
            self._gap += (gap - self._gap) * tuning.LEARNING_RATE

    def _learn_burst(self) -> None:
        self._burst_closes_at = _NEVER
        arrived = self._burst_arrived
        if not arrived:  # it was a lone call, as nearly always
            self._burst_size -= self._burst_size * tuning.LEARNING_RATE
            return
        lasted = self._burst_last_at - self._burst_began_at
        size = arrived if arrived > tuning.BURST_FACTOR * self._rate * lasted else 0
        self._burst_size += (size - self._burst_size) * tuning.LEARNING_RATE
        self._burst_gap += (lasted / arrived - self._burst_gap) * tuning.LEARNING_RATE
