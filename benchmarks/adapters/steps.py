"""The simulated model of steps, for every system alike: a step of n items takes 20 + 0.2 n ms."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

__all__ = ["BASE", "CALLERS", "PER_ITEM", "PLACES", "lengths", "refilled", "to_the_end"]

BASE, PER_ITEM = 20e-3, 2e-4
PLACES, CALLERS = 32, 128
#: Of the items' outputs; the mean is 94.
MEAN, SIGMA, MOST = 4.24, 0.8, 512


def lengths(count: int, seed: int = 0) -> list[int]:
    """How many outputs each item has: lognormal."""
    rng = random.Random(seed)
    return [max(1, min(MOST, round(rng.lognormvariate(MEAN, SIGMA)))) for _ in range(count)]


def refilled(work: Sequence[int], places: int, steps: int) -> float:
    """Outputs per second of batches whose places are taken at every step."""
    items, running = itertools.cycle(work), list[int]()
    seconds = outputs = 0.0
    for _ in range(steps):
        running += itertools.islice(items, places - len(running))
        seconds += BASE + PER_ITEM * len(running)
        outputs += len(running)
        running = [left - 1 for left in running if left > 1]
    return outputs / seconds


def to_the_end(work: Sequence[int], places: int) -> float:
    """Outputs per second of batches that run until the last of their items is over."""
    batches = [work[at : at + places] for at in range(0, len(work) - places + 1, places)]
    seconds = sum(max(batch) * (BASE + PER_ITEM * places) for batch in batches)
    return sum(map(sum, batches)) / seconds
