"""Streams over Redis whose connections are cut, and whose Redis comes and goes.

``test_resumed_streams.py`` has those whose hosts die.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import redis
from redis_processes import until

from service_streamer import RedisStreamer, RedisWorker
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate
from stream_models import Countdown

FOR_EVER = 10**9


def test_connections_that_are_cut_again_and_again_lose_and_repeat_nothing() -> None:
    with (
        LocalRedis() as server,
        redis.Redis.from_url(server.url) as ask,
        RedisWorker(Countdown, 8, redis_broker=server.url),
        RedisStreamer(server.url, worker_timeout=None) as streamer,
    ):
        wanted = range(4000, 4006)
        got: dict[int, list[Any]] = {n: [] for n in wanted}

        def consume(n: int) -> None:
            for output in streamer.stream(n):
                got[n].append(output)

        def is_next(thread: threading.Thread, least: int) -> bool:
            return sum(map(len, got.values())) >= least or not thread.is_alive()

        threads = [threading.Thread(target=consume, args=(n,)) for n in wanted]
        for thread in threads:
            thread.start()
        cuts = 0
        for thread in threads:
            while thread.is_alive():
                ask.client_kill_filter(_type="normal", skipme=True)
                cuts += 1
                least = sum(map(len, got.values())) + 1000  # more than had come already
                until(functools.partial(is_next, thread, least))
        assert cuts > 1
        assert got == {n: [*range(1, n + 1)] for n in wanted}


def test_a_stream_goes_on_after_a_restart_of_redis(gate: Gate) -> None:
    with (
        LocalRedis(append_only=True) as server,
        RedisWorker(Countdown, 1, redis_broker=server.url, model_init_args=(gate,)),
        RedisStreamer(server.url, worker_timeout=None) as streamer,
    ):
        stream = streamer.stream(300)
        gate.let_through(10)
        assert [next(stream) for _ in range(10)] == [*range(1, 11)]
        server.kill()
        gate.let_through(100)  # nothing of it can be written for now
        server.start()
        gate.let_through(190)
        assert [*stream] == [*range(11, 301)]


def test_outputs_wait_while_redis_hangs() -> None:
    with (
        LocalRedis() as server,
        RedisWorker(Countdown, 2, redis_broker=server.url) as worker,
        RedisStreamer(server.url, worker_timeout=None) as streamer,
    ):
        stream = streamer.stream(FOR_EVER, max_buffered=FOR_EVER)
        assert next(stream) == 1
        before = worker.metrics.sizes.count
        server.pause()
        until(lambda: worker.metrics.sizes.count > before + 100)
        server.resume()
        assert [next(stream) for _ in range(5000)] == [*range(2, 5002)]
        stream.close()
