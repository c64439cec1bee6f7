"""Connections to a shared pool that break while both ends live: a call is computed once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pool_models
import pytest

import models
from conftest import await_that
from service_streamer import Streamer, WorkerLost
from service_streamer.pool.visits import ask_pool
from service_streamer.testing import Gate
from stream_models import Resumed

Shared = Callable[..., Streamer]


@pytest.fixture
def lasting(shared: Shared) -> Iterator[Shared]:
    """Builds clients of a pool that lasts while its only client has no connection."""

    def lasting(*args: Any, **options: Any) -> Streamer:
        return shared(*args, **{"shared": "a", "linger": 60, **options})

    yield lasting
    ask_pool("a", "stop", False)


class Echo(models.Gated):
    def predict(self, batch: list[Any]) -> list[Any]:
        super().predict(batch)
        return batch


def status() -> dict[str, Any]:
    found: dict[str, Any] = ask_pool("a", "status")
    return found


def cut(streamer: Streamer) -> None:
    """End the connection from outside, as a debugger could."""
    link = streamer._backend._bell.link  # type: ignore[attr-defined]
    with socket.socket(fileno=os.dup(link._connection.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    await_that(lambda: streamer._backend._bell.link not in (None, link))  # type: ignore[attr-defined]


def test_what_is_being_computed_is_computed_once(lasting: Shared, gate: Gate) -> None:
    streamer = lasting(models.gated(gate), 1)
    streamer.wait_ready()
    pid = status()["pid"]
    futures = [streamer.submit([0])]
    gate.await_arrival()
    futures += [streamer.submit([n]) for n in range(1, 5)]
    await_that(lambda: streamer.stats().pending >= 3)
    for _ in range(2):
        cut(streamer)
        await_that(lambda: streamer.stats().pending >= 3)
    gate.let_through(5)  # one each, and no more
    for future in futures:
        future.result()
    stats = streamer.stats()
    assert (stats.answered, stats.pending, stats.in_flight) == (5, 0, 0)
    assert status()["pid"] == pid


def test_large_items_and_results_survive_it(lasting: Shared, gate: Gate) -> None:
    streamer = lasting(Echo, 1, model_init_args=(gate,))
    items = [bytearray([n]) * 200_000 for n in range(4)]
    futures = [streamer.submit([item]) for item in items]
    gate.await_arrival()
    cut(streamer)
    gate.let_through(4)
    for item, future in zip(items, futures, strict=True):
        assert future.result() == [item]
    calls = streamer._backend._calls  # type: ignore[attr-defined]
    await_that(lambda: not calls._lent)


def test_under_load_nothing_is_lost(lasting: Shared, tmp_path: Path) -> None:
    streamer = lasting(pool_models.Recorded, 4, model_init_args=[str(tmp_path / "record")])
    streamer.wait_ready()
    pid = status()["pid"]
    futures = []
    for part in range(10):
        futures += [streamer.submit([f"item-{part}-{n}"]) for n in range(50)]
        cut(streamer)
    for n, future in enumerate(futures):
        assert future.result() == [f"ITEM-{n // 50}-{n % 50}"]
    assert status()["pid"] == pid


def test_without_retries_callers_are_told(lasting: Shared, gate: Gate) -> None:
    streamer = lasting(models.gated(gate), 1, retry=False)
    future = streamer.submit([1])
    gate.await_arrival()
    cut(streamer)
    with pytest.raises(WorkerLost, match=r"or the connection to it.* retry is False"):
        future.result()
    gate.let_through(20)
    assert streamer.predict([2])


def test_streams_go_on_after_it(lasting: Shared) -> None:
    streamer = lasting(Resumed, 4)
    stream = streamer.stream({"n": 500}, timeout=None, max_buffered=16)
    got = [next(stream)]
    cut(streamer)
    assert [*got, *stream] == [*range(1, 501)]


def test_who_leaves_after_it_leaves_nothing(lasting: Shared, gate: Gate) -> None:
    streamer, other = (lasting(models.gated(gate), 1) for _ in range(2))
    futures = [streamer.submit([n]) for n in range(4)]
    gate.await_arrival()
    cut(streamer)
    streamer.close(drain=False)
    assert all(future.exception() for future in futures)
    await_that(lambda: other.stats().pending == 0)
    gate.let_through(20)
    assert other.predict([5])
