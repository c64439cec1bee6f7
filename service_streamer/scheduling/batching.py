"""When to cut a batch: whether waiting for company pays, learned from who came back before.

A worker that is free could take what is there at once. With one caller that is best. With 32
callers in a closed loop it is not: the first to return would be computed alone while 31 wait.
So after every batch this module watches, at no cost, how many calls arrive soon after its results
went out. The next time it expects as many, and a free worker waits for them, never longer than it
pays: with n items waiting for k more, it costs n items the time that the k need to come (or, when
they do not come, the time until the watch ends), and spares the k most of a batch's duration.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Company"]

#: How long a watch lasts, as a share of the duration of the batch that opened it: what a wrong
#: expectation can cost at the most, once. Tried in simulation between 0.1 and 0.5: lower misses
#: callers that are slow to return, higher helps only them.
WATCH_SHARE = 0.25

#: Weight of the newest batch in what is learned. High, because load changes within a second.
LEARNING_RATE = 0.25


class _Watch:
    """Counts the calls that arrive after one batch's results went out."""

    __slots__ = ("answered", "arrived", "closes_at", "last_arrival", "opened_at")

    def __init__(self, answered: int, opened_at: float, closes_at: float) -> None:
        self.answered = answered
        self.arrived = 0
        self.opened_at = opened_at
        self.last_arrival = opened_at
        self.closes_at = closes_at


class Company:
    """How many calls are about to arrive, and until when a free worker should wait for them.

    Calls and not items are counted, since it is callers who come back: one whose calls have ten
    items and one in turn is still one caller.

    Times are in seconds of any one monotonic clock, given as ``now``. Not thread-safe.
    """

    __slots__ = ("_call_size", "_duration", "_return_rate", "_return_time", "_watches")

    def __init__(self) -> None:
        self._watches: deque[_Watch] = deque()
        self._return_rate = 0.0  # calls that come back, per call answered
        self._return_time = 0.0  # from the answers going out to the last that comes back
        self._call_size = 1.0  # items
        self._duration = 0.0  # of a batch

    def answered(self, calls: int, duration: float, now: float) -> None:
        """A batch that took ``duration`` seconds is back; the results of ``calls`` calls go out."""
        self._forget_ended(now)
        self._duration += (duration - self._duration) * (LEARNING_RATE if self._duration else 1.0)
        if calls:
            self._watches.append(_Watch(calls, now, now + WATCH_SHARE * duration))

    def arrived(self, size: int, now: float) -> None:
        """A call of ``size`` items arrived. It is put down to the oldest answers still watched."""
        self._call_size += (size - self._call_size) * LEARNING_RATE
        watches = self._watches
        if watches and watches[0].closes_at <= now:
            self._forget_ended(now)
        if watches:
            watch = watches[0]
            watch.arrived += 1
            watch.last_arrival = now
            if watch.arrived == watch.answered:
                self._learn(watches.popleft())

    def wait_until(self, waiting: int, free_workers: int, now: float) -> float:
        """Until when the first of the free workers should leave the ``waiting`` items to grow.

        Not after ``now`` means that it should take them at once. Of the company, each other free
        worker could take one call, with nobody having waited.
        """
        self._forget_ended(now)
        expected = 0.5 - free_workers  # company of less than half a call is none
        for watch in self._watches:
            expected += max(0.0, self._return_rate * watch.answered - watch.arrived)
        if expected <= 0:
            return now
        latest = self._watches[-1]
        patience = latest.opened_at + self._return_time - now
        if patience <= 0:  # later than usual: then it may as well be until the watch ends
            patience = latest.closes_at - now
        if waiting * patience >= expected * self._call_size * self._duration:
            return now
        return latest.closes_at

    def _forget_ended(self, now: float) -> None:
        watches = self._watches
        while watches and watches[0].closes_at <= now:
            self._learn(watches.popleft())

    def _learn(self, watch: _Watch) -> None:
        rate = watch.arrived / watch.answered
        self._return_rate += (rate - self._return_rate) * LEARNING_RATE
        if watch.arrived:
            took = watch.last_arrival - watch.opened_at
            self._return_time += (took - self._return_time) * LEARNING_RATE
