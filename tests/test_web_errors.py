"""What fails in the examples for FastAPI, Starlette and Django, without a server or a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

import django_example
import fastapi_example
import starlette_example
from conftest import await_that
from http_in_process import in_event_loop
from service_streamer import ThreadedStreamer
from service_streamer.testing import Gate
from streaming import Service
from test_examples import with_errors
from test_web_examples import QUESTIONS


def failing(error: Exception) -> Any:
    """A streamer of which every call fails."""
    streamer = Mock(spec=["close", "predict", "wait_ready"])
    streamer.predict.side_effect = streamer.wait_ready.side_effect = error
    streamer.apredict = AsyncMock(side_effect=error)
    return streamer


def application(framework: str, streamer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if framework == "fastapi":
        return fastapi_example.create_app(lambda: streamer)
    if framework == "starlette":
        return starlette_example.create_app(lambda: streamer)
    monkeypatch.setattr(django_example, "service", Service(lambda: streamer))
    return django_example.asgi


@contextlib.asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    """What an ASGI server does around the requests."""
    asked: asyncio.Queue[Any] = asyncio.Queue()
    answered: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, asked.get, answered.put))
    for event in ("startup", "shutdown"):
        await asked.put({"type": f"lifespan.{event}"})
        assert (await answered.get())["type"] == f"lifespan.{event}.complete"
        if event == "startup":
            yield
    await task


@contextlib.asynccontextmanager
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        lifespan(app),
        httpx.AsyncClient(
            transport=transport,
            base_url="http://localhost",
            headers={"Content-Type": "application/json"},
        ) as client,
    ):
        yield client


framework = pytest.mark.parametrize("framework", QUESTIONS)


@framework
@with_errors
def test_errors_have_a_status(
    framework: str,
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = application(framework, failing(error), monkeypatch)

    async def main() -> tuple[httpx.Response, httpx.Response]:
        path, body, _ = QUESTIONS[framework]
        async with client(app) as web:
            return await web.post(path, content=body), await web.get("/health")

    response, health = asyncio.run(main())
    assert response.status_code == status
    assert list(response.json()) == ["error"]
    assert "secret" not in response.text
    assert ("told" in response.text) == (status == 422)
    assert response.headers.get("Retry-After") == ("1" if status == 503 else None)
    if status == 503:
        assert str(error) in caplog.text
        assert (health.status_code, list(health.json())) == (503, ["status"])


def behind(gate: Gate) -> Callable[[list[str]], list[Any]]:
    """A model that waits at the gate, with answers that the example can take."""

    def predict(batch: list[str]) -> list[Any]:
        gate.go_through()
        return [[{"token_str": text}] for text in batch]

    return predict


@pytest.mark.parametrize("framework", ["fastapi", "starlette", "django"])
@in_event_loop
async def test_request_is_withdrawn_when_its_client_disconnects(
    framework: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = ThreadedStreamer(behind(gate), 1, 0)
    app = application(framework, streamer, monkeypatch)
    path, body, _ = QUESTIONS[framework]
    async with lifespan(app):
        held = asyncio.gather(*(streamer.apredict([text]) for text in ("computed", "ahead")))
        await asyncio.to_thread(await_that, lambda: _held(streamer) == 2)
        received: asyncio.Queue[Any] = asyncio.Queue()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await received.put({"type": "http.request", "body": body.encode(), "more_body": False})
        request = asyncio.create_task(app(_scope(path), received.get, send))
        await asyncio.to_thread(await_that, lambda: streamer.stats().pending == 1)
        await received.put({"type": "http.disconnect"})
        await request
        assert sent == []
        assert (streamer.stats().pending, streamer.stats().cancelled) == (0, 1)
        gate.let_through(2)
        await held


@in_event_loop
async def test_request_is_not_answered_when_its_client_leaves_in_mid_body(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = starlette_example.create_app(lambda: ThreadedStreamer(behind(gate)))
    messages = [
        {"type": "http.request", "body": b"Happy", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pytest.fail(f"nobody is there to be told {message}")

    async with lifespan(app):
        await app(_scope("/"), receive, send)


def _held(streamer: ThreadedStreamer) -> int:
    stats = streamer.stats()
    return stats.pending + stats.in_flight


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip


def test_django_trusts_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    app = application("django", failing(ValueError()), monkeypatch)

    async def main() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://evil.test") as web:
            return (await web.post("/infill", content=b"{}")).status_code

    assert asyncio.run(main()) == 400
