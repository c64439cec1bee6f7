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
from .api_keys import METRICS
from .dashboard import Dashboard
from .models import Models
from .openapi import openapi
from .operations import OPERATIONS, Page
from .prometheus import exposition_of, merge_processes
from .refusals import Refusal
from .request_figures import ALL_METRICS
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
        """Routes for Starlette: those of ``PAGES``, and what is no page of the documentation."""
        return [
            # POST goes to the operation, not here.
            Route("/", functools.partial(_file, "index.html"), methods=["GET", "POST"]),
            *(
                Route(each.path.replace("{model}", "{model:path}"), self._route(each))
                for each in PAGES
            ),
            *V2Pages(self._models).routes(),
            Mount("/static", _Static(directory=_STATIC)),
        ]

    def _route(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if page.needs_key:
                check_caller(self._service, page.path, page.scope, request)
            return await page.answer(self, request)

        return answer

    async def _docs(self, request: Request) -> Response:
        return await _file("docs.html", request)

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
            self._document = msgspec.Raw(msgspec.json.encode(openapi(self._service, PAGES)))
            self._described = description
        return json_answer(self._document)

    async def _metrics(self, _: Request) -> Response:
        siblings = self._service.siblings
        if siblings is None:
            text = self._exposition.text()
        else:
            renewed = asyncio.gather(*(each.renew() for each in self._models))
            _renewed, others = await asyncio.gather(renewed, siblings.others(ALL_METRICS))
            own = {siblings.number: self._exposition.snapshot()}
            text = merge_processes(others | own, self._models)
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


_HEALTH = "The model is loading, stopping or broken"

#: All that GET answers besides the page itself, its files, and the Open Inference Protocol.
PAGES = (
    Page("/docs", Pages._docs, is_of_model=True),
    Page("/openapi.json", Pages._openapi, is_of_model=True),
    Page(
        "/health/live", Pages._live, "Whether the web process answers", "It answers",
        is_polled=True,
    ),
    Page(
        "/health/ready", Pages._ready, "Whether the model is ready", "It is",
        unready=_HEALTH, is_polled=True,
    ),
    Page(
        "/health", Pages._ready, "The same, where text-embeddings-inference has it", "It is",
        unready=_HEALTH, is_polled=True,
    ),
    Page(
        "/info", Pages._info, "The served model and its limits", "The model and the limits",
        is_of_model=True,
    ),
    Page(
        "/stats", Pages._stats, "Current figures", "A snapshot",
        needs_key=True, scope=METRICS, is_of_model=True, is_polled=True,
    ),
    Page(
        "/metrics", Pages._metrics, "Metrics for Prometheus", "The metrics", "text/plain",
        needs_key=True, scope=METRICS, is_polled=True,
    ),
    Page(
        "/events", Pages._events, "A snapshot every second", "Snapshots", "text/event-stream",
        needs_key=True, scope=METRICS, is_of_model=True, is_polled=True,
    ),
    Page(
        "/v1/models", Pages._models_served, "The served models, in OpenAI's form", "One model",
        needs_key=True,
    ),
    Page(
        "/v1/models/{model}", Pages._model_served, "The model of this name, in OpenAI's form",
        "The model", needs_key=True,
    ),
)  # fmt: skip


async def _file(name: str, _: Request) -> Response:
    return FileResponse(_STATIC / name, headers=_PAGE_HEADERS)
