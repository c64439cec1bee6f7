"""OpenTelemetry's view of a streamer: which spans there are, whose children, and what they say."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import models
from service_streamer import (
    ManagedModel,
    PredictTimeout,
    Reason,
    Streamer,
    ThreadedStreamer,
    WorkerLost,
)
from service_streamer.testing import Gate
from stream_models import Countdown, Resumed

pytest.importorskip("opentelemetry.sdk", reason="the tests of tracing need opentelemetry-sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from service_streamer.tracing import trace_batches


class Spans:
    """Collects finished spans, by name in the order of their ends."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    @property
    def calls(self) -> list[ReadableSpan]:
        return self.of("service_streamer.call")

    @property
    def batches(self) -> list[ReadableSpan]:
        return self.of("service_streamer.batch")


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.provider.shutdown()


def told(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes without the prefix, and without durations."""
    attributes = {
        key.removeprefix("service_streamer."): value
        for key, value in (span.attributes or {}).items()
    }
    assert attributes.pop("queued") >= 0
    assert attributes.pop("batch.inference") >= 0
    assert attributes.pop("batch.reason").upper() in Reason.__members__
    return attributes


def identity(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_a_call_is_a_child_of_the_span_it_is_made_in_and_linked_to_its_batch(spans: Spans) -> None:
    with Streamer(models.double, wait_for_worker_ready=True) as streamer:
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            assert streamer.predict([1, 2]) == [2, 4]
    [request], [call], [batch] = spans.of("request"), spans.calls, spans.batches
    assert call.parent is not None
    assert (call.parent.trace_id, call.parent.span_id) == identity(request)
    assert links(call) == [identity(batch)]
    assert batch.parent is None
    assert links(batch) == [identity(request)]
    about = {"batch.size": 2, "batch.worker": 0, "batch.rerun": False}
    assert told(call) == told(batch) == about
    assert call.status.status_code is StatusCode.UNSET
    assert None not in (request.start_time, call.start_time, batch.start_time, batch.end_time)
    assert abs((call.start_time or 0) - (request.start_time or 0)) < 60e9, "on the wall clock"
    assert (call.start_time or 0) <= (batch.start_time or 0) < (batch.end_time or 0)
    assert call.end_time == batch.end_time


def test_calls_share_a_batch_and_only_those_in_spans_are_traced(spans: Spans, gate: Gate) -> None:
    async def ask() -> list[Any]:
        with spans.tracer.start_as_current_span("task"):
            return await streamer.apredict(["c"])

    with ThreadedStreamer(models.gated(gate)) as streamer:
        trace_batches(streamer, spans.provider)
        first = streamer.submit(["first"])
        gate.await_arrival()
        with spans.tracer.start_as_current_span("one"):
            futures = [streamer.submit(["a"]), streamer.submit(["b", "b"])]
        futures.append(streamer.submit(["untraced"]))

        async def together() -> list[Any]:
            task = asyncio.create_task(ask())
            await asyncio.sleep(0)  # it has submitted then
            gate.let_through(2)
            return await task

        assert asyncio.run(together()) == [5]
        assert [first.result(), *(future.result() for future in futures)] == [
            [1], [5], [5, 5], [5],
        ]  # fmt: skip
    [one], [task], [batch] = spans.of("one"), spans.of("task"), spans.batches
    assert links(batch) == [identity(one), identity(one), identity(task)]
    parents = [call.parent.span_id if call.parent else None for call in spans.calls]
    assert parents == [identity(one)[1], identity(one)[1], identity(task)[1]]
    assert [told(call)["batch.size"] for call in spans.calls] == [5, 5, 5]
    assert batch.parent is None, "a span that is current in the thread of the loop is not its own"


class Fussy(ManagedModel):
    def init_model(self) -> None:
        """Nothing to load."""

    def predict(self, batch: list[Any]) -> list[Any]:
        if "bad" in batch:
            raise ValueError("a bad one")
        self.padding = 0.5
        return batch


def test_failures_and_padding_are_told(spans: Spans) -> None:
    with ThreadedStreamer(Fussy, 2) as streamer:
        streamer.wait_ready()
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            with pytest.raises(ValueError, match="a bad one"):
                streamer.predict(["bad"])
            streamer.predict(["good"])
    bad, good = spans.calls
    assert bad.status.status_code is StatusCode.ERROR
    assert bad.status.description == "ValueError: a bad one"
    assert told(good)["batch.padding"] == 0.5
    assert "batch.padding" not in told(bad)


def test_what_is_not_sampled_costs_no_span(spans: Spans) -> None:
    silent = TracerProvider(sampler=ALWAYS_OFF)
    with ThreadedStreamer(models.echo) as streamer:
        trace_batches(streamer, spans.provider)
        with silent.get_tracer("tests").start_as_current_span("unsampled"):
            streamer.predict([1])
        streamer.predict([2])
    assert spans.exporter.get_finished_spans() == ()


def test_a_call_of_several_batches_has_a_span_for_each(spans: Spans) -> None:
    with ThreadedStreamer(models.echo, 2) as streamer:
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            streamer.predict(list(range(5)))
    assert [told(call)["batch.size"] for call in spans.calls] == [2, 2, 1]
    assert [links(call) for call in spans.calls] == [[identity(batch)] for batch in spans.batches]


def steps(spans: Spans) -> list[tuple[Any, Any, int, str]]:
    """Of each call, in the order of their ends: how many outputs were handed out, whether it was
    left, how many events of a first output it has, and the error of its status.
    """
    found = []
    for call, batch in zip(spans.calls, spans.batches, strict=True):
        assert call.end_time == batch.end_time
        for event in call.events:
            assert event.name == "service_streamer.first_output"
            assert (call.start_time or 0) <= event.timestamp
        attributes = call.attributes or {}
        outputs, left = (attributes.get(f"service_streamer.{name}") for name in ("outputs", "left"))
        error = call.status.description or ""
        assert (call.status.status_code is StatusCode.ERROR) == bool(error)
        found.append((outputs, left, len(call.events), error))
    return found


def test_spans_of_streams_end_however_these_end(spans: Spans) -> None:
    with ThreadedStreamer(Countdown, 1) as streamer:
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            assert [*streamer.stream(3)] == [1, 2, 3]
            left = streamer.stream(10**9)
            next(left)
            left.close()
            with pytest.raises(ValueError, match="cannot make 1"):
                list(streamer.stream({"n": 2, "raise_at": 1}))
            with pytest.raises(PredictTimeout):
                list(streamer.stream(10**9, timeout=0.05))
            streamer.predict([1])
    whole, left_early, raised, expired, predicted = steps(spans)
    assert whole == (3, None, 1, "")
    assert left_early[0] >= 1
    assert left_early[1:] == (True, 1, "")
    assert raised == (None, None, 0, "ValueError: cannot make 1")
    assert expired[1:3] == (None, 1)
    assert expired[3].startswith("PredictTimeout")
    assert predicted == (None, None, 0, "")


def test_spans_of_a_stream_say_that_its_worker_died(spans: Spans) -> None:
    with Streamer(Resumed, 1, retry=False) as streamer:
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"), pytest.raises(WorkerLost):
            list(streamer.stream({"n": 9, "kill_at": 3}))
    (lost,) = steps(spans)
    assert lost[:3] == (2, None, 1)
    assert lost[3].startswith("WorkerLost")
    spans.exporter.clear()
    with Streamer(Resumed, 1) as streamer:
        trace_batches(streamer, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            stream = streamer.stream({"n": 3000}, max_buffered=4)
            assert next(stream) == 1
            for process in multiprocessing.active_children():
                process.kill()
            assert [*stream] == [*range(2, 3001)]
    interrupted, whole = steps(spans)
    assert interrupted[:3] == (None, None, 0), "it goes on"
    assert interrupted[3].startswith("WorkerLost")
    assert whole == (3000, None, 1, "")


def test_only_streamers_that_have_batches_are_traced(shared: Callable[..., Streamer]) -> None:
    with pytest.raises(TypeError, match="a object does not see the batches of its calls"):
        trace_batches(object())  # type: ignore[arg-type]
    streamer = shared(models.double)
    with pytest.raises(TypeError, match="a Streamer with shared= does not see the batches"):
        trace_batches(streamer)


def test_without_opentelemetry_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; import service_streamer.tracing"
    run = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, check=False
    )
    assert "pip install opentelemetry-api opentelemetry-exporter-otlp-proto-http" in run.stderr
