"""The service's metrics in Prometheus's form, collected on each scrape.

Each series of a model has the label ``model``. With several web processes each of their series has
the label ``process``. Totals over all processes
would fall when one restarts, and Prometheus would count the others' work twice. The pool that they
share is there once, without the label.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from ... import __version__
from ...observe.metrics import BatchMetrics, Histogram, StreamerStats
from ...observe.record import STAGES, Reason
from .service import Service

if TYPE_CHECKING:
    from ...redis.redis_worker import RedisWorker


#: The question to the other web processes.
METRICS = b"metrics"

_PREFIX = "service_streamer_"


class _Rendering:
    """Renders what a collector has, and the metrics of this process."""

    def __init__(self, collector: Any) -> None:
        self._registry = _registry(collector)

    def text(self) -> bytes:
        """All metrics, as ``CONTENT_TYPE_LATEST``."""
        return generate_latest(self._registry)

    def snapshot(self) -> bytes:
        """All metrics, for ``merged``."""
        return msgspec.msgpack.encode([_Family.of(each) for each in self._registry.collect()])


class Exposition(_Rendering):
    """Renders the metrics of the models and of their process."""

    def __init__(self, models: Iterable[Service]) -> None:
        self._models = models
        super().__init__(_Collected(self._all))

    def _all(self) -> list[Metric]:
        return _labelled((each.model, _Collector(each).collect()) for each in self._models)

    def common(self) -> list[Metric]:
        """For ``merged``: those of the pools that the web processes share."""
        return _labelled((each.model, _Collector(each).shared()) for each in self._models)


class _Collected:
    """A collector of what a function returns."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> Iterable[Metric]:
        """Empty, so that registration does not collect."""
        return ()


def _labelled(models: Iterable[tuple[str, Iterable[Metric]]]) -> list[Metric]:
    """The metrics of several models together, with the label ``model``."""
    metrics: dict[str, Metric] = {}
    for model, families in models:
        for family in families:
            metric = metrics.get(family.name)
            if metric is None:
                metric = Metric(family.name, family.documentation, family.type)
                metrics[family.name] = metric
            for sample in family.samples:
                labels = {"model": model, **sample.labels}
                metric.add_sample(sample.name, labels, sample.value)
    return [*metrics.values()]


class _Family(msgspec.Struct, array_like=True):
    """A metric for another process; samples are (name, labels, value)."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def of(cls, metric: Metric) -> _Family:
        samples = [(each.name, dict(each.labels), float(each.value)) for each in metric.samples]
        return cls(metric.name, metric.documentation, metric.type, samples)


def merged(snapshots: Mapping[int, bytes], common: Iterable[Metric] = ()) -> bytes:
    """The metrics of several web processes, as ``CONTENT_TYPE_LATEST``.

    Args:
        snapshots: results of ``Exposition.snapshot`` by process number.
        common: those that belong to none of them.
    """
    metrics: dict[str, Metric] = {}
    for number in sorted(snapshots):
        try:
            families = msgspec.msgpack.decode(snapshots[number], type=list[_Family])
        except msgspec.DecodeError:  # that process died while it answered
            continue
        for family in families:
            metric = metrics.get(family.name)
            if metric is None:
                metric = Metric(family.name, family.documentation, family.type)
                metrics[family.name] = metric
            for name, labels, value in family.samples:
                metric.add_sample(name, {**labels, "process": str(number)}, value)
    for shared in common:  # models of worker hosts have some of the same metrics
        metric = metrics.setdefault(shared.name, shared)
        if metric is not shared:
            metric.samples += shared.samples
    return generate_latest(_Collected(metrics.values))


class HostExposition(_Rendering):
    """Renders the metrics of a worker host and of its process."""

    def __init__(self, worker: RedisWorker, is_ready: Callable[[], bool]) -> None:
        collector = _HostCollector(worker, is_ready)
        super().__init__(_Collected(lambda: _labelled([(worker.model_name, collector.collect())])))


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

    def collect(self) -> Iterator[Metric]:
        service = self._service
        info = GaugeMetricFamily(
            f"{_PREFIX}info",
            "Always 1; its labels name the model",
            labels=["version", "model", "task"],
        )
        info.add_metric([__version__, service.model, str(service.description.get("task", ""))], 1)
        yield info
        yield from self._requests()
        streamer: Any = service.streamer
        if service.pool is None:
            yield self._ready()
            yield from _broker(streamer.stats())
        elif service.pool.is_shared:
            yield from _sharing(*streamer.share_counts)
        else:
            yield self._ready()
            yield from self._pool()
            stats = streamer.stats()
            yield from _sharing(stats.deduplicated, stats.cached)

    def shared(self) -> Iterator[Metric]:
        """Of a pool that the web processes share, as it was looked at last."""
        pool = self._service.pool
        if pool is not None and pool.is_shared:
            yield self._ready()
            yield from self._pool()

    def _ready(self) -> Metric:
        is_ready = self._service.standing()[0] == "ready"
        return _gauge("ready", "Whether requests can be computed", is_ready)

    def _pool(self) -> Iterator[Metric]:
        assert self._service.pool is not None
        figures = self._service.pool.figures()
        if figures is not None:
            yield from _pool(figures.stats, figures.metrics)
            if self._service.has_steps:
                yield from _steps(figures.metrics)

    def _requests(self) -> Iterator[Metric]:
        requests = self._service.requests
        answers = CounterMetricFamily(
            f"{_PREFIX}requests", "Answered requests", labels=["path", "status"]
        )
        for (path, status), count in [*requests.answers.items()]:
            answers.add_metric([path, str(status)], count)
        yield answers
        rejections = CounterMetricFamily(
            f"{_PREFIX}rejections", "Requests answered with an error", labels=["reason"]
        )
        for reason, count in [*requests.rejections.items()]:
            rejections.add_metric([reason], count)
        yield rejections
        yield _counter(
            "disconnects", "Clients that disconnected before the answer", requests.disconnects
        )
        yield _gauge("open_requests", "Requests in progress", requests.open)
        yield _gauge("open_streams", "Streams in progress", len(self._service.streams))
        yield _counter("streams", "Streams that had an output", requests.streams)
        yield _counter("stream_outputs", "Outputs sent in streams that are over", requests.outputs)
        latencies = HistogramMetricFamily(
            f"{_PREFIX}request_duration_seconds",
            "Seconds from the request's head to its result",
            labels=["path"],
        )
        for path, histogram in [*requests.latencies.items()]:
            latencies.add_metric([path], *_buckets(histogram))
        yield latencies


class _HostCollector:
    def __init__(self, worker: RedisWorker, is_ready: Callable[[], bool]) -> None:
        self._worker = worker
        self._is_ready = is_ready

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            f"{_PREFIX}info", "Always 1; its labels name the model", labels=["version", "model"]
        )
        info.add_metric([__version__, self._worker.model_name], 1)
        yield info
        yield _gauge("ready", "Whether calls can be computed", self._is_ready())
        stats = self._worker.stats()
        if stats is None:
            return
        yield _gauge("redis_connected", "Whether Redis answers", stats.state != "disconnected")
        yield _counter("redis_outages", "Lost connections to Redis", stats.outages)
        yield _gauge("held", "Claimed calls in progress", stats.held)
        yield _counter("claimed", "Claimed calls", stats.claimed)
        yield _counter("taken_over", "Calls taken over from dead hosts", stats.taken_over)
        yield _counter("taken_away", "Calls taken over by another host", stats.taken_away)
        yield _counter("late", "Results that came after another host's", stats.late)
        yield _counter("expired_when_claimed", "Calls claimed after their deadline", stats.expired)
        yield _counter("set_aside", "Malformed messages", stats.set_aside)
        metrics = self._worker.metrics
        yield from _pool(stats.pool, metrics)
        yield from _sharing(stats.pool.deduplicated, stats.pool.cached)
        if metrics.first_output.count:  # of a model of steps
            yield from _steps(metrics)


def _pool(stats: StreamerStats, metrics: BatchMetrics) -> Iterator[Metric]:
    for name, text, histogram in (
        ("queue_duration_seconds", "Seconds from a call's arrival to its batch", metrics.queued),
        ("batch_duration_seconds", "Seconds from a batch's cut to its results", metrics.batch),
        ("inference_duration_seconds", "Seconds in the model per batch", metrics.inference),
        ("batch_size", "Items per batch", metrics.sizes),
        ("padding_ratio", "Share of padding in a batch, if the model reports it", metrics.padding),
    ):
        yield _histogram(name, text, histogram)
    reasons = CounterMetricFamily(
        f"{_PREFIX}batches_cut", "Batches by the reason for their size", labels=["reason"]
    )
    for reason in Reason:
        reasons.add_metric([reason.name.lower()], metrics.reasons[reason])
    yield reasons
    stages = CounterMetricFamily(
        f"{_PREFIX}stage_seconds",
        "Seconds of workers in preprocess (with decoding), forward (or predict) and postprocess "
        "(with encoding), of batches for which that is known",
        labels=["stage"],
    )
    for stage, seconds in zip(STAGES, metrics.stages, strict=True):
        stages.add_metric([stage], seconds)
    yield stages
    yield _gauge("pending", "Queued items", stats.pending)
    yield _gauge("in_flight", "Items being computed", stats.in_flight)
    workers = GaugeMetricFamily(f"{_PREFIX}workers", "Workers by state", labels=["state"])
    for state, count in stats.workers.items():
        workers.add_metric([state], count)
    yield workers
    if stats.worker_range is not None:
        yield from _scaling(stats)
    yield _counter("worker_restarts", "Restarted workers", stats.restarts)
    yield _counter("retries", "Items computed again after their worker died", stats.retries)
    yield _counter("expired", "Calls that timed out", stats.expired)
    yield _counter("cancelled", "Cancelled calls", stats.cancelled)
    yield _counter(
        "isolated", "Calls that failed when computed alone after a failed batch", stats.isolated
    )


def _scaling(stats: StreamerStats) -> Iterator[Metric]:
    """Of workers whose number the load decides on."""
    least, most = stats.worker_range or (0, 0)
    yield _gauge("workers_wanted", "Workers that the load needs", stats.wanted or 0)
    yield _gauge("workers_least", "The fewest workers that there are", least)
    yield _gauge("workers_most", "The most workers that there may be", most)
    text = "Forecast queueing time of a new item, in seconds"
    yield _gauge("wait_seconds", text, stats.wait or 0.0)
    text = "Queueing time above which workers are added"
    yield _gauge("target_wait_seconds", text, stats.target_wait or 0.0)


def _steps(metrics: BatchMetrics) -> Iterator[Metric]:
    """Of a model of steps."""
    yield _histogram(
        "first_output_seconds", "Seconds from a stream's call to its first output",
        metrics.first_output,
    )  # fmt: skip
    yield _histogram(
        "between_outputs_seconds", "Seconds from one output of a stream to the next",
        metrics.between_outputs,
    )  # fmt: skip


def _broker(stats: Any) -> Iterator[Metric]:
    yield _gauge("pending", "Calls in progress", stats.pending)
    yield _gauge("redis_connected", "Whether Redis answers", stats.state == "connected")
    yield _gauge("redis_hosts", "Live worker hosts", stats.hosts or 0)
    yield _gauge("redis_queued", "Calls of all clients that wait in Redis", stats.queued or 0)
    yield _counter("redis_outages", "Lost connections to Redis", stats.outages)
    yield _gauge("redis_models", "Different models among the hosts; should be 1", len(stats.models))
    yield _counter("unreadable", "Calls that the client or a host could not read", stats.unreadable)
    yield _counter("lost", "Calls lost without a reply", stats.lost)
    yield _counter("expired", "Calls that timed out", stats.expired)
    yield _counter("cancelled", "Cancelled calls", stats.cancelled)
    yield from _sharing(stats.deduplicated, stats.cached)


def _sharing(deduplicated: int, cached: int) -> Iterator[Metric]:
    yield _counter("deduplicated", "Items answered by another caller's computation", deduplicated)
    yield _counter("cached", "Items answered from the cache", cached)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, text)
    family.add_metric([], *_buckets(histogram))
    return family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum."""
    names = [*map(str, histogram.bounds), "+Inf"]
    return [*zip(names, itertools.accumulate(histogram.counts), strict=True)], histogram.total


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=float(value))
