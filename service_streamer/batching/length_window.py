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
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Mapping, Sequence

from ..observe.record import Call, Reason
from .cost import LearnedCost
from .tuning import LEAST_BASE

#: An item in the window: its length, a number that no other has, and which item of which call.
Entry = tuple[float, int, Call, int]

#: Instead of a neighbour in length where there is none: nothing is as short, or as long.
_NOTHING: Entry = (-math.inf, 0, Call((), None), 0)
_ENDLESS: Entry = (math.inf, 0, Call((), None), 0)


class _Neighbours:
    """Those of an item, one after the other in each direction; of one length the oldest first.

    No generators: a signal handler may raise where one is closed, and that would be lost.
    """

    __slots__ = ("_below", "_entries", "_fits", "_right", "_start", "_stop")

    def __init__(self, entries: list[Entry], first: Entry, fits: Callable[[Call], bool]) -> None:
        self._entries = entries
        self._fits = fits
        # The next one on the left, and where those of its length begin and end.
        self._below = self._start = self._stop = bisect_left(entries, first)
        self._right = self._stop + 1

    def shorter(self) -> Entry:
        """The next one on the left."""
        entries = self._entries
        while True:
            if self._below == self._stop:  # on to those that are shorter
                self._stop = self._start
                if not self._stop:
                    return _NOTHING
                self._start = self._stop - 1
                length, _, call, _ = entries[self._start]
                if self._start and entries[self._start - 1][0] == length:
                    self._start = bisect_left(entries, (length, 0, call, 0))
                self._below = self._start
            entry = entries[self._below]
            self._below += 1
            if self._fits(entry[2]):
                return entry

    def longer(self) -> Entry:
        """The next one on the right."""
        while self._right < len(self._entries):
            entry = self._entries[self._right]
            self._right += 1
            if self._fits(entry[2]):
                return entry
        return _ENDLESS


class LengthWindow:
    """Items of calls, by length. Those of calls that are over are not searched for, only skipped.

    Args:
        cost: what batches cost; learned elsewhere.
        size: up to how many items it is filled.

    Attributes:
        size: see above.
    """

    def __init__(self, cost: LearnedCost, size: int) -> None:
        self.size = size
        self._cost = cost
        self._sorted: list[Entry] = []
        self._held: dict[Call, dict[int, Entry]] = {}  # by their place in the call
        self._count = 0

    def add(self, call: Call, positions: Sequence[int]) -> None:
        """These items of the call are in the window from now on."""
        lengths, held = call.lengths, self._held.setdefault(call, {})
        number = self._count
        for index in positions:
            number += 1
            length = 1.0 if lengths is None else float(lengths[index])
            held[index] = (length, number, call, index)
        if number - self._count < 16:
            for index in positions:
                insort(self._sorted, held[index])
        else:  # as many are faster to sort than to insert one by one
            self._sorted += [held[index] for index in positions]
            self._sorted.sort()
        self._count = number

    def remove(self, call: Call, live: int) -> None:
        """The call is over.

        Args:
            live: how many items of others are left.
        """
        del self._held[call]
        if len(self._sorted) > 2 * live + 64:
            self._sorted = [entry for entry in self._sorted if entry[2] in self._held]

    def first(self, call: Call) -> Entry:
        """Of the call, which is in the window, the first item that is left."""
        return next(iter(self._held[call].values()))

    def around(
        self,
        first: Entry,
        room: int,
        max_cost: float,
        surely: float,
        is_late: Callable[[Call], bool],
        large: Container[Call] = (),
    ) -> tuple[list[Entry], float, Reason | None]:
        """An item and its neighbours in length, which are in the window no more.

        Args:
            room: the most items.
            max_cost: the most that they may cost, unless one item does.
            surely: a call with a later deadline is in time.
            is_late: whether a call with no later one comes too late; ends it then.
            large: calls whose items only fill up what the others leave.

        Returns:
            The items; the length of the longest; and why they are no more, if not for want of room
            or of others.
        """
        base, per_unit = self._cost.padding
        base = max(base, LEAST_BASE * self._cost.mean)
        chosen, length, padding = [first], first[0], 0.0
        least, best = base, (1, length, padding)
        for takes_large in (False, True) if large else (False,):

            def fits(call: Call, takes_large: bool = takes_large) -> bool:
                return (
                    call in self._held
                    and (not large or (call in large) == takes_large)
                    and (call.deadline > surely or not is_late(call))
                )

            neighbours = _Neighbours(self._sorted, first, fits)
            below, above, reason = neighbours.shorter(), neighbours.longer(), None
            while len(chosen) < room:
                size, longest = len(chosen), max(length, above[0])
                padding_below = length - below[0]
                padding_above = size * (above[0] - length)
                if padding_above < 0.0:  # it is no longer than another one, and padded itself
                    padding_above = length - above[0]
                if padding_above < padding_below and (size + 1) * longest > max_cost:
                    padding_above, above = math.inf, _ENDLESS  # and so are all beyond it
                    reason = Reason.COST
                if padding_below == padding_above == math.inf:
                    break
                if (size + 1) * length > max_cost:
                    reason = Reason.COST
                    break
                if padding_above < padding_below:
                    padding += padding_above
                    chosen.append(above)
                    length, above = longest, neighbours.longer()
                else:
                    padding += padding_below
                    chosen.append(below)
                    below = neighbours.shorter()
                overhead = (base + per_unit * padding) / len(chosen)
                if overhead <= least:
                    least, best = overhead, (len(chosen), length, padding)
            if best[0] < len(chosen) and self._cost.is_fitted:
                del chosen[best[0] :]
                _, length, padding = best
                reason = Reason.PADDING
        self._let_go(chosen)
        return chosen, length, reason

    def _let_go(self, chosen: Sequence[Entry]) -> None:
        for _, _, call, index in chosen:
            held = self._held[call]
            del held[index]
            if not held:
                del self._held[call]
        start = bisect_left(self._sorted, min(chosen))
        stop = bisect_left(self._sorted, max(chosen), start) + 1
        gone = {number for _, number, _, _ in chosen}
        self._sorted[start:stop] = [
            entry for entry in self._sorted[start:stop] if entry[1] not in gone
        ]

    def check_invariants(self, sizes: Mapping[Call, int]) -> None:
        """Raise ``AssertionError`` if what is kept differs from these calls. For tests.

        Args:
            sizes: how many items of each call are in the window.
        """
        assert sizes == {call: len(held) for call, held in self._held.items()}
        held = [entry for entries in self._held.values() for entry in entries.values()]
        assert sorted(held) == [entry for entry in self._sorted if entry[2] in self._held]
