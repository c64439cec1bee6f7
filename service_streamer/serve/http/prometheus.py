"""The service's metrics in the form of Prometheus: collected when they are asked for.

Of several web processes each series has the label ``process``. Totals over all of them would fall
when one of them is started again, and Prometheus would count what the others had done once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from ... import __version__
from ...observe.metrics import BatchMetrics, Histogram
from ...observe.record import Reason
from ...observe.stats import StreamerStats
from ...streamer import PoolStreamer
from .service import Service

if TYPE_CHECKING:
    from ...redis.redis_worker import RedisWorker

__all__ = ["CONTENT_TYPE_LATEST", "Exposition", "HostExposition", "merged"]

_PREFIX = "service_streamer_"


class Exposition:
    """Renders the metrics of a service, and of its process, whenever it is asked."""

    def __init__(self, service: Service) -> None:
        self._registry = _registry(_Collector(service))

    def text(self) -> bytes:
        """All of it, as ``CONTENT_TYPE_LATEST``."""
        return generate_latest(self._registry)

    def snapshot(self) -> bytes:
        """All of it, for ``merged``."""
        return msgspec.msgpack.encode([_Family.of(each) for each in self._registry.collect()])


class _Family(msgspec.Struct, array_like=True):
    """A metric on its way to another process: samples are names, labels and values."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def of(cls, metric: Metric) -> _Family:
        samples = [(each.name, dict(each.labels), float(each.value)) for each in metric.samples]
        return cls(metric.name, metric.documentation, metric.type, samples)


class _Merged:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def merged(snapshots: Mapping[int, bytes]) -> bytes:
    """The metrics of several web processes, as ``CONTENT_TYPE_LATEST``.

    Args:
        snapshots: of ``Exposition.snapshot``, by the numbers of the processes.
    """
    metrics: dict[str, Metric] = {}
    for number in sorted(snapshots):
        try:
            families = msgspec.msgpack.decode(snapshots[number], type=list[_Family])
        except msgspec.DecodeError:  # it died in the middle of its answer
            continue
        for family in families:
            metric = metrics.get(family.name)
            if metric is None:
                metric = Metric(family.name, family.documentation, family.type)
                metrics[family.name] = metric
            for name, labels, value in family.samples:
                metric.add_sample(name, {**labels, "process": str(number)}, value)
    return generate_latest(_Merged(metrics.values()))


class HostExposition(Exposition):
    """The same of a worker host."""

    def __init__(self, worker: RedisWorker, is_ready: Callable[[], bool]) -> None:
        self._registry = _registry(_HostCollector(worker, is_ready))


def _registry(collector: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class _Collector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """So that registering it does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        service = self._service
        info = GaugeMetricFamily(
            f"{_PREFIX}info", "1, with what is served", labels=["version", "model", "task"]
        )
        info.add_metric([__version__, service.model, str(service.description.get("task", ""))], 1)
        yield info
        yield _gauge("ready", "Whether requests can be computed", service.standing()[0] == "ready")
        yield from self._requests()
        streamer = service.streamer
        if isinstance(streamer, PoolStreamer):
            yield from _pool(streamer.stats(), streamer.metrics)
        else:
            yield from _broker(streamer.stats())  # type: ignore[attr-defined]

    def _requests(self) -> Iterator[Metric]:
        requests = self._service.requests
        answers = CounterMetricFamily(
            f"{_PREFIX}requests", "Requests that were answered", labels=["path", "status"]
        )
        for (path, status), count in [*requests.answers.items()]:
            answers.add_metric([path, str(status)], count)
        yield answers
        rejections = CounterMetricFamily(
            f"{_PREFIX}rejections", "Requests that got an error", labels=["reason"]
        )
        for reason, count in [*requests.rejections.items()]:
            rejections.add_metric([reason], count)
        yield rejections
        yield _counter("disconnects", "Callers who went away", requests.disconnects)
        yield _gauge("open_requests", "Requests that are under way", requests.open)
        latencies = HistogramMetricFamily(
            f"{_PREFIX}request_duration_seconds",
            "From the request's head to its result",
            labels=["path"],
        )
        for path, histogram in [*requests.latencies.items()]:
            latencies.add_metric([path], *_buckets(histogram))
        yield latencies


class _HostCollector:
    def __init__(self, worker: RedisWorker, is_ready: Callable[[], bool]) -> None:
        self._worker = worker
        self._is_ready = is_ready

    def describe(self) -> Iterable[Metric]:
        """So that registering it does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            f"{_PREFIX}info", "1, with what is served", labels=["version", "model"]
        )
        info.add_metric([__version__, self._worker.model_name], 1)
        yield info
        yield _gauge("ready", "Whether calls can be computed", self._is_ready())
        stats = self._worker.stats()
        if stats is None:
            return
        yield _gauge("redis_connected", "Whether Redis answers", stats.state != "disconnected")
        yield _counter("redis_outages", "How often Redis was lost", stats.outages)
        yield _counter("redis_clock_steps", "How often Redis's clock was set", stats.clock_steps)
        yield _gauge("held", "Calls that are claimed and not finished", stats.held)
        yield _counter("claimed", "Calls that were claimed", stats.claimed)
        yield _counter("taken_over", "Claimed calls of hosts that had died", stats.taken_over)
        yield _counter("taken_away", "Calls that another host has claimed", stats.taken_away)
        yield _counter("late", "Calls that another host had answered", stats.late)
        yield _counter("expired_when_claimed", "Calls that were claimed too late", stats.expired)
        yield _counter("set_aside", "Messages that could not be read", stats.set_aside)
        yield from _pool(stats.pool, self._worker.metrics)


def _pool(stats: StreamerStats, metrics: BatchMetrics) -> Iterator[Metric]:
    for name, text, histogram in (
        ("queue_duration_seconds", "From a call's arrival to its batch", metrics.queued),
        ("batch_duration_seconds", "From a batch's cut to its results", metrics.batch),
        ("inference_duration_seconds", "What the model took for a batch", metrics.inference),
        ("batch_size", "Items of a batch", metrics.sizes),
        ("padding_ratio", "Share of a batch that is padding, if told", metrics.padding),
    ):
        family = HistogramMetricFamily(_PREFIX + name, text)
        family.add_metric([], *_buckets(histogram))
        yield family
    reasons = CounterMetricFamily(
        f"{_PREFIX}batches_cut", "Batches by why they had no more items", labels=["reason"]
    )
    for reason in Reason:
        reasons.add_metric([reason.name.lower()], metrics.reasons[reason])
    yield reasons
    yield _gauge("pending", "Items that wait for a worker", stats.pending)
    yield _gauge("in_flight", "Items that workers hold", stats.in_flight)
    workers = GaugeMetricFamily(f"{_PREFIX}workers", "Workers by state", labels=["state"])
    for state, count in stats.workers.items():
        workers.add_metric([state], count)
    yield workers
    yield _counter("worker_restarts", "Workers started in place of lost ones", stats.restarts)
    yield _counter("retries", "Items computed again since their worker died", stats.retries)
    yield _counter("expired", "Calls whose time ended", stats.expired)
    yield _counter("cancelled", "Calls that nobody waited for any more", stats.cancelled)
    yield _counter("isolated", "Calls that failed alone after their batch", stats.isolated)
    yield from _sharing(stats)


def _broker(stats: Any) -> Iterator[Metric]:
    yield _gauge("pending", "Calls that are not over", stats.pending)
    yield _gauge("redis_connected", "Whether Redis answers", stats.state == "connected")
    yield _gauge("redis_hosts", "Worker hosts that are alive", stats.hosts or 0)
    yield _gauge("redis_queued", "Calls of all clients in Redis", stats.queued or 0)
    yield _counter("redis_outages", "How often Redis was lost", stats.outages)
    yield _gauge("redis_models", "Models of the hosts; should be one", len(stats.models))
    yield _counter("unreadable", "Calls that one side could not read", stats.unreadable)
    yield _counter("lost", "Calls that were gone without a reply", stats.lost)
    yield _counter("expired", "Calls whose time ended", stats.expired)
    yield _counter("cancelled", "Calls that nobody waited for any more", stats.cancelled)
    yield from _sharing(stats)


def _sharing(stats: Any) -> Iterator[Metric]:
    yield _counter("deduplicated", "Items answered by another's computation", stats.deduplicated)
    yield _counter("cached", "Items answered from the cache", stats.cached)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative ones, and the sum."""
    names = [*map(str, histogram.bounds), "+Inf"]
    return [*zip(names, itertools.accumulate(histogram.counts), strict=True)], histogram.total


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=float(value))
