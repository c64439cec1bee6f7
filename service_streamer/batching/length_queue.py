"""Calls that wait, and which of their items go together, where items have lengths.

Calls come in their turn into a window, which has items by length, and there have turns again. A
model pads all items of a batch to the longest. So a batch is grown around the item whose turn it
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
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..observe.record import BatchRecord, Call, CallState, Reason, Span
from .call_queue import CallQueue, Decision, Finish, work_of
from .learning import PaddedCost
from .turns import TurnOrder, WindowPart

#: Neighbours in length are chosen among this many batches' worth of items.
#: Chosen by reasoning: more finds better neighbours, and keeps the order less. Checked with
#: ``service-streamer simulate --base 5ms --per-unit 20us --lengths 25 --closed-loop 256``.
WINDOW_BATCHES = 8
#: The fixed cost of a batch is at least this share of its mean duration.
#: Chosen by reasoning: where none is measured the next batches may show one, and batches of one
#: item cannot.
LEAST_BASE = 0.02

#: An item in the window: its length, a number that no other has, and which item of which call.
Entry = tuple[float, int, Call, int]

#: A member of an enum is looked up in Python, and every item asks for this one.
_WAITING = CallState.WAITING


class _Neighbours:
    """Items that go together."""

    def __init__(self, first: Entry) -> None:
        self.entries = [first]
        self.length = first[0]  # of the longest
        self.padding = 0.0  # of all of them
        self.reason: Reason | None = None  # why there are no more


class LengthQueue(CallQueue):
    """The queue of calls whose items have lengths. It has the arguments of ``CallQueue``."""

    has_lengths = True

    def __init__(self, batch_size: int, weights: Mapping[str, float]) -> None:
        super().__init__(batch_size, weights)
        self.cost = PaddedCost()
        self._outside: dict[Call, Sequence[int]] = {}  # items that are not in the window, by place
        self._window: TurnOrder[WindowPart] = TurnOrder(weights)
        self._window_size = WINDOW_BATCHES * batch_size  # up to which it is filled
        self._parts: dict[Call, WindowPart] = {}  # what is in the window
        self._sorted: list[Entry] = []  # with entries of calls that are over
        self._new: list[Entry] = []  # those that are not yet among them
        self._entries = 0  # so far
        self._inside = 0  # items in the window
        self._waiting_work = 0.0  # the lengths of all items that wait

    def __iter__(self) -> Iterator[Call]:
        return iter({**self._parts, **self._outside})

    @property
    def work(self) -> float:
        return self._waiting_work

    def _learn(self) -> None:
        self._learn_share(sys.float_info.min)

    def add(self, call: Call, positions: Sequence[int] | None = None) -> None:
        if not self.items:
            self._begin()
        if positions is None:
            positions = range(call.size)
        call.pending, call.group, call.state = len(positions), None, _WAITING
        self.items += call.pending
        work = work_of(call, positions)
        self._waiting_work += work
        size_class = self._size_class(call, work)
        if size_class:
            self._large.add(call)
        if size_class or self._outside or self._inside >= self._window_size:
            self._outside[call] = positions
            self._turns.add(call, call.pending, work, size_class)
        else:  # none is before it
            self._enter(call, positions, 0)

    def remove(self, call: Call) -> None:
        self.items -= call.pending
        self._large.discard(call)
        positions, part = self._outside.pop(call, ()), self._parts.pop(call, None)
        if positions:
            work = work_of(call, positions)
            self._waiting_work -= work
            self._turns.remove(call, work, is_last=True)
        if part is not None:
            work = sum([length for length, _, _, _ in part.entries.values()])
            self._waiting_work -= work
            self._inside -= len(part.entries)
            self._window.remove(part, work, is_last=True)
            if len(self._sorted) + len(self._new) > 2 * self._inside + 64:
                self._sort()

    def _begin(self) -> None:
        super()._begin()
        self._window.forget()

    def _ahead(self, call: Call, size_class: int, work: float, unit: float) -> float:
        inside = self._window.ahead(call, size_class, work, unit)
        return inside + super()._ahead(call, size_class, work, unit)

    def oldest_arrival(self) -> float:
        return min(self._turns.oldest_arrival(), self._window.oldest_arrival())

    def first_deadline(self, now: float) -> float:
        call = self._window.head(now).call if self._parts else self._turns.head(now)
        return call.deadline

    # -- the window

    def _enter(self, call: Call, positions: Sequence[int], size_class: int) -> None:
        """These items of the call are in the window from now on."""
        lengths, number = call.lengths, self._entries
        part = self._parts.get(call)
        if part is None:
            part = self._parts[call] = WindowPart(call)
        work = 0.0
        for index in positions:
            number += 1
            length = 1.0 if lengths is None else float(lengths[index])
            work += length
            part.entries[index] = entry = (length, number, call, index)
            self._new.append(entry)
        self._entries = number
        self._inside += len(positions)
        self._window.add(part, len(positions), work, size_class)

    def _fill(self, now: float) -> None:
        """Calls enter the window in turn: small ones as a whole, so it may be more than full."""
        turns, sole = self._turns, self._turns.sole
        while self._outside and self._inside < self._window_size:
            call = turns.head(now)
            entering, size_class = self._outside.pop(call), call.group.size_class
            size = len(entering)
            if size_class:
                size = 1 if sole is None else min(size, self._window_size - self._inside)
                entering, left = entering[:size], entering[size:]
                if left:
                    self._outside[call] = left
            work, is_last = work_of(call, entering), call not in self._outside
            turns.took(call, size, work, is_last=is_last)
            self._enter(call, entering, size_class)

    # -- what goes into a batch

    def take(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut the first item in turn, and its neighbours in length; see ``CallQueue``."""
        self._learn()
        room = decision.size
        self._expire_late(room, now, decision.finish, expire)
        if not self.items:
            return None
        group = self._group(room, decision.max_cost, now)
        positions: dict[Call, list[int]] = {}  # of its items that are in the batch
        for _, _, call, index in group.entries:
            positions.setdefault(call, []).append(index)
        spans: list[Span] = []
        for call, indices in positions.items():
            indices.sort()
            if indices[-1] - indices[0] == len(indices) - 1:  # as nearly always
                spans.append((call, indices[0], indices[-1] + 1))
            else:
                spans += [(call, index, index + 1) for index in indices]
        self._leave(positions, group.entries)
        batch = self._cut({call: len(indices) for call, indices in positions.items()}, spans)
        reason, batch.calls = group.reason, len(positions)
        batch.cost = batch.size * group.length
        if reason is None or batch.size == room or not self.items:
            reason = decision.reason
        batch.reason = decision.cost_reason if reason is Reason.COST else reason
        return batch

    def _expire_late(
        self, room: int, now: float, finish: Finish, expire: Callable[[Call], None]
    ) -> None:
        """Fill the window, and leave out of it what comes too late."""
        self._fill(now)
        surely = finish.last(now, min(room, self.items))
        while late := [
            call
            for call in self._parts
            if call.deadline <= surely and self._is_late(call, 0, room, now, finish)
        ]:
            for call in late:
                if self._is_late(call, 0, room, now, finish):  # though others have left meanwhile
                    expire(call)
            self._fill(now)

    def _group(self, room: int, max_cost: float, now: float) -> _Neighbours:
        """The first item of the call whose turn it is, and its neighbours.

        Items of large calls only fill up what the others leave, unless it is their turn.
        """
        self._sort()
        large, part = self._large, self._window.head(now)
        first = next(iter(part.entries.values()))
        group = _Neighbours(first)
        del self._sorted[bisect_left(self._sorted, first)]
        if large.isdisjoint(self._parts):
            self._grow(group, self._sorted, room, max_cost)
            return group
        # Its neighbours cost about as much as the first item.
        large_room = int(max(1.0, min(self._large_cost_now() / (group.length or 1.0), room)))
        is_first_large = part.call in large
        for is_large in (is_first_large, not is_first_large):  # its own kind first
            near = [entry for entry in self._sorted if (entry[2] in large) is is_large]
            small = 0 if is_first_large else len(group.entries)
            if near:
                most = min(room, small + large_room) if is_large else room
                self._grow(group, near, most, max_cost)
        if large_room < room and sum([e[2] in large for e in group.entries]) >= large_room:
            group.reason = Reason.TURN
        return group

    def _sort(self) -> None:
        """Put new entries among the others, and let go of those of calls that are over."""
        entries, new = self._sorted, self._new
        if len(entries) + len(new) > self._inside:
            entries[:] = [entry for entry in entries if entry[2].state is _WAITING]
            new[:] = [entry for entry in new if entry[2].state is _WAITING]
        entries += new
        entries.sort()  # which is fast, since most of them are
        new.clear()

    def _grow(self, group: _Neighbours, near: list[Entry], room: int, max_cost: float) -> None:
        """Add neighbours in length of the first one, of these sorted ones, as long as that pays."""
        chosen, length, padding = group.entries, group.length, group.padding
        base, per_unit = self.cost.padding
        base = max(base, LEAST_BASE * self.cost.mean)
        right = bisect_left(near, chosen[0])
        left, last = right - 1, len(near)
        before = size = len(chosen)
        reason = None
        least = (base + per_unit * padding) / size
        best = size, left, length, padding
        while size < room:
            shorter = length - near[left][0] if left >= 0 else math.inf
            longest = near[right][0] if right < last else math.inf
            longer = size * (longest - length)
            if longer < 0.0:  # those chosen before are longer: it is padded itself
                longer, longest = length - longest, length
            if longer < shorter and (size + 1) * longest > max_cost:
                longer, last = math.inf, right  # and so are all beyond it
                reason = Reason.COST
            if shorter == longer == math.inf:
                break
            if (size + 1) * length > max_cost:
                reason = Reason.COST
                break
            size += 1
            if longer < shorter:
                padding += longer
                length = longest
                chosen.append(near[right])
                right += 1
            else:
                padding += shorter
                chosen.append(near[left])
                left -= 1
            overhead = (base + per_unit * padding) / size
            if overhead <= least:
                least, best = overhead, (size, left, length, padding)
        if best[0] < size and self.cost.is_fitted:
            size, left, length, padding = best
            del chosen[size:]
            reason = Reason.PADDING
        shortest = min(chosen)[0]
        if left >= 0 and near[left][0] == shortest < chosen[0][0]:
            # Of those that are as short the oldest go, and not the nearest.
            chosen[before:] = [entry for entry in chosen[before:] if entry[0] > shortest]
            start = bisect_left(near, (shortest,))
            chosen += near[start : start + size - len(chosen)]
        group.length, group.padding, group.reason = length, padding, reason

    def _leave(self, positions: Mapping[Call, Sequence[int]], chosen: Sequence[Entry]) -> None:
        """These items are in the window no more; it was the turn of the first call."""
        self._inside -= len(chosen)
        entries, rest = self._sorted, chosen[1:]  # the first one has left
        if rest:
            start = bisect_left(entries, min(rest))
            stop = bisect_left(entries, max(rest)) + 1
            gone = {number for _, number, _, _ in rest}
            entries[start:stop] = [e for e in entries[start:stop] if e[1] not in gone]
        for call, indices in positions.items():
            part = self._parts[call]
            work = sum([part.entries.pop(index)[0] for index in indices])
            self._waiting_work -= work
            is_last = not part.entries
            if is_last:
                del self._parts[call]
            goes_along = call is not chosen[0][2]
            self._window.took(part, len(indices), work, is_last=is_last, goes_along=goes_along)

    def check_invariants(self) -> None:
        super().check_invariants()
        entries = [entry for part in self._parts.values() for entry in part.entries.values()]
        sorted_ones = [entry for entry in [*self._sorted, *self._new] if entry[2].state is _WAITING]
        assert sorted(entries) == sorted(sorted_ones)
        assert self._inside == len(entries)
        assert self.items == self._inside + sum(map(len, self._outside.values()))
        outside = {call: work_of(call, positions) for call, positions in self._outside.items()}
        inside = {
            part: sum(length for length, *_ in part.entries.values())
            for part in self._parts.values()
        }
        self._turns.check_invariants(outside)
        self._window.check_invariants(inside)
        work = sum([*outside.values(), *inside.values()])
        assert math.isclose(self.work, work, abs_tol=1e-6 * (1.0 + work))
