"""The ASGI application: requests for the model on a path of their own, the rest on Starlette's.

POST to an operation ──▶ Endpoint: an Exchange, the operation, one answer
everything else      ──▶ Starlette: health, metrics, the page, documentation, 404, 405
"""

from __future__ import annotations

import asyncio
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

from .exchange import Disconnected, Exchange, Receive, Scope, Send, answer, answer_early
from .headers import timing_header
from .operations import OPERATIONS, Description, Operation
from .pages import Pages
from .refusals import Refusal, refusal
from .service import Service

__all__ = ["create_app"]

logger = logging.getLogger(__name__)


def create_app(service: Service) -> ASGIApp:
    """The application. Whoever makes it starts and stops the service and closes the streamer."""
    endpoints = {op.path: Endpoint(service, op) for op in OPERATIONS}
    pages = Pages(service)
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    rest = Starlette(
        routes=[*pages.routes(), *routes],
        exception_handlers={HTTPException: _told, Refusal: _refused, Exception: _failed(service)},
    )

    rest.router.redirect_slashes = False  # to where the caller says that we are

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = endpoints.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await rest(scope, receive, send)

    return app


class Endpoint:
    """Serves one operation. An ASGI application."""

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service = service
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        service, operation = self._service, self._operation
        requests = service.requests
        exchange = _Exchange(service, receive)
        requests.open += 1
        try:
            await exchange.read(scope["headers"])
            self._check_served()
            body = await operation.run(exchange.body, exchange)
            refused = None
        except Disconnected:
            requests.disconnects += 1
            return
        except asyncio.CancelledError:
            if not service.is_draining:
                raise
            refused = Refusal(
                503, "unavailable", "the service is stopping", reason="unavailable", retry_after=5
            )
        except Exception as error:
            refused = refusal(error, debug=service.options.debug)
        finally:  # from here on nobody looks after its time, nor waits for it at the end
            exchange.close()
            service.request_over()
        if refused is None:
            requests.served(operation.path, perf_counter() - began)
            timing = exchange.timing
            await answer(send, 200, body, () if timing is None else (timing_header(timing),))
            return
        requests.refused(operation.path, refused.status, refused.reason)
        if exchange.is_read:
            await answer(send, refused.status, refused.body, refused.headers)
        else:
            await answer_early(send, receive, refused, service.options.max_body)

    def _check_served(self) -> None:
        service = self._service
        if service.is_draining or not service.is_known:
            _, text = service.standing()
            raise Refusal(503, "unavailable", text, reason="unavailable", retry_after=5)
        if not service.offers(self._operation.does):
            task = service.description.get("task", "a model of its own")
            task = "a model of its own" if task == "custom" else f"for {task}"
            raise Refusal(
                404,
                "not_found",
                f"{self._operation.path} is not offered: what is served is {task}; see /docs",
                reason="invalid",
            )


class _Exchange(Exchange):
    """With what operations need of the service."""

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

    def check_count(self, count: int) -> None:
        most = self._service.options.max_pending
        if most is not None and count > most:
            raise Refusal(
                413,
                "invalid_request_error",
                f"{count} inputs are more than the {most} that may wait; send fewer at once",
                reason="too_large",
            )

    async def compute(self, items: list[Any]) -> list[Any]:
        admission = self._service.admission
        large = admission.check(self._service.description, items)
        if not large:
            return await self.submit(items)
        with admission.holding(large):
            return await self.submit(items)


async def _told(request: Request, error: Exception) -> Response:
    """Starlette's own errors, 404 and 405 for the most part, in the form of all others."""
    assert isinstance(error, HTTPException)
    told = {
        404: f"there is nothing at {request.url.path}; see /docs for what there is",
        405: f"{request.method} is not offered at {request.url.path}; see /docs",
    }
    refused = Refusal(
        error.status_code,
        "not_found" if error.status_code == 404 else "invalid_request_error",
        told.get(error.status_code, error.detail),
        reason="invalid",
    )
    return _response(refused, error.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _response(error)


def _failed(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def failed(_: Request, error: Exception) -> Response:
        return _response(refusal(error, debug=service.options.debug))

    return failed


def _response(refused: Refusal, headers: Any = None) -> Response:
    response = Response(refused.body, refused.status, headers, media_type="application/json")
    for name, value in refused.headers:
        response.headers[name.decode()] = value.decode()
    return response
