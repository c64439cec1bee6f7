"""What is known while more waits than workers keep up with, and which new calls are hopeless."""

from __future__ import annotations

import math
from collections import deque

from ..observe.record import Call
from . import tuning
from .call_queue import CallQueue
from .policy import Policy
from .slots import Slots


class Overload:
    """How fast batches come back while there is overload, and how long a new call takes then.

    Args:
        pending: calls with items that are not cut.
        slots: of the workers.
        policy: see below.

    Attributes:
        policy: knows what batches cost.
        is_behind: whether more waits than workers keep up with.
        rate: units of cost that come back per second, items of a model of steps; infinity while
            that is not known.
    """

    def __init__(self, pending: CallQueue, slots: Slots, policy: Policy) -> None:
        self._pending = pending
        self._slots = slots
        self.policy = policy
        self._took: deque[float] = deque(
            maxlen=tuning.FORECAST_BATCHES
        )  # the last batches, seconds
        self._end()

    def _end(self) -> None:
        """Nothing waits: what was learned will not hold the next time."""
        self.is_behind = False
        self.rate = self._rate_before = math.inf
        self._took.clear()
        self._since = -1.0  # when the batches began that are counted for the next rate
        self._batches, self._work = 0, 0.0  # of these

    @property
    def full(self) -> int:
        """Items of a full batch; of a model of steps each item is a batch."""
        return 1 if self._slots.places else self.policy.full

    def came_back(self, work: float, took: float, now: float) -> None:
        """A batch came back: learn of it, but only while there is overload.

        Args:
            work: of the batch, in units of ``rate``; 0 if it has been counted before.
            took: from when it was cut, seconds.
        """
        if self._pending.items >= self.full:
            self.is_behind = True
            self._took.append(took)
            if work:
                self._count(work, now)
        elif self.is_behind:
            self._end()

    def _count(self, work: float, now: float) -> None:
        if self._since < 0:
            self._since = now
            return
        self._batches += 1
        self._work += work
        if self._batches >= tuning.THROUGHPUT_BATCHES and now > self._since:
            sample = self._work / (now - self._since)
            # The better of two, so that one slow batch does not make everything look hopeless.
            before, self._rate_before = self._rate_before, sample
            self.rate = math.inf if before == math.inf else max(sample, before)
            self._since = now
            self._batches, self._work = 0, 0.0

    def duration(self) -> float:
        """Of a batch, from being cut to being back: somewhat more than the slowest of late.

        Without those beyond twice the median: a first batch that compiles for seconds says nothing
        about the next, and must not make all calls look late.

        Returns:
            Seconds; 0 while little is known.
        """
        if len(self._took) < 3:
            return 0.0
        took = sorted(self._took)
        usual = took[(len(took) - 1) // 2]
        return tuning.FORECAST_MARGIN * max(
            each for each in took if each <= tuning.FORECAST_OUTLIER * usual
        )

    def hopeless_for(self, call: Call, now: float) -> float:
        """How long a new call takes at the least, seconds, if it cannot be in time; else 0."""
        pending, policy, lengths = self._pending, self.policy, call.lengths
        left, cost = call.deadline - now, policy.cost
        work = pending.work + (call.size if lengths is None else sum(lengths))
        if self._slots.places:
            work = pending.items
        each = cost.base * (pending.items + call.size) + cost.per_unit * work
        if 2.0 * each <= left and 2.0 * work <= left * self.rate:
            return 0.0  # also if each item was computed alone, as nearly always
        takes, slots = self._takes(call, pending.ahead(call)), self._slots
        if not slots.idle and slots.room == 2:  # else several stages are at batches
            begins = [slots.begins_at(n, now, cost.duration) for n in slots.numbers()]
            takes += max(0.0, 1.0 - policy.margin) * (min(begins, default=now) - now)
        return takes if takes > tuning.SURELY_LATE * left else 0.0

    def is_in_time_alone(self, call: Call, now: float) -> bool:
        """Whether a new call could be in time if nothing waited, and no worker was busy."""
        return self._takes(call) <= tuning.SURELY_LATE * (call.deadline - now)

    def _takes(self, call: Call, ahead: float = 0.0) -> float:
        """How long a new call takes at the least, behind so much work, seconds."""
        pending, slots = self._pending, self._slots
        if slots.places:  # as many items come back, whatever their lengths
            return ahead * pending.items / (pending.work or 1.0) / self.rate
        return max(ahead / self.rate, self.policy.least_duration(call, ahead, slots.taking))
