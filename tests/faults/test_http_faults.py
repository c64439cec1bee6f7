"""Lost workers, seen over HTTP: the errors say what has happened, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

import service_streamer.supervision.supervisor as supervision
from service_streamer.workers.transport import ThreadTransport
from web_application import WebApplication


def end_on_request(batch: list[Any]) -> list[Any]:
    if "end" in batch:
        raise SystemExit("as asked")
    return batch


def test_request_that_ends_its_worker_is_told_so_and_the_next_one_is_answered() -> None:
    with WebApplication(end_on_request) as application:
        failed = application.post("/predict", {"inputs": "end"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "worker_lost")
        assert application.post("/predict", {"inputs": 1}).json() == 1


def test_service_is_not_ready_while_no_worker_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory for a thread")

    monkeypatch.setattr(supervision, "MAX_BACKOFF", 0.0)
    monkeypatch.setattr(supervision, "RETRY", 1e6)
    monkeypatch.setattr(supervision, "MAX_RETRY", 1e6)
    with WebApplication(end_on_request) as application:
        monkeypatch.setattr(ThreadTransport, "start", fail)
        application.post("/predict", {"inputs": "end"})
        ready = application.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "broken")
        refused = application.post("/predict", {"inputs": 1})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable")
        assert application.get("/health/live").status_code == 200
