"""Who takes what waits, and when: one scheduler for batches, and one for models of steps.

Both look at one ``CallLedger``. A worker of a model of steps has places, one for each item that it
steps. Its scheduler fills those that are free, and sends a few items more, so that a place that
becomes free is taken before the next step: to ask for one would take a step. Who waits is better
kept here than there, since here deadlines, priorities and tenants are looked at to the last. So
they are few.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..observe.metrics import StepLog
from ..observe.record import NO_OUTPUTS, BatchRecord, Call, Reason, StepReport
from ..supervision.autoscaling import Load
from .call_ledger import CallLedger
from .policy import UNKNOWN, URGENCY, Backlog, Decision, Finish, Policy

#: The number of recent batches whose slowest one says how long the next one takes.
#: Chosen by reasoning: odd, for a median.
FORECAST_BATCHES = 7
#: The margin on that.
#: Chosen by reasoning: a quarter, so that a call that is just in time is rarely late.
FORECAST_MARGIN = 1.25
#: Batches beyond this many times the median are not counted.
#: Chosen by reasoning: a first batch that compiles says nothing about the next one.
FORECAST_OUTLIER = 2.0
#: A new call that takes so many times its time is hopeless. In simulations all of those that are
#: refused would have been late with this, and 95 % without it.
SURELY_LATE = 1.2
#: Items that a worker holds beyond its places, as a share of them; one at least.
#: Chosen by reasoning: more than end in one step, if items take eight steps or more.
DECK_SHARE = 0.125
#: Deaths of workers that an item may be there for before it is computed alone, of a model of steps.
#: Chosen by reasoning: to compute all items of a worker one by one, which may take seconds each,
#: is right only if a worker dies of them again.
GRACE = 1

#: Of a model of steps, a free place takes the next item.
_PLACE = Decision(1, Reason.PLACE)

#: Items of such batches should not wait for the next one.
_URGENT = (Reason.DEADLINE, Reason.MAX_LATENCY)

#: Least ratio of the rates for which items are left to the next batch. Arbitrary: costs are learned
#: with some noise, and every further batch takes time in the scheduler and in the worker.
_FITTING_GAIN = 1.1


class Scheduler(ABC):
    """What both schedulers have. Each decides by what it has learned of its model's time."""

    def __init__(self, ledger: CallLedger) -> None:
        self._ledger = ledger
        self._slots = ledger.slots
        self._workers_before = 0  # that took batches when one was back last

    # -- what happens

    @abstractmethod
    def prepare(self, batch: BatchRecord) -> float:
        """A batch is about to be sent; how long it is in the slowest stage of a worker, seconds."""

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        """A worker has reported a step. One whose model has none only says that it has not hung."""
        self._slots.resumed(report.slot, now)
        return []

    @abstractmethod
    def came_back(self, batch: BatchRecord) -> None:
        """A batch is back, with results or a failure: count it."""
        self.note(batch)
        self._ledger.figures.recent.append(batch)
        self._workers_before = self._slots.taking

    def note(self, batch: BatchRecord) -> None:
        """Note in a batch that is back, or lost, what was counted until then."""
        figures = self._ledger.figures
        batch.queued = figures.metrics.queued.total
        batch.pending = self._ledger.queue.items
        batch.answered, batch.failed = figures.answered_calls, figures.failed_calls
        batch.expired, batch.rejected = figures.expired_calls, figures.rejected_calls

    @abstractmethod
    def answered(self, batch: BatchRecord, calls: int) -> None:
        """Of a batch that is back, and has not failed as a whole, so many calls are over."""

    def divide_lost(
        self, lost: Sequence[BatchRecord]
    ) -> tuple[Sequence[BatchRecord], Sequence[BatchRecord]]:
        """Of what a worker took with it: what can begin again or go on, and what cannot."""
        return lost, ()

    # -- what is decided

    @property
    @abstractmethod
    def full(self) -> int:
        """Items of a full batch."""

    @abstractmethod
    def decide(self, now: float) -> tuple[int, Decision]:
        """The idle worker that is next, and what to do with the items that wait."""

    @abstractmethod
    def decide_ahead(self, now: float) -> tuple[int, Decision]:
        """The busy worker that is next, and what to do with the items that wait."""

    def finish(self, slot: int, size: int, now: float) -> Finish:  # noqa: ARG002
        """When a batch that is cut now will be back."""
        return UNKNOWN

    @abstractmethod
    def hopeless_for(self, call: Call, now: float) -> float:
        """How long a new call takes at the least, seconds, if it cannot be in time; else 0."""

    def is_in_time_alone(self, call: Call, now: float) -> bool:
        """Whether a new call could be in time if nothing waited, and no worker was busy."""
        return self._takes(call) <= SURELY_LATE * (call.deadline - now)

    @property
    def _workers(self) -> int:
        """How many take batches. While all of them restart, how many did so before."""
        return self._slots.taking or self._workers_before

    @abstractmethod
    def _takes(self, call: Call, ahead: float = 0.0) -> float:
        """How long a new call takes at the least, behind so much work, seconds."""

    @abstractmethod
    def load(self, failed: int, start_duration: float) -> Load:
        """What there is to do, for ``Autoscaling``."""

    def _load(
        self, failed: int, start_duration: float, *, served: int, batches: int, full: int,
        seconds: float, turn: float,
    ) -> Load:  # fmt: skip
        """What there is to do where a full batch takes so many seconds."""
        ledger, figures = self._ledger, self._ledger.figures
        is_known = 0 < seconds < math.inf
        return Load(
            waiting=ledger.queue.items + ledger.retries.items,
            in_flight=self._slots.items,
            arrived=figures.accepted_items + figures.refused_items,
            served=served,
            batches=batches,
            ready=self._slots.taking,
            failed=failed,
            full=full,
            speed=full / seconds if is_known else 0.0,
            turn=turn if is_known else 0.0,
            start_duration=start_duration,
            refused=figures.refused_items + figures.expired_calls,
        )

    def check_invariants(self, batch_size: int, deadline: float) -> None:
        """Raise ``AssertionError`` if something waits that should have been cut. For tests."""
        slots, queue, retries = self._slots, self._ledger.queue, self._ledger.retries
        if slots.idle and (retries.waiting or queue.items):
            assert not retries.waiting
            assert queue.items < batch_size
            assert deadline < math.inf


class BatchScheduler(Scheduler):
    """Batches, as a policy decides.

    Args:
        policy: decides when to cut and how much.
    """

    def __init__(self, ledger: CallLedger, policy: Policy) -> None:
        super().__init__(ledger)
        self._policy = policy
        self._waits_until = -math.inf  # until when the last decision was to wait
        self._took: deque[float] = deque(maxlen=FORECAST_BATCHES)  # by the last batches, seconds

    def prepare(self, batch: BatchRecord) -> float:
        if batch.search is None:
            self._policy.batch_cut(batch, batch.cut_at)
        # With one stage a worker is free when its batch is back.
        return 0.0 if self._slots.room == 2 else self._policy.cost.duration(batch.cost)

    def came_back(self, batch: BatchRecord) -> None:
        self._ledger.figures.metrics.came_back(batch)
        super().came_back(batch)
        if self._ledger.queue.items >= self.full:
            self._took.append(batch.back_at - batch.cut_at)
        else:  # what a backlog took says nothing about the next one
            self._took.clear()

    def answered(self, batch: BatchRecord, calls: int) -> None:
        report, waiting = batch.report, self._ledger.queue.items
        self._ledger.figures.took(report.pace, 4)
        if batch.search is None:  # else it says nothing of what batches are like
            # What it took to find who is at fault says nothing of what items cost.
            failed = batch.size if report.runs else len(report.failures)
            self._policy.batch_returned(
                batch, calls, report.pace, self._slots.taking, waiting, batch.back_at, failed
            )

    @property
    def full(self) -> int:
        return self._policy.full

    def decide(self, now: float) -> tuple[int, Decision]:
        slots = self._slots
        slot = next(iter(slots.idle))
        decision = self._policy.decide(self._backlog(len(slots.idle), now))
        self._waits_until = decision.wait_until
        return slot, self._fit(decision)

    def decide_ahead(self, now: float) -> tuple[int, Decision]:
        slots, policy = self._slots, self._policy
        backlog = self._backlog(0, now)
        slot, decision = next(iter(slots.without_ahead)), policy.decide_ahead(backlog)
        if not decision.size and slots.beside:
            slot, opens_at = slots.next_open()
            if opens_at > now:
                return slot, decision._replace(wait_until=opens_at)
            decision = policy.decide(backlog._replace(free=1))
            self._waits_until = decision.wait_until
            if decision.size and decision.reason not in _URGENT:
                decision = decision._replace(reason=Reason.STAGE)
        return slot, self._fit(decision)

    def _backlog(self, free: int, now: float) -> Backlog:
        """What waits, of which so many workers could begin a part now."""
        queue, slots = self._ledger.queue, self._slots
        deadline = queue.first_deadline(now) - URGENCY * slots.beside
        return Backlog(
            queue.items, queue.oldest_arrival(), deadline, free, slots.taking, slots.items,
            self._waits_until, now,
        )  # fmt: skip

    def _fit(self, decision: Decision) -> Decision:
        """The decision for as many items as need no padding, if the model pads batches."""
        sizes = self._slots.sizes
        if sizes and decision.size and decision.reason not in _URGENT:
            size = min(decision.size, self._ledger.queue.items)
            fitted = _fit_size(size, sizes, self._policy.duration)
            if fitted < size:
                return decision._replace(size=fitted, reason=Reason.PAYS)
        return decision

    def finish(self, slot: int, size: int, now: float) -> Finish:
        slots, policy, queue = self._slots, self._policy, self._ledger.queue
        is_overloaded = queue.items > policy.full
        if not is_overloaded and queue.first_deadline(now) == math.inf:
            return UNKNOWN
        if policy.is_exact and slots.room == 2:  # else several stages are at several batches
            start = slots.begins_at(slot, now, policy.cost.duration)
            return policy.finish(start, min(size, queue.items), slots.taking)
        if is_overloaded:
            return Finish(now + self._forecast())
        return Finish(now + policy.duration(size)) if queue.items > size else UNKNOWN

    def _forecast(self) -> float:
        """How long a batch takes from being cut: somewhat more than the slowest of late.

        Returns:
            Seconds; 0 while little is known.
        """
        if len(self._took) < 3:
            return 0.0
        took = sorted(self._took)
        usual = took[(len(took) - 1) // 2]
        return FORECAST_MARGIN * max(each for each in took if each <= FORECAST_OUTLIER * usual)

    def hopeless_for(self, call: Call, now: float) -> float:
        queue, slots, policy = self._ledger.queue, self._slots, self._policy
        lengths, left, cost = call.lengths, call.deadline - now, policy.cost
        work = queue.work + (call.size if lengths is None else sum(lengths))
        each = cost.base * (queue.items + call.size) + cost.per_unit * work
        if 2.0 * each <= left:
            return 0.0  # also if each item was computed alone, as nearly always
        takes = self._takes(call, queue.ahead(call))
        if not slots.idle and slots.room == 2:  # else several stages are at batches
            begins = [slots.begins_at(n, now, cost.duration) for n in slots.numbers()]
            takes += max(0.0, 1.0 - policy.margin) * (min(begins, default=now) - now)
        return takes if takes > SURELY_LATE * left else 0.0

    def _takes(self, call: Call, ahead: float = 0.0) -> float:
        return self._policy.least_duration(call, ahead, self._workers)

    def load(self, failed: int, start_duration: float) -> Load:
        policy, metrics = self._policy, self._ledger.figures.metrics
        seconds = policy.duration(policy.full)
        return self._load(
            failed, start_duration, served=int(metrics.sizes.total), batches=metrics.batch.count,
            full=policy.full, seconds=seconds, turn=seconds,
        )  # fmt: skip


class StepScheduler(Scheduler):
    """Items of a model of steps: each is a batch, in a place of its worker until it is over.

    Args:
        places: how many items a worker steps at a time.
        resumes: whether a stream can go on with another worker where its outputs ended.
        log: of the last steps.
    """

    def __init__(self, ledger: CallLedger, places: int, log: StepLog, *, resumes: bool) -> None:
        super().__init__(ledger)
        room = places + max(1, math.ceil(places * DECK_SHARE))
        ledger.slots.begin_steps(places, room, GRACE)
        self._places = places
        self.resumes = resumes
        self.log = log

    def prepare(self, batch: BatchRecord) -> float:
        call, start, stop = batch.spans[0]
        if call.handed_out:  # with the item go the outputs that it has had
            # Not added to what is there: this may be the second try, after a signal handler raised.
            batch.payloads = [*call.payloads[start:stop], *call.handed_out]
        return 0.0

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        if report.is_sign_of_life:
            return super().stepped(report, now)
        metrics, log = self._ledger.figures.metrics, self.log
        held = self._slots.stepped(report.slot, now)
        metrics.stepped(report.size, report.duration)
        log.add(report, self._ledger.queue.items, now)
        parts: list[tuple[Call, Any]] = []
        for batch_id, output in report.outputs.items():
            batch = held.get(batch_id)
            if batch is None:
                continue
            call = batch.spans[0][0]
            if call.is_over:
                continue
            pause = call.handed_out_at(now)
            if pause is None:
                metrics.first_output.add(call.first_output)
                log.first_outputs.append(call.first_output)
                if call.handed_out is None and self.resumes:  # else it has begun elsewhere
                    call.handed_out = []
            else:
                metrics.between_outputs.add(pause)
            if call.handed_out is not None:
                if type(output) is bytes or getattr(output, "outlives_worker", False):
                    call.handed_out.append(output)
                else:  # it lies in memory that the worker takes with it
                    call.handed_out = None
            parts.append((call, output))
        return parts

    def came_back(self, batch: BatchRecord) -> None:
        self._ledger.figures.metrics.item_over(batch)
        if batch.spans[0][0].is_stream:
            batch.report.outputs = NO_OUTPUTS  # they have been handed out
        super().came_back(batch)

    def answered(self, batch: BatchRecord, calls: int) -> None:  # noqa: ARG002
        figures = self._ledger.figures
        # Items differ far more than batches do.
        figures.took(batch.report.pace, min(4 * self._places, figures.metrics.batch.count))

    def hold(self, call: Call, now: float, *, is_held: bool) -> list[BatchRecord]:
        """A stream's item is about to rest, or to go on; returns those of it that are in flight.

        None rests in a worker that is to end when it has finished what it holds.
        """
        slots = self._slots
        found = [batch for batch in slots.in_flight() if batch.spans[0][0] is call]
        if is_held:
            found = [batch for batch in found if not slots.is_closing(batch.slot)]
            call.is_held = bool(found)
        else:
            self._go_on(found, now)
        return found

    def wake(self, now: float, slot: int | None = None) -> list[BatchRecord]:
        """No item is to rest any more, of this worker or of all; returns those that did."""
        rested = [
            batch
            for batch in self._slots.in_flight()
            if batch.spans[0][0].is_held and slot in (None, batch.slot)
        ]
        self._go_on(rested, now)
        return rested

    def _go_on(self, batches: Sequence[BatchRecord], now: float) -> None:
        for batch in batches:
            batch.spans[0][0].is_held = False
            self._slots.resumed(batch.slot, now)

    def divide_lost(
        self, lost: Sequence[BatchRecord]
    ) -> tuple[Sequence[BatchRecord], Sequence[BatchRecord]]:
        # What a caller has got of a stream cannot be taken back.
        again: list[BatchRecord] = []
        cut_off: list[BatchRecord] = []
        for batch in lost:
            call = batch.spans[0][0]
            call.is_held = False  # the next worker does not know of it
            is_cut_off = call.part_at is not None and call.handed_out is None
            (cut_off if is_cut_off else again).append(batch)
        return again, cut_off

    @property
    def full(self) -> int:
        return 1

    def decide(self, now: float) -> tuple[int, Decision]:  # noqa: ARG002
        return next(iter(self._slots.idle)), _PLACE

    def decide_ahead(self, now: float) -> tuple[int, Decision]:  # noqa: ARG002
        return self._slots.emptiest(), _PLACE

    def hopeless_for(self, call: Call, now: float) -> float:
        takes = self._takes(call, self._ledger.queue.ahead(call))
        return takes if takes > SURELY_LATE * (call.deadline - now) else 0.0

    def _takes(self, call: Call, ahead: float = 0.0) -> float:  # noqa: ARG002
        queue, figures = self._ledger.queue, self._ledger.figures
        seconds = figures.batch_duration
        if not ahead or seconds == math.inf or figures.metrics.batch.count < self._places:
            return 0.0
        # As many come back, whatever their lengths. Those of no length may leave no work.
        items = ahead * queue.items / (queue.work or 1.0)
        return items * seconds / (self._places * max(1, self._workers))

    def load(self, failed: int, start_duration: float) -> Load:
        # All places together are one batch.
        over, places = self._ledger.figures.metrics.batch.count, self._places
        seconds = self._ledger.figures.batch_duration
        return self._load(
            failed, start_duration, served=over, batches=over // places,
            full=places, seconds=seconds, turn=seconds / places,
        )  # fmt: skip


def _fit_size(size: int, sizes: Sequence[int], duration: Callable[[float], float]) -> int:
    """How many of ``size`` items to cut now: all of them, or as many as need no padding.

    33 items that are padded to 64 take as long as 64. If a batch of 32 computes more items per
    second, the last item is better left to the next batch.

    Args:
        size: items that would be cut; at least 1.
        sizes: those that batches are padded to, ascending.
        duration: seconds for a batch of so many items.
    """
    at = bisect_right(sizes, size)
    if at in (0, len(sizes)) or sizes[at - 1] == size:
        return size
    below, above = sizes[at - 1], sizes[at]
    is_faster = below * duration(above) > _FITTING_GAIN * size * duration(below)
    return below if is_faster else size
