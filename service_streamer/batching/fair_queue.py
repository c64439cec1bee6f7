"""Whose turn it is among calls that are not all alike: fair between tenants, by rank within one.

    tenants     the one that has had least, for its weight, is next
    rank        1. whose time was given with the call, or whose waiting has taken half of its
                   time: by when that ends; then by priority
                2. the others: by priority, then by arrival

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time,
which what it is given advances by its cost over its weight; one that comes back after having waited
for nothing starts at the virtual time of who is served, so that nobody saves up turns. Two tenants
that both have calls waiting thus never are further apart than one call of each.

Nothing waits for ever: each ``AGING``-th turn of a tenant goes to the call that has waited longest,
whatever its kind. So a call is passed over at most ``AGING`` times for each that was there before.
And at most ``AGING`` - 1 tenants in a row are served that had no turn before: else those that come
with one call each, such as the users of a service, would be before all others for ever.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from ..observe.record import Call
from .tuning import AGING

__all__ = ["FairQueue"]


class _Line:
    """The calls of one tenant that wait."""

    __slots__ = (
        "_by_arrival",
        "_by_priority",
        "_deadlined",
        "_number",
        "_timed",
        "_waiting",
        "turns",
        "weight",
    )

    def __init__(self, weight: float, waiting: Mapping[Call, None]) -> None:
        self.weight = weight
        self._waiting = waiting  # of all tenants: what is not in it is skipped
        self._deadlined: list[tuple[float, int, int, Call]] = []  # a heap
        self._by_priority: list[tuple[int, int, Call]] = []  # the others, a heap
        self._timed: deque[Call] = deque()  # those of them whose time ends
        self._by_arrival: deque[Call] = deque()  # all
        self._number = 0  # keeps calls from being compared
        self.turns = 0  # that it had

    def add(self, call: Call) -> None:
        priority, _, has_deadline = call.precedence
        self._number += 1
        self._by_arrival.append(call)
        if has_deadline:
            heapq.heappush(self._deadlined, (call.deadline, -priority, self._number, call))
        else:
            heapq.heappush(self._by_priority, (-priority, self._number, call))
            if call.deadline < math.inf:
                self._timed.append(call)

    def head(self, now: float) -> Call | None:
        """The next tenant; None if no call waits."""
        waiting, by_arrival, timed = self._waiting, self._by_arrival, self._timed
        while by_arrival and by_arrival[0] not in waiting:
            by_arrival.popleft()
        if not by_arrival:
            return None
        if self.turns % AGING == AGING - 1:
            return by_arrival[0]
        while self._deadlined and self._deadlined[0][3] not in waiting:
            heapq.heappop(self._deadlined)
        while timed and timed[0] not in waiting:
            timed.popleft()
        urgent = self._deadlined[0][3] if self._deadlined else None
        if (
            timed
            and 2 * now >= timed[0].arrived_at + timed[0].deadline
            and (urgent is None or timed[0].deadline < urgent.deadline)
        ):
            urgent = timed[0]
        if urgent is not None:
            return urgent
        while self._by_priority[0][2] not in waiting:
            heapq.heappop(self._by_priority)
        return self._by_priority[0][2]

    def sweep(self) -> None:
        """Let go of calls that do not wait any more."""
        waiting = self._waiting
        self._deadlined = [entry for entry in self._deadlined if entry[3] in waiting]
        heapq.heapify(self._deadlined)
        self._by_priority = [entry for entry in self._by_priority if entry[2] in waiting]
        heapq.heapify(self._by_priority)
        self._by_arrival = deque(call for call in self._by_arrival if call in waiting)
        self._timed = deque(call for call in self._timed if call in waiting)


class FairQueue:
    """The queue of calls of all tenants; a call leaves it when it has no item pending any more.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    __slots__ = (
        "_heap",
        "_lines",
        "_new",
        "_new_in_a_row",
        "_stale",
        "_turns",
        "_virtual",
        "_waiting",
        "_weights",
    )

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: OrderedDict[Call, None] = OrderedDict()  # by arrival
        self._stale = 0  # calls in the lines that do not wait any more, at most
        self._lines: dict[str, _Line] = {}
        # Tenants with calls, by virtual time: those that have had no turn yet, and the others.
        self._new: deque[tuple[float, str]] = deque()
        self._heap: list[tuple[float, int, str]] = []
        self._new_in_a_row = 0  # of the last turns
        self._turns = 0
        self._virtual = 0.0  # of the tenant that was served last

    def __iter__(self) -> Iterator[Call]:
        return iter(self._waiting)

    def add(self, call: Call) -> None:
        tenant = call.precedence.tenant
        line = self._lines.get(tenant)
        if line is None:
            self._lines[tenant] = line = _Line(self._weights.get(tenant, 1.0), self._waiting)
            self._new.append((self._virtual, tenant))
        line.add(call)
        self._waiting[call] = None

    def remove(self, call: Call) -> None:
        """The call does not wait any more."""
        del self._waiting[call]
        self._stale += 1
        if self._stale > 32 and self._stale > len(self._waiting):
            self._sweep()

    def head(self, now: float) -> Call | None:
        """The next tenant; None if no call waits."""
        new, heap = self._new, self._heap
        while new or heap:
            is_new = bool(new) and self._is_new_first()
            if is_new:
                virtual, tenant = new[0]
            else:
                virtual, _, tenant = heap[0]
            call = self._lines[tenant].head(now)
            if call is not None:
                if virtual > self._virtual:
                    self._virtual = virtual
                return call
            new.popleft() if is_new else heapq.heappop(heap)
            del self._lines[tenant]
        return None

    def took(self, cost: float) -> None:
        """The head had its turn, with as much as that costs."""
        # The number breaks ties: the tenant that was served first is served first again.
        self._turns = number = self._turns + 1
        if self._new and self._is_new_first():
            self._new_in_a_row += 1
            virtual, tenant = self._new.popleft()
            line = self._lines[tenant]
            heapq.heappush(self._heap, (virtual + cost / line.weight, number, tenant))
        else:
            self._new_in_a_row = 0
            virtual, _, tenant = self._heap[0]
            line = self._lines[tenant]
            heapq.heapreplace(self._heap, (virtual + cost / line.weight, number, tenant))
        line.turns += 1

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        return next(iter(self._waiting)).arrived_at

    def _is_new_first(self) -> bool:
        """Whether the tenant that is next has had no turn yet; some have not."""
        if not self._heap:
            return True
        return self._new[0][0] < self._heap[0][0] and self._new_in_a_row < AGING - 1

    def _sweep(self) -> None:
        """Let go of calls that do not wait any more, and of tenants of which none does."""
        self._stale = 0
        for line in self._lines.values():
            line.sweep()
        busy = {call.precedence.tenant for call in self._waiting}
        # But not of those that have had more than others: it counts if they come back.
        self._heap = [e for e in self._heap if e[2] in busy or e[0] > self._virtual]
        heapq.heapify(self._heap)
        self._new = deque(entry for entry in self._new if entry[1] in busy)
        kept = [*(tenant for _, _, tenant in self._heap), *(tenant for _, tenant in self._new)]
        self._lines = {tenant: self._lines[tenant] for tenant in kept}
