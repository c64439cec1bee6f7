"""Whose turn it is among the calls that wait: fair between tenants, by rank within one.

    tenants     the one that has had least, for its weight, is next
    rank        1. whose time was given with the call, or whose waiting has taken half of its
                   time: by when that ends; then by priority
                2. the others: by priority, then by arrival

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time,
which what it is given advances by its cost over its weight; one that comes back after having waited
for nothing starts at the virtual time of who is served, so that nobody saves up turns. Two tenants
that both have calls waiting thus never are further apart than one turn of each.

Nothing waits for ever: each ``AGING``-th turn of a tenant goes to the call that has waited longest,
whatever its kind. So a call is passed over at most ``AGING`` times for each that was there before.
And at most ``AGING`` - 1 tenants in a row are served that had no turn before: else those that come
with one call each, such as the users of a service, would be before all others for ever.

Where all calls are alike, of one tenant, they go by arrival, and nothing else is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import frexp, inf, ldexp

from ..observe.record import ORDINARY, Call
from .tuning import AGING

_NEVER = inf

#: The rank of a call within its tenant, for counts. If its time was given with it, its deadline,
#: rounded down, so that there are few ranks, however many calls wait. Otherwise its priority, and
#: whether its time ends.
_Rank = float | tuple[int, bool]

#: Deadlines are rounded by at most a sixteenth of the time until then.
_PRECISION = 5


def _rank_of(call: Call) -> _Rank:
    priority, _, has_deadline = call.precedence
    if not has_deadline:
        return priority, call.deadline < _NEVER
    if call.deadline == _NEVER:
        return _NEVER
    exponent = frexp(call.deadline - call.arrived_at)[1]
    return call.deadline - call.deadline % ldexp(1.0, exponent - _PRECISION)


class TenantLine:
    """The calls of one tenant that wait.

    Args:
        waiting: how many items wait of each call, of all tenants: what is not in it is skipped.

    Attributes:
        calls: how many wait.
        by_arrival: the calls, but large ones behind those to which they gave way.
        items: how many of them wait.
        ranks: how many items wait of each rank; None as long as all calls are alike.
        turns: that it had.
    """

    __slots__ = (
        "_by_priority",
        "_deadlined",
        "_number",
        "_timed",
        "_waiting",
        "by_arrival",
        "calls",
        "items",
        "ranks",
        "tenant",
        "turns",
        "weight",
    )

    def __init__(self, tenant: str, weight: float, waiting: Mapping[Call, int]) -> None:
        self.tenant = tenant
        self.weight = weight
        self._waiting = waiting
        self.calls = self.items = self.turns = 0
        self.by_arrival: deque[Call] = deque()
        self._number = 0  # keeps calls from being compared
        self._forget_ranks()

    def _forget_ranks(self) -> None:
        self.ranks: dict[_Rank, int] | None = None
        self._deadlined: list[tuple[float, int, int, Call]] = []  # a heap
        self._by_priority: list[tuple[int, int, Call]] = []  # the others, a heap
        self._timed: deque[Call] = deque()  # those of them whose time ends

    def add(self, call: Call, size: int) -> None:
        """The call waits from now on, with so many items."""
        self.calls += 1
        self.items += size
        self.by_arrival.append(call)
        if self.ranks is not None:
            self._rank(call, size)
        elif call.precedence is not ORDINARY:
            priority, _, has_deadline = call.precedence
            if priority or has_deadline:
                self._rank_all()

    def add_items(self, call: Call, size: int) -> None:
        """So many items more wait of the call, which waits."""
        self.items += size
        if self.ranks is not None:
            self.ranks[_rank_of(call)] += size

    def remove(self, call: Call, size: int) -> None:
        """So many items of the call wait no more; it is no longer in ``waiting`` if none does."""
        self.items -= size
        if not self.items:
            self.calls = 0
            self.by_arrival.clear()
            if self.ranks is not None:
                self._forget_ranks()
            return
        if self.ranks is not None:
            rank = _rank_of(call)
            self.ranks[rank] -= size
            if not self.ranks[rank]:
                del self.ranks[rank]
        if call not in self._waiting:
            self.calls -= 1
            if len(self.by_arrival) > 2 * self.calls + 32:  # so each that is gone costs little
                self._sweep()

    def _rank_all(self) -> None:
        """Calls are not alike from now on, until none waits."""
        self.ranks, self.turns = {}, 0
        for call in self.by_arrival:
            size = self._waiting.get(call)
            if size is not None:
                self._rank(call, size)

    def _rank(self, call: Call, size: int) -> None:
        assert self.ranks is not None
        rank = _rank_of(call)
        self.ranks[rank] = self.ranks.get(rank, 0) + size
        priority, _, has_deadline = call.precedence
        self._number = number = self._number + 1
        if has_deadline:
            heappush(self._deadlined, (call.deadline, -priority, number, call))
        else:
            heappush(self._by_priority, (-priority, number, call))
            if call.deadline < _NEVER:
                self._timed.append(call)

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        waiting, by_arrival, timed = self._waiting, self.by_arrival, self._timed
        while by_arrival[0] not in waiting:
            by_arrival.popleft()
        if self.ranks is None or self.turns % AGING == AGING - 1:
            return by_arrival[0]
        urgent, deadlined, by_priority = None, self._deadlined, self._by_priority
        while deadlined and deadlined[0][3] not in waiting:
            heappop(deadlined)
        if deadlined:
            urgent = deadlined[0][3]
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

    def give_way(self, call: Call) -> None:
        """The call, which has just been the head, goes behind those that are as urgent."""
        by_arrival, by_priority = self.by_arrival, self._by_priority
        if by_arrival[0] is call:
            by_arrival.rotate(-1)
        if by_priority and by_priority[0][2] is call:
            self._number = number = self._number + 1
            heapreplace(by_priority, (by_priority[0][0], number, call))

    def ahead(self, call: Call) -> int:
        """A lower estimate of the items that are computed before a new call of the tenant."""
        priority, _, has_deadline = call.precedence
        if self.ranks is None:
            if not (priority or has_deadline):
                return self.items
            self._rank_all()
        assert self.ranks is not None
        sooner = timed = later = higher = 0
        for rank, items in self.ranks.items():
            if isinstance(rank, float):
                sooner += items if rank <= call.deadline else 0
                later += items if rank > call.deadline else 0
            else:
                timed += items if rank[1] else 0
                higher += items if rank[0] >= priority else 0
        if has_deadline:
            return sooner
        # It goes before those of a lower priority, and when it is due before those that are not.
        return sooner + min(timed, later + higher)

    def _sweep(self) -> None:
        """Let go of calls that do not wait any more."""
        waiting = self._waiting
        self.by_arrival = deque(call for call in self.by_arrival if call in waiting)
        self._timed = deque(call for call in self._timed if call in waiting)
        self._deadlined = [entry for entry in self._deadlined if entry[3] in waiting]
        self._by_priority = [entry for entry in self._by_priority if entry[2] in waiting]
        heapify(self._deadlined)
        heapify(self._by_priority)


class TurnOrder:
    """Calls that wait, and whose turn it is. They are not searched when they leave, only skipped.

    Args:
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many wait.
        plain: the line of all calls, if they are of one tenant and alike.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.items = 0
        self._waiting: OrderedDict[Call, int] = OrderedDict()  # how many items, by arrival
        self._forget_tenants()

    def _forget_tenants(self) -> None:
        self._lines: dict[str, TenantLine] = {}
        self._only: TenantLine | None = None  # the line, if there is one
        self.plain: TenantLine | None = None
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

    def __contains__(self, call: Call) -> bool:
        return call in self._waiting

    def left(self, call: Call) -> int:
        """How many items of the call, which must be here, wait."""
        return self._waiting[call]

    def oldest(self) -> Call:
        """The call that has waited longest; there must be one."""
        return next(iter(self._waiting))

    @property
    def is_fair(self) -> bool:
        """Whether calls of several tenants wait, or some that are not alike."""
        return self.plain is None and self.items > 0

    def add(self, call: Call, size: int) -> None:
        """So many items of the call wait from now on, after those that it may have here."""
        self.items += size
        before, line = self._waiting.get(call), self.plain
        if line is not None and call.precedence is ORDINARY and not (before or line.tenant):
            self._waiting[call] = size  # what is done below, as nearly always
            line.by_arrival.append(call)
            line.calls += 1
            line.items += size
            return
        line = self._lines.get(call.precedence.tenant) or self._enter(call.precedence.tenant)
        if before is None:
            self._waiting[call] = size
            line.add(call, size)
            if line.ranks is not None:
                self.plain = None
        else:
            self._waiting[call] = before + size
            line.add_items(call, size)

    def _enter(self, tenant: str) -> TenantLine:
        """A tenant comes that has no calls."""
        if self._only is not None and not self._only.items:
            self._forget_tenants()
        line = TenantLine(tenant, self._weights.get(tenant, 1.0), self._waiting)
        self._only = self.plain = None if self._lines else line
        self._lines[tenant] = line
        self._new[line] = self._virtual
        return line

    def _leave(self, line: TenantLine) -> None:
        """The tenant has no calls any more, and has had no more than others."""
        del self._lines[line.tenant]
        if len(self._lines) == 1:
            self._only = line = next(iter(self._lines.values()))
            self.plain = line if line.ranks is None else None

    def remove(self, call: Call, size: int) -> None:
        """So many items of the call, which are about to be cut or to end, wait no more."""
        self.items -= size
        line = self._lines[call.precedence.tenant]
        left = self._waiting[call] - size
        if left:
            self._waiting[call] = left
        else:
            del self._waiting[call]
        line.remove(call, size)
        if not self.items:
            if self._only is None:
                self._forget_tenants()
            self.plain = self._only
        elif not line.items and line in self._new:
            del self._new[line]
            self._leave(line)

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        line = self.plain
        if line is not None:
            by_arrival = line.by_arrival
            while by_arrival[0] not in self._waiting:
                by_arrival.popleft()
            return by_arrival[0]
        return (self._only or self._next()).head(now)

    def _next(self) -> TenantLine:
        """Whose turn it is of several tenants."""
        heap = self._heap
        while heap and not heap[0][2].items:
            self._leave(heappop(heap)[2])
        self._is_new = False
        if self._new:
            line, virtual = next(iter(self._new.items()))
            self._is_new = not heap or (virtual < heap[0][0] and self._new_in_a_row < AGING - 1)
        if not self._is_new:
            virtual, _, line = heap[0]
        if virtual > self._virtual:
            self._virtual = virtual
        return line

    def took(self, call: Call, size: int, cost: float) -> None:
        """What ``head`` has just said had its turn, with so many items, and as much as that costs.

        A tenant alone is not charged: there is nobody to be fair to.
        """
        line = self.plain
        if line is not None:
            self.items -= size
            line.items -= size
            left = self._waiting[call] - size
            if left:
                self._waiting[call] = left
            else:
                del self._waiting[call]
                line.calls -= 1
                line.by_arrival.popleft()
            return
        line = self._lines[call.precedence.tenant]
        line.turns += 1
        if self._only is None:
            # The number breaks ties: the tenant that was served first is served first again.
            self._turns = number = self._turns + 1
            if self._is_new:
                self._new_in_a_row += 1
                virtual = self._new.pop(line)
                heappush(self._heap, (virtual + cost / line.weight, number, line))
            else:
                self._new_in_a_row = 0
                virtual = self._heap[0][0]
                heapreplace(self._heap, (virtual + cost / line.weight, number, line))
        self.remove(call, size)

    def give_way(self, call: Call) -> None:
        """The call, which had its turn and has items left, goes behind those that are as urgent."""
        self._lines[call.precedence.tenant].give_way(call)

    def ahead(self, call: Call) -> float:
        """A lower estimate of the items that are computed before a new call with a deadline."""
        line = self._lines.get(call.precedence.tenant)
        new = len(self._new)
        if line is None:
            return new
        own = line.ahead(call)
        if line.ranks is not None:
            self.plain = None
        if self._only is not None:
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
            lines = [(line.items, line.weight) for _, _, line in self._heap if line.items]
            lines.sort(key=lambda line: line[0] / line[1])
            before, weights = 0.0, sum(weight for _, weight in lines)
            self._shares = []
            for items, weight in lines:
                self._shares.append((items / weight, before, weights))
                before, weights = before + items, weights - weight
            self._shares.append((inf, before, 0.0))
        _, before, weights = self._shares[bisect_left(self._shares, (share, 0, 0.0))]
        return before + share * weights

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        assert self.items == sum(self._waiting.values())
        for line in self._lines.values():
            calls = [call for call in self._waiting if call.precedence.tenant == line.tenant]
            assert line.calls == len(calls)
            assert line.items == sum(self._waiting[call] for call in calls)
            assert len(line.by_arrival) <= 2 * line.calls + 32
            assert line.ranks is None or line.items == sum(line.ranks.values())
            assert line.items or line not in self._new or line is self._only
