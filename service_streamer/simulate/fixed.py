"""A fixed wait for a fixed batch size, as other servers have it. For comparison."""

from __future__ import annotations

import math
from typing import Any

from ..batching.cost import LearnedCost
from ..batching.policy import Decision
from ..observe.record import Reason

__all__ = ["FixedWait"]


class FixedWait:
    """Waits until there is a full batch, or the oldest item has waited for so long.

    Args:
        batch_size: items of a full batch.
        wait: seconds.
        max_batch_cost: the most that a batch may cost.
    """

    def __init__(self, batch_size: int, wait: float, max_batch_cost: float = math.inf) -> None:
        self._batch_size = batch_size
        self._wait = wait
        self._max_cost = max_batch_cost
        self._full = self._cut(batch_size, Reason.FULL)
        self._nothing = self._cut(0, Reason.ALONE)
        self.cost = LearnedCost()  # that has seen nothing

    def _cut(self, size: int, reason: Reason, wait_until: float = -math.inf) -> Decision:
        return Decision(
            size, reason, wait_until, self._max_cost, Reason.COST, self._batch_size, None
        )

    def arrived(self, *_: Any) -> None:
        """Nothing is learned."""

    def time_passed(self, *_: Any) -> None:
        """Nothing is learned."""

    def was_cut(self, *_: Any) -> None:
        """Nothing is learned."""

    def came_back(self, *_: Any) -> None:
        """Nothing is learned."""

    def full(self) -> int:
        return self._batch_size

    def decide_ahead(self, waiting: int, *_: Any) -> Decision:
        return self._full if waiting >= self._batch_size else self._nothing

    def decide(
        self,
        waiting: int,
        free: int,  # noqa: ARG002
        slots: int,  # noqa: ARG002
        in_flight: int,  # noqa: ARG002
        oldest: float,
        deadline: float,  # noqa: ARG002
        last: Decision,  # noqa: ARG002
        now: float,
    ) -> Decision:
        if waiting >= self._batch_size:
            return self._full
        wait_until = oldest + self._wait
        if wait_until > now:
            return self._cut(0, Reason.MAX_LATENCY, wait_until)
        return self._cut(waiting, Reason.MAX_LATENCY)
