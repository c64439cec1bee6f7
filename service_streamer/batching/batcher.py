"""The state machine of batching: what happened goes in, what is to be done comes out.

    span is     held by                                             leaves when
    -------     -------                                             -----------
    PENDING     its call, in the queue                              it is cut into a batch
    IN_FLIGHT   the spans of a BatchRecord, in the slots            the batch is done, failed, lost
    SUSPECT     the spans of a BatchRecord, in the retries          it is cut again, in a part
    OVER        nothing (its call may still wait for other spans)   -

A worker has a slot from when it is ready until it is lost. A call that fails, is withdrawn or
expires is over at once: its pending items are skipped when a batch is cut and its spans elsewhere
are ignored. Nothing here does I/O, reads a clock, locks or logs; the engine calls one method at a
time and does what the returned ``Actions`` say, in order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..observe.metrics import Figures
from ..observe.record import NO_OUTPUT, NO_OUTPUTS, BatchRecord, BatchReport, Call, CallState
from ..options.table import StreamerOptions
from ..supervision.health import BatchBound
from .batch_scheduler import BatchScheduler
from .call_queue import LARGE, CallQueue
from .deadlines import Deadlines
from .isolation import Raised, Retries
from .scheduler import Scheduler, StepScheduler
from .slots import Slots

#: A member of an enum is looked up in Python, and every call asks for this one.
_OVER = CallState.OVER


class Actions(NamedTuple):
    """What to do now, in this order: first workers are busy again, then callers get their answers.

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


class CallFailures(NamedTuple):
    """What calls fail with for other reasons than the model's: opaque here."""

    expired: Any = None  # its time has ended
    expired_suspect: Any = None  # likewise, after a worker died with it
    #: Of a call that shared a batch with the one at fault, if it is not known which that is. Gets
    #: the other's failure, and whether that is the loss of a worker; must not repeat its words.
    shared: Callable[[Any, bool], Any] = lambda failure, _: failure


class Batcher:
    """Groups the items of calls into batches for the workers that there are.

    Every change of a call's or a batch's state is made here. The scheduler says which worker gets
    how many items, and when, and which new calls could not be in time.

    Args:
        batch_bound: how long a worker may compute one batch; None sets no bound.
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

    # Made by ``rebuild``:
    queue: CallQueue
    scheduler: Scheduler
    ended: list[Call]  # to be answered; see ``take_ended``
    _deadlines: Deadlines[Call]  # of the calls that are to expire here
    _abandoned: set[Call]  # over, while a worker may still be at them
    _enough: int  # with fewer items waiting, the last decision to wait still holds

    def __init__(
        self,
        options: StreamerOptions,
        *,
        batch_bound: BatchBound | None = None,
        call_failures: CallFailures = CallFailures(),  # noqa: B008 - never changed
        has_lengths: bool = False,
        round_trip: float = 0.0,
        scheduler_class: type[BatchScheduler] = BatchScheduler,
    ) -> None:
        self._batch_size = options.batch_size
        self.max_pending = math.inf if options.max_pending is None else options.max_pending
        self.isolates_errors = options.retry and options.isolate_errors
        self._call_failures = call_failures
        self._new_queue: Callable[[], CallQueue] = lambda: CallQueue(
            options.batch_size, options.tenant_weights or {}, has_lengths=has_lengths
        )
        self._new_scheduler: Callable[[], Scheduler] = lambda: scheduler_class(
            self.slots, self.queue, self.figures, options, round_trip
        )
        max_attempts = options.max_attempts if options.retry else 1
        # What is never run twice should not go down with a batch that it only waited behind.
        bound = BatchBound(fixed=math.inf) if batch_bound is None else batch_bound
        self.slots = Slots(bound, sends_ahead=max_attempts > 1)
        self.retries = Retries(self.slots, max_attempts=max_attempts)
        self.figures = Figures()
        self.on_back: Callable[[BatchRecord], None] | None = None
        self._ids = itertools.count()  # of batches: transports rely on it that they ascend
        self._may_refuse = False  # a batch came back since a call was refused when nothing waited
        self.rebuild((), -math.inf)
        self.deadline = math.inf

    @property
    def has_steps(self) -> bool:
        """Whether the model is known to be one of steps. Then each batch is one item."""
        return self.slots.places > 0

    # -- what there is

    def in_flight(self) -> list[BatchRecord]:
        """The batches that workers hold, or are about to be sent, in the order of their ids."""
        return sorted(self.slots.in_flight(), key=lambda batch: batch.id)

    def parts(self) -> list[BatchRecord]:
        """All that has items which are not in the queue, in flight or to be run again."""
        return [*self.slots.in_flight(), *self.retries.waiting]

    @property
    def is_empty(self) -> bool:
        """Whether no call waits and no batch is in flight."""
        return not (self.queue.items or self.retries.waiting or self.slots.held_items)

    @property
    def is_answered(self) -> bool:
        """Whether no call is waiting, though a worker may still be computing."""
        return not self.queue.items and all(
            call.is_over for part in self.parts() for call, _, _ in part.spans
        )

    @property
    def is_behind(self) -> bool:
        """Whether a full batch waits."""
        return self.queue.items >= self.scheduler.full

    @property
    def pending_items(self) -> int:
        """Items that are not with a worker, be it yet or any more."""
        return self.queue.items + self.retries.items

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
        # If none was computed, it would never be known that they are faster now.
        if not takes or (self.is_empty and not self._may_refuse):
            return 0.0
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
        if call.deadline < math.inf:
            self._watch(call)
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

    def withdraw(self, call: Call, *, has_expired: bool = False) -> bool:
        """The caller has gone. False if the call was over already, or never accepted."""
        if call.state is CallState.NEW or call.is_over:
            return False
        self._leave(call)
        if has_expired:
            self.figures.expired_calls += 1
        else:
            self.figures.cancelled_calls += 1
        return True

    def take_unwanted(self) -> list[tuple[int, int]]:
        """The slots and ids of batches that no caller waits for any more, since the last time."""
        gone = self._abandoned
        if not gone:
            return []
        self._abandoned = set()
        return [
            (batch.slot, batch.id)
            for batch in self.slots.in_flight()
            if all(call.is_over for call, _, _ in batch.spans)
            and any(call in gone for call, _, _ in batch.spans)
        ]

    # -- what workers do

    def worker_ready(self, slot: int, now: float) -> Actions:
        """A worker has loaded its model."""
        self.slots.add(slot)
        return self._cut(now)

    def begin_steps(self, places: int, *, resumes: bool = False) -> None:
        """The first worker is about to be ready, and its model is one of steps."""
        self._new_scheduler = lambda: StepScheduler(
            self.slots, self.queue, self.figures, places, resumes=resumes
        )
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
        batch = self.slots.take_back(report, now)
        batch.report, batch.back_at = report, now
        self._may_refuse = True
        has_steps = self.has_steps
        self.figures.came_back(batch, self.queue.items, is_item=has_steps)
        if has_steps and batch.spans[0][0].is_stream:
            report.outputs = NO_OUTPUTS  # they have been handed out
        if report.failure is not None:
            self._fail_batch(batch, report.failure, is_loss=False)
        else:
            if report.stages is not None and not report.runs:
                self.slots.stages_took(report.stages)
            # What is about to come back is known before it is decided what to cut.
            self.scheduler.answered(batch, self._give_results(batch))
        actions = self._cut(now)
        if self.on_back is None:
            batch.release()
        else:
            self.on_back(batch)
        return actions

    def _give_results(self, batch: BatchRecord) -> int:
        """Give the outputs of a batch to its calls; returns how many of these are over by that."""
        report, ended = batch.report, self.ended
        outputs, failures = report.outputs, report.failures
        start = answered = failed = 0
        for call, first, last in batch.spans:
            size = last - first
            stop = start + size
            if call.state is not _OVER:
                if size == call.size:
                    call.outputs, call.unanswered = outputs[start:stop], 0
                else:
                    call.outputs = call.outputs or [NO_OUTPUT] * call.size
                    call.outputs[first:last] = outputs[start:stop]
                    call.unanswered -= size
                call.batch = batch
                failure = self._failure_of(call, range(start, stop), batch) if failures else None
                if failure is not None:
                    self.fail(call, failure)
                    failed += 1
                elif not call.unanswered:
                    call.state = _OVER
                    call.payloads, call.lengths, call.handed_out = (), None, None
                    ended.append(call)
                    answered += 1
            start = stop
        self.figures.answered_calls += answered
        if failures or report.runs:
            self.retries.some_failed(batch, failed)
        return answered + failed

    def _failure_of(self, call: Call, positions: range, batch: BatchRecord) -> Any:
        """Of the call's items at these positions of the batch; None if all have results."""
        failures = batch.report.failures
        failed = next((failures[i] for i in positions if i in failures), None)
        if failed is not None and batch.calls > 1:
            # One failure of several calls is that of what they were computed with.
            owners = [owner for owner, start, stop in batch.spans for _ in range(start, stop)]
            if any(each is failed and owners[i] is not call for i, each in failures.items()):
                return self._call_failures.shared(failed, False)
        return failed

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

        Its batches are run again, or their calls fail.

        Args:
            batch_id: the batch with which its device failed, if that is what it died of.
            begun: the batches that it was at. Any of them may have killed it, none of the others.
                None if that is not known.
            is_outage: whether it was lost with its host, whatever it computed.
        """
        lost = self.slots.remove(slot, now)
        for batch in lost:
            batch.spans[0][0].is_held = False  # the next worker does not know of it
            if batch.search is None:
                self.figures.metrics.was_cut(batch)
        cut_off = [batch for batch in lost if _is_cut_off(batch)]
        again = [batch for batch in lost if batch not in cut_off]
        failed = self.retries.run_again(again, failure, batch_id, begun, is_outage=is_outage)
        for batch in itertools.chain(failed, cut_off):
            self._fail_batch(batch, failure, is_loss=True)
        if self.has_steps and self.on_back is not None:
            for batch in lost:  # perhaps after hours, so the recorder learns of its end
                batch.report = BatchReport(batch.id, failure=failure, slot=slot)
                batch.back_at = now
                self.figures.note(batch, self.queue.items)
                self.on_back(batch)
        return self._cut(now)

    def _fail_batch(self, batch: BatchRecord, failure: Any, *, is_loss: bool) -> None:
        """The model raised on the batch, or a worker died with it for good: its calls fail.

        If its search may cost no more deaths, all that wait there fail with it.
        """
        search, retries = batch.search, self.retries
        shared = self._call_failures.shared(failure, is_loss)
        # Of a call that was alone it is known that it is at fault, at the end of a search too.
        is_known = batch.calls == 1 or (is_loss and search is None)
        failed = self._fail_calls(batch, failure if is_known else shared)
        if is_loss and search is not None and search.deaths_left <= 0:
            for part in retries.waiting:
                if part.search is search:
                    failed += self._fail_calls(part, shared)
        retries.given_up(batch, failed)
        if failed and not is_known and not is_loss:
            retries.raised.append(Raised(batch.calls, failed, failure, 0))

    # -- calls that end

    def take_ended(self) -> Sequence[Call]:
        """The calls that are over since the last time, and are to be answered."""
        ended, self.ended = self.ended, []
        return ended

    def fail(self, call: Call, failure: Any) -> None:
        """The call, which is not over, fails."""
        self._leave(call, failure)
        self.figures.failed_calls += 1
        self.ended.append(call)

    def _fail_calls(self, batch: BatchRecord, failure: Any) -> int:
        """Fail the calls of a batch that are not over; returns how many these are."""
        open_calls = [call for call in batch.each_call() if not call.is_over]
        for call in open_calls:
            self.fail(call, failure)
        return len(open_calls)

    def fail_all(self, failure: Any) -> Sequence[Call]:
        """End every call that is not over, pending or in flight; returns those to be answered."""
        for part in self.parts():
            self._fail_calls(part, failure)
        self.retries.waiting = []
        for call in list(self.queue):  # a copy, since failing one may sweep the queue
            self.fail(call, failure)
        return self.take_ended()

    def _leave(self, call: Call, failure: Any = None) -> None:
        """The call is over. Whoever counts it does so next.

        A signal handler can raise when a function begins, or after a call of C code: so not from
        its new state on until it is counted.
        """
        if call.is_running:
            self._abandoned.add(call)
        if call.state is CallState.WAITING:
            self.queue.remove(call)
        call.state = _OVER
        call.payloads, call.lengths, call.handed_out = (), None, None
        call.failure, call.outputs = failure, NO_OUTPUTS

    # -- time

    def _watch(self, call: Call) -> None:
        """Note when to look at a call that waits. If it is not watched, its caller looks."""
        if call.is_watched and call.deadline < math.inf:
            self._deadlines.add(call.deadline, call)
            if self._deadlines.next < self.deadline:
                self.deadline = self._deadlines.next

    def time_passed(self, now: float) -> Actions:
        """The deadline is reached."""
        if self._deadlines.next <= now:
            for call in self._deadlines.ended(now):
                self._expire(call)
        hung = self.slots.hung(now) if self.slots.next_look <= now else []
        return self._cut(now, hung=hung)

    def _expire(self, call: Call) -> None:
        """The time of the call, which is not over, has ended."""
        is_suspect = any(
            self.slots.is_alone(part) and call in part.each_call() for part in self.retries.waiting
        )
        failures = self._call_failures
        self._leave(call, failures.expired_suspect if is_suspect else failures.expired)
        self.figures.expired_calls += 1
        self.ended.append(call)

    # -- what is cut

    def _cut(self, now: float, hung: Sequence[int] = ()) -> Actions:
        """Cut every batch that should go out now, and set the deadline of what should wait instead.

        What else is to be done goes with it.
        """
        queue, retries, scheduler, slots = self.queue, self.retries, self.scheduler, self.slots
        idle, without_ahead = slots.idle, slots.without_ahead
        batches: list[BatchRecord] = []
        condemned = slots.judge(now) if slots.held_back else ()
        wait_until, self._enough = math.inf, 0
        while True:
            if retries.waiting:
                retries.drop_unwanted()
            if retries.waiting and not (queue.items and retries.is_turn_of_new):
                if not idle and not (without_ahead and retries.may_go_ahead):
                    break  # nothing is sent ahead, so that a worker becomes free for them
                slot, is_part = next(iter(idle or without_ahead)), True
            elif not queue.items or not (idle or without_ahead):
                break
            else:
                slot, decision = scheduler.decide(now)
                is_part = not decision.size  # something to do meanwhile
                if is_part and not (idle and retries.waiting):
                    wait_until, self._enough = decision.wait_until, decision.enough
                    break
            if is_part:
                batch = retries.next(now, self._expire)
            else:
                batch = queue.take(decision, now, self._expire)
                if batch is not None and retries.waiting:
                    retries.is_turn_of_new = False
            if batch is None:  # no caller waits for it, or all that waited came too late
                continue
            batch.id, batch.slot, batch.cut_at = next(self._ids), slot, now
            slots.give(batch, now, scheduler.prepare(batch))
            if is_part:
                del retries.waiting[0]
            batches.append(batch)
        self.deadline = min(wait_until, slots.due, self._deadlines.next)
        calls = self.take_ended() if self.ended else ()
        if not (batches or calls or hung or condemned):
            return NOTHING
        return Actions(batches, calls, hung, condemned)

    # -- the state as a whole

    def rebuild(
        self,
        calls: Sequence[Call],
        now: float,
        failure: Any = None,
        returned: Sequence[BatchReport] = (),
    ) -> None:
        """Derive the state anew from what is true also if a change was left halfway.

        That is: which calls are open, in the order of their arrival, what they lack, which batches
        the workers hold, and what was counted so far. What was learned of the model is learned
        anew. Call ``time_passed`` next.

        Args:
            failure: ends these calls, unless it is None.
            returned: what workers do not hold any more, whether that was applied or not.
        """
        self._enough = 0
        self._deadlines, self._abandoned, self.ended = Deadlines(), set(), []
        self.queue = self._new_queue()
        self.scheduler = self._new_scheduler()
        self.deadline = now
        if failure is not None:
            for call in calls:
                if call.state is CallState.WAITING:
                    # No queue has it any more. What was not sent stays known: it may be handed on.
                    call.state = CallState.RUNNING
                self.fail(call, failure)
            self.ended, self.retries.waiting, calls = [], [], ()
        self.slots.recount(now, returned)
        in_flight, retries = self.slots.in_flight(), self.retries
        retries.waiting = [part for part in retries.waiting if part not in in_flight]
        running = [call for batch in in_flight for call, _, _ in batch.spans]
        self._abandoned = {call for call in running if call.is_over}
        taken: defaultdict[Call, set[int]] = defaultdict(set)
        for part in self.parts():
            for call, start, stop in part.spans:
                taken[call].update(range(start, stop))
        for call in calls:
            self._watch(call)
            outputs = call.outputs or [NO_OUTPUT] * call.size
            positions = [
                i for i, o in enumerate(outputs) if o is NO_OUTPUT and i not in taken[call]
            ]
            if positions:
                self.queue.add(call, positions)
            else:
                call.pending = 0
                call.state = CallState.RUNNING
        figures = self.figures
        over = figures.answered_calls + figures.failed_calls
        over += figures.expired_calls + figures.cancelled_calls
        figures.accepted_calls = over + len(calls)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        self.queue.check_invariants()
        self.slots.check_invariants()
        assert not self.ended
        unanswered = Counter({call: call.pending for call in self.queue})
        for part in self.parts():
            assert 1 <= part.size <= self._batch_size
            assert part.size == sum(stop - start for _, start, stop in part.spans)
            for call, start, stop in part.spans:
                if not call.is_over:
                    unanswered[call] += stop - start
        assert all(call.unanswered == size for call, size in unanswered.items())
        assert self.queue.counted <= self.max_pending
        if self.slots.idle and self.pending_items:
            assert not self.retries.waiting
            assert self.queue.items < self._batch_size
            assert self.deadline < math.inf


def _is_cut_off(batch: BatchRecord) -> bool:
    """Whether its caller has got outputs of a stream, which cannot be taken back."""
    call = batch.spans[0][0]
    return call.part_at is not None and call.handed_out is None
