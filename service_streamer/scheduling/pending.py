"""Calls that wait: oldest first, without those that nobody waits for, and those that come too late.

A call that is over is not searched for in the queue, only skipped when its turn comes; so ending
one costs the same however many wait.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from .records import Call, Span

__all__ = ["Deadlines", "Forecast", "Pending", "Throughput"]


class Pending:
    """The queue of calls with items that are not cut yet.

    Attributes:
        items: how many those are, of calls that are not over.
    """

    __slots__ = ("_calls", "_over", "items")

    def __init__(self) -> None:
        self.items = 0
        self._calls: deque[Call] = deque()
        self._over = 0  # calls in the queue that are over

    def __iter__(self) -> Any:
        return (call for call in self._calls if not call.is_over)

    def add(self, call: Call) -> None:
        self._calls.append(call)
        self.items += call.pending

    def drop(self, call: Call) -> None:
        """The call is over; its items are not to be cut."""
        self.items -= call.pending
        call.pending = 0
        self._over += 1
        # Or the queue would fill up with them behind a hung worker. This costs a constant for each,
        # amortised; removing each at once would cost a search each.
        if self._over > 32 and self._over * 2 > len(self._calls):
            self._calls = deque(self)
            self._over = 0

    def oldest_arrival(self) -> float:
        """When the first call arrived; there must be one."""
        while self._calls[0].is_over:
            self._skip()
        return self._calls[0].arrived_at

    def take(
        self, room: int, now: float, finish: float
    ) -> tuple[list[Span], list[Any], list[Call]]:
        """Cut at most ``room`` items: oldest first, but nothing that comes too late.

        A call whose time ends before ``finish``, when the batch is expected back, gives way as long
        as there are others to fill the batch. Under overload the oldest calls are always those
        whose time is about to end: to compute them would waste every batch. Without that need such
        a call is computed, since the expectation may be wrong.

        Returns:
            The spans, their payloads, and the calls that were left out for good.
        """
        spans: list[Span] = []
        payloads: list[Any] = []
        late: list[Call] = []
        calls = self._calls
        while room and calls:
            call = calls[0]
            if call.is_over:
                self._skip()
                continue
            size = call.pending
            if call.deadline <= now or (call.deadline < finish and self.items > room):
                calls.popleft()
                self.items -= size
                call.pending = 0
                late.append(call)
                continue
            size = min(size, room)
            start = call.size - call.pending
            spans.append((call, start, start + size))
            payloads += call.payloads[start : start + size]
            room -= size
            self.items -= size
            call.pending -= size
            call.is_running = True
            if not call.pending:
                calls.popleft()
        return spans, payloads, late

    def check_invariants(self) -> None:
        assert self.items == sum(call.pending for call in self)
        assert all(call.pending for call in self)
        assert self._over == sum(call.is_over for call in self._calls)

    def _skip(self) -> None:
        self._calls.popleft()
        self._over -= 1


class Timed(Protocol):
    """Something that ends at its deadline, if it is not over before."""

    deadline: float
    is_over: bool


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


class Forecast:
    """How long a batch takes, from being cut to being back, while more wait than fit into one."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=7)  # odd, for a median; else arbitrary

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
        return 1.25 * max(sample for sample in samples if sample <= 2 * usual)


class Throughput:
    """How many items come back per second while more wait than fit into a batch.

    Attributes:
        rate: infinity while that is not known.
    """

    __slots__ = ("_batches", "_items", "_rate_before", "_since", "rate")

    #: Batches per sample. Enough for those of several workers, which come back together.
    _SAMPLE = 16

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing waits: what was learned will not hold the next time."""
        self.rate = math.inf
        self._rate_before = math.inf
        self._since = -1.0
        self._batches = self._items = 0

    def observe(self, items: int, now: float) -> None:
        """A batch came back, and others wait."""
        if self._since < 0:
            self._since = now
            return
        self._batches += 1
        self._items += items
        if self._batches >= self._SAMPLE and now > self._since:
            sample = self._items / (now - self._since)
            # The better of two, so that one slow batch does not make everything look hopeless.
            before, self._rate_before = self._rate_before, sample
            self.rate = math.inf if before == math.inf else max(sample, before)
            self._since = now
            self._batches = self._items = 0
