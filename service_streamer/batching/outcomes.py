"""What becomes of calls and batches: how they end, and how many did.

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

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..observe.metrics import BatchMetrics
from ..observe.recent import RECENT
from ..observe.record import NO_OUTPUT, NO_OUTPUTS, BatchRecord, Call, CallState, Span
from ..supervision.autoscaling import Load
from ..supervision.health import Health
from .call_queue import CallQueue, end
from .isolation import Raised, Retries, Search, parts_after_death
from .learning import LearnedCost
from .policy import Policy
from .slots import Slots

#: A member of an enum is looked up in Python, and every call asks for this one.
_OVER = CallState.OVER

_NOT_OPEN = (CallState.NEW, CallState.OVER)

#: So many batches that are back are counted in the metrics at once, which takes less time.
_COUNTED_AT_ONCE = 64


class Figures:
    """Counts calls and batches, and tells of them.

    Args:
        slots: of the workers.

    Attributes:
        retries: parts of batches that wait to be run again, and what was counted of them.
        pending, policy: calls with items that are not cut, and what knows how long they take; both
            set by the batcher.
        accepted_calls, accepted_items, answered_calls: how many, so far.
        failed_calls: those that failed of anything but their time, so far.
        expired_calls: those whose time ended, so far.
        cancelled_calls: those that were withdrawn, so far.
        rejected_calls: how many were refused since too much waited, so far; the engine counts those
            that found no room.
        refused_items: of those calls that were refused since too much waited, and would have been
            in time by themselves; counted there, too.
        batch_duration: what the model has taken for a batch of late, seconds; infinity before the
            first.
        recent: the last batches that came back, the oldest first.
    """

    pending: CallQueue
    policy: Policy

    def __init__(self, retries: Retries, slots: Slots) -> None:
        self.retries = retries
        self._slots = slots
        self.accepted_calls = self.accepted_items = self.answered_calls = 0
        self.failed_calls = self.expired_calls = self.cancelled_calls = 0
        self.rejected_calls = self.refused_items = 0
        self.batch_duration = math.inf
        self._metrics = BatchMetrics()
        self._uncounted: list[BatchRecord] = []  # batches that are not in the metrics yet
        self._waits: list[float] = []  # of the lone calls among them, seconds
        self._waited = 0.0  # the sum of these
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT)

    # -- what happens

    def came_back(self, batch: BatchRecord) -> None:
        """Count a batch that is back, be it with results or a failure."""
        if self._slots.places:
            self._metrics.item_over(batch)
        else:
            self._uncounted.append(batch)
            if batch.calls > 1:
                if batch.search is None:
                    self._metrics.was_cut(batch)
            elif batch.search is None:
                waited = batch.cut_at - batch.spans[0][0].arrived_at
                self._waits.append(waited)
                self._waited += waited
            if len(self._uncounted) >= _COUNTED_AT_ONCE:
                self._count_back()
        self.note(batch)
        self.recent.append(batch)

    def lost(self, batch: BatchRecord) -> None:
        """A batch of new items was lost with its worker."""
        self._metrics.was_cut(batch)

    def note(self, batch: BatchRecord) -> None:
        """Note in a batch that is back, or lost, what was counted until then."""
        batch.queued = self._metrics.queued.total + self._waited
        batch.pending = self.pending.items
        batch.answered, batch.failed = self.answered_calls, self.failed_calls
        batch.expired, batch.rejected = self.expired_calls, self.rejected_calls

    def took(self, duration: float) -> None:
        """The model has taken so long for a batch, or for an item if it is one of steps."""
        known, many = self.batch_duration, 4
        if self._slots.places:  # items differ far more than batches do
            many = min(4 * self._slots.places, self.metrics.batch.count)
        self.batch_duration = duration if known == math.inf else known + (duration - known) / many

    def _count_back(self) -> None:
        """Count the batches that are back in the metrics, which somebody looks at or are many."""
        if self._uncounted:
            self._metrics.came_back(self._uncounted)
            self._uncounted.clear()
        if self._waits:
            self._metrics.queued.add_all(self._waits)
            self._waits.clear()
            self._waited = 0.0

    # -- what it says

    @property
    def metrics(self) -> BatchMetrics:
        """Of the batches so far."""
        self._count_back()
        return self._metrics

    def load(self, failed: int, start_duration: float) -> Load:
        """What there is to do, for ``Autoscaling``.

        Args:
            failed: workers that are wanted and could not be started.
            start_duration: what a worker takes to start, seconds.
        """
        over, places = self.metrics.batch.count, self._slots.places
        if places:  # each item is a batch here, and all places together are one
            full, seconds = places, self.batch_duration
            served, turn = over, seconds / full
            over //= full
        else:
            policy = self.policy
            full = policy.full
            served, turn = int(self.metrics.sizes.total), policy.duration(full)
            seconds = turn
        is_known = 0 < seconds < math.inf
        return Load(
            waiting=self.pending.items + self.retries.items,
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


class Endings:
    """Ends calls, and has those run again that deserve it.

    Args:
        figures: counts the calls.
        retries: gets what is run again.
        slots: workers, of which it holds some back.
        health: of the workers.
        expired, expired_suspect, shared: as for ``Batcher``.

    Attributes:
        pending: calls with items that are not cut; set by the batcher, as the next one.
        cost: what a batch costs.
        start_duration: what a worker takes to be ready, seconds.
        abandoned: calls that are over while a worker may still be at them.
    """

    pending: CallQueue
    cost: LearnedCost

    def __init__(
        self,
        figures: Figures,
        retries: Retries,
        slots: Slots,
        health: Health,
        *,
        expired: Any,
        expired_suspect: Any,
        shared: Callable[[Any, bool], Any],
    ) -> None:
        self._figures = figures
        self._retries = retries
        self._slots = slots
        self._health = health
        self._expired = expired
        self._expired_suspect = expired_suspect
        self._shared = shared
        self.start_duration = 0.0
        self.abandoned: set[Call] = set()

    # -- calls

    def give_results(self, batch: BatchRecord) -> list[Call]:
        """Give the outputs of a batch to its calls; those of them that are over now.

        Args:
            batch: that has not failed as a whole. The calls of items that have fail.
        """
        has_steps = bool(self._slots.places)
        outputs, failures = batch.report.outputs, batch.report.failures
        calls: list[Call] = []
        start = 0
        is_plain = not (failures or has_steps)
        for call, first, last in batch.spans:
            size = last - first
            if is_plain and size == call.size and call.state is not _OVER:  # as nearly always
                call.outputs = outputs[start : start + size]
                call.batch = batch
                call.unanswered = 0
                end(call)
                calls.append(call)
            elif not call.is_over:
                part = outputs[start : start + size]
                if size == call.size:
                    call.outputs = part
                else:
                    gathered = call.outputs or [NO_OUTPUT] * call.size
                    gathered[first:last] = part
                    call.outputs = gathered
                if call.is_stream and has_steps:
                    call.outputs = NO_OUTPUTS  # they have been handed out
                call.batch = batch
                call.unanswered -= size
                if failures:
                    self._fail_if(call, failures, range(start, start + size), batch)
                if not call.unanswered and not call.is_over:
                    end(call)
                if call.is_over:
                    calls.append(call)
            start += size
        return calls

    def _fail_if(
        self, call: Call, failures: Mapping[int, Any], positions: range, batch: BatchRecord
    ) -> None:
        """Fail the call if one of its items, at these positions of the batch, has failed."""
        failed = next((failures[i] for i in positions if i in failures), None)
        if failed is None:
            return
        if batch.calls > 1:  # one failure of several calls is that of what they were computed with
            owners = (owner for owner, start, stop in batch.spans for _ in range(start, stop))
            if any(
                owner is not call and failures.get(i) is failed for i, owner in enumerate(owners)
            ):
                failed = self._shared(failed, False)
        self.fail(call, failed)

    def fail(self, call: Call, failure: Any) -> None:
        """The call, which is not over, fails."""
        self._end(call, failure)
        self._figures.failed_calls += 1

    def fail_spans(self, spans: Sequence[Span], failure: Any) -> list[Call]:
        """Fail the calls of the spans that are not over; returns those."""
        calls: list[Call] = []
        for call, _, _ in spans:
            if not call.is_over:
                self.fail(call, failure)
                calls.append(call)
        return calls

    def fail_shared(self, spans: Sequence[Span], failure: Any, *, is_loss: bool) -> list[Call]:
        """The same where another call may be at fault, so that nothing of its may be shown.

        Args:
            is_loss: whether the failure is the loss of a worker.
        """
        return self.fail_spans(spans, self._shared(failure, is_loss))

    def expire(self, call: Call) -> None:
        """The time of the call, which is not over, has ended."""
        is_suspect = self._retries.has_waiting_alone and any(
            part.losses and call is suspect
            for part in self._retries.waiting
            for suspect, _, _ in part.spans
        )
        self._end(call, self._expired_suspect if is_suspect else self._expired)
        self._figures.expired_calls += 1

    def left(self, call: Call, *, has_expired: bool) -> bool:
        """The caller has gone, since its time has ended or for another reason.

        Returns:
            False if the call was over already, or never accepted.
        """
        if call.state in _NOT_OPEN:
            return False
        self._end(call)
        if has_expired:
            self._figures.expired_calls += 1
        else:
            self._figures.cancelled_calls += 1
        return True

    def _end(self, call: Call, failure: Any = None) -> None:
        """The call is over. Whoever counts it does so next.

        A signal handler can raise when a function begins, or after a call of C code: so not from
        ``end`` on until it is counted.
        """
        if call.is_running:
            self.abandoned.add(call)
        if call.state is CallState.WAITING:
            self.pending.remove(call)
        end(call)
        call.failure, call.outputs = failure, NO_OUTPUTS

    # -- batches that failed or were lost

    def batch_failed(self, batch: BatchRecord) -> tuple[list[Call], list[Search | Raised]]:
        """The model raised on the batch; the calls that fail, and the searches that end by that."""
        failure = batch.report.failure
        self.suspect_worker(batch, failure)
        if batch.calls > 1:  # as it ran
            calls = self.fail_shared(batch.spans, failure, is_loss=False)
        else:
            calls = self.fail_spans(batch.spans, failure)
        searches: list[Search | Raised] = [*self._retries.given_up(batch, len(calls))]
        if batch.calls > 1 and calls:
            searches.append(Raised(batch.calls, len(calls), failure, 0))
        return calls, searches

    def some_failed(self, batch: BatchRecord, failed: int) -> Sequence[Raised]:
        """So many calls of the batch have failed, each by itself; what to log of them."""
        report = batch.report
        if batch.search is not None:
            batch.search.failed += failed
        if not report.runs:
            return ()
        self._retries.isolated_calls += failed
        failure = next(iter(report.failures.values()), None)
        return [Raised(batch.calls, failed, failure, report.runs)]

    def suspect_worker(self, batch: BatchRecord, failure: Any) -> None:
        """No item of the batch has a result: its worker may be at fault, and is held back.

        Not if the failure, opaque here otherwise, blames an item, or the batch failed before.
        """
        if batch.search is not None or getattr(failure, "blames_input", False):
            return
        health = self._health
        health.failed(batch.slot, batch.back_at)
        if health.is_suspect(batch.slot) and self._slots.takes(batch.slot):
            health.held_back.append(batch.slot)
            self._slots.hold_back(batch.slot)

    def judge_workers(self, now: float) -> list[int]:
        """Let some of the workers go on that are held back; the slots of those to be replaced."""
        if self._slots.taking:
            released, condemned = self._health.judge(now)
        else:
            released, condemned = self._health.release(), []
        for slot in released:
            self._slots.release(slot)
        return condemned

    def worker_lost(
        self,
        lost: Sequence[BatchRecord],
        failure: Any,
        now: float,
        batch_id: int | None,
        begun: frozenset[int] | None,
        *,
        is_outage: bool = False,
    ) -> tuple[list[Call], list[Search]]:
        """A worker has died with these batches; the calls that fail, and the searches that end.

        Args:
            lost: the batches, in the order in which they were sent.
            failure, batch_id, begun, is_outage: as for ``Batcher.worker_lost``.
        """
        calls: list[Call] = []
        searches: list[Search] = []
        for position, batch in enumerate(lost):
            is_begun = begun is None or batch.id in begun
            # One that was sent ahead has probably not begun, and is run as a whole first.
            is_ahead = begun is None and position > 0
            if is_outage and is_begun and not (is_ahead and self._is_one_by_one):
                is_rerun = self._retries.met_outage(batch, failure, self._parts(batch, now))
            elif is_outage or (batch_id is None and not is_begun):
                is_rerun = self._retries.not_begun(batch, failure)
            elif batch_id is None:
                count = 1 if is_ahead else self._parts(batch, now)
                is_rerun = self._retries.lost(batch, failure, count)
            elif batch.id == batch_id or (begun is not None and is_begun):
                # What a device was asked to do it may say later, of another batch.
                is_rerun = self._retries.device_failed(batch, failure)
            else:
                is_rerun = self._retries.not_begun(batch, failure)
            if not is_rerun:
                calls += self._give_up(batch, failure, searches)
        return calls, searches

    @property
    def _is_one_by_one(self) -> bool:
        """Whether a worker is at one batch at a time: its model has neither steps nor stages."""
        return not self._slots.places and not self._slots.beside

    def _parts(self, batch: BatchRecord, now: float) -> int:
        """In how many parts to run a batch again with which a worker died."""
        died_after = max(0.0, now - batch.cut_at)
        cost = self.cost
        run = cost.duration(batch.cost / batch.size) if cost.is_known else died_after
        return parts_after_death(batch.size, run, died_after + self.start_duration)

    def _give_up(self, batch: BatchRecord, failure: Any, searches: list[Search]) -> list[Call]:
        """Fail the calls of a batch with which a worker died; returns what has failed.

        If its search may cost no more deaths, all that wait there fail with it.

        Args:
            searches: gets the search, if it has ended by that.
        """
        search = batch.search
        # Of a call that was alone it is known that it kills, at the end of a search too.
        if search is None or batch.calls == 1:
            failed = self.fail_spans(batch.spans, failure)
        else:
            failed = self.fail_shared(batch.spans, failure, is_loss=True)
        if search is not None and search.deaths_left <= 0:
            for part in self._retries.drop(search):
                failed += self.fail_shared(part.spans, failure, is_loss=True)
        searches += self._retries.given_up(batch, len(failed))
        return failed
