"""Streams over Redis whose workers and hosts end."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator

import pytest
import redis
from redis_processes import Program, made, stream_hosts

from redis_peers import Keys, Traffic, await_paused
from serve_process import until
from service_streamer import RedisStreamer, RedisWorker, WorkerLost
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate
from stream_models import LongNumbers, Resumed

FOR_EVER = 10**9

Client = Callable[..., RedisStreamer]
Host = Callable[..., RedisWorker]


@pytest.fixture
def program(redis_server: str, prefix: str, ask: redis.Redis) -> Iterator[Callable[..., Program]]:
    with stream_hosts(ask, prefix, redis_broker=redis_server, model="Resuming") as program:
        yield program


def test_a_stream_of_a_host_that_is_killed_fails_after_its_outputs_and_others_begin_again(
    program: Callable[..., Program], client: Client, gate: Gate
) -> None:
    doomed = program(gate)
    streamer = client(reply_ttl=5)
    begun, new = streamer.stream({"n": 500}), streamer.stream({"n": 3})
    gate.let_through(2)
    assert made([next(begun), next(begun)]) == [1, 2]
    until(lambda: doomed.stats()["held"] == 2)
    doomed.kill()
    program()
    with pytest.raises(WorkerLost, match="after outputs were handed out"):
        next(begun)
    assert made(new) == [1, 2, 3]


def test_a_host_that_was_frozen_adds_nothing_when_another_one_has_the_stream(
    program: Callable[..., Program], client: Client, gate: Gate
) -> None:
    frozen = program(gate, claim_timeout=60)  # so that it never takes over from its heir
    stream = client(reply_ttl=5).stream({"n": 500})
    gate.let_through(2)
    assert made([next(stream), next(stream)]) == [1, 2]
    gate.await_arrival()
    frozen.signal(signal.SIGSTOP)
    heir = program()
    until(lambda: heir.stats()["taken_over"] == 1)
    with pytest.raises(WorkerLost, match="after outputs were handed out"):
        next(stream)
    gate.let_through(500)
    frozen.signal(signal.SIGCONT)  # it steps on, and knows nothing of it
    until(lambda: frozen.stats()["held"] == 0)
    frozen.signal(signal.SIGTERM, alone=True)
    assert frozen.left()[0] == 0


def test_stream_of_a_host_that_leaves_is_lost_if_it_may_run_once_only(
    host: Host, client: Client, gate: Gate
) -> None:
    leaving = host(Resumed, 1, model_init_args=(gate,), max_attempts=1)
    stream = client().stream({"n": FOR_EVER})
    gate.let_through()
    assert next(stream) == 1
    leaving.close(drain=False)
    host(Resumed, 1, max_attempts=1)
    with pytest.raises(WorkerLost, match="after outputs were handed out"):
        next(stream)


def test_host_that_drains_has_a_consumer_that_lags_get_all(
    host: Host, client: Client, gate: Gate, traffic: Traffic, ask: redis.Redis, keys: Keys
) -> None:
    leaving = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": 2000}, max_buffered=10)
    gate.let_through(100)  # not to its end, which could come before the order to pause
    await_paused(1, traffic, ask, keys)
    gate.let_through(1900)
    leaving.close()
    assert [*stream] == [*range(1, 2001)]


def test_stream_goes_on_at_another_worker_of_its_host(
    host: Host, client: Client, gate: Gate
) -> None:
    worker = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": 100})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    gate.await_arrival()
    [process] = multiprocessing.active_children()
    process.kill()
    gate.let_through(200)
    assert [*got, *stream] == [*range(1, 101)]
    assert worker.stats().pool.restarts == 1  # type: ignore[union-attr]


def test_stream_of_long_outputs_goes_on_after_its_worker_died(
    host: Host, client: Client, gate: Gate
) -> None:
    host(LongNumbers, 1, model_init_args=(gate,))
    stream = client().stream({"n": 20})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    gate.await_arrival()
    [process] = multiprocessing.active_children()
    process.kill()
    gate.let_through(100)
    assert [int(output) for output in (*got, *stream)] == [*range(1, 21)]


@pytest.mark.long
def test_a_redis_that_has_lost_its_data_fails_the_stream() -> None:
    """Nothing is left by which anything could go on."""
    with (
        LocalRedis() as server,
        RedisWorker(Resumed, 1, redis_broker=server.url, claim_timeout=0.5),
        RedisStreamer(server.url, worker_timeout=None, answer_timeout=2) as streamer,
    ):
        stream = streamer.stream({"n": FOR_EVER})
        assert next(stream) == 1
        server.kill()
        server.start()
        with pytest.raises(Exception) as failed:  # noqa: PT011 - which one, below
            for _ in stream:
                pass
        assert type(failed.value).__name__ in ("PredictTimeout", "BrokerUnavailable", "WorkerLost")
