"""Thousands of streams that are opened and dropped: nothing of them stays anywhere."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

from conftest import await_that
from service_streamer import RedisStreamer, RedisWorker, Streamer, ThreadedStreamer
from stream_models import Countdown

pytestmark = pytest.mark.long

FOR_EVER = 10**9
OPEN = 20  # at a time, more than there are places


def open_and_drop(streamer: Any, count: int) -> None:
    """In turn they are dropped before an output, after one, and while the item rests."""
    for begin in range(0, count, OPEN):
        streams = [streamer.stream(FOR_EVER, max_buffered=3) for _ in range(OPEN)]
        for number, stream in enumerate(streams[: OPEN // 4]):
            assert next(stream) == 1
            if number % 2:
                stream.close()
        if begin % 3:
            del stream
        streams.clear()
    assert [*streamer.stream(2)] == [1, 2], "there is a place for it"


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def assert_no_growth(drop: Callable[[int], None], count: int) -> None:
    """What keeps the last thousand of something is full after the first part."""
    drop(count // 2)
    before = objects()
    drop(count // 2)
    after = objects()
    assert sum((after - before).values()) < count // 20, (after - before).most_common(9)


@pytest.mark.parametrize("kind", [ThreadedStreamer, Streamer])
def test_ten_thousand_streams_leave_nothing(kind: Any) -> None:
    with kind(Countdown, batch_size=8) as streamer:
        assert_no_growth(lambda count: open_and_drop(streamer, count), 10_000)
        await_that(lambda: streamer.stats().in_flight == streamer.stats().pending == 0)
        assert streamer.stats().cancelled == 10_000


def test_four_thousand_streams_leave_nothing_in_redis(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer], ask: redis.Redis,
    keys: Any, prefix: str,
) -> None:  # fmt: skip
    worker = host(Countdown, 8)
    streamer = client()

    def is_empty() -> bool:
        stats = worker.stats()
        is_idle = (
            stats is not None and stats.held == stats.pool.in_flight == stats.pool.pending == 0
        )
        return is_idle and ask.xlen(keys.calls) == 0

    def drop(count: int) -> None:
        open_and_drop(streamer, count)
        await_that(is_empty)

    assert_no_growth(drop, 4000)
    assert streamer.stats().cancelled == 4000
    assert ask.xpending(keys.calls, "hosts")["pending"] == 0

    def kinds() -> set[str]:
        names = [key.decode().rpartition(prefix)[2] for key in ask.keys(f"*{prefix}*")]
        return {name[2:].split(":")[0] for name in names} - {"unread"}

    await_that(lambda: kinds() == {"calls", "client", "host", "model", "replies"})
