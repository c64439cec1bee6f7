"""A Django project in one file: ``python example/django_example.py``, or behind your web server.

    gunicorn -k uvicorn_worker.UvicornWorker django_example:asgi       (in the folder example)
    gunicorn --threads 64 django_example:application                   (the same as WSGI)
    POOL=words gunicorn --workers 4 --threads 16 django_example:application  (they share a model)

    curl http://localhost:8000/infill -d '{"text": "Happy birthday to [MASK]."}'
    {"word": "you"}

    curl -N http://localhost:8000/draw -d '{"shape": "heart", "points": 5}'
    data: {"output": [[...], ...]}
    ...

``/infill`` is an asynchronous view: it waits for the model without a thread. ``/infill/sync`` is a
plain one, for code that is not asynchronous, or for WSGI; it batches with the others just as well.
``/draw`` and ``/draw/sync`` stream another model, whose outputs come one by one. Of these two, use
the asynchronous one behind ASGI and the plain one behind WSGI: Django collects all outputs of the
other before it sends them.

A process starts its streamer with the ASGI server's lifespan, and under WSGI with the first
request: in any case after the web server has forked it. The environment sets ``SECRET_KEY`` and
``ALLOWED_HOSTS`` (such as ``example.com,www.example.com``), and with ``MODEL`` another model.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.core.wsgi import get_wsgi_application
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.urls import path
from django.utils.deprecation import MiddlewareMixin
from django.views.decorators.http import require_POST

from fill_mask_model import ManagedFillMask, check
from http_errors import MAX_BODY, MAX_PENDING, answer_to, health
from service_streamer import InvalidInput, Streamer
from streaming import HEADERS, MEDIA_TYPE, Service, async_events, events, start_drawing

CURL = """curl {url}/infill -d '{"text": "Happy birthday to [MASK]."}'"""
DEADLINE = 20  # seconds, for each request

if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(","),
        # It signs sessions, of which there are none here. Of the environment if yours has some, or
        # those of one process would not hold in another.
        SECRET_KEY=os.environ.get("SECRET_KEY") or secrets.token_urlsafe(50),
        DEBUG=False,
        APPEND_SLASH=False,
        ROOT_URLCONF=__name__,
        MIDDLEWARE=[
            "django.middleware.security.SecurityMiddleware",
            "django.middleware.common.CommonMiddleware",  # checks ALLOWED_HOSTS
            f"{__name__}.AnswerErrors",
        ],
        DATA_UPLOAD_MAX_MEMORY_SIZE=MAX_BODY,
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )


def start_streamer() -> Streamer:
    return Streamer(
        ManagedFillMask,
        batch_size=64,
        worker_timeout=DEADLINE,
        max_pending=MAX_PENDING,
        shared=os.environ.get("POOL") or None,
    )


service = Service(start_streamer)
drawing = Service(start_drawing)


async def infill(request: HttpRequest) -> HttpResponse:
    sentence = sentence_of(request)
    [words] = await service.start().apredict([sentence])
    return JsonResponse({"word": words[0]["token_str"]})


def infill_sync(request: HttpRequest) -> HttpResponse:
    sentence = sentence_of(request)
    [words] = service.start().predict([sentence])
    return JsonResponse({"word": words[0]["token_str"]})


async def draw(request: HttpRequest) -> StreamingHttpResponse:
    stream = drawing.start().astream(json_of(request))
    sent = await async_events(stream, request.path)
    return StreamingHttpResponse(sent, content_type=MEDIA_TYPE, headers=HEADERS)


def draw_sync(request: HttpRequest) -> StreamingHttpResponse:
    stream = drawing.start().stream(json_of(request))
    sent = events(stream, request.path)
    return StreamingHttpResponse(sent, content_type=MEDIA_TYPE, headers=HEADERS)


def is_healthy(_request: HttpRequest) -> HttpResponse:
    status, content = health(service.start())
    return JsonResponse(content, status=status)


def sentence_of(request: HttpRequest) -> str:
    """Returns the text that a request asks about.

    Raises:
        InvalidInput: it has none, or a bad one.
    """
    content = json_of(request)
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise InvalidInput('text: must be a string; send {"text": "..."}')
    check(text)
    return text


def json_of(request: HttpRequest) -> Any:
    """Returns what a body says. Raises InvalidInput if it is no JSON."""
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError):  # also what is not UTF-8
        raise InvalidInput("the body is not JSON") from None


class AnswerErrors(MiddlewareMixin):  # type: ignore[misc]  # Django has no types
    """Every error of a view as JSON."""

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        if isinstance(error, RequestDataTooBig):
            return JsonResponse({"error": f"the body has over {MAX_BODY} bytes"}, status=413)
        if isinstance(error, Http404 | SuspiciousOperation | PermissionDenied):
            return None  # Django's own have handlers below
        status, text, headers = answer_to(error, request.path)
        return JsonResponse({"error": text}, status=status, headers=headers)


def say(status: int, text: str) -> Callable[..., HttpResponse]:
    """Returns a handler that answers so."""
    return lambda *_, **__: JsonResponse({"error": text}, status=status)


handler400 = say(400, "bad request")
handler403 = say(403, "forbidden")
handler404 = say(404, "not found")
handler500 = say(500, "internal error")

urlpatterns = [
    path("infill", require_POST(infill)),
    path("infill/sync", require_POST(infill_sync)),
    path("draw", require_POST(draw)),
    path("draw/sync", require_POST(draw_sync)),
    path("health", is_healthy),
]

#: For WSGI servers that import this file.
application = get_wsgi_application()
_django = get_asgi_application()


async def asgi(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """For ASGI servers that import this file: Django's application, with a lifespan."""
    if scope["type"] != "lifespan":
        await _django(scope, receive, send)
        return
    await receive()
    service.start()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    for each in (drawing, service):
        await asyncio.to_thread(each.close)
    await send({"type": "lifespan.shutdown.complete"})


def main() -> None:
    from serving import serve

    serve(asgi, lambda: service.start().wait_ready(), CURL, has_model_option=True)


if __name__ == "__main__":
    main()
