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
from http_in_process import StubClient, post, serving
from service_streamer import Streamer, ThreadedStreamer

#: The most modules that one ``predict`` may cross, and one request. Three of the latter decide
#: which of several models it is for, and check what it asks of that one. Eight are the batcher's:
#: what happens, the queue, whose turn it is, when to cut, what is learned, the policy, the workers,
#: and what becomes of calls. A lone call goes the way of all others. Four of a ``Streamer`` are its
#: worker's: the process, the messages, and two that look whether anything lies in shared memory.
PREDICT = 22
REQUEST = 34
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
def test_predict_crosses_few_modules(crossing: Crossing, kind: Callable[..., Any]) -> None:
    with kind(models.double) as streamer:
        for number in range(WARM):
            assert streamer.predict([number]) == [2 * number]
        crossing.is_on = True
        assert streamer.predict([1]) == [2]
        crossing.is_on = False
    assert 5 < len(crossing.modules) <= PREDICT, sorted(crossing.modules)


def test_request_crosses_few_modules(crossing: Crossing) -> None:
    asked = post(b'{"inputs": 3}', b"content-type: application/json\r\n", b"/predict")

    async def main() -> None:
        with Streamer(models.double) as streamer:
            async with serving(streamer, "double") as application:
                client = StubClient(application.site)
                for _ in range(WARM):
                    assert await client.ask(asked) == (200, b"6")
                crossing.is_on = True
                assert await client.ask(asked) == (200, b"6")
                crossing.is_on = False
                client.leave()

    asyncio.run(main())
    assert 10 < len(crossing.modules) <= REQUEST, sorted(crossing.modules)
