"""How many modules one call crosses in the web process: the fewer, the shorter a reader's way.

Counted are the modules of this package in which a function is called, in every thread.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import models
from service_streamer import Streamer, ThreadedStreamer
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import create_app
from service_streamer.serve.http.service import Service

#: The most modules that one ``predict`` may cross, and one request.
PREDICT = 15
REQUEST = 24
#: Until the streamer takes its worker for warm.
WARM = 20


class Crossing:
    """Notes the modules that are crossed while it is on."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if self.is_on and event == "call" and module.startswith("service_streamer."):
            self.modules.add(module)


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossing]:
    crossing = Crossing()
    # Other tests load it, and models with torch are asked for the GPU's time.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = sys.getprofile()
    threading.setprofile(crossing)  # of threads that are started from now on
    sys.setprofile(crossing)
    yield crossing
    sys.setprofile(before)
    threading.setprofile(None)  # type: ignore[arg-type]  # typeshed forbids it


@pytest.mark.parametrize("kind", [ThreadedStreamer, Streamer])
def test_a_predict_crosses_few_modules(crossing: Crossing, kind: Callable[..., Any]) -> None:
    with kind(models.double) as streamer:
        for number in range(WARM):
            assert streamer.predict([number]) == [2 * number]
        crossing.is_on = True
        assert streamer.predict([1]) == [2]
        crossing.is_on = False
    assert 5 < len(crossing.modules) <= PREDICT, sorted(crossing.modules)


def test_a_request_crosses_few_modules(crossing: Crossing) -> None:
    async def ask(app: Any) -> bytes:
        body = json.dumps({"inputs": 3}).encode()
        sent: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
        await app(scope, receive, send)
        return b"".join(sent)

    async def run() -> None:
        with Streamer(models.double) as streamer:
            service = Service(streamer, ServiceOptions("double"))
            service.start()
            app = create_app(service)
            while not service.is_known:
                await asyncio.sleep(0.01)
            for _ in range(WARM):
                assert await ask(app) == b"6"
            crossing.is_on = True
            assert await ask(app) == b"6"
            crossing.is_on = False
            service.stop()

    asyncio.run(run())
    assert 10 < len(crossing.modules) <= REQUEST, sorted(crossing.modules)
