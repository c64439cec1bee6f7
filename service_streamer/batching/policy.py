"""When to cut a batch, and of how many items: learned from arrivals, and from what batches cost.

A worker that is free could take at once what waits. With one caller that is best. With 32 callers
in a closed loop it is not: the first call that returns would be computed alone while 31 wait. So a
free worker waits for expected arrivals, never longer than it pays.

Nor is it best to take all that waits. If one of eight workers takes everything, seven are idle: so
each takes its share. And in a burst the calls that are computed first need not wait for the last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..observe.record import BatchRecord, Call, Reason
from . import tuning
from .arrivals import ArrivalForecast
from .cost import BestCost, LearnedCost, PaddedCost, SizeTrial
from .deadlines import Finish, least_in_time, size_in_time

#: Why expected arrivals are not waited for any longer.
_BOUNDS = (Reason.MAX_LATENCY, Reason.DEADLINE)


class Decision(NamedTuple):
    """What to do with the items that wait.

    Attributes:
        size: the most items to cut into a batch now; 0 to wait.
        reason: why the batch gets no more items.
        wait_until: when to ask again if nothing happens before; infinity in the past for a cut.
        max_cost: the most that the batch may cost, unless one item costs more.
        cost_reason: why the batch gets no more items, if ``max_cost`` ends it.
        best_size: items of a batch beyond which each would be done later; ``batch_size`` if there
            is no such size.
        trial: the trial of a batch size that is due with this batch, if there is one.
    """

    size: int
    reason: Reason
    wait_until: float
    max_cost: float
    cost_reason: Reason
    best_size: int
    trial: SizeTrial | None = None


class Backlog:
    """The items that wait, and the workers for them: what a policy is asked about.

    Its owner writes it anew before each question: every call that comes to a free worker is one,
    and a new object would cost more than the attributes do.

    Args:
        last: the decision that counts as the first.

    Attributes:
        items: that wait; at least one.
        oldest: when the oldest of them arrived.
        deadline: of the call that is next, for the slowest stage of a worker.
        free: workers that could begin with a batch now; at least one.
        slots: workers that take batches.
        in_flight: items that workers hold.
        last: the decision before.
        now: the time.
        ask_from: of an answer to wait: with fewer items than so many it would be the same until its
            time, so nobody need ask. 0 where that is not known.
    """

    def __init__(self, last: Decision) -> None:
        self.items = self.free = self.slots = self.in_flight = self.ask_from = 0
        self.oldest = self.now = -math.inf
        self.deadline = math.inf
        self.last = last


class Policy:
    """Decides when to cut and how much. Times are of one monotonic clock, in seconds.

    The three methods that decide change nothing, so they may be asked any number of times. The
    others say what has happened, or ask what is known: here nothing is learned.

    Attributes:
        cost: what a batch costs.
        near: with so much time or less, a lone call is not computed before ``decide`` was asked,
            seconds.
        margin: by which share of its time a batch may take longer than is predicted, or less long.
        full: how many items are a full batch.
    """

    cost: LearnedCost
    full: int
    near = margin = 0.0

    def arrived(self, size: int, now: float, is_first: bool) -> bool:  # noqa: ARG002
        """A call of ``size`` items arrived; the first if nothing waits and a worker is free.

        Returns:
            Whether a first call of one item may be computed at once, without asking ``decide``.
        """
        return False

    def time_passed(self, now: float) -> None:
        """It is ``now``, and ``decide`` is about to be asked."""

    def was_cut(self, batch: BatchRecord, decision: Decision, now: float) -> None:
        """A batch was cut, as decided."""

    def came_back(
        self,
        batch: BatchRecord,
        calls: int,
        duration: float,
        slots: int,
        waiting: int,
        now: float,
        failed: int = 0,
    ) -> None:
        """A batch is back.

        Args:
            calls: how many are answered.
            slots: workers that are ready.
            waiting: items that wait.
            failed: items that the model did not compute.
        """

    def duration(self, items: float) -> float:
        """Seconds for a batch of so many items as they were lately; 0 while nothing is known."""
        return self.cost.duration(items)

    def finish(self, start: float, size: int, slots: int) -> Finish | None:  # noqa: ARG002
        """When a batch is back with which a worker begins then; None while that is not known.

        Args:
            size: items that it would have.
            slots: workers that take batches.
        """
        return None

    def least_duration(self, call: Call, ahead: float, slots: int) -> float:  # noqa: ARG002
        """Seconds that a call takes at the least; 0 while that is not known.

        Args:
            ahead: what is computed before, in units of cost.
            slots: workers that take batches.
        """
        return 0.0

    def decide(self, backlog: Backlog) -> Decision:
        """What to do with the items that wait while workers are free."""
        raise NotImplementedError

    def decide_ahead(self, backlog: Backlog) -> Decision:
        """What to do with the items that wait while a busy worker may be sent a batch ahead.

        The times and the free workers of the backlog may be those of an earlier question.
        """
        return self.decide(backlog)

    def decide_early(self, backlog: Backlog, held: int, batches: int, beside: float) -> Decision:  # noqa: ARG002
        """What to do with the items that wait when the slowest stage of a worker is free.

        Its batches are in other stages, and not answered yet. It is the only free worker of the
        backlog.

        Args:
            held: items in those batches.
            batches: how many those are.
            beside: what a batch takes in other stages, seconds.
        """
        return self.decide(backlog)


class LearnedPolicy(Policy):
    """Waits for arrivals that are expected soon enough to pay, and shares out what waits.

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
        near: a deadline that is so near is worth waiting for others, where there are several
            workers, seconds; 0 while little is known.
    """

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
        self._has_lengths = has_lengths
        self._max_batch_cost = max_batch_cost
        self._arrivals = ArrivalForecast(round_trip)
        self._alone = 0  # batches in a row of one item, behind which none waited
        self._arrived = 0  # items, so far
        self._cut_at = -math.inf  # when a batch was cut last
        self._rate = 0.0  # items that arrive per second for each worker, recently
        self._later = 0.0  # items that wait when a batch comes back, recently
        self._unit = 1.0  # what an item costs, recently
        self._errors = 0  # batches of which it is known how exactly they were predicted
        self.margin = tuning.URGENCY - 1.0
        self._transit = 0.0  # seconds of a batch beside its duration, where none was before it
        self._largest = 0.0  # cost of a batch so far
        self._longest = 0.0  # item so far
        self.full = batch_size if max_batch_cost >= batch_size else max(1, round(max_batch_cost))
        self.cost = PaddedCost() if has_lengths else LearnedCost()
        self.best = BestCost(max_batch_cost)
        self.near = 0.0

    def arrived(self, size: int, now: float, is_first: bool) -> bool:
        self._arrived += size
        arrivals = self._arrivals
        arrivals.arrived(size, now)
        if not is_first:
            return False
        cost = self.cost
        return (
            arrivals.began(cost.base + cost.per_unit * size * self._unit, now)
            < tuning.LEAST_EXPECTED
        )

    def time_passed(self, now: float) -> None:
        self._arrivals.time_passed(now)

    def was_cut(self, batch: BatchRecord, decision: Decision, now: float) -> None:
        batch.arrived = self._arrived
        self._cut_at = now
        if decision.trial is not None:
            self.best.begin(decision.trial)

    def came_back(
        self,
        batch: BatchRecord,
        calls: int,
        duration: float,
        slots: int,
        waiting: int,
        now: float,
        failed: int = 0,
    ) -> None:
        cost, size = batch.cost, batch.size
        if size > 1 or waiting or failed:
            self._alone = 0
        else:
            self._alone += 1
            if self._alone > tuning.ALONE_BATCHES and self._alone % tuning.ALONE_INTERVAL:
                return
        self._arrivals.answered(calls, duration, now)
        if failed:
            size -= failed
            cost *= size / batch.size
        if size:
            if self.cost.was_fitted:  # of the line before this batch
                error = abs(duration / (self.cost.duration(cost) or math.inf) - 1.0)
                error = min(tuning.MARGIN_FACTOR * error, tuning.URGENCY - 1.0)
                self._errors += 1
                weight = max(tuning.NOISE_LEARNING_RATE, 1.0 / self._errors)
                self.margin += (error - self.margin) * weight
            self.cost.observe(cost, duration, size)
            self.best.observe(cost, duration, is_full=batch.is_full, model=self.cost)
        self._largest = max(self._largest, batch.cost, 1e-9)  # items of no length are known, too
        self._longest = max(self._longest, batch.cost / batch.size)
        self._unit += (max(batch.cost, 1e-9) / batch.size - self._unit) * tuning.LEARNING_RATE
        if self.cost.was_fitted and not self._has_lengths:
            # What cannot be predicted cannot be timed: then it is better to begin at once.
            is_exact = self.margin < tuning.NEAR_MARGIN
            self.near = tuning.NEAR_RUNS * self.cost.duration(self._unit) if is_exact else 0.0
        limit = min(self.best.limit, self._max_batch_cost) / self._unit
        self.full = self._batch_size if limit >= self._batch_size else max(1, round(limit))
        self._later += (waiting - self._later) * tuning.LEARNING_RATE
        # What came to this worker meanwhile; but no more than keeps the queue as long as it is,
        # since a burst is no stream. In a closed loop calls come when the batch is back.
        came = max(
            (self._arrived - batch.arrived) / max(1, slots), self._arrivals.closedness * batch.size
        )
        flight = now - batch.cut_at
        # Of a batch that was sent ahead it has the wait for the one before, which counts little.
        beside = max(0.0, flight - duration)
        weight = tuning.LEARNING_RATE if beside < self._transit else tuning.TRANSIT_RATE
        self._transit += (beside - self._transit) * weight
        if flight > 0.0 and duration > 0.0:
            rate = min(came / flight, batch.size / duration)
            self._rate += (rate - self._rate) / tuning.RATE_BATCHES

    def duration(self, items: float) -> float:
        return self.cost.duration(items * self._unit)

    def finish(self, start: float, size: int, slots: int) -> Finish | None:
        cost = self.cost
        if not cost.was_fitted or self._has_lengths:
            return None
        base, item = cost.base, cost.per_unit * self._unit
        begins, longer = start + self._transit, 1.0 + self.margin
        # With one worker the others wait for two batches if the first of them has one of its own.
        least = least_in_time(size, base, item) if slots > 1 else math.inf
        earliest = begins + base - self.margin * (base + size * item)
        return Finish(begins + base, earliest, item, least, begins + longer * base, longer * item)

    def least_duration(self, call: Call, ahead: float, slots: int) -> float:
        cost = self.cost
        if not cost.is_fitted or not slots:
            return 0.0
        lengths, most, alone = call.lengths, self._longest, 0.0
        if lengths is None:  # all are alike: nothing says that it is this call that is slow
            own = float(call.size)
        else:  # what is longer than all so far may be cut short by the model
            longest, own = max(lengths), sum(lengths)
            if longest > most:
                longest, own = most, sum([min(length, most) for length in lengths])
            alone = (1.0 - self.margin) * cost.duration(longest)
        work, together = ahead + own, 0.0
        batches = (ahead / self._unit + call.size) / self._batch_size
        # What a full batch costs, of items as they were lately.
        full = min(
            self._batch_size * self._unit, self.best.limit, self._max_batch_cost, self._long()
        )
        if tuning.GROWTH * self._largest >= min(work, full):
            # Of batches that are much larger than all so far only trying tells.
            margin = self.margin / math.sqrt(max(1.0, batches))
            together = (1.0 - margin) * (work * cost.per_unit + batches * cost.base) / slots
        return max(0.0, alone, together)

    def _long(self) -> float:
        """From which cost on a batch takes too long for calls that come meanwhile."""
        base, per_unit = self.cost.base, self.cost.per_unit
        # Without lengths all items are alike, so nothing has to be bounded before it is known.
        if not per_unit or not (self._has_lengths or self.cost.is_fitted):
            return math.inf
        longest = (max(tuning.LONGEST, tuning.FIXED_COSTS * base) - base) / per_unit
        return longest if self._has_lengths else math.ceil(longest)

    def decide_ahead(self, backlog: Backlog) -> Decision:
        waiting, slots, in_flight = backlog.items, backlog.slots, backlog.in_flight
        last = backlog.last
        # What is not full may still grow until a worker can take it. And where another worker has
        # less than a full batch, it is the first to be free, and takes its share.
        full = size = self.full
        best_size = last.best_size
        if backlog.deadline < math.inf:
            # Whether a call is late is known best when a worker is free. And only what fills all
            # workers goes ahead: a smaller batch that waits costs a base.
            total = backlog.deadline - backlog.oldest
            is_near = total < tuning.AHEAD_RUNS * self.cost.duration(full * self._unit)
            if is_near or waiting < full or (slots > 1 and in_flight < full * slots):
                return last._replace(size=0) if last.size else last
        if waiting < full or (slots > 1 and in_flight < full * slots):
            if waiting < best_size * slots and not last.size:
                return last  # mostly
            if waiting >= best_size * slots:
                size, reason = self._size(waiting, slots, in_flight)
                best_size = min(size, full) if reason is Reason.PAYS else self._batch_size
            size = best_size
            if waiting < size * slots:
                return Decision(0, Reason.ALONE, last.wait_until, math.inf, Reason.COST, best_size)
        size, max_cost, cost_reason, trial = self._bounded(size, waiting)
        reason = cost_reason if size < self._batch_size else Reason.FULL
        return Decision(size, reason, -math.inf, max_cost, cost_reason, best_size, trial)

    def _bounded(self, size: int, waiting: int) -> tuple[int, float, Reason, SizeTrial | None]:
        """The size of a batch while sizes are being learned.

        Returns:
            The size, or another one that is to be tried; the most that the batch may cost, and why;
            the trial of a batch size, if one is due.
        """
        most, limit = self._max_batch_cost, self.best.limit
        largest = tuning.GROWTH * self._largest if self._has_lengths else math.inf
        max_cost, trial = min(limit, largest), None
        cost_reason = Reason.TRIED if largest < limit else Reason.PAYS
        if not largest:
            size, max_cost = min(size, tuning.FIRST_ITEMS), math.inf
        elif waiting > size:
            trial = self.best.trial(self.cost)
            if trial is not None and trial.is_run:
                size = min(self._batch_size, max(1, round(trial.cost / self._unit)))
                max_cost, cost_reason = trial.cost, Reason.TRIED
        longest = self._long()
        if longest < max_cost:
            max_cost, cost_reason = longest, Reason.LONG
        if most < math.inf and most <= max_cost:
            max_cost, cost_reason = most, Reason.COST
        return size, max_cost, cost_reason, trial

    def decide(self, backlog: Backlog) -> Decision:
        waiting, slots, in_flight = backlog.items, backlog.slots, backlog.in_flight
        last, now = backlog.last, backlog.now
        arrivals = self._arrivals
        if slots > 1 and 0.0 < backlog.deadline - backlog.oldest < self.near:
            size, until, most = 0, self._latest(backlog), self._max_batch_cost
            if until <= now:
                size, until = min(waiting, self.full), -math.inf
            reason = Reason.FULL if size == self._batch_size else Reason.DEADLINE
            return Decision(size, reason, until, most, Reason.COST, self._batch_size)
        calls = arrivals.expected(now)
        if calls < tuning.LEAST_EXPECTED:
            if waiting == 1 and in_flight < slots and last.wait_until == -math.inf:
                # So often that the rest would be felt: mostly it is the same decision again.
                if last.size == 1 and last.reason is Reason.ALONE and last.trial is None:
                    return last
                return Decision(
                    1, Reason.ALONE, -math.inf, math.inf, Reason.COST, last.best_size, None
                )
            calls = 0.0
        expected = calls * arrivals.call_size
        size, reason = self._size(waiting + expected, slots, in_flight)
        full = self.full
        if reason is Reason.PAYS and slots == 1 and self._is_tight(backlog, size):
            size = waiting
        if size >= full:
            size, reason = full, Reason.FULL
            if full < self._batch_size:
                is_cost = self._max_batch_cost < self.best.limit
                reason = Reason.COST if is_cost else Reason.PAYS
        bounded, max_cost, cost_reason, trial = self._bounded(size, waiting)
        if bounded != size:
            size, reason = bounded, Reason.TRIED
        if backlog.deadline < math.inf:
            most = min(size, waiting)
            in_time = self._in_time(backlog, most)
            if in_time < most:
                size, reason = in_time, Reason.DEADLINE
        best_size = size if reason is Reason.PAYS else self._batch_size
        is_late = False
        if waiting < size:
            missing = size - waiting
            if calls:
                later = self._later + max(0.0, expected / slots - missing)
                worth = self._worth(waiting, missing, later)
                wait_until = arrivals.wait_until(missing / arrivals.call_size, worth, now)
            else:
                wait_until = self._cut_at + self._pause(size, slots)
            if wait_until > now:
                longer = 1.0 + max(tuning.LEAST_MARGIN, self.margin)
                longest = longer * self.cost.duration(waiting * self._unit)
                urgent = backlog.deadline - self._transit - longest
                bound = backlog.oldest + self._max_latency
                if now < bound and now < urgent:
                    wait_until = min(wait_until, bound, urgent)
                    # Each that comes is one of those that are expected. But a larger batch takes
                    # longer, which counts if a deadline is near.
                    full_time = longer * self.cost.duration(size * self._unit)
                    if calls and wait_until + full_time <= backlog.deadline - self._transit:
                        backlog.ask_from = waiting + int(missing * tuning.SURE)
                    return Decision(0, reason, wait_until, max_cost, cost_reason, best_size, trial)
                reason = Reason.DEADLINE if urgent <= now else Reason.MAX_LATENCY
            is_late = True
            if backlog.free > 1:  # each of them takes some
                size = min(size, max(1, math.ceil((waiting + expected) / backlog.free - 1e-9)))
        if waiting <= size and reason not in _BOUNDS:
            has_waited = last.wait_until > backlog.oldest
            is_late = is_late or (has_waited and now >= last.wait_until)
            if size < full or waiting < size:
                reason = Reason.ALONE
                if has_waited:
                    reason = Reason.LATE if is_late else Reason.COMPANY
        size = min(waiting, int(size))
        return Decision(size, reason, -math.inf, max_cost, cost_reason, best_size, trial)

    def decide_early(self, backlog: Backlog, held: int, batches: int, beside: float) -> Decision:
        decision = self.decide(backlog)
        if not decision.size:
            return decision
        # If those who are answered come back at once, all of them will go round in so many batches
        # for as long as they call. One more of them costs a base each time; without it the stage
        # is idle until the others are answered.
        closedness = self._arrivals.closedness
        needed = math.ceil((backlog.items + closedness * held) / self.full)
        if batches + 1 > needed and beside <= closedness * self.cost.base:
            return decision._replace(size=0, wait_until=math.inf)
        return decision if decision.reason in _BOUNDS else decision._replace(reason=Reason.STAGE)

    def _latest(self, backlog: Backlog) -> float:
        """When a batch of what waits and one more item has to begin; the past if none can join."""
        waiting = backlog.items
        if waiting >= self.full:
            return -math.inf
        longer = 1.0 + max(tuning.NEAR_LEAST_MARGIN, self.margin)
        took = longer * self.cost.duration((waiting + 1) * self._unit)
        return min(backlog.deadline - self._transit - took, backlog.oldest + self._max_latency)

    def _is_tight(self, backlog: Backlog, size: int) -> bool:
        """Whether calls may be late if all that wait are computed in batches of this size."""
        longer, waiting = 1.0 + self.margin, backlog.items
        takes = (
            math.ceil(waiting / size) * self.cost.base + waiting * self.cost.per_unit * self._unit
        )
        left = backlog.deadline - self._transit - backlog.now
        return longer * takes > tuning.TIGHT * left

    def _in_time(self, backlog: Backlog, size: int) -> int:
        """The most items of a batch of at most ``size`` that keeps the deadline of the next call.

        Only where a smaller batch is back much sooner. Elsewhere it would only cost throughput.
        """
        longer = 1.0 + self.margin
        base, item = self.cost.base * longer, self.cost.per_unit * self._unit * longer
        if size * item <= tuning.FLAT * base:
            return size
        first = backlog.deadline - self._transit
        fits = size_in_time(size, base, item, first - backlog.oldest, first - backlog.now)
        # By a guess at what items cost only if no more wait than can be computed at the same time.
        is_sure = self.cost.was_fitted or backlog.items <= backlog.slots * fits
        return fits if is_sure else size

    def _worth(self, waiting: int, missing: float, later: float) -> float:
        """The longest wait for the missing items that pays, seconds.

        A batch of n takes a + b * n. Waiting saves each missing item one a, and each later one too,
        since there is one batch less. The waiting items lose the time, and b for each missing item;
        except in a closed loop, where a caller that is answered sooner waits longer the next time.

        Args:
            later: items that wait or come for this worker, beside both.
        """
        closedness = self._arrivals.closedness
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

        Independent calls are best spread over the workers in time, too: of two workers that begin
        at once one takes the other's items, and the next call waits for both.
        """
        if slots == 1:
            return 0.0
        pause = self.cost.duration(size * self._unit) / slots
        return pause * self._steepness(size) * (1.0 - self._arrivals.closedness)

    def _size(self, items: float, slots: int, in_flight: int) -> tuple[int, Reason]:
        """How many items to take at once, of those that wait or are expected, and why."""
        size, reason = items, Reason.ALONE
        if slots > 1:
            # Equal shares: if one took all, its callers would come back to it all at once. Where
            # the items cost more than the batch, one too few is better than one too many.
            share = (items + in_flight) / slots
            size, reason = max(1.0, share - 1.0 + self._steepness(share)), Reason.SHARE
        base, per_unit = self.cost.base, self.cost.per_unit * self._unit
        rate = self._rate
        growth = 1.0 - rate * per_unit
        if growth > 0.0 and per_unit > 0.0 and self.cost.is_fitted:
            # P items wait, batches of B take a + b * B one after the other, and others arrive at a
            # rate r. P falls at B / (a + b * B) - r, and all items wait meanwhile. The B for which
            # (P + B) / (B / (a + b * B) - r) is least follows from the derivative:
            root = rate * rate + growth * (rate * base + size) / (base * per_unit or 1e-12)
            pays = base / growth * (rate + math.sqrt(root))
            batches = math.ceil(size / max(1.0, pays) - 0.5)
            if batches > 1:
                size, reason = size / batches, Reason.PAYS
        return max(1, math.ceil(size - 1e-9)), reason
