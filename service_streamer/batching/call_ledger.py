"""Which calls and batches there are, how they end, and how many did.

    span is     held by                                             leaves when
    -------     -------                                             -----------
    PENDING     its call, in the queue                              it is cut into a batch
    IN_FLIGHT   the spans of a BatchRecord, in the slots            the batch is done, failed, lost
    SUSPECT     the spans of a BatchRecord, in the retries          it is cut again, in a part
    OVER        nothing (its call may still wait for other spans)   -

    what happened                   what follows
    -------------                   ------------
    results came                    the calls that have all of theirs are answered
    the model raised                its calls fail, or those that the worker found to be at fault
    the worker may be at fault      it is held back, as ``supervision.health`` says
    the worker died                 batches that it had not begun are run again as they were; those
                                    that it was at in parts, each alone with a worker

A call that ends is over at once. Its items that wait are dropped from the queue, and its spans in
batches and searches are ignored.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..observe.metrics import FIRST_OUTPUTS, RECENT, BatchMetrics
from ..observe.record import (
    NO_OUTPUT,
    NO_OUTPUTS,
    BatchRecord,
    BatchReport,
    Call,
    CallState,
    Span,
    StepReport,
)
from ..supervision.health import Health
from .call_queue import CallQueue
from .isolation import MOST_DEVICE_FAILURES, MOST_OUTAGES, Raised, Retries
from .slots import Slots

#: A member of an enum is looked up in Python, and every call asks for this one.
_OVER = CallState.OVER


class Figures:
    """Counts calls and batches since the start."""

    def __init__(self) -> None:
        self.accepted_calls = self.accepted_items = self.answered_calls = 0
        self.failed_calls = 0  # of anything but their time
        self.expired_calls = self.cancelled_calls = 0  # whose time ended, or that were withdrawn
        #: Refused since too much waited; the engine counts those that found no room.
        self.rejected_calls = 0
        #: Of those calls, if they would have been in time by themselves; counted there, too.
        self.refused_items = 0
        #: What the model has taken for a batch of late, seconds; infinity before the first.
        self.batch_duration = math.inf
        self.metrics = BatchMetrics()
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT)  # that came back, the oldest first
        #: Of a model of steps the same, and how long its last streams took to their first output.
        self.steps: deque[StepReport] = deque(maxlen=RECENT)
        self.first_outputs: deque[float] = deque(maxlen=FIRST_OUTPUTS)

    def took(self, duration: float, batches: int) -> None:
        """The model took so long for a batch; of about so many batches the mean is known."""
        known = self.batch_duration
        self.batch_duration = (
            duration if known == math.inf else known + (duration - known) / batches
        )


class CallFailures(NamedTuple):
    """What calls fail with for other reasons than the model's: opaque here."""

    expired: Any = None  # its time has ended
    expired_suspect: Any = None  # likewise, after a worker died with it
    #: Of a call that shared a batch with the one at fault, if it is not known which that is. Gets
    #: the other's failure, and whether that is the loss of a worker; must not repeat its words.
    shared: Callable[[Any, bool], Any] = lambda failure, _: failure


class CallLedger:
    """The state of a batcher: every change of a call's or a batch's state is made here.

    Attributes:
        queue: calls with items that are not cut; made anew with the batcher's state.
    """

    queue: CallQueue

    def __init__(
        self,
        slots: Slots,
        *,
        max_attempts: int,
        call_failures: CallFailures,
    ) -> None:
        self.slots = slots
        self.retries = Retries(slots, max_attempts=max_attempts)
        self.health = Health()
        self.figures = Figures()
        self.deadlines: Deadlines[Call] = Deadlines()  # of the calls that are to expire here
        self.abandoned: set[Call] = set()  # over, while a worker may still be at them
        self.ended: list[Call] = []  # to be answered; see ``take_ended``
        self._call_failures = call_failures

    def take_ended(self) -> Sequence[Call]:
        """The calls that are over since the last time, and are to be answered."""
        ended, self.ended = self.ended, []
        return ended

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
        return not (self.queue.items or self.retries.waiting or self.slots.items)

    @property
    def is_answered(self) -> bool:
        """Whether no call is waiting, though a worker may still be computing."""
        return not self.queue.items and all(
            call.is_over for part in self.parts() for call, _, _ in part.spans
        )

    @property
    def pending_items(self) -> int:
        """Items that are not with a worker, be it yet or any more."""
        return self.queue.items + self.retries.items

    # -- calls

    def watch(self, call: Call) -> None:
        """Enter the timers of a call that waits; of one without it is its caller who looks."""
        if call.is_watched and call.deadline < math.inf:
            self.deadlines.add(call)

    def batch_done(self, batch: BatchRecord) -> int:
        """Give the outputs of a batch to its calls; returns how many of these are over by that.

        It has not failed as a whole. The calls of items that have fail.
        """
        report, figures = batch.report, self.figures
        if report.failures and report.has_failed:
            self.suspect_worker(batch, next(iter(report.failures.values())))
        else:
            self.health.computed(batch.slot)
        before, failed_before = len(self.ended), figures.failed_calls
        self._give_results(batch)
        over, failed = len(self.ended) - before, figures.failed_calls - failed_before
        figures.answered_calls += over - failed
        if report.failures or report.runs:
            self.retries.some_failed(batch, failed)
        return over

    def _give_results(self, batch: BatchRecord) -> None:
        outputs, failures, ended = batch.report.outputs, batch.report.failures, self.ended
        start = 0
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
                failed = self._failure_of(call, range(start, stop), batch) if failures else None
                if failed is not None:
                    self.fail(call, failed)
                elif not call.unanswered:
                    call.state = _OVER
                    call.payloads, call.lengths, call.handed_out = (), None, None
                    ended.append(call)
            start = stop

    def _failure_of(self, call: Call, positions: range, batch: BatchRecord) -> Any:
        """Of the call's items at these positions of the batch; None if all have results."""
        failures = batch.report.failures
        failed = next((failures[i] for i in positions if i in failures), None)
        if failed is not None and batch.calls > 1:
            # One failure of several calls is that of what they were computed with.
            owners = (owner for owner, start, stop in batch.spans for _ in range(start, stop))
            if any(
                owner is not call and failures.get(i) is failed for i, owner in enumerate(owners)
            ):
                return self._call_failures.shared(failed, False)
        return failed

    def fail(self, call: Call, failure: Any) -> None:
        """The call, which is not over, fails."""
        self._leave(call, failure)
        self.figures.failed_calls += 1
        self.ended.append(call)

    def fail_spans(self, spans: Sequence[Span], failure: Any) -> int:
        """Fail the calls of the spans that are not over; returns how many these are."""
        open_calls = {call: None for call, _, _ in spans if not call.is_over}
        for call in open_calls:
            self.fail(call, failure)
        return len(open_calls)

    def expire(self, call: Call) -> None:
        """The time of the call, which is not over, has ended."""
        is_suspect = self.retries.has_waiting_alone and any(
            part.losses and call is suspect
            for part in self.retries.waiting
            for suspect, _, _ in part.spans
        )
        failures = self._call_failures
        self._leave(call, failures.expired_suspect if is_suspect else failures.expired)
        self.figures.expired_calls += 1
        self.ended.append(call)

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
        gone = self.abandoned
        if not gone:
            return []
        self.abandoned = set()
        return [
            (batch.slot, batch.id)
            for batch in self.slots.in_flight()
            if all(call.is_over for call, _, _ in batch.spans)
            and any(call in gone for call, _, _ in batch.spans)
        ]

    def _leave(self, call: Call, failure: Any = None) -> None:
        """The call is over. Whoever counts it does so next.

        A signal handler can raise when a function begins, or after a call of C code: so not from
        its new state on until it is counted.
        """
        if call.is_running:
            self.abandoned.add(call)
        if call.state is CallState.WAITING:
            self.queue.remove(call)
        call.state = _OVER
        call.payloads, call.lengths, call.handed_out = (), None, None
        call.failure, call.outputs = failure, NO_OUTPUTS

    # -- batches that failed or were lost

    def batch_failed(self, batch: BatchRecord) -> None:
        """The model raised on the batch: its calls fail."""
        failure, is_shared = batch.report.failure, batch.calls > 1  # as it ran
        self.suspect_worker(batch, failure)
        shown = self._call_failures.shared(failure, False) if is_shared else failure
        failed = self.fail_spans(batch.spans, shown)
        self.retries.given_up(batch, failed)
        if is_shared and failed:
            self.retries.raised.append(Raised(batch.calls, failed, failure, 0))

    def suspect_worker(self, batch: BatchRecord, failure: Any) -> None:
        """No item of the batch has a result: its worker may be at fault, and is held back.

        Not if the failure, opaque here otherwise, blames an item, or the batch failed before.
        """
        if batch.search is not None or getattr(failure, "blames_input", False):
            return
        health = self.health
        health.failed(batch.slot, batch.back_at)
        if health.is_suspect(batch.slot) and self.slots[batch.slot].takes:
            self.slots.hold_back(batch.slot)

    def judge_workers(self, now: float) -> Sequence[int]:
        """Let some of the workers go on that are held back; the slots of those to be replaced.

        All go on if no other one takes batches.
        """
        is_alone = not self.slots.taking
        for slot in self.slots.held_back:
            if is_alone or not self.health.is_suspect(slot):
                self.slots.release(slot)
        return self.health.judge(self.slots.held_back, now)

    def run_lost_again(
        self,
        lost: Sequence[BatchRecord],
        failure: Any,
        batch_id: int | None,
        begun: frozenset[int] | None,
        *,
        is_outage: bool,
    ) -> None:
        """A worker has died with these batches, in the order in which they were sent.

        They are run again, or their calls fail; see ``Batcher.worker_lost``.
        """
        for position, batch in enumerate(lost):
            is_begun = begun is None or batch.id in begun
            # One that was sent ahead has probably not begun, and is run as a whole first.
            is_ahead = begun is None and position > 0
            is_counted, attempts = False, math.inf
            if is_outage:  # whatever it computed; but an item may end one host after the other
                is_met = is_begun and not (is_ahead and self.slots.is_one_by_one)
                is_counted = is_met and batch.outages < MOST_OUTAGES
                is_to_blame, is_ahead = is_met and not is_counted, False
            elif batch_id is not None:
                # What a device was asked to do it may say later, of another batch.
                is_to_blame = batch.id == batch_id or (begun is not None and is_begun)
                attempts, is_ahead = MOST_DEVICE_FAILURES, False
            else:
                is_to_blame = is_begun
            is_rerun = self.retries.run_again(
                batch, failure, is_to_blame=is_to_blame, as_it_was=is_ahead, attempts=attempts,
                outages=int(is_counted),
            )  # fmt: skip
            if not is_rerun:
                self._give_up(batch, failure)

    def _give_up(self, batch: BatchRecord, failure: Any) -> None:
        """Fail the calls of a batch with which a worker died.

        If its search may cost no more deaths, all that wait there fail with it.
        """
        search = batch.search
        # Of a call that was alone it is known that it kills, at the end of a search too.
        shared = self._call_failures.shared(failure, True)
        is_known = search is None or batch.calls == 1
        failed = self.fail_spans(batch.spans, failure if is_known else shared)
        if search is not None and search.deaths_left <= 0:
            for part in self.retries.drop(search):
                failed += self.fail_spans(part.spans, shared)
        self.retries.given_up(batch, failed)

    # -- all of them

    def fail_all(self, failure: Any) -> Sequence[Call]:
        """End every call that is not over, pending or in flight; returns those to be answered."""
        for part in self.parts():
            self.fail_spans(part.spans, failure)
        self.retries.waiting = []
        for call in list(self.queue):  # a copy, since failing one may sweep the queue
            self.fail(call, failure)
        return self.take_ended()

    def end_all(
        self, calls: Sequence[Call], failure: Any, now: float, returned: Sequence[BatchReport] = ()
    ) -> None:
        """Fail all calls that are not over, when the state is in doubt, and ``rebuild`` it.

        Workers do not hold any more what they have ``returned``, applied or not.
        """
        for call in calls:
            if call.state is CallState.WAITING:
                # The queue may not be what it should be: nothing is removed from it. What was not
                # sent stays known, for who may hand it on.
                call.state = CallState.RUNNING
            self.fail(call, failure)
        self.retries.waiting = []
        self.slots.let_go((report.slot, report.batch_id) for report in returned)
        self.rebuild((), now)

    def rebuild(self, calls: Sequence[Call], now: float) -> None:
        """Derive the rest from the batches that workers hold, and the calls that are not over.

        Args:
            calls: in the order of their arrival. They wait in the queue, which is new.
        """
        self.ended, self.deadlines = [], Deadlines()
        self.slots.recount(now)
        in_flight = self.slots.in_flight()
        self.retries.recount()
        running = [call for batch in in_flight for call, _, _ in batch.spans]
        self.abandoned = {call for call in running if call.is_over}
        taken: defaultdict[Call, set[int]] = defaultdict(set)
        for part in self.parts():
            for call, start, stop in part.spans:
                taken[call].update(range(start, stop))
        for call in calls:
            self.watch(call)
            outputs = call.outputs or [NO_OUTPUT] * call.size
            positions = [
                i for i, o in enumerate(outputs) if o is NO_OUTPUT and i not in taken[call]
            ]
            if positions:
                self.queue.add(call, positions)
            else:
                run(call)
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
            assert part.size == sum(stop - start for _, start, stop in part.spans)
            for call, start, stop in part.spans:
                if not call.is_over:
                    unanswered[call] += stop - start
        assert all(call.unanswered == size for call, size in unanswered.items())


def run(call: Call) -> None:
    """All items of the call, which is new, go into a batch."""
    call.pending = 0
    call.state = CallState.RUNNING


class Timed(Protocol):
    """Something that ends at its deadline, if it is not over before."""

    @property
    def deadline(self) -> float:
        """When its time ends; infinity for never."""

    @property
    def is_over(self) -> bool:
        """Answered, failed or given up."""


TimedCall = TypeVar("TimedCall", bound=Timed)


class Deadlines(Generic[TimedCall]):
    """When the time of calls ends, of those that do not see to it themselves."""

    def __init__(self) -> None:
        #: When to ask ``ended``; infinity for never.
        self.next = math.inf
        self._calls: list[tuple[float, int, TimedCall]] = []  # a heap
        self._count = 0  # keeps calls from being compared
        self._room = 64  # beyond this, look for calls that are over

    def add(self, call: TimedCall) -> None:
        if len(self._calls) >= self._room:
            self._calls = [entry for entry in self._calls if not entry[2].is_over]
            heapq.heapify(self._calls)
            self._room = max(64, 2 * len(self._calls))
        self._count += 1
        heapq.heappush(self._calls, (call.deadline, self._count, call))
        self.next = self._calls[0][0]

    def ended(self, now: float) -> list[TimedCall]:
        """The calls whose time has ended, and that are not over."""
        calls = self._calls
        ended: list[TimedCall] = []
        while calls and (calls[0][0] <= now or calls[0][2].is_over):
            call = heapq.heappop(calls)[2]
            if not call.is_over:
                ended.append(call)
        self.next = calls[0][0] if calls else math.inf
        return ended
