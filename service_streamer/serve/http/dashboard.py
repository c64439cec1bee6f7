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
from .background import Failures
from .events import event, on_one_line
from .pool_view import PoolFigures
from .request_figures import RequestFigures, Requests, decode_figures, question_of
from .service import Service

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
        # The last figures of each process: one that misses an answer has not begun anew.
        self._heard: dict[int, RequestFigures] = {}
        self._past: collections.deque[Requests] = collections.deque(maxlen=_WINDOW)
        self._latest = b""
        #: Set when there is a newer snapshot.
        self._renewed = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None

    async def snapshot(self) -> Any:
        """The figures of the whole service: rates and percentiles since its start."""
        return self._figures(await self._look(), None, None)

    @property
    def is_full(self) -> bool:
        """Whether there are as many viewers as allowed."""
        return self._viewers >= _MOST_VIEWERS

    async def events(self) -> AsyncIterator[bytes]:
        """Snapshots as server-sent events, the first immediately, until the service drains."""
        self._viewers += 1
        try:
            if self._publishing is None or self._publishing.done():
                # No await before the task is there: viewers that come at once share one.
                self._past.clear()
                self._latest, self._renewed = b"", asyncio.Event()
                self._publishing = asyncio.create_task(self._publish_on())
            yield b"retry: %d\n\n" % _RETRY
            if not self._latest:
                await self._renewed.wait()
            while self._viewers <= _MOST_VIEWERS:  # several may have connected at once
                is_last, renewed = self._service.is_draining, self._renewed
                yield self._latest
                if is_last or renewed.is_set():
                    return
                await renewed.wait()
        finally:
            self._viewers -= 1

    async def _publish_on(self) -> None:
        """Publish at once, once per second while there are viewers, and when the service drains."""
        failures = Failures("the figures of /events were not renewed")
        try:
            with failures:
                await self._publish()
            while self._viewers and not self._service.is_draining:
                await self._service.pause(_INTERVAL)
                with failures:
                    await self._publish()
        finally:
            self._renewed.set()  # no viewer may wait for a snapshot that never comes

    async def _publish(self) -> None:
        past, requests = self._past, await self._look()
        before, window = (past[-1], past[0]) if past else (requests, None)
        figures = self._figures(requests, before, window)
        past.append(requests)
        self._latest = b"event: snapshot\n" + on_one_line(event(msgspec.json.encode(figures)))
        self._renewed.set()
        self._renewed = asyncio.Event()

    async def _look(self) -> Requests:
        """Ask the pool and the other web processes, if they are others."""
        service = self._service
        siblings = service.siblings
        if siblings is None:
            await service.renew()
            return Requests(time.monotonic(), {0: service.figures()})
        _, answers = await asyncio.gather(
            service.renew(), siblings.others(question_of(service.model))
        )
        heard = {**decode_figures(answers), siblings.number: service.figures()}
        self._heard |= heard
        return Requests(time.monotonic(), {**self._heard}, len(heard))

    def _figures(self, requests: Requests, before: Requests | None, window: Requests | None) -> Any:
        service = self._service
        state, detail = service.standing()
        figures: dict[str, Any] = {
            "time": time.time(),
            "uptime": requests.uptime,
            "ready": state == "ready",
            "state": state,
            "detail": detail,
            "rate": requests.rate(before),
            "latency": _percentiles(requests, window),
        }
        figures["streams"] = requests.streams
        figures["web_processes"] = requests.answering
        figures["totals"] = {
            "requests": requests.total() + requests.disconnects,
            "answered": requests.total(200),
            "failed": requests.total(500),
            "disconnected": requests.disconnects,
            "rejected": {
                reason: requests.rejected(reason)
                for reason in (
                    "overloaded", "timeout", "invalid", "unauthorized", "forbidden", "rate_limited",
                    "too_large", "unavailable",
                )
            },
        }  # fmt: skip
        max_pending = service.options.max_pending
        if service.pool is None:
            _add_broker(figures, service.streamer.stats(), max_pending)  # type: ignore[attr-defined]
        else:
            _add_pool(figures, service.pool.figures(), max_pending)
        return figures


def _percentiles(requests: Requests, window: Requests | None) -> dict[str, float | None] | None:
    latencies = requests.latencies(window)
    if not latencies.count:
        return None
    return {f"p{q}": latencies.quantile(q / 100) for q in (50, 90, 99)}


def _add_pool(figures: dict[str, Any], pool: PoolFigures | None, max_pending: int | None) -> None:
    if pool is None:  # its process does not answer
        figures["batch_sizes"], figures["reasons"], figures["explanation"] = [], {}, []
        figures["queue"] = {"pending": None, "in_flight": None, "max_pending": max_pending}
        figures["workers"] = None
        figures["totals"] |= {"restarts": None, "retries": None, "cancelled": None}
        return
    stats, metrics = pool.stats, pool.metrics
    sizes = metrics.sizes
    bounds = [*map(int, sizes.bounds), None]  # the last bucket has no upper bound
    figures["batch_sizes"] = [
        {"upto": bound, "count": count} for bound, count in zip(bounds, sizes.counts, strict=True)
    ]
    figures["reasons"] = {reason.name.lower(): n for reason, n in metrics.reasons.most_common()}
    figures["explanation"] = advice_for(pool.findings)
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
        for worker in pool.workers
    ]
    figures["scaling"] = None
    if stats.worker_range is not None:
        least, most = stats.worker_range
        figures["scaling"] = {"wanted": stats.wanted, "least": least, "most": most}
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
    "scaled out": "Raise the most of --workers, or make the model faster.",
    "one caller": "Send requests at the same time, or several inputs in each request.",
    "few callers": "For more throughput send more requests at a time.",
    "overhead": "Send several inputs in each request, or serve with --web-workers.",
    "padding": "Set --length, so that inputs of similar length share a batch.",
    "transport": "Send smaller inputs, or several inputs in each request.",
    "late": "",
}

_OPTION = re.compile(r"\b(batch_size|cpu_threads|max_batch_cost|max_latency|max_pending)\b")


def advice_for(findings: Iterable[Finding]) -> list[str]:
    """One line per finding, with options of the command line. Pure."""
    return [str(_in_options(finding)) for finding in findings]


def _in_options(finding: Finding) -> Finding:
    advice = finding.advice
    if advice and (finding.name != "padding" or "length=" in advice):
        advice = ADVICE.get(finding.name, advice)
    text = finding.text
    if finding.name == "cost":
        text = text.replace("max_batch_cost", "max_batch_cost (--max-batch-tokens sets it, too)")
    return finding._replace(text=_as_options(text), advice=_as_options(advice))


def _as_options(text: str) -> str:
    return _OPTION.sub(lambda found: "--" + found[0].replace("_", "-"), text)
