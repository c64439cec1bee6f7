"""Calls that wait, and which of their items go into a batch.

Who has the next turn says ``turns``. Where items have lengths, that one's neighbours in length go
along, out of a window (``length_window``). Calls enter the window in turn: each tenant's share of
it is its share of the batches. And within the window all take turns again, so that a call that has
just come need not wait for all that is there.

A call with more items than two batches is *large*. It takes turns with smaller calls of its tenant,
a batch each; and in the batches of the others its items only fill up what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..observe.record import ORDINARY, Call, CallState, Reason, Span
from .length_window import LengthWindow
from .overload import Finish
from .tuning import LARGE
from .turns import TurnOrder
from .waiting import Waiting


class Taken(NamedTuple):
    """What was cut.

    Attributes:
        spans, payloads: of the batch, in the same order.
        cost: of the batch: its items times the longest of them.
        calls: how many they are of.
        reason: why there are no more; None if as many were taken as were asked for, or were there.
    """

    spans: list[Span]
    payloads: list[Any]
    cost: float
    calls: int
    reason: Reason | None = None


class CallQueue(Waiting):
    """The queue of calls with items that are not cut yet.

    Args:
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.
        window: for items that have lengths; None where each counts one.
    """

    def __init__(
        self,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        window: LengthWindow | None = None,
    ) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._least_large = LARGE * batch_size
        self._window = window
        self._outside = TurnOrder(weights or {})  # what is not in the window; empty without one
        self._turns = TurnOrder(weights or {})  # all others
        self._large: set[Call] = set()

    def __iter__(self) -> Iterator[Call]:
        yield from self._turns
        yield from [call for call in self._outside if call not in self._turns]

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        self.enter(call)
        size, window, outside = call.pending, self._window, self._outside
        is_large = size >= self._least_large
        if is_large:
            self._large.add(call)
        if window is None:
            self._turns.add(call, size)
        elif is_large or outside.items or self._turns.items >= window.size:
            outside.add(call, size)
        else:
            self._turns.add(call, size)
            window.add(call, range(size))

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items; without lengths, its last ones."""
        call.pending = len(positions)
        if self._window is None:
            self.add(call)
        else:
            self.enter(call)
            self._turns.add(call, call.pending)
            self._window.add(call, positions)

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        self.leave(call)
        self._large.discard(call)
        if call in self._outside:
            self._outside.remove(call, self._outside.left(call))
        if call in self._turns:
            self._turns.remove(call, self._turns.left(call))
            if self._window is not None:
                self._window.remove(call, self._turns.items)

    @property
    def is_fair(self) -> bool:
        """Whether calls of several tenants wait, or some that are not alike."""
        return self._turns.is_fair or self._outside.is_fair

    def ahead(self, call: Call) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        ahead: float = self.items
        if self.is_fair or call.precedence is not ORDINARY:
            ahead = self._turns.ahead(call) + self._outside.ahead(call)
        # Of a large call there may be only one batch.
        return max(0.0, ahead - sum([each.pending - self._batch_size for each in self._large]))

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        if not self._outside.items:
            return self._turns.oldest().arrived_at
        oldest = self._outside.oldest().arrived_at
        return min(oldest, self._turns.oldest().arrived_at) if self._turns.items else oldest

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        return (self._turns if self._turns.items else self._outside).head(now).deadline

    def take(
        self,
        room: int,
        now: float,
        finish: Finish,
        expire: Callable[[Call], None],
        max_cost: float = math.inf,
    ) -> Taken:
        """Cut at most ``room`` items: the first in turn, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way as long as there are others
        to fill the batch. Under overload the oldest calls are always those whose time is about to
        end: to compute them would waste every batch. Without that need such a call is computed,
        since the expectation may be wrong. But one that is late at the earliest is left out, too,
        so that the others are sooner back; except the last one.

        Args:
            expire: ends a call that is left out.
            max_cost: the most that the batch may cost, unless one item does.
        """
        if self._window is not None:
            return self._take_neighbours(self._window, room, now, finish, expire, max_cost)
        is_bounded = max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(max_cost))
        turns, surely = self._turns, finish.last(now, min(room, self.items))
        taken: dict[Call, int] = {}
        count = 0
        while count < room and self.items:
            call = turns.head(now)
            if (
                call.deadline <= surely
                and call not in taken  # else it would end while an item of it is in the batch
                and self._is_late(call, count, room - count, now, finish)
            ):
                expire(call)
                continue
            if call.deadline < surely and not count:
                room = finish.room(call.deadline, room)
            size = 1  # so that tenants take turns within a batch, too
            if turns.plain is not None:
                size = call.pending if call.pending < room - count else room - count
            turns.took(call, size, size)
            self.cut(call, size)
            taken[call] = taken.get(call, 0) + size
            count += size
        spans: list[Span] = []
        payloads: list[Any] = []
        for call, size in taken.items():
            stop = call.size - call.pending
            spans.append((call, stop - size, stop))
            payloads += call.payloads[stop - size : stop]
            if call in self._large:
                self._give_way(call)
        reason = Reason.COST if is_bounded and self.items else None
        return Taken(spans, payloads, float(count), len(spans), reason)

    def _is_late(self, call: Call, taken: int, room: int, now: float, finish: Finish) -> bool:
        """Whether the call comes too late in a batch of what was taken, and what fits besides.

        The first one only if it does in the smallest batch that is worth it.
        """
        size = taken + min(room, self.items)
        judged = size if taken or size < finish.least else finish.least
        deadline, added = call.deadline, finish.each * judged
        if deadline <= now:
            return True
        if not taken and self.items == call.pending:
            return False  # if none was computed, it would never be known that they are not late
        if deadline < finish.earliest + added:
            return True
        return deadline < finish.likely + added and self.items > room

    def _give_way(self, call: Call) -> None:
        """The large call had its turn, and goes behind the others if any of them has fewer items.

        Else calls of equal size would all be done at the end.
        """
        if call.pending < self._least_large:
            self._large.discard(call)
        elif call in self._turns and (
            self.calls > len(self._large)
            or any(each.pending < call.pending for each in self._large)
        ):
            self._turns.give_way(call)

    # -- where items have lengths

    def _fill(self, window: LengthWindow, now: float) -> None:
        """Calls enter the window in turn: large ones in parts, so it may be more than full."""
        outside = self._outside
        while self._turns.items < window.size and outside.items:
            call = outside.head(now)
            left = outside.left(call)
            size = left if left < self._least_large else self._batch_size
            positions = range(call.size - left, call.size - left + size)
            # Items without length cost too: a tenant with no others would always be next.
            lengths = call.lengths
            cost = sum([lengths[index] for index in positions]) if lengths is not None else 0.0
            outside.took(call, size, cost or float(size))
            if size < left:
                outside.give_way(call)
            self._turns.add(call, size)
            window.add(call, positions)

    def _take_neighbours(
        self,
        window: LengthWindow,
        room: int,
        now: float,
        finish: Finish,
        expire: Callable[[Call], None],
        max_cost: float,
    ) -> Taken:
        """Cut the first item in turn, and its neighbours in length, as ``take`` does."""
        turns, large = self._turns, self._large
        surely = finish.last(now, min(room, self.items))

        def is_late(call: Call) -> bool:
            if call.deadline > surely or not self._is_late(call, 0, room, now, finish):
                return False  # as nearly always
            expire(call)
            return True

        self._fill(window, now)
        while self.items and is_late(first := turns.head(now)):
            self._fill(window, now)
        if not self.items:
            return Taken([], [], 0.0, 0)
        entries, length, reason = window.around(
            window.first(first), room, max_cost, surely, is_late, large - {first}
        )
        places: dict[Call, list[int]] = {}
        for _, _, call, index in entries:
            places.setdefault(call, []).append(index)
        spans: list[Span] = []
        payloads: list[Any] = []
        for call, indices in places.items():  # the first one's before all others
            indices.sort()
            for index in indices:
                if spans and spans[-1][0] is call and spans[-1][2] == index:
                    spans[-1] = (call, spans[-1][1], index + 1)
                else:
                    spans.append((call, index, index + 1))
                payloads.append(call.payloads[index])
            if call is first:
                turns.took(call, len(indices), 1.0)
            else:
                turns.remove(call, len(indices))
            self.cut(call, len(indices))
            if call in large and (call is first or call.pending < self._least_large):
                self._give_way(call)
        if len(entries) == room or not self.items:
            reason = None
        return Taken(spans, payloads, len(entries) * length, len(places), reason)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        waiting = [*self]
        self._turns.check_invariants()
        self._outside.check_invariants()
        assert self.calls == len(waiting)
        assert self.items == sum(call.pending for call in waiting)
        assert self.items == self._turns.items + self._outside.items
        assert all(call.state is CallState.WAITING for call in waiting)
        assert self._large <= {*waiting}
        if self._window is None:
            assert not self._outside.items
        else:
            self._window.check_invariants({call: self._turns.left(call) for call in self._turns})
