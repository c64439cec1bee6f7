"""The state machine of batching: what happened goes in, what is to be done comes out.

    span    state       held by                                     leaves when
    ----    -----       -------                                     -----------
            PENDING     its call in Batcher.queue                   it is cut into a batch
            IN_FLIGHT   BatchRecord.spans, in Batcher.slots         the batch is done, failed, lost
            SUSPECT     Suspects.spans in Batcher._retries          it is cut again, in a part
            OVER        nothing (its call may still be waiting      -
                        for other spans)

A worker has a slot from when it is ready until it is lost. A call that fails, is withdrawn or
expires is over at once: its pending items are skipped when a batch is cut and its spans elsewhere
are ignored. Suspects take turns with what is pending. Those that may kill a worker have one for
themselves. Nothing here does I/O, reads a clock, locks or logs; the engine calls one method at a
time and does what the returned ``Actions`` say, in order: first send the batches, so that workers
are busy again, then answer the calls.

``Batcher`` says what follows from what. The decisions are its parts':

    cutter      what is cut, when, and for whom
    outcomes    calls that are over, batches that failed or were lost, and the counts of both
    overload    which new calls could not be in time
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..observe.record import NO_OUTPUT, BatchRecord, BatchReport, Call, StepReport
from ..options.table import StreamerOptions
from ..supervision.health import BatchBound, Health
from . import tuning
from .actions import Actions
from .call_queue import CallQueue, lose_queue
from .cutter import Cutter
from .isolation import Retries, Search, Suspects
from .learning import LearnedCost
from .outcomes import Endings, Figures
from .overload import Overload
from .policy import Policy
from .slots import Slots
from .stepping import Stepping, room_of_places


class Batcher:
    """Groups the items of calls into batches for the workers that there are.

    Args:
        batch_size: the most items of a batch.
        max_latency: the longest that an item waits while a worker is free, seconds.
        max_pending: the most items that may wait, of which a call counts at most as two full
            batches; None sets no bound.
        max_attempts: worker crashes that an item may be involved in before it fails; 1 for models
            that must not run twice.
        isolate_errors: whether a worker is to find the calls on which the model raises.
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
        expects_until: while callers who have just been answered may call again, a time before that
            at which most of them have. An owner who looks at ``deadline`` then, and not only when
            it was set, need not be woken by the first of their calls to come.
        figures: what it has counted.
        on_back: called with the record of every batch that comes back, which it has to release;
            None if the batches are not watched. Of a model of steps also with those that are lost
            with their worker.
        health: of the workers.
        isolates_errors: as given.
        has_steps: whether the model is known to be one of steps. Then each batch is one item, which
            has a place in its worker until it is over.
        steps: what is known of these items; None without.
        queue: the calls that wait. For reading.
        slots: what each worker holds. For reading, but for its ``sizes``.
    """

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
        self.slots = Slots(
            batch_timeout,
            # What is never run twice should not go down with a batch that it only waited behind.
            sends_ahead=max_attempts > 1,
        )
        self.isolates_errors = isolate_errors
        self._new_policy: Callable[[], Policy] = lambda: (
            policy
            or Policy(
                batch_size,
                max_latency,
                has_lengths=has_lengths,
                max_batch_cost=math.inf if max_batch_cost is None else max_batch_cost,
                round_trip=round_trip,
            )
        )
        self._new_queue: Callable[[LearnedCost], CallQueue] = lambda cost: CallQueue(
            cost, batch_size, tenant_weights, has_lengths=has_lengths
        )
        self._retries = Retries(max_attempts=max_attempts)
        self.health = Health()
        self.figures = Figures(self._retries, self.slots)
        self._endings = Endings(
            self.figures,
            self._retries,
            self.slots,
            self.health,
            expired=expired,
            expired_suspect=expired if expired_suspect is None else expired_suspect,
            shared=shared,
        )
        self.has_steps = False
        self.steps: Stepping | None = None
        self.expects_until = -math.inf
        self.on_back: Callable[[BatchRecord], None] | None = None
        self._ids = itertools.count()  # of batches: transports rely on it that they ascend
        self._may_refuse = False  # a batch came back since a call was refused when nothing waited
        self._assemble()

    def _assemble(self) -> None:
        """Make what ``rebuild`` makes anew: the queue, and the parts that decide what is cut."""
        policy = self._new_policy()
        pending = self.queue = self._new_queue(policy.cost)
        self._overload = Overload(pending, self.slots, policy)
        self._cutter = Cutter(
            pending, self._retries, self.slots, self._endings, self.health, self._overload, policy,
            self._ids, batch_size=self._batch_size,
        )  # fmt: skip
        self._endings.pending = self.figures.pending = pending
        self._endings.cost, self.figures.policy = policy.cost, policy

    @property
    def deadline(self) -> float:
        return self._cutter.deadline

    @property
    def is_behind(self) -> bool:
        return self._overload.is_behind

    # -- what callers do

    def has_room_for(self, size: int) -> bool:
        """Whether a call of so many items may wait, too.

        One counts at most as the smallest of the large ones, since others overtake the rest of it.
        """
        most, pending = self._max_pending, self.queue
        if pending.items + size <= most:
            return True
        return size <= most and pending.counted + min(size, tuning.LARGE * self._batch_size) <= most

    def hopeless_for(self, call: Call, now: float) -> float:
        """How long a new call takes at the least, seconds, if it cannot be in time; 0 if it can.

        To say so at once spares its caller the waiting, and everybody else a queue full of calls
        that come to nothing. It counts as refused then.
        """
        takes = self._overload.hopeless_for(call, now)
        if not takes:
            return 0.0
        if self.is_empty and not self._may_refuse:
            return 0.0  # if none was computed, it would never be known that they are faster now
        self._may_refuse = False
        self.figures.rejected_calls += 1
        if self._overload.is_in_time_alone(call, now):
            # More workers would have computed it in time. They do not help one who gives no time.
            self.figures.refused_items += call.size
        return takes

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
        figures = self.figures
        figures.accepted_calls += 1
        figures.accepted_items += call.size
        return self._cutter.arrived(call, now, is_watched=is_watched, more=more)

    def calls_submitted(self, now: float) -> Actions:
        """All the calls have arrived that were said to come."""
        return self._cutter.all_arrived(now)

    def call_withdrawn(self, call: Call) -> bool:
        """The caller has gone. False if it was over already, or never accepted."""
        return self._left(call, has_expired=False)

    def call_cancelled(self, call: Call) -> bool:
        """Withdraw the call unless a part of it has been sent; returns whether it was withdrawn."""
        return not call.is_running and self.call_withdrawn(call)

    def call_expired(self, call: Call) -> bool:
        """Its caller's time has ended. False if it was over already."""
        return self._left(call, has_expired=True)

    def _left(self, call: Call, *, has_expired: bool) -> bool:
        has_ended = self._endings.left(call, has_expired=has_expired)
        if has_ended and not self.queue.items:
            self._cutter.set_deadline(math.inf)
        return has_ended

    def take_unwanted(self) -> list[tuple[int, int]]:
        """The slots and ids of batches that nobody waits for any more, since the last time."""
        gone = self._endings.abandoned
        if not gone:
            return []
        self._endings.abandoned = set()
        return [
            (batch.slot, batch.id)
            for batch in self.slots.in_flight()
            if all(call.is_over for call, _, _ in batch.spans)
            and any(call in gone for call, _, _ in batch.spans)
        ]

    # -- what workers do

    def worker_ready(self, slot: int, now: float, took: float = 0.0) -> Actions:
        """A worker has loaded its model; ``slot`` is its name from now on.

        Args:
            took: from its start on, seconds.
        """
        self._endings.start_duration = took
        self.slots.add(slot)
        return self._cutter.cut(now)

    def begin_steps(self, places: int, *, resumes: bool = False) -> None:
        """The first worker is about to be ready, and its model is one of steps.

        Args:
            places: how many items it steps at a time.
            resumes: whether a stream can go on with another worker where its outputs ended.
        """
        self.has_steps = True
        self.steps = Stepping(places, self.slots, self.figures.metrics, resumes=resumes)
        self.slots.begin_steps(places, room_of_places(places), tuning.GRACE)
        self._retries.grace = tuning.GRACE

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        """A worker has taken a step; the calls of streams, each with an output to be handed out.

        What is over by that comes back as batches do: ``batch_returned`` is called with it next.
        """
        if self.steps is None or report.is_sign_of_life:
            self.slots.resumed(report.slot, now)
            return []
        return self.steps.stepped(report, self.queue.items, now)

    def worker_retiring(self, slot: int, now: float) -> Actions:
        """A worker that is ready is to end when it has finished what it holds."""
        is_vacant = self.slots.close(slot)
        # If it was the last one that took batches, those that are held back have to go on.
        return self._cutter.cut(now, (), [slot] if is_vacant else ())

    def worker_kept(self, slot: int, now: float) -> Actions:
        """A worker that was retiring, and is not lost, is to go on after all."""
        self.slots.reopen(slot, takes=slot not in self.health.held_back)
        return self._cutter.cut(now)

    def worker_dying(self, slot: int) -> None:
        """A worker will be said to be lost, after what it still answered: it gets no more."""
        if slot in self.slots:
            self.slots.close(slot)

    def items_held(self, slot: int) -> int:
        """How many items the worker has that was ready."""
        return sum(batch.size for batch in self.slots.in_flight() if batch.slot == slot)

    def batch_returned(self, report: BatchReport, now: float) -> Actions:
        """A batch came back, with an output or a failure for each item, or one failure for all.

        The calls of items that failed fail; others are not affected.
        """
        has_failed = report.has_failed
        batch, vacant = self.slots.take_back(
            report.slot, report.batch_id, now, is_done=not has_failed
        )
        batch.report, batch.back_at, batch.has_failed = report, now, has_failed
        self.figures.came_back(batch)
        self._may_refuse = True
        is_wasted = has_failed and all(call.is_over for call, _, _ in batch.spans)  # given up, say
        if (self.queue.items or self._overload.is_behind) and not is_wasted:
            work = 0.0
            if batch.search is None:
                work = batch.size if self.has_steps else batch.cost
            self._overload.came_back(work, now - batch.cut_at, now)
        if report.failure is not None:
            calls, searches = self._endings.batch_failed(batch)
            actions = self._cutter.cut(now, calls, vacant, searches)
        else:
            actions = self._batch_done(batch, vacant)
        if self.on_back is None:
            batch.release()
        else:
            self.on_back(batch)
        return actions

    def _batch_done(self, batch: BatchRecord, vacant: Sequence[int]) -> Actions:
        now, report = batch.back_at, batch.report
        failures, duration, figures = report.failures, report.pace, self.figures
        if report.stages is not None and not report.runs:
            self.slots.stages_took(report.stages)
        if batch.has_failed:
            self._endings.suspect_worker(batch, next(iter(failures.values())))
        elif self.health.row or self.health.rows.get(batch.slot) != 0:
            self.health.computed(batch.slot)
        failed_before = figures.failed_calls
        calls = self._endings.give_results(batch)
        answered, failed = len(calls), figures.failed_calls - failed_before
        figures.answered_calls += answered - failed
        raised = self._endings.some_failed(batch, failed) if failures or report.runs else ()
        # What is about to come back is known before it is decided what to cut.
        over = self._cutter.came_back(batch, answered, duration, now)
        searches = [*over, *raised] if raised else over
        figures.took(duration)
        if self.queue.items or self._retries.waiting or self.health.held_back:
            return self._cutter.cut(now, calls, vacant, searches)
        if answered > 1 and self.slots.idle:
            self.expects_until = now + tuning.MOST_RETURNED * duration
        self._cutter.set_deadline(math.inf)  # as of a lone caller
        return Actions((), calls, (), vacant, searches)

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
        lost = self.slots.remove(slot)
        new = [batch for batch in lost if batch.search is None]
        self.health.lost(slot, now, had_new_items=bool(new))
        for batch in new:
            self.figures.lost(batch)
        again, cut_off = (lost, ()) if self.steps is None else self.steps.apart(lost)
        calls, searches = self._endings.worker_lost(
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
                self.figures.note(batch)
                self.on_back(batch)
        return self._cutter.cut(now, calls, (), searches)

    # -- time, and the end

    def time_passed(self, now: float) -> Actions:
        """The deadline is reached."""
        calls = self._cutter.ended(now)
        for call in calls:
            self._endings.expire(call)
        hung = self.slots.hung(now) if self.slots.next_look <= now else []
        return self._cutter.cut(now, calls, hung=hung)

    def rebuild(self, calls: Sequence[Call], now: float) -> None:
        """Derive the state anew from what is true also if a change was left halfway.

        That is: which calls are open, what they lack, which batches the workers hold, and what was
        counted so far. What was learned of the model is learned anew, except by a policy that was
        given. Call ``time_passed`` next.

        Args:
            calls: all that are not over, in the order of their arrival.
        """
        self.health.release()
        self.slots.recount(now)
        in_flight = self.in_flight()
        self._retries.recount(in_flight)
        self._assemble()
        running = [call for batch in in_flight for call, _, _ in batch.spans]
        self._endings.abandoned = {call for call in running if call.is_over}
        taken: defaultdict[Call, set[int]] = defaultdict(set)
        for part in self._parts():
            for call, start, stop in part.spans:
                taken[call].update(range(start, stop))
        for call in calls:
            outputs = call.outputs or [NO_OUTPUT] * call.size
            self._cutter.restore(
                call,
                [i for i, o in enumerate(outputs) if o is NO_OUTPUT and i not in taken[call]],
            )
        figures = self.figures
        over = figures.answered_calls + figures.failed_calls
        over += figures.expired_calls + figures.cancelled_calls
        figures.accepted_calls = over + len(calls)
        self._cutter.deadline = now

    def end_all(
        self, calls: Sequence[Call], failure: Any, now: float, returned: Sequence[BatchReport] = ()
    ) -> list[int]:
        """Fail all calls that are not over, when the state is in doubt, and ``rebuild`` it.

        Args:
            calls: as above.
            returned: what workers have answered, applied or not. They do not hold it any more.

        Returns:
            Retiring slots that have nothing left to do.
        """
        for call in calls:
            lose_queue(call)
            self._endings.fail(call, failure)
        self._retries.clear()
        vacant = self.slots.let_go((report.slot, report.batch_id) for report in returned)
        self.rebuild((), now)
        return vacant

    def forget_workers(self) -> None:
        """All workers are gone, with what they held."""
        for slot in self.slots.numbers():
            self.slots.remove(slot)

    def in_flight(self) -> list[BatchRecord]:
        """The batches that workers hold, or are about to be sent, in the order of their ids."""
        return sorted(self.slots.in_flight(), key=lambda batch: batch.id)

    def fail_all(self, failure: Any) -> list[Call]:
        """End every call that is not over, pending or in flight."""
        calls: list[Call] = []
        for part in self._parts():
            calls += self._endings.fail_spans(part.spans, failure)
        self._retries.clear()
        for call in list(self.queue):  # a copy, since failing one may sweep the queue
            self._endings.fail(call, failure)
            calls.append(call)
        self._cutter.set_deadline(math.inf)
        return calls

    def _parts(self) -> list[BatchRecord | Suspects]:
        """All that has items which are not in the queue, in flight or to be run again."""
        return [*self.slots.in_flight(), *self._retries.waiting]

    # -- what it says of itself

    @property
    def is_empty(self) -> bool:
        """Whether no call waits and no batch is in flight."""
        return not (self.queue.items or self._retries.waiting or self.slots.items)

    @property
    def is_answered(self) -> bool:
        """Whether no call is waiting, though a worker may still be computing."""
        return not self.queue.items and all(
            call.is_over for part in self._parts() for call, _, _ in part.spans
        )

    @property
    def pending_items(self) -> int:
        """Items that are not with a worker, be it yet or any more."""
        return self.queue.items + self._retries.items

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        self.queue.check_invariants()
        unanswered = {call: call.pending for call in self.queue}
        self.slots.check_invariants()
        self._retries.check_invariants()
        searches: dict[Search, int] = {}
        for part in self._parts():
            assert part.size == sum(stop - start for _, start, stop in part.spans)
            assert 1 <= part.size <= self._batch_size
            if part.search is not None:
                searches[part.search] = searches.get(part.search, 0) + 1
            for call, start, stop in part.spans:
                if not call.is_over:
                    unanswered[call] = unanswered.get(call, 0) + stop - start
        assert all(call.unanswered == size for call, size in unanswered.items())
        assert all(search.parts == count for search, count in searches.items())
        assert self.queue.counted <= self._max_pending
        self._cutter.check_invariants()


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
