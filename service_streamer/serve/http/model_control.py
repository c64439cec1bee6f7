"""Loading and unloading of models over HTTP, as Triton has it: the model repository extension.

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

from .api_keys import ADMIN
from .json_bodies import decoded
from .locks import check_caller
from .models import Models
from .refusals import Refusal, late_body, stopping

#: The paths.
CONTROL = (
    "/v2/repository/index",
    "/v2/repository/models/{model}/load",
    "/v2/repository/models/{model}/unload",
)

#: Bytes of a request.
_MOST_BYTES = 64 << 10

_STATES = {"ready": "READY", "failing": "READY", "starting": "LOADING", "draining": "UNLOADING"}


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Of all three requests.

    Attributes:
        ready: list only models that are ready.
        parameters: of load and unload. Of Triton's only ``unload_dependents`` has a meaning here:
            no model depends on another.
    """

    ready: bool = False
    parameters: dict[str, Any] = {}


_read = msgspec.json.Decoder(_Body)

Handler = Callable[[Request, _Body], Awaitable[Response]]


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
                "permission_error",
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

    async def _read(self, request: Request) -> _Body:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise Refusal(
                    413,
                    "invalid_request_error",
                    f"the body exceeds {_MOST_BYTES} bytes; it needs none",
                    reason="too_large",
                    code="request_too_large",
                )
        read: _Body = decoded(_read, body) if body.strip() else _Body()
        unknown = [name for name in read.parameters if name != "unload_dependents"]
        if unknown:
            raise Refusal(
                422,
                "invalid_request_error",
                f"parameters: {unknown[0][:100]!r} is not supported; what a model is stands in the "
                "service's file",
                reason="invalid",
                param="parameters",
                code="unsupported_parameter",
            )
        return read

    async def _index(self, _: Request, body: _Body) -> Response:
        return _json(await repository_index(self._models, only_ready=body.ready))

    async def _load(self, request: Request, _: _Body) -> Response:
        await self._repository().load(request.path_params["model"])
        return Response(status_code=200)

    async def _unload(self, request: Request, _: _Body) -> Response:
        await self._repository().unload(request.path_params["model"])
        return Response(status_code=200)

    def _repository(self) -> Any:
        repository = self._models.repository
        if repository is None:
            raise Refusal(
                501,
                "invalid_request_error",
                "this service cannot load or unload models",
                reason="invalid",
                code="unsupported_operation",
            )
        return repository


def _json(value: Any) -> Response:
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
