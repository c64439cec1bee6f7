"""The ASGI application: a fast path for requests to the model, Starlette for the rest.

POST to an operation ──▶ Endpoint: a Cycle, the operation, one answer
everything else      ──▶ Starlette: health, metrics, the page, documentation, 404, 405
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ... import __version__
from ...streamer import BaseStreamer, PoolStreamer
from .cycle import Cycle, Disconnected, Message, Receive, Scope, Send, answer, answer_early
from .events import Form
from .headers import find_request_id, is_allowed_host, read_request_id, timing_header
from .operations import OPERATIONS, Description, Operation
from .pages import Pages
from .refusals import Refusal, refusal
from .service import Service
from .streaming import MAX_BUFFERED, EventStream

__all__ = ["create_app", "stopping", "traced"]

logger = logging.getLogger(__name__)

#: Paths without spans: polled every few seconds, or endless.
_UNTRACED = "health/live,health/ready,metrics,stats,events,static/.*"

Headers = tuple[tuple[bytes, bytes], ...]


def create_app(service: Service) -> ASGIApp:
    """The application. The caller starts and stops the service, and closes the streamer."""
    endpoints = {op.path: Endpoint(service, op) for op in OPERATIONS}
    pages = Pages(service)
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    rest = Starlette(
        routes=[*pages.routes(), *routes],
        exception_handlers={
            HTTPException: _http_error,
            Refusal: _refused,
            Exception: _failed(service),
        },
    )

    rest.router.redirect_slashes = False  # redirects would trust the Host header
    allowed_hosts = service.options.allowed_hosts

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await rest(scope, receive, send)
            return
        if allowed_hosts and not _has_allowed_host(scope, allowed_hosts):
            service.requests.refused("*", 400, "invalid")
            send = _identified(scope, send)
            await answer_early(send, receive, _bad_host(scope), service.options.max_body)
            return
        if scope["method"] == "POST":
            endpoint = endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await rest(scope, receive, _identified(scope, send))

    return app


def _has_allowed_host(scope: Scope, allowed: tuple[str, ...]) -> bool:
    """Whether to serve the request. Probes name a container's address, unknown in advance."""
    is_probe = scope["path"] in ("/health/live", "/health/ready")
    return is_probe or is_allowed_host(allowed, scope["headers"])


def _bad_host(scope: Scope) -> Refusal:
    hosts = [value[:100].decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return Refusal(
        400,
        "invalid_request_error",
        f"Host: {', '.join(hosts)!r} is not a host of this service; the operator can allow it "
        "with --allowed-host",
        reason="invalid",
        param="Host",
        code="host_not_allowed",
    )


def _identified(scope: Scope, send: Send) -> Send:
    """Adds the request's X-Request-ID, if it has one, to the answer."""
    request_id = find_request_id(scope["headers"])
    if request_id is None:
        return send
    header = _id_header(request_id)

    async def identified(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return identified


def _id_header(request_id: str) -> tuple[bytes, bytes]:
    return b"x-request-id", request_id.encode()


class Endpoint:
    """An ASGI application that serves one operation."""

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service = service
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        service, operation = self._service, self._operation
        requests = service.requests
        cycle = _Cycle(service, receive)
        stream = None
        requests.open += 1
        try:
            await cycle.read(scope["headers"])
            self._check_served()
            body = await operation.run(cycle.body, cycle)
            refused = None
            if type(body) is EventStream:
                stream = body
        except Disconnected:
            requests.disconnects += 1
            return
        except asyncio.CancelledError:
            if not service.is_draining:
                raise
            refused = stopping()
        except Exception as error:
            named = find_request_id(scope["headers"])
            refused = refusal(error, debug=service.options.debug, request_id=named)
        finally:  # ends its timer; a drain no longer waits for it
            cycle.close()
            if stream is None:
                service.request_over()
        if stream is not None:
            await self._stream(stream, scope, send, began)
            return
        if refused is None:
            assert isinstance(body, bytes)
            requests.served(operation.path, perf_counter() - began)
            timing = cycle.timing
            headers: Headers = () if timing is None else (timing_header(timing),)
            if cycle.request_id:
                request_id = read_request_id(cycle.request_id)
                headers += () if request_id is None else (_id_header(request_id),)
            await answer(send, 200, body, headers)
            return
        if operation.is_openais:
            refused = refused.in_openais_form()
        requests.refused(operation.path, refused.status, refused.reason)
        request_id = find_request_id(scope["headers"]) or refused.log_id
        if request_id is not None:
            refused.headers += (_id_header(request_id),)
        if cycle.is_read:
            await answer(send, refused.status, refused.body, refused.headers)
        else:
            await answer_early(send, receive, refused, service.options.max_body)

    async def _stream(self, stream: EventStream, scope: Scope, send: Send, began: float) -> None:
        """Send a stream that has begun. Its status is known, whatever becomes of it."""
        service, path = self._service, self._operation.path
        named = find_request_id(scope["headers"])
        headers: Headers = () if named is None else (_id_header(named),)
        refuse = functools.partial(refusal, debug=service.options.debug, request_id=named)
        try:
            refused = await stream.send_to(send, headers, refuse)
        except Disconnected:
            service.requests.disconnects += 1
        else:
            if refused is None:
                service.requests.served(path, perf_counter() - began)
            else:
                service.requests.refused(path, refused.status, refused.reason)
        finally:
            service.requests.outputs += stream.outputs
            service.request_over()

    def _check_served(self) -> None:
        service = self._service
        if service.is_draining or not service.is_known:
            _, text = service.standing()
            raise stopping(text)
        if not service.offers(self._operation.does):
            task = service.description.get("task", "custom")
            task = "a custom model" if task == "custom" else f"a model for {task}"
            raise Refusal(
                404,
                "not_found",
                f"{self._operation.path} is not supported: the service runs {task}; see /docs",
                reason="invalid",
                code="unsupported_operation",
            )


class _Cycle(Cycle):
    """A cycle with the operations' view of the service."""

    __slots__ = ("_service",)

    def __init__(self, service: Service, receive: Receive) -> None:
        super().__init__(service.options, service.backend, receive)
        self._service = service

    @property
    def description(self) -> Description:
        return self._service.description

    @property
    def model(self) -> str:
        return self._service.model

    @property
    def has_steps(self) -> bool:
        return self._service.has_steps

    def check_count(self, count: int) -> None:
        most = self._service.options.max_pending
        if most is not None and count > most:
            raise Refusal(
                413,
                "invalid_request_error",
                f"{count} inputs exceed the queue's limit of {most} (--max-pending); send fewer at "
                "once",
                reason="too_large",
                code="too_many_inputs",
            )

    async def compute(self, items: list[Any]) -> list[Any]:
        admission = self._service.admission
        large = admission.check(self._service.description, items)
        if not large:
            return await self.submit(items)
        with admission.holding(large):
            return await self.submit(items)

    async def stream(self, item: Any, form: Form) -> EventStream:
        service = self._service
        large = service.admission.check(service.description, [item])
        outputs = self.open_stream(item, MAX_BUFFERED)
        held = contextlib.ExitStack()  # until the stream is closed
        held.enter_context(service.admission.holding(large))

        def closed(stream: EventStream) -> None:
            service.streams.discard(stream)
            held.close()

        stream = EventStream(outputs, form, self._receive, closed)
        service.streams.add(stream)
        await stream.begin()
        service.requests.streams += 1
        return stream


def stopping(text: str = "the service is stopping") -> Refusal:
    """The answer when the model is not there, or not any more."""
    return Refusal(
        503, "unavailable", text, reason="unavailable", code="unavailable", retry_after=5
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors, mostly 404 and 405, in the common form."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such path: {request.url.path}; see /docs for the operations",
        405: f"{request.method} is not allowed at {request.url.path}; see /docs",
    }
    refused = Refusal(
        error.status_code,
        "not_found" if error.status_code == 404 else "invalid_request_error",
        messages.get(error.status_code, error.detail),
        reason="invalid",
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
    )
    return _response(refused, error.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _response(error)


def _failed(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def failed(request: Request, error: Exception) -> Response:
        named = find_request_id(request.scope["headers"])
        return _response(refusal(error, debug=service.options.debug, request_id=named))

    return failed


def _response(refused: Refusal, headers: Any = None) -> Response:
    response = Response(refused.body, refused.status, headers, media_type="application/json")
    for name, value in refused.headers:
        response.headers[name.decode()] = value.decode()
    return response


def traced(app: ASGIApp, streamer: BaseStreamer) -> ASGIApp:
    """The application with OpenTelemetry spans of requests, calls and batches.

    They go to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, unless the process has a provider
    already (``opentelemetry-instrument``).
    """
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ...tracing import trace_batches

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        names = {"service.name": "service_streamer", "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(names))  # OTEL_SERVICE_NAME wins
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    # Worker hosts trace their own batches; those of a shared pool are not traced.
    if isinstance(streamer, PoolStreamer) and not streamer.is_shared:
        trace_batches(streamer)
    return OpenTelemetryMiddleware(app, excluded_urls=_UNTRACED, exclude_spans=["receive", "send"])
