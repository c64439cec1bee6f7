"""The streams of the web examples: real servers, and a model of steps that waits at a gate."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import uvicorn

import django_example
import fastapi_example
import flask_example
import starlette_example
from conftest import await_that
from service_streamer import ThreadedStreamer
from service_streamer.testing import Gate
from stream_models import Countdown
from streaming import Service
from test_examples import Stub

#: Framework -> the path that streams.
PATHS = {
    "fastapi": "/generate/stream",
    "starlette": "/draw",
    "flask": "/draw",
    "django": "/draw",
    "django, sync": "/draw/sync",
}
WSGI = ("flask", "django, sync")
MANY = 10_000  # steps, which nobody waits for


class Example(NamedTuple):
    """An example that serves, of which the only worker has one place.

    Attributes:
        streamers: the one that streams, when there has been a request.
        models: its worker's.
    """

    framework: str
    port: int
    streamers: list[ThreadedStreamer]
    models: list[Countdown]

    def ask(self, connection: http.client.HTTPConnection, **item: Any) -> None:
        """Ask for a countdown."""
        content: Any = {"text": json.dumps(item)} if self.framework == "fastapi" else item
        headers = {"Content-Type": "application/json"}
        connection.request("POST", PATHS[self.framework], json.dumps(content), headers)

    def connect(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port))


@pytest.fixture(params=PATHS)
def example(
    request: pytest.FixtureRequest, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Example]:
    framework = request.param
    models: list[Countdown] = []
    streamers: list[ThreadedStreamer] = []

    class Model(Countdown):
        def init_model(self) -> None:  # type: ignore[override]
            super().init_model(gate)
            models.append(self)

        def start(self, items: list[Any]) -> list[dict[str, Any]]:
            return super().start([json.loads(i) if isinstance(i, str) else i for i in items])

    def start() -> ThreadedStreamer:
        streamers.append(ThreadedStreamer(Model, batch_size=1))
        return streamers[-1]

    def other() -> Any:
        return ThreadedStreamer(lambda batch: batch)

    drawing = Service(start)
    serve = serve_wsgi if framework in WSGI else serve_asgi
    if framework == "fastapi":
        app: Any = fastapi_example.create_app(start)  # type: ignore[arg-type]
    elif framework == "starlette":
        app = starlette_example.create_app(other, start)
    elif framework == "flask":
        app = flask_example.create_app(Stub(), drawing=drawing)  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(django_example, "drawing", drawing)
        monkeypatch.setattr(django_example, "service", Service(other))
        app = django_example.application if framework in WSGI else django_example.asgi
    with contextlib.closing(drawing), serve(app) as port:
        yield Example(framework, port, streamers, models)
        gate.let_through(MANY)  # what a failed test has left may end


@contextlib.contextmanager
def serve_asgi(app: Any) -> Iterator[int]:
    # Not uvloop, which keeps a pipe for ever.
    options: dict[str, Any] = {"loop": "asyncio", "lifespan": "on", "log_level": "warning"}
    server = uvicorn.Server(uvicorn.Config(app, port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        await_that(lambda: server.started or not thread.is_alive())
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serve_wsgi(app: Any) -> Iterator[int]:
    with flask_example.Server("127.0.0.1", 0, app) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.port
        finally:
            server.shutdown()
            thread.join()


def next_event(response: http.client.HTTPResponse) -> Any:
    line = response.readline()
    assert line.startswith(b"data: "), line
    assert response.readline() == b"\n"
    data = line.removeprefix(b"data: ").strip()
    return data.decode() if data == b"[DONE]" else json.loads(data)


def test_each_output_is_sent_when_it_is_there(example: Example, gate: Gate) -> None:
    with example.connect() as connection:
        example.ask(connection, n=3)
        gate.let_through()
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-cache"
        assert next_event(response) == {"output": 1}
        for n in (2, 3):
            gate.let_through()  # the model did not go on before
            assert next_event(response) == {"output": n}
        assert next_event(response) == "[DONE]"
        assert response.read() == b""


def test_place_is_free_when_the_client_has_disconnected(example: Example, gate: Gate) -> None:
    with example.connect() as connection:
        example.ask(connection, n=MANY)
        gate.let_through()
        assert next_event(connection.getresponse()) == {"output": 1}
        for _ in range(2):  # the second step has begun
            gate.await_arrival()
    [model], [streamer] = example.models, example.streamers
    if example.framework in WSGI:  # it notices when it sends one of the next outputs

        def is_noticed() -> bool:
            gate.let_through()
            return "cancelled 1" in repr(streamer)

        await_that(is_noticed)
    else:
        await_that(lambda: "cancelled 1" in repr(streamer))
    gate.let_through()  # the step that has begun
    await_that(lambda: model.released == 1)
    assert len(model.sizes) == 2 if example.framework not in WSGI else len(model.sizes) < MANY
    with example.connect() as connection:
        example.ask(connection, n=1)
        gate.let_through()
        assert next_event(connection.getresponse()) == {"output": 1}
    await_that(lambda: model.released == 2)


def test_error_in_mid_stream_is_the_last_event(example: Example, gate: Gate) -> None:
    gate.let_through(MANY)
    with example.connect() as connection:
        example.ask(connection, n=3, raise_at=2)
        response = connection.getresponse()
        assert response.status == 200
        assert next_event(response) == {"output": 1}
        assert next_event(response) == {"error": "internal error"}
        assert response.read() == b""


def test_error_before_the_first_output_has_a_status(example: Example, gate: Gate) -> None:
    gate.let_through(MANY)
    cases: tuple[tuple[dict[str, Any], int, str], ...] = (
        ({"n": 1, "invalid": "a bad item"}, 422, "a bad item"),
        ({"n": 1, "raise_at": 1}, 500, "internal error"),
    )
    for item, status, text in cases:
        with example.connect() as connection:
            example.ask(connection, **item)
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())) == (status, {"error": text})
