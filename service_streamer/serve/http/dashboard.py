"""Live figures of the service as plain data: /stats, and one snapshot per second for the page."""

from __future__ import annotations

import asyncio
import collections
import re
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from ...observe.explain import Finding
from ...observe.metrics import Histogram
from ...streamer import PoolStreamer
from .service import Service

__all__ = ["ADVICE", "Dashboard", "advised"]

#: Seconds between snapshots, and number of snapshots per percentile.
_INTERVAL = 1.0
_WINDOW = 10

#: Milliseconds until the page reconnects.
_RETRY = 2000

#: Maximum number of viewers. A thousand would take much of a core from the requests.
_MOST_VIEWERS = 64


class Dashboard:
    """Takes one snapshot per second for all viewers, none without viewers.

    Belongs to one event loop.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._viewers = 0
        self._past: collections.deque[_Moment] = collections.deque(maxlen=_WINDOW)
        self._latest = b""
        #: Set when there is a newer snapshot.
        self._renewed = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None

    def snapshot(self, before: _Moment | None = None, window: _Moment | None = None) -> Any:
        """The current figures.

        Args:
            before: start of the interval of rates; None for the start of the service.
            window: start of the interval of percentiles; None likewise.
        """
        return self._figures(self._moment(), before, window)

    @property
    def is_full(self) -> bool:
        """Whether there are as many viewers as allowed."""
        return self._viewers >= _MOST_VIEWERS

    async def events(self) -> AsyncIterator[bytes]:
        """Snapshots as server-sent events, the first immediately, until the service drains."""
        self._viewers += 1
        try:
            if self._publishing is None or self._publishing.done():
                self._past.clear()
                self._publish()
                self._publishing = asyncio.create_task(self._publish_on())
            yield b"retry: %d\n\n" % _RETRY
            while self._viewers <= _MOST_VIEWERS:  # several may have connected at once
                is_last, renewed = self._service.is_draining, self._renewed
                yield self._latest
                if is_last or renewed.is_set():
                    return
                await renewed.wait()
        finally:
            self._viewers -= 1

    async def _publish_on(self) -> None:
        """Publish once per second while there are viewers, and when the service drains."""
        try:
            while self._viewers and not self._service.is_draining:
                await self._service.pause(_INTERVAL)
                self._publish()
        finally:
            self._renewed.set()  # no viewer may wait for a snapshot that never comes

    def _publish(self) -> None:
        past, moment = self._past, self._moment()
        figures = self._figures(moment, past[-1] if past else moment, past[0] if past else moment)
        past.append(moment)
        self._latest = b"event: snapshot\ndata: " + msgspec.json.encode(figures) + b"\n\n"
        self._renewed.set()
        self._renewed = asyncio.Event()

    def _moment(self) -> _Moment:
        requests = self._service.requests
        return _Moment(time.monotonic(), requests.answers.total(), requests.latency.copy())

    def _figures(self, moment: _Moment, before: _Moment | None, window: _Moment | None) -> Any:
        service = self._service
        requests = service.requests
        state, detail = service.standing()
        figures: dict[str, Any] = {
            "time": time.time(),
            "uptime": moment.time - service.started_at,
            "ready": state == "ready",
            "state": state,
            "detail": detail,
            "rate": _rate(moment, before, service.started_at),
            "latency": _percentiles(moment, window),
        }
        figures["streams"] = {"open": len(service.streams), "total": requests.streams}
        answered = sum(n for (_, status), n in requests.answers.items() if status == 200)
        failed = sum(n for (_, status), n in requests.answers.items() if status == 500)
        figures["totals"] = {
            "requests": requests.answers.total() + requests.disconnects,
            "answered": answered,
            "failed": failed,
            "disconnected": requests.disconnects,
            "rejected": {
                reason: requests.rejections[reason]
                for reason in (
                    "overloaded", "timeout", "invalid", "unauthorized", "too_large", "unavailable",
                )
            },
        }  # fmt: skip
        streamer = service.streamer
        if isinstance(streamer, PoolStreamer):
            _add_pool(figures, streamer, service.options.max_pending)
        else:
            _add_broker(figures, streamer.stats(), service.options.max_pending)  # type: ignore[attr-defined]
        return figures


class _Moment:
    """Counters at one time: rates and percentiles are differences of two moments."""

    __slots__ = ("answers", "latencies", "time")

    def __init__(self, time: float, answers: int, latencies: Histogram) -> None:
        self.time = time
        self.answers = answers
        self.latencies = latencies


def _rate(moment: _Moment, before: _Moment | None, started_at: float) -> float:
    since, answers = (started_at, 0) if before is None else (before.time, before.answers)
    seconds = moment.time - since
    return (moment.answers - answers) / seconds if seconds > 0 else 0.0


def _percentiles(moment: _Moment, window: _Moment | None) -> dict[str, float | None] | None:
    latencies = moment.latencies
    if window is not None and window is not moment:
        latencies = latencies - window.latencies
    if not latencies.count:
        return None
    return {f"p{q}": latencies.quantile(q / 100) for q in (50, 90, 99)}


def _add_pool(figures: dict[str, Any], streamer: PoolStreamer, max_pending: int | None) -> None:
    stats, metrics = streamer.stats(), streamer.metrics
    sizes = metrics.sizes
    bounds = [*map(int, sizes.bounds), None]  # the last bucket has no upper bound
    figures["batch_sizes"] = [
        {"upto": bound, "count": count} for bound, count in zip(bounds, sizes.counts, strict=True)
    ]
    figures["reasons"] = {reason.name.lower(): n for reason, n in metrics.reasons.most_common()}
    figures["explanation"] = advised(streamer.findings())
    figures["queue"] = {
        "pending": stats.pending,
        "in_flight": stats.in_flight,
        "max_pending": max_pending,
    }
    figures["workers"] = [
        {
            "number": worker.number,
            "device": None if worker.device is None else str(worker.device),
            "state": worker.state,
            "restarts": worker.restarts,
        }
        for worker in streamer.workers()
    ]
    figures["totals"] |= {
        "restarts": stats.restarts,
        "retries": stats.retries,
        "cancelled": stats.cancelled,
    }


def _add_broker(figures: dict[str, Any], stats: Any, max_pending: int | None) -> None:
    figures["batch_sizes"] = []
    figures["reasons"] = {}
    figures["explanation"] = []
    figures["queue"] = {"pending": stats.pending, "in_flight": None, "max_pending": max_pending}
    figures["workers"] = None
    figures["redis"] = {"state": stats.state, "hosts": stats.hosts, "queued": stats.queued}
    figures["totals"] |= {"restarts": None, "retries": None, "cancelled": stats.cancelled}


#: Advice for users of ``serve``, by name of the finding, instead of advice for Python programs.
ADVICE = {
    "saturated": "Add workers (--workers), each on its own device, or make the model faster.",
    "one caller": "Send requests at the same time, or several inputs in each request.",
    "few callers": "For more throughput send more requests at a time.",
    "overhead": "Send several inputs in each request, or serve with --web-workers.",
    "padding": "Set --length, so that inputs of similar length share a batch.",
    "transport": "Send smaller inputs, or several inputs in each request.",
    "late": "",
}

_OPTION = re.compile(r"\b(batch_size|cpu_threads|max_batch_cost|max_latency|max_pending)\b")


def advised(findings: Iterable[Finding]) -> list[str]:
    """One line per finding, with options of the command line. Pure."""
    return [str(_advised(finding)) for finding in findings]


def _advised(finding: Finding) -> Finding:
    advice = finding.advice
    if advice and (finding.name != "padding" or "length=" in advice):
        advice = ADVICE.get(finding.name, advice)
    text = finding.text
    if finding.name == "cost":
        text = text.replace("max_batch_cost", "max_batch_cost (--max-batch-tokens sets it, too)")
    return finding._replace(text=_as_options(text), advice=_as_options(advice))


def _as_options(text: str) -> str:
    return _OPTION.sub(lambda found: "--" + found[0].replace("_", "-"), text)
