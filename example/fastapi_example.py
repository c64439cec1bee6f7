"""A typed web service of a text generation model: ``uvicorn fastapi_example:app``.

    uvicorn fastapi_example:app                                        (in the folder example)
    gunicorn -k uvicorn_worker.UvicornWorker fastapi_example:app       (the same, under gunicorn)
    POOL=generation gunicorn --workers 4 -k uvicorn_worker.UvicornWorker fastapi_example:app
    python example/fastapi_example.py --port 8000                      (anywhere)

    curl http://localhost:8000/generate -H "Content-Type: application/json" \\
        -d '{"text": "Mary had a little"}'
    {"text":"Mary had a little lamb,\\nIts fleece was white as snow,"}

    curl -N http://localhost:8000/generate/stream -H "Content-Type: application/json" \\
        -d '{"text": "Mary had a little"}'
    data: {"output": "Mary had a little lamb"}
    ...

``MODEL`` in the environment, or ``--model``, is another causal language model: a folder, such as
that of a model that you have fine-tuned, or a hub name such as
``HuggingFaceTB/SmolLM2-135M-Instruct``.

The model is in a worker process, so the web server needs no torch, starts at once and never waits
for a long load: until the model is there ``/health`` says 503, and requests wait for it. With
``POOL`` in the environment, all web processes of this host share the pool of that name, and so one
model. Without it each web process has a worker of its own. To share models with other machines, in
as many processes and on as many GPUs as you like, put Redis in between: with ``REDIS_URL`` in the
environment this service is a ``RedisStreamer``, and::

    export REDIS_URL=redis://localhost:6379 REDIS_PREFIX=generation
    python example/redis_worker_example.py --model generation_model:ManagedGenerationModel \\
        --workers 4 --devices 0,1,2,3
    gunicorn --workers 8 -k uvicorn_worker.UvicornWorker fastapi_example:app
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from generation_model import ManagedGenerationModel
from http_errors import MAX_BODY, MAX_PENDING, health
from service_streamer import RedisStreamer, Streamer, StreamerError
from starlette_example import (
    CancelWhenGone,
    answer_to_error,
    answer_to_http_error,
    answer_to_unknown_error,
)
from streaming import HEADERS, MEDIA_TYPE, async_events

CURL = (
    "curl {url}/generate -H 'Content-Type: application/json'"
    """ -d '{"text": "Mary had a little"}'"""
)
DEADLINE = 30  # seconds, for each request


class InputPrompt(BaseModel):
    text: str = Field(min_length=1, examples=["Mary had a little"])


class GeneratedText(BaseModel):
    text: str


def start_streamer() -> RedisStreamer | Streamer:
    url = os.environ.get("REDIS_URL")
    if url:
        prefix = os.environ.get("REDIS_PREFIX", "")
        return RedisStreamer(url, prefix, DEADLINE, max_pending=MAX_PENDING)
    return Streamer(
        ManagedGenerationModel,
        batch_size=32,
        worker_timeout=DEADLINE,
        max_pending=MAX_PENDING,
        shared=os.environ.get("POOL") or None,
    )


def create_app(start: Callable[[], RedisStreamer | Streamer] = start_streamer) -> FastAPI:
    """The web application.

    Args:
        start: builds the streamer. Not before the server starts, and in each of its processes.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.streamer = streamer = start()
        try:
            yield
        finally:
            await asyncio.to_thread(streamer.close, timeout=DEADLINE)

    app = FastAPI(title="Text generation", lifespan=lifespan)
    app.add_middleware(CancelWhenGone)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY)
    app.add_exception_handler(RequestValidationError, answer_to_bad_input)
    app.add_exception_handler(HTTPException, answer_to_http_error)
    app.add_exception_handler(StreamerError, answer_to_error)
    app.add_exception_handler(Exception, answer_to_unknown_error)

    @app.post("/generate")
    async def generate(prompt: InputPrompt) -> GeneratedText:
        [text] = await app.state.streamer.apredict([prompt.text])
        return GeneratedText(text=text)

    @app.post("/generate/stream")
    async def generate_stream(prompt: InputPrompt, request: Request) -> StreamingResponse:
        """The text piece by piece, as server-sent events."""
        stream = app.state.streamer.astream(prompt.text)
        events = await async_events(stream, request.url.path)
        return StreamingResponse(events, media_type=MEDIA_TYPE, headers=HEADERS)

    @app.get("/health")
    def is_healthy() -> Response:
        status, content = health(app.state.streamer)
        return JSONResponse(content, status)

    return app


def answer_to_bad_input(_request: Request, error: Exception) -> Response:
    """Says where and what, but does not repeat what was sent: it may be no JSON that can be."""
    assert isinstance(error, RequestValidationError)
    told = [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]
    where = ".".join(str(part) for part in told[0]["loc"][1:])
    text = f"{where}: {told[0]['msg']}" if where else told[0]["msg"]
    if error.errors()[0]["type"] == "json_invalid":
        text = "the body is not JSON"
    return JSONResponse({"error": text, "detail": jsonable_encoder(told)}, 422)


#: For web servers that import this file.
app = create_app()


def main() -> None:
    from serving import serve

    serve(app, lambda: app.state.streamer.wait_ready(), CURL, has_model_option=True)


if __name__ == "__main__":
    main()
