"""OpenTelemetry for a service: spans of requests, of calls to the model, and of batches.

They go to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, or wherever the process was set up to send
them before (``opentelemetry-instrument``).
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.types import ASGIApp

from ... import __version__
from ...streamer import BaseStreamer, PoolStreamer
from ...tracing import trace_batches

__all__ = ["traced"]

#: What is asked for every few seconds, or never ends.
_EXCLUDED = "health/live,health/ready,metrics,stats,events,static/.*"


def traced(app: ASGIApp, streamer: BaseStreamer) -> ASGIApp:
    """The application, with a span for each request; calls and batches get theirs, too."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # nobody has set it up
        names = {"service.name": "service_streamer", "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(names))  # OTEL_SERVICE_NAME wins
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    if isinstance(streamer, PoolStreamer):  # what workers on other hosts do is not seen here
        trace_batches(streamer)
    return OpenTelemetryMiddleware(app, excluded_urls=_EXCLUDED, exclude_spans=["receive", "send"])
