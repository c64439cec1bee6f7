"""Counts and durations of the requests of one web process."""

from __future__ import annotations

import collections

from ...observe.metrics import SECONDS, Histogram

#: Bucket bounds in seconds, about 25 % apart: percentiles are precise to about 10 %.
LATENCIES = tuple(
    round(start * 10.0**power, 6)
    for power in range(-4, 2)
    for start in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
)


#: Requests that are counted together, for a quarter of what each by itself costs.
_TOGETHER = 256


class RequestMetrics:
    """Totals since the start. Belongs to one event loop.

    Attributes:
        rejections: number of refusals by reason.
        disconnects: number of clients that disconnected before the answer.
        open: number of requests in progress.
        streams: number of streams that were begun.
        outputs: number of outputs that were sent in streams.
    """

    def __init__(self) -> None:
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self._latency = Histogram(LATENCIES)
        self._latencies: dict[str, Histogram] = {}
        self._served: dict[str, list[float]] = {}  # not counted yet
        self.rejections: collections.Counter[str] = collections.Counter()
        self.disconnects = 0
        self.open = 0
        self.streams = 0
        self.outputs = 0

    def served(self, path: str, seconds: float) -> None:
        """Count a request with a result."""
        served = self._served.get(path)
        if served is None:
            served = self._served[path] = []
        served.append(seconds)
        if len(served) == _TOGETHER:
            self._count()

    def refused(self, path: str, status: int, reason: str) -> None:
        """Count a refused request."""
        self._answers[path, status] += 1
        self.rejections[reason] += 1

    def _count(self) -> None:
        for path, served in self._served.items():
            if served:
                self._answers[path, 200] += len(served)
                histogram = self._latencies.get(path)
                if histogram is None:
                    histogram = self._latencies[path] = Histogram(SECONDS)
                histogram.add_all(served)
                self._latency.add_all(served)
                served.clear()

    @property
    def answers(self) -> collections.Counter[tuple[str, int]]:
        """Number of answers by path and status."""
        self._count()
        return self._answers

    @property
    def latency(self) -> Histogram:
        """Seconds of requests with a result."""
        self._count()
        return self._latency

    @property
    def latencies(self) -> dict[str, Histogram]:
        """The same by path, in Prometheus's coarser buckets."""
        self._count()
        return self._latencies
