"""Calls over Redis that nobody will ever answer: each fails with the reason, and closing ends."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from fault_models import fail_as_a_streamer_of_its_own

import models
from cases import long_cases
from redis_peers import Keys, client_name
from serve_process import until
from service_streamer import (
    BadMessage,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    StreamerBroken,
    StreamerClosed,
    WorkerStartError,
)
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate

SECRET = "of sixteen bytes or more"
OTHER = "another one of these bytes"

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]


@pytest.fixture
def looking(client: Client) -> RedisStreamer:
    """A client whose calls soon fail if they make no progress."""
    return client(answer_timeout=1.5)


@pytest.fixture
def no_dead_letters(ask: redis.Redis, keys: Keys) -> Iterator[None]:
    yield
    ask.delete(keys.dead)


# -- a call that hosts cannot read


@pytest.mark.parametrize(
    ("theirs", "ours", "reason", "text"),
    [
        ({"secret": SECRET}, {"secret": OTHER}, "signature", "the signature is wrong"),
        ({"secret": SECRET}, {}, "secret", "only one side has a secret"),
        ({}, {"secret": SECRET}, "signature", "the signature is wrong"),
        (
            {"secret": SECRET, "serializer": "pickle"}, {"secret": SECRET},
            "serializer", "the serializers differ",
        ),
        ({}, {"max_message_bytes": 1024}, "size", "max_message_bytes"),
    ],
    ids=["other secret", "no secret here", "no secret there", "serializer", "size"],
)  # fmt: skip
@pytest.mark.usefixtures("no_dead_letters")
def test_call_that_hosts_cannot_read_is_set_aside_and_fails_with_the_reason(
    host: Host, ask: redis.Redis, keys: Keys, redis_server: str, prefix: str,
    caplog: pytest.LogCaptureFixture, theirs: dict[str, Any], ours: dict[str, Any], reason: str,
    text: str,
) -> None:  # fmt: skip
    worker = host(models.echo, **ours)
    with RedisStreamer(redis_server, prefix, None, **theirs) as streamer:
        futures = [streamer.submit(["x" * 5000]) for _ in range(50)]
    for future in futures:
        error = future.exception()
        assert isinstance(error, BadMessage)
        assert error.reason == reason
        assert str(error).startswith("a worker host could not read this call: ")
        assert text in str(error)
    stats = streamer.stats()
    assert (stats.unreadable, stats.lost, stats.pending) == (50, 0, 0)
    told = [record for record in caplog.records if "could not read this call" in record.message]
    assert len(told) == 1, "once, not for each call"
    assert worker.stats().set_aside == ask.xlen(keys.dead) == 50  # type: ignore[union-attr]
    assert ask.pttl(keys.dead) > 0
    with RedisStreamer(redis_server, prefix, None, **ours) as streamer:
        assert streamer.predict([1]) == [1], "the others go on"


@pytest.mark.usefixtures("no_dead_letters")
def test_a_message_that_says_nothing_of_its_sender_is_found_to_be_gone(
    host: Host, looking: RedisStreamer, ask: redis.Redis, keys: Keys
) -> None:
    future = looking.submit([1])
    until(lambda: ask.xlen(keys.calls) == 1)
    [(id_, _)] = ask.xrange(keys.calls)
    ask.xdel(keys.calls, id_)  # somebody mutilates it
    ask.xadd(keys.calls, {"d": 0, "m": b"\x95\x01"})
    host(models.echo)
    other = looking.submit([2])
    assert other.result() == [2]
    with pytest.raises(PredictTimeout, match=r"no progress in 1\.5 s, which is answer_timeout"):
        future.result()
    assert looking.stats().lost == 1


def test_a_reply_that_this_side_cannot_read_fails_its_call(host: Host, client: Client) -> None:
    host(models.double)
    streamer = client(max_message_bytes=1024)
    assert streamer.predict(["short"]) == ["shortshort"]
    with pytest.raises(
        BadMessage, match=r"could not read the reply to the call: .*max_message_bytes"
    ):
        streamer.submit(["x" * 800]).result()
    assert streamer.predict(["short"]) == ["shortshort"]


def test_notices_of_a_stranger_put_no_words_into_errors(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    host(models.Gated, model_init_args=(gate,))
    streamer = client()
    futures = [streamer.submit([1]), streamer.submit([2])]
    gate.await_arrival()
    replies = keys.replies(client_name(ask, keys))
    for notice in (b"99 size", b"1", b"", b"\xff 1", b"9" * 99, b"2 evil words", b"2 evil"):
        ask.xadd(replies, {"n": notice})
    with pytest.raises(BadMessage, match="it cannot be decoded") as caught:
        futures[1].result()
    assert "evil" not in str(caught.value)
    gate.let_through(2)
    assert futures[0].result() == [1]


def test_an_error_of_a_streamer_that_the_model_uses_is_an_answer(
    host: Host, client: Client
) -> None:
    worker = host(fail_as_a_streamer_of_its_own, 1)
    streamer = client(worker_timeout=30)
    for number, kind in enumerate([StreamerBroken, StreamerClosed, WorkerStartError] * 2):
        with pytest.raises(kind, match="the other model is away"):
            streamer.predict([number % 3])
    until(lambda: worker.stats().held == 0)  # type: ignore[union-attr]
    assert worker.stats().state == "serving"  # type: ignore[union-attr]


# -- a call that is gone


def test_call_that_is_gone_fails_though_others_are_answered(
    host: Host, looking: RedisStreamer, ask: redis.Redis, keys: Keys
) -> None:
    lost = looking.submit(["lost"])
    until(lambda: ask.xlen(keys.calls) == 1)
    [(id_, _)] = ask.xrange(keys.calls)
    ask.xdel(keys.calls, id_)
    host(models.echo)
    until(lambda: looking.predict([1]) == [1] and lost.done())
    with pytest.raises(PredictTimeout, match="answer_timeout"):
        lost.result()
    assert looking.stats().lost == 1


def test_calls_of_a_queue_that_nobody_serves_fail(looking: RedisStreamer) -> None:
    futures = [looking.submit([number]) for number in range(1500)]
    for future in futures:
        with pytest.raises(PredictTimeout, match="answer_timeout, and there was no worker host"):
            future.result()
    assert looking.stats().pending == 0


def test_a_call_that_is_being_computed_outlives_that_redis_forgets_its_client(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    host(models.Gated, model_init_args=(gate,))
    streamer = client(reply_ttl=3)
    future = streamer.submit([1])
    gate.await_arrival()
    [key] = ask.keys(keys.client("*"))
    ask.delete(key)  # as when its time to live ends, which a clock that is set forward brings about
    until(lambda: ask.exists(key))
    gate.let_through()
    assert future.result() == [1]
    assert streamer.predict([]) == []
    assert ask.get(key) == b"1", "so that what is sent again is known"


# -- closing


def test_a_block_ends_where_no_host_is(
    redis_server: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisStreamer(redis_server, prefix, drain_timeout=0.2) as streamer:
        futures = [streamer.submit([number]) for number in range(3)]
        until(lambda: streamer.stats().hosts == 0)
    says = "before the call was served: there was no worker host"
    for future in futures:
        with pytest.raises(StreamerClosed, match=says):
            future.result(0)
    assert "closed with 3 calls unanswered: there was no worker host" in caplog.text


def test_a_block_ends_where_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    with RedisStreamer(LocalRedis().url, drain_timeout=0.2) as streamer:  # it is not started
        future = streamer.submit([1])
        until(lambda: streamer.stats().state == "disconnected")
    with pytest.raises(StreamerClosed, match=r"is unavailable"):
        future.result(0)
    assert "closed with 1 call unanswered" in caplog.text


@pytest.mark.parametrize("waits", [1, *long_cases(None)])
def test_a_block_ends_where_redis_hangs_though_the_users_client_would_wait(
    waits: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalRedis() as server:
        broker = redis.Redis.from_url(server.url, socket_timeout=waits)
        with RedisStreamer(broker, drain_timeout=0.2) as streamer:
            future = streamer.submit([1])
            until(lambda: streamer.stats().queued is not None)
            server.pause()
        with pytest.raises(StreamerClosed):
            future.result(0)
        if waits is None:
            assert "this client's keys will expire there" in caplog.text
        server.resume()
        broker.close()


def test_a_forgotten_streamer_ends_although_nobody_answers(
    redis_server: str, prefix: str, ask: redis.Redis, keys: Keys
) -> None:
    others = {*threading.enumerate()}
    streamer = RedisStreamer(redis_server, prefix, drain_timeout=0.2)
    future = streamer.submit([1])
    threads = {*threading.enumerate()} - others
    del streamer
    gc.collect()
    for thread in threads:
        thread.join()
    assert isinstance(future.exception(0), StreamerClosed)
    assert ask.keys(keys.client("*")) == []


@pytest.fixture(autouse=True)
def no_bug_was_met(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
