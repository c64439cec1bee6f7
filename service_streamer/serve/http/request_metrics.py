"""Counts and durations of the requests of one web process."""

from __future__ import annotations

import collections

from ...observe.metrics import SECONDS, Histogram

__all__ = ["LATENCIES", "RequestMetrics"]

#: Bucket bounds in seconds, about 25 % apart: percentiles are precise to about 10 %.
LATENCIES = tuple(
    round(start * 10.0**power, 6)
    for power in range(-4, 2)
    for start in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
)


class RequestMetrics:
    """Totals since the start. Belongs to one event loop.

    Attributes:
        answers: number of answers by path and status.
        latency: seconds of requests with a result.
        latencies: the same by path, in Prometheus's coarser buckets.
        rejections: number of refusals by reason.
        disconnects: number of clients that disconnected before the answer.
        open: number of requests in progress.
        streams: number of streams that were begun.
        outputs: number of outputs that were sent in streams.
    """

    def __init__(self) -> None:
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self.latency = Histogram(LATENCIES)
        self.latencies: dict[str, Histogram] = {}
        self.rejections: collections.Counter[str] = collections.Counter()
        self.disconnects = 0
        self.open = 0
        self.streams = 0
        self.outputs = 0

    def served(self, path: str, seconds: float) -> None:
        """Count a request with a result."""
        self.answers[path, 200] += 1
        histogram = self.latencies.get(path)
        if histogram is None:
            histogram = self.latencies[path] = Histogram(SECONDS)
        histogram.add(seconds)
        self.latency.add(seconds)

    def refused(self, path: str, status: int, reason: str) -> None:
        """Count a refused request."""
        self.answers[path, status] += 1
        self.rejections[reason] += 1
