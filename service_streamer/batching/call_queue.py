"""Calls that wait, in the order in which they are cut into batches.

Calls that are over are not searched for, only skipped when their turn comes; so ending one costs
the same however many wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..observe.record import ORDINARY, Call, CallState, Reason, Span
from .fair_queue import FairQueue
from .overload import Finish
from .waiting import Waiting

#: A member of an enum is looked up in Python, and every call asks for this one.
_WAITING = CallState.WAITING


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
    """The queue of calls with items that are not cut yet: the oldest first.

    Unless some have a precedence. As long as one of those waits all take fair.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self._calls: deque[Call] = deque()  # empty while the fair queue has them
        self._fair: FairQueue | None = None
        self._weights = weights or {}

    def __iter__(self) -> Iterator[Call]:
        if self._fair is not None:
            return iter(self._fair)
        return (call for call in self._calls if call.state is _WAITING)

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        self.enter(call)
        if self._fair is not None:
            self._fair.add(call)
        elif call.precedence is ORDINARY:
            self._calls.append(call)
        else:
            self._make_fair().add(call)

    def _make_fair(self) -> FairQueue:
        fair = FairQueue(self._weights)
        for waiting in self:
            fair.add(waiting)
        self._fair = fair
        self._calls.clear()
        return fair

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items, its last ones."""
        call.pending = len(positions)
        self.add(call)

    def remove(self, call: Call) -> None:
        """The call is about to end, or waits in another queue from now on."""
        self.leave(call)
        if self._fair is not None:
            self._fair.remove(call, call.pending)
            self._stay_fair()
        elif len(self._calls) > 2 * self.items + 64:  # so each that is over costs little
            waiting = [*self]
            self._calls.clear()
            self._calls += waiting

    def _stay_fair(self) -> None:
        """Until no call waits."""
        if not self.items:
            self._fair = None

    def ahead(self, call: Call) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        if self._fair is None and call.precedence is ORDINARY:
            return self.items
        return (self._fair or self._make_fair()).ahead(call)

    @property
    def is_fair(self) -> bool:
        """Whether a call with a precedence waits."""
        return self._fair is not None

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        first = self._first() if self._fair is None else next(iter(self._fair))
        return first.arrived_at

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        return (self._first() if self._fair is None else self._fair.head(now)).deadline

    def _first(self) -> Call:
        calls = self._calls
        while calls[0].state is not _WAITING:
            calls.popleft()
        return calls[0]

    def take(
        self,
        room: int,
        now: float,
        finish: Finish,
        expire: Callable[[Call], None],
        max_cost: float = math.inf,
    ) -> Taken:
        """Cut at most ``room`` items: the first in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way as long as there are others
        to fill the batch. Under overload the oldest calls are always those whose time is about to
        end: to compute them would waste every batch. Without that need such a call is computed,
        since the expectation may be wrong. But one that is late at the earliest is left out, too,
        so that the others are sooner back; except the last one.

        Args:
            expire: ends a call that is left out.
            max_cost: the most that the batch may cost, unless one item does.
        """
        is_bounded = max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(max_cost))
        fair, calls, surely = self._fair, self._calls, finish.last(now, min(room, self.items))
        spans: list[Span] = []
        payloads: list[Any] = []
        # How many of each call of several items, if each item has a turn of its own: the order
        # within a batch does not matter.
        taken: dict[Call, int] = {}
        count = 0
        while count < room and self.items:
            call = calls[0] if fair is None else fair.head(now)
            if call.state is not _WAITING:
                calls.popleft()
                continue
            if (
                call.deadline <= surely
                and call not in taken  # else it would end while an item of it is in the batch
                and self._is_late(call, count, room - count, now, finish)
            ):
                expire(call)
                continue
            if call.deadline < surely and not count:
                room = finish.room(call.deadline, room)
            size = 1
            if fair is not None:
                fair.took(1.0)
                fair.remove(call, 1)
            elif call.pending > 1:
                size = min(call.pending, room - count)
            if fair is not None and call.size > 1:
                taken[call] = taken.get(call, 0) + 1
            else:
                start = call.size - call.pending
                spans.append((call, start, start + size))
                payloads += call.payloads[start : start + size]
            self.cut(call, size)
            count += size
        self._stay_fair()
        for call, size in taken.items():
            stop = call.size - call.pending
            spans.append((call, stop - size, stop))
            payloads += call.payloads[stop - size : stop]
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

    def draw(self, now: float) -> Call:
        """Remove the call whose turn it is, of which nothing is cut yet; there must be one."""
        if self._fair is None:
            call = self._first()
            self._calls.popleft()
            self.leave(call)
            return call
        call = self._fair.head(now)
        # Items without length cost too: a tenant with no others would always be next.
        cost = 0.0 if call.lengths is None else sum(call.lengths)
        self._fair.took(cost or float(call.size))
        self.remove(call)
        return call

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        assert self.items == sum(call.pending for call in self)
        assert all(call.state is _WAITING for call in self)
        assert self._fair is None or not self._calls
        if self._fair is not None:
            self._fair.check_invariants()
