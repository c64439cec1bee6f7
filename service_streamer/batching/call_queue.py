"""Calls that wait, and which of their items go into a batch.

Calls have turns (``turns``); where items have lengths, the queue is a ``LengthQueue``. Calls that
are over are not searched for, only skipped when their turn comes; so ending one costs the same
however many wait.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..observe.record import BatchRecord, Call, CallState, Reason, Span
from .learning import LearnedCost
from .turns import TurnOrder

#: A batch is nearly as fast as a larger one if it takes so many times its cost beside the items.
#: Chosen by reasoning: then about a tenth of the throughput is lost.
FIXED_COSTS = 9.0
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

#: Of items, so that a batch which is back just in time is not one item smaller.
_ROUNDING = 1e-9


class Finish(NamedTuple):
    """When a batch is back, by its size; as far as that is known."""

    likely: float  # a batch without items, as predicted
    earliest: float = -math.inf  # the same, if it is as fast as it hardly ever is
    each: float = 0.0  # what each item adds, seconds
    #: The smallest batch that is worth it for the sake of its first call. The others have to wait
    #: for another batch. Infinity for none.
    least: float = math.inf
    safely: float = math.inf  # a batch without items, if it is as slow as it hardly ever is
    safely_each: float = 0.0  # what each item adds then, seconds

    def last(self, now: float, size: int) -> float:
        """When a batch of that size is likely back: a call with a later deadline is in time."""
        return max(now, self.likely + self.each * size)

    def room(self, deadline: float, most: int) -> int:
        """The most items of a batch that is surely back by then, if a smaller one is worth it."""
        if self.least >= most or not self.safely_each:
            return most
        fits = int((deadline - self.safely) / self.safely_each + _ROUNDING)
        return min(most, fits) if fits >= self.least else most


#: Nothing is known, so no call is late before its time has ended.
UNKNOWN = Finish(-math.inf)


@dataclass(slots=True)
class Decision:
    """What to do with the items that wait."""

    size: int  # the most items to cut into a batch now; 0 to wait
    reason: Reason  # why the batch gets no more items
    wait_until: float = -math.inf  # when to decide again if nothing happens before
    max_cost: float = math.inf  # the most that the batch may cost, unless one item costs more
    cost_reason: Reason = Reason.COST  # why it gets no more items, if ``max_cost`` ends it
    #: With fewer items it is still best to wait: each call that comes until then is one that was
    #: expected. 0 where that is not known.
    enough: int = 0
    finish: Finish = UNKNOWN  # when the batch will be back


class CallQueue:
    """The queue of calls with items that are not cut yet.

    Args:
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many wait.
        cost: what batches cost; learned elsewhere.
    """

    has_lengths = False

    def __init__(self, batch_size: int, weights: Mapping[str, float]) -> None:
        self.items = 0
        self.cost = LearnedCost()
        self._batch_size = batch_size
        self._turns = TurnOrder(weights)
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

    def add(
        self, call: Call, positions: Sequence[int] | None = None, work: float | None = None
    ) -> None:
        """The call waits from now on; of all its items, or of those at these positions.

        Args:
            work: what they cost, if it is not one for each.
        """
        if not self.items:
            self._mixed = 0
            self._turns.forget()
        if positions is not None:  # without lengths it does not matter which: its last ones wait
            call.pending = len(positions)
        call.state = _WAITING
        pending = call.pending
        self.items += pending
        if work is None:
            work = pending
        size_class = 0
        if pending >= self._large_items or work >= self._large_work:
            size_class = self._size_class(call, work)
            self._large.add(call)
        self._turns.add(call, pending, work, size_class)

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
        return self._turns.ahead(call, self._size_class(call, work), work, unit)

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self._turns.sole is not None and not self.has_lengths

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        return self._turns.oldest_arrival()

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        return self._turns.head(now).deadline

    def take(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut what was decided: the first items in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way if there are others to fill
        the batch. Under overload the oldest calls are always those whose time is about to end: to
        compute them would waste every batch. Without others it is computed, since the prediction
        may be wrong; unless it is late even in the fastest case, and is not the last one.

        Args:
            expire: ends a call that is left out.

        Returns:
            The batch, which has no number and no slot yet; None if all came too late.
        """
        self._learn()
        room, reason, finish = decision.size, decision.reason, decision.finish
        is_bounded = decision.max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(decision.max_cost))
        surely = finish.last(now, min(room, self.items))
        turns, sole, large_calls = self._turns, self._turns.sole, self._large
        large = int(max(1.0, min(self._large_cost_now(), self._batch_size))) if large_calls else 0
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
            if call in large_calls:
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
            timed = sum([n for call, n in taken.items() if call.deadline < math.inf])
            turns.sole_took(count, timed)
        spans = []
        for call, size in taken.items():
            start = call.size - call.pending
            spans.append((call, start, start + size))
        batch = self._cut(taken, spans)
        batch.reason = decision.cost_reason if is_bounded and self.items else reason
        return batch

    def _cut(self, taken: Mapping[Call, int], spans: list[Span]) -> BatchRecord:
        """A batch of these spans, in which so many items of each call are now."""
        payloads: list[Any] = []
        for call, start, stop in spans:
            payloads += call.payloads[start:stop]
        for call, size in taken.items():
            call.pending -= size
            if not call.pending:
                call.state = _RUNNING
        self.items -= len(payloads)
        if self._large:
            self._large.difference_update([call for call in taken if not call.pending])
        return BatchRecord(-1, -1, spans, payloads)

    def _learn(self) -> None:
        """What is large, and what a batch may cost of it, now that more batches are back."""
        base, per_unit = self.cost.padding
        if per_unit and (self.has_lengths or self.cost.is_fitted):
            self._share = max(LARGE_SECONDS, FIXED_COSTS * base) / per_unit
            # A call of one item is small where items have no lengths.
            least = sys.float_info.min if self.has_lengths else 2.0
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
        if call.deadline <= now:
            return True
        if waiting == call.pending and not taken:
            return False  # if none was computed, it would never be known that they are not late
        back_at = finish.likely if waiting > room else finish.earliest
        return call.deadline < back_at + finish.each * judged

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        waiting = {*self}
        assert self.items == sum(call.pending for call in waiting)
        assert all(call.state is _WAITING for call in waiting)
        assert self._large <= waiting
        if not self.has_lengths:
            self._turns.check_invariants({call: call.pending for call in waiting})


def work_of(call: Call, positions: Sequence[int]) -> float:
    """What these items of the call cost together."""
    lengths, size = call.lengths, len(positions)
    if lengths is None:
        return float(size)
    return float(sum(lengths if size == call.size else [lengths[i] for i in positions]))
