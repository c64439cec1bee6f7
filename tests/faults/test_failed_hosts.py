"""A bug in the engine of a worker host or a service: its open calls fail, and it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import models
from service_streamer import InternalError, RedisStreamer, RedisWorker
from service_streamer.batching.batcher import Batcher
from web_application import WebApplication

BUG = "the streamer failed; this is a bug in it: RuntimeError: a bug"


@pytest.fixture(autouse=True)
def bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine, with the first batch that comes back."""
    batch_returned, bugs = Batcher.batch_returned, [RuntimeError("a bug")]

    def breaks(batcher: Batcher, *args: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return batch_returned(batcher, *args)

    monkeypatch.setattr(Batcher, "batch_returned", breaks)


def test_host_goes_on_when_its_engine_fails(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    host(models.double)
    streamer = client()
    with pytest.raises(InternalError, match=BUG):
        streamer.predict([1])
    assert streamer.predict([2]) == [4]


def test_service_goes_on_when_its_engine_fails(caplog: pytest.LogCaptureFixture) -> None:
    with WebApplication(models.double) as application:
        failed = application.post("/predict", {"inputs": 2})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert application.post("/predict", {"inputs": 2}).status_code == 200
        assert application.get("/health/ready").status_code == 200
    assert "1 call failed by that; the streamer goes on" in caplog.text
