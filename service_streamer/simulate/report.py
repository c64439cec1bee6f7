"""What came out of a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..observe.record import Reason

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was seen after the warm-up, until the load ended.

    Attributes:
        seconds: how long that was.
        calls: that arrived in that time, and were answered then or later.
        throughput: items per second; of a batch that was computed in that time in part, that part.
        busy: the share of the time that workers computed.
        mean_batch_size: of the batches that were cut in that time.
        sizes: how many batches had how many items.
        reasons: how many batches were cut for which reason.
        pending: items that waited when the load ended: many if it was more than can be computed.
        mean, p50, p95, p99: latency of a call, from its arrival to its results going out, seconds;
            not a number without calls.
        latencies: all of them, in the order of the answers.
    """

    seconds: float
    calls: int
    throughput: float
    busy: float
    mean_batch_size: float
    sizes: Mapping[int, int]
    reasons: Mapping[Reason, int]
    pending: int
    mean: float
    p50: float
    p95: float
    p99: float
    latencies: Sequence[float] = field(repr=False)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that a share of them does not exceed; not a number without values."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
