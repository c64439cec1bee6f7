"""Numbers made of numbers. Pure; used in every system's interpreter too."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["percentile", "poisson"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share of them lies; None of none."""
    return sorted(values)[round(share * (len(values) - 1))] if values else None


def poisson(rate: float, seconds: float, seed: int = 1) -> Iterator[float]:
    """When calls are due that come independently of each other, ``rate`` per second on average.

    The same times for the same arguments: every system meets the same load.
    """
    source = random.Random(seed)
    at = source.expovariate(rate)
    while at < seconds:
        yield at
        at += source.expovariate(rate)
