"""The web server of the transformers documentation, done right: ``uvicorn starlette_example:app``.

Its page "Using pipelines for a webserver" has a queue, a loop that takes from it, and advice on
what is missing. Here a streamer does it: the model is loaded once, in a process of its own, so
computing never blocks the web server; a batch has a limit, and one deadline that its first text
sets, while a model that is free waits for nobody; too many texts are refused at once (503), and
what takes too long is given up (504). A client that goes away takes its text along.

    uvicorn starlette_example:app                        (in the folder example)
    python example/starlette_example.py --port 8000      (anywhere; --model names another one)
    curl http://localhost:8000/ -d "Happy birthday to [MASK]."
    [{"score":0.99,"token":1655,"token_str":"you","sequence":"Happy birthday to you."},...]

``/draw`` streams another model, whose outputs come one by one: the picture after each step.

    curl -N http://localhost:8000/draw -d '{"shape": "heart", "points": 5}'
    data: {"output": [[...], ...]}
    ...
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fill_mask_model import ManagedFillMask, check
from http_errors import MAX_BODY, MAX_PENDING, answer_to, health
from service_streamer import Streamer, StreamerError, ThreadedStreamer
from streaming import HEADERS, MEDIA_TYPE, Service, async_events, start_drawing

CURL = "curl {url}/ -d 'Happy birthday to [MASK].'"
DEADLINE = 20  # seconds, for each request


def start_streamer() -> Streamer:
    return Streamer(
        ManagedFillMask,
        batch_size=64,
        max_latency=0.001,
        worker_timeout=DEADLINE,
        max_pending=MAX_PENDING,
        shared=os.environ.get("POOL") or None,  # one model for all that name this pool
    )


def create_app(
    start: Callable[[], Streamer] = start_streamer,
    start_drawing: Callable[[], Streamer | ThreadedStreamer] = start_drawing,
) -> Starlette:
    """The web application.

    Args:
        start: builds the streamer. Not before the server starts, and in each of its processes.
        start_drawing: builds the one of ``/draw``. Not before the first request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.streamer = streamer = start()
        app.state.drawing = drawing = Service(start_drawing)
        try:
            yield
        finally:
            await asyncio.to_thread(drawing.close)
            await asyncio.to_thread(streamer.close, timeout=DEADLINE)

    return Starlette(
        routes=[
            Route("/", homepage, methods=["POST"]),
            Route("/draw", draw, methods=["POST"]),
            Route("/health", is_healthy),
        ],
        middleware=[Middleware(CancelWhenGone)],
        exception_handlers={
            HTTPException: answer_to_http_error,
            StreamerError: answer_to_error,
            Exception: answer_to_unknown_error,
        },
        lifespan=lifespan,
        max_body_size=MAX_BODY,
    )


async def homepage(request: Request) -> Response:
    try:
        sentence = (await request.body()).decode()
    except UnicodeDecodeError:
        raise HTTPException(400, "the text is not UTF-8") from None
    check(sentence)
    [answer] = await request.app.state.streamer.apredict([sentence])
    return JSONResponse(answer)


async def draw(request: Request) -> Response:
    try:
        item = json.loads(await request.body())
    except (ValueError, RecursionError):  # also what is not UTF-8
        raise HTTPException(422, "the body is not JSON") from None
    stream = request.app.state.drawing.start().astream(item)
    events = await async_events(stream, request.url.path)
    return StreamingResponse(events, media_type=MEDIA_TYPE, headers=HEADERS)


def is_healthy(request: Request) -> Response:
    status, content = health(request.app.state.streamer)
    return JSONResponse(content, status)


class CancelWhenGone:
    """Cancels a request when its client has gone: what waits for the model then is withdrawn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_gone = False
        watch: asyncio.Task[None] | None = None

        async def watched() -> Message:
            """Hands out the body, and watches the connection when all of it is there."""
            nonlocal watch, is_gone
            message = await receive()
            if message["type"] == "http.disconnect":
                is_gone = True
                raise asyncio.CancelledError
            if watch is None and not message.get("more_body"):
                watch = asyncio.create_task(cancel_when_gone())
            return message

        async def cancel_when_gone() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            request.cancel()

        async def run() -> None:
            await self.app(scope, watched, send)

        request = asyncio.create_task(run())
        try:
            await request
        except asyncio.CancelledError:
            if not is_gone:  # the server cancels
                raise
        finally:
            if watch is not None:
                watch.cancel()


def answer_to_http_error(_request: Request, error: Exception) -> Response:
    """404, 405, 413, and what the endpoints raise themselves."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def answer_to_error(request: Request, error: Exception) -> Response:
    status, text, headers = answer_to(error, request.url.path)
    return JSONResponse({"error": text}, status, headers)


def answer_to_unknown_error(request: Request, error: Exception) -> Response:
    """The model's own, or a bug: Starlette raises it once more, for the server to log."""
    status, text, headers = answer_to(error, request.url.path, is_logged=True)
    return JSONResponse({"error": text}, status, headers)


#: For web servers that import this file.
app = create_app()


def main() -> None:
    from serving import serve

    serve(app, lambda: app.state.streamer.wait_ready(), CURL, has_model_option=True)


if __name__ == "__main__":
    main()
