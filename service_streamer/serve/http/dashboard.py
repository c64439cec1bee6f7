"""How the service stands, as plain data: for the page, second by second, and for /stats."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from ...observe.metrics import Histogram
from ...streamer import PoolStreamer
from .advice import advised
from .service import Service

__all__ = ["Dashboard"]

#: Seconds between two snapshots, and how many of them a percentile is of.
_INTERVAL = 1.0
_WINDOW = 10

#: What the page is told to wait before it asks again, milliseconds.
_RETRY = 2000

#: How many may look at a time. To send a thousand a snapshot each second takes much of a core, and
#: requests wait meanwhile.
_MOST_VIEWERS = 64


class Dashboard:
    """Takes snapshots of a service. Of one event loop; does nothing while nobody looks.

    All who look get the same snapshots: one a second is made, however many they are.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._viewers = 0
        self._past: collections.deque[_Moment] = collections.deque(maxlen=_WINDOW)
        self._latest = b""
        #: Set when there is another snapshot than the latest.
        self._renewed = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None

    def snapshot(self, before: _Moment | None = None, window: _Moment | None = None) -> Any:
        """How it stands now.

        Args:
            before: what rates are against; None for the start.
            window: what percentiles are against; None for the start.
        """
        return self._told(self._moment(), before, window)

    @property
    def is_full(self) -> bool:
        """Whether as many look as may."""
        return self._viewers >= _MOST_VIEWERS

    async def events(self) -> AsyncIterator[bytes]:
        """Snapshots as server-sent events, the first one at once, until the service drains."""
        self._viewers += 1
        try:
            if self._publishing is None or self._publishing.done():
                self._past.clear()
                self._publish()
                self._publishing = asyncio.create_task(self._publish_on())
            yield b"retry: %d\n\n" % _RETRY
            while self._viewers <= _MOST_VIEWERS:  # several may have come at once
                is_last, renewed = self._service.is_draining, self._renewed
                yield self._latest
                if is_last or renewed.is_set():
                    return
                await renewed.wait()
        finally:
            self._viewers -= 1

    async def _publish_on(self) -> None:
        """A snapshot each second, while somebody looks, and a last one when the service drains."""
        try:
            while self._viewers and not self._service.is_draining:
                await self._service.pause(_INTERVAL)
                self._publish()
        finally:
            self._renewed.set()  # whatever has happened, nobody waits for the next one

    def _publish(self) -> None:
        past, moment = self._past, self._moment()
        told = self._told(moment, past[-1] if past else moment, past[0] if past else moment)
        past.append(moment)
        self._latest = b"event: snapshot\ndata: " + msgspec.json.encode(told) + b"\n\n"
        self._renewed.set()
        self._renewed = asyncio.Event()

    def _moment(self) -> _Moment:
        requests = self._service.requests
        return _Moment(time.monotonic(), requests.answers.total(), requests.latency.copy())

    def _told(self, moment: _Moment, before: _Moment | None, window: _Moment | None) -> Any:
        service = self._service
        requests = service.requests
        state, detail = service.standing()
        told: dict[str, Any] = {
            "time": time.time(),
            "uptime": moment.time - service.started_at,
            "ready": state == "ready",
            "state": state,
            "detail": detail,
            "rate": _rate(moment, before, service.started_at),
            "latency": _percentiles(moment, window),
        }
        answered = sum(n for (_, status), n in requests.answers.items() if status == 200)
        failed = sum(n for (_, status), n in requests.answers.items() if status == 500)
        told["totals"] = {
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
            _add_pool(told, streamer, service.options.max_pending)
        else:
            _add_broker(told, streamer.stats(), service.options.max_pending)  # type: ignore[attr-defined]
        return told


class _Moment:
    """What rates and percentiles are the differences of."""

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


def _add_pool(told: dict[str, Any], streamer: PoolStreamer, max_pending: int | None) -> None:
    stats, metrics = streamer.stats(), streamer.metrics
    sizes = metrics.sizes
    bounds = [*map(int, sizes.bounds), None]  # the last one is beyond all of them
    told["batch_sizes"] = [
        {"upto": bound, "count": count} for bound, count in zip(bounds, sizes.counts, strict=True)
    ]
    told["reasons"] = {reason.name.lower(): n for reason, n in metrics.reasons.most_common()}
    told["explanation"] = advised(streamer.findings())
    told["queue"] = {
        "pending": stats.pending,
        "in_flight": stats.in_flight,
        "max_pending": max_pending,
    }
    told["workers"] = [
        {
            "number": worker.number,
            "device": None if worker.device is None else str(worker.device),
            "state": worker.state,
            "restarts": worker.restarts,
        }
        for worker in streamer.workers()
    ]
    told["totals"] |= {
        "restarts": stats.restarts,
        "retries": stats.retries,
        "cancelled": stats.cancelled,
    }


def _add_broker(told: dict[str, Any], stats: Any, max_pending: int | None) -> None:
    told["batch_sizes"] = []
    told["reasons"] = {}
    told["explanation"] = []
    told["queue"] = {"pending": stats.pending, "in_flight": None, "max_pending": max_pending}
    told["workers"] = None
    told["redis"] = {"state": stats.state, "hosts": stats.hosts, "queued": stats.queued}
    told["totals"] |= {"restarts": None, "retries": None, "cancelled": stats.cancelled}
