"""Version 0.1.2 at the same Redis and prefix: noticed, and said, on either side."""

from __future__ import annotations

import logging
import pickle
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import models
from conftest import await_that
from service_streamer import PredictTimeout, RedisStreamer, RedisWorker
from service_streamer.redis import legacy
from service_streamer.redis.legacy import OldClients, OldWorkers
from service_streamer.redis.link import Address, Link

redis = pytest.importorskip("redis")


class OldClient:
    """What a RedisStreamer of 0.1.2 does in Redis."""

    def __init__(self, url: str, prefix: str) -> None:
        self.name = str(uuid.uuid4())
        self.redis = redis.Redis.from_url(url)
        self.prefix = prefix
        self.subscription = self.redis.pubsub(ignore_subscribe_messages=True)
        self.subscription.subscribe(f"response_pb_{prefix}{self.name}")
        self.subscription.get_message(timeout=5)  # that it has subscribed

    def submit(self, item: Any) -> None:
        self.redis.lpush(f"request_queue{self.prefix}", pickle.dumps((self.name, 0, 0, item)))

    def close(self) -> None:
        self.redis.delete(f"request_queue{self.prefix}")
        self.subscription.close()
        self.redis.close()


@pytest.fixture
def old_client(redis_server: str, prefix: str) -> Iterator[OldClient]:
    client = OldClient(redis_server, prefix)
    yield client
    client.close()


@pytest.fixture
def old_worker(redis_server: str, prefix: str) -> Iterator[None]:
    """What a RedisWorker of 0.1.2 does in Redis while it waits."""
    connection = redis.Redis.from_url(redis_server)
    subscription = connection.pubsub(ignore_subscribe_messages=True)
    subscription.psubscribe(f"response_pb_{prefix}*")
    subscription.get_message(timeout=5)
    yield
    subscription.close()
    connection.close()


def test_a_worker_host_says_that_old_clients_wait(
    redis_server: str, prefix: str, old_client: OldClient, caplog: pytest.LogCaptureFixture
) -> None:
    old_client.submit("item")
    caplog.set_level(logging.WARNING)
    with RedisWorker(models.echo, redis_broker=redis_server, prefix=prefix):
        await_that(lambda: "service_streamer 0.1.2" in caplog.text)
    assert f"1 client of service_streamer 0.1.2 at the prefix {prefix!r}" in caplog.text
    assert "with 1 item in its queue" in caplog.text
    assert "docs/upgrading.md" in caplog.text


def test_it_says_so_once_and_not_of_other_prefixes(
    redis_server: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = [OldClient(redis_server, name) for name in (f"{prefix}x", prefix[:-1], "[a]*")]
    address = Address(redis_server)
    try:
        look = OldClients(address, prefix)
        look.look()
        assert "0.1.2" not in caplog.text
        for _ in range(2):
            look = OldClients(address, "[a]*")
            look.look()
            look._next = 0.0
            look.look()
        assert caplog.text.count("0.1.2 at the prefix") == 2
    finally:
        for each in others:
            each.close()


def test_a_redis_that_does_not_tell_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    OldClients(Address("127.0.0.1:1"), "").look()
    assert caplog.text == ""


def test_a_call_that_no_host_serves_names_old_workers(
    redis_server: str, prefix: str, old_worker: None
) -> None:
    with RedisStreamer(redis_server, prefix=prefix) as streamer:
        streamer.submit(["item"]).cancel()  # it looks around with the first call
        await_that(lambda: streamer._client._old_workers.may_be_there)
        with pytest.raises(
            PredictTimeout, match=r"there was no worker host; this Redis .* 0\.1\.2"
        ):
            streamer.predict(["item"], timeout=0.01)


def test_without_them_it_does_not(redis_server: str, prefix: str) -> None:
    with RedisStreamer(redis_server, prefix=prefix) as streamer:
        streamer.submit(["item"]).cancel()
        await_that(lambda: streamer._client._old_workers._next)  # it is about to look, or has
        await_that(lambda: streamer._client._hosts.count == 0)
        with pytest.raises(PredictTimeout) as caught:
            streamer.predict(["item"], timeout=0.01)
    assert "there was no worker host (" in str(caught.value)


def test_a_client_looks_for_old_workers_now_and_then(
    redis_server: str, old_worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks Redis about hosts twice a second, and each look takes a connection of its own."""
    made: list[Link] = []

    def make(address: Address) -> Link:
        made.append(Link(address))
        return made[-1]

    monkeypatch.setattr(legacy, "Link", make)
    look = OldWorkers(Address(redis_server))
    for _ in range(3):
        look.look()
    assert look.may_be_there
    assert len(made) == 1
