"""What is known of overload: deadlines of calls, and how fast batches come back."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from .tuning import (
    DEADLINE_SHARE,
    FLAT,
    FORECAST_BATCHES,
    FORECAST_MARGIN,
    FORECAST_OUTLIER,
    LEAST_SPEED,
    LEAST_SPEED_OF_FIRST,
    THROUGHPUT_BATCHES,
)

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


class Forecast:
    """How long a batch takes, from being cut to being back, while more wait than fit into one."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=FORECAST_BATCHES)

    def reset(self) -> None:
        """Nothing waits: what was learned will not hold the next time."""
        self._samples.clear()

    def observe(self, took: float) -> None:
        self._samples.append(took)

    def duration(self) -> float:
        """Seconds: somewhat more than the slowest of late; 0 while little is known.

        Without those beyond twice the median: a first batch that compiles for seconds says nothing
        about the next, and must not make all calls look late.
        """
        if len(self._samples) < 3:
            return 0.0
        samples = sorted(self._samples)
        usual = samples[(len(samples) - 1) // 2]
        longest = max(sample for sample in samples if sample <= FORECAST_OUTLIER * usual)
        return FORECAST_MARGIN * longest


class Throughput:
    """How much work comes back per second while more waits than fits into a batch.

    Attributes:
        rate: infinity while that is not known.
    """

    __slots__ = ("_batches", "_rate_before", "_since", "_work", "rate")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing waits: what was learned will not hold the next time."""
        self.rate = math.inf
        self._rate_before = math.inf
        self._since = -1.0
        self._batches, self._work = 0, 0.0

    def observe(self, work: float, now: float) -> None:
        """A batch came back, and others wait."""
        if self._since < 0:
            self._since = now
            return
        self._batches += 1
        self._work += work
        if self._batches >= THROUGHPUT_BATCHES and now > self._since:
            sample = self._work / (now - self._since)
            # The better of two, so that one slow batch does not make everything look hopeless.
            before, self._rate_before = self._rate_before, sample
            self.rate = math.inf if before == math.inf else max(sample, before)
            self._since = now
            self._batches, self._work = 0, 0.0


class Overload:
    """Whether more waits than workers keep up with, and how fast batches come back then.

    Args:
        full: see below.

    Attributes:
        full: items of a full batch, as the policy has it now.
        is_behind: whether more waits than workers keep up with, so that a call may be hopeless.
    """

    __slots__ = ("_forecast", "_throughput", "full", "is_behind")

    def __init__(self, full: int) -> None:
        self._forecast = Forecast()
        self._throughput = Throughput()
        self.full = full
        self.is_behind = False

    def came_back(self, work: float, took: float, waiting: int, now: float) -> None:
        """A batch came back: learn of it, but only while there is overload.

        Args:
            work: of the batch, in units of cost; 0 if it has been counted before.
            took: from when it was cut, seconds.
            waiting: items that are not cut.
        """
        if waiting >= self.full:
            if work:
                self._throughput.observe(work, now)
            self._forecast.observe(took)
            self.is_behind = True
        elif self.is_behind:
            self._throughput.reset()
            self._forecast.reset()
            self.is_behind = False

    @property
    def rate(self) -> float:
        """Units of cost that come back per second; infinity while that is not known."""
        return self._throughput.rate

    def duration(self) -> float:
        """Of a batch, from being cut to being back: as of ``Forecast``."""
        return self._forecast.duration()


class Timed(Protocol):
    """Something that ends at its deadline, if it is not over before."""

    deadline: float

    @property
    def is_over(self) -> bool:
        """Answered, failed or given up."""


TimedCall = TypeVar("TimedCall", bound=Timed)


class Deadlines(Generic[TimedCall]):
    """When the time of calls ends, of those that do not see to it themselves."""

    __slots__ = ("_calls", "_count", "_room", "next")

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
    most = DEADLINE_SHARE * total - base
    largest = min(float(size), (total - base) / item)
    if most < size * item and largest >= 1.0:
        least = LEAST_SPEED * largest / (base + largest * item)
        fast = least * base / (1.0 - least * item)  # the size with that speed
        size = min(size, max(1, int(max(most / item, fast))))
    fits = int(max(0.0, left - base) / item)
    if 1 <= fits < size and fits * (base + size * item) >= LEAST_SPEED * size * (
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
    if base <= FLAT * item:
        return 1  # the items are nearly all of it
    speed = LEAST_SPEED_OF_FIRST * size / (base + size * item)
    return math.ceil(speed * base / (1.0 - speed * item))
