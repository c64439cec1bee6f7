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
from bisect import bisect_right

from ..observe.metrics import Figures
from ..observe.record import BatchRecord, Call, Reason
from ..options.table import StreamerOptions
from .call_queue import FIXED_COSTS, UNKNOWN, CallQueue, Decision, Finish
from .learning import LEARNING_RATE, RATE_BATCHES, ArrivalForecast
from .scheduler import SURELY_LATE, Scheduler
from .slots import Slots

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
#: Where items have lengths, it takes no longer than this, seconds, if the next one is nearly as
#: fast. Chosen by reasoning: no hand-over of a batch costs much beside it.
LONGEST_PADDED = 0.01
#: With lengths it is as fast if it takes so many times what a batch costs beside its items.
#: Tuned between 5 and 33 with ``python -m policies --only latency minilm``: with 9, mean latency at
#: a load of 0.9 is up to a fifth higher, since batches have fewer neighbours in length.
PADDED_FIXED_COSTS = 17.0

#: Least ratio of the rates for which items are left to the next batch. Arbitrary: costs are learned
#: with some noise, and every further batch takes time in the scheduler and in the worker.
_FITTING_GAIN = 1.1

#: Items of such batches should not wait any longer.
_URGENT = (Reason.MAX_LATENCY, Reason.DEADLINE)


class BatchScheduler(Scheduler):
    """Waits for arrivals that are expected soon enough to pay, and shares out what waits.

    Where items have lengths the first batch has few items, and others cost at most twice what the
    largest so far did: until it is known what padding costs, a large one may take very long.
    """

    def __init__(
        self,
        slots: Slots,
        queue: CallQueue,
        figures: Figures,
        options: StreamerOptions,
        round_trip: float,
    ) -> None:
        super().__init__(slots, queue, figures)
        self._batch_size = options.batch_size
        self._max_latency = options.max_latency
        self._max_batch_cost = options.max_batch_cost or math.inf
        self._cost, self._has_lengths = queue.cost, queue.has_lengths
        self._arrivals = ArrivalForecast(round_trip)
        self._waits_until = -math.inf  # until when the last decision was to wait
        self._alone = 0  # batches in a row of one item, behind which none waited
        self._cut_at = -math.inf  # when a batch was cut last
        self._rate = 0.0  # items that arrive per second for each worker, recently
        self._unit = 1.0  # what an item costs, recently
        self._errors = 0  # batches of which it is known how exactly they were predicted
        #: By which share of its time a batch may take longer than is predicted, or less long.
        self._margin = URGENCY - 1.0
        self._transit = 0.0  # seconds of a batch beside its duration, where none was before it
        self._largest = 0.0  # cost of a batch so far
        self._longest = 0.0  # item so far
        self._set_bounds()

    # -- what happens

    def arrived(self, size: int, now: float) -> None:
        self._arrivals.arrived(size, now)
        if self._slots.idle and not self._queue.items:
            self._arrivals.began(self._duration(size), now)

    def prepare(self, batch: BatchRecord) -> float:
        if batch.search is None:
            batch.arrived = self._figures.accepted_items
            self._cut_at = batch.cut_at
        # With one stage a worker is free when its batch is back.
        return 0.0 if self._slots.room == 2 else self._cost.duration(batch.cost)

    def answered(self, batch: BatchRecord, calls: int) -> None:
        super().answered(batch, calls)
        report = batch.report
        duration = report.pace
        self._figures.took(duration, 4)
        if batch.search is not None:  # it says nothing of what batches are like
            return
        # What it took to find who is at fault says nothing of what items cost.
        size = 0 if report.runs else batch.size - len(report.failures)
        is_alone = batch.size == size == 1 and not self._queue.items
        self._alone = self._alone + 1 if is_alone else 0
        if self._alone > ALONE_BATCHES and self._alone % ALONE_INTERVAL:
            return
        self._arrivals.answered(calls, duration, batch.back_at)
        if size:
            self._learn_cost(batch.cost * size / batch.size, duration, size)
        item = max(batch.cost, 1e-9) / batch.size  # items of no length are known, too
        self._largest = max(self._largest, item * batch.size)
        self._longest = max(self._longest, item)
        self._unit += (item - self._unit) * LEARNING_RATE
        self._set_bounds()
        self._learn_rate(batch, duration)

    def _learn_cost(self, cost: float, duration: float, size: int) -> None:
        if self._cost.is_settled:  # of the line before this batch
            error = abs(duration / (self._cost.duration(cost) or math.inf) - 1.0)
            error = min(MARGIN_FACTOR * error, URGENCY - 1.0)
            self._errors += 1
            weight = max(NOISE_LEARNING_RATE, 1.0 / self._errors)
            self._margin += (error - self._margin) * weight
        self._cost.observe(cost, duration, size if self._has_lengths else None)

    def _learn_rate(self, batch: BatchRecord, duration: float) -> None:
        # What came to this worker meanwhile; but no more than keeps the queue as long as it is,
        # since a burst is no stream. In a closed loop calls come when the batch is back.
        came = max(
            (self._figures.accepted_items - batch.arrived) / max(1, self._slots.taking),
            self._arrivals.closedness * batch.size,
        )
        flight = batch.back_at - batch.cut_at
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
            # With lengths that is an estimate.
            items = round(items) if self._has_lengths else int(items)
            self.full, self._full_reason = max(1, items), reason
        self._most_cost = bound
        largest = GROWTH * self._largest
        if self._has_lengths and 0.0 < largest < bound:
            bound, reason = largest, Reason.TRIED
        self._max_cost, self._cost_reason = bound, reason

    def _longest_cost(self) -> float:
        """From which cost on a batch takes longer, and hardly less for each item."""
        base, per_unit = self._cost.base, self._cost.per_unit
        # Without lengths all items are alike, so nothing has to be bounded before it is known.
        if not per_unit or not (self._has_lengths or self._cost.is_fitted):
            return math.inf
        longest = max(LONGEST, FIXED_COSTS * base)
        if not self._has_lengths:
            items = (longest - base) / per_unit  # infinite if that is next to nothing
            return math.ceil(items) if items < math.inf else items
        padded = max(LONGEST_PADDED, PADDED_FIXED_COSTS * base)
        return (min(longest, padded) - base) / per_unit

    # -- what is known

    def _duration(self, items: float) -> float:
        """Seconds for a batch of so many items as they were lately; 0 while nothing is known."""
        return self._cost.duration(items * self._unit)

    def _finish(self, slot: int, size: int, now: float) -> Finish:
        """When the batch is back that is cut now, if there are deadlines or too much waits."""
        cost, slots, waiting = self._cost, self._slots, self._queue.items
        beside = max(self._transit, slots.beside)  # the transit has the other stages, once learned
        begins = slots.begins_at(slot, now, cost.duration) + beside
        if self._has_lengths or slots.room > 2 or not cost.was_fitted:
            # It differs with the lengths. And with several stages a worker is at several batches.
            return Finish(begins + self._duration(size)) if waiting > size else UNKNOWN
        size = min(size, waiting)
        base, item = cost.base, cost.per_unit * self._unit
        longer = 1.0 + self._margin
        # With one worker the others wait for two batches if the first of them has one of its own.
        least = least_in_time(size, base, item) if slots.taking > 1 else math.inf
        earliest = begins + base - self._margin * (base + size * item)
        return Finish(begins + base, earliest, item, least, begins + longer * base, longer * item)

    def hopeless_for(self, call: Call, now: float) -> float:
        queue, slots, cost = self._queue, self._slots, self._cost
        lengths, left = call.lengths, call.deadline - now
        work = queue.work + (call.size if lengths is None else sum(lengths))
        each = cost.base * (queue.items + call.size) + cost.per_unit * work
        if 2.0 * each <= left:
            return 0.0  # also if each item was computed alone, as nearly always
        takes = self._takes(call, queue.ahead(call))
        if not slots.idle and slots.room == 2:  # else several stages are at batches
            begins = [slots.begins_at(n, now, cost.duration) for n in slots]
            takes += max(0.0, 1.0 - self._margin) * (min(begins, default=now) - now)
        return takes if takes > SURELY_LATE * left else 0.0

    def _takes(self, call: Call, ahead: float = 0.0) -> float:
        cost, workers = self._cost, self._workers
        if not cost.is_settled or not workers:
            return 0.0
        lengths, most, alone = call.lengths, self._longest, 0.0
        if lengths is None:  # all are alike: nothing says that it is this call that is slow
            own = float(call.size)
        else:  # what is longer than all so far may be cut short by the model
            longest, own = max(lengths), sum(lengths)
            if longest > most:
                longest, own = most, sum([min(length, most) for length in lengths])
            alone = (1.0 - self._margin) * cost.duration(longest)
        work, together = ahead + own, 0.0
        batches = (ahead / self._unit + call.size) / self._batch_size
        # What a full batch costs, of items as they were lately.
        full = min(self._batch_size * self._unit, self._most_cost)
        if GROWTH * self._largest >= min(work, full):
            # Of batches that are much larger than all so far only trying tells.
            margin = self._margin / math.sqrt(max(1.0, batches))
            together = (1.0 - margin) * (work * cost.per_unit + batches * cost.base) / workers
        return max(0.0, alone, together)

    def _full_batch(self) -> tuple[int, float]:
        return self.full, self._duration(self.full)

    # -- decisions

    def decide(self, now: float) -> tuple[int, Decision]:
        slots = self._slots
        # Of the call that is next, for the slowest stage of a worker.
        deadline = self._queue.turns.head(now).deadline - URGENCY * slots.beside
        if slots.idle:
            slot, decision = next(iter(slots.idle)), self._decide(len(slots.idle), deadline, now)
        else:
            slot, decision = self._decide_ahead(deadline, now)
        if decision.size and (deadline < math.inf or self._queue.items > self.full):
            decision.finish = self._finish(slot, decision.size, now)
        return slot, decision

    def _decide_ahead(self, deadline: float, now: float) -> tuple[int, Decision]:
        """What to do with the items that wait while no worker is idle.

        What is not full may still grow until a worker can take it. And where another worker has
        less than a full batch, it is the first to be free, and takes its share.
        """
        slots, items, full = self._slots, self._queue.items, self.full
        oldest = self._queue.turns.oldest_arrival()
        is_full = items >= full and max(items, slots.held_items) >= full * slots.taking
        # Whether a call is late is known best when a worker is free.
        if is_full and deadline - oldest >= AHEAD_RUNS * self._duration(full):
            size, reason = self._wanted_size(0.0, oldest, deadline, now)
            return next(iter(slots.without_ahead)), self._cut(size, reason)
        slot, opens_at = slots.next_open()
        if opens_at > now:
            return slot, Decision(0, Reason.ALONE, opens_at)
        decision = self._decide(1, deadline, now)
        if decision.size and decision.reason not in _URGENT:
            decision.reason = Reason.STAGE
        return slot, decision

    def _decide(self, free: int, deadline: float, now: float) -> Decision:
        """What to do with the items that wait while so many workers could begin with some."""
        items, workers, arrivals = self._queue.items, self._slots.taking, self._arrivals
        oldest = self._queue.turns.oldest_arrival()
        waited_until, self._waits_until = self._waits_until, -math.inf
        expected = arrivals.expected(now) * arrivals.call_size
        size, reason = self._wanted_size(expected, oldest, deadline, now)
        missing = size - items
        if missing > 0:
            if expected:
                later = max(0.0, expected / workers - missing)
                worth = self._worth(items, missing, later)
                wait_until = arrivals.wait_until(missing / arrivals.call_size, worth, now)
            else:
                # Independent calls are best spread over the workers in time, too: of two workers
                # that begin at once one takes the other's items, and the next call waits for both.
                pause = self._duration(size) / workers if workers > 1 else 0.0
                is_open = 1.0 - arrivals.closedness
                wait_until = self._cut_at + pause * self._steepness(size) * is_open
            if wait_until > now:
                longest_wait = oldest + self._max_latency
                latest = self._latest_start(deadline, items)
                if longest_wait > now and latest > now:
                    wait_until = min(wait_until, longest_wait, latest)
                    is_sure = expected > 0.0 and wait_until <= self._latest_start(deadline, size)
                    enough = items + int(missing * SURE) if is_sure else 0
                    self._waits_until = wait_until
                    return Decision(0, reason, wait_until, enough=enough)
                reason = Reason.DEADLINE if latest <= now else Reason.MAX_LATENCY
            if free > 1:  # each of them takes some
                size = min(size, max(1, math.ceil((items + expected) / free - 1e-9)))
        is_all = items <= size and (items < size or size < self.full)
        if is_all and reason not in _URGENT:
            reason = Reason.ALONE
            if waited_until > oldest:
                is_late = missing > 0 or now >= waited_until
                reason = Reason.LATE if is_late else Reason.COMPANY
        return self._cut(min(items, size), reason)

    def _cut(self, size: int, reason: Reason) -> Decision:
        """A batch of so many items, or of as many as need no padding, if the model pads batches.

        33 items that are padded to 64 take as long as 64. If a batch of 32 computes more items per
        second, the last item is better left to the next batch.
        """
        sizes = self._slots.sizes  # those that batches are padded to, ascending
        at = bisect_right(sizes, size)
        if 0 < at < len(sizes) and sizes[at - 1] < size and reason not in _URGENT:
            below, above = sizes[at - 1], sizes[at]
            if below * self._duration(above) > _FITTING_GAIN * size * self._duration(below):
                size, reason = below, Reason.PAYS
        return Decision(size, reason, -math.inf, self._max_cost, self._cost_reason)

    def _wanted_size(
        self, expected: float, oldest: float, deadline: float, now: float
    ) -> tuple[int, Reason]:
        """How many items the next batch should have, with those that are expected, and why."""
        items, workers = self._queue.items, self._slots.taking
        size, reason = self._size(items + expected, workers, self._slots.held_items)
        if reason is Reason.PAYS and workers == 1 and deadline < math.inf:
            size = items  # many small batches together would take longer
        if size >= self.full:
            size, reason = self.full, self._full_reason
        if self._has_lengths and not self._largest and size > FIRST_ITEMS:
            size, reason = FIRST_ITEMS, Reason.TRIED
        if deadline < math.inf:
            most = min(size, items)
            in_time = self._in_time(most, oldest, deadline, now)
            if in_time < most:
                size, reason = in_time, Reason.DEADLINE
        return size, reason

    def _latest_start(self, deadline: float, size: float) -> float:
        """When a batch of so many items has to begin to be back by then."""
        longer = 1.0 + max(LEAST_MARGIN, self._margin)
        return deadline - self._transit - longer * self._duration(size)

    def _in_time(self, size: int, oldest: float, deadline: float, now: float) -> int:
        """The most items of a batch of at most ``size`` that keeps the deadline of the next call.

        Only where a smaller batch is back much sooner. Elsewhere it would only cost throughput.
        """
        longer = 1.0 + self._margin
        base, item = self._cost.base * longer, self._cost.per_unit * self._unit * longer
        if size * item <= FLAT * base:
            return size
        last = deadline - self._transit
        fits = size_in_time(size, base, item, last - oldest, last - now)
        # By a guess at what items cost only if no more wait than can be computed at the same time.
        is_sure = self._cost.was_fitted or self._queue.items <= self._slots.taking * fits
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
        spared = (missing + later + closedness * waiting) * self._cost.base
        spared -= (1.0 - closedness) * waiting * missing * self._cost.per_unit * self._unit
        return spared / (waiting + later)

    def _steepness(self, size: float) -> float:
        """From 0, where each item costs as much as a batch does, to 1, where a batch does."""
        items = self._cost.per_unit * self._unit * size
        base = self._cost.base
        return 1.0 if base >= items or not self._cost.is_fitted else (base / items) ** 2

    def _size(self, items: float, slots: int, in_flight: int) -> tuple[int, Reason]:
        """How many items to take at once, of those that wait or are expected, and why."""
        size, reason = items, Reason.ALONE
        if slots > 1:
            # Equal shares: if one took all, its callers would come back to it all at once. Where
            # the items cost more than the batch, one too few is better than one too many.
            share = (items + in_flight) / slots
            size, reason = max(1.0, share - 1.0 + self._steepness(share)), Reason.SHARE
        base, per_unit = self._cost.base, self._cost.per_unit * self._unit
        rate = self._rate
        growth = 1.0 - rate * per_unit
        if growth > 0.0 and per_unit > 0.0 and self._cost.is_fitted:
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
        fast = _items_at(LEAST_SPEED, largest, base, item)
        size = min(size, max(1, int(max(most / item, fast))))
    fits = int(max(0.0, left - base) / item)
    return fits if max(1.0, _items_at(LEAST_SPEED, size, base, item)) <= fits < size else size


def least_in_time(size: int, base: float, item: float) -> int:
    """The smallest batch that is worth it to keep the deadline of its first call.

    Args:
        size: items that a batch would have otherwise; at least one.
        base, item: what a batch takes, and what each item adds, seconds.
    """
    if base <= FLAT * item:
        return 1  # the items are nearly all of it
    return math.ceil(_items_at(LEAST_SPEED_OF_FIRST, size, base, item))


def _items_at(share: float, size: float, base: float, item: float) -> float:
    """The items of a batch with this share of the items per second of one of ``size``."""
    speed = share * size / (base + size * item)
    return speed * base / (1.0 - speed * item)
