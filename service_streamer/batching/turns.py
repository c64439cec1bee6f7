"""Whose turn it is among calls that are not all alike: fair between tenants, by rank within one.

    tenants     the one that has had least, for its weight, is next
    rank        1. whose time was given with the call, or whose waiting has taken half of its
                   time: by when that ends; then by priority
                2. the others: by priority; then the classes of size share; then by arrival

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time,
which what it is given advances by its cost over its weight; one that comes back after having waited
for nothing starts at the virtual time of who is served, so that nobody saves up turns. Two tenants
that both have calls waiting thus never are further apart than one turn of each.

In the same way calls of one priority share the turns of their tenant, by their class of size. A
call goes after those of its class that came before; and so does a large one, which does not have to
wait until nothing small comes. But a small one has to wait for as much of a large call as there is
of the small ones before it, and not for all of it.

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

from ..observe.record import Call
from .tuning import AGING

_NEVER = inf

#: The rank of a call within its tenant, for counts. If its time was given with it, its deadline,
#: rounded down, so that there are few ranks, however many calls wait. Otherwise its priority,
#: whether its time ends, and whether it is large.
_Rank = float | tuple[int, bool, bool]

#: Deadlines are rounded by at most a sixteenth of the time until then.
_PRECISION = 5


class _Rankmates:
    """How many items wait, of the calls of a tenant that have one rank."""

    __slots__ = ("items", "rank")

    def __init__(self, rank: _Rank) -> None:
        self.rank = rank
        self.items = 0


class Place:
    """A call in the line of its tenant.

    Attributes:
        items: how many of its items are there; 0 as soon as it is not there any more.
        size_class: 0 of small calls; those of a large one are within a factor of two.
        tag: its virtual time among the calls of its priority.
        mates: those of its rank.
    """

    __slots__ = ("call", "items", "line", "mates", "size_class", "tag")

    mates: _Rankmates

    def __init__(self, call: Call, line: TenantLine, items: int, size_class: int) -> None:
        self.call = call
        self.line = line
        self.items = items
        self.size_class = size_class
        self.tag = 0.0


def cost_of(call: Call) -> float:
    """What an item of the call costs, on average: its length, or 1."""
    return (sum(call.lengths) / call.size if call.lengths else 0.0) or 1.0


class TenantLine:
    """The calls of one tenant that wait.

    Attributes:
        ranks: how many items wait of each rank.
        large: how many of the calls are large.
        turns: that it had.
        virtual: by priority, the tag of who had the last turn.
    """

    __slots__ = (
        "_by_arrival",
        "_by_priority",
        "_deadlined",
        "_ends",
        "_number",
        "_timed",
        "large",
        "ranks",
        "tenant",
        "turns",
        "virtual",
        "weight",
    )

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self._deadlined: list[tuple[float, int, int, Place]] = []  # a heap
        self._by_priority: list[tuple[int, float, int, Place]] = []  # the others, a heap
        self._timed: deque[Place] = deque()  # those of them whose time ends
        self._by_arrival: deque[Place] = deque()  # all
        self.virtual: dict[int, float] = {}
        self._ends: dict[tuple[int, int], float] = {}  # by priority and class: where the last ends
        self._number = 0  # keeps calls from being compared
        self.large = 0
        self.ranks: dict[_Rank, _Rankmates] = {}
        self.turns = 0

    def add(self, place: Place) -> None:
        """The call waits from now on."""
        call, deadline = place.call, place.call.deadline
        priority, _, has_deadline = call.precedence
        self._number = number = self._number + 1
        self._by_arrival.append(place)
        self.large += place.size_class > 0
        rank: _Rank
        if has_deadline:
            exponent = frexp(deadline - call.arrived_at)[1]
            rank = deadline - deadline % ldexp(1.0, exponent - _PRECISION)
            heappush(self._deadlined, (deadline, -priority, number, place))
        else:
            is_timed = deadline < _NEVER
            rank = priority, is_timed, place.size_class > 0
            tag = self.virtual.get(priority, 0.0) if self.virtual else 0.0
            if place.size_class:
                kind = priority, place.size_class
                tag = max(tag, self._ends.get(kind, 0.0))
                self._ends[kind] = tag + place.items * cost_of(call)
            place.tag = tag
            heappush(self._by_priority, (-priority, tag, number, place))
            if is_timed:
                self._timed.append(place)
        mates = self.ranks.get(rank)
        if mates is None:
            mates = self.ranks[rank] = _Rankmates(rank)
        mates.items += place.items
        place.mates = mates

    def extend(self, place: Place, items: int) -> None:
        """So many items more wait of the call."""
        place.items += items
        place.mates.items += items
        kind = place.call.precedence.priority, place.size_class
        if kind in self._ends:
            self._ends[kind] += items * cost_of(place.call)

    @property
    def items(self) -> int:
        """How many wait."""
        return sum([mates.items for mates in self.ranks.values()])

    def ahead(self, call: Call, size_class: int) -> int:
        """A lower estimate of the items that are computed before a new call of the tenant."""
        sooner = timed = later = higher = 0
        for rank, mates in self.ranks.items():
            items = mates.items
            if isinstance(rank, float):
                sooner += items if rank <= call.deadline else 0
                later += items if rank > call.deadline else 0
            elif rank[2] == (size_class > 0):  # the other classes have turns as well
                timed += items if rank[1] else 0
                higher += items if rank[0] >= call.precedence.priority else 0
        if call.precedence.has_deadline:
            return sooner
        # It goes before those of a lower priority, and when it is due before those that are not.
        return sooner + min(timed, later + higher)

    def head(self, now: float) -> Place:
        """Whose turn it is; there must be one."""
        by_arrival, timed = self._by_arrival, self._timed
        while not by_arrival[0].items:
            by_arrival.popleft()
        if self.turns % AGING == AGING - 1:
            return by_arrival[0]
        urgent, deadlined = None, self._deadlined
        while deadlined and not deadlined[0][3].items:
            heappop(deadlined)
        if deadlined:
            urgent = deadlined[0][3]
        while timed and not timed[0].items:
            timed.popleft()
        if timed:
            call = timed[0].call
            if 2 * now >= call.arrived_at + call.deadline and (
                urgent is None or call.deadline < urgent.call.deadline
            ):
                urgent = timed[0]
        if urgent is not None:
            return urgent
        by_priority = self._by_priority
        while True:
            priority, tag, number, place = by_priority[0]
            if not place.items:
                heappop(by_priority)
            elif tag < place.tag:  # it had a turn
                heapreplace(by_priority, (priority, place.tag, number, place))
            else:
                return place

    def most(self, place: Place) -> int:
        """How many of its items the head takes before another call of the tenant has a turn."""
        by_priority = self._by_priority
        if len(by_priority) < 2 or by_priority[0][3] is not place:
            return place.items
        following = min(by_priority[1:3])
        if following[0] != by_priority[0][0]:
            return place.items
        return min(place.items, int((following[1] - place.tag) / cost_of(place.call)) + 1)

    @property
    def entries(self) -> int:
        """How many are kept, of calls that wait or not: two or three for each."""
        timed = len(self._deadlined) + len(self._by_priority) + len(self._timed)
        return timed + len(self._by_arrival)

    def sweep(self) -> None:
        """Let go of calls that do not wait any more."""
        self._deadlined = [entry for entry in self._deadlined if entry[3].items]
        heapify(self._deadlined)
        self._by_priority = [entry for entry in self._by_priority if entry[3].items]
        heapify(self._by_priority)
        self._by_arrival = deque(place for place in self._by_arrival if place.items)
        self._timed = deque(place for place in self._timed if place.items)


class Turns:
    """Whose turn it is among calls of all tenants.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._places: OrderedDict[Call, Place] = OrderedDict()
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
        return iter(self._places)

    def __contains__(self, call: Call) -> bool:
        return call in self._places

    def place(self, call: Call) -> Place:
        """Of the call, which must be here."""
        return self._places[call]

    def add(self, call: Call, items: int, size_class: int = 0) -> None:
        """The call waits from now on, with so many of its items. If it does already, with more."""
        place = self._places.get(call)
        if place is not None:
            place.line.extend(place, items)
            return
        tenant = call.precedence.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = TenantLine(tenant, self._weights.get(tenant, 1.0))
            self._lines[tenant] = line
            self._new[line] = self._virtual
        place = self._places[call] = Place(call, line, items, size_class)
        line.add(place)

    def remove(self, call: Call, size: int) -> None:
        """So many items of the call, which are about to be cut or to end, wait no more."""
        self._leave(self._places[call], size)

    def _leave(self, place: Place, size: int) -> None:
        line, mates = place.line, place.mates
        place.items -= size
        mates.items -= size
        if not mates.items:
            del line.ranks[mates.rank]
            if not line.ranks and line in self._new:
                del self._new[line], self._lines[line.tenant]
        if place.items:
            return
        if place.size_class:
            line.large -= 1
        del self._places[place.call]
        self._stale += 1
        if self._stale > 16 and self._stale > len(self._places):
            self._sweep()

    def head(self, now: float) -> Place:
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

    def most(self, place: Place) -> int:
        """How many of its items the head takes before another call has a turn."""
        if len(self._lines) > 1:
            return 1
        return place.line.most(place) if place.size_class else place.items

    def took(self, place: Place, size: int, cost: float) -> None:
        """What ``head`` said had its turn, with so many items, and as much as that costs."""
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
        priority, _, has_deadline = place.call.precedence
        if line.large and not has_deadline:
            virtual = line.virtual.get(priority, 0.0)
            if place.size_class:
                virtual = max(virtual, place.tag)
                place.tag += cost
            else:
                virtual += cost
            line.virtual[priority] = virtual
        self._leave(place, size)

    def ahead(self, call: Call, size_class: int) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        line = self._lines.get(call.precedence.tenant)
        new = len(self._new)
        if line is None:
            return new
        own = line.ahead(call, size_class)
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
        self._stale, waiting = 0, len(self._places)
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
            places = [place for place in self._places.values() if place.line is line]
            assert line.items == sum(place.items for place in places)
            assert line.ranks or line not in self._new
        assert all(call is place.call and place.items for call, place in self._places.items())
