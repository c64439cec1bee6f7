"""The Open Inference Protocol besides inference: health, metadata, and Triton's model repository.

GET  /v2, /v2/health/..., /v2/models/...    the server and its models
POST /v2/repository/index                   all models, and how they stand; for any key
POST /v2/repository/models/NAME/load        load it, or load it anew; returns when it answers
POST /v2/repository/models/NAME/unload      take it away; open requests are answered
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..v2.infer_answer import model_config, model_metadata, server_metadata
from .api_keys import ADMIN
from .asgi import exchange_of
from .endpoint import TENSORS, model_and_place
from .json_bodies import decoded
from .models import Models
from .refusals import Refusal, late_body, stopping
from .service import Service


def check_caller(service: Service, path: str, scope: str | None, request: Request) -> None:
    """Check the key of a request, and have the access log name it.

    Args:
        path: as metrics have it.
        scope: that the key must have; None for any.

    Raises:
        Refusal: the key is missing or wrong, or has another scope.
    """
    exchange = exchange_of(request.scope)
    try:
        holder = service.authorize(request.scope["headers"], scope)
    except Refusal as refused:
        service.requests.refused(path, refused.status, refused.reason)
        if exchange is not None:
            exchange.key = refused.key
        raise
    if exchange is not None:
        exchange.key = holder.key.name


def is_v2(path: str) -> bool:
    """Whether errors at this path have the protocol's form."""
    return path == "/v2" or path.startswith("/v2/")


class V2Pages:
    """The routes.

    Args:
        models: all of the web process.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        of_model = Route(f"{TENSORS}{{place:path}}", self._of_model)
        of_model.methods = None  # which are allowed depends on the place
        return [
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            of_model,  # POST comes here where no model has the name: see ``Routes``.
        ]

    async def _server(self, _: Request) -> Response:
        return json_answer(server_metadata(over_http=True))

    async def _live(self, _: Request) -> Response:
        return json_answer({"live": True})

    async def _ready(self, _: Request) -> Response:
        is_ready = (await self._models.look())[0] == "ready"
        return json_answer({"ready": is_ready}, 200 if is_ready else 503)

    async def _of_model(self, request: Request) -> Response:
        check_caller(self._models.first, f"{TENSORS}{{model}}", None, request)
        service, place = self._found(request)
        is_read = place in ("", "/ready", "/config")
        if is_read and request.method in ("GET", "HEAD"):
            if place == "/ready":
                return await self._model_ready(service)
            if not service.is_known:
                raise stopping(service.standing()[1])
            name, about = service.model, service.description
            if place == "/config":
                return json_answer(model_config(name, about, service.options.batch_size))
            return json_answer(model_metadata(name, about))
        is_known = is_read or place == "/infer"
        raise Refusal(
            405 if is_known else 404,
            f"{request.method} is not allowed at {place or 'a model'}; see /docs"
            if is_known
            else f"no such path: {request.url.path[:200]}; see /docs for the operations",
            more=((b"allow", b"POST" if place == "/infer" else b"GET, HEAD"),) if is_known else (),
        )

    async def _model_ready(self, service: Service) -> Response:
        state, detail = await service.look()
        if state == "ready":
            return json_answer({"name": service.model, "ready": True})
        return json_answer({"name": service.model, "ready": False, "error": detail}, 503)

    def _found(self, request: Request) -> tuple[Service, str]:
        path = TENSORS + request.path_params["place"]
        found = model_and_place(self._models, path)
        if found is not None:
            return found
        named = self._models.split(path[len(TENSORS) :])
        if named is None:
            name = path[len(TENSORS) :].partition("/versions/")[0]
            for end in ("/infer", "/ready", "/config"):
                name = name.removesuffix(end)
            if name == "stats":
                text = "statistics of this protocol are not offered; see /stats and /metrics"
                raise Refusal(404, text, code="not_found")
            raise self._models.unknown(name)
        service, rest = named
        version = rest.removeprefix("/versions/").partition("/")[0]
        raise Refusal(
            404,
            f"version: {service.model!r} has the version 1 only; not {version[:100]!r}",
            param="version",
            code="model_not_found",
        )


def json_answer(value: Any, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {"cache-control": "no-store"}
    return Response(body, status, headers, media_type="application/json")


#: The paths.
CONTROL = (
    "/v2/repository/index",
    "/v2/repository/models/{model}/load",
    "/v2/repository/models/{model}/unload",
)

#: Bytes of a request.
_MOST_BYTES = 64 << 10

_STATES = {"ready": "READY", "failing": "READY", "starting": "LOADING", "draining": "UNLOADING"}


class _ControlBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of all three requests.

    Attributes:
        ready: list only models that are ready.
        parameters: of load and unload. Of Triton's only ``unload_dependents`` has a meaning here:
            no model depends on another.
    """

    ready: bool = False
    parameters: dict[str, Any] = {}


_read = msgspec.json.Decoder(_ControlBody)

Handler = Callable[[Request, _ControlBody], Awaitable[Response]]


class ModelControl:
    """The routes; for the root only."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[BaseRoute]:
        handlers: tuple[Handler, ...] = (self._index, self._load, self._unload)
        return [
            Route(
                path.replace("{model}", "{model:path}"),
                functools.partial(self._answer, path, handler),
                methods=["POST"],
            )
            for path, handler in zip(CONTROL, handlers, strict=True)
        ]

    async def _answer(self, path: str, handler: Handler, request: Request) -> Response:
        service = self._models.first
        is_index = path == CONTROL[0]
        if not is_index and not service.options.needs_key:
            service.requests.refused(path, 403, "unauthorized")
            raise Refusal(
                403,
                "loading and unloading models needs a key with the scope admin; start the service "
                "with --api-key-file, or change the file of --config and send SIGHUP",
                reason="unauthorized",
                code="no_keys",
            )
        check_caller(service, path, None if is_index else ADMIN, request)
        try:
            async with asyncio.timeout(service.options.timeout) as waiting:
                body = await self._read(request)
            return await handler(request, body)
        except TimeoutError:
            if not waiting.expired():
                raise
            refused = late_body(service.options.timeout)
        except ClientDisconnect:
            service.requests.disconnects += 1
            return Response()  # for nobody
        except asyncio.CancelledError:  # a load takes longer than connections get at the end
            if not service.is_draining:
                raise
            refused = stopping()
        except Refusal as error:
            refused = error
        service.requests.refused(path, refused.status, refused.reason)
        raise refused

    async def _read(self, request: Request) -> _ControlBody:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise Refusal(
                    413,
                    f"the body exceeds {_MOST_BYTES} bytes; it needs none",
                    code="request_too_large",
                )
        read: _ControlBody = decoded(_read, body) if body.strip() else _ControlBody()
        unknown = [name for name in read.parameters if name != "unload_dependents"]
        if unknown:
            raise Refusal(
                422,
                f"parameters: {unknown[0][:100]!r} is not supported; what a model is stands in the "
                "service's file",
                param="parameters",
                code="unsupported_parameter",
            )
        return read

    async def _index(self, _: Request, body: _ControlBody) -> Response:
        return _json_of(await repository_index(self._models, only_ready=body.ready))

    async def _load(self, request: Request, _: _ControlBody) -> Response:
        await self._repository().load(request.path_params["model"])
        return Response(status_code=200)

    async def _unload(self, request: Request, _: _ControlBody) -> Response:
        await self._repository().unload(request.path_params["model"])
        return Response(status_code=200)

    def _repository(self) -> Any:
        repository = self._models.repository
        if repository is None:
            raise Refusal(
                501, "this service cannot load or unload models", code="unsupported_operation"
            )
        return repository


def _json_of(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def repository_index(models: Models, *, only_ready: bool) -> list[dict[str, str]]:
    """All models, or those that are ready, and how they stand."""
    await models.look()
    found = {each.model: each.standing() for each in models}
    repository = models.repository
    names = {name: each[0] for name, each in found.items()}
    shown = {
        name: _STATES.get(state, "UNAVAILABLE")
        for name, state in (names if repository is None else repository.names()).items()
    }
    return [
        {
            "name": name,
            "version": "1",
            "state": state,
            "reason": "" if state == "READY" else found.get(name, ("", "unloaded"))[1],
        }
        for name, state in shown.items()
        if state == "READY" or not only_ready
    ]
