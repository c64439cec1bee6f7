"""When to cut a batch, and of how many items: learned from arrivals, and from what batches cost.

A worker that is free could take at once what waits. With one caller that is best. With 32 callers
in a closed loop it is not: the first call that returns would be computed alone while 31 wait. So a
free worker waits for expected arrivals, never longer than it pays.

Nor is it best to take all that waits. If one of eight workers takes everything, seven are idle: so
each takes its share. And in a burst the calls that are computed first need not wait for the last.

The commands by which its constants were found run in the repository's root.
``scheduling_grid.py`` compares the scheduler with the best fixed wait and batch size of 224 loads,
so it shows what a change costs. ``simulate`` runs one load in a second. The yardstick measures real
models. Change one number, run its command before and after, and keep the change only if the
difference is beyond the spread of several seeds. What is "chosen by reasoning" was not searched
for: the command beside it only shows that it holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..observe.record import BatchRecord, Call, Reason
from .learning import LEARNING_RATE, RATE_BATCHES, ArrivalForecast, LearnedCost, PaddedCost

#: While the scheduler waits for callers, it decides again when this share of those who are missing
#: has come. To decide with each of 64 took 0.7 ms of every batch. Chosen by reasoning: the number
#: that is expected is seldom further off. If it is, the wait ends at its time.
SURE = 0.875
#: A batch is cut early when this many of its durations are left until a deadline, at first.
#: Chosen by reasoning: what is just in time on average is late half of the time.
URGENCY = 2.0
#: Later it is one duration, and so many times the share by which batches differ from what the line
#: predicts, on average; but never more than at first.
#: Chosen by reasoning: of normal noise that is three standard deviations. Found necessary with
#: ``python -m policies --only goodput gpu``: with twice the duration nothing is ever waited for
#: where the deadline is twice a single run, and all workers begin at once.
MARGIN_FACTOR = 4.0
#: Weight of the newest batch in that share.
#: Chosen by reasoning: low, since a device that changes is no noise.
NOISE_LEARNING_RATE = 0.05
#: And never less than this share of a duration.
#: Chosen by reasoning, and better than none with the same command: to answer takes time, too.
LEAST_MARGIN = 0.1
#: Weight of the newest batch in the time that batches take beside the model, if it took longer.
#: Chosen by reasoning: low, since it may have waited for the batch before.
TRANSIT_RATE = 0.02
#: Batches are cut smaller for deadlines where their items take more than this many times the base.
#: Tuned between 0 and 2 with ``python -m policies --only goodput Poisson``: where the base is most
#: of a batch, a smaller one is hardly sooner back, and the rest pays for another one.
FLAT = 2.0
#: The share of the time until a deadline that a batch may take.
#: Tuned between 0.5 and 1 with ``python -m policies --only goodput minilm-even``: what just missed
#: a batch waits for that one and for its own, but most items wait for a part of one.
DEADLINE_SHARE = 0.6
#: But a batch is no smaller than one that computes this share of the items per second of a batch
#: that takes all of that time.
#: Tuned between 0.8 and 0.9 with the same.
LEAST_SPEED = 0.8
#: The same for a batch that is cut small for its first call while other workers take the rest.
#: Tuned between 0.4 and 0.9 with ``python -m policies --only goodput "Azure, code, gpu, 4, 5.0"``:
#: with more, a call that just missed a batch is late. With less, batches become tiny under load.
LEAST_SPEED_OF_FIRST = 0.4
#: With a deadline of less than so many full batches, none is sent ahead to a busy worker.
#: Chosen by reasoning: what is sent ahead cannot be left out any more when it turns out to be late.
AHEAD_RUNS = 8.0
#: Items of the first batch, where items have lengths.
#: Chosen by reasoning: few enough not to take long whatever their lengths are.
FIRST_ITEMS = 8
#: With lengths, a batch costs at most this many times the largest one so far.
#: Chosen by reasoning: doubling reaches any size within a few batches.
GROWTH = 2.0
#: Of lone items in a row, behind which none waits, all batches are learned from up to so many.
#: Chosen by reasoning: as long as the line forgets the half of what it knew.
ALONE_BATCHES = 16
#: Then one of so many, since another one that is like them changes nothing that is decided.
#: Chosen by measurement: it spares a lone call whose model takes no time a tenth of its cost.
ALONE_INTERVAL = 8
#: A batch takes no longer than this, seconds, if the next one is nearly as fast.
#: Chosen by reasoning: so long whoever comes next waits for it, and for one that was sent ahead.
LONGEST = 1.0
#: It is as fast if it takes so many times what a batch costs beside its items.
#: Chosen by reasoning: then about a tenth of the throughput is lost.
FIXED_COSTS = 9.0
#: Where items have lengths, it takes no longer than this, seconds, if the next one is nearly as
#: fast. Chosen by reasoning: no hand-over of a batch costs much beside it.
LONGEST_PADDED = 0.01
#: With lengths it is as fast if it takes so many times what a batch costs beside its items.
#: Tuned between 5 and 33 with ``python -m policies --only latency minilm``: with 9, mean latency at
#: a load of 0.9 is up to a fifth higher, since batches have fewer neighbours in length.
PADDED_FIXED_COSTS = 17.0

#: Of items, so that a batch which is back just in time is not one item smaller.
_ROUNDING = 1e-9

#: Why expected arrivals are not waited for any longer.
_BOUNDS = (Reason.MAX_LATENCY, Reason.DEADLINE)


class Decision(NamedTuple):
    """What to do with the items that wait."""

    size: int  # the most items to cut into a batch now; 0 to wait
    reason: Reason  # why the batch gets no more items
    wait_until: float = -math.inf  # when to decide again if nothing happens before
    max_cost: float = math.inf  # the most that the batch may cost, unless one item costs more
    cost_reason: Reason = Reason.COST  # why it gets no more items, if ``max_cost`` ends it
    #: With fewer items it is still best to wait: each call that comes until then is one that was
    #: expected. 0 where that is not known.
    enough: int = 0


#: Nothing is sent ahead: what waits may still grow until a worker is free.
_NOT_AHEAD = Decision(0, Reason.ALONE, math.inf)


class Backlog(NamedTuple):
    """The items that wait, and the workers for them: what a decision depends on."""

    items: int  # that wait; at least one
    oldest: float  # when the oldest of them arrived
    deadline: float  # of the call that is next, for the slowest stage of a worker
    free: int  # workers that could begin with a batch now
    workers: int  # that take batches
    in_flight: int  # items that workers hold
    waited_until: float  # when the last decision was to wait for; in the past if it was to cut
    now: float


class Finish(NamedTuple):
    """When a batch is back, by its size; as far as that is known."""

    likely: float  # a batch without items, as predicted
    earliest: float = -math.inf  # the same, if it is as fast as it hardly ever is
    each: float = 0.0  # what each item adds, seconds
    #: The smallest batch that is worth it for the sake of its first call. The others have to wait
    #: for another batch. Infinity for none.
    least: float = math.inf
    safely: float = math.inf  # a batch without items, if it is as slow as it hardly ever is
    safely_each: float = 0.0  # what each item adds then, seconds

    def last(self, now: float, size: int) -> float:
        """When a batch of that size is likely back: a call with a later deadline is in time."""
        return max(now, self.likely + self.each * size)

    def room(self, deadline: float, most: int) -> int:
        """The most items of a batch that is surely back by then, if a smaller one is worth it."""
        if self.least >= most or not self.safely_each:
            return most
        fits = int((deadline - self.safely) / self.safely_each + _ROUNDING)
        return min(most, fits) if fits >= self.least else most


#: Nothing is known, so no call is late before its time has ended.
UNKNOWN = Finish(-math.inf)


class Policy:
    """Waits for arrivals that are expected soon enough to pay, and shares out what waits.

    Times are of one monotonic clock, in seconds. Events say what happened; the other methods ask,
    and may be asked any number of times.

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
        full: how many items are a full batch.
        margin: by which share of its time a batch may take longer than is predicted, or less long.
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
        self._unit = 1.0  # what an item costs, recently
        self._errors = 0  # batches of which it is known how exactly they were predicted
        self.margin = URGENCY - 1.0
        self._transit = 0.0  # seconds of a batch beside its duration, where none was before it
        self._largest = 0.0  # cost of a batch so far
        self._longest = 0.0  # item so far
        self.cost = PaddedCost() if has_lengths else LearnedCost()
        self._set_bounds()

    # -- what happens

    def call_arrived(self, size: int, now: float, *, is_first: bool) -> None:
        """A call of ``size`` items arrived; the first if nothing waits and a worker is free."""
        self._arrived += size
        self._arrivals.arrived(size, now)
        if is_first:
            self._arrivals.began(self.cost.duration(size * self._unit), now)

    def batch_cut(self, batch: BatchRecord, now: float) -> None:
        """A batch was cut, as decided."""
        batch.arrived = self._arrived
        self._cut_at = now

    def batch_returned(
        self,
        batch: BatchRecord,
        calls: int,
        duration: float,
        workers: int,
        waiting: int,
        now: float,
        failed: int = 0,
    ) -> None:
        """A batch is back: so many calls are answered, and ``failed`` items were not computed.

        Args:
            workers: that take batches.
            waiting: items that wait.
        """
        self._alone = 0 if batch.size > 1 or waiting or failed else self._alone + 1
        if self._alone > ALONE_BATCHES and self._alone % ALONE_INTERVAL:
            return
        self._arrivals.answered(calls, duration, now)
        size = batch.size - failed
        if size:
            cost = batch.cost * size / batch.size
            if self.cost.is_settled:  # of the line before this batch
                error = abs(duration / (self.cost.duration(cost) or math.inf) - 1.0)
                error = min(MARGIN_FACTOR * error, URGENCY - 1.0)
                self._errors += 1
                weight = max(NOISE_LEARNING_RATE, 1.0 / self._errors)
                self.margin += (error - self.margin) * weight
            self.cost.observe(cost, duration, size)
        self._largest = max(self._largest, batch.cost, 1e-9)  # items of no length are known, too
        self._longest = max(self._longest, batch.cost / batch.size)
        self._unit += (max(batch.cost, 1e-9) / batch.size - self._unit) * LEARNING_RATE
        self._set_bounds()
        # What came to this worker meanwhile; but no more than keeps the queue as long as it is,
        # since a burst is no stream. In a closed loop calls come when the batch is back.
        came = max(
            (self._arrived - batch.arrived) / max(1, workers),
            self._arrivals.closedness * batch.size,
        )
        flight = now - batch.cut_at
        # Of a batch that was sent ahead it has the wait for the one before, which counts little.
        beside = max(0.0, flight - duration)
        weight = LEARNING_RATE if beside < self._transit else TRANSIT_RATE
        self._transit += (beside - self._transit) * weight
        if flight > 0.0 and duration > 0.0:
            rate = min(came / flight, batch.size / duration)
            self._rate += (rate - self._rate) / RATE_BATCHES

    def _set_bounds(self) -> None:
        """Derive what bounds a batch from what is known of its cost."""
        bound, reason = self._max_batch_cost, Reason.COST
        longest = self._longest_cost()
        # With lengths a batch of short items may have more of them than one of usual ones.
        items = min(bound, math.inf if self._has_lengths else longest) / self._unit
        if longest < bound:
            bound, reason = longest, Reason.LONG
        self.full, self._full_reason = self._batch_size, Reason.FULL
        if items < self._batch_size:
            self.full, self._full_reason = max(1, round(items)), reason
        self._most_cost = bound
        largest = GROWTH * self._largest
        if self._has_lengths and 0.0 < largest < bound:
            bound, reason = largest, Reason.TRIED
        self._max_cost, self._cost_reason = bound, reason

    def _longest_cost(self) -> float:
        """From which cost on a batch takes longer, and hardly less for each item."""
        base, per_unit = self.cost.base, self.cost.per_unit
        # Without lengths all items are alike, so nothing has to be bounded before it is known.
        if not per_unit or not (self._has_lengths or self.cost.is_fitted):
            return math.inf
        longest = max(LONGEST, FIXED_COSTS * base)
        if not self._has_lengths:
            items = (longest - base) / per_unit  # infinite if that is next to nothing
            return math.ceil(items) if items < math.inf else items
        padded = max(LONGEST_PADDED, PADDED_FIXED_COSTS * base)
        return (min(longest, padded) - base) / per_unit

    # -- what is known

    def duration(self, items: float) -> float:
        """Seconds for a batch of so many items as they were lately; 0 while nothing is known."""
        return self.cost.duration(items * self._unit)

    @property
    def is_exact(self) -> bool:
        """Whether the number of its items says how long a batch takes."""
        return self.cost.was_fitted and not self._has_lengths

    def finish(self, start: float, size: int, workers: int) -> Finish:
        """When a batch is back with which a worker begins then, if that ``is_exact``."""
        cost = self.cost
        base, item = cost.base, cost.per_unit * self._unit
        begins, longer = start + self._transit, 1.0 + self.margin
        # With one worker the others wait for two batches if the first of them has one of its own.
        least = least_in_time(size, base, item) if workers > 1 else math.inf
        earliest = begins + base - self.margin * (base + size * item)
        return Finish(begins + base, earliest, item, least, begins + longer * base, longer * item)

    def least_duration(self, call: Call, ahead: float, workers: int) -> float:
        """Seconds that a call takes at the least, behind so much cost; 0 while it is not known."""
        cost = self.cost
        if not cost.is_settled or not workers:
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
        full = min(self._batch_size * self._unit, self._most_cost)
        if GROWTH * self._largest >= min(work, full):
            # Of batches that are much larger than all so far only trying tells.
            margin = self.margin / math.sqrt(max(1.0, batches))
            together = (1.0 - margin) * (work * cost.per_unit + batches * cost.base) / workers
        return max(0.0, alone, together)

    # -- decisions

    def decide(self, backlog: Backlog) -> Decision:
        """What to do with the items that wait while workers are free."""
        items, now, arrivals = backlog.items, backlog.now, self._arrivals
        expected = arrivals.expected(now) * arrivals.call_size
        size, reason = self._wanted_size(backlog, expected)
        missing = size - items
        if missing > 0:
            if expected:
                later = max(0.0, expected / backlog.workers - missing)
                worth = self._worth(items, missing, later)
                wait_until = arrivals.wait_until(missing / arrivals.call_size, worth, now)
            else:
                wait_until = self._cut_at + self._pause(size, backlog.workers)
            if wait_until > now:
                longest_wait = backlog.oldest + self._max_latency
                latest = self._latest_start(backlog, items)
                if longest_wait > now and latest > now:
                    wait_until = min(wait_until, longest_wait, latest)
                    is_sure = expected > 0.0 and wait_until <= self._latest_start(backlog, size)
                    enough = items + int(missing * SURE) if is_sure else 0
                    return Decision(0, reason, wait_until, enough=enough)
                reason = Reason.DEADLINE if latest <= now else Reason.MAX_LATENCY
            if backlog.free > 1:  # each of them takes some
                size = min(size, max(1, math.ceil((items + expected) / backlog.free - 1e-9)))
        is_all = items <= size and (items < size or size < self.full)
        if is_all and reason not in _BOUNDS:
            reason = Reason.ALONE
            if backlog.waited_until > backlog.oldest:
                is_late = missing > 0 or now >= backlog.waited_until
                reason = Reason.LATE if is_late else Reason.COMPANY
        return self._cut(min(items, size), reason)

    def _cut(self, size: int, reason: Reason) -> Decision:
        return Decision(size, reason, -math.inf, self._max_cost, self._cost_reason)

    def decide_ahead(self, backlog: Backlog) -> Decision:
        """What to do with the items that wait while a busy worker may be sent a batch ahead.

        What is not full may still grow until a worker can take it. And where another worker has
        less than a full batch, it is the first to be free, and takes its share.
        """
        full, all_full = self.full, self.full * backlog.workers
        if backlog.items < full or max(backlog.items, backlog.in_flight) < all_full:
            return _NOT_AHEAD
        # Whether a call is late is known best when a worker is free.
        if backlog.deadline - backlog.oldest < AHEAD_RUNS * self.duration(full):
            return _NOT_AHEAD
        return self._cut(*self._wanted_size(backlog, 0.0))

    def _wanted_size(self, backlog: Backlog, expected: float) -> tuple[int, Reason]:
        """How many items the next batch should have, with those that are expected, and why."""
        size, reason = self._size(backlog.items + expected, backlog.workers, backlog.in_flight)
        if reason is Reason.PAYS and backlog.workers == 1 and backlog.deadline < math.inf:
            size = backlog.items  # many small batches together would take longer
        if size >= self.full:
            size, reason = self.full, self._full_reason
        if self._has_lengths and not self._largest and size > FIRST_ITEMS:
            size, reason = FIRST_ITEMS, Reason.TRIED
        if backlog.deadline < math.inf:
            most = min(size, backlog.items)
            in_time = self._in_time(backlog, most)
            if in_time < most:
                size, reason = in_time, Reason.DEADLINE
        return size, reason

    def _latest_start(self, backlog: Backlog, size: float) -> float:
        """When a batch of so many items has to begin to be in time for the next call."""
        longer = 1.0 + max(LEAST_MARGIN, self.margin)
        return backlog.deadline - self._transit - longer * self.duration(size)

    def _in_time(self, backlog: Backlog, size: int) -> int:
        """The most items of a batch of at most ``size`` that keeps the deadline of the next call.

        Only where a smaller batch is back much sooner. Elsewhere it would only cost throughput.
        """
        longer = 1.0 + self.margin
        base, item = self.cost.base * longer, self.cost.per_unit * self._unit * longer
        if size * item <= FLAT * base:
            return size
        first = backlog.deadline - self._transit
        fits = size_in_time(size, base, item, first - backlog.oldest, first - backlog.now)
        # By a guess at what items cost only if no more wait than can be computed at the same time.
        is_sure = self.cost.was_fitted or backlog.items <= backlog.workers * fits
        return fits if is_sure else size

    def _worth(self, waiting: int, missing: float, later: float) -> float:
        """The longest wait for the missing items that pays, seconds.

        A batch of n takes a + b * n. Waiting saves each missing item one a, and each later one too,
        since there is one batch less. The waiting items lose the time, and b for each missing item;
        except in a closed loop, where a caller that is answered sooner waits longer the next time.

        Args:
            later: items that come for this worker, beside both.
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


def size_in_time(size: int, base: float, item: float, total: float, left: float) -> int:
    """How many of so many items to compute at once, of calls with deadlines.

    A batch that takes most of the time until a deadline makes the calls late that just missed it.
    So it is bounded. And it is smaller still if the first call would be late otherwise, and that
    costs little throughput. If it costs much, that call gives way to others.

    Args:
        size: the items; at least one.
        base, item: what a batch takes, and what each item adds, seconds; with a margin.
        total: from the arrival of the first call to its deadline, seconds.
        left: from now to its deadline, seconds.

    Returns:
        At least 1, at most ``size``.
    """
    most = DEADLINE_SHARE * total - base
    largest = min(float(size), (total - base) / item)
    if most < size * item and largest >= 1.0:
        least = LEAST_SPEED * largest / (base + largest * item)
        fast = least * base / (1.0 - least * item)  # the size with that speed
        size = min(size, max(1, int(max(most / item, fast))))
    fits = int(max(0.0, left - base) / item)
    if 1 <= fits < size and fits * (base + size * item) >= LEAST_SPEED * size * (
        base + fits * item
    ):
        return fits
    return size


def least_in_time(size: int, base: float, item: float) -> int:
    """The smallest batch that is worth it to keep the deadline of its first call.

    Args:
        size: items that a batch would have otherwise; at least one.
        base, item: what a batch takes, and what each item adds, seconds.
    """
    if base <= FLAT * item:
        return 1  # the items are nearly all of it
    speed = LEAST_SPEED_OF_FIRST * size / (base + size * item)
    return math.ceil(speed * base / (1.0 - speed * item))
