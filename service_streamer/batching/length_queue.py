"""Calls that wait, and which of their items go together, where items have lengths.

A model pads all items of a batch to the longest. So a batch is grown around the item whose turn it
is, by its neighbours in length among the next calls, and is cut where it is cheapest for each:

    a + b * padding        what a batch of n costs beside the items themselves, for each of them:
    ---------------        one more item shares the a, and adds its padding, or that of all others
           n               if it is the longest

The item whose turn it is goes with every batch. So one is passed over at most as often as there are
items before it, however odd its length; those before it go one by one at the least.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from ..observe.record import BatchRecord, Call, Reason, Span
from .call_queue import CallQueue, Decision, Finish, work_of

#: Neighbours in length are chosen among this many batches' worth of items.
#: Chosen by reasoning: more finds better neighbours, and keeps the order less. Checked with
#: ``service-streamer simulate --base 5ms --per-unit 20us --lengths 25 --closed-loop 256``.
WINDOW_BATCHES = 8
#: The fixed cost of a batch is at least this share of its mean duration.
#: Chosen by reasoning: where none is measured the next batches may show one, and batches of one
#: item cannot.
LEAST_BASE = 0.02

#: An item near the head of the queue: its length, and which item of which call it is.
Entry = tuple[float, Call, int]

_LENGTH = itemgetter(0)


class LengthQueue(CallQueue):
    """The queue of calls whose items have lengths. It has the arguments of ``CallQueue``."""

    has_lengths = True

    def __init__(self, batch_size: int, weights: Mapping[str, float]) -> None:
        super().__init__(batch_size, weights)
        self._window_size = WINDOW_BATCHES * batch_size  # items
        #: What waits of each call: items that were in the window, and the places of the others.
        self._entries: dict[Call, list[Entry]] = {}
        self._positions: dict[Call, Sequence[int]] = {}
        self._waiting_work = 0.0  # the lengths of all items that wait

    @property
    def work(self) -> float:
        return self._waiting_work

    def add(
        self,
        call: Call,
        positions: Sequence[int] | None = None,
        work: float | None = None,
    ) -> None:
        if positions is None:
            positions = range(call.size)
        self._positions[call], self._entries[call] = positions, []
        work = work_of(call, positions)
        self._waiting_work += work
        super().add(call, positions, work)

    def remove(self, call: Call) -> None:
        self.items -= call.pending
        self._large.discard(call)
        work = self._work_of(call)
        del self._positions[call], self._entries[call]
        self._waiting_work -= work
        self._turns.remove(call, work, is_last=True)

    def _work_of(self, call: Call) -> float:
        """What those items of the call cost that wait."""
        return work_of(call, self._positions[call]) + _sum_of(self._entries[call])

    def _window(self, room: int, now: float) -> dict[Call, list[Entry]]:
        """The calls near the head of the queue, and those of their items that are.

        The call whose turn it is may be further behind, since its time is about to end.
        """
        window = {}
        for call, items in self._turns.next_calls(self._window_size):
            entries = self._entries[call]
            window[call] = entries if len(entries) == items else self._first_entries(call, items)
        head = self._turns.head(now)
        window[head] = self._first_entries(head, room)
        return window

    def _first_entries(self, call: Call, items: int) -> list[Entry]:
        """So many items of the call that wait, or all."""
        entries, positions = self._entries[call], self._positions[call]
        missing = items - len(entries)
        if missing > 0 and positions:
            lengths = call.lengths
            for index in positions[:missing]:
                length = 1.0 if lengths is None else float(lengths[index])
                entries.append((length, call, index))
            self._positions[call] = positions[missing:]
        return entries[:items]

    # -- what goes into a batch

    def take(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut the first item in turn, and its neighbours in length; see ``CallQueue``."""
        self._learn()
        room = decision.size
        window = self._expire_late(room, now, decision.finish, expire)
        if not self.items:
            return None
        items, length, reason = self._choose(window, room, decision.max_cost, now)
        chosen: dict[Call, list[Entry]] = {}
        for entry in items:
            chosen.setdefault(entry[1], []).append(entry)
        spans: list[Span] = []
        for call, entries in chosen.items():
            indices = sorted([index for _, _, index in entries])
            if indices[-1] - indices[0] == len(indices) - 1:  # as nearly always
                spans.append((call, indices[0], indices[-1] + 1))
            else:
                spans += [(call, index, index + 1) for index in indices]
            self._leave(call, entries, goes_along=call is not items[0][1])
        batch = self._cut({call: len(entries) for call, entries in chosen.items()}, spans)
        batch.calls, batch.cost = len(chosen), batch.size * length
        if reason is None or batch.size == room or not self.items:
            reason = decision.reason
        batch.reason = decision.cost_reason if reason is Reason.COST else reason
        return batch

    def _expire_late(
        self, room: int, now: float, finish: Finish, expire: Callable[[Call], None]
    ) -> dict[Call, list[Entry]]:
        """The window, without what comes too late."""
        surely = finish.last(now, min(room, self.items))
        while self.items:
            window, before = self._window(room, now), self.items
            for call in window:
                if call.deadline <= surely and self._is_late(call, 0, room, now, finish):
                    expire(call)
            if self.items == before:
                return window
        return {}

    def _choose(
        self, window: dict[Call, list[Entry]], room: int, max_cost: float, now: float
    ) -> tuple[list[Entry], float, Reason | None]:
        """The first item of the call whose turn it is, and its neighbours.

        Items of large calls only fill up what the others leave, unless it is their turn.

        Returns:
            The items, the length of the longest, and why there are no more.
        """
        large, head = self._large, self._turns.head(now)
        first = window[head][0]
        # Of one length in the order of their turns.
        near = sorted(chain.from_iterable(window.values()), key=_LENGTH)
        near.remove(first)
        if large.isdisjoint(window):
            return self._grow(first, near, room, max_cost)
        # Its neighbours cost about as much as the first item.
        large_room = int(max(1.0, min(self._large_cost_now() / (first[0] or 1.0), room)))
        of_large = [entry for entry in near if entry[1] in large]
        own = [entry for entry in near if entry[1] not in large]
        if head in large:
            own, others = _nearest(of_large, first, large_room - 1), own
        else:
            others = _nearest(of_large, first, large_room)
        near = own + _nearest(others, first, room - 1 - len(own))
        near.sort(key=_LENGTH)
        chosen, length, reason = self._grow(first, near, room, max_cost)
        if large_room < room and sum([entry[1] in large for entry in chosen]) >= large_room:
            reason = Reason.TURN
        return chosen, length, reason

    def _grow(
        self, first: Entry, near: list[Entry], room: int, max_cost: float
    ) -> tuple[list[Entry], float, Reason | None]:
        """Add neighbours in length to the first one, of these sorted ones, as long as that pays."""
        base, per_unit = self.cost.padding
        least = base = max(base, LEAST_BASE * self.cost.mean)
        right = bisect_left(near, first[:1])
        left, last = right - 1, len(near)  # those between left and right are chosen
        length, padding, reason = first[0], 0.0, None
        best = left, right, length
        while (size := right - left) < room:
            shorter = length - near[left][0] if left >= 0 else math.inf
            longest = near[right][0] if right < last else math.inf
            longer = size * (longest - length)
            if longer < shorter and (size + 1) * longest > max_cost:
                longer, last = math.inf, right  # and so are all beyond it
                reason = Reason.COST
            if shorter == longer == math.inf:
                break
            if (size + 1) * length > max_cost:
                reason = Reason.COST
                break
            if longer < shorter:
                padding += longer
                length = longest
                right += 1
            else:
                padding += shorter
                left -= 1
            overhead = (base + per_unit * padding) / (size + 1)
            if overhead <= least:
                least, best = overhead, (left, right, length)
        if best != (left, right, length) and self.cost.is_fitted:
            left, right, length = best
            reason = Reason.PADDING
        others = near[left + 1 : right]
        if others and left >= 0 and near[left][0] == others[0][0]:
            # Of those that are as short the oldest go, and not the nearest.
            shortest = others[0][:1]
            start, count = bisect_left(near, shortest), sum([e[:1] == shortest for e in others])
            others[:count] = near[start : start + count]
        return [first, *others], length, reason

    def _leave(self, call: Call, chosen: Sequence[Entry], *, goes_along: bool) -> None:
        """These items of the call are in a batch; ``goes_along`` if it was not its turn."""
        work = _sum_of(chosen)
        self._waiting_work -= work
        is_last = len(chosen) == call.pending
        if is_last:
            del self._positions[call], self._entries[call]
        else:
            gone = {*chosen}
            self._entries[call] = [each for each in self._entries[call] if each not in gone]
        self._turns.took(call, len(chosen), work, is_last=is_last, goes_along=goes_along)

    def check_invariants(self) -> None:
        super().check_invariants()
        waiting = {*self}
        assert waiting == {*self._positions} == {*self._entries}
        for call in waiting:
            assert call.pending == len(self._positions[call]) + len(self._entries[call])
        works = {call: self._work_of(call) for call in waiting}
        self._turns.check_invariants(works)
        assert math.isclose(self.work, sum(works.values()), abs_tol=1e-6 * (1.0 + self.work))


def _sum_of(entries: Sequence[Entry]) -> float:
    return sum([length for length, _, _ in entries])


def _nearest(entries: list[Entry], first: Entry, count: int) -> list[Entry]:
    """So many of these sorted ones that are next in length to the first one."""
    return sorted(entries, key=lambda entry: abs(entry[0] - first[0]))[: max(0, count)]
