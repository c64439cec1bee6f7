"""The state machine of batching: what happened goes in, what is to be done comes out.

    span    state       held by                                     leaves when
    ----    -----       -------                                     -----------
            PENDING     its call in Batcher._pending, by arrival    it is cut into a batch
            IN_FLIGHT   Batch.spans of a batch in Batcher._slots    the batch is done, failed, lost
            SUSPECT     Suspects.spans in Batcher._retries          it is cut again, in a part
            OVER        nothing (its call may still be waiting      -
                        for other spans)

A worker has a slot from when it is ready until it is lost. A call that fails, is withdrawn or
expires is over at once: its pending items are skipped when a batch is cut and its spans elsewhere
are ignored. Suspects take turns with what is pending. Those that may kill a worker have one for
themselves. Nothing here does I/O, reads a clock, locks or logs; the engine calls one method at a
time and does what the returned ``Actions`` say, in order: first send the batches, so that workers
are busy again, then answer the calls.

``recovery`` decides on batches that failed or were lost, and ``endings`` ends the calls that get no
results.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..observe.metrics import BatchMetrics
from ..observe.recent import RECENT
from ..observe.record import NO_OUTPUTS, BatchRecord, BatchReport, Call, Reason, StepReport
from ..options.table import StreamerOptions
from ..supervision.autoscaling import Load
from ..supervision.health import BatchBound, Health
from .batch_sizes import fit_size
from .call_queue import CallQueue
from .endings import Endings
from .isolation import Retries, Search, Suspects
from .length_queue import LengthQueue
from .overload import Deadlines, Forecast, Throughput
from .policy import Backlog, Decision, LearnedPolicy, Policy
from .recovery import Recovery
from .slots import Slots
from .step_policy import StepPolicy, room_of_places
from .stepping import Stepping
from .tuning import GRACE, URGENCY

__all__ = ["NOTHING", "Actions", "Batcher", "build_batcher"]


class Actions(NamedTuple):
    """What to do now, in this order.

    Attributes:
        batches: to send.
        calls: to answer; they are over.
        hung: slots whose batch has taken too long: end their workers, or say so.
        vacant: retiring slots that have nothing left to do: let their workers end.
        searches: that have come to an end, for the log.
        condemned: slots whose workers fail everything while others do not: replace them.
    """

    batches: Sequence[BatchRecord] = ()
    calls: Sequence[Call] = ()
    hung: Sequence[int] = ()
    vacant: Sequence[int] = ()
    searches: Sequence[Search] = ()
    condemned: Sequence[int] = ()


#: Items of such batches should not wait for the next one.
_URGENT = (Reason.DEADLINE, Reason.MAX_LATENCY)

#: The usual answer to a submission while all workers are busy.
NOTHING = Actions()


class Batcher:
    """Groups the items of calls into batches for the workers that there are.

    Args:
        batch_size: the most items of a batch.
        max_latency: the longest that an item waits while a worker is free, seconds.
        max_pending: the most items that may wait; None sets no bound.
        max_attempts: worker crashes that an item may be involved in before it fails; 1 for models
            that must not run twice.
        isolate_errors: whether a batch on which the model raises is run again in smaller parts.
        shared: makes of a failure what calls fail with that shared a batch with the one at fault,
            when it is not known which that is: without anything of the other's. Gets the failure
            and whether it is the loss of a worker.
        batch_timeout: how long a worker may compute one batch, seconds, or an object that learns
            it; None sets no bound.
        expired: what calls whose time ends fail with, opaque here.
        expired_suspect: the same for those that a worker died with.
        has_lengths: whether the items of calls have lengths.
        max_batch_cost: upper bound on items times longest item; None sets no bound.
        tenant_weights: relative weight per tenant (default 1).
        round_trip: how long results take to callers, and their next calls back, seconds.
        policy: decides when to cut and how much; by default it learns to.

    Attributes:
        deadline: when to call ``time_passed``; infinity when only an event can change things.
        is_behind: whether more waits than workers keep up with, so that a call may be hopeless.
        accepted_calls, answered_calls: how many, so far.
        accepted_items: how many, so far.
        rejected_calls: how many found no room so far; the engine counts them.
        refused_items: of those calls that were refused since too much waited; counted there, too.
        metrics: of the batches so far.
        on_back: called with the record of every batch that comes back, which it has to release;
            None if the batches are not watched. Of a model of steps also with those that are lost
            with their worker.
        health: of the workers.
        batch_duration: what the model has taken for a batch of late, seconds; infinity before the
            first.
        recent: the last batches that came back, the oldest first.
        has_steps: whether the model is known to be one of steps. Then each batch is one item, which
            has a place in its worker until it is over.
        steps: what is known of these items; None without.
        sizes: those that the model pads batches to, ascending; none if it computes any size.
    """

    __slots__ = (
        "_ahead_from",
        "_backlog",
        "_batch_size",
        "_deadlines",
        "_endings",
        "_forecast",
        "_full",
        "_max_pending",
        "_next_batch_id",
        "_pending",
        "_policy",
        "_recovery",
        "_retries",
        "_slots",
        "_throughput",
        "accepted_calls",
        "accepted_items",
        "answered_calls",
        "batch_duration",
        "deadline",
        "has_steps",
        "health",
        "is_behind",
        "metrics",
        "on_back",
        "recent",
        "refused_items",
        "rejected_calls",
        "sizes",
        "steps",
    )

    def __init__(
        self,
        *,
        batch_size: int,
        max_latency: float,
        max_pending: int | None = None,
        max_attempts: int = 3,
        isolate_errors: bool = True,
        batch_timeout: float | BatchBound | None = None,
        expired: Any = None,
        expired_suspect: Any = None,
        shared: Callable[[Any, bool], Any] = lambda failure, _: failure,
        has_lengths: bool = False,
        max_batch_cost: float | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        round_trip: float = 0.0,
        policy: Policy | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._max_pending = math.inf if max_pending is None else max_pending
        if not isinstance(batch_timeout, BatchBound):
            fixed = math.inf if batch_timeout is None else batch_timeout
            batch_timeout = BatchBound(fixed=fixed)
        self._slots = Slots(
            batch_timeout,
            # What is never run twice should not go down with a batch that it only waited behind.
            sends_ahead=max_attempts > 1,
        )
        max_cost = math.inf if max_batch_cost is None else max_batch_cost
        self._policy = policy or LearnedPolicy(
            batch_size,
            max_latency,
            has_lengths=has_lengths,
            max_batch_cost=max_cost,
            round_trip=round_trip,
        )
        self._backlog = Backlog(
            Decision(0, Reason.ALONE, -math.inf, max_cost, Reason.COST, batch_size)
        )
        self._pending: CallQueue | LengthQueue = CallQueue(tenant_weights)
        if has_lengths:
            self._pending = LengthQueue(
                self._policy.cost,
                batch_size=batch_size,
                weights=tenant_weights,
            )
        self._retries = Retries(
            batch_size=batch_size, max_attempts=max_attempts, isolate_errors=isolate_errors
        )
        self._endings = Endings(
            self._pending,
            self._retries,
            expired=expired,
            expired_suspect=expired if expired_suspect is None else expired_suspect,
            shared=shared,
        )
        self.health = Health()
        self._recovery = Recovery(
            self._slots, self._retries, self.health, self._endings, self._policy.cost
        )
        self._next_batch_id = 0
        self._forecast = Forecast()
        self._throughput = Throughput()
        self._full = self._policy.full()  # items of a full batch
        self._ahead_from = self._full  # with fewer waiting items no batch is sent ahead
        self.sizes: tuple[int, ...] = ()
        self.has_steps = False
        self.steps: Stepping | None = None
        self._deadlines: Deadlines[Call] = Deadlines()
        self.deadline = math.inf
        self.is_behind = False
        self.accepted_calls = self.accepted_items = 0
        self.answered_calls = self.rejected_calls = self.refused_items = 0
        self.batch_duration = math.inf
        self.metrics = BatchMetrics()
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT)
        self.on_back: Callable[[BatchRecord], None] | None = None

    # -- what callers do

    def has_room_for(self, size: int) -> bool:
        """Whether so many items more may wait."""
        return self._pending.items + size <= self._max_pending

    def is_hopeless(self, deadline: float, now: float) -> bool:
        """Whether so much waits that a new call cannot be computed in time; counts it, if so.

        To say so at once spares its caller the waiting, and everybody else a queue full of calls
        that come to nothing.
        """
        # Where all take turns, what waits need not be before it.
        if self._pending.is_fair:
            return False
        if now + self._pending.items / self._throughput.rate <= deadline:
            return False
        self._endings.expired += 1
        return True

    def call_submitted(
        self, call: Call, now: float, is_watched: bool = False, more: bool = False
    ) -> Actions:
        """A call with at least one item arrived.

        Args:
            is_watched: whether it is to expire here when its time ends, wherever its items are.
            more: whether others arrive at the same time, and ``calls_submitted`` after them: a
                batch is not cut of the first of them alone. Full ones for all workers that are free
                are, since nothing that follows could change them.
        """
        call.arrived_at = now
        self.accepted_calls += 1
        pending, slots = self._pending, self._slots
        is_first = not pending.items and bool(slots.idle)
        pending.add(call)
        if is_watched and call.deadline < math.inf:
            self._deadlines.add(call)
            self._set_deadline(self.deadline)
        self.accepted_items += call.pending
        self._policy.arrived(call.pending, now, is_first)
        if slots.idle:
            if not more or pending.items >= self._batch_size * len(slots.idle):
                return self._cut(now)
        elif slots.without_ahead:
            if pending.items >= self._ahead_from:
                decision = self._policy.decide_ahead(self._backlog_ahead())
                if decision.size:
                    return self._cut(now, ahead=decision)
                if decision is not self._backlog.last:
                    self._decided(decision)
            if slots.next_open < math.inf and not more:
                return self._cut_early(now)
        return NOTHING  # no worker is free: the usual case under load, so without a look

    def calls_submitted(self, now: float) -> Actions:
        """All the calls have arrived that were said to come."""
        return self._cut(now) if self._slots.idle else self._cut_early(now)

    def call_withdrawn(self, call: Call) -> bool:
        """The caller has gone. False if it was over already."""
        return self._left(call, has_expired=False)

    def call_cancelled(self, call: Call) -> bool:
        """Withdraw the call unless a part of it has been sent; returns whether it was withdrawn."""
        return call.pending == call.size and self.call_withdrawn(call)

    def call_expired(self, call: Call) -> bool:
        """Its caller's time has ended. False if it was over already."""
        return self._left(call, has_expired=True)

    def _left(self, call: Call, *, has_expired: bool) -> bool:
        has_ended = self._endings.left(call, has_expired=has_expired)
        if has_ended and not self._pending.items:  # no time need come for what waits
            self._set_deadline(math.inf)
        return has_ended

    # -- what workers do

    def worker_ready(self, slot: int, now: float, took: float = 0.0) -> Actions:
        """A worker has loaded its model; ``slot`` is its name from now on.

        Args:
            took: from its start on, seconds.
        """
        self._recovery.start_duration = took
        self._slots.add(slot)
        return self._cut(now)

    def begin_steps(self, places: int, *, resumes: bool = False) -> None:
        """The first worker is about to be ready, and its model is one of steps.

        Args:
            places: how many items it steps at a time.
            resumes: whether a stream can go on with another worker where its outputs ended.
        """
        self.has_steps = True
        self.steps = Stepping(places, self._slots, self._endings, self.metrics, resumes=resumes)
        self._policy = StepPolicy()
        self._slots.begin_steps(places, room_of_places(places), GRACE)
        self._retries.grace = GRACE
        self._full = self._ahead_from = self._policy.full()
        self._backlog.last = self._policy.decide(self._backlog)

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        """A worker has taken a step; the calls of streams, each with an output to be handed out.

        What is over by that comes back as batches do: ``batch_returned`` is called with it next.
        """
        assert self.steps is not None
        return self.steps.stepped(report, self._pending.items, now)

    def worker_retiring(self, slot: int, now: float) -> Actions:
        """A worker that is ready is to end when it has finished what it holds."""
        is_vacant = self._slots.close(slot)
        # If it was the last one that took batches, those that are held back have to go on.
        return self._cut(now, (), [slot] if is_vacant else ())

    def worker_kept(self, slot: int, now: float) -> Actions:
        """A worker that was retiring, and is not lost, is to go on after all."""
        self._slots.reopen(slot, takes=slot not in self.health.trials)
        return self._cut(now)

    def worker_dying(self, slot: int) -> None:
        """A worker will be said to be lost, after what it still answered: it gets no more."""
        if slot in self._slots:
            self._slots.close(slot)

    def __contains__(self, slot: int) -> bool:
        """Whether the worker is ready, and not lost."""
        return slot in self._slots

    def items_held(self, slot: int) -> int:
        """How many items the worker has that was ready."""
        return sum(batch.size for batch in self._slots.in_flight() if batch.slot == slot)

    def batch_returned(self, report: BatchReport, now: float) -> Actions:
        """A batch came back, with one output for each item or with the model's failure.

        The calls of items that could not cross between the processes fail; others are not affected.
        """
        has_failed = report.failure is not None
        batch, vacant = self._slots.take_back(
            report.slot, report.batch_id, now, is_done=not has_failed
        )
        batch.report, batch.back_at, batch.has_failed = report, now, has_failed
        self._came_back(batch)
        if has_failed:
            calls, searches = self._recovery.batch_failed(batch)
            actions = self._cut(now, calls, vacant, searches)
        else:
            actions = self._batch_done(batch, vacant)
        if self.on_back is None:
            batch.release()
        else:
            self.on_back(batch)
        return actions

    def _batch_done(self, batch: BatchRecord, vacant: Sequence[int]) -> Actions:
        now, report = batch.back_at, batch.report
        outputs, failures, duration = report.outputs, report.failures, report.pace
        if report.stages is not None:
            self._slots.stages_took(report.stages)
        if failures and len(failures) == batch.size:  # none of it has crossed
            if self._recovery.none_crossed(batch):
                return self._cut(now, (), vacant)
        elif self.health.is_wary:
            self.health.computed(batch.slot, is_new=batch.search is None)
        endings = self._endings
        failed = endings.failed
        calls: list[Call] = []
        start = 0
        for call, first, last in batch.spans:
            size = last - first
            if not call.is_over:
                part = outputs[start : start + size]
                if size == call.size:
                    call.outputs = part
                else:
                    gathered = call.outputs or [None] * call.size
                    gathered[first:last] = part
                    call.outputs = gathered
                if call.is_stream and self.has_steps:
                    call.outputs = NO_OUTPUTS  # they have been handed out
                call.batch = batch
                call.unanswered -= size
                if failures:
                    endings.fail_if(call, failures, range(start, start + size), batch)
                if not call.unanswered and not call.is_over:
                    call.end()
                if call.is_over:
                    calls.append(call)
            start += size
        self.answered_calls += len(calls) - (endings.failed - failed)
        searches = [] if batch.search is None else self._retries.part_over(batch.search)
        # What is about to come back is known before it is decided what to cut.
        if batch.search is None:  # else it says nothing of what batches are like
            if self._retries.limit < self._retries.no_limit:
                self._retries.came_back_clean()
            self._policy.came_back(
                batch, len(calls), duration, self._slots.taking, self._pending.items, now,
                len(failures),
            )  # fmt: skip
        self._full = full = self._policy.full()
        self._ahead_from = min(full, self._backlog.last.best_size)
        known, many = self.batch_duration, 4
        if self.steps is not None:  # items differ far more than batches do
            many = min(4 * self._slots.places, self.metrics.batch.count)
        self.batch_duration = duration if known == math.inf else known + (duration - known) / many
        return self._cut(now, calls, vacant, searches)

    def worker_lost(
        self,
        slot: int,
        failure: Any,
        now: float,
        batch_id: int | None = None,
        begun: frozenset[int] | None = None,
        *,
        is_outage: bool = False,
    ) -> Actions:
        """A worker has died; ``failure`` is for what it takes with it, if it had a slot here.

        Args:
            batch_id: the batch with which its device failed, if that is what it died of.
            begun: the batches that it was at. Any of them may have killed it, none of the others.
                None if that is not known.
            is_outage: whether it was lost with its host, whatever it computed.
        """
        lost = self._slots.remove(slot)
        new = [batch for batch in lost if batch.search is None]
        self.health.lost(slot, now, had_new_items=bool(new))
        for batch in new:
            self.metrics.was_cut(batch)
        again, cut_off = (lost, ()) if self.steps is None else self.steps.apart(lost)
        calls, searches = self._recovery.worker_lost(
            again, failure, now, batch_id, begun, is_outage=is_outage
        )
        for batch in cut_off:
            failed = self._endings.fail_spans(batch.spans, failure)
            searches += self._retries.given_up(batch, len(failed))
            calls += failed
        if self.steps is not None and self.on_back is not None:
            for batch in lost:  # perhaps after hours, so the recorder learns of its end
                batch.report = BatchReport(batch.id, failure=failure, slot=slot)
                batch.back_at, batch.has_failed = now, True
                self._count(batch)
                self.on_back(batch)
        return self._cut(now, calls, (), searches)

    # -- time, and the end

    def time_passed(self, now: float) -> Actions:
        """The deadline is reached."""
        calls = self._deadlines.ended(now) if self._deadlines.next <= now else []
        for call in calls:
            self._endings.expire(call)
        hung = self._slots.hung(now) if self._slots.next_look <= now else []
        return self._cut(now, calls, hung=hung)

    def fail_all(self, failure: Any) -> list[Call]:
        """End every call that is not over, pending or in flight."""
        calls: list[Call] = []
        for batch in self._slots.in_flight():
            calls += self._endings.fail_spans(batch.spans, failure)
        for suspects in self._retries:
            calls += self._endings.fail_spans(suspects.spans, failure)
        self._retries.clear()
        for call in list(self._pending):  # a copy, since failing one may sweep the queue
            self._endings.fail(call, failure)
            calls.append(call)
        self._set_deadline(math.inf)
        return calls

    # -- what it says of itself

    @property
    def failed_calls(self) -> int:
        """Calls that failed of anything but their time, so far."""
        return self._endings.failed

    @property
    def expired_calls(self) -> int:
        """Calls whose time ended, or would have before they were computed, so far."""
        return self._endings.expired

    @property
    def cancelled_calls(self) -> int:
        """Calls that were withdrawn, so far."""
        return self._endings.cancelled

    @property
    def ends_hung(self) -> bool:
        """Whether workers are to be ended whose batch takes too long."""
        return self._slots.ends_hung

    def limit(self, slot: int) -> float:
        """How long the worker, which is ready, may be at its batch, seconds."""
        return self._slots.limit(slot)

    def stuck(self, now: float) -> float | None:
        """For how long every worker has been at one batch, seconds, if that is too long."""
        return self._slots.stuck(now)

    @property
    def is_empty(self) -> bool:
        """Whether no call waits and no batch is in flight."""
        return not (self._pending.items or self._retries.waiting or self._slots.in_flight())

    @property
    def is_answered(self) -> bool:
        """Whether no call is waiting, though a worker may still be computing."""
        return not self._pending.items and all(
            call.is_over
            for part in [*self._retries, *self._slots.in_flight()]
            for call, _, _ in part.spans
        )

    @property
    def pending_items(self) -> int:
        """Items that are not with a worker, be it yet or any more."""
        return self._pending.items + self._retries.items

    @property
    def retried_items(self) -> int:
        """Items that were to be run again since their worker died, so far."""
        return self._retries.retried_items

    @property
    def isolated_calls(self) -> int:
        """Calls that failed by themselves, so that others of their batch did not, so far."""
        return self._retries.isolated_calls

    @property
    def is_searching_killers(self) -> bool:
        """Whether a worker died, and what it had still waits to be computed again."""
        return self._retries.waiting_alone > 0

    @property
    def line(self) -> tuple[float, float] | None:
        """What batches cost, as learned: see ``LearnedCost.line``."""
        return self._policy.cost.line

    @property
    def room(self) -> int:
        """The most batches that a worker holds."""
        return self._slots.room

    @property
    def batches_in_flight(self) -> int:
        return len(self._slots.in_flight())

    @property
    def items_in_flight(self) -> int:
        return sum(batch.size for batch in self._slots.in_flight())

    @property
    def slots(self) -> int:
        """How many workers are ready."""
        return len(self._slots)

    @property
    def busy_slots(self) -> int:
        return self._slots.busy

    def load(self, failed: int, start_duration: float) -> Load:
        """What there is to do, for ``Autoscaling``.

        Args:
            failed: workers that are wanted and could not be started.
            start_duration: what a worker takes to start, seconds.
        """
        over = self.metrics.batch.count
        if self.steps is not None:  # each item is a batch here, and all places together are one
            full, seconds = self._slots.places, self.batch_duration
            served, turn = over, seconds / full
            over //= full
        else:
            full = self._policy.full()
            served, turn = int(self.metrics.sizes.total), self._policy.duration(full)
            seconds = turn
        is_known = 0 < seconds < math.inf
        return Load(
            waiting=self.pending_items,
            in_flight=self._slots.items,
            arrived=self.accepted_items + self.refused_items,
            served=served,
            batches=over,
            ready=self._slots.taking,
            failed=failed,
            full=full,
            speed=full / seconds if is_known else 0.0,
            turn=turn if is_known else 0.0,
            start_duration=start_duration,
            refused=self.refused_items + self.expired_calls,
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        self._pending.check_invariants()
        unanswered = {call: call.pending for call in self._pending}
        parts: list[BatchRecord | Suspects] = [*self._retries]
        self._slots.check_invariants()
        self._retries.check_invariants()
        parts += self._slots.in_flight()
        searches: dict[Search, int] = {}
        for part in parts:
            assert part.size == sum(stop - start for _, start, stop in part.spans)
            assert 1 <= part.size <= self._batch_size
            if part.search is not None:
                searches[part.search] = searches.get(part.search, 0) + 1
            for call, start, stop in part.spans:
                if not call.is_over:
                    unanswered[call] = unanswered.get(call, 0) + stop - start
        assert all(call.unanswered == size for call, size in unanswered.items())
        assert all(search.parts == count for search, count in searches.items())
        assert self._pending.items <= self._max_pending
        slots, waiting = self._slots, self._pending.items
        if slots.idle and (self._retries.waiting or waiting):
            assert not self._retries.waiting
            assert waiting < min(self._batch_size, self._retries.limit)
            assert self.deadline < math.inf
        elif slots.without_ahead and waiting and not self._retries.waiting:
            full = self._policy.full()
            # One that retires leaves more to the others, who are asked when something comes back.
            assert slots.taking < len(slots) or waiting < self._batch_size * len(slots)
            assert (
                slots.taking < len(slots)
                or waiting < full
                or (slots.taking > 1 and slots.items < full * slots.taking)
            )

    # -- cutting

    def _cut(
        self,
        now: float,
        calls: list[Call] | tuple[()] = (),
        vacant: Sequence[int] = (),
        searches: list[Search] | tuple[()] = (),
        hung: Sequence[int] = (),
        ahead: Decision | None = None,
    ) -> Actions:
        """Cut every batch that should go out now, and set the deadline of what should wait instead.

        Args:
            calls, vacant, searches, hung: what is to be done besides.
            ahead: what the policy has said about a batch to send ahead, if it was asked already.
        """
        batches: list[BatchRecord] = []
        late: list[Call] = []
        over: list[Search] = []
        condemned = self._recovery.judge(now) if self.health.trials else ()
        wait_until = math.inf
        pending, retries = self._pending, self._retries
        idle, without_ahead = self._slots.idle, self._slots.without_ahead
        while True:
            if retries.waiting and (
                not pending.items or retries.go_first(pending.items, self._slots.taking)
            ):
                if idle:
                    self._cut_suspects(next(iter(idle)), batches, late, over, now)
                elif without_ahead and retries.may_go_ahead:
                    slot = next(iter(without_ahead))
                    self._cut_suspects(slot, batches, late, over, now, is_ahead=True)
                else:  # nothing is sent ahead, so that a worker becomes free for them
                    break
            elif not pending.items:
                break
            elif idle:
                backlog = self._backlog_now(len(idle), now)
                decision = self._policy.decide(backlog)
                if decision is not backlog.last:
                    self._decided(decision)
                slot = next(iter(idle))
                if not decision.size:
                    if pending.items >= retries.limit:  # more items would not be taken along
                        decision = decision._replace(size=int(retries.limit), reason=Reason.FAILING)
                    elif retries.waiting:  # there is something to do meanwhile
                        self._cut_suspects(slot, batches, late, over, now)
                        continue
                    else:
                        wait_until = decision.wait_until
                        break
                self._cut_pending(slot, decision, batches, late, now, is_ahead=False)
            elif without_ahead:
                decision = ahead or self._policy.decide_ahead(self._backlog_ahead())
                ahead = None
                self._decided(decision)
                slot = self._slots.emptiest() if self.has_steps else next(iter(without_ahead))
                if not decision.size:
                    if self._slots.next_open > now:
                        wait_until = self._slots.next_open
                        break
                    slot = self._slots.opened()
                    decision = self._early(slot, now)
                    if not decision.size:
                        wait_until = decision.wait_until
                        if wait_until < math.inf:
                            break
                        self._slots.have_wait(slot)
                        continue
                self._cut_pending(slot, decision, batches, late, now, is_ahead=True)
            else:
                break
        self._set_deadline(wait_until)
        if not (batches or calls or late or vacant or searches or over or hung or condemned):
            return NOTHING
        # Most often there are none, and a new list for each batch would be felt.
        calls = [*calls, *late] if late else calls
        searches = [*searches, *over] if over else searches
        return Actions(batches, calls, hung, vacant, searches, condemned)

    def _cut_early(self, now: float) -> Actions:
        """Cut a batch for a busy worker if its slowest stage is free; or come back when it is."""
        opens_at = self._slots.next_open
        if opens_at <= now:
            return self._cut(now)
        if opens_at < self.deadline and self._pending.items and not self._retries.waiting:
            self.deadline = opens_at
        return NOTHING

    def _early(self, slot: int, now: float) -> Decision:
        """What to do with what waits, now that the slowest stage of this worker is free."""
        backlog, slots = self._backlog_now(1, now), self._slots
        decision = self._policy.decide_early(backlog, *slots.held(slot), slots.beside)
        self._decided(decision)
        return decision

    def _backlog_now(self, free: int, now: float) -> Backlog:
        """What waits for the workers that are free."""
        self._policy.time_passed(now)
        backlog, pending, slots = self._backlog, self._pending, self._slots
        backlog.items, backlog.oldest = pending.items, pending.oldest_arrival()
        backlog.deadline = pending.first_deadline(now) - URGENCY * slots.beside
        backlog.free, backlog.slots, backlog.in_flight = free, slots.taking, slots.items
        backlog.now = now
        return backlog

    def _backlog_ahead(self) -> Backlog:
        """What waits while no worker is free."""
        backlog, slots = self._backlog, self._slots
        backlog.items = self._pending.items
        backlog.slots, backlog.in_flight = slots.taking, slots.items
        return backlog

    def _decided(self, decision: Decision) -> None:
        self._backlog.last = decision
        self._ahead_from = min(self._full, decision.best_size)

    def _cut_pending(
        self,
        slot: int,
        decision: Decision,
        batches: list[BatchRecord],
        late: list[Call],
        now: float,
        *,
        is_ahead: bool,
    ) -> None:
        """Cut one batch for the slot, unless all that waited came too late."""
        pending, retries = self._pending, self._retries
        size, reason = decision.size, decision.reason
        if self.sizes and decision.trial is None and reason not in _URGENT:
            fitted = fit_size(min(size, pending.items), self.sizes, self._policy.duration)
            if fitted < min(size, pending.items):
                size, reason = fitted, Reason.PAYS
        if size > retries.limit:
            size, reason = int(retries.limit), Reason.FAILING
        is_overloaded = pending.items > self._full
        finish = now
        if is_overloaded and not self.has_steps:  # how long an item takes is not known before
            finish += self._forecast.duration()
        elif pending.items > size and self._backlog.deadline < math.inf:
            finish += self._policy.duration(size)
        taken = pending.take(size, now, finish, decision.max_cost)
        for call in taken.late:
            self._endings.expire(call)
        late += taken.late
        if taken.spans:
            batch = BatchRecord(self._next_batch_id, slot, taken.spans, taken.payloads)
            batch.cost, batch.calls = taken.cost, taken.calls
            batch.reason, batch.is_full = taken.reason or reason, pending.items > 0
            if taken.reason is Reason.COST:  # perhaps not that of max_batch_cost
                batch.reason = decision.cost_reason
            self._policy.was_cut(batch, decision, now)
            if retries.waiting:
                retries.gave_way()
            self._give(batch, batches, now, is_ahead=is_ahead)

    def _cut_suspects(
        self,
        slot: int,
        batches: list[BatchRecord],
        late: list[Call],
        over: list[Search],
        now: float,
        *,
        is_ahead: bool = False,
    ) -> None:
        """Have a part of a batch that failed run again."""

        def expire(call: Call) -> None:
            self._endings.expire(call)
            late.append(call)

        part = self._retries.take(now, expire, over)
        if part is not None:
            items = [item for call, start, stop in part.spans for item in call.payloads[start:stop]]
            batch = BatchRecord(
                self._next_batch_id, slot, part.spans, items, part.search, part.losses
            )
            batch.calls = len({call for call, _, _ in part.spans})
            self._give(batch, batches, now, is_ahead=is_ahead)

    def _give(
        self, batch: BatchRecord, batches: list[BatchRecord], now: float, *, is_ahead: bool
    ) -> None:
        self._next_batch_id += 1
        batch.cut_at = now
        begun = batch.spans[0][0].handed_out if self.has_steps else None
        if begun:  # with the item go the outputs that it has had
            batch.payloads = [*batch.payloads, *begun]
        duration = self._policy.cost.duration(batch.cost)
        self._slots.give(batch, now, is_ahead=is_ahead, duration=duration)
        batches.append(batch)

    def _count(self, batch: BatchRecord) -> None:
        """Note in a batch that is back, or lost, what was counted until then."""
        batch.queued = self.metrics.queued.total
        batch.pending = self._pending.items
        batch.answered, batch.failed = self.answered_calls, self._endings.failed
        batch.expired, batch.rejected = self._endings.expired, self.rejected_calls

    def _came_back(self, batch: BatchRecord) -> None:
        """Count a batch, and learn of it what overload has to know: only while there is some."""
        now = batch.back_at
        if self.has_steps:
            self.metrics.item_over(batch)
        else:
            self.metrics.came_back(batch)
        self._count(batch)
        self.recent.append(batch)
        if self._pending.items >= self._full:
            if batch.search is None:  # else its items have been counted
                self._throughput.observe(batch.size, now)
            self._forecast.observe(now - batch.cut_at)
            self.is_behind = True
        elif self.is_behind:
            self._throughput.reset()
            self._forecast.reset()
            self.is_behind = False

    def _set_deadline(self, wait_until: float) -> None:
        # Without ``min``, which takes longer: every cut comes here.
        deadline = self._slots.next_look
        if wait_until < deadline:
            deadline = wait_until
        if self._deadlines.next < deadline:
            deadline = self._deadlines.next
        if self.health.next_end < deadline:
            deadline = self.health.next_end
        self.deadline = deadline


def build_batcher(
    options: StreamerOptions,
    *,
    has_lengths: bool,
    round_trip: float = 0.0,
    policy: Policy | None = None,
    **hooks: Any,
) -> Batcher:
    """The batcher of a streamer with these options: for an engine, or for a simulation.

    Args:
        hooks: ``batch_timeout``, ``expired``, ``expired_suspect`` and ``shared`` of ``Batcher``.
    """
    return Batcher(
        batch_size=options.batch_size,
        max_latency=options.max_latency,
        max_pending=options.max_pending,
        max_attempts=options.max_attempts if options.retry else 1,
        isolate_errors=options.retry and options.isolate_errors,
        max_batch_cost=options.max_batch_cost,
        tenant_weights=options.tenant_weights,
        has_lengths=has_lengths,
        round_trip=round_trip,
        policy=policy,
        **hooks,
    )
