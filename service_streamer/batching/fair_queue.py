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

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import frexp, inf, ldexp
from typing import Any

from ..observe.record import Call
from .tuning import AGING

_NEVER = inf

#: The rank of a call within its tenant, for counts. If its time was given with it, its deadline,
#: rounded down, so that there are few ranks, however many calls wait. Otherwise its priority, and
#: whether its time ends.
_Rank = float | tuple[int, bool]

#: Deadlines are rounded by at most a sixteenth of the time until then.
_PRECISION = 5


class _Rankmates:
    """How many items wait, of the calls of a tenant that have one rank."""

    __slots__ = ("items", "line", "rank")

    def __init__(self, line: TenantLine, rank: _Rank) -> None:
        self.line = line
        self.rank = rank
        self.items = 0


class TenantLine:
    """The calls of one tenant that wait."""

    __slots__ = (
        "_by_arrival",
        "_by_priority",
        "_deadlined",
        "_number",
        "_timed",
        "_waiting",
        "ranks",
        "tenant",
        "turns",
        "weight",
    )

    def __init__(self, tenant: str, weight: float, waiting: Mapping[Call, Any]) -> None:
        self.tenant = tenant
        self.weight = weight
        self._waiting = waiting  # of all tenants: what is not in it is skipped
        self._deadlined: list[tuple[float, int, int, Call]] = []  # a heap
        self._by_priority: list[tuple[int, int, Call]] = []  # the others, a heap
        self._timed: deque[Call] = deque()  # those of them whose time ends
        self._by_arrival: deque[Call] = deque()  # all
        self.ranks: dict[_Rank, _Rankmates] = {}
        self._number = 0  # keeps calls from being compared
        self.turns = 0  # that it had

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        priority, _, has_deadline = call.precedence
        self._number = number = self._number + 1
        self._by_arrival.append(call)
        if has_deadline:
            heappush(self._deadlined, (call.deadline, -priority, number, call))
        else:
            heappush(self._by_priority, (-priority, number, call))
            if call.deadline < _NEVER:
                self._timed.append(call)

    @property
    def items(self) -> int:
        """How many wait."""
        return sum([mates.items for mates in self.ranks.values()])

    def ahead(self, call: Call) -> int:
        """A lower estimate of the items that are computed before a new call of the tenant."""
        sooner = timed = later = higher = 0
        for rank, mates in self.ranks.items():
            if isinstance(rank, float):
                sooner += mates.items if rank <= call.deadline else 0
                later += mates.items if rank > call.deadline else 0
            else:
                timed += mates.items if rank[1] else 0
                higher += mates.items if rank[0] >= call.precedence.priority else 0
        if call.precedence.has_deadline:
            return sooner
        # It goes before those of a lower priority, and when it is due before those that are not.
        return sooner + min(timed, later + higher)

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        waiting, by_arrival, timed = self._waiting, self._by_arrival, self._timed
        while by_arrival[0] not in waiting:
            by_arrival.popleft()
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
    """Whose turn it is among calls of all tenants.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: OrderedDict[Call, _Rankmates] = OrderedDict()
        self._stale = 0  # calls in the lines that do not wait any more, at most
        self._lines: dict[str, TenantLine] = {}
        # Tenants with calls, by virtual time: those that have had no turn yet, and the others.
        self._new: OrderedDict[TenantLine, float] = OrderedDict()
        self._heap: list[tuple[float, int, TenantLine]] = []
        self._is_new = False  # whether the tenant of the head has had no turn yet
        self._new_in_a_row = 0  # of the last turns
        self._turns = 0
        self._virtual = 0.0  # of the tenant that was served last
        self._queries = 0
        self._shares: list[tuple[float, float, float]] = []  # see ``_served_before``
        self._shares_at = -inf  # turns and queries until then

    def __iter__(self) -> Iterator[Call]:
        return iter(self._waiting)

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        priority, tenant, has_deadline = call.precedence
        line = self._lines.get(tenant)
        if line is None:
            line = TenantLine(tenant, self._weights.get(tenant, 1.0), self._waiting)
            self._lines[tenant] = line
            self._new[line] = self._virtual
        line.add(call)
        deadline = call.deadline
        rank: _Rank = priority, deadline < _NEVER
        if has_deadline:
            exponent = frexp(deadline - call.arrived_at)[1]
            rank = deadline - deadline % ldexp(1.0, exponent - _PRECISION)
        mates = line.ranks.get(rank)
        if mates is None:
            mates = line.ranks[rank] = _Rankmates(line, rank)
        mates.items += call.pending
        self._waiting[call] = mates

    def remove(self, call: Call, size: int) -> None:
        """So many items of the call, which are about to be cut or to end, wait no more."""
        mates = self._waiting[call]
        mates.items -= size
        if not mates.items:
            line = mates.line
            del line.ranks[mates.rank]
            if not line.ranks and line in self._new:
                del self._new[line], self._lines[line.tenant]
        if call.pending > size:
            return
        del self._waiting[call]
        self._stale += 1
        if self._stale > 16 and self._stale > len(self._waiting):
            self._sweep()

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        heap = self._heap
        while heap and not heap[0][2].ranks:
            del self._lines[heappop(heap)[2].tenant]
        self._is_new = False
        if self._new:
            line, virtual = next(iter(self._new.items()))
            self._is_new = not heap or (virtual < heap[0][0] and self._new_in_a_row < AGING - 1)
        if not self._is_new:
            virtual, _, line = heap[0]
        if virtual > self._virtual:
            self._virtual = virtual
        return line.head(now)

    def took(self, cost: float) -> None:
        """What ``head`` has just said had its turn, with as much as that costs."""
        # The number breaks ties: the tenant that was served first is served first again.
        self._turns = number = self._turns + 1
        if self._is_new:
            self._new_in_a_row += 1
            line, virtual = self._new.popitem(last=False)
            heappush(self._heap, (virtual + cost / line.weight, number, line))
        else:
            self._new_in_a_row = 0
            virtual, _, line = self._heap[0]
            heapreplace(self._heap, (virtual + cost / line.weight, number, line))
        line.turns += 1

    def ahead(self, call: Call) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        line = self._lines.get(call.precedence.tenant)
        new = len(self._new)
        if line is None:
            return new
        own = line.ahead(call)
        if len(self._lines) == 1:
            return own
        turns = self._served_before(own / line.weight) + (own if line in self._new else 0)
        return turns + min(new, (AGING - 1) * turns)

    def _served_before(self, share: float) -> float:
        """Of tenants that have had a turn, the items until each has so many for its weight.

        As of some turns ago, at most as many as there are tenants: to look at all takes time.
        """
        self._queries += 1
        if self._turns + self._queries - self._shares_at >= len(self._heap):
            self._shares_at = self._turns + self._queries
            lines = [(line.items, line.weight) for _, _, line in self._heap if line.ranks]
            lines.sort(key=lambda line: line[0] / line[1])
            before, weights = 0.0, sum(weight for _, weight in lines)
            self._shares = []
            for items, weight in lines:
                self._shares.append((items / weight, before, weights))
                before, weights = before + items, weights - weight
            self._shares.append((inf, before, 0.0))
        _, before, weights = self._shares[bisect_left(self._shares, (share, 0, 0.0))]
        return before + share * weights

    def _sweep(self) -> None:
        """Let go of calls that do not wait any more, and of tenants of which none does.

        Unless they are few: most of them went when their turn had come. With those that come before
        the next look, no more than 40 calls that are over stay behind a worker that hangs.
        """
        self._stale, waiting = 0, len(self._waiting)
        entries = sum([line.entries + 1 for line in self._lines.values()])
        # If no more come and 16 end, nobody looks again.
        if entries <= (4 if waiting > 16 else 2) * waiting + 32:
            return
        for line in self._lines.values():
            line.sweep()
        # But not of those that have had more than others: it counts if they come back.
        self._heap = [e for e in self._heap if e[2].ranks or e[0] > self._virtual]
        heapify(self._heap)
        kept = [*(line for _, _, line in self._heap), *self._new]
        self._lines = {line.tenant: line for line in kept}

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        for line in self._lines.values():
            calls = [call for call, mates in self._waiting.items() if mates.line is line]
            assert line.items == sum(call.pending for call in calls)
            assert line.ranks or line not in self._new
