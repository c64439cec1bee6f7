"""OpenTelemetry spans for the calls of a streamer: where the time of a request went.

For each call that is made inside a sampled span, in any thread or task:

    request                ├──────────────────────────────────┤     yours
    service_streamer.call     ├───────────────────────────┤         its child: arrival to result
    service_streamer.batch              ├─────────────────┤         a trace of its own, linked

A call that is cut into several batches has a span for each of them. Needs ``opentelemetry-api``
(the extra ``opentelemetry``), and your application's choice of where spans
go. Nothing is asked of OpenTelemetry before ``trace_batches`` is called, nor for calls outside of
sampled spans. The spans of a batch are made in the streamer's thread after its callers are
answered. Each takes some 20 µs, so trace only a share of the requests under load.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from .observe.record import BatchRecord, Call
from .reporting import explain_missing
from .streamer import PoolStreamer

with explain_missing(__name__, "opentelemetry", "opentelemetry"):
    from opentelemetry import trace

_NAME = "service_streamer"
_QUEUED = f"{_NAME}.queued"


def trace_batches(
    streamer: PoolStreamer, tracer_provider: trace.TracerProvider | None = None
) -> None:
    """Make spans for the calls of a streamer from now on.

    Attributes of both spans, each with ``service_streamer.`` before it: ``batch.size`` in items,
    ``batch.worker``, ``batch.inference`` (what the model took, seconds), ``batch.rerun`` (whether
    its items have been in a batch before), ``batch.reason`` (why it was cut when it was: the name
    of a ``Reason``, in lower case), ``batch.padding`` where the model tells it, ``batch.stages``
    where its worker runs stages (seconds in preprocess, forward and postprocess), and ``queued``:
    how long the call waited until it was cut into the batch, seconds; for the batch the longest of
    them. A batch on which the model raised has the status ERROR; so have the calls in it, though a
    later batch may answer them. A call that failed for another reason has it, too, as one whose
    time has ended.

    Attributes of calls only: ``left``, if nobody waited for the result any more, and ``outputs``,
    how many a stream handed out. Its first output is the event ``service_streamer.first_output``.
    The spans of a stream end when the worker has let go of its item: also if it was left early. Of
    a model of steps each item is a batch, and one whose worker dies has spans with that error.

    Args:
        streamer: one with workers of its own, not of a shared pool.
        tracer_provider: None for the global one.

    Raises:
        TypeError: the workers are not its own, so that it knows nothing of batches.
    """
    if not isinstance(streamer, PoolStreamer) or streamer.pool_client is not None:
        shared = " with shared=" if isinstance(streamer, PoolStreamer) else ""
        raise TypeError(
            f"a {type(streamer).__name__}{shared} does not see the batches of its calls; "
            "trace a Streamer or a ThreadedStreamer with workers of its own"
        )
    tracer = trace.get_tracer(_NAME, tracer_provider=tracer_provider)
    streamer.engine.watch(functools.partial(_emit, tracer), _note_span)


def _note_span(call: Call) -> None:
    """Have the call know inside of which span it was made; None if of none that is sampled."""
    span = trace.get_current_span()
    call.context = span if span.get_span_context().trace_flags.sampled else None


def _emit(tracer: trace.Tracer, record: BatchRecord) -> None:
    """Make the spans of a batch."""
    calls, report = record.each_call(), record.report
    traced = [(call, call.context) for call in calls if call.context is not None]
    if not traced:
        return
    # Found out anew each time, since the wall clock may be set.
    offset = time.time() - time.monotonic()

    def wall(at: float) -> int:
        return round((at + offset) * 1e9)

    about: dict[str, Any] = {
        f"{_NAME}.batch.size": record.size,
        f"{_NAME}.batch.worker": record.worker,
        f"{_NAME}.batch.inference": report.duration,
        f"{_NAME}.batch.rerun": record.is_rerun,
        f"{_NAME}.batch.reason": record.reason.name.lower(),
    }
    if report.padding is not None:
        about[f"{_NAME}.batch.padding"] = report.padding
    if report.stages is not None:
        about[f"{_NAME}.batch.stages"] = report.stages
    longest = record.cut_at - min(call.arrived_at for call in calls)
    batch = tracer.start_span(
        f"{_NAME}.batch",
        context=trace.set_span_in_context(trace.INVALID_SPAN),
        attributes={**about, _QUEUED: longest},
        links=[trace.Link(caller.get_span_context()) for _, caller in traced],
        start_time=wall(record.cut_at),
    )
    spans = [(batch, report.failure)]
    for call, caller in traced:
        span = tracer.start_span(
            f"{_NAME}.call",
            context=trace.set_span_in_context(caller),
            attributes={**about, _QUEUED: record.cut_at - call.arrived_at},
            links=[trace.Link(batch.get_span_context())],
            start_time=wall(call.arrived_at),
        )
        spans.append((span, call.failure or report.failure))
        if call.is_over and call.failure is None and call.unanswered:
            span.set_attribute(f"{_NAME}.left", True)
        if call.is_over and call.part_at is not None:
            span.set_attribute(f"{_NAME}.outputs", call.parts)
            first_at = wall(call.arrived_at + call.first_output)
            span.add_event(f"{_NAME}.first_output", timestamp=first_at)
    for span, failure in spans:
        if failure is not None:
            span.set_status(trace.StatusCode.ERROR, failure.text)
        span.end(wall(record.back_at))
