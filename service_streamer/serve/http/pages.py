"""The routes for GET: health, figures, documentation and the page."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ... import __version__
from .dashboard import Dashboard
from .models import Models
from .openapi import LOCKED, openapi
from .operations import OPERATIONS
from .prometheus import exposition_of, merged
from .refusals import Refusal
from .request_figures import METRICS
from .schemas import hub_info
from .service import Service
from .v2_pages import V2Pages, check_caller, json_answer

_STATIC = Path(__file__).parent.parent / "static"

#: The page loads nothing from other sites, and other sites may not frame it.
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'self'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Pages:
    """The routes of a model besides its operations.

    Args:
        models: all of the web process.
        service: the model.
        is_root: whether the routes are for all models where that makes a difference: at the root,
            and not below /models/NAME.
    """

    def __init__(self, models: Models, service: Service, *, is_root: bool) -> None:
        self._models = models
        self._service = service
        self._is_root = is_root
        self._dashboard = Dashboard(service)
        self._exposition = exposition_of(models)
        self._described: object = None  # the description that the document was made of
        self._document = msgspec.Raw()

    def routes(self) -> list[BaseRoute]:
        """Routes for Starlette; those in ``LOCKED`` need the API key, if there is one."""
        page = functools.partial(_page, "index.html")
        docs = functools.partial(_page, "docs.html")
        handlers: dict[str, Handler] = {
            "/health": self._ready,
            "/health/live": self._live,
            "/health/ready": self._ready,
            "/info": self._info,
            "/openapi.json": self._openapi,
            "/metrics": self._metrics,
            "/stats": self._stats,
            "/events": self._events,
            "/v1/models": self._models_served,
            "/v1/models/{model}": self._model_served,
        }
        for path, scope in LOCKED.items():
            handlers[path] = _locked(self._service, path, scope, handlers[path])
        return [
            Route("/", page, methods=["GET", "POST"]),  # POST goes to the operation, not here
            Route("/docs", docs),
            *(
                Route(path.replace("{model}", "{model:path}"), handler)
                for path, handler in handlers.items()
            ),
            *V2Pages(self._models).routes(),
            Mount("/static", _Static(directory=_STATIC)),
        ]

    async def _live(self, _: Request) -> Response:
        return json_answer({"status": "live"})

    async def _ready(self, _: Request) -> Response:
        state, detail = await (self._models if self._is_root else self._service).look()
        answer: dict[str, Any] = {"status": state, "detail": detail}
        if self._is_root and len(self._models) > 1:
            answer["models"] = {each.model: each.standing()[0] for each in self._models}
        return json_answer(answer, 200 if state == "ready" else 503)

    async def _info(self, _: Request) -> Response:
        service, options = self._service, self._service.options
        state = (await service.look())[0]
        info: dict[str, Any] = {
            "task": None, "mask_token": None, "takes_parameters": False, "labels": None,
            "candidate_labels_required": False, "max_tokens": None, "example": None,
            **service.description,
            **hub_info(service.description, options.max_pending),
            "model": service.model,
            "models": [each.model for each in self._models],
            "version": __version__,
            "batch_size": options.batch_size,
            "max_pending": options.max_pending,
            "timeout": options.timeout,
            "max_body": options.max_body,
            "max_answers": options.max_answers,
            "max_pixels": options.max_pixels,
            "max_audio_seconds": options.max_audio_seconds,
            "max_characters": options.max_characters,
            "max_generated_tokens": options.max_tokens,
            "ready": state == "ready",
            "api_key_required": options.needs_key,
            "streams": service.has_steps,
            "endpoints": [op.path for op in OPERATIONS if service.offers(op.does)],
        }  # fmt: skip
        return json_answer(info)

    async def _openapi(self, _: Request) -> Response:
        description = self._service.description
        if self._described is not description:
            self._document = msgspec.Raw(msgspec.json.encode(openapi(self._service)))
            self._described = description
        return json_answer(self._document)

    async def _metrics(self, _: Request) -> Response:
        siblings = self._service.siblings
        if siblings is None:
            text = self._exposition.text()
        else:
            renewed = asyncio.gather(*(each.renew() for each in self._models))
            _renewed, others = await asyncio.gather(renewed, siblings.others(METRICS))
            own = {siblings.number: self._exposition.snapshot()}
            text = merged(others | own, self._models)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _stats(self, _: Request) -> Response:
        return json_answer(await self._dashboard.snapshot())

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":  # events never end
            return Response(media_type="text/event-stream")
        if self._dashboard.is_full:
            raise Refusal(
                503,
                "too many clients are watching the live figures; use /stats, or retry later",
                kind="overloaded",
                reason="overloaded",
                code="overloaded",
                retry_after=30,
            )
        return StreamingResponse(
            self._dashboard.events(),
            media_type="text/event-stream",
            # A proxy must not buffer them.
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _models_served(self, _: Request) -> Response:
        return json_answer({"object": "list", "data": [_served(each) for each in self._models]})

    async def _model_served(self, request: Request) -> Response:
        return json_answer(_served(self._models.get(request.path_params["model"])))


def _served(service: Service) -> dict[str, Any]:
    """The model in OpenAI's form."""
    return {"id": service.model, "object": "model", "created": 0, "owned_by": "you"}


class _Static(StaticFiles):
    """Static files with the headers of the page, so that caches keep them in step."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


Handler = Callable[[Request], Awaitable[Response]]


def _locked(service: Service, path: str, scope: str | None, handler: Handler) -> Handler:
    async def locked(request: Request) -> Response:
        check_caller(service, path, scope, request)
        return await handler(request)

    return locked


async def _page(name: str, _: Request) -> Response:
    return FileResponse(_STATIC / name, headers=_PAGE_HEADERS)
