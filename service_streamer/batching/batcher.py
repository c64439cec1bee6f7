"""The state machine of batching: what happened goes in, what is to be done comes out.

A worker has a slot from when it is ready until it is lost. A call that fails, is withdrawn or
expires is over at once: its pending items are skipped when a batch is cut and its spans elsewhere
are ignored. Suspects take turns with what is pending. Those that may kill a worker have one for
themselves. Nothing here does I/O, reads a clock, locks or logs; the engine calls one method at a
time and does what the returned ``Actions`` say, in order: first send the batches, so that workers
are busy again, then answer the calls.

``Batcher`` says what follows from what, and makes the batches. As a ``CallLedger`` it has the calls
and batches, how they end, and the counts of both. Its scheduler says which worker gets how many
items, and when, and which new calls could not be in time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..observe.record import BatchRecord, BatchReport, Call
from ..options.table import StreamerOptions
from ..supervision.health import BatchBound
from .batch_scheduler import BatchScheduler
from .call_ledger import CallFailures, CallLedger
from .call_queue import LARGE, CallQueue, Decision
from .length_queue import LengthQueue
from .scheduler import Scheduler, StepScheduler
from .slots import Slots


class Actions(NamedTuple):
    """What to do now, in this order.

    Attributes:
        batches: to send.
        calls: to answer; they are over.
        hung: slots whose batch has taken too long: end their workers, or say so.
        condemned: slots whose workers fail everything while others do not: replace them.
    """

    batches: Sequence[BatchRecord] = ()
    calls: Sequence[Call] = ()
    hung: Sequence[int] = ()
    condemned: Sequence[int] = ()


#: The usual answer to a submission while all workers are busy.
NOTHING = Actions()


class Batcher(CallLedger):
    """Groups the items of calls into batches for the workers that there are.

    Args:
        batch_size, max_latency, max_pending, max_attempts, isolate_errors, max_batch_cost,
            tenant_weights: as of ``StreamerOptions``.
        batch_timeout: how long a worker may compute one batch, seconds, or an object that learns
            it; None sets no bound.
        has_lengths: whether the items of calls have lengths.
        round_trip: how long results take to callers, and their next calls back, seconds.
        scheduler_class: of what decides when to cut and how much, unless the model has steps.

    Attributes:
        deadline: when to call ``time_passed``; infinity when only an event can change things.
        on_back: called with the record of every batch that comes back, which it has to release;
            None if the batches are not watched. Of a model of steps also with those that are lost
            with their worker.
        slots: what each worker holds. For reading, but for its ``sizes``.
        max_pending: infinity for no bound.
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
        call_failures: CallFailures = CallFailures(),  # noqa: B008 - never changed
        has_lengths: bool = False,
        max_batch_cost: float | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        round_trip: float = 0.0,
        scheduler_class: type[BatchScheduler] = BatchScheduler,
    ) -> None:
        self._batch_size = batch_size
        self.max_pending = math.inf if max_pending is None else max_pending
        self.isolates_errors = isolate_errors
        if not isinstance(batch_timeout, BatchBound):
            fixed = math.inf if batch_timeout is None else batch_timeout
            batch_timeout = BatchBound(fixed=fixed)
        super().__init__(
            # What is never run twice should not go down with a batch that it only waited behind.
            Slots(batch_timeout, sends_ahead=max_attempts > 1),
            max_attempts=max_attempts,
            call_failures=call_failures,
        )
        self._new_queue: Callable[[], CallQueue] = lambda: (
            LengthQueue if has_lengths else CallQueue
        )(batch_size, tenant_weights or {})
        self._new_scheduler: Callable[[], Scheduler] = lambda: scheduler_class(
            self,
            batch_size,
            max_latency,
            max_batch_cost=max_batch_cost or math.inf,
            round_trip=round_trip,
        )
        self.deadline = math.inf
        self.on_back: Callable[[BatchRecord], None] | None = None
        self._ids = itertools.count()  # of batches: transports rely on it that they ascend
        self._enough = 0  # with fewer items waiting, the last decision to wait still holds
        self._may_refuse = False  # a batch came back since a call was refused when nothing waited
        self.queue = self._new_queue()
        self.scheduler: Scheduler = self._new_scheduler()

    @property
    def steps(self) -> StepScheduler | None:
        """What is known of the items of a model of steps; None of another one, or before."""
        return self.scheduler if isinstance(self.scheduler, StepScheduler) else None

    @property
    def has_steps(self) -> bool:
        """Whether the model is known to be one of steps. Then each batch is one item."""
        return self.steps is not None

    @property
    def is_behind(self) -> bool:
        """Whether a full batch waits."""
        return self.queue.items >= self.scheduler.full

    # -- what callers do

    def has_room_for(self, size: int) -> bool:
        """Whether a call of so many items may wait, too.

        One counts at most as the smallest of the large ones, since others overtake the rest of it.
        """
        most, queue = self.max_pending, self.queue
        if queue.items + size <= most:
            return True
        return size <= most and queue.counted + min(size, LARGE * self._batch_size) <= most

    def hopeless_for(self, call: Call, now: float) -> float:
        """How long a new call takes at the least, seconds, if it cannot be in time; 0 if it can.

        To say so at once spares its caller the waiting, and everybody else a queue full of calls
        that come to nothing. It counts as refused then.
        """
        takes = self.scheduler.hopeless_for(call, now)
        if not takes:
            return 0.0
        if self.is_empty and not self._may_refuse:
            return 0.0  # if none was computed, it would never be known that they are faster now
        self._may_refuse = False
        self.figures.rejected_calls += 1
        if self.scheduler.is_in_time_alone(call, now):
            # More workers would have computed it in time. They do not help one who gives no time.
            self.figures.refused_items += call.size
        return takes

    def call_submitted(self, call: Call, now: float) -> Actions:
        """A call with at least one item arrived.

        If ``more`` arrive at the same time, and ``calls_submitted`` after them, a batch is not cut
        of the first of them alone. Full ones for all workers that are free are, since nothing that
        follows could change them.
        """
        call.arrived_at = now
        figures, slots, scheduler, queue = self.figures, self.slots, self.scheduler, self.queue
        figures.accepted_calls += 1
        figures.accepted_items += call.size
        self.watch(call)
        if self.deadlines.next < self.deadline:
            self.deadline = self.deadlines.next
        scheduler.arrived(call.size, now)
        queue.add(call)
        if slots.idle:
            if queue.items < self._enough and queue.goes_by_arrival:
                return NOTHING
            if not call.more or queue.items >= self._batch_size * len(slots.idle):
                return self._cut(now)
        elif slots.without_ahead and (
            queue.items >= scheduler.full or (slots.beside and not call.more)
        ):
            return self._cut(now)
        return NOTHING  # no worker is free: the usual case under load, so without a look

    def calls_submitted(self, now: float) -> Actions:
        """All the calls have arrived that were said to come."""
        return self._cut(now) if self.slots.idle or self.slots.beside else NOTHING

    # -- what workers do

    def worker_ready(self, slot: int, now: float) -> Actions:
        """A worker has loaded its model."""
        self.slots.add(slot)
        return self._cut(now)

    def begin_steps(self, places: int, *, resumes: bool = False) -> None:
        """The first worker is about to be ready, and its model is one of steps."""
        self._new_scheduler = lambda: StepScheduler(self, places, resumes=resumes)
        self.scheduler = self._new_scheduler()

    def worker_retiring(self, slot: int, now: float) -> Actions:
        """A worker that is ready is to end when it has finished what it holds."""
        self.slots.close(slot)
        # If it was the last one that took batches, those that are held back have to go on.
        return self._cut(now)

    def worker_kept(self, slot: int, now: float) -> Actions:
        """A worker that was retiring, and is not lost, is to go on after all."""
        self.slots.reopen(slot)
        return self._cut(now)

    def batch_returned(self, report: BatchReport, now: float) -> Actions:
        """A batch came back, with an output or a failure for each item, or one failure for all.

        The calls of items that failed fail; others are not affected.
        """
        is_done = not report.has_failed
        batch = self.slots.take_back(report.slot, report.batch_id, now, is_done=is_done)
        batch.report, batch.back_at = report, now
        self._may_refuse = True
        scheduler = self.scheduler
        scheduler.came_back(batch)
        if report.failure is not None:
            self.batch_failed(batch)
        else:
            if report.stages is not None and not report.runs:
                self.slots.stages_took(report.stages)
            # What is about to come back is known before it is decided what to cut.
            scheduler.answered(batch, self.batch_done(batch))
        actions = self._cut(now)
        if self.on_back is None:
            batch.release()
        else:
            self.on_back(batch)
        return actions

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
        scheduler = self.scheduler
        lost = self.slots.remove(slot)
        new = [batch for batch in lost if batch.search is None]
        self.health.lost(slot, now, had_new_items=bool(new))
        for batch in new:
            self.figures.metrics.was_cut(batch)
        again, cut_off = scheduler.divide_lost(lost)
        self.run_lost_again(again, failure, batch_id, begun, is_outage=is_outage)
        for batch in cut_off:
            self.retries.given_up(batch, self.fail_spans(batch.spans, failure))
        if self.has_steps and self.on_back is not None:
            for batch in lost:  # perhaps after hours, so the recorder learns of its end
                batch.report = BatchReport(batch.id, failure=failure, slot=slot)
                batch.back_at = now
                scheduler.note(batch)
                self.on_back(batch)
        return self._cut(now)

    # -- time, and the end

    def time_passed(self, now: float) -> Actions:
        """The deadline is reached."""
        if self.deadlines.next <= now:
            for call in self.deadlines.ended(now):
                self.expire(call)
        hung = self.slots.hung(now) if self.slots.next_look <= now else []
        return self._cut(now, hung=hung)

    def rebuild(self, calls: Sequence[Call], now: float) -> None:
        """Derive the state anew from what is true also if a change was left halfway.

        That is: which calls are open, in the order of their arrival, what they lack, which batches
        the workers hold, and what was counted so far. What was learned of the model is learned
        anew. Call ``time_passed`` next.
        """
        self.queue = self._new_queue()
        self.scheduler = self._new_scheduler()
        super().rebuild(calls, now)
        self.deadline = now

    # -- what is cut

    def _cut(self, now: float, hung: Sequence[int] = ()) -> Actions:
        """Cut every batch that should go out now, and set the deadline of what should wait instead.

        What else is to be done goes with it.
        """
        queue, retries, scheduler = self.queue, self.retries, self.scheduler
        idle, without_ahead = self.slots.idle, self.slots.without_ahead
        batches: list[BatchRecord] = []
        condemned = self.judge_workers(now) if self.slots.held_back else ()
        wait_until, self._enough = math.inf, 0
        while True:
            if retries.waiting:
                retries.drop_unwanted()
            if retries.waiting and not (queue.items and retries.is_turn_of_new):
                if idle:
                    batches += self._cut_part(next(iter(idle)), now)
                elif without_ahead and retries.may_go_ahead:
                    batches += self._cut_part(next(iter(without_ahead)), now)
                else:
                    break  # nothing is sent ahead, so that a worker becomes free for them
            elif not queue.items or not (idle or without_ahead):
                break
            else:
                slot, decision = scheduler.decide(now)
                if decision.size:
                    batches += self._cut_waiting(slot, decision, now)
                elif idle and retries.waiting:
                    batches += self._cut_part(slot, now)  # something to do meanwhile
                else:
                    wait_until, self._enough = decision.wait_until, decision.enough
                    break
        self._set_deadline(wait_until)
        calls = self.take_ended() if self.ended else ()
        if not (batches or calls or hung or condemned):
            return NOTHING
        return Actions(batches, calls, hung, condemned)

    def _set_deadline(self, wait_until: float) -> None:
        """Set ``deadline``: of what waits the one that is given, or an earlier one."""
        deadline = min(wait_until, self.slots.next_look, self.deadlines.next)
        if self.slots.held_back:
            deadline = min(deadline, self.health.due)
        self.deadline = deadline

    def _cut_waiting(self, slot: int, decision: Decision, now: float) -> Sequence[BatchRecord]:
        """A batch for the slot; none if all that waited came too late."""
        batch = self.queue.take(decision, now, self.expire)
        if batch is None:
            return ()
        if self.retries.waiting:
            self.retries.is_turn_of_new = False
        return self._give(batch, slot, now)

    def _cut_part(self, slot: int, now: float) -> Sequence[BatchRecord]:
        """A part of a batch that failed, to be run again; none if no caller waits for any."""
        part = self.retries.next(now, self.expire)
        if part is None:
            return ()
        given = self._give(part, slot, now)
        del self.retries.waiting[0]
        return given

    def _give(self, batch: BatchRecord, slot: int, now: float) -> Sequence[BatchRecord]:
        """The batch is its worker's from now on."""
        batch.id, batch.slot, batch.cut_at = next(self._ids), slot, now
        self.slots.give(batch, now, self.scheduler.prepare(batch))
        return (batch,)

    # -- what it says of itself

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.queue.counted <= self.max_pending
        assert all(1 <= part.size <= self._batch_size for part in self.parts())
        self.scheduler.check_invariants(self._batch_size, self.deadline)


def build_batcher(
    options: StreamerOptions,
    *,
    has_lengths: bool,
    round_trip: float = 0.0,
    **hooks: Any,
) -> Batcher:
    """The batcher of a streamer with these options; ``hooks`` are arguments of ``Batcher``, too."""
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
        **hooks,
    )
