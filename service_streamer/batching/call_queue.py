"""Calls that wait, and which of their items go into a batch.

Calls have turns (``turns``); where items have lengths, the queue is a ``LengthQueue``. Calls that
are over are not searched for, only skipped when their turn comes; so ending one costs the same
however many wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..observe.record import ORDINARY, BatchRecord, Call, CallState, Reason, Span
from .learning import LearnedCost
from .policy import FIXED_COSTS, Decision, Finish
from .turns import TurnOrder

#: What a batch has of large calls, where small ones come beside them, takes at least this time,
#: seconds. Chosen by reasoning: nobody feels it, and no hand-over costs as much.
LARGE_SECONDS = 0.05
#: A call of so many batches is large, or of so many times what a batch may have of large ones.
#: Chosen by reasoning: a smaller one is over in the time of one, and another one.
LARGE = 2
#: Small calls are expected beside large ones for so many batches after the last.
#: Chosen by reasoning: who has an answer calls again within a few batches.
MIXED_BATCHES = 16

#: Members of an enum are looked up in Python, and every call asks for these.
_WAITING, _RUNNING = CallState.WAITING, CallState.RUNNING


class CallQueue:
    """The queue of calls with items that are not cut yet.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many wait.
    """

    def __init__(self, cost: LearnedCost, batch_size: int, weights: Mapping[str, float]) -> None:
        self.items = 0
        self._cost = cost
        self._batch_size = batch_size
        self._turns: TurnOrder[Call] = TurnOrder(weights)
        self._orders: tuple[TurnOrder[Any], ...] = (self._turns,)
        self._large: set[Call] = set()  # those that wait
        self._large_items = LARGE * batch_size  # from so many on a call is large
        self._large_work = math.inf  # and if its items cost so much
        self._share = math.inf  # what a batch may cost of large calls beside small ones
        self._mixed = 0  # batches for which small calls are expected beside the large ones

    def __iter__(self) -> Iterator[Call]:
        return iter(self._turns)

    @property
    def work(self) -> float:
        """What those cost that wait: their lengths together, or their number."""
        return self.items

    @property
    def counted(self) -> int:
        """How many wait, if each call has at most as many as the smallest large ones.

        Callers look at it without the engine's lock, hence the copy.
        """
        most, large = self._large_items, self._large.copy()
        return self.items - sum([max(0, call.pending - most) for call in large])

    def add(self, call: Call, positions: Sequence[int] | None = None) -> None:
        """The call waits from now on; of all its items, or of those at these positions."""
        if not self.items:
            self._begin()
        if positions is not None:  # without lengths it does not matter which: its last ones wait
            call.pending, call.group = len(positions), None
        call.state = _WAITING
        pending = call.pending
        self.items += pending
        group = self._turns.ordinary
        is_small = pending < self._large_items and pending < self._large_work
        if is_small and call.options is ORDINARY and group.calls:
            group.add(call, pending)  # as the rest would, in less time
            return
        size_class = self._size_class(call, pending)
        if size_class:
            self._large.add(call)
        self._turns.add(call, pending, pending, size_class)

    def _begin(self) -> None:
        """The first call is about to wait, after none did."""
        self._learn()  # batches of lone calls have come back, which were never here
        self._mixed = 0
        for order in self._orders:
            order.forget()

    def _size_class(self, call: Call, work: float) -> int:
        """0 if the call, which costs so much, is small.

        The large ones of one class are within a factor of two.
        """
        size = max(call.pending / self._large_items, work / self._large_work)
        return int(min(size, 2.0**60)).bit_length()

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        self.items -= call.pending
        self._large.discard(call)
        self._turns.remove(call, call.pending, is_last=True)

    def ahead(self, call: Call) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over."""
        if not self.items:
            return 0.0
        work, unit = work_of(call, range(call.size)), self.work / self.items
        size_class = self._size_class(call, work)
        return sum([order.ahead(call, size_class, work, unit) for order in self._orders])

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self._turns.sole is not None

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        return min([order.oldest_arrival() for order in self._orders])

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        return self._turns.head(now).deadline

    def take(
        self, decision: Decision, now: float, finish: Finish, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut what was decided: the first items in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way as long as there are others
        to fill the batch. Under overload the oldest calls are always those whose time is about to
        end: to compute them would waste every batch. Without that need such a call is computed,
        since the expectation may be wrong. But one that is late at the earliest is left out, too,
        so that the others are sooner back; except the last one.

        Args:
            expire: ends a call that is left out.

        Returns:
            The batch, which has no number and no slot yet; None if all came too late.
        """
        self._learn()
        room, reason = decision.size, decision.reason
        is_bounded = decision.max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(decision.max_cost))
        surely = finish.last(now, min(room, self.items))
        large = int(max(1.0, min(self._large_cost_now(), self._batch_size)))
        turns, sole, large_calls = self._turns, self._turns.sole, self._large
        taken: dict[Call, int] = {}  # how many of each call, which may have several turns
        count = 0
        while count < room and self.items > count:
            if sole is None:
                call, size = turns.head(now), 1
                before = taken.get(call, 0)
            else:
                call, before = sole.calls[0], 0
                if call.group is not sole:
                    sole.drop_left()
                    continue
                size = call.pending
                if size > room - count:
                    size = room - count
            if call.deadline <= surely:
                # Else it would end while an item of it is in the batch.
                if not before and self._is_late(call, count, room - count, now, finish):
                    expire(call)
                    continue
                if not count:
                    room = finish.room(call.deadline, room)
                    size = min(size, room)
            if large_calls and call in large_calls:
                if not large:
                    reason, is_bounded = Reason.TURN, False
                    break
                size = min(size, large)
                large -= size
            taken[call] = before + size
            count += size
            if sole is None:
                turns.took(call, size, size, is_last=before + size == call.pending)
            elif size == call.pending:
                call.group = None
                sole.calls.popleft()
        if not taken:
            return None
        if sole is not None:
            timed = sum([size for call, size in taken.items() if call.deadline < math.inf])
            turns.sole_took(count)
            turns.count_out(sole, count, timed)
        spans: list[Span] = []
        payloads: list[Any] = []
        for call, size in taken.items():
            pending = call.pending
            start = call.size - pending
            spans.append((call, start, start + size))
            payloads += call.payloads[start : start + size]
            call.pending = pending - size
            if size == pending:
                call.state = _RUNNING
        self._cut(taken, count)
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.reason = decision.cost_reason if is_bounded and self.items else reason
        return batch

    def _cut(self, calls: Iterable[Call], items: int) -> None:
        """So many items of these calls, perhaps their last ones, are in a batch now."""
        self.items -= items
        if self._large:
            self._large.difference_update([call for call in calls if not call.pending])

    def _learn(self) -> None:
        """What is large, now that more batches are back."""
        if self._cost.is_fitted:
            self._learn_share(2.0)

    def _learn_share(self, least: float) -> None:
        """What a batch may cost of large calls; one that costs less than ``least`` is small."""
        base, per_unit = self._cost.padding
        if per_unit:
            self._share = max(LARGE_SECONDS, FIXED_COSTS * base) / per_unit
            self._large_work = max(least, LARGE * self._share)

    def _large_cost_now(self) -> float:
        """What the next batch may cost of large calls, where small ones come beside them.

        The next small one waits for all of the batch. So that is no longer than it has to be to be
        nearly as fast as a full one, or to be felt.
        """
        if not self._large:
            return math.inf
        if self.items > sum([call.pending for call in self._large]):
            self._mixed = MIXED_BATCHES
        elif self._mixed:
            self._mixed -= 1
        else:
            return math.inf
        return self._share

    def _is_late(self, call: Call, taken: int, room: int, now: float, finish: Finish) -> bool:
        """Whether the call comes too late in a batch of what was taken, and what fits besides.

        The first one only if it does in the smallest batch that is worth it.
        """
        waiting = self.items - taken
        size = taken + min(room, waiting)
        judged = size if taken or size < finish.least else finish.least
        deadline, added = call.deadline, finish.each * judged
        if deadline <= now:
            return True
        if waiting == call.pending and not taken:
            return False  # if none was computed, it would never be known that they are not late
        if deadline < finish.earliest + added:
            return True
        return deadline < finish.likely + added and waiting > room

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        waiting = {*self}
        assert self.items == sum(call.pending for call in waiting)
        assert all(call.state is _WAITING for call in waiting)
        assert self._large <= waiting
        if len(self._orders) == 1:
            self._turns.check_invariants({call: call.pending for call in waiting})


def work_of(call: Call, positions: Sequence[int]) -> float:
    """What these items of the call cost together."""
    lengths, size = call.lengths, len(positions)
    if lengths is None:
        return float(size)
    return float(sum(lengths if size == call.size else [lengths[i] for i in positions]))
