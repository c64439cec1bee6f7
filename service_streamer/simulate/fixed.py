"""The policy that others have: a fixed wait for a fixed batch size. For comparison."""

from __future__ import annotations

import math
from typing import Any

from ..batching.cost import LearnedCost
from ..batching.policy import Cut
from ..observe.record import Reason

__all__ = ["FixedWait"]


class FixedWait:
    """Waits until there is a full batch, or the oldest item has waited for so long.

    Args:
        batch_size: items of a full batch.
        wait: seconds.
    """

    def __init__(self, batch_size: int, wait: float) -> None:
        self._batch_size = batch_size
        self._wait = wait
        self.cost = LearnedCost()  # that has seen nothing
        self.max_cost = math.inf
        self.ahead_from = batch_size
        self.is_trial = False

    def arrived(self, *_: Any) -> None:
        """Nothing is learned."""

    def sent(self, *_: Any) -> None:
        """Nothing is learned."""

    def came_back(self, *_: Any) -> None:
        """Nothing is learned."""

    def full(self) -> int:
        return self._batch_size

    def ahead(self, waiting: int, *_: int) -> int:
        return self._batch_size if waiting >= self._batch_size else 0

    def decide(
        self,
        waiting: int,
        free: int,  # noqa: ARG002
        slots: int,  # noqa: ARG002
        in_flight: int,  # noqa: ARG002
        oldest: float,
        deadline: float,  # noqa: ARG002
        now: float,
    ) -> Cut:
        if waiting >= self._batch_size:
            return now, self._batch_size, Reason.FULL
        wait_until = oldest + self._wait
        return wait_until, waiting, Reason.MAX_LATENCY
