"""The Open Inference Protocol's routes for GET: health and metadata."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..v2.model_metadata import model_config, model_metadata, server_metadata
from .locks import check_caller
from .models import Models
from .refusals import Refusal, stopping
from .routes import TENSORS, model_and_place
from .service import Service


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
            "invalid_request_error",
            f"{request.method} is not allowed at {place or 'a model'}; see /docs"
            if is_known
            else f"no such path: {request.url.path[:200]}; see /docs for the operations",
            reason="invalid",
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
                raise Refusal(404, "not_found", text, reason="invalid", code="not_found")
            raise self._models.unknown(name)
        service, rest = named
        version = rest.removeprefix("/versions/").partition("/")[0]
        raise Refusal(
            404,
            "not_found",
            f"version: {service.model!r} has the version 1 only; not {version[:100]!r}",
            reason="invalid",
            param="version",
            code="model_not_found",
        )


def json_answer(value: Any, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {"cache-control": "no-store"}
    return Response(body, status, headers, media_type="application/json")
