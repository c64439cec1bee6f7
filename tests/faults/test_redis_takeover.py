"""What a dead host had claimed, beside what is newer; a clock that is set; a Redis that hangs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_processes import Program, recorded, stream_hosts

import models
from conftest import rewrite_call
from redis_peers import Keys
from serve_process import until
from service_streamer import PredictTimeout, RedisStreamer, RedisWorker, WorkerStartError
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate
from stream_models import Countdown

#: Seconds without a sign of life after which others claim what a host holds.
CLAIM_TIMEOUT = 1.5

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]


@pytest.fixture
def program(
    redis_server: str, prefix: str, tmp_path: Path, ask: redis.Redis
) -> Iterator[Callable[..., Program]]:
    """Starts worker hosts as programs, which write down what they compute."""
    record = str(tmp_path / "record")
    options = {"redis_broker": redis_server, "claim_timeout": CLAIM_TIMEOUT, "reply_ttl": 120}
    with stream_hosts(ask, prefix, record, **options) as program:
        yield program


def abandoned(ask: redis.Redis, keys: Keys) -> int:
    """How many calls a host holds that has given no sign of life for its time."""
    found: Any = ask.xpending_range(
        keys.calls, "hosts", "-", "+", 99, idle=round(1000 * CLAIM_TIMEOUT)
    )
    return len(found)


@pytest.mark.long
def test_a_host_that_is_started_again_serves_the_old_calls_first(
    program: Callable[..., Program], client: Client, gate: Gate, ask: redis.Redis, keys: Keys,
    tmp_path: Path,
) -> None:  # fmt: skip
    doomed = program(gate, worker_num=6)
    streamer = client()
    old = [streamer.submit([number]) for number in range(12)]
    for _ in range(6):
        gate.await_arrival()
    until(lambda: doomed.stats()["held"] == 12)
    doomed.kill()
    (tmp_path / "record").unlink()
    new = [streamer.submit([number]) for number in range(100, 112)]
    until(lambda: abandoned(ask, keys) == 12)
    # It has one worker, so it has room for two at a time.
    heir = program(None, model_init_args=[str(tmp_path / "record")])
    assert [future.result() for future in (*old, *new)] == [
        [2 * number] for number in (*range(12), *range(100, 112))
    ]
    # With one worker also in order: see test_redis_claim_order.py, and test_hazards.py for batches.
    assert recorded(tmp_path / "record") == [*range(12), *range(100, 112)]
    assert heir.stats()["taken_over"] == 12


@pytest.mark.long
def test_a_call_that_is_deleted_and_whose_host_dies_fails(
    program: Callable[..., Program], host: Host, client: Client, gate: Gate, ask: redis.Redis,
    keys: Keys,
) -> None:  # fmt: skip
    doomed = program(gate)
    streamer = client(answer_timeout=3)
    future = streamer.submit([1])
    gate.await_arrival()
    [(id_, _)] = ask.xrange(keys.calls)
    ask.xdel(keys.calls, id_)
    doomed.kill()
    host(models.Gated, model_init_args=(gate,), model_name="Recording")
    with pytest.raises(PredictTimeout, match="answer_timeout"):
        future.result()


def test_calls_that_are_handed_back_come_before_newer_ones(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    options = {"model_init_args": (gate, tmp_path / "diary"), "claim_timeout": 60}
    leaving = host(models.Diary, 1, **options)
    streamer = client()
    futures = [streamer.submit([number]) for number in range(2)]
    gate.await_arrival()
    until(lambda: leaving.stats().held == 2)  # type: ignore[union-attr]
    futures += [streamer.submit([number]) for number in range(2, 6)]
    until(lambda: ask.xlen(keys.calls) == 6)
    entries = ask.xrange(keys.calls)
    leaving.close(drain=False)
    assert ask.xrange(keys.calls) == entries, "they keep their ids, and what travels in them"
    assert leaving.stats().handed_back == 2  # type: ignore[union-attr]
    gate.let_through(100)
    host(models.Diary, 1, **options)
    assert [future.result() for future in futures] == [[number] for number in range(6)]
    assert (tmp_path / "diary").read_text().split() == [str(number) for number in range(6)]


def test_hosts_that_are_idle_take_what_is_handed_back_at_once(
    host: Host, client: Client, gate: Gate
) -> None:
    leaving = host(models.Gated, 1, model_init_args=(gate,), claim_timeout=600)
    streamer = client()
    future = streamer.submit([1])
    gate.await_arrival()
    heir = host(models.Gated, 1, model_init_args=(gate,), claim_timeout=600)
    heir.wait_ready()
    until(lambda: heir.stats().state == "serving")  # type: ignore[union-attr]
    gate.let_through(100)
    leaving.close(drain=False)
    assert future.result() == [1]


def test_a_host_with_another_model_is_refused(host: Host, client: Client, prefix: str) -> None:
    first = host(models.double)
    until(lambda: first.stats().state == "serving")  # type: ignore[union-attr]
    stranger = host(models.echo, claim_timeout=0.2)
    with pytest.raises(WorkerStartError) as caught:
        stranger.run_forever()
    said = str(caught.value)
    assert said.startswith(
        f"worker hosts of prefix '{prefix}' serve double, but this host has echo"
    )
    assert "its own prefix" in said
    streamer = client()
    assert streamer.predict([1]) == [2]
    until(lambda: streamer.stats().models == ("double",))


@pytest.mark.long
def test_the_model_of_a_host_that_was_killed_is_soon_forgotten(
    program: Callable[..., Program], host: Host, client: Client
) -> None:
    program(claim_timeout=0.5).kill()
    host(models.echo, claim_timeout=0.5)
    assert client().predict([1]) == [1]


def test_a_model_has_the_name_of_its_class_wherever_that_is_or_one_that_is_given() -> None:
    for model, name in (
        (models.Doubler, "Doubler"), (models.double, "double"), ("models:Doubler", "Doubler"),
        (models.Doubler(2).predict, "Doubler.predict"),
    ):  # fmt: skip
        assert RedisWorker(model).model_name == name
    assert RedisWorker(models.double, model_name="bert").model_name == "bert"


# -- Redis's clock


def test_call_that_is_claimed_too_late_fails_with_predict_timeout(
    host: Host, client: Client, ask: redis.Redis, keys: Keys
) -> None:
    """As when the clock was set while no host was there to see it."""
    streamer = client()
    future = streamer.submit([1])
    rewrite_call(ask, keys, lambda fields: {**fields, b"d": b"1"})
    host(models.echo)
    with pytest.raises(PredictTimeout, match="had passed when a worker host claimed it"):
        future.result()


# -- streams whose connections are cut, and whose Redis comes and goes


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
