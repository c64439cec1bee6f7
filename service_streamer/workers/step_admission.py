"""How many items a worker starts before its next step. Pure: seconds come in, a number goes out.

While items start, those that run wait: a language model reads prompts, and no text goes on. To put
starts off saves no time in all, since the work stays the same, and others run by then. But to start
many at once makes a long pause between two outputs of all who run. So as many start as take about
one step, and always one, so that each gets its turn.
"""

from __future__ import annotations

import math

from ..batching.cost import LearnedCost

#: Before each step, as many items start as take this many steps' time.
#: Chosen by reasoning: outputs then come at half their pace at worst while items start, and where a
#: start is shorter than a step, most places are filled in one or two steps.
STALL_STEPS = 1.0
#: Or as many as take this many times what one takes that starts anyway.
#: Chosen by reasoning: where it is the call of ``start`` that costs, and not its items, the others
#: come along for little.
STALL_STARTS = 1.5
#: Weight of the newest step in what a step takes.
#: Chosen by reasoning: a few steps, since their number of states changes as fast.
STEP_RATE = 0.25
#: A step counts at most this many times what steps have taken.
#: Chosen by reasoning: one that was held up says nothing of the next.
LONGEST_STEP = 2.0
#: Weight of the newest item in what a new one costs.
#: Chosen by reasoning: items differ, so that a mean of some is needed.
COST_RATE = 0.1


class StepAdmission:
    """Learns what starts and steps take and what new items cost. Not thread-safe: one per worker.

    Args:
        cost: of each state, if it is the same for all.

    Attributes:
        step: seconds of a step, lately; 0 while none is known.
        cost: of a new item's state, lately; None while none is known.
        growth: by how much that grows until it is done.
    """

    __slots__ = ("_has_grown", "_starts", "cost", "growth", "step")

    def __init__(self, cost: float | None = None) -> None:
        self._starts = LearnedCost()
        self.step = 0.0
        self.cost = cost
        self.growth = 0.0
        self._has_grown = False

    def started(self, size: int, seconds: float) -> None:
        """So many items have started together, without an error."""
        self._starts.observe(size, seconds)

    def costs(self, cost: float) -> None:
        """A state that has just started costs this much."""
        self.cost = cost if self.cost is None else self.cost + (cost - self.cost) * COST_RATE

    def grew(self, growth: float) -> None:
        """A state that is done costs so much more than when it started."""
        self.growth += (growth - self.growth) * (COST_RATE if self._has_grown else 1.0)
        self._has_grown = True

    def stepped(self, seconds: float) -> None:
        """A step took so many seconds, without an error."""
        if self.step:
            self.step += (min(seconds, LONGEST_STEP * self.step) - self.step) * STEP_RATE
        else:
            self.step = seconds

    def most(self, running: int) -> float:
        """How many items may start now: at least one, and all if nothing runs that would wait."""
        starts = self._starts
        if not running or not starts.is_known:
            return math.inf
        allowed = max(STALL_STEPS * self.step, STALL_STARTS * starts.duration(1))
        if starts.per_unit * 1e9 <= allowed:  # each takes nothing beside the call
            return math.inf
        return max(1, int((allowed - starts.base) / starts.per_unit))
