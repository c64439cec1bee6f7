"""How many modules one call crosses in the web process: the fewer, the shorter a reader's way.

Counted are the modules of this package in which a function is called, in every thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import models
from service_streamer import Streamer, ThreadedStreamer
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import create_site
from service_streamer.serve.http.models import Models
from service_streamer.serve.http.service import Service
from stub_exchange import StubClient

#: The most modules that one ``predict`` may cross, and one request. Three of the latter decide
#: which of several models it is for, and check what it asks of that one. Five are the batcher's:
#: what happens, when to cut, making the batch, counting it, and how late it may be. One is the
#: core, which puts each worker's batches in its lane in the order in which they were cut.
PREDICT = 16
REQUEST = 32
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
    async def ask(client: StubClient) -> bytes:
        client.received = b""
        head = b"POST /predict HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 13\r\n"
        client.send(head + b'\r\n{"inputs": 3}')
        while not client.received:
            await asyncio.sleep(0)
        return client.received.partition(b"\r\n\r\n")[2]

    async def run() -> None:
        with Streamer(models.double) as streamer:
            service = Service(streamer, ServiceOptions("double"))
            service.start()
            client = StubClient(create_site(Models([service])))
            while not service.is_known:
                await asyncio.sleep(0.01)
            for _ in range(WARM):
                assert await ask(client) == b"6"
            crossing.is_on = True
            assert await ask(client) == b"6"
            crossing.is_on = False
            client.leave()
            service.stop()

    asyncio.run(run())
    assert 10 < len(crossing.modules) <= REQUEST, sorted(crossing.modules)
