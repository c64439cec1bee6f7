"""Whose turn it is among calls that wait: fair between tenants, by rank within one.

    tenants     the one that has had least, for its weight, is next
    rank        1. small calls whose timeout was given with the call, or whose waiting has taken
                   half of their time: by when that ends; then by priority
                2. the others, and all large calls: by priority; the classes of size have turns;
                   within one by arrival

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time,
which each turn advances by its cost over the weight. A tenant that begins to wait starts one turn
behind the tenant that is served, so nobody saves up turns, and tenants that come with one call each
do not go before all others for ever. A tenant that comes back starts where it ended, unless the
others have come as far meanwhile, or none waited. Two tenants that both have calls waiting are
never further apart than one turn of each. The classes of size of one priority share the turns of
their tenant in the same way: all small calls are one class, and large ones are in a class if they
are within a factor of two.

To prevent starvation, each ``AGING``-th turn of a tenant goes to the small call that has waited
longest, whatever its kind. So a call is passed over at most ``AGING`` times for each that was there
before. The large call that has waited longest has a turn when the others had ``AGING`` - 1 times
the work of an item of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from math import ceil, frexp, inf, isclose, ldexp
from operator import attrgetter

from ..observe.record import ORDINARY, Call

#: Each turn of this number goes to the small call that has waited longest, whatever its kind; and
#: as much of the work to the large one.
#: Chosen by reasoning: an eighth of the turns prevents starvation, and deadlines and priorities
#: lose no more than that.
AGING = 8

#: What an item of a tenant costs is averaged over about so many calls.
#: Chosen by reasoning: a share follows a tenant whose items become longer within a few batches.
UNIT_ITEMS = 16

#: What an item costs at the least, so that a share is a number whatever the lengths are.
_LEAST_UNIT = 1e-9

#: What the calls of a group have in common, in the order of rank: for small calls with a timeout of
#: their own the deadline, rounded down, else infinity; the negative priority; the class of size.
_Kind = tuple[float, int, int]

#: The kinds without a deadline begin here.
_NO_DEADLINE = (inf,)

#: Deadlines are rounded by at most a sixteenth of the time until then, so that there are few
#: groups, however many calls wait.
_PRECISION = 5


_ARRIVED_AT, _DEADLINE = attrgetter("arrived_at"), attrgetter("deadline")
_KIND, _TAG = attrgetter("kind"), attrgetter("tag")


class CallGroup:
    """Calls of a tenant that go by arrival among each other."""

    __slots__ = ("calls", "kind", "left", "line", "size_class", "tag", "timed", "unit", "work")

    def __init__(self, line: _Line, kind: _Kind, tag: float) -> None:
        self.line = line
        self.kind = kind
        self.size_class = kind[2]  # 0 of small calls
        self.tag = tag  # the virtual time of the class, among those of its priority
        self.unit = 1.0  # what an item of a large call cost, of late
        self.work = 0.0  # what all cost that wait
        self.timed = 0.0  # what those of them cost that have a deadline
        #: By arrival, perhaps with some that have left, but not as the first.
        self.calls: deque[Call] = deque()
        self.left = 0  # of these

    def __iter__(self) -> Iterator[Call]:
        return (call for call in self.calls if call.group is self)

    def first_timed(self) -> Call | None:
        """The first call that has a deadline."""
        if self.calls[0].deadline < inf:  # as nearly always; it may cost nothing
            return self.calls[0]
        calls = self if self.timed else ()
        return next((call for call in calls if call.deadline < inf), None)

    def drop_left(self) -> None:
        """Let go of calls that have left: of the first ones, and of all if they may be many."""
        calls = self.calls
        while calls and calls[0].group is not self:
            calls.popleft()
            self.left -= 1
        if 2 * self.left > len(calls) + 64:
            self.calls, self.left = deque(self), 0


class _Line:
    """The calls of one tenant that wait."""

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.unit = 1.0  # what an item costs, on average
        self.place: tuple[float, int] = (0.0, 0)  # its virtual time, and what breaks ties
        self.groups: list[CallGroup] = []  # those with calls, by rank
        self._tags: dict[_Kind, float] = {}  # of classes of size without calls
        self._turns = 0  # that it had since a small call had one for its age
        # What others cost since a large call had a turn for its age, or the first one came.
        self._credit = 0.0
        self._aged: Call | None = None  # the call that ``head`` has just returned for its age

    @property
    def work(self) -> float:
        """What those cost that wait."""
        return sum([group.work for group in self.groups])

    def group_of(self, call: Call, size_class: int) -> CallGroup:
        """The group that a new call belongs to."""
        soon, options = inf, call.options
        if options.has_deadline and not size_class and call.deadline < inf:
            soon = call.deadline
            exponent = frexp(soon - call.arrived_at)[1]
            soon -= soon % ldexp(1.0, exponent - _PRECISION)
        kind = soon, -options.priority, size_class
        place = bisect_left(self.groups, kind, key=_KIND)
        if place == len(self.groups) or self.groups[place].kind != kind:
            self.groups.insert(place, self._begin(kind))
        return self.groups[place]

    def _begin(self, kind: _Kind) -> CallGroup:
        """A class of size does not save up turns, and does not forget what it had."""
        if kind[2] and not any(group.size_class for group in self.groups):
            self._credit = 0.0
        tags = [group.tag for group in self.groups if group.kind[:2] == kind[:2]]
        least = min(tags, default=0.0)
        return CallGroup(self, kind, max(least, self._tags.pop(kind, least)))

    def end(self, group: CallGroup) -> None:
        """No call of the group waits any more."""
        self.groups.remove(group)
        if not self.groups or len(self._tags) > 64:  # of as many priorities
            self._tags.clear()
        if self.groups and group.kind[0] == inf:
            self._tags[group.kind] = group.tag

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        groups = self.groups
        self._aged = None
        if len(groups) == 1:
            return groups[0].calls[0]
        if self._turns >= AGING - 1:
            self._aged = _oldest([each for each in reversed(groups) if not each.size_class])
        classes = groups[bisect_left(groups, _NO_DEADLINE, key=_KIND) :]
        large = _oldest([group for group in classes if group.size_class])
        is_due = large is not None and self._credit >= (AGING - 1) * large.group.unit
        if is_due and self._aged is None:
            self._aged = large
        if self._aged is not None:
            return self._aged
        urgent = [group.calls[0] for group in groups[:1] if group.kind[0] < inf]
        for group in classes:
            call = None if group.size_class else group.first_timed()
            if call is not None and 2 * now >= call.arrived_at + call.deadline:
                urgent.append(call)
        if urgent:
            return min(urgent, key=_DEADLINE)
        highest = classes[0].kind[1]
        return min([each for each in classes if each.kind[1] == highest], key=_TAG).calls[0]

    def served(self, call: Call, cost: float) -> None:
        """The call that ``head`` returned had its turn."""
        size_class, is_aged = call.group.size_class, call is self._aged
        self._aged = None
        self._turns = 0 if is_aged and not size_class else self._turns + 1
        self._credit = 0.0 if is_aged and size_class else self._credit + cost

    def ahead(self, call: Call, size_class: int, work: float) -> float:
        """A lower estimate of what is computed before a new call of the tenant is over.

        Args:
            work: of the call itself, which is not counted.
        """
        rank, has_deadline = -call.options.priority, call.options.has_deadline
        before = own = 0.0
        for group in self.groups:
            soon, other_rank, other_class = group.kind
            if soon < inf:
                before += group.work if size_class or soon <= call.deadline else 0.0
            elif other_rank > rank:
                pass  # though these may be due before
            elif size_class and other_class == size_class and other_rank == rank:
                own = group.work
            elif size_class:
                before += group.work
            elif not other_class and not has_deadline:
                before += group.timed  # it goes before the others when it is due
        # A large one is over when its class has had so much, and the others of its priority too.
        return own + min(before, own + work) if size_class else before


def _oldest(groups: Iterable[CallGroup]) -> Call | None:
    """The call of theirs that has waited longest."""
    return min([group.calls[0] for group in groups if group.calls], key=_ARRIVED_AT, default=None)


class TurnOrder:
    """Whose turn it is among calls of all tenants.

    Args:
        weights: of the tenants whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        #: Of the tenants that wait, and of those that had more than others and may come back.
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[float, int, _Line]] = []  # their places, sorted
        self._number = 0  # of the last place, or query of ``_served_before``
        self._shares: list[tuple[float, float, float]] = []  # see ``_served_before``
        self._shares_until = 0  # the number from which on they are made anew
        self._groups: dict[CallGroup, None] = {}  # those with calls, and ``sole``; an ordered set
        #: The group of all calls that wait, which go by arrival; None if there are several. It
        #: stays if it becomes empty, since the next call is most likely of its kind.
        self.sole: CallGroup | None = None
        self._ordinary: CallGroup | None = None  # the last one of calls with the usual options
        self._clock = 0.0  # the virtual time of the tenant that was served last
        self._cost = 1.0  # of its turn
        #: Whose turn it was last. Other tenants are not charged for items that go along.
        self._served: _Line | None = None

    def __iter__(self) -> Iterator[Call]:
        return chain.from_iterable([*self._groups])

    def forget(self) -> None:
        """No call waits any more: what the tenants had does not count later."""
        if len(self._order) > 1 and self.sole is not None:
            line = self.sole.line
            self._lines, self._order = {line.tenant: line}, [(*line.place, line)]

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; infinity if none waits."""
        call = _oldest(self._groups)
        return inf if call is None else call.arrived_at

    def add(self, call: Call, items: int, work: float, size_class: int) -> None:
        """The call waits from now on, with so many items, which cost so much."""
        group, is_ordinary = self._ordinary, call.options is ORDINARY and not size_class
        if group is None or group is not self.sole or not is_ordinary:
            tenant = call.options.tenant
            line = self._lines.get(tenant)
            if line is None:
                line = self._lines[tenant] = _Line(tenant, self._weights.get(tenant, 1.0))
                line.unit = max(work / items, _LEAST_UNIT)
                self._place(line, self._clock + self._cost / line.weight)
            group = line.group_of(call, size_class)
            group.unit = work / items or 1.0
            if group not in self._groups:
                sole = self.sole
                self._groups[group] = None
                self._find_sole()
                if sole is not None and not sole.calls:
                    self._end(sole)
            if is_ordinary:
                self._ordinary = group
        call.group = group
        group.calls.append(call)
        group.work += work
        if call.deadline < inf:
            group.timed += work

    def _find_sole(self) -> None:
        """There is another group, or one less."""
        groups = self._groups
        self.sole = next(iter(groups)) if len(groups) == 1 else None

    def _place(self, line: _Line, virtual: float) -> None:
        # The number breaks ties: the tenant that was served first is served first again.
        self._number += 1
        line.place = virtual, self._number
        insort(self._order, (virtual, self._number, line))

    def _forget_before(self, virtual: float) -> None:
        """Tenants that do not wait are forgotten if they had less, and less than those that do."""
        order = self._order
        while order[0][0] < virtual and not order[0][2].groups:
            del self._lines[order.pop(0)[2].tenant]

    def remove(self, call: Call, work: float, *, is_last: bool = True) -> None:
        """Items of the call that cost so much, perhaps not the last ones here, wait no more."""
        group: CallGroup = call.group
        group.work -= work
        if call.deadline < inf:
            group.timed -= work
        if is_last:
            call.group = None
            group.left += 1
            group.drop_left()
            if not group.calls and group is not self.sole:
                self._end(group)

    def _end(self, group: CallGroup) -> None:
        group.line.end(group)
        del self._groups[group]
        self._find_sole()

    def head(self, now: float) -> Call:
        """Whose turn it is; there must be one."""
        if self.sole is not None:
            return self.sole.calls[0]
        self._forget_before(inf)
        return self._order[0][2].head(now)

    def next_calls(self, items: int) -> Iterator[tuple[Call, int]]:
        """About so many items that are next: calls by rank, and how many items of each.

        Each tenant has its share by weight, whatever it had before.
        """
        waiting = (line for _, _, line in self._order if line.groups)
        lines = [*islice(waiting, items)]  # at most one for each item
        total = sum([line.weight / line.unit for line in lines])
        for line in lines:
            room = ceil(items * (line.weight / line.unit / total))
            for call in chain.from_iterable(line.groups):
                pending = call.pending
                yield call, pending if pending < room else room
                room -= pending
                if room <= 0:
                    break

    def took(
        self, call: Call, items: int, work: float, *, is_last: bool, goes_along: bool = False
    ) -> None:
        """What ``head`` said had its turn, with so many items; or others go along with those.

        A tenant is charged for those that go along in its own turn only. Else one that always has
        some would have no turn any more, and its odd items would wait for ever.
        """
        group: CallGroup = call.group
        line = group.line
        if group is self.sole:
            if is_last:
                call.group = None
                group.left += 1
            self.sole_took(work, work if call.deadline < inf else 0.0)
            return
        cost = work or float(items)  # else a tenant with no others would always be next
        group.unit = cost / items
        line.unit += (max(group.unit, _LEAST_UNIT) - line.unit) / UNIT_ITEMS
        if not goes_along:
            self._clock, self._cost, self._served = line.place[0], cost, line
            line.served(call, cost)
        if line is self._served:
            group.tag += cost
            self._charge(line, cost)
        self.remove(call, work, is_last=is_last)

    def sole_took(self, work: float, timed: float) -> None:
        """The first calls of the sole group, which need no turns, had so much."""
        group = self.sole
        assert group is not None
        group.tag += work
        if len(self._order) > 1:
            line = group.line
            self._charge(line, work)
            self._clock = line.place[0] - self._cost / line.weight  # of the last of these calls
            self._forget_before(self._clock)
        group.work -= work
        group.timed -= timed
        if group.left:
            group.drop_left()

    def _charge(self, line: _Line, cost: float) -> None:
        """The tenant had so much."""
        virtual, _ = line.place
        del self._order[bisect_left(self._order, line.place)]
        self._place(line, virtual + cost / line.weight)

    def ahead(self, call: Call, size_class: int, work: float, unit: float) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over.

        Args:
            work: of the call itself, which is not counted.
            unit: what an item costs, on average.
        """
        tenant = call.options.tenant
        line = self._lines.get(tenant)
        own = 0.0 if line is None else line.ahead(call, size_class, work)
        if not self._lines or (line is not None and len(self._lines) == 1):
            return own
        # It has turns with the other tenants until its end if it is large, and else until its
        # turn.
        share = own + work if size_class else max(own, unit)
        turns = self._served_before(share / self._weights.get(tenant, 1.0))
        return max(own, turns - work) if size_class else turns

    def _served_before(self, share: float) -> float:
        """The work of all tenants until each has had so much for its weight.

        As of some turns ago, at most as many as there are tenants: to look at all takes time.
        """
        self._number += 1
        if self._number >= self._shares_until:
            self._shares_until = self._number + len(self._lines)
            lines = [(line.work, line.weight) for line in self._lines.values()]
            lines.sort(key=lambda line: line[0] / line[1])
            before, weights = 0.0, sum(weight for _, weight in lines)
            self._shares = []
            for work, weight in lines:
                self._shares.append((work / weight, before, weights))
                before, weights = before + work, weights - weight
            self._shares.append((inf, before, 0.0))
        _, before, weights = self._shares[bisect_left(self._shares, (share, 0.0, 0.0))]
        return before + share * weights

    def check_invariants(self, works: Mapping[Call, float]) -> None:
        """Raise ``AssertionError`` if it differs from what all that wait cost. For tests."""
        assert {*self} == {*works}
        lines = [*self._lines.values()]
        assert [place[:2] for place in self._order] == sorted([line.place for line in lines])
        assert all(line.groups == sorted(line.groups, key=_KIND) for line in lines)
        assert {*self._groups} == {group for line in lines for group in line.groups}
        for group in self._groups:
            assert not group.calls or group.calls[0].group is group
            work = sum([works[call] for call in group])
            assert isclose(group.work, work, abs_tol=1e-6 * (1.0 + work))
