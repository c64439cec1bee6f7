"""When to send what waits to workers that step: at once, one item at a time.

A worker of a model of steps has places, one for each item that it steps. The scheduler fills those
that are free, and sends a few items more, so that a place that becomes free is taken before the
next step: to ask for one would take a step. Who waits is better kept here than there, since here
deadlines, priorities and tenants are looked at to the last. So they are few.
"""

from __future__ import annotations

import math
from typing import Any

from ..observe.record import Reason
from .cost import LearnedCost
from .policy import Backlog, Decision
from .tuning import DECK_SHARE


def room_of_places(places: int) -> int:
    """How many items a worker holds that steps so many of them."""
    return places + max(1, math.ceil(places * DECK_SHARE))


class StepPolicy:
    """As ``Policy``: each item goes as soon as there is room for it.

    Attributes:
        cost: that has seen nothing. How long items take is not known before they are over.
    """

    def __init__(self) -> None:
        self.near = self.margin = 0.0
        self.cost = LearnedCost()
        self._one = Decision(1, Reason.PLACE, -math.inf, math.inf, Reason.COST, 1)

    def arrived(self, *_: Any) -> bool:
        """Nothing is learned of it; nor of the others."""
        return False

    def time_passed(self, *_: Any) -> None:
        pass

    def was_cut(self, *_: Any) -> None:
        pass

    def came_back(self, *_: Any) -> None:
        pass

    def full(self) -> int:
        return 1

    def duration(self, items: float) -> float:  # noqa: ARG002
        return 0.0

    def least_duration(self, *_: Any) -> float:
        return 0.0

    def finish(self, *_: Any) -> None:
        """How long an item takes is not known before."""

    def decide(self, backlog: Backlog) -> Decision:  # noqa: ARG002
        return self._one

    def decide_ahead(self, backlog: Backlog) -> Decision:  # noqa: ARG002
        return self._one

    def decide_early(self, *_: Any) -> Decision:
        return self._one
