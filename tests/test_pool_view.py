"""What a web process asks the pool that it shares, and how often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from service_streamer import PredictTimeout
from service_streamer.serve.http import pool_view as module
from service_streamer.serve.http.pool_view import _SharedView


class Asked:
    """A streamer that shares a pool, and counts the questions to it."""

    metrics = "metrics"

    def __init__(self) -> None:
        self.engine = SimpleNamespace(pool_pid=1)
        self.questions = 0
        self.error: Exception | None = None

    def stats(self) -> str:
        self.questions += 1
        if self.error is not None:
            raise self.error
        return f"stats {self.questions}"

    def workers(self) -> str:
        return "workers"

    def findings(self) -> str:
        return "findings"


def view() -> tuple[Any, Asked]:
    streamer: Any = Asked()
    return _SharedView(streamer), streamer


def test_many_who_look_at_a_pool_ask_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, streamer = view()
        monkeypatch.setattr(module, "_FRESH", 1e9)
        await asyncio.gather(*(pool.look() for _ in range(8)))
        await pool.look()
        assert (pool.stats(), streamer.questions) == ("stats 1", 1)
        assert pool.figures() is None, "nobody has asked for more than the state"
        await asyncio.gather(*(pool.renew() for _ in range(8)))
        assert (pool.stats(), pool.figures().stats, streamer.questions) == (*["stats 2"] * 2, 2)

    asyncio.run(main())


def test_what_the_pool_said_some_time_ago_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, _ = view()
        monkeypatch.setattr(module, "_FRESH", 0.0)
        for number in (1, 2):
            await pool.look()
            assert pool.stats() == f"stats {number}"

    asyncio.run(main())


def test_who_looks_waits_for_no_pool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question waits for the next pool, which takes longer than a probe waits."""

    async def main() -> None:
        pool, streamer = view()
        monkeypatch.setattr(module, "_FRESH", 1e9)
        await pool.look()
        streamer.engine.pool_pid = None
        await pool.look()
        assert (pool.stats(), streamer.questions) == (None, 1)

    asyncio.run(main())


def test_a_pool_that_did_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, streamer = view()
        monkeypatch.setattr(module, "_FRESH", 1e9)
        streamer.error = PredictTimeout("no answer")
        await pool.look()
        assert pool.stats() is None
        streamer.error = None
        await pool.look()
        assert pool.stats() == "stats 2"

    asyncio.run(main())
