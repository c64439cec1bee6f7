"""The schedulers that are compared, and the settings of the published ones that are tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from policies.learned import Learned
from policies.published import NEXUS_SHARE, Aimd, Deferred, EarlyDrop, FixedWait, TokenBudget
from policies.service import Duration, Scheduler
from policies.work import BATCH_SIZE, Model

__all__ = ["Rival", "learned", "rivals"]

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_WAITED_FOR = (8, 16, 32, 64)
#: Of a fixed wait, as shares of the deadline; and in single runs, where there is no deadline. What
#: does not wait is among the token budgets.
_SHARES = (0.1, 0.25, 0.5)
_RUNS = (0.1, 0.4, 1.6)
#: By how much Clipper's batches grow, which its paper leaves open; and its objective for a batch,
#: as a share of the deadline, since jobs wait for a batch too.
_STEPS = (1, 4)
_OBJECTIVES = (0.5, 1.0)

Make: TypeAlias = Callable[[Duration], Scheduler]


class Rival(NamedTuple):
    """One policy with one setting.

    Attributes:
        policy: its name in the tables.
        setting: in words.
        make: makes one that has seen nothing.
    """

    policy: str
    setting: str
    make: Make


def learned(model: Model, workers: int) -> Rival:
    """Our scheduler."""
    has_lengths = model.lengths is not None
    return Rival(
        "ours", "defaults", lambda _: Learned(workers, BATCH_SIZE, has_lengths=has_lengths)
    )


def rivals(model: Model, workers: int, deadline: float) -> Iterator[Rival]:
    """The published policies, with each of their settings.

    Args:
        deadline: of each job after its arrival, seconds; infinity for none: then there are only
            those that need none.
    """
    if deadline < math.inf:
        yield from _with_deadlines(model, workers, deadline)
    for size in _SIZES:
        budget = size * model.typical
        yield Rival(
            "token budget",
            f"{budget:g} tokens",
            lambda duration, budget=budget: TokenBudget(  # type: ignore[misc]
                workers, duration, BATCH_SIZE, budget
            ),
        )
    for size in _WAITED_FOR:
        waits = [share * deadline for share in _SHARES]
        if deadline == math.inf:
            waits = [runs * model.single for runs in _RUNS]
        for wait in waits:
            yield Rival(
                "fixed",
                f"{size} items, {1e3 * wait:.3g} ms",
                lambda duration, size=size, wait=wait: FixedWait(  # type: ignore[misc]
                    workers, duration, size, wait
                ),
            )


def _with_deadlines(model: Model, workers: int, deadline: float) -> Iterator[Rival]:
    yield Rival("Symphony", "none", lambda duration: Deferred(workers, duration, BATCH_SIZE))
    for share in (NEXUS_SHARE, 1.0):
        size = _largest(model, share * deadline)
        yield Rival(
            "Nexus",
            f"windows of {size}",
            lambda duration, size=size: EarlyDrop(workers, duration, size),  # type: ignore[misc]
        )
    for step in _STEPS:
        for share in _OBJECTIVES:
            yield Rival(
                "Clipper",
                f"+{step} up to {share:g} of the deadline",
                lambda duration, step=step, share=share: Aimd(  # type: ignore[misc]
                    workers, duration, BATCH_SIZE, share * deadline, step
                ),
            )


def _largest(model: Model, seconds: float) -> int:
    """Items of the mean length that a batch may have to take no longer."""
    sizes = range(1, BATCH_SIZE + 1)
    fitting = [n for n in sizes if model.cost.duration(n, n * model.typical) <= seconds]
    return max(fitting, default=1)
