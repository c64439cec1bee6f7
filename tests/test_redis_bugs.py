"""A bug in a thread of a client or of a worker host: told once, and the thread goes on."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

import models
from conftest import await_that
from redis_peers import Keys, Traffic, client_name
from service_streamer import InternalError, RedisStreamer, RedisWorker
from service_streamer.redis.wire import Wire
from service_streamer.testing import Gate
from stream_models import Countdown

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]

#: Where a bug comes: before a command is sent, or when its answer is there.
PLACES = ["command", "answer"]

#: One that repeats is not logged soon again, so each has a number.
NUMBERS = itertools.count()


class Slip:
    """Something that raises once, as a bug does, and has happened then."""

    def __init__(self, text: str = "") -> None:
        self.text = text or f"slip {next(NUMBERS)}"
        self.has_happened = threading.Event()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.has_happened.set()
        raise KeyError(self.text)

    @property
    def words(self) -> str:
        """What the error of a call says of it."""
        return f"this is a bug in it: KeyError: '{self.text}'"


def at(traffic: Traffic, place: str, kind: str, act: Callable[..., Any]) -> None:
    (traffic.at_command if place == "command" else traffic.at_answer)(kind, act)


def bugs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The exceptions that were logged as bugs."""
    records = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert all("this is a bug in it" in record.getMessage() for record in records)
    return [str(record.exc_info[1]) for record in records if record.exc_info]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("send calls", "command"),
        ("send calls", "answer"),
        ("give orders", "command"),
        ("give orders", "answer"),
        ("XREAD", "answer"),
    ],
)
def test_bug_in_a_thread_of_a_client_fails_its_open_calls_and_no_later_ones(
    host: Host, client: Client, gate: Gate, traffic: Traffic, caplog: pytest.LogCaptureFixture,
    ask: redis.Redis, keys: Keys, kind: str, place: str,
) -> None:  # fmt: skip
    host(models.Gated, 1, model_init_args=(gate,))
    streamer = client()
    calls = [streamer.submit([number]) for number in range(3)]
    gate.await_arrival()
    slip, are_open = Slip(), threading.Event()

    def slip_when_all_are_open(_: Any = None) -> None:
        are_open.wait()
        slip()

    at(traffic, place, kind, slip_when_all_are_open)
    calls.append(streamer.submit(["x" * 100_000]))  # so large that the sender's thread sends it
    are_open.set()
    calls.pop(0).cancel()
    if kind == "XREAD":  # which waits for a reply: an empty one only wakes the thread
        ask.xadd(keys.replies(client_name(ask, keys)), {"r": b""})
    for call in calls:
        with pytest.raises(InternalError, match=slip.words):
            call.result()
    gate.let_through(9)  # only now: an answer that is there before the slip would count
    assert bugs(caplog) == [repr(slip.text)]
    assert streamer.predict([4]) == [1]
    assert streamer.stats().pending == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["XREADGROUP", "sign of life"])
def test_bug_in_a_thread_of_a_host_fails_no_call_that_it_has_not_touched(
    host: Host, client: Client, traffic: Traffic, caplog: pytest.LogCaptureFixture,
    kind: str, place: str,
) -> None:  # fmt: skip
    worker = host(models.double, claim_timeout=0.3)
    streamer = client()
    assert streamer.predict([1]) == [2]
    slip = Slip()
    at(traffic, place, kind, slip)
    assert streamer.predict([2]) == [4]
    slip.has_happened.wait()
    assert streamer.predict([3]) == [6]
    assert bugs(caplog) == [repr(slip.text)]
    await_that(lambda: worker.stats().state == "serving")  # type: ignore[union-attr]


@pytest.mark.parametrize("place", PLACES)
def test_bug_while_a_host_answers_fails_the_call_in_hand(
    host: Host, client: Client, traffic: Traffic, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    worker = host(models.double)
    streamer = client()
    assert streamer.predict([1]) == [2]
    slip = Slip()
    at(traffic, place, "answer", slip)
    if place == "command":
        with pytest.raises(InternalError, match=slip.words):
            streamer.predict([2])
    else:  # Redis has the reply already
        assert streamer.predict([2]) == [4]
    slip.has_happened.wait()
    assert streamer.predict([3]) == [6]
    assert bugs(caplog) == [repr(slip.text)]
    await_that(lambda: worker.stats().held == 0)  # type: ignore[union-attr]


@pytest.mark.parametrize("place", [*PLACES, "message"])
def test_bug_in_the_way_of_outputs_fails_the_streams_of_a_host(
    host: Host, client: Client, traffic: Traffic, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, place: str,
) -> None:  # fmt: skip
    worker = host(Countdown, 4)
    streamer = client()
    stream = streamer.stream(10**9)
    assert [next(stream) for _ in range(3)] == [1, 2, 3]
    slip = Slip()
    with monkeypatch.context() as patch:
        if place == "message":
            patch.setattr(Wire, "outputs", slip)
        else:
            at(traffic, place, "send outputs", slip)
        slip.has_happened.wait()
    with pytest.raises(InternalError, match=slip.words):
        list(stream)
    assert bugs(caplog) == [repr(slip.text)]
    assert [*streamer.stream(3)] == [1, 2, 3]
    await_that(lambda: worker.stats().held == 0)  # type: ignore[union-attr]


def test_bug_that_repeats_is_logged_once(
    host: Host, client: Client, traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    host(models.double)
    streamer = client()
    assert streamer.predict([1]) == [2]
    slips = [Slip("again and again"), Slip("again and again"), Slip("another one")]
    for slip in slips:
        traffic.at_command("answer", slip)
        with pytest.raises(InternalError, match=slip.words):
            streamer.predict([2])
    assert bugs(caplog) == ["'again and again'", "'another one'"]
