"""When to cut a batch, and of how many items: learned from who came back, and what batches cost.

A worker that is free could take what is there at once. With one caller that is best. With 32
callers in a closed loop it is not: the first to return would be computed alone while 31 wait. So a
free worker waits for those who are expected, never longer than it pays.

Nor is it best to take all that is there. Eight workers of which one takes everything are one
worker: so each takes its share. And of a burst after which nobody comes, those who are computed
first need not wait for the last.
"""

from __future__ import annotations

import math
from typing import Protocol

from ..observe.record import BatchRecord, Reason
from .arrivals import LEARNING_RATE, RATE_BATCHES, ArrivalForecast
from .cost import BestCost, LearnedCost

__all__ = ["Cut", "LearnedPolicy", "Policy"]

#: Items of the first batch, where items have lengths: few enough not to take for ever.
_FIRST_ITEMS = 8

#: Why company that is expected is not waited for.
_BOUNDS = (Reason.MAX_LATENCY, Reason.DEADLINE)

#: What to do with what waits: until when to leave it, how many items to cut if that is not after
#: now, and why. A plain tuple: there is one for every batch.
Cut = tuple[float, int, Reason]


class Policy(Protocol):
    """Decides when to cut and how much. Times are of one monotonic clock, in seconds.

    Attributes:
        cost: what a batch costs.
        max_cost: what the batch that was decided on may cost, unless one item does.
        ahead_from: of fewer waiting items ``ahead`` makes no batch, so it need not be asked.
        is_trial: whether that batch is bounded to learn, and not by what is known.
    """

    cost: LearnedCost
    max_cost: float
    ahead_from: int
    is_trial: bool

    def arrived(self, size: int, now: float, is_first: bool) -> None:
        """A call of ``size`` items arrived; the first if nothing waits or is computed."""

    def sent(self, batch: BatchRecord, now: float) -> None:
        """A batch was cut."""

    def came_back(
        self, batch: BatchRecord, calls: int, duration: float, slots: int, waiting: int, now: float
    ) -> None:
        """A batch is back.

        Args:
            calls: how many are answered.
            slots: workers that are ready.
            waiting: items that wait.
        """

    def full(self) -> int:
        """How many items are a full batch."""

    def ahead(self, waiting: int, slots: int, in_flight: int) -> int:
        """How many of the items that wait a busy worker may be sent ahead; 0 for none."""

    def decide(
        self,
        waiting: int,
        free: int,
        slots: int,
        in_flight: int,
        oldest: float,
        deadline: float,
        now: float,
    ) -> Cut:
        """What to do with what waits while workers are free.

        Args:
            waiting: items; at least one.
            free: workers that hold nothing; at least one.
            slots: workers that are ready.
            in_flight: items that workers hold.
            oldest: when the oldest of the waiting items arrived.
            deadline: when the time ends of the one whose turn it is.
        """


class LearnedPolicy:
    """Waits for company that is expected soon enough to pay, and shares out what waits.

    Args:
        batch_size: the most items of a batch.
        max_latency: the longest that an item waits while a worker is free, seconds.
        has_lengths: whether items have lengths. Then the first batch has few items, and others cost
            at most twice what the largest so far did: until it is known what padding costs, a large
            one may take very long.
        max_batch_cost: the most that a batch may cost.
        round_trip: how long results take to callers, and their next calls back, seconds.

    Attributes:
        cost: what a batch costs.
        best: up to which cost a batch gains from being larger.
        max_cost: what the batch that was decided on may cost, unless one item does.
        ahead_from: of fewer waiting items ``ahead`` makes no batch.
        is_trial: whether that batch is bounded to learn, and not by what is known.
    """

    __slots__ = (
        "_arrived",
        "_batch_size",
        "_company",
        "_cut_at",
        "_largest",
        "_later",
        "_max_batch_cost",
        "_max_latency",
        "_pays",
        "_rate",
        "_unit",
        "_waits_until",
        "ahead_from",
        "best",
        "cost",
        "is_trial",
        "max_cost",
    )

    def __init__(
        self,
        batch_size: int,
        max_latency: float,
        *,
        has_lengths: bool = False,
        max_batch_cost: float = math.inf,
        round_trip: float = 0.0,
    ) -> None:
        self._batch_size = batch_size
        self._max_latency = max_latency
        self._max_batch_cost = max_batch_cost
        self._company = ArrivalForecast(round_trip)
        self._arrived = 0  # items, so far
        self._cut_at = -math.inf  # when a batch was cut last
        self._rate = 0.0  # items that arrive per second for each worker, of late
        self._later = 0.0  # items that wait when a batch comes back, of late
        self._waits_until = -math.inf  # what was decided last; infinity in the past for a cut
        self._pays = batch_size  # of more at once each would be later
        self._unit = 1.0  # what an item costs, of late
        self._largest = 0.0 if has_lengths else math.inf  # cost of a batch so far
        self.cost = LearnedCost()
        self.best = BestCost()
        self.max_cost = math.inf
        self.ahead_from = batch_size
        self.is_trial = False

    def arrived(self, size: int, now: float, is_first: bool) -> None:
        self._arrived += size
        self._company.arrived(size, now)
        if is_first and not self._company.is_watching(now):
            self._company.began(self.cost.duration(size * self._unit), now)

    def sent(self, batch: BatchRecord, now: float) -> None:
        batch.arrived = self._arrived
        self._cut_at = now

    def came_back(
        self, batch: BatchRecord, calls: int, duration: float, slots: int, waiting: int, now: float
    ) -> None:
        self.cost.observe(batch.cost, duration)
        self.best.observe(batch.cost, duration, is_full=batch.is_full, model=self.cost)
        self.ahead_from = min(self.full(), self._pays)
        self._largest = max(self._largest, batch.cost, 1e-9)  # items of no length are known, too
        self._unit += (max(batch.cost, 1e-9) / batch.size - self._unit) * LEARNING_RATE
        self._company.answered(calls, duration, now)
        self._later += (waiting - self._later) * LEARNING_RATE
        # What came to this worker meanwhile; but no more than keeps the queue as long as it is,
        # since a burst is no stream. In a closed loop they come when it is back.
        came = max(
            (self._arrived - batch.arrived) / max(1, slots), self._company.closedness * batch.size
        )
        flight = now - batch.cut_at
        if flight > 0.0 and duration > 0.0:
            rate = min(came / flight, batch.size / duration)
            self._rate += (rate - self._rate) / RATE_BATCHES

    def full(self) -> int:
        limit = min(self.best.limit, self._max_batch_cost) / self._unit
        return self._batch_size if limit >= self._batch_size else max(1, round(limit))

    def ahead(self, waiting: int, slots: int, in_flight: int) -> int:
        # What is not full may still grow until a worker can take it. And where another worker has
        # less than a full batch, it is the first to be free, and takes its share.
        full = self.full()
        if waiting >= full and (slots == 1 or in_flight >= full * slots):
            return self._bounded(full, waiting)
        if waiting < self._pays * slots:
            return 0
        size, reason = self._size(waiting, slots, in_flight)
        self._pays = min(size, full) if reason is Reason.PAYS else self._batch_size
        self.ahead_from = min(full, self._pays)
        return self._bounded(self._pays, waiting) if waiting >= self._pays * slots else 0

    def _bounded(self, size: int, waiting: int) -> int:
        """How many items to cut instead of a full batch: fewer, if that is to be tried now."""
        self.is_trial = 2.0 * self._largest < self.best.limit
        if not self._largest:
            self.max_cost = math.inf
            return min(size, _FIRST_ITEMS)
        self.max_cost = min(self.best.limit, 2.0 * self._largest)
        if waiting <= size:
            return size
        trial = self.best.trial(self.cost)
        if trial == math.inf:
            return size
        self.max_cost = trial
        self.is_trial = True
        return min(self._batch_size, max(1, round(trial / self._unit)))

    def decide(
        self,
        waiting: int,
        free: int,
        slots: int,
        in_flight: int,
        oldest: float,
        deadline: float,
        now: float,
    ) -> Cut:
        company = self._company
        calls = company.expected(now)
        if calls < 0.5:  # company of less than half a call is none
            if waiting == 1 and in_flight < slots and self._waits_until == -math.inf:
                return now, 1, Reason.ALONE  # so often that the rest would be felt
            calls = 0.0
        expected = calls * company.call_size
        size, reason = self._size(waiting + expected, slots, in_flight)
        full = self.full()
        if size >= full:
            size, reason = full, Reason.FULL
            if full < self._batch_size:
                is_cost = self._max_batch_cost < self.best.limit
                reason = Reason.COST if is_cost else Reason.PAYS
        tried = self._bounded(size, waiting)
        if tried != size:
            size, reason = tried, Reason.TRIED
        self._pays = size if reason is Reason.PAYS else self._batch_size
        self.ahead_from = min(full, self._pays)
        is_late = False
        if waiting < size:
            missing = size - waiting
            if calls:
                later = self._later + max(0.0, expected / slots - missing)
                worth = self._worth(waiting, missing, later)
                wait_until = company.wait_until(missing / company.call_size, worth, now)
            else:
                wait_until = self._cut_at + self._pause(size, slots)
            if wait_until > now:
                # Twice what the batch takes before the deadline: what is just in time on average
                # is late half of the time.
                urgent = deadline - 2.0 * self.cost.duration(waiting * self._unit)
                bound = oldest + self._max_latency
                if now < bound and now < urgent:
                    self._waits_until = min(wait_until, bound, urgent)
                    return self._waits_until, 0, reason
                reason = Reason.DEADLINE if urgent <= now else Reason.MAX_LATENCY
            is_late = True
            if free > 1:  # each of them takes some
                size = min(size, max(1, math.ceil((waiting + expected) / free - 1e-9)))
        if waiting <= size and reason not in _BOUNDS:
            has_waited = self._waits_until > oldest
            is_late = is_late or (has_waited and now >= self._waits_until)
            if size < full or waiting < size:
                reason = Reason.ALONE
                if has_waited:
                    reason = Reason.LATE if is_late else Reason.COMPANY
        self._waits_until = -math.inf
        return now, min(waiting, int(size)), reason

    def _worth(self, waiting: int, missing: float, later: float) -> float:
        """The longest wait that pays for those who are missing, seconds.

        With a + b * n for a batch: who is waited for is spared one a, and so are those who come
        later, since there is a batch less. Those who wait have to wait, and for b of each more;
        except in a closed loop, where who is answered sooner only waits longer the next time.

        Args:
            later: items that wait or come for this worker, beside both.
        """
        closedness = self._company.closedness
        spared = (missing + later + closedness * waiting) * self.cost.base
        spared -= (1.0 - closedness) * waiting * missing * self.cost.per_unit * self._unit
        return spared / (waiting + later)

    def _steepness(self, size: float) -> float:
        """From 0, where each item costs as much as a batch does, to 1, where a batch does."""
        items = self.cost.per_unit * self._unit * size
        base = self.cost.base
        return 1.0 if base >= items or not self.cost.is_fitted else (base / items) ** 2

    def _pause(self, size: float, slots: int) -> float:
        """How long after the last batch the next one is best cut, if it is not full, seconds.

        Calls that come by chance are best spread over the workers in time, too: of two that begin
        at once one takes what the other should have had, and whoever comes next waits for both.
        """
        if slots == 1:
            return 0.0
        pause = self.cost.duration(size * self._unit) / slots
        return pause * self._steepness(size) * (1.0 - self._company.closedness)

    def _size(self, items: float, slots: int, in_flight: int) -> tuple[int, Reason]:
        """How many of the items to take at once, with those that are about to come."""
        size, reason = items, Reason.ALONE
        if slots > 1:
            # As many for each: were one to take all, its callers would come back to it all at once.
            # Where it is the items that cost, it is better to be one too few than one too many.
            share = (items + in_flight) / slots
            size, reason = max(1.0, share - 1.0 + self._steepness(share)), Reason.SHARE
        base, per_unit = self.cost.base, self.cost.per_unit * self._unit
        rate = self._rate
        growth = 1.0 - rate * per_unit
        if growth > 0.0 and per_unit > 0.0 and self.cost.is_fitted:
            # Items P, batches of B one after the other, a + b * B each, and others that arrive at a
            # rate r: P goes down at B / (a + b * B) - r, and all who are there wait meanwhile. What
            # makes (P + B) / (B / (a + b * B) - r) least, is (by its derivative):
            root = rate * rate + growth * (rate * base + size) / (base * per_unit or 1e-12)
            pays = base / growth * (rate + math.sqrt(root))
            batches = math.ceil(size / max(1.0, pays) - 0.5)
            if batches > 1:
                size, reason = size / batches, Reason.PAYS
        return max(1, math.ceil(size - 1e-9)), reason
