"""The figures: the highest rate that holds a deadline, and mean latency below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from policies.optimum import optimum
from policies.rivals import Rival, learned, rivals
from policies.service import Outcome, noisy, serve
from policies.work import ARRIVALS, BATCH_SIZE, MODELS, Model, at_rate

__all__ = ["Cell", "Found", "Task", "goodput", "goodputs", "latencies", "measured"]

#: The share of jobs that may miss their deadline.
MISSED = 0.01
#: The share of jobs at the start that do not count: a scheduler that learns has seen nothing yet.
WARM_UP = 0.1
#: From one tried rate down to the next; and how exactly the highest one is found.
_STEP, _EXACT = 0.9, 0.005
#: Below this share of what workers can compute a goodput counts as none.
_LEAST = 0.01


class Cell(NamedTuple):
    """One case.

    Attributes:
        arrivals: a name in ``ARRIVALS``.
        model: a name in ``MODELS``.
        workers: how many there are.
        level: the deadline in single runs; or, of a mean latency, the load as a share of what
            workers can compute.
    """

    arrivals: str
    model: str
    workers: int
    level: float


class Found(NamedTuple):
    """What one policy reaches in a cell.

    Attributes:
        value: jobs per second of a goodput, seconds of a latency.
        setting: with which that is.
    """

    value: float
    setting: str


class _Case:
    """The jobs of a cell, at any rate.

    Args:
        noise: the standard deviation of what batches take, as a share. No policy knows it.
    """

    def __init__(self, cell: Cell, times: Sequence[float], noise: float = 0.0) -> None:
        self._noise = noise
        self.model: Model = MODELS[cell.model]
        self.most = self.model.capacity * cell.workers
        self._times = times
        self._duration = self.model.duration()
        self._warm_up = int(WARM_UP * len(times))

    def run(self, rival: Rival, rate: float, deadline: float = math.inf) -> Outcome:
        jobs = at_rate(self._times, rate, deadline, self.model.lengths)
        allowed = math.inf
        if deadline < math.inf:
            allowed = MISSED * (len(jobs) - self._warm_up)
        return serve(
            rival.make(self._duration),
            jobs,
            noisy(self._duration, self._noise) if self._noise else self._duration,
            warm_up=self._warm_up,
            most_missed=allowed,
        )


def goodput(case: _Case, rival: Rival, deadline: float, known: float = 0.0) -> float:
    """The highest rate at which 99 % of the jobs are in time; 0 if there is none above ``known``.

    Rates are tried from the top, since a policy that waits may miss deadlines at low ones, too.
    """
    if known and not case.run(rival, known * (1 + _EXACT), deadline).is_complete:
        return 0.0
    above = rate = 1.1 * case.most
    while not case.run(rival, rate, deadline).is_complete:
        above = rate
        rate *= _STEP
        if rate < max(known, _LEAST * case.most):
            if not known:
                return 0.0
            rate = known * (1 + _EXACT)
            break
    below = rate
    while above / below > 1 + _EXACT:
        middle = math.sqrt(above * below)
        if case.run(rival, middle, deadline).is_complete:
            below = middle
        else:
            above = middle
    return below


def goodputs(
    cell: Cell,
    times: Sequence[float] | None = None,
    known: Mapping[str, Found] | None = None,
    noise: float = 0.0,
) -> dict[str, Found]:
    """The highest rate of ours, and of the best published policy with the best of its settings.

    Args:
        times: of arrivals, at a rate of 1, in place of those of ``ARRIVALS``.
        known: of the others, if it was found before.
        noise: of what batches take, as a share.

    Returns:
        Jobs per second. Of the published policies there are only those that were the best so far
        when they were tried: the others cannot be the best, and finding out how far they are from
        it would take most of the time.
    """
    case = _Case(cell, times or ARRIVALS[cell.arrivals](), noise)
    deadline = cell.level * case.model.single
    ours = learned(case.model, cell.workers)
    found = {ours.policy: Found(goodput(case, ours, deadline), ours.setting)}
    if known is not None:
        return {**known, **found}
    best = 0.0
    for rival in rivals(case.model, cell.workers, deadline):
        rate = goodput(case, rival, deadline, best)
        if rate > best or not best:
            best = rate
            found[rival.policy] = Found(rate, rival.setting)
    return found


def latencies(
    cell: Cell,
    times: Sequence[float] | None = None,
    known: Mapping[str, Found] | None = None,
    noise: float = 0.0,
) -> dict[str, Found]:
    """The least mean latency of each policy that needs no deadline, seconds.

    For Poisson arrivals at one worker, whose items have no lengths, "bound" is the least that any
    policy can have.

    Args:
        times, known, noise: as those of ``goodputs``.
    """
    case = _Case(cell, times or ARRIVALS[cell.arrivals](), noise)
    rate = cell.level * case.most
    ours = learned(case.model, cell.workers)
    found = {ours.policy: Found(case.run(ours, rate).mean, ours.setting)}
    if known is not None:
        return {**known, **found}
    for rival in rivals(case.model, cell.workers, math.inf):
        mean = case.run(rival, rate).mean
        if rival.policy not in found or mean < found[rival.policy].value:
            found[rival.policy] = Found(mean, rival.setting)
    if cell.arrivals == "Poisson" and cell.workers == 1 and not (case.model.lengths or noise):
        cost = case.model.cost
        solved = optimum(lambda size: cost.duration(size, size), rate, batch_size=BATCH_SIZE)
        found["bound"] = Found(solved.mean, "knows rate and cost")
    return found


_MEASURES: dict[str, Callable[..., dict[str, Found]]] = {
    "goodput": goodputs,
    "latency": latencies,
}


#: "goodput" or "latency", the cell, arrivals in place of those that it names, what is known, and
#: the noise.
Task: TypeAlias = tuple[str, Cell, Sequence[float] | None, Mapping[str, Found] | None, float]


def measured(task: Task) -> dict[str, Any]:
    """One figure of each policy in one cell, for the record."""
    measure, cell, times, known, noise = task
    found = _MEASURES[measure](cell, times, known, noise)
    return {
        "measure": measure,
        **cell._asdict(),
        "policies": {policy: each._asdict() for policy, each in found.items()},
    }
