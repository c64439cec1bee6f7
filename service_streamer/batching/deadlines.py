"""When the time of calls ends, of those that do not see to it themselves."""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A call, here or of another process."""

    @property
    def deadline(self) -> float:
        """When its time ends; infinity for never."""

    @property
    def is_over(self) -> bool:
        """Answered, failed or given up."""


TimedCall = TypeVar("TimedCall", bound=Timed)


class Deadlines(Generic[TimedCall]):
    """Which calls to look at when. They are not searched for when they are over, only skipped."""

    def __init__(self) -> None:
        #: When to ask ``ended``; infinity for never.
        self.next = math.inf
        self._calls: list[tuple[float, int, TimedCall]] = []  # a heap
        self._count = 0  # keeps calls from being compared
        self._room = 64  # beyond this, look for calls that are over

    def add(self, at: float, call: TimedCall) -> None:
        if len(self._calls) >= self._room:
            self._calls = [entry for entry in self._calls if not entry[2].is_over]
            heapq.heapify(self._calls)
            self._room = max(64, 2 * len(self._calls))
        self._count += 1
        heapq.heappush(self._calls, (at, self._count, call))
        self.next = self._calls[0][0]

    def ended(self, now: float) -> list[TimedCall]:
        """The calls whose time has come, and that are not over."""
        calls = self._calls
        ended: list[TimedCall] = []
        while calls and (calls[0][0] <= now or calls[0][2].is_over):
            call = heapq.heappop(calls)[2]
            if not call.is_over:
                ended.append(call)
        self.next = calls[0][0] if calls else math.inf
        return ended
