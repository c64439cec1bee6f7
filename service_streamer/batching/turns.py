"""Whose turn it is among calls that wait: fair between tenants, by rank within one.

    tenants     the one that has had least, for its weight, is next
    rank        1. whose time was given with the call, or whose waiting has taken half of its
                   time: by when that ends; then by priority
                2. the others, and all large calls: by priority; the classes of size have turns;
                   within one by arrival

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time,
which what it is given advances by its cost over its weight; one that comes back after having waited
for nothing starts at the virtual time of who is served, so that nobody saves up turns. Two tenants
that both have calls waiting thus never are further apart than one turn of each. The classes of size
of one priority share the turns of their tenant in the same way: all small calls are one class, and
large ones are in a class if they are within a factor of two.

Nothing waits for ever: each ``AGING``-th turn of a tenant goes to the small call that has waited
longest, whatever its kind. So one is passed over at most ``AGING`` times for each that was there
before. The large call that has waited longest has one when the others had ``AGING`` - 1 times the
work of an item of it. And at most ``AGING`` - 1 tenants in a row are served that had no turn
before: else those that come with one call each, such as the users of a service, would be before all
others for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import frexp, inf, isclose, ldexp
from operator import attrgetter

from ..observe.record import Call

#: Each turn of this number goes to the small call that has waited longest, whatever its kind; and
#: as much of the work to the large one.
#: Chosen by reasoning: an eighth of the turns prevents starvation, and deadlines and priorities
#: lose no more than that.
AGING = 8

#: What the calls of a group have in common. Of small calls whose time was given with them, their
#: deadline, rounded down, so that there are few groups, however many calls wait. Of the others
#: their priority and their class of size.
_Kind = float | tuple[int, int]

#: Deadlines are rounded by at most a sixteenth of the time until then.
_PRECISION = 5


def work_of(call: Call, start: int = 0) -> float:
    """What the items of a call cost from there on: their lengths together, or their number."""
    return call.size - start if call.lengths is None else float(sum(call.lengths[start:]))


class _Group:
    """Calls of a tenant that go by arrival among each other, or nearly have one deadline."""

    __slots__ = ("calls", "is_large", "items", "kind", "priority", "tag", "timed", "work")

    def __init__(self, kind: _Kind, tag: float = 0.0) -> None:
        self.kind = kind
        self.priority = None if isinstance(kind, float) else kind[0]
        self.is_large = not isinstance(kind, float) and kind[1] > 0
        # The virtual time of the class, among those of its priority. It starts at that of the one
        # that is next.
        self.tag = tag
        self.items = 0  # of its calls that wait
        self.work = 0.0  # what those cost
        self.timed = 0.0  # what those of them cost that are of small calls whose time ends
        self.calls: OrderedDict[Queued, None] = OrderedDict()  # by arrival


class Queued:
    """A call in the line of its tenant."""

    __slots__ = ("call", "group", "is_timed", "items", "line", "number", "size_class", "unit")

    group: _Group
    number: int  # of the calls in the line, by arrival

    def __init__(self, call: Call, line: TenantLine, size_class: int) -> None:
        self.call = call
        self.line = line
        self.items = 0  # that are there; none as soon as the call is not there any more
        self.size_class = size_class  # 0 of small calls
        self.is_timed = False  # it is small, has no deadline of its own, and its time ends
        lengths = call.lengths
        # What an item of it costs, on average.
        self.unit = 1.0 if lengths is None else sum(lengths) / call.size or 1.0

    def count(self, items: int) -> None:
        """So many more of its items wait."""
        group, work = self.group, items * self.unit
        self.items += items
        group.items += items
        group.work += work
        if self.is_timed:
            group.timed += work


class TenantLine:
    """The calls of one tenant that wait."""

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.groups: dict[_Kind, _Group] = {}  # those with calls
        self._tags: dict[_Kind, float] = {}  # of classes that have gone
        self._turns = 0  # that it had since a small call had one for its age
        # What others cost since a large one had one for its age, or the first one came.
        self._credit = 0.0
        self._aged: Queued | None = None  # which ``head`` has just said for its age
        #: What calls of it were given beside those of other tenants, and is to be charged.
        self.owed = 0.0
        # By arrival: the small calls that are timed, and the large ones.
        self._timed: OrderedDict[Queued, None] = OrderedDict()
        self._large: OrderedDict[Queued, None] = OrderedDict()
        # Heaps, also of what has gone: the calls with a deadline of their own; and the groups of
        # the others, by priority, then by tag, then the smaller class.
        self._deadlined: list[tuple[float, int, int, Queued]] = []
        self._by_priority: list[tuple[int, float, int, int, _Group]] = []
        self._number = 0  # of the last call; keeps what is in a heap from being compared
        self._room = 64  # for calls with a deadline of their own, before looking for what has gone

    def add(self, queued: Queued) -> None:
        """The call waits from now on."""
        call, size_class = queued.call, queued.size_class
        priority, _, has_deadline = call.precedence
        self._number = queued.number = self._number + 1
        if size_class:
            self._large[queued] = None
        if has_deadline and not size_class:
            group = self._deadline_group(call)
            heappush(self._deadlined, (call.deadline, -priority, queued.number, queued))
        else:
            kind = priority, size_class
            group = self.groups.get(kind) or self._begin(kind)
            if call.deadline < inf and not size_class:
                queued.is_timed = True
                self._timed[queued] = None
        queued.group = group
        group.calls[queued] = None

    def _deadline_group(self, call: Call) -> _Group:
        """Of the calls with nearly this deadline."""
        if len(self._deadlined) >= self._room:
            self._deadlined = [entry for entry in self._deadlined if entry[3].items]
            heapify(self._deadlined)
            self._room = max(64, 2 * len(self._deadlined))
        soon = call.deadline
        if soon < inf:
            exponent = frexp(soon - call.arrived_at)[1]
            soon -= soon % ldexp(1.0, exponent - _PRECISION)
        group = self.groups.get(soon)
        if group is None:
            group = self.groups[soon] = _Group(soon)
        return group

    def _begin(self, kind: tuple[int, int]) -> _Group:
        """A class of size of a priority, of which no call waits. It does not save up turns, and
        does not forget what it had.
        """
        priority, size_class = kind
        tags = [each.tag for each in self.groups.values() if each.priority == priority]
        least = min(tags, default=0.0)
        group = self.groups[kind] = _Group(kind, max(least, self._tags.pop(kind, least)))
        heap = self._by_priority
        heappush(heap, (-priority, group.tag, size_class, self._number, group))
        if len(heap) > 2 * len(self.groups) + 32:
            self._by_priority = [each for each in heap if each[4].items or each[4] is group]
            heapify(self._by_priority)
        return group

    def leave(self, queued: Queued) -> None:
        """The call waits no more."""
        if queued.size_class:
            del self._large[queued]
        if queued.is_timed:
            del self._timed[queued]
        group = queued.group
        del group.calls[queued]
        if not group.items:
            del self.groups[group.kind]
            if group.priority is not None:
                if len(self._tags) > 64:  # of as many priorities
                    self._tags.clear()
                self._tags[group.kind] = group.tag
            if not self.groups:
                self._tags.clear()

    @property
    def is_by_arrival(self) -> bool:
        """Whether all that wait are of one priority and class."""
        return len(self.groups) == 1 and not any(isinstance(kind, float) for kind in self.groups)

    @property
    def work(self) -> float:
        """What those cost that wait."""
        return sum([group.work for group in self.groups.values()])

    def ahead(self, call: Call, size_class: int, work: float) -> float:
        """A lower estimate of what is computed before a new call of the tenant is over.

        Args:
            work: of the call itself, which is not counted.
        """
        if size_class:
            return self._ahead_of_large(call.precedence.priority, size_class, work)
        sooner = timed = later = higher = 0.0
        for kind, group in self.groups.items():
            if isinstance(kind, float):
                sooner += group.work if kind <= call.deadline else 0
                later += group.work if kind > call.deadline else 0
            elif not kind[1]:  # the large ones have turns as well
                timed += group.timed
                higher += group.work if kind[0] >= call.precedence.priority else 0
        if call.precedence.has_deadline:
            return sooner
        # It goes before those of a lower priority, and when it is due before those that are not.
        return sooner + min(timed, later + higher)

    def _ahead_of_large(self, priority: int, size_class: int, work: float) -> float:
        before = others = own = 0.0
        for kind, group in self.groups.items():
            if kind == (priority, size_class):
                own = group.work
            elif isinstance(kind, float) or kind[0] > priority:
                before += group.work
            elif kind[0] == priority:
                others += group.work
        # It is over when its class has had so much. Meanwhile the others of its priority have had
        # as much, and what goes before it has what age leaves to that.
        share = own + work
        return own + min(others, share) + min(before, (AGING - 1) * share)

    def head(self, now: float) -> Queued:
        """Whose turn it is; there must be one."""
        self._aged = None
        if self._turns >= AGING - 1:
            small = [next(iter(each.calls)) for each in self.groups.values() if not each.is_large]
            self._aged = min(small, key=attrgetter("number"), default=None)
        if self._large and self._aged is None:
            oldest = next(iter(self._large))
            if self._credit >= (AGING - 1) * oldest.unit:
                self._aged = oldest
        return self._aged or self._urgent(now) or self._first()

    def _urgent(self, now: float) -> Queued | None:
        """The call whose time ends first, of those that go by that."""
        urgent, deadlined = None, self._deadlined
        while deadlined and not deadlined[0][3].items:
            heappop(deadlined)
        if deadlined:
            urgent = deadlined[0][3]
        if self._timed:
            oldest = next(iter(self._timed))
            call = oldest.call
            if 2 * now >= call.arrived_at + call.deadline and (
                urgent is None or call.deadline < urgent.call.deadline
            ):
                urgent = oldest
        return urgent

    def _first(self) -> Queued:
        """The first call of the class whose turn it is; there must be one."""
        by_priority = self._by_priority
        while True:
            priority, tag, size_class, number, group = by_priority[0]
            if not group.items:
                heappop(by_priority)
            elif tag < group.tag and len(by_priority) > 1:  # it had turns, which others had not
                heapreplace(by_priority, (priority, group.tag, size_class, number, group))
            else:
                return next(iter(group.calls))

    def served(self, queued: Queued, cost: float) -> None:
        """What ``head`` said had its turn."""
        is_aged = queued is self._aged
        self._turns = 0 if is_aged and not queued.size_class else self._turns + 1
        if self._large:
            self._credit = 0.0 if is_aged and queued.size_class else self._credit + cost
        queued.group.tag += cost


class TurnOrder:
    """Whose turn it is among calls of all tenants.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queued: OrderedDict[Call, Queued] = OrderedDict()
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
        #: What those cost that wait. Kept, since each submission with a timeout asks.
        self.work = 0.0

    def __iter__(self) -> Iterator[Call]:
        return iter(self._queued)

    def __contains__(self, call: Call) -> bool:
        return call in self._queued

    def get(self, call: Call) -> Queued:
        """Of the call, which must be here."""
        return self._queued[call]

    @property
    def is_by_arrival(self) -> bool:
        """Whether all calls go by arrival. They may even if this is false."""
        return len(self._lines) == 1 and next(iter(self._lines.values())).is_by_arrival

    def add(self, call: Call, items: int, size_class: int) -> None:
        """The call waits from now on, with so many of its items. If it does already, with more."""
        queued = self._queued.get(call)
        if queued is None:
            tenant = call.precedence.tenant
            line = self._lines.get(tenant)
            if line is None:
                line = TenantLine(tenant, self._weights.get(tenant, 1.0))
                self._lines[tenant] = line
                self._new[line] = self._virtual
            queued = self._queued[call] = Queued(call, line, size_class)
            line.add(queued)
        queued.count(items)
        self.work += items * queued.unit

    def remove(self, call: Call, size: int, cost: float = 0.0) -> None:
        """So many items of the call, which are about to be cut or to end, wait no more.

        Args:
            cost: what they cost, if they are computed beside the one whose turn it was.
        """
        queued = self._queued[call]
        queued.group.tag += cost
        queued.line.owed += cost
        self._leave(queued, size)

    def _leave(self, queued: Queued, size: int) -> None:
        queued.count(-size)
        self.work -= size * queued.unit
        if queued.items:
            return
        line = queued.line
        line.leave(queued)
        del self._queued[queued.call]
        if not self._queued:
            self.work = 0.0  # without what roundings have left
        if not line.groups and line in self._new:
            del self._new[line], self._lines[line.tenant]

    def head(self, now: float) -> Queued:
        """Whose turn it is; there must be one."""
        heap = self._heap
        while heap:
            virtual, number, line = heap[0]
            if not line.groups:
                del self._lines[heappop(heap)[2].tenant]
            elif line.owed:
                heapreplace(heap, (virtual + line.owed / line.weight, number, line))
                line.owed = 0.0
            else:
                break
        self._is_new = False
        if self._new:
            line, virtual = next(iter(self._new.items()))
            self._is_new = not heap or (virtual < heap[0][0] and self._new_in_a_row < AGING - 1)
        if not self._is_new:
            virtual, _, line = heap[0]
        if virtual > self._virtual:
            self._virtual = virtual
        return line.head(now)

    def most(self, queued: Queued) -> int:
        """How many of its items the head may take in a turn: all, if no others have turns."""
        return queued.items if len(self._lines) == 1 and len(queued.line.groups) == 1 else 1

    def took(self, queued: Queued, size: int, cost: float) -> None:
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
        line.served(queued, cost)
        self._leave(queued, size)

    def ahead(self, call: Call, size_class: int, work: float, unit: float) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over.

        Args:
            work: of the call itself, which is not counted.
            unit: what an item costs, on average.
        """
        line = self._lines.get(call.precedence.tenant)
        new = len(self._new) * unit  # one item of each tenant that has had no turn
        if line is None:
            return new
        own = line.ahead(call, size_class, work)
        if len(self._lines) == 1:
            return own
        if size_class:
            own += work  # it has turns with the other tenants until its end
        turns = self._served_before(own / line.weight) + (own if line in self._new else 0)
        turns += min(new, (AGING - 1) * turns)
        return max(0.0, turns - work) if size_class else turns

    def _served_before(self, share: float) -> float:
        """Of tenants that have had a turn, the work until each has so much for its weight.

        As of some turns ago, at most as many as there are tenants: to look at all takes time.
        """
        self._queries += 1
        if self._turns + self._queries - self._shares_at >= len(self._heap):
            self._shares_at = self._turns + self._queries
            lines = [(line.work, line.weight) for _, _, line in self._heap if line.groups]
            lines.sort(key=lambda line: line[0] / line[1])
            before, weights = 0.0, sum(weight for _, weight in lines)
            self._shares = []
            for work, weight in lines:
                self._shares.append((work / weight, before, weights))
                before, weights = before + work, weights - weight
            self._shares.append((inf, before, 0.0))
        _, before, weights = self._shares[bisect_left(self._shares, (share, 0, 0.0))]
        return before + share * weights

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        for line in self._lines.values():
            waiting = [queued for queued in self._queued.values() if queued.line is line]
            items = sum(group.items for group in line.groups.values())
            assert items == sum(queued.items for queued in waiting)
            work = sum(queued.items * queued.unit for queued in waiting)
            assert isclose(line.work, work, abs_tol=1e-6 * (1.0 + work))
            assert line.groups or line not in self._new
        works = sum(line.work for line in self._lines.values())
        assert isclose(self.work, works, abs_tol=1e-6 * (1.0 + works))
        assert all(call is queued.call and queued.items for call, queued in self._queued.items())
