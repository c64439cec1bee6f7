"""Hazards of the way over Redis that somebody has thought of, each as the smallest case of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

import models
from conftest import await_that
from service_streamer import Overloaded, RedisStreamer, RedisWorker, WorkerLost
from service_streamer.redis.link import Address, Link
from service_streamer.redis.local import LocalRedis
from service_streamer.redis.scripts import REFRESH, Keys
from service_streamer.testing import Gate

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]


def test_however_many_calls_are_given_up_none_of_them_stays(
    client: Client, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    for number in range(2500):  # beyond what is withdrawn at once
        streamer.submit([number])
    await_that(lambda: ask.xlen(keys.calls) == 2500)
    streamer.close(drain=False)
    assert not ask.exists(keys.calls)


def test_calls_that_are_cancelled_are_withdrawn_however_many(
    client: Client, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    futures = [streamer.submit([number]) for number in range(2500)]
    await_that(lambda: ask.xlen(keys.calls) == 2500)
    assert all(future.cancel() for future in futures)
    await_that(lambda: ask.xlen(keys.calls) == 0)


def test_an_answer_that_nobody_has_read_is_not_that_to_the_next_command(
    redis_server: str, keys: Keys
) -> None:
    link = Link(Address(redis_server))
    # As after an interrupt, which came before it was noted that it was sent.
    link.send(REFRESH, (keys.calls, keys.client("web"), keys.model), 1000, keys.inboxes)
    assert link.call("ECHO", "mine") == b"mine"
    link.close()


def test_a_streamer_may_be_closed_in_a_callback_of_a_call_that_was_refused(
    client: Client, ask: redis.Redis, keys: Keys
) -> None:
    client().submit(["takes the only place"])
    await_that(lambda: ask.xlen(keys.calls) == 1)
    streamer = client(max_pending=1)
    refused = streamer.submit(["finds none"])
    refused.add_done_callback(lambda _: streamer.close())
    assert isinstance(refused.exception(), Overloaded)
    await_that(lambda: streamer.stats().state == "closed")
    sender = streamer._client._sending
    assert sender is not None
    sender.join()  # which goes on closing


def test_what_a_dead_host_held_is_claimed_by_one_that_has_no_room(
    host: Host, client: Client, ask: redis.Redis, keys: Keys, gate: Gate
) -> None:
    # Given a host at the gate, which holds all that it has room for
    busy = host(models.Gated, 1, model_init_args=(gate,), claim_timeout=0.3)
    streamer = client()
    held = [streamer.submit([1]), streamer.submit([2])]
    gate.await_arrival()
    await_that(lambda: busy.stats().held == 2)  # type: ignore[union-attr]
    # and a call that another one claims, and dies
    orphan = streamer.submit([3])
    await_that(lambda: ask.xreadgroup("hosts", "dead", {keys.calls: ">"}, count=1))
    await_that(lambda: busy.stats().taken_over == 1)  # type: ignore[union-attr]
    gate.let_through(3)
    assert [future.result() for future in [*held, orphan]] == [[1]] * 3


def test_a_redis_that_is_full_can_be_emptied() -> None:
    calls = Keys("").calls
    with (
        LocalRedis() as server,
        redis.Redis.from_url(server.url) as ask,
        RedisStreamer(server.url) as streamer,
    ):
        future = streamer.submit([1])
        await_that(lambda: ask.xlen(calls) == 1)
        ask.xadd(calls, {"m": "what no host can read"})
        ask.config_set("maxmemory", 1)  # whatever needs more is refused from now on
        with RedisWorker(models.double, redis_broker=server.url) as worker:
            assert future.result() == [2]
            await_that(lambda: worker.stats().set_aside == 1)  # type: ignore[union-attr]
            await_that(lambda: ask.xlen(calls) == 0)
        ask.config_set("maxmemory", 0)


def test_reads_do_not_block_for_longer_than_a_connection_lives() -> None:
    assert Address("localhost:6379").longest_block == 5
    assert Address("redis://localhost:6379?socket_timeout=2").longest_block == 1
    with redis.Redis(socket_timeout=3) as own:
        assert Address(own).longest_block == 1.5
    with redis.Redis.from_url("redis://localhost:6379") as own:  # redis-py has a default, too
        made = own.connection_pool.make_connection()
        assert made.socket_timeout is None or Address(own).longest_block < made.socket_timeout


def test_an_address_that_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="decode_responses=False"):
        Address("redis://localhost:6379?decode_responses=true")


def test_without_retry_what_a_stopped_host_was_at_is_not_handed_back(
    host: Host, client: Client, gate: Gate
) -> None:
    worker = host(models.Gated, 1, model_init_args=(gate,), retry=False)
    streamer = client()
    computing, waiting = streamer.submit([1]), streamer.submit([2])
    gate.await_arrival()
    await_that(lambda: worker.stats().held == 2)  # type: ignore[union-attr]
    worker.close(drain=False)
    with pytest.raises(WorkerLost, match="ended while it computed"):
        computing.result()
    assert worker.stats().handed_back == 1  # type: ignore[union-attr]
    gate.let_through(1)
    host(models.Gated, 1, model_init_args=(gate,), retry=False)
    assert waiting.result() == [1]
