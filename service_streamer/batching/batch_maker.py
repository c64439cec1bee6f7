"""Makes the batches: takes items from what waits, and gives them to a worker.

When, for whom and of how many items is decided in ``cutter``. What is too late is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..observe.record import BatchRecord, Call, Reason
from .batch_sizes import fit_size
from .call_queue import CallQueue, run
from .endings import Endings
from .isolation import Retries, Search
from .overload import UNKNOWN, Finish, Overload
from .policy import Backlog, Decision, Policy
from .slots import Slots

#: A member of an enum is looked up in Python, and a lone call asks for this one.
_ALONE = Reason.ALONE

#: Items of such batches should not wait for the next one.
_URGENT = (Reason.DEADLINE, Reason.MAX_LATENCY)


class BatchMaker:
    """Makes batches of what waits.

    Args:
        pending: calls with items that are not cut.
        retries: parts of batches that wait to be run again.
        slots: of the workers; get the batches.
        endings: ends the calls that are too late.
        overload: knows how long batches take while more wait than fit into one.
        policy: see below.
        backlog: what the policy was asked about last.
        ids: of the next batches.
        has_lengths: whether the items of calls have lengths.

    Attributes:
        policy: learns what is cut. Another one takes its place if the model is one of steps.
        sizes: as for ``Batcher``.
    """

    def __init__(
        self,
        pending: CallQueue,
        retries: Retries,
        slots: Slots,
        endings: Endings,
        overload: Overload,
        policy: Policy,
        backlog: Backlog,
        ids: Iterator[int],
        *,
        has_lengths: bool,
    ) -> None:
        self._pending = pending
        self._retries = retries
        self._slots = slots
        self._endings = endings
        self._overload = overload
        self._backlog = backlog
        self._has_lengths = has_lengths
        self._ids = ids
        self.policy = policy
        self.sizes: tuple[int, ...] = ()

    def alone(self, call: Call, now: float) -> BatchRecord:
        """A batch of a call of one item that no other waits beside: past the queue.

        What deciding and taking it would do, at a third of its cost. A caller alone waits for all
        of it.
        """
        run(call)
        slots = self._slots
        slot = next(iter(slots.idle))
        batch = BatchRecord(next(self._ids), slot, [(call, 0, 1)], [*call.payloads])
        if self._has_lengths and call.lengths is not None:
            batch.cost = float(call.lengths[0])
        batch.reason = _ALONE
        batch.cut_at = now
        self.policy.was_cut(batch, self._backlog.last, now)
        duration = 0.0 if slots.room == 2 else self.policy.cost.duration(batch.cost)
        slots.give(batch, now, is_ahead=False, duration=duration)
        return batch

    def of_pending(
        self,
        slot: int,
        decision: Decision,
        batches: list[BatchRecord],
        late: list[Call],
        now: float,
        *,
        is_ahead: bool,
    ) -> None:
        """A batch for the slot, unless all that waited came too late.

        Args:
            batches: gets the batch.
            late: gets the calls that came too late.
        """
        pending, retries = self._pending, self._retries
        size, reason = decision.size, decision.reason
        if self.sizes and decision.trial is None and reason not in _URGENT:
            fitted = fit_size(min(size, pending.items), self.sizes, self.policy.duration)
            if fitted < min(size, pending.items):
                size, reason = fitted, Reason.PAYS
        if size > retries.limit:
            size, reason = int(retries.limit), Reason.FAILING
        finish = self._finish(slot, size, now)
        taken = pending.take(size, now, finish, self._expiring(late), decision.max_cost)
        if taken.spans:
            batch = BatchRecord(next(self._ids), slot, taken.spans, taken.payloads)
            batch.cost, batch.calls = taken.cost, taken.calls
            batch.reason, batch.is_full = taken.reason or reason, pending.items > 0
            if taken.reason is Reason.COST:  # perhaps not that of max_batch_cost
                batch.reason = decision.cost_reason
            self.policy.was_cut(batch, decision, now)
            if retries.waiting:
                retries.gave_way()
            self._give(batch, batches, now, is_ahead=is_ahead)

    def _finish(self, slot: int, size: int, now: float) -> Finish:
        """When a batch that is cut now will be back."""
        waiting, deadline = self._pending.items, self._backlog.deadline
        slots = self._slots
        is_overloaded = waiting > self._overload.full
        if slots.places or not (is_overloaded or deadline < math.inf):
            return UNKNOWN  # how long an item takes is not known before
        policy = self.policy
        if slots.room == 2:  # else several stages are at several batches
            start = slots.begins_at(slot, now, policy.cost.duration)
            finish = policy.finish(start, min(size, waiting), slots.taking)
            if finish is not None:
                return finish
        if is_overloaded:
            return Finish(now + self._overload.duration())
        return Finish(now + policy.duration(size)) if waiting > size else UNKNOWN

    def of_suspects(
        self,
        slot: int,
        batches: list[BatchRecord],
        late: list[Call],
        over: list[Search],
        now: float,
        *,
        is_ahead: bool = False,
    ) -> None:
        """A part of a batch that failed, to be run again.

        Args:
            batches, late: as above.
            over: gets the searches that end by that.
        """
        part = self._retries.take(now, self._expiring(late), over)
        if part is not None:
            items = [item for call, start, stop in part.spans for item in call.payloads[start:stop]]
            batch = BatchRecord(next(self._ids), slot, part.spans, items, part.search, part.losses)
            batch.calls = len({call for call, _, _ in part.spans})
            self._give(batch, batches, now, is_ahead=is_ahead)
            self._retries.gone()

    def _expiring(self, late: list[Call]) -> Callable[[Call], None]:
        """What ends a call that comes too late, and adds it to these."""

        def expire(call: Call) -> None:
            self._endings.expire(call)
            late.append(call)

        return expire

    def _give(
        self, batch: BatchRecord, batches: list[BatchRecord], now: float, *, is_ahead: bool
    ) -> None:
        batch.cut_at = now
        begun = batch.spans[0][0].handed_out if self._slots.places else None
        if begun:  # with the item go the outputs that it has had
            batch.payloads = [*batch.payloads, *begun]
        duration = self.policy.cost.duration(batch.cost)
        self._slots.give(batch, now, is_ahead=is_ahead, duration=duration)
        batches.append(batch)
