"""What a model says of itself comes with its worker, and over Redis from its worker hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from redis import Redis

import models
import redis_peers
from conftest import await_that
from service_streamer import (
    BadMessage,
    RedisStreamer,
    RedisWorker,
    Streamer,
    ThreadedStreamer,
    WorkerStartError,
)
from service_streamer.redis.wire import Wire

SECRET = b"a secret of sixteen bytes"


def test_a_ready_worker_says_what_its_model_is() -> None:
    said = {"task": "custom", "labels": ("a", 1, None)}
    with Streamer(models.Describes, model_init_args=(said,)) as streamer:
        changed = threading.Event()
        streamer.backend.when_workers_change(changed.set)
        while streamer.backend.model_description() is None:
            changed.wait()
            changed.clear()
        assert streamer.backend.model_description() == {**said, "labels": ["a", 1, None]}
        assert streamer.stats().accepted == 0, "no call was made for it"
        assert streamer.predict([1]) == [1]


def describing(said: Any) -> type[models.Describes]:
    """A model that says that of itself, or raises it."""

    class Model(models.Describes):
        def init_model(self, *_: Any) -> None:
            super().init_model(said)

    return Model


NO_MAPPINGS = [
    ValueError("no weights"), SystemExit("no licence"), {"labels": object()}, {1, 2}, 5, ["a"]
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "description"),
    [
        *((said, None) for said in NO_MAPPINGS),
        (None, {}),
        (MappingProxyType({"task": "custom"}), {"task": "custom"}),
    ],
)
def test_model_is_served_with_a_warning_when_its_description_is_no_mapping(
    said: Any, description: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadedStreamer(describing(said)) as streamer:
        assert streamer.predict([1]) == [1]
        assert streamer.backend.model_description() == (description or {})
    assert ("Model.describe()" in caplog.text) == (description is None)


def test_a_model_that_cannot_be_loaded_is_not_described() -> None:
    with Streamer(models.BrokenInit) as streamer:
        with pytest.raises(WorkerStartError):
            streamer.wait_ready()
        with pytest.raises(WorkerStartError):
            streamer.backend.model_description()
    with ThreadedStreamer(models.echo) as function:
        function.wait_ready()
        assert function.backend.model_description() == {}


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("said", [{"task": "custom", "operations": ["predict"]}, {}])
def test_a_worker_host_announces_what_its_model_says(
    host: Callable[..., RedisWorker],
    client: Callable[..., RedisStreamer],
    ask: Redis,
    keys: Any,
    secret: bytes | None,
    said: dict[str, Any],
) -> None:
    streamer, stranger = client(secret=secret), client(secret=b"quite another secret")
    assert streamer.backend.model_description() is None
    worker = host(models.Describes, model_init_args=(said,), secret=secret)
    await_that(lambda: streamer.backend.model_description() is not None)
    assert streamer.backend.model_description() == said
    assert worker.stats().claimed == 0, "no call was made for it"
    stranger.wait_ready()
    assert stranger.backend.model_description() is None
    worker.close()
    assert not ask.exists(keys.model), "the last host takes it along"


def test_an_announcement_is_signed_for_its_prefix_and_is_no_reply() -> None:
    def wire(prefix: str = "a", secret: bytes | None = SECRET, most: int = 1024) -> Wire:
        return redis_peers.wire(prefix, secret=secret, max_message_bytes=most)

    message = wire().announcement({"model": "a"})
    assert wire().read_announcement(message) == {"model": "a"}
    for other in (wire("b"), wire(secret=None), wire(secret=b"quite another secret")):
        with pytest.raises(BadMessage):
            other.read_announcement(message)
    with pytest.raises(BadMessage):
        wire().read_reply(message, "hosts")
    with pytest.raises(BadMessage):
        wire().read_announcement(wire().results("hosts", 0, [b"x"]))
    for nothing in (b"", None, wire(secret=None).results("hosts", 0, [b"x"])):
        with pytest.raises(BadMessage):
            wire(secret=None).read_announcement(nothing)
    for description in ({"model": "a" * 1000}, {"most": 2**70}):
        assert wire().read_announcement(wire().announcement(description)) == {}
