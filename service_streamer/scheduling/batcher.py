"""The state machine of batching: what happened goes in, what is to be done comes out.

    span    state       held by                                     leaves when
    ----    -----       -------                                     -----------
            PENDING     its call in Batcher._pending, by arrival    it is cut into a batch
            IN_FLIGHT   Batch.spans of a batch in Slot.batches      the batch is done, failed, lost
            OVER        nothing (its call may still be waiting      -
                        for other spans)

    slot    state       meaning
    ----    -----       -------
            STARTING    its worker loads the model; takes no batch
            IDLE        holds no batch
            BUSY        holds one batch, or two: one running and a full one sent ahead
            LOST        its worker failed to start or died; for good

A call that fails or is withdrawn is over at once: its pending items are skipped when a batch is cut
and its spans in flight are ignored when they come back. Nothing here does I/O, reads a clock, locks
or logs; the engine calls one method at a time and does what the returned ``Actions`` say, in order:
first send the batches, so that workers are busy again, then answer the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .batching import Company
from .records import Batch, Call, Slot, SlotState, Span, Statistics

__all__ = ["Actions", "Batcher"]


class Actions(NamedTuple):
    """What to do now: send ``batches``, then answer ``calls``, which are over."""

    batches: Sequence[Batch]
    calls: Sequence[Call]


#: The usual answer to a submission while all workers are busy.
_NOTHING = Actions((), ())


class Batcher:
    """Groups the items of calls into batches for a fixed number of workers.

    Args:
        batch_size: the most items of a batch.
        max_latency: the longest that an item waits for company while a worker is free, seconds.
        slots: the number of workers; they are named 0 to ``slots - 1``.
    """

    def __init__(self, *, batch_size: int, max_latency: float, slots: int) -> None:
        self._batch_size = batch_size
        self._max_latency = max_latency
        self._slots = [Slot() for _ in range(slots)]
        self._pending: deque[Call] = deque()
        self._pending_items = 0  # of calls that are not over
        self._withdrawn_calls = 0  # still in _pending, but over
        self._next_batch_id = 0
        self._company = Company()
        # Dicts as ordered sets: the slot that has been idle or without a batch ahead for longest is
        # first, so work is spread evenly over the devices.
        self._idle: dict[int, None] = {}
        self._without_ahead: dict[int, None] = {}
        #: When to call ``time_passed``; None when only an event can change things.
        self.deadline: float | None = None

    # -- what callers do

    def call_submitted(self, call: Call, now: float) -> Actions:
        """A call with at least one item arrived."""
        size = call.pending
        call.arrived_at = now
        self._pending.append(call)
        self._pending_items += size
        self._company.arrived(size, now)
        batches = self._cut(now)
        return Actions(batches, ()) if batches else _NOTHING

    def call_withdrawn(self, call: Call) -> bool:
        """Nobody waits for the call any more. False if it was over already."""
        if call.is_over:
            return False
        self._end(call)
        return True

    def call_cancelled(self, call: Call) -> bool:
        """Withdraw the call unless a part of it has been sent; returns whether it was withdrawn."""
        return call.pending == call.size and self.call_withdrawn(call)

    # -- what workers do

    def worker_ready(self, slot: int, now: float) -> Actions:
        """The worker has loaded its model."""
        self._slots[slot].state = SlotState.IDLE
        self._idle[slot] = None
        return Actions(self._cut(now), ())

    def batch_done(
        self,
        slot: int,
        batch_id: int,
        outputs: list[Any],
        failures: Mapping[int, Any],
        duration: float,
        now: float,
    ) -> Actions:
        """A batch came back, with one output per item.

        Args:
            failures: for positions in the batch whose item or result could not cross between the
                processes: why. Their calls fail; the others do not notice.
            duration: what the model took, in seconds.
        """
        batch = self._take_back(slot, batch_id)
        calls: list[Call] = []
        start = 0
        for span in batch.spans:
            call = span.call
            size = span.stop - span.start
            if not call.is_over:
                part = outputs[start : start + size]
                if size == call.size:
                    call.outputs = part
                else:
                    call.outputs = call.outputs or [None] * call.size
                    call.outputs[span.start : span.stop] = part
                call.unanswered -= size
                if failures:
                    self._fail_if(call, failures, range(start, start + size))
                if not call.unanswered and not call.is_over:
                    self._end(call)
                if call.is_over:
                    calls.append(call)
            start += size
        # What is about to come back is known before it is decided what to cut.
        self._company.answered(len(calls), duration, now)
        return Actions(self._cut(now), calls)

    def batch_failed(self, slot: int, batch_id: int, failure: Any, now: float) -> Actions:
        """The model failed on a batch: so do exactly the calls that had items in it."""
        calls = self._fail_batch(self._take_back(slot, batch_id), failure)
        return Actions(self._cut(now), calls)

    def worker_lost(self, slot: int, failure: Any, broken: Any, now: float) -> Actions:
        """The worker failed to start, or died.

        Args:
            failure: for the calls that it held.
            broken: for the pending calls, if this was the last worker that could serve them.
        """
        lost = self._slots[slot]
        lost.state = SlotState.LOST
        self._idle.pop(slot, None)
        self._without_ahead.pop(slot, None)
        calls: list[Call] = []
        for batch in lost.batches.values():
            calls += self._fail_batch(batch, failure)
        lost.batches.clear()
        if self.is_broken:
            calls += self.fail_all(broken)
        return Actions(self._cut(now), calls)

    # -- time, and the end

    def time_passed(self, now: float) -> Actions:
        """The deadline is reached."""
        return Actions(self._cut(now), ())

    def fail_all(self, failure: Any) -> list[Call]:
        """End every call that is not over, pending or in flight."""
        calls: list[Call] = []
        for slot in self._slots:
            for batch in slot.batches.values():
                calls += self._fail_batch(batch, failure)
        for call in list(self._pending):  # a copy, since failing one may sweep the queue
            if not call.is_over:
                self._fail(call, failure)
                calls.append(call)
        return calls

    @property
    def is_broken(self) -> bool:
        """Whether no worker is left that could ever serve a call."""
        return all(slot.state is SlotState.LOST for slot in self._slots)

    @property
    def is_starting(self) -> bool:
        """Whether a worker is still loading its model."""
        return any(slot.state is SlotState.STARTING for slot in self._slots)

    @property
    def is_empty(self) -> bool:
        """Whether no call waits and no batch is in flight."""
        return not self._pending_items and not any(slot.batches for slot in self._slots)

    @property
    def is_answered(self) -> bool:
        """Whether nobody waits for anything, though a worker may still be computing."""
        return not self._pending_items and all(
            span.call.is_over
            for slot in self._slots
            for batch in slot.batches.values()
            for span in batch.spans
        )

    def statistics(self) -> Statistics:
        in_flight = [batch for slot in self._slots for batch in slot.batches.values()]
        workers = dict.fromkeys(SlotState, 0)
        for slot in self._slots:
            workers[slot.state] += 1
        return Statistics(
            self._pending_items, len(in_flight), sum(batch.size for batch in in_flight), workers
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        unanswered = {call: call.pending for call in self._pending if not call.is_over}
        assert all(unanswered.values())
        assert self._pending_items == sum(unanswered.values())
        assert self._withdrawn_calls == sum(call.is_over for call in self._pending)
        for number, slot in enumerate(self._slots):
            assert len(slot.batches) <= 2
            assert (slot.state is SlotState.IDLE) == (number in self._idle)
            assert (slot.state is SlotState.BUSY) == bool(slot.batches)
            assert (len(slot.batches) == 1) == (number in self._without_ahead)
            for batch in slot.batches.values():
                assert batch.size == sum(span.stop - span.start for span in batch.spans)
                assert 1 <= batch.size <= self._batch_size
                for span in batch.spans:
                    if not span.call.is_over:
                        size = unanswered.get(span.call, 0) + span.stop - span.start
                        unanswered[span.call] = size
        assert all(call.unanswered == size for call, size in unanswered.items())
        if self._pending_items and self._idle:
            assert self.deadline is not None
        else:
            assert self.deadline is None
        assert self._pending_items < self._batch_size or not (self._idle or self._without_ahead)

    # -- cutting

    def _cut(self, now: float) -> list[Batch]:
        """Every batch that should go out now; sets the deadline of what should wait instead."""
        batches: list[Batch] = []
        self.deadline = None
        while self._pending_items:
            if self._idle:
                if self._pending_items < self._batch_size:
                    wait_until = min(
                        self._company.wait_until(self._pending_items, len(self._idle), now),
                        self._oldest_arrival() + self._max_latency,
                    )
                    if wait_until > now:
                        self.deadline = wait_until
                        break
                slot = next(iter(self._idle))
                del self._idle[slot]
                self._slots[slot].state = SlotState.BUSY
                self._without_ahead[slot] = None
            # A worker that is not free gets a batch ahead only if it is full: what is not, may
            # still grow until a worker can take it.
            elif self._pending_items >= self._batch_size and self._without_ahead:
                slot = next(iter(self._without_ahead))
                del self._without_ahead[slot]
            else:
                break
            batches.append(self._cut_one(slot))
        return batches

    def _cut_one(self, slot: int) -> Batch:
        room = self._batch_size
        spans: list[Span] = []
        payloads: list[Any] = []
        pending = self._pending
        while room and pending:
            call = pending[0]
            if call.is_over:
                self._skip()
                continue
            size = min(call.pending, room)
            start = call.size - call.pending
            spans.append(Span(call, start, start + size))
            payloads += call.payloads[start : start + size]
            room -= size
            self._pending_items -= size
            call.pending -= size
            if not call.pending:
                pending.popleft()
        batch = Batch(self._next_batch_id, slot, spans, payloads)
        self._next_batch_id += 1
        self._slots[slot].batches[batch.id] = batch
        return batch

    def _oldest_arrival(self) -> float:
        while self._pending[0].is_over:
            self._skip()
        return self._pending[0].arrived_at

    def _skip(self) -> None:
        self._pending.popleft()
        self._withdrawn_calls -= 1

    def _take_back(self, slot: int, batch_id: int) -> Batch:
        """Remove a batch that a worker has finished from its slot."""
        holder = self._slots[slot]
        batch = holder.batches.pop(batch_id, None)
        if batch is None:
            raise RuntimeError(
                f"worker {slot} answered batch {batch_id}, which it has not: our bug"
            )
        if holder.batches:
            self._without_ahead[slot] = None
        else:
            holder.state = SlotState.IDLE
            del self._without_ahead[slot]
            self._idle[slot] = None
        return batch

    # -- ending calls

    def _fail_batch(self, batch: Batch, failure: Any) -> list[Call]:
        calls: list[Call] = []
        for span in batch.spans:
            if not span.call.is_over:
                self._fail(span.call, failure)
                calls.append(span.call)
        return calls

    def _fail_if(self, call: Call, failures: Mapping[int, Any], positions: range) -> None:
        """Fail the call if one of its items, at these positions of the batch, has failed."""
        failed = next((failures[i] for i in positions if i in failures), None)
        if failed is not None:
            self._fail(call, failed)

    def _fail(self, call: Call, failure: Any) -> None:
        call.failure = failure
        call.outputs = []
        self._end(call)

    def _end(self, call: Call) -> None:
        call.is_over = True
        call.payloads = ()
        if call.pending:  # then it is still in the queue
            self._pending_items -= call.pending
            call.pending = 0
            self._withdrawn_calls += 1
            self._sweep()
            if not self._pending_items:
                self.deadline = None

    def _sweep(self) -> None:
        """Keep the queue from filling up with calls that nobody waits for.

        Removing each at once would cost a search each; this costs a constant for each, amortised.
        """
        if self._withdrawn_calls > 32 and self._withdrawn_calls * 2 > len(self._pending):
            self._pending = deque(call for call in self._pending if not call.is_over)
            self._withdrawn_calls = 0
