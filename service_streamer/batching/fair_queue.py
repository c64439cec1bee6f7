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

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from ..observe.record import Call
from .tuning import AGING

__all__ = ["FairQueue"]


_NEVER = math.inf


class _Line:
    """The calls of one tenant that wait."""

    __slots__ = (
        "_by_arrival",
        "_by_priority",
        "_deadlined",
        "_number",
        "_timed",
        "_waiting",
        "tenant",
        "turns",
        "weight",
    )

    def __init__(self, tenant: str, weight: float, waiting: Mapping[Call, None]) -> None:
        self.tenant = tenant
        self.weight = weight
        self._waiting = waiting  # of all tenants: what is not in it is skipped
        self._deadlined: list[tuple[float, int, int, Call]] = []  # a heap
        self._by_priority: list[tuple[int, int, Call]] = []  # the others, a heap
        self._timed: deque[Call] = deque()  # those of them whose time ends
        self._by_arrival: deque[Call] = deque()  # all
        self._number = 0  # keeps calls from being compared
        self.turns = 0  # that it had

    def add(self, call: Call, priority: int, *, has_deadline: bool) -> None:
        self._number = number = self._number + 1
        self._by_arrival.append(call)
        if has_deadline:
            heappush(self._deadlined, (call.deadline, -priority, number, call))
        else:
            heappush(self._by_priority, (-priority, number, call))
            if call.deadline < _NEVER:
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
        urgent, deadlined, by_priority = None, self._deadlined, self._by_priority
        if deadlined:
            while deadlined and deadlined[0][3] not in waiting:
                heappop(deadlined)
            if deadlined:
                urgent = deadlined[0][3]
        if timed:
            while timed and timed[0] not in waiting:
                timed.popleft()
            if (
                timed
                and 2 * now >= timed[0].arrived_at + timed[0].deadline
                and (urgent is None or timed[0].deadline < urgent.deadline)
            ):
                urgent = timed[0]
        if urgent is not None:
            return urgent
        while by_priority[0][2] not in waiting:
            heappop(by_priority)
        return by_priority[0][2]

    @property
    def entries(self) -> int:
        """How many are kept, of calls that wait or not: two or three for each."""
        timed = len(self._deadlined) + len(self._by_priority) + len(self._timed)
        return timed + len(self._by_arrival)

    def sweep(self) -> None:
        """Let go of calls that do not wait any more."""
        waiting = self._waiting
        self._deadlined = [entry for entry in self._deadlined if entry[3] in waiting]
        heapify(self._deadlined)
        self._by_priority = [entry for entry in self._by_priority if entry[2] in waiting]
        heapify(self._by_priority)
        self._by_arrival = deque(call for call in self._by_arrival if call in waiting)
        self._timed = deque(call for call in self._timed if call in waiting)


class FairQueue:
    """The queue of calls of all tenants; a call leaves it when it has no item pending any more.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    __slots__ = (
        "_heap",
        "_is_new",
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
        self._new: deque[tuple[float, _Line]] = deque()
        self._heap: list[tuple[float, int, _Line]] = []
        self._is_new = False  # whether the tenant of the head has had no turn yet
        self._new_in_a_row = 0  # of the last turns
        self._turns = 0
        self._virtual = 0.0  # of the tenant that was served last

    def __iter__(self) -> Iterator[Call]:
        return iter(self._waiting)

    def add(self, call: Call) -> None:
        priority, tenant, has_deadline = call.precedence
        line = self._lines.get(tenant)
        if line is None:
            line = _Line(tenant, self._weights.get(tenant, 1.0), self._waiting)
            self._lines[tenant] = line
            self._new.append((self._virtual, line))
        line.add(call, priority, has_deadline=has_deadline)
        self._waiting[call] = None

    def remove(self, call: Call) -> None:
        """The call does not wait any more."""
        del self._waiting[call]
        self._stale += 1
        if self._stale > 16 and self._stale > len(self._waiting):
            self._sweep()

    def head(self, now: float) -> Call | None:
        """The next tenant; None if no call waits."""
        new, heap = self._new, self._heap
        while new or heap:
            self._is_new = is_new = bool(new) and (
                not heap or (new[0][0] < heap[0][0] and self._new_in_a_row < AGING - 1)
            )
            if is_new:
                virtual, line = new[0]
            else:
                virtual, _, line = heap[0]
            call = line.head(now)
            if call is not None:
                if virtual > self._virtual:
                    self._virtual = virtual
                return call
            new.popleft() if is_new else heappop(heap)
            del self._lines[line.tenant]
        return None

    def took(self, cost: float) -> None:
        """What ``head`` has just said had its turn, with as much as that costs."""
        # The number breaks ties: the tenant that was served first is served first again.
        self._turns = number = self._turns + 1
        if self._is_new:
            self._new_in_a_row += 1
            virtual, line = self._new.popleft()
            heappush(self._heap, (virtual + cost / line.weight, number, line))
        else:
            self._new_in_a_row = 0
            virtual, _, line = self._heap[0]
            heapreplace(self._heap, (virtual + cost / line.weight, number, line))
        line.turns += 1

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        return next(iter(self._waiting)).arrived_at

    def _sweep(self) -> None:
        """Let go of calls that do not wait any more, and of tenants of which none does.

        Unless they are few: most of them went when their turn had come. With those that come before
        the next look, no more than 32 calls that are over stay behind a worker that hangs.
        """
        self._stale, waiting = 0, len(self._waiting)
        entries = sum([line.entries + 1 for line in self._lines.values()])
        # If no more come and 16 end, nobody looks again.
        if entries <= (4 if waiting > 16 else 2) * waiting + 32:
            return
        for line in self._lines.values():
            line.sweep()
        busy = {call.precedence.tenant for call in self._waiting}
        # But not of those that have had more than others: it counts if they come back.
        self._heap = [e for e in self._heap if e[2].tenant in busy or e[0] > self._virtual]
        heapify(self._heap)
        self._new = deque(entry for entry in self._new if entry[1].tenant in busy)
        kept = [*(line for _, _, line in self._heap), *(line for _, line in self._new)]
        self._lines = {line.tenant: line for line in kept}
