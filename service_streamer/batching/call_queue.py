"""Calls that wait, in the order in which they are cut into batches.

Calls that are over are not searched for, only skipped when their turn comes; so ending one costs
the same however many wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..observe.record import ORDINARY, Call, Reason, Span
from .fair_queue import FairQueue
from .overload import Finish

__all__ = ["CallQueue", "Taken"]


class Taken(NamedTuple):
    """What was cut.

    Attributes:
        spans, payloads: of the batch, in the same order.
        late: calls that were left out for good.
        cost: of the batch: its items times the longest of them.
        calls: how many they are of.
        reason: why there are no more; None if as many were taken as were asked for, or were there.
    """

    spans: list[Span]
    payloads: list[Any]
    late: list[Call]
    cost: float
    calls: int
    reason: Reason | None = None


class CallQueue:
    """The queue of calls with items that are not cut yet: the oldest first.

    Unless some have a precedence. As long as one of those waits all take fair.

    Args:
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many are not cut, of calls that are not over.
    """

    __slots__ = ("_calls", "_fair", "_over", "_weights", "items")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.items = 0
        self._calls: deque[Call] = deque()  # empty while the fair queue has them
        self._fair: FairQueue | None = None
        self._weights = weights or {}
        self._over = 0  # calls in the queue that are over

    def __iter__(self) -> Iterator[Call]:
        calls = self._calls if self._fair is None else self._fair
        return (call for call in calls if call.pending)

    def add(self, call: Call) -> None:
        self.items += call.pending
        if self._fair is not None:
            self._fair.add(call)
        elif call.precedence is ORDINARY:
            self._calls.append(call)
        else:
            fair = FairQueue(self._weights)
            for waiting in [*self, call]:
                fair.add(waiting)
            self._fair = fair
            self._calls.clear()
            self._over = 0

    def drop(self, call: Call) -> None:
        """The call is over; its items are not to be cut."""
        self.items -= call.pending
        call.pending = 0
        if self._fair is not None:
            self._fair.remove(call)
            return
        self._over += 1
        # Or the queue would fill up with them behind a hung worker. This costs a constant for each,
        # amortised; removing each at once would cost a search each.
        if self._over > 32 and self._over * 2 > len(self._calls):
            self._calls = deque(self)
            self._over = 0

    @property
    def is_fair(self) -> bool:
        """Whether a call with a precedence waits."""
        return self._fair is not None

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        if self._fair is not None:
            return self._fair.oldest_arrival()
        while self._calls[0].is_over:
            self._skip()
        return self._calls[0].arrived_at

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        if self._fair is not None:
            call = self._fair.head(now)
            return math.inf if call is None else call.deadline
        while self._calls[0].is_over:
            self._skip()
        return self._calls[0].deadline

    def take(self, room: int, now: float, finish: Finish, max_cost: float = math.inf) -> Taken:
        """Cut at most ``room`` items: the first in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way as long as there are others
        to fill the batch. Under overload the oldest calls are always those whose time is about to
        end: to compute them would waste every batch. Without that need such a call is computed,
        since the expectation may be wrong. But one that is late at the earliest is left out, too,
        so that the others are sooner back; except the last one.

        Args:
            max_cost: the most that the batch may cost, unless one item does.
        """
        is_bounded = max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(max_cost))
        if self._fair is not None:
            taken = self._take_fairly(self._fair, room, now, finish)
        else:
            taken = self._take_in_order(room, now, finish)
        return taken._replace(reason=Reason.COST) if is_bounded and self.items else taken

    def _take_in_order(self, room: int, now: float, finish: Finish) -> Taken:
        """The same, the oldest first."""
        surely = finish.last(now, min(room, self.items))
        spans: list[Span] = []
        payloads: list[Any] = []
        late: list[Call] = []
        calls = self._calls
        while room and calls:
            call = calls[0]
            if call.is_over:
                self._skip()
                continue
            size = call.pending
            if call.deadline <= surely and self._is_late(call, len(payloads), room, now, finish):
                calls.popleft()
                self.items -= size
                call.pending = 0
                late.append(call)
                continue
            if call.deadline < surely and not spans:
                room = finish.room(call.deadline, room)
            size = min(call.pending, room)
            start = call.size - call.pending
            spans.append((call, start, start + size))
            payloads += call.payloads[start : start + size]
            room -= size
            self.items -= size
            call.pending -= size
            call.is_running = True
            if not call.pending:
                calls.popleft()
        return Taken(spans, payloads, late, float(len(payloads)), len(spans))

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

    def _take_fairly(self, fair: FairQueue, room: int, now: float, finish: Finish) -> Taken:
        """The same, an item at a turn."""
        spans: list[Span] = []
        payloads: list[Any] = []
        # How many of each call of several items: the order within a batch does not matter.
        taken: dict[Call, int] = {}
        late: list[Call] = []
        surely = finish.last(now, min(room, self.items))
        while room and (call := fair.head(now)) is not None:
            if call.deadline <= surely and self._is_late(call, len(payloads), room, now, finish):
                self.items -= call.pending
                call.pending = 0
                fair.remove(call)
                late.append(call)
                continue
            if call.deadline < surely and not payloads:
                room = finish.room(call.deadline, room)
            room -= 1
            self.items -= 1
            call.is_running = True
            fair.took(1.0)
            if call.size == 1:
                call.pending = 0
                spans.append((call, 0, 1))
                payloads.append(call.payloads[0])
                fair.remove(call)
                continue
            call.pending -= 1
            taken[call] = taken.get(call, 0) + 1
            if not call.pending:
                fair.remove(call)
        for call, size in taken.items():
            start = call.size - call.pending - size
            spans.append((call, start, start + size))
            payloads += call.payloads[start : start + size]
        if not self.items:
            self._fair = None
        return Taken(spans, payloads, late, float(len(payloads)), len(spans))

    def draw(self, now: float) -> Call | None:
        """Remove the call whose turn it is, with all its items that are not cut; or None."""
        if self._fair is None:
            while self._calls:
                call = self._calls.popleft()
                if call.pending:
                    self.items -= call.pending
                    return call
                self._over -= 1
            return None
        head = self._fair.head(now)
        if head is not None:
            self.items -= head.pending
            lengths = head.lengths
            start = head.size - head.pending
            # Items without length cost too: a tenant with no others would always be next.
            cost = 0.0 if lengths is None else sum(lengths[start:])
            self._fair.took(cost or float(head.pending))
            self._fair.remove(head)
        if not self.items:
            self._fair = None
        return head

    def check_invariants(self) -> None:
        assert self.items == sum(call.pending for call in self)
        if self._fair is None:
            assert all(call.pending for call in self)
            assert self._over == sum(call.is_over for call in self._calls)
        else:
            assert not self._calls

    def _skip(self) -> None:
        self._calls.popleft()
        self._over -= 1
