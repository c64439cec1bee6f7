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
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

from ..observe.record import ORDINARY, Call, CallState, Reason, Span
from .call_queue import CallQueue, Taken
from .cost import LearnedCost
from .fair_queue import TenantLine
from .overload import Finish
from .tuning import LEAST_BASE, WINDOW_BATCHES
from .waiting import Waiting

#: An item in the window: its length, a number that no other has, and which item of which call.
_Entry = tuple[float, int, Call, int]


#: Instead of a neighbour in length where there is none: nothing is as short, or as long.
_NOTHING: _Entry = (-math.inf, 0, Call((), None), 0)
_ENDLESS: _Entry = (math.inf, 0, Call((), None), 0)


#: A member of an enum is looked up in Python, and every item asks for this one.
_WAITING = CallState.WAITING


class LengthQueue(Waiting):
    """The queue of calls whose items have lengths: a line, and a window in which it ends.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        max_batch_cost: the most that a batch may cost, unless one item does.
        weights: of the tenants whose weight is not 1.
    """

    def __init__(
        self,
        cost: LearnedCost,
        *,
        batch_size: int,
        max_batch_cost: float = math.inf,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self._line = CallQueue(weights)
        self._cost = cost
        self._max_batch_cost = max_batch_cost
        self._window = WINDOW_BATCHES * batch_size
        # From the line into the window, with items there, and a number up to that of the first.
        self._drawn: dict[Call, int] = {}
        self._latest = -math.inf  # deadline of those
        self._oldest: Call | None = None  # of those; None if that is not known
        self._order: TenantLine | None = None  # of those, if there was one with a precedence
        self._sorted: list[_Entry] = []  # the window, by length
        self._entries: dict[int, _Entry] = {}  # the same, by their numbers
        self._count = 0

    def __iter__(self) -> Iterator[Call]:
        yield from self._drawn
        yield from self._line

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        self.enter(call)
        self._line.add(call)

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items."""
        call.pending = len(positions)
        if call.pending == call.size:
            self.add(call)
        else:  # it was drawn
            self.enter(call)
            self._sorted = sorted([*self._sorted, *self._enter(call, positions)])

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        self.leave(call)
        if self._drawn.pop(call, None) is None:  # else its entries are skipped: they are few
            self._line.remove(call)

    @property
    def is_fair(self) -> bool:
        """Whether a call with a precedence waits."""
        return self._order is not None or self._line.is_fair

    def ahead(self, call: Call) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        is_last = call.precedence.priority <= 0 and call.deadline >= self._latest
        drawn = self.items - self._line.items if is_last or not self.is_fair else 0
        return drawn + self._line.ahead(call)

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        if self._oldest not in self._drawn:
            if self._order is None:  # then the window came from the line by arrival
                self._oldest = next(iter(self._drawn), None)
            else:
                self._oldest = min(self._drawn, key=attrgetter("arrived_at"), default=None)
        oldest = math.inf if self._oldest is None else self._oldest.arrived_at
        return min(oldest, self._line.oldest_arrival()) if self._line.items else oldest

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        return self._head(now).deadline if self._drawn else self._line.first_deadline(now)

    def _head(self, now: float) -> Call:
        """Of the calls in the window, whose turn it is; there must be one."""
        return next(iter(self._drawn)) if self._order is None else self._order.head(now)

    def take(
        self,
        room: int,
        now: float,
        finish: Finish,
        expire: Callable[[Call], None],
        max_cost: float = math.inf,
    ) -> Taken:
        """Cut at most ``room`` items: the first in order, and its neighbours in length.

        What comes too late is left out, as in ``CallQueue.take``.

        Args:
            expire: ends a call that is left out.
            max_cost: the most that the batch may cost, unless one item does.
        """
        size = min(room, self.items)
        surely = finish.last(now, size)
        earliest = finish.earliest + finish.each * size

        def is_left_out(call: Call) -> bool:
            """Whether an entry of the call is not to be cut, now or any more."""
            if call.state is not _WAITING:
                return True
            if call.deadline >= surely and call.deadline > now:
                return False  # as nearly always
            if now < call.deadline and earliest <= call.deadline and self.items <= room:
                return False
            expire(call)
            return True

        self._draw(now)
        while self.items and is_left_out(self._head(now)):
            self._draw(now)
        if not self.items:
            return Taken([], [], 0.0, 0)
        first = self._first(now)
        if self._order is not None:
            self._order.turns += 1
        entries = self._sorted
        length = first[0]
        base, per_unit = self._cost.padding
        base = max(base, LEAST_BASE * self._cost.mean)
        max_cost = min(max_cost, self._max_batch_cost)
        start = bisect_left(entries, first)
        stop = start + 1  # after the last of the batch
        left, right, last = start - 1, stop, len(entries)
        chosen = [first]
        padding = 0.0
        size, reason = 1, None
        least, best = base, (1, start, stop, length)
        below: _Entry | None = None  # the neighbours in length, once they are looked for
        above: _Entry | None = None
        while size < room:
            if below is None:
                while left >= 0 and is_left_out(entries[left][2]):
                    left -= 1
                below = entries[left] if left >= 0 else _NOTHING
            if above is None:
                while right < last and is_left_out(entries[right][2]):
                    right += 1
                above = entries[right] if right < last else _ENDLESS
            shorter, longer = length - below[0], size * (above[0] - length)
            if longer < shorter and (size + 1) * above[0] > max_cost:
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
                length, above = above[0], None
                right += 1
                stop = right
            else:
                padding += shorter
                chosen.append(below)
                below = None
                start, left = left, left - 1
            overhead = (base + per_unit * padding) / size
            if overhead <= least:
                least, best = overhead, (size, start, stop, length)
        if best[0] < size and self._cost.is_fitted:
            size, start, stop, length = best
            del chosen[size:]
            reason = Reason.PADDING
        shortest = entries[start][0]
        if start and entries[start - 1][0] == shortest < first[0]:
            # Of those that are as short the oldest go, and not the nearest.
            alike = bisect_left(entries, (shortest, 0, first[2], 0))
            chosen, after = [entry for entry in chosen if entry[0] > shortest], alike
            while len(chosen) < size:
                if not is_left_out(entries[after][2]):
                    chosen.append(entries[after])
                after += 1
            end = bisect_left(entries, (shortest, self._count + 1, first[2], 0))
            del entries[end:stop]
            start, stop = alike, after
        del entries[start:stop]  # with those among them that are left out
        calls = dict.fromkeys([call for _, _, call, _ in chosen])
        if len(calls) < size:  # those of a call together, so that it is one to whoever looks
            order = {call: number for number, call in enumerate(calls)}
            chosen.sort(key=lambda entry: (order[entry[2]], entry[3]))
        spans: list[Span] = []
        payloads: list[object] = []
        for _, number, call, index in chosen:
            del self._entries[number]
            if spans and spans[-1][0] is call and spans[-1][2] == index:
                spans[-1] = (call, spans[-1][1], index + 1)
            else:
                spans.append((call, index, index + 1))
            payloads.append(call.payloads[index])
            self.cut(call, 1)
            if not call.pending:
                del self._drawn[call]
        is_cut_short = size < room and self.items
        reason = reason if is_cut_short else None
        return Taken(spans, payloads, size * length, len(calls), reason)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        self._line.check_invariants()
        assert self.items == self._line.items + sum(call.pending for call in self._drawn)
        live = [entry for entry in self._entries.values() if entry[2] in self._drawn]
        assert sorted(live) == [entry for entry in self._sorted if entry[2] in self._drawn]
        assert len(live) == self.items - self._line.items
        assert {call for _, _, call, _ in live} == {*self._drawn}

    def _draw(self, now: float) -> None:
        """Fill the window from the line: whole calls, so it may be more than full."""
        entries, line = self._sorted, self._line
        new: list[_Entry] = []
        if not self._drawn:
            self._order, self._latest = None, -math.inf
        live = self.items - line.items
        ordered = 0 if self._order is None else self._order.entries // 3
        if max(len(entries), len(self._entries), ordered) > 2 * live + 64:
            self._sweep()
        while live < self._window and line.items:
            call = line.draw(now)
            live += call.size
            new += self._enter(call, range(call.size))
        if len(new) < 16:
            for entry in new:
                insort(entries, entry)
        else:  # as many are faster to sort than to insert one by one
            entries += new
            entries.sort()

    def _enter(self, call: Call, positions: Sequence[int]) -> Iterator[_Entry]:
        """These items of the call are in the window from now on; their entries."""
        self._drawn[call] = self._count + 1
        if call.deadline > self._latest:
            self._latest = call.deadline
        if self._order is not None:
            self._order.add(call)
            self._oldest = None
        elif call.precedence is not ORDINARY:
            self._order = TenantLine("", 1.0, self._drawn)
            for each in self._drawn:
                self._order.add(each)
        lengths = call.lengths or [1.0] * call.size
        for index in positions:
            number = self._count = self._count + 1
            entry = self._entries[number] = (float(lengths[index]), number, call, index)
            yield entry

    def _sweep(self) -> None:
        """Let go of the entries of calls that are over."""
        self._entries = {n: entry for n, entry in self._entries.items() if entry[2] in self._drawn}
        self._sorted[:] = sorted(self._entries.values())
        if self._order is not None:
            self._order.sweep()

    def _first(self, now: float) -> _Entry:
        """Of the call whose turn it is, the first item that is left."""
        call = self._head(now)
        number = self._drawn[call]
        while number not in self._entries:
            number += 1
        self._drawn[call] = number
        return self._entries[number]
