"""Calls that wait, and which of their items go into a batch.

Calls have turns (``turns``). Where items have no lengths, a batch has those whose turn it is. Where
they have, a model pads all items of a batch to the longest. So a batch is grown around the item
whose turn it is, by its neighbours in length among the next calls, and is cut where it is cheapest
for each:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
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
#: Neighbours in length are chosen among this many batches' worth of items.
#: Chosen by reasoning: more finds better neighbours, and keeps the order less. Checked with
#: ``service-streamer simulate --base 5ms --per-unit 20us --lengths 25 --closed-loop 256``.
WINDOW_BATCHES = 8
#: The fixed cost of a batch is at least this share of its mean duration.
#: Chosen by reasoning: where none is measured the next batches may show one, and batches of one
#: item cannot.
LEAST_BASE = 0.02

#: Members of an enum are looked up in Python, and every call asks for these.
_WAITING, _RUNNING = CallState.WAITING, CallState.RUNNING

#: An item near the head of the queue: its length, and which item of which call it is.
Entry = tuple[float, Call, int]

_LENGTH = itemgetter(0)


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
        # Rounding does not make a batch smaller that is back just in time.
        fits = int((deadline - self.safely) / self.safely_each + 1e-9)
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
        has_lengths: whether items have lengths.

    Attributes:
        items: how many wait.
        cost: what batches cost; learned elsewhere.
        turns: their order.
    """

    def __init__(
        self, batch_size: int, weights: Mapping[str, float], *, has_lengths: bool = False
    ) -> None:
        self.items = 0
        self.cost = LearnedCost()
        self.has_lengths = has_lengths
        self._batch_size = batch_size
        self.turns = TurnOrder(weights)
        #: Of each call with lengths, the items that wait; but not the last ones while these are too
        #: far behind to be looked at.
        self._entries: dict[Call, list[Entry]] = {}
        self._lengths = 0.0  # of all items that wait, together
        self._large: set[Call] = set()  # those that wait
        self._large_items = LARGE * batch_size  # from so many on a call is large
        self._large_work = math.inf  # and if its items cost so much
        self._share = math.inf  # what a batch may cost of large calls beside small ones
        self._mixed = 0  # batches for which small calls are expected beside the large ones

    def __iter__(self) -> Iterator[Call]:
        return iter(self.turns)

    @property
    def work(self) -> float:
        """What those cost that wait: their lengths together, or their number."""
        return self._lengths if self.has_lengths else self.items

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
            self._mixed = 0
            self.turns.forget()
        if positions is not None:  # without lengths it does not matter which: its last ones wait
            call.pending = len(positions)
        work: float = call.pending
        if self.has_lengths:
            self._entries[call] = [] if positions is None else _entries_of(call, positions)
            work = self._work_of(call)
            self._lengths += work
        call.state = _WAITING
        pending = call.pending
        self.items += pending
        size_class = 0
        if pending >= self._large_items or work >= self._large_work:
            size_class = self._size_class(pending, work)
            self._large.add(call)
        self.turns.add(call, pending, work, size_class)

    def _size_class(self, items: int, work: float) -> int:
        """0 if a call of so many items, which cost so much, is small.

        The large ones of one class are within a factor of two.
        """
        size = max(items / self._large_items, work / self._large_work)
        return int(min(size, 2.0**60)).bit_length()

    def _work_of(self, call: Call) -> float:
        """What those items of the call cost that wait."""
        if not self.has_lengths:
            return call.pending
        entries = self._entries[call]
        return _sum_of(entries) + _work(call, call.pending - len(entries))

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        work = self._work_of(call)
        self.items -= call.pending
        self._large.discard(call)
        if self.has_lengths:
            self._lengths -= work
            del self._entries[call]
        self.turns.remove(call, work)

    def ahead(self, call: Call) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over."""
        if not self.items:
            return 0.0
        work = _work(call, call.size)
        size_class = self._size_class(call.size, work)
        return self.turns.ahead(call, size_class, work, self.work / self.items)

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self.turns.sole is not None and not self.has_lengths

    # -- what goes into a batch

    def take(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut what was decided: the first items in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way if there are others to fill
        the batch. Under overload the oldest calls are always those whose time is about to end: to
        compute them would waste every batch. Without others it is computed, since the prediction
        may be wrong; unless it is late even in the fastest case, and is not the last one.

        With lengths a batch has the first item in turn, and its neighbours in length.

        Args:
            expire: ends a call that is left out.

        Returns:
            The batch, which has no number and no slot yet; None if all came too late.
        """
        self._learn()
        if self.has_lengths:
            return self._take_neighbours(decision, now, expire)
        return self._take_in_turn(decision, now, expire)

    def _take_in_turn(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        reason, finish = decision.reason, decision.finish
        room = max(1, int(min(decision.size, decision.max_cost)))  # each costs one
        surely = finish.last(now, min(room, self.items))
        turns, sole, large_calls = self.turns, self.turns.sole, self._large
        large = int(max(1.0, min(self._large_cost_now(), room))) if large_calls else 0
        # How many of each call, which may have several turns. They leave their calls all at once: a
        # signal handler that submits within these lines has others cut.
        taken: dict[Call, int] = {}
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
            if call.deadline <= surely:
                # Else it would end while an item of it is in the batch.
                if not before and self._is_late(call, count, room - count, now, finish):
                    expire(call)
                    continue
                if not count:
                    room = finish.room(call.deadline, room)
            if size > room - count:
                size = room - count
            if call in large_calls:
                if not large:
                    reason = Reason.TURN
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
            turns.sole_took(count, timed)
        spans: list[Span] = []
        for call, size in taken.items():
            start = call.size - call.pending
            spans.append((call, start, start + size))
            call.pending -= size
            if not call.pending:
                call.state = _RUNNING
        batch = self._cut(spans)
        batch.reason = reason
        return batch

    def _cut(self, spans: list[Span]) -> BatchRecord:
        """A batch of these spans, which have left their calls."""
        payloads: list[Any] = []
        for call, start, stop in spans:
            payloads += call.payloads[start:stop]
        self.items -= len(payloads)
        if self._large:
            self._large.difference_update([call for call, _, _ in spans if not call.pending])
        return BatchRecord(-1, -1, spans, payloads)

    def _take_neighbours(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        window = self._window(decision, now, expire)
        if not window:
            return None
        chosen, reason = self._choose(window, decision, now)
        entries_of: dict[Call, list[Entry]] = {}
        for entry in chosen:
            entries_of.setdefault(entry[1], []).append(entry)
        spans: list[Span] = []
        for call, entries in entries_of.items():
            indices = sorted([index for _, _, index in entries])
            if indices[-1] - indices[0] == len(indices) - 1:  # as nearly always
                spans.append((call, indices[0], indices[-1] + 1))
            else:
                spans += [(call, index, index + 1) for index in indices]
            self._leave(call, entries, goes_along=call is not chosen[0][1])
        batch = self._cut(spans)
        batch.calls, batch.cost = len(entries_of), batch.size * max(chosen, key=_LENGTH)[0]
        if reason is None or batch.size == decision.size or not self.items:
            reason = decision.reason
        batch.reason = decision.cost_reason if reason is Reason.COST else reason
        return batch

    def _leave(self, call: Call, chosen: Sequence[Entry], *, goes_along: bool) -> None:
        """These items of the call are in a batch; ``goes_along`` if it was not its turn."""
        work = _sum_of(chosen)
        self._lengths -= work
        call.pending -= len(chosen)
        if call.pending:
            gone = {*chosen}
            self._entries[call] = [entry for entry in self._entries[call] if entry not in gone]
        else:
            call.state = _RUNNING
            del self._entries[call]
        is_last = not call.pending
        self.turns.took(call, len(chosen), work, is_last=is_last, goes_along=goes_along)

    def _window(
        self, decision: Decision, now: float, expire: Callable[[Call], None]
    ) -> dict[Call, list[Entry]]:
        """The calls near the head of the queue, and those of their items that are; none is late.

        The call whose turn it is may be further behind, since its time is about to end.
        """
        room, finish = decision.size, decision.finish
        surely = finish.last(now, min(room, self.items))
        while self.items:
            before = self.items
            window: dict[Call, list[Entry]] = {}
            for call, items in self.turns.next_calls(WINDOW_BATCHES * self._batch_size):
                entries = self._entries[call]
                window[call] = entries if len(entries) == items else self._first(call, items)
            head = self.turns.head(now)
            window[head] = self._first(head, room)
            for call in window:
                if call.deadline <= surely and self._is_late(call, 0, room, now, finish):
                    expire(call)
            if self.items == before:
                return window
        return {}

    def _first(self, call: Call, items: int) -> list[Entry]:
        """So many items of the call that wait, or all."""
        entries = self._entries[call]
        start = call.size - (call.pending - len(entries))
        if len(entries) < items and start < call.size:
            stop = min(call.size, start + items - len(entries))
            entries += _entries_of(call, range(start, stop))
        return entries[:items]

    def _choose(
        self, window: dict[Call, list[Entry]], decision: Decision, now: float
    ) -> tuple[list[Entry], Reason | None]:
        """The first item of the call whose turn it is, and its neighbours.

        Items of large calls only fill up what the others leave, unless it is their turn.

        Returns:
            The items, and why there are no more.
        """
        large, room, head = self._large, decision.size, self.turns.head(now)
        first, *window[head] = window[head]
        near = [*chain.from_iterable(window.values())]
        if large.isdisjoint(window):
            return self._grow(first, near, room, decision.max_cost)
        # Its neighbours cost about as much as the first item.
        large_room = int(max(1.0, min(self._large_cost_now() / (first[0] or 1.0), room)))
        of_large = [entry for entry in near if entry[1] in large]
        own = [entry for entry in near if entry[1] not in large]
        if head in large:
            own, others = _nearest(of_large, first, large_room - 1), own
        else:
            others = _nearest(of_large, first, large_room)
        near = own + _nearest(others, first, room - 1 - len(own))
        chosen, reason = self._grow(first, near, room, decision.max_cost)
        if large_room < room and sum([entry[1] in large for entry in chosen]) >= large_room:
            reason = Reason.TURN
        return chosen, reason

    def _grow(
        self, first: Entry, near: list[Entry], room: int, max_cost: float
    ) -> tuple[list[Entry], Reason | None]:
        """Add neighbours in length to the first one, as long as that pays."""
        base, per_unit = self.cost.padding
        least = base = max(base, LEAST_BASE * self.cost.mean)
        near.sort(key=_LENGTH)
        at = bisect_left(near, first[:1])
        # Those of one length stay in the order of their turns.
        shorter, longer = sorted(near[:at], key=_LENGTH, reverse=True), near[at:]
        below = above = 0  # how many of them are chosen
        best, last = (below, above), len(longer)
        length, padding, reason = first[0], 0.0, None
        while (size := 1 + below + above) < room:
            less = length - shorter[below][0] if below < len(shorter) else math.inf
            longest = longer[above][0] if above < last else math.inf
            more = size * (longest - length)
            if more < less and (size + 1) * longest > max_cost:
                more, last = math.inf, above  # and so are all beyond it
                reason = Reason.COST
            if less == more == math.inf:
                break
            if (size + 1) * length > max_cost:
                reason = Reason.COST
                break
            if more < less:
                padding += more
                length = longest
                above += 1
            else:
                padding += less
                below += 1
            overhead = (base + per_unit * padding) / (size + 1)
            if overhead <= least:
                least, best = overhead, (below, above)
        # Where durations are noisy, what padding costs is still better known than not.
        if best != (below, above) and self.cost.was_fitted:
            below, above = best
            reason = Reason.PADDING
        return [first, *shorter[:below], *longer[:above]], reason

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
        if call.deadline <= now:
            return True
        waiting = self.items - taken
        if waiting == call.pending and not taken:
            return False  # if none was computed, it would never be known that they are not late
        size = taken + min(room, waiting)
        judged = size if taken or size < finish.least else finish.least
        back_at = finish.likely if waiting > room else finish.earliest
        return call.deadline < back_at + finish.each * judged

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        works = {call: self._work_of(call) for call in self}
        assert self.items == sum(call.pending for call in works)
        assert math.isclose(self.work, sum(works.values()), abs_tol=1e-6 * (1.0 + self.work))
        assert all(call.state is _WAITING for call in works)
        assert self._large <= {*works}
        assert {*self._entries} == ({*works} if self.has_lengths else set())
        self.turns.check_invariants(works)


def _entries_of(call: Call, positions: Iterable[int]) -> list[Entry]:
    lengths = call.lengths
    return [(1.0 if lengths is None else float(lengths[i]), call, i) for i in positions]


def _work(call: Call, items: int) -> float:
    """What so many of the call's items cost together, the last ones."""
    lengths = call.lengths
    return float(items if lengths is None else sum(lengths[call.size - items :]))


def _sum_of(entries: Sequence[Entry]) -> float:
    return sum([length for length, _, _ in entries])


def _nearest(entries: list[Entry], first: Entry, count: int) -> list[Entry]:
    """So many of these that are next in length to the first one; rather shorter ones."""
    near = sorted(entries, key=lambda entry: (abs(entry[0] - first[0]), entry[0]))
    return near[: max(0, count)]
