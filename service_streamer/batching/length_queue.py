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
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..observe.record import ORDINARY, BatchRecord, Call, CallState, Reason, Span
from .call_queue import LARGE, CallQueue, class_of
from .learning import LearnedCost
from .policy import Decision, Finish
from .turns import TurnOrder, work_of

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

#: Instead of a neighbour in length where there is none: nothing is as short, or as long.
_NOTHING: Entry = (-math.inf, 0, Call((), None), 0)
_ENDLESS: Entry = (math.inf, 0, Call((), None), 0)

#: A member of an enum is looked up in Python, and every item asks for this one.
_WAITING = CallState.WAITING


class _Neighbours:
    """Items that go together."""

    __slots__ = ("entries", "length", "padding", "reason", "start", "stop")

    def __init__(self, first: Entry) -> None:
        self.entries = [first]
        self.length = first[0]  # of the longest
        self.padding = 0.0  # of all of them
        self.reason: Reason | None = None  # why there are no more
        self.start, self.stop = sys.maxsize, 0  # the part of the window that has them


class LengthQueue(CallQueue):
    """The queue of calls whose items have lengths. It has the arguments of ``CallQueue``."""

    def __init__(
        self,
        cost: LearnedCost,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(cost, batch_size, weights)
        self._alike = None  # what is alike here is known in the window
        self._large_cost = math.inf  # from which on a call is large
        self._inside = 0  # items in the window
        self._window_size = WINDOW_BATCHES * batch_size  # up to which it is filled
        self._inside_work = 0.0  # their lengths together
        # Of the calls in the window, from the first on that is not like the others: before that
        # they go as they came. It spares four microseconds a call.
        self._window_turns: TurnOrder | None = None
        self._sorted: list[Entry] = []  # with entries of calls that are over, which are skipped
        self._new: list[Entry] = []  # those that are not yet among them
        self._held: dict[Call, dict[int, Entry]] = {}  # of those that wait, by place in their call
        self._oldest: Call | None = None  # in the window; None if that is not known
        self._entries = 0  # so far

    def __iter__(self) -> Iterator[Call]:
        yield from [*self._held]
        yield from [call for call in self._turns if call not in self._held]

    @property
    def work(self) -> float:
        return self._turns.work + self._inside_work

    def _size_class(self, call: Call) -> int:
        return class_of(max(call.pending / self._large_items, work_of(call) / self._large_cost))

    def _forget_turns(self) -> None:
        super()._forget_turns()
        self._alike = None

    def _learn(self) -> None:
        if self._learn_share():
            self._large_cost = max(LARGE * self._share, sys.float_info.min)

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        call.pending = len(positions)
        if call.pending == call.size:
            self.add(call)
            return
        call.state = _WAITING
        self.items += call.pending
        size_class, inside = self._size_class(call), call.pending
        if size_class:
            self._add_large(call)
            # The others, its last ones, have turns before they are in the window.
            while inside > 1 and positions[inside - 1] == call.size - call.pending + inside - 1:
                inside -= 1
            if inside < call.pending:
                self._turns.add(call, call.pending - inside, size_class)
        self._enter(call, positions[:inside], size_class)

    def remove(self, call: Call) -> None:
        held = self._held.pop(call, None)
        if held is not None:
            self._inside -= len(held)
            self._inside_work -= sum([length for length, _, _, _ in held.values()])
            if self._window_turns is not None:
                self._window_turns.remove(call, len(held))
        super().remove(call)

    def ahead(self, call: Call) -> float:
        if not self.items:
            return 0.0
        size_class, work, unit = self._size_class(call), work_of(call), self.work / self.items
        outside = self._turns.ahead(call, size_class, work, unit)
        turns = self._order(call, size_class)
        if turns is None:
            return outside + self._inside_work
        return outside + turns.ahead(call, size_class, work, unit)

    @property
    def goes_by_arrival(self) -> bool:
        return False

    def oldest_arrival(self) -> float:
        outside = next(iter(self._turns), None)
        arrived_at = math.inf if outside is None else outside.arrived_at
        if not self._held:
            return arrived_at
        if self._window_turns is None:
            self._oldest = next(iter(self._held))
        elif self._oldest not in self._held:
            self._oldest = min(self._held, key=attrgetter("arrived_at"))
        assert self._oldest is not None
        return min(arrived_at, self._oldest.arrived_at)

    def first_deadline(self, now: float) -> float:
        call = self._head(now) if self._inside else self._turns.head(now).call
        return call.deadline

    # -- the window

    def _order(self, call: Call, size_class: int) -> TurnOrder | None:
        """Of the calls in the window, with this one; None as long as all are alike."""
        if self._window_turns is None and (size_class or call.precedence is not ORDINARY):
            self._window_turns = TurnOrder(self._weights)
            for each, entries in self._held.items():
                self._window_turns.add(each, len(entries), 0)
        return self._window_turns

    def _head(self, now: float) -> Call:
        """Whose turn it is in the window; there must be one."""
        turns = self._window_turns
        return next(iter(self._held)) if turns is None else turns.head(now).call

    def _enter(self, call: Call, positions: Sequence[int], size_class: int) -> None:
        """These items of the call are in the window from now on."""
        held, lengths, number = self._held, call.lengths, self._entries
        if not held:
            self._window_turns, self._inside_work = None, 0.0
        turns = self._order(call, size_class)
        if turns is not None:
            turns.add(call, len(positions), size_class)
            self._oldest = None
        own = held.get(call)
        if own is None:
            own = held[call] = {}
        for index in positions:
            number += 1
            length = 1.0 if lengths is None else float(lengths[index])
            self._inside_work += length
            own[index] = entry = (length, number, call, index)
            self._new.append(entry)
        self._entries = number
        self._inside += len(positions)

    def _fill(self, now: float) -> None:
        """Calls enter the window in turn: small ones as a whole, so it may be more than full."""
        turns = self._turns
        while self._inside < self._window_size and self.items > self._inside:
            queued = turns.head(now)
            call, left, size = queued.call, queued.items, queued.items
            if queued.size_class:
                size = min(turns.most(queued), self._window_size - self._inside)
                if size > 1 and 2 * self._inside > self._window_size:
                    break  # it is alone: to sort many at once takes less
            start = call.size - left
            # Items without length cost too: a tenant with no others would always be next.
            cost = sum(call.lengths[start : start + size]) if call.lengths else 0.0
            turns.took(queued, size, cost or float(size))
            self._enter(call, range(start, start + size), queued.size_class)

    # -- what goes into a batch

    def take(
        self, decision: Decision, now: float, finish: Finish, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut the first item in turn, and its neighbours in length; see ``CallQueue``."""
        self._learn()
        room = decision.size
        surely = finish.last(now, min(room, self.items))

        def is_left_out(call: Call) -> bool:
            """Whether an entry of the call is not to be cut, now or any more."""
            if call.state is not _WAITING:
                return True
            if call.deadline > surely or not self._is_late(call, 0, room, now, finish):
                return False  # as nearly always
            expire(call)
            return True

        self._fill(now)
        while self.items and is_left_out(self._head(now)):
            self._fill(now)
        if not self.items:
            return None
        group = self._group(room, decision.max_cost, now, is_left_out)
        chosen, reason = group.entries, group.reason
        calls = Counter([call for _, _, call, _ in chosen])  # how many of each
        if len(calls) < len(chosen):  # those of a call together, so that it is one to whoever looks
            order = {call: number for number, call in enumerate(calls)}
            chosen.sort(key=lambda entry: (order[entry[2]], entry[3]))
        spans: list[Span] = []
        payloads: list[Any] = []
        for _, _, call, index in chosen:
            if spans and spans[-1][0] is call and spans[-1][2] == index:
                spans[-1] = (call, spans[-1][1], index + 1)
            else:
                spans.append((call, index, index + 1))
            payloads.append(call.payloads[index])
        for call, count in calls.items():
            self._cut(call, count)
        self._forget_turns()
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.cost, batch.calls = batch.size * group.length, len(calls)
        if reason is None or batch.size == room or not self.items:
            reason = decision.reason
        batch.reason = decision.cost_reason if reason is Reason.COST else reason
        return batch

    def _group(
        self, room: int, max_cost: float, now: float, is_left_out: Callable[[Call], bool]
    ) -> _Neighbours:
        """Take the first item of the call whose turn it is, and its neighbours, out of the window.

        Items of large calls only fill up what the others leave, unless it is their turn.

        Args:
            room: the most items.
            max_cost: the most that they may cost, unless one item does.
            is_left_out: whether no item of the call may be cut.
        """
        self._sort()
        large, call = self._large, self._head(now)
        group = _Neighbours(next(iter(self._held[call].values())))
        # Its neighbours cost about as much as the first item.
        large_room = int(max(1.0, min(self._large_cost_now() / (group.length or 1.0), room)))
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
        return group

    def _sort(self) -> None:
        """Put new entries among the others, and let go of those that are over if they are many."""
        entries, new = self._sorted, self._new
        if len(entries) > 2 * self._inside + 64:
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
        base = max(base, LEAST_BASE * self._cost.mean)
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
        entries, held, turns = self._sorted, self._held, self._window_turns
        chosen, start, stop = group.entries, group.start, group.stop
        self._inside -= len(chosen)
        if stop - start == len(chosen):  # as nearly always
            del entries[start:stop]
        else:
            gone = {number for _, number, _, _ in chosen}
            entries[start:stop] = [entry for entry in entries[start:stop] if entry[1] not in gone]
        for _, _, call, index in chosen:
            own = held[call]
            self._inside_work -= own.pop(index)[0]
            if not own:
                del held[call]
        if turns is None:
            return
        for call in dict.fromkeys([entry[2] for entry in chosen]):  # the first one's is the first
            queued = turns.get(call)
            size = queued.items - len(held.get(call, ()))
            cost = size * queued.unit
            if call is first:
                turns.took(queued, size, cost)
            else:
                turns.remove(call, size, cost)

    def check_invariants(self) -> None:
        super().check_invariants()
        held = [entry for entries in self._held.values() for entry in entries.values()]
        assert self._inside == len(held)
        assert all(self._held.values())
        assert sorted(held) == sorted(
            entry for entry in [*self._sorted, *self._new] if entry[2].state is _WAITING
        )
        assert self.items - len(held) == sum(self._turns.get(call).items for call in self._turns)
        work = sum(length for length, _, _, _ in held)
        assert not held or math.isclose(self._inside_work, work, abs_tol=1e-6 * (1.0 + work))
        turns = self._window_turns
        if held and turns is not None:
            turns.check_invariants()
            sizes = {call: len(entries) for call, entries in self._held.items()}
            assert sizes == {call: turns.get(call).items for call in turns}
