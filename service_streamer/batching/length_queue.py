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
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from ..observe.record import ORDINARY, Call, Reason, Span
from .call_queue import CallQueue, Taken
from .cost import LearnedCost
from .overload import Finish
from .tuning import AGING, LEAST_BASE, WINDOW_BATCHES

__all__ = ["LengthQueue"]

#: An item in the window: its length, a number that no other has, and which item of which call.
_Entry = tuple[float, int, Call, int]


#: Instead of a neighbour in length where there is none: nothing is as short, or as long.
_NOTHING: _Entry = (-math.inf, 0, Call((), None), 0)
_ENDLESS: _Entry = (math.inf, 0, Call((), None), 0)


class LengthQueue:
    """The queue of calls whose items have lengths: a line, and a window in which it ends.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        max_batch_cost: the most that a batch may cost, unless one item does.
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many are not cut, of calls that are not over.
    """

    __slots__ = (
        "_cost",
        "_count",
        "_cuts",
        "_drawn",
        "_in_order",
        "_line",
        "_max_batch_cost",
        "_ranked",
        "_sorted",
        "_window",
        "items",
    )

    def __init__(
        self,
        cost: LearnedCost,
        *,
        batch_size: int,
        max_batch_cost: float = math.inf,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.items = 0
        self._line = CallQueue(weights)
        self._cost = cost
        self._max_batch_cost = max_batch_cost
        self._window = WINDOW_BATCHES * batch_size
        self._drawn: set[Call] = set()  # from the line into the window, with items there
        self._sorted: list[_Entry] = []  # the window, by length
        self._in_order: OrderedDict[int, _Entry] = OrderedDict()  # the same, in order
        self._ranked = 0  # entries of calls with a precedence
        self._count = 0
        self._cuts = 0

    def __iter__(self) -> Iterator[Call]:
        yield from self._drawn
        yield from self._line

    def add(self, call: Call) -> None:
        self.items += call.pending
        self._line.add(call)

    def drop(self, call: Call) -> None:
        """The call is over; its items are not to be cut."""
        self.items -= call.pending
        if call in self._drawn:  # its entries are skipped: the window is small
            self._drawn.discard(call)
            call.pending = 0
        else:
            self._line.drop(call)

    @property
    def is_fair(self) -> bool:
        """Whether a call with a precedence waits."""
        return self._ranked > 0 or self._line.is_fair

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        if self._ranked:
            oldest = min((call.arrived_at for call in self._drawn), default=math.inf)
        else:  # then the window came from the line by arrival
            front = self._front()
            oldest = math.inf if front is None else front[2].arrived_at
        return min(oldest, self._line.oldest_arrival()) if self._line.items else oldest

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        first = self._first(now)
        return self._line.first_deadline(now) if first is None else first[2].deadline

    def take(self, room: int, now: float, finish: Finish, max_cost: float = math.inf) -> Taken:
        """Cut at most ``room`` items: the first in order, and its neighbours in length.

        What comes too late is left out, as in ``CallQueue.take``.

        Args:
            max_cost: the most that the batch may cost, unless one item does.
        """
        late: list[Call] = []
        size = min(room, self.items)
        surely = finish.last(now, size)
        earliest = finish.earliest + finish.each * size

        def is_left_out(call: Call) -> bool:
            """Whether an entry of the call is not to be cut, now or any more."""
            if call.deadline >= surely and call.deadline > now and call.pending:
                return False  # as nearly always
            if not call.pending:
                return True
            if now < call.deadline and earliest <= call.deadline and self.items <= room:
                return False
            self.items -= call.pending
            call.pending = 0
            self._drawn.discard(call)
            late.append(call)
            return True

        self._draw(now)
        first = self._first(now)
        while first is not None and is_left_out(first[2]):
            self._draw(now)
            first = self._first(now)
        if first is None:
            return Taken([], [], late, 0.0, 0)
        self._cuts += 1
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
        in_order = self._in_order
        for _, number, call, index in chosen:
            del in_order[number]
            if call.precedence is not ORDINARY:
                self._ranked -= 1
            if spans and spans[-1][0] is call and spans[-1][2] == index:
                spans[-1] = (call, spans[-1][1], index + 1)
            else:
                spans.append((call, index, index + 1))
            payloads.append(call.payloads[index])
            call.is_running = True
            call.pending -= 1
            if not call.pending:
                self._drawn.discard(call)
        self.items -= size
        is_cut_short = size < room and self.items
        reason = reason if is_cut_short else None
        return Taken(spans, payloads, late, size * length, len(calls), reason)

    def check_invariants(self) -> None:
        self._line.check_invariants()
        assert self.items == self._line.items + sum(call.pending for call in self._drawn)
        live = [entry for entry in self._in_order.values() if entry[2].pending]
        assert sorted(live) == [entry for entry in self._sorted if entry[2].pending]
        assert len(live) == sum(call.pending for call in self._drawn)
        assert {entry[2] for entry in live} == self._drawn
        ranked = [e for e in self._in_order.values() if e[2].precedence is not ORDINARY]
        assert self._ranked == len(ranked)

    def _draw(self, now: float) -> None:
        """Fill the window from the line: whole calls, so it may be more than full."""
        entries, in_order, line = self._sorted, self._in_order, self._line
        new: list[_Entry] = []
        live = self.items - line.items
        if max(len(entries), len(in_order)) > 2 * live + 64:
            self._sweep()
        while live < self._window and line.items:
            call = line.draw(now)
            if call is None:
                break
            live += call.pending
            self._drawn.add(call)
            first = call.size - call.pending
            lengths = call.lengths or [1.0] * call.size
            if call.precedence is not ORDINARY:
                self._ranked += call.pending
            for index in range(first, call.size):
                number = self._count = self._count + 1
                entry = in_order[number] = (float(lengths[index]), number, call, index)
                new.append(entry)
        if len(new) < 16:
            for entry in new:
                insort(entries, entry)
        else:  # as many are faster to sort than to insert one by one
            entries += new
            entries.sort()

    def _sweep(self) -> None:
        """Let go of the entries of calls that are over."""
        for number, entry in [*self._in_order.items()]:
            if not entry[2].pending:
                self._forget(number, entry[2])
        self._sorted[:] = sorted(self._in_order.values())

    def _front(self) -> _Entry | None:
        """The first that was drawn."""
        in_order = self._in_order
        while in_order:
            number, entry = next(iter(in_order.items()))
            if entry[2].pending:
                return entry
            self._forget(number, entry[2])
        return None

    def _first(self, now: float) -> _Entry | None:
        """Whose turn it is: the first that was drawn, unless one has a precedence.

        Every ``AGING``-th time it is the first that was drawn all the same, to prevent starvation.
        """
        front = self._front()
        if front is None or not self._ranked or self._cuts % AGING == AGING - 1:
            return front

        def rank(entry: _Entry) -> tuple[float, int, int]:
            call = entry[2]
            priority, _, has_deadline = call.precedence
            is_due = has_deadline or 2 * now >= call.arrived_at + call.deadline
            return call.deadline if is_due else math.inf, -priority, entry[1]

        return min((entry for entry in self._in_order.values() if entry[2].pending), key=rank)

    def _forget(self, number: int, call: Call) -> None:
        del self._in_order[number]
        if call.precedence is not ORDINARY:
            self._ranked -= 1
