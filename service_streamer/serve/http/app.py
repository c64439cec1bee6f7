"""The application: a fast path for requests to the model, Starlette for the rest.

POST to an operation ──▶ Endpoint: a RequestContext, the operation, one answer
everything else      ──▶ Starlette: health, metrics, the page, documentation, 404, 405

``create_site`` serves our own connections, ``create_app`` any ASGI server.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ... import __version__
from .asgi import ASGIBridge, ExchangeBridge, Receive, Scope, Send, request_id_of
from .context import answer_early
from .endpoint import PREFIX, Routes
from .exchange import Exchange, HTTPExchange
from .headers import is_allowed_host
from .models import Models
from .operations import OPERATIONS
from .pages import PAGES, Pages
from .refusals import Refusal, refusal
from .service import Service
from .v2_pages import ModelControl, is_v2

#: Patterns of paths without spans.
_UNTRACED = ",".join([*(f"{each.path}$" for each in PAGES if each.is_polled), "/static/.*"])

#: Probes name a container's address, which is unknown in advance.
_PROBES = {each.path for each in PAGES if each.path.startswith("/health")} | {
    "/v2/health/live", "/v2/health/ready",
}  # fmt: skip

#: Paths at the root that are for the default model, where models are named.
_OF_DEFAULT = {each.path for each in OPERATIONS if not each.is_openais} | {
    each.path for each in PAGES if each.is_of_model
}


def create_site(models: Models) -> Callable[[HTTPExchange], Awaitable[None]]:
    """What answers our connections. The caller starts and stops the services and streamers."""
    routes = Routes(models)
    rest = ASGIBridge(create_app(models))
    allowed_hosts = models.first.options.allowed_hosts

    def site(exchange: HTTPExchange) -> Awaitable[None]:
        if exchange.method == b"POST":
            endpoint = routes.find(exchange.target)
            if endpoint is not None and (
                not allowed_hosts or is_allowed_host(allowed_hosts, exchange.headers)
            ):
                return endpoint(exchange)
        return rest(exchange)

    return site


def create_app(models: Models) -> ASGIApp:
    """The same for an ASGI server."""
    routes, pages = Routes(models), _Sites(models)
    options = models.first.options
    strangers = ExchangeBridge(functools.partial(_refuse_host, models))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await pages.root()(scope, receive, send)
            return
        if options.allowed_hosts and not _has_allowed_host(scope, options.allowed_hosts):
            await strangers(scope, receive, send)
            return
        path = scope["path"]
        if scope["method"] == "POST":
            endpoint = routes.find(path.encode("utf-8", "surrogatepass"))
            if endpoint is not None:
                await ExchangeBridge(endpoint)(scope, receive, send)
                return
        site, place = pages.root(), path
        if path in _OF_DEFAULT and models.default is None:
            site = _response(models.without_default(path))
        if path.startswith(PREFIX):
            found = models.split(path[len(PREFIX) :])
            if found is None:
                unknown = _response(models.unknown(path[len(PREFIX) :].partition("/")[0]))
                await unknown(scope, receive, send)
                return
            service, place = found
            site = pages.of(service)
            if not place:  # or the links of the page would lead elsewhere; a name may have a ":"
                name = scope["raw_path"].rpartition(b"/")[2].decode("ascii", "replace")
                site, place = RedirectResponse(f"./{name}/"), path
        await site({**scope, "path": place or "/"}, receive, send)

    return app


class _Sites:
    """The pages of each model, and those at the root."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._sites: dict[tuple[Service, bool], ASGIApp] = {}
        self._number = models.number

    def root(self) -> ASGIApp:
        return self._site(self._models.default or self._models.first, is_root=True)

    def of(self, service: Service) -> ASGIApp:
        return self._site(service, is_root=False)

    def _site(self, service: Service, *, is_root: bool) -> ASGIApp:
        if self._number != self._models.number:  # of models that are not there any more
            self._sites.clear()
            self._number = self._models.number
        site = self._sites.get((service, is_root))
        if site is None:
            pages = Pages(self._models, service, is_root=is_root).routes()
            control = ModelControl(self._models).routes() if is_root else []
            site = _site([*pages, *control], service)
            self._sites[service, is_root] = site
        return site


def _site(routes: Sequence[BaseRoute], service: Service) -> ASGIApp:
    async def unreachable(_: Request) -> Response:
        raise HTTPException(404)

    # POST never comes here. They say what is allowed instead of another method.
    operations = [Route(op.path, unreachable, methods=["POST"]) for op in OPERATIONS]
    site = Starlette(
        routes=[*routes, *operations],
        exception_handlers={
            HTTPException: _http_error,
            Refusal: _refused,
            Exception: _failed(service),
        },
    )
    site.router.redirect_slashes = False  # redirects would trust the Host header
    return site


def _has_allowed_host(scope: Scope, allowed: tuple[str, ...]) -> bool:
    """Whether to serve the request."""
    return scope["path"] in _PROBES or is_allowed_host(allowed, scope["headers"])


async def _refuse_host(models: Models, exchange: Exchange) -> None:
    service = models.first
    headers = exchange.headers
    hosts = [value[:100].decode("latin-1") for name, value in headers if name == b"host"]
    refused = Refusal(
        400,
        f"Host: {', '.join(hosts)!r} is not a host of this service; the operator can allow it "
        "with --allowed-host",
        param="Host",
        code="host_not_allowed",
    )
    service.requests.refused("*", 400, "invalid")
    answer_early(exchange, refused, service.options.max_body)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors, mostly 404 and 405, in the common form."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such path: {request.url.path}; see /docs for the operations",
        405: f"{request.method} is not allowed at {request.url.path}; see /docs",
    }
    refused = Refusal(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
    )
    if is_v2(request.url.path):
        refused = refused.in_v2_form()
    return _response(refused, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    if is_v2(request.url.path):
        error = error.in_v2_form()
    return _response(error)


def _failed(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def failed(request: Request, error: Exception) -> Response:
        named = request_id_of(request.scope)
        refused = refusal(error, debug=service.options.debug, request_id=named)
        return _response(refused.in_v2_form() if is_v2(request.url.path) else refused)

    return failed


def _response(refused: Refusal, headers: Any = None) -> Response:
    response = Response(refused.body, refused.status, headers, media_type="application/json")
    for name, value in refused.headers:
        response.headers[name.decode()] = value.decode()
    return response


def traced(app: ASGIApp) -> ASGIApp:
    """The application with OpenTelemetry spans of requests; ``HostedModel`` adds those of batches.

    They go to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, unless the process has a provider
    already (``opentelemetry-instrument``).
    """
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        names = {"service.name": "service_streamer", "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(names))  # OTEL_SERVICE_NAME wins
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return OpenTelemetryMiddleware(app, excluded_urls=_UNTRACED, exclude_spans=["receive", "send"])
