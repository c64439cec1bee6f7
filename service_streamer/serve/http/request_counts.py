"""What happened to requests, counted: by the page, by Prometheus, by whoever asks for /stats."""

from __future__ import annotations

import collections

from ...observe.metrics import SECONDS, Histogram

__all__ = ["LATENCIES", "RequestMetrics"]

#: Seconds; each about a quarter above the one before, so that percentiles are good to a tenth.
LATENCIES = tuple(
    round(start * 10.0**power, 6)
    for power in range(-4, 2)
    for start in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
)


class RequestMetrics:
    """Totals since the start. Of one event loop.

    Attributes:
        answers: how many, by path and status.
        latency: of requests that were answered with a result, seconds.
        latencies: the same by path, in the coarser buckets that Prometheus gets.
        rejections: how many were refused, by reason.
        disconnects: how many went away before they were answered.
        open: how many are being read or computed now.
    """

    def __init__(self) -> None:
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self.latency = Histogram(LATENCIES)
        self.latencies: dict[str, Histogram] = {}
        self.rejections: collections.Counter[str] = collections.Counter()
        self.disconnects = 0
        self.open = 0

    def served(self, path: str, seconds: float) -> None:
        """A request got its result."""
        self.answers[path, 200] += 1
        histogram = self.latencies.get(path)
        if histogram is None:
            histogram = self.latencies[path] = Histogram(SECONDS)
        histogram.add(seconds)
        self.latency.add(seconds)

    def refused(self, path: str, status: int, reason: str) -> None:
        """A request got an error."""
        self.answers[path, status] += 1
        self.rejections[reason] += 1
