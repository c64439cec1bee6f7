"""Which of the items that wait go together, where items have lengths.

A model pads all items of a batch to the longest. So a batch is grown around the item whose turn it
is, by its neighbours in length, and is cut where it is cheapest for each:

    a + b * padding        what a batch of n costs beside the items themselves, for each of them:
    ---------------        one more item shares the a, and adds its padding, or that of all others
           n               if it is the longest

The item whose turn it is goes with every batch. So one is passed over at most as often as there are
items before it, however odd its length; those before it go one by one at the least.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from operator import attrgetter

from ..observe.record import Call, CallState, Reason
from . import tuning
from .learning import LearnedCost
from .turns import TurnOrder

#: An item in the window: its length, a number that no other has, and which item of which call.
Entry = tuple[float, int, Call, int]

#: Instead of a neighbour in length where there is none: nothing is as short, or as long.
_NOTHING: Entry = (-math.inf, 0, Call((), None), 0)
_ENDLESS: Entry = (math.inf, 0, Call((), None), 0)

#: A member of an enum is looked up in Python, and every item asks for this one.
_WAITING = CallState.WAITING


class _Neighbours:
    """Items that go together.

    Attributes:
        length: of the longest.
        padding: of all of them.
        reason: why there are no more.
        start, stop: the part of the window that has them.
    """

    __slots__ = ("entries", "length", "padding", "reason", "start", "stop")

    def __init__(self, first: Entry) -> None:
        self.entries = [first]
        self.length = first[0]
        self.padding = 0.0
        self.reason: Reason | None = None
        self.start, self.stop = sys.maxsize, 0


class LengthWindow:
    """Items of the calls whose turn is next, by length.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many are here, of calls that wait.
        size: up to how many it is filled.
    """

    def __init__(self, cost: LearnedCost, batch_size: int, weights: Mapping[str, float]) -> None:
        self.items = 0
        self.size = tuning.WINDOW_BATCHES * batch_size
        self._cost = cost
        self._weights = weights
        self._sorted: list[Entry] = []  # with entries of calls that are over, which are skipped
        self._new: list[Entry] = []  # those that are not yet among them
        self._held: dict[Call, dict[int, Entry]] = {}  # of those that wait, by place in their call
        self._turns = TurnOrder(weights)  # of these
        self._oldest: Call | None = None  # None if that is not known
        self._count = 0

    def __iter__(self) -> Iterator[Call]:
        return iter(self._held)

    def __contains__(self, call: object) -> bool:
        return call in self._held

    def add(self, call: Call, positions: Sequence[int], size_class: int = 0) -> None:
        """These items of the call are in the window from now on."""
        held, lengths, number = self._held, call.lengths, self._count
        if not held:
            self._turns = TurnOrder(self._weights)
        self._turns.add(call, len(positions), size_class)
        self._oldest = None
        own = held.get(call)
        if own is None:
            own = held[call] = {}
        for index in positions:
            number += 1
            length = 1.0 if lengths is None else float(lengths[index])
            own[index] = entry = (length, number, call, index)
            self._new.append(entry)
        self._count = number
        self.items += len(positions)

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        held = self._held.pop(call, {})
        self.items -= len(held)
        if held:
            self._turns.remove(call, len(held))

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        return self._turns.head(now).call

    def oldest(self) -> Call:
        """The call that has waited longest; there must be one."""
        if self._turns.is_by_arrival:
            return next(iter(self._held))
        if self._oldest not in self._held:
            self._oldest = min(self._held, key=attrgetter("arrived_at"))
        assert self._oldest is not None
        return self._oldest

    @property
    def work(self) -> float:
        """The lengths of the items that are here, together."""
        return self._turns.work

    def ahead(self, call: Call, size_class: int, work: float, unit: float) -> float:
        """As of ``TurnOrder``."""
        return self._turns.ahead(call, size_class, work, unit)

    def take(
        self,
        room: int,
        max_cost: float,
        now: float,
        is_left_out: Callable[[Call], bool],
        large: Set[Call],
        large_cost: float,
    ) -> tuple[list[Entry], float, Reason | None]:
        """Cut the first item of the call whose turn it is, and its neighbours in length.

        Args:
            room: the most items.
            max_cost: the most that they may cost, unless one item does.
            is_left_out: whether no item of the call may be cut.
            large: calls whose items only fill up what the others leave, unless it is their turn.
            large_cost: about the most that those may cost, unless one item does.

        Returns:
            The items; the length of the longest; and why they are no more, if not for want of room
            or of others.
        """
        self._sort()
        call = self.head(now)
        group = _Neighbours(next(iter(self._held[call].values())))
        # Its neighbours cost about as much as the first item.
        large_room = int(max(1.0, min(large_cost / (group.length or 1.0), room)))
        kinds = {each in large for each in self._held} if large else {False}
        for is_large in sorted(kinds, key=(call in large).__ne__):  # its own kind first

            def is_other(each: Call, is_large: bool = is_large) -> bool:
                return (each in large) is not is_large or is_left_out(each)

            small = len(group.entries) - (call in large)
            most = min(room, small + large_room) if is_large else room
            self._grow(group, most, max_cost, is_other if len(kinds) > 1 else is_left_out)
        if large_room < room and sum([e[2] in large for e in group.entries]) >= large_room:
            group.reason = Reason.TURN
        self._let_go(call, group)
        return group.entries, group.length, group.reason

    def _sort(self) -> None:
        """Put new entries among the others, and let go of those that are over if they are many."""
        entries, new = self._sorted, self._new
        if len(entries) > 2 * self.items + 64:
            entries[:] = [entry for entry in entries if entry[2].state is _WAITING]
        if len(new) < 16:
            for entry in new:
                insort(entries, entry)
        else:  # as many are faster to sort than to insert one by one
            entries += new
            entries.sort()
        new.clear()

    def _grow(
        self,
        group: _Neighbours,
        room: int,
        max_cost: float,
        is_left_out: Callable[[Call], bool],
    ) -> None:
        """Add neighbours in length of the first one, as long as that pays."""
        entries, chosen = self._sorted, group.entries
        first, length, padding = chosen[0], group.length, group.padding
        base, per_unit = self._cost.padding
        base = max(base, tuning.LEAST_BASE * self._cost.mean)
        start = bisect_left(entries, first)
        stop = start + 1  # after the last of them
        left, right, last = start - 1, stop, len(entries)
        before = size = len(chosen)
        reason = None
        least = (base + per_unit * padding) / size
        best = size, start, stop, length, padding
        below: Entry | None = None  # the neighbours in length, once they are looked for
        above: Entry | None = None
        while size < room:
            if below is None:
                while left >= 0 and is_left_out(entries[left][2]):
                    left -= 1
                below = entries[left] if left >= 0 else _NOTHING
            if above is None:
                while right < last and is_left_out(entries[right][2]):
                    right += 1
                above = entries[right] if right < last else _ENDLESS
            longest = above[0]
            shorter, longer = length - below[0], size * (longest - length)
            if longer < 0.0:  # those chosen before are longer: it is padded itself
                longer, longest = length - longest, length
            if longer < shorter and (size + 1) * longest > max_cost:
                longer, last, above = math.inf, right, _ENDLESS  # and so are all beyond it
                reason = Reason.COST
            if shorter == longer == math.inf:
                break
            if (size + 1) * length > max_cost:
                reason = Reason.COST
                break
            size += 1
            if longer < shorter:
                padding += longer
                chosen.append(above)
                length, above = longest, None
                right += 1
                stop = right
            else:
                padding += shorter
                chosen.append(below)
                below = None
                start, left = left, left - 1
            overhead = (base + per_unit * padding) / size
            if overhead <= least:
                least, best = overhead, (size, start, stop, length, padding)
        if best[0] < size and self._cost.is_fitted:
            size, start, stop, length, padding = best
            del chosen[size:]
            reason = Reason.PADDING
        shortest = entries[start][0]
        if start and entries[start - 1][0] == shortest < first[0]:
            # Of those that are as short the oldest go, and not the nearest.
            start = after = bisect_left(entries, (shortest, 0, first[2], 0))
            chosen[before:] = [entry for entry in chosen[before:] if entry[0] > shortest]
            while len(chosen) < size:
                if not is_left_out(entries[after][2]):
                    chosen.append(entries[after])
                after += 1
        group.start, group.stop = min(start, group.start), max(stop, group.stop)
        group.length, group.padding, group.reason = length, padding, reason

    def _let_go(self, first: Call, group: _Neighbours) -> None:
        """These are in the window no more; it was the turn of the first one's call."""
        entries, held, turns = self._sorted, self._held, self._turns
        chosen, start, stop = group.entries, group.start, group.stop
        self.items -= len(chosen)
        if stop - start == len(chosen):  # as nearly always
            del entries[start:stop]
        else:
            gone = {number for _, number, _, _ in chosen}
            entries[start:stop] = [entry for entry in entries[start:stop] if entry[1] not in gone]
        for _, _, call, index in chosen:
            own = held[call]
            del own[index]
            if not own:
                del held[call]
        for call in dict.fromkeys([entry[2] for entry in chosen]):  # the first one's is the first
            queued = turns.get(call)
            size = queued.items - len(held.get(call, ()))
            cost = size * queued.unit
            if call is first:
                turns.took(queued, size, cost)
            else:
                turns.remove(call, size, cost)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what is here and the counts differ. For tests."""
        held = [entry for entries in self._held.values() for entry in entries.values()]
        assert self.items == len(held)
        assert all(self._held.values())
        assert sorted(held) == sorted(
            entry for entry in [*self._sorted, *self._new] if entry[2].state is _WAITING
        )
        if held:
            self._turns.check_invariants()
            sizes = {call: len(entries) for call, entries in self._held.items()}
            assert sizes == {call: self._turns.get(call).items for call in self._turns}
