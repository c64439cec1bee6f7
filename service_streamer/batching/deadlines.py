"""Deadlines of calls: when they end, when a batch is back, and what size of it is in time."""

from __future__ import annotations

import heapq
import math
from typing import Generic, NamedTuple, Protocol, TypeVar

from . import tuning

#: Of items, so that a batch which is back just in time is not one item smaller.
_ROUNDING = 1e-9


class Finish(NamedTuple):
    """When a batch is back, by its size; as far as that is known.

    Attributes:
        likely: a batch without items, as predicted.
        earliest: the same, if it is as fast as it hardly ever is.
        each: what each item adds, seconds.
        least: the smallest batch that is worth it for the sake of its first call. The others have
            to wait for another batch. Infinity for none.
        safely: a batch without items, if it is as slow as it hardly ever is.
        safely_each: what each item adds then, seconds.
    """

    likely: float
    earliest: float = -math.inf
    each: float = 0.0
    least: float = math.inf
    safely: float = math.inf
    safely_each: float = 0.0

    def last(self, now: float, size: int) -> float:
        """When a batch of that size is likely back: a call with a later deadline is in time."""
        return max(now, self.likely + self.each * size)

    def room(self, deadline: float, most: int) -> int:
        """The most items of a batch that is surely back by then, if a smaller one is worth it."""
        if self.least >= most or not self.safely_each:
            return most
        fits = int((deadline - self.safely) / self.safely_each + _ROUNDING)
        return min(most, fits) if fits >= self.least else most


#: Nothing is known, so no call is late before its time has ended.
UNKNOWN = Finish(-math.inf)


class Timed(Protocol):
    """Something that ends at its deadline, if it is not over before."""

    deadline: float

    @property
    def is_over(self) -> bool:
        """Answered, failed or given up."""


TimedCall = TypeVar("TimedCall", bound=Timed)


class Deadlines(Generic[TimedCall]):
    """When the time of calls ends, of those that do not see to it themselves."""

    def __init__(self) -> None:
        #: When to ask ``ended``; infinity for never.
        self.next = math.inf
        self._calls: list[tuple[float, int, TimedCall]] = []  # a heap
        self._count = 0  # keeps calls from being compared
        self._room = 64  # beyond this, look for calls that are over

    def add(self, call: TimedCall) -> None:
        if len(self._calls) >= self._room:
            self._calls = [entry for entry in self._calls if not entry[2].is_over]
            heapq.heapify(self._calls)
            self._room = max(64, 2 * len(self._calls))
        self._count += 1
        heapq.heappush(self._calls, (call.deadline, self._count, call))
        self.next = self._calls[0][0]

    def ended(self, now: float) -> list[TimedCall]:
        """The calls whose time has ended, and that are not over."""
        calls = self._calls
        ended: list[TimedCall] = []
        while calls and (calls[0][0] <= now or calls[0][2].is_over):
            call = heapq.heappop(calls)[2]
            if not call.is_over:
                ended.append(call)
        self.next = calls[0][0] if calls else math.inf
        return ended


def size_in_time(size: int, base: float, item: float, total: float, left: float) -> int:
    """How many of so many items to compute at once, of calls with deadlines.

    A batch that takes most of the time until a deadline makes the calls late that just missed it.
    So it is bounded. And it is smaller still if the first call would be late otherwise, and that
    costs little throughput. If it costs much, that call gives way to others.

    Args:
        size: the items; at least one.
        base, item: what a batch takes, and what each item adds, seconds; with a margin.
        total: from the arrival of the first call to its deadline, seconds.
        left: from now to its deadline, seconds.

    Returns:
        At least 1, at most ``size``.
    """
    most = tuning.DEADLINE_SHARE * total - base
    largest = min(float(size), (total - base) / item)
    if most < size * item and largest >= 1.0:
        least = tuning.LEAST_SPEED * largest / (base + largest * item)
        fast = least * base / (1.0 - least * item)  # the size with that speed
        size = min(size, max(1, int(max(most / item, fast))))
    fits = int(max(0.0, left - base) / item)
    if 1 <= fits < size and fits * (base + size * item) >= tuning.LEAST_SPEED * size * (
        base + fits * item
    ):
        return fits
    return size


def least_in_time(size: int, base: float, item: float) -> int:
    """The smallest batch that is worth it to keep the deadline of its first call.

    Args:
        size: items that a batch would have otherwise; at least one.
        base, item: what a batch takes, and what each item adds, seconds.
    """
    if base <= tuning.FLAT * item:
        return 1  # the items are nearly all of it
    speed = tuning.LEAST_SPEED_OF_FIRST * size / (base + size * item)
    return math.ceil(speed * base / (1.0 - speed * item))
