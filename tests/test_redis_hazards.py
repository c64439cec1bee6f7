"""Hazards of the way over Redis that somebody has thought of, each as the smallest case of it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import models
from conftest import await_that
from redis_peers import Keys, Traffic, client_name
from service_streamer import (
    InternalError,
    Overloaded,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    Stream,
    WorkerLost,
)
from service_streamer.redis.local import LocalRedis
from service_streamer.redis.wire import Wire
from service_streamer.testing import Gate
from stream_models import Countdown
from walk.interrupts import interrupted_everywhere

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]
#: A client, and that it has not heard an answer.
Lost = tuple[RedisStreamer, threading.Event]


def test_calls_that_are_cancelled_or_whose_client_closes_are_withdrawn_however_many(
    client: Client, ask: redis.Redis, keys: Keys
) -> None:
    streamer = client()
    for is_cancelled in (True, False):
        futures = [streamer.submit([number]) for number in range(2500)]  # beyond those at once
        await_that(lambda: ask.xlen(keys.calls) == 2500)
        if is_cancelled:
            assert all(future.cancel() for future in futures)
            await_that(lambda: ask.xlen(keys.calls) == 0)
    streamer.close(drain=False)
    assert not ask.exists(keys.calls)


def test_call_is_answered_after_an_interrupt_at_any_place_in_the_one_before(
    host: Host, client: Client
) -> None:
    """An answer that the interrupted call has not read is not that to the next command."""
    host(models.echo)
    streamer = client()
    assert streamer.predict(["first"]) == ["first"]
    for place in interrupted_everywhere(lambda: streamer.submit(["interrupted"])):
        streamer.submit(["given up"]).cancel()  # so that another command comes before the next call
        assert streamer.predict([place]) == [place]
    await_that(lambda: streamer.stats().pending == 0)


@pytest.fixture
def held_up(client: Client, traffic: Traffic) -> Iterator[tuple[RedisStreamer, threading.Event]]:
    """A client whose first call is so large that a thread sends it, which waits for the event.

    What it is given meanwhile goes in one batch.
    """
    streamer, goes_on = client(max_pending=13), threading.Event()
    is_sending = threading.Event()

    def wait() -> None:
        is_sending.set()
        goes_on.wait()

    traffic.at_command("send calls", wait, thread="sender")
    streamer.submit(["x" * 100_000])
    is_sending.wait()
    yield streamer, goes_on
    goes_on.set()


def test_call_that_is_given_up_before_it_is_sent_is_not_sent(
    held_up: tuple[RedisStreamer, threading.Event], ask: redis.Redis, keys: Keys
) -> None:
    streamer, goes_on = held_up
    futures = [streamer.submit([number]) for number in range(3)]
    assert futures[0].cancel()
    assert futures[2].cancel()
    goes_on.set()
    await_that(lambda: ask.xlen(keys.calls) == 2)
    [key] = ask.keys(keys.client("*"))
    await_that(lambda: ask.get(key).split()[0] == b"2")  # type: ignore[union-attr]  # ever sent
    assert streamer.stats().pending == 2


@pytest.mark.parametrize("room", [0, 1, 2])
def test_calls_of_a_batch_for_which_there_is_no_room_are_refused(
    held_up: tuple[RedisStreamer, threading.Event], host: Host, client: Client,
    ask: redis.Redis, keys: Keys, room: int,
) -> None:  # fmt: skip
    streamer, goes_on = held_up
    other = client()
    for number in range(12 - room):
        other.submit([number])
    await_that(lambda: ask.xlen(keys.calls) == 12 - room)
    futures = [streamer.submit([number]) for number in range(3)]
    goes_on.set()
    for refused in futures[room:]:
        assert isinstance(refused.exception(), Overloaded)
    closing = client(max_pending=1)
    closing.submit(["finds no place"]).add_done_callback(lambda _: closing.close())
    await_that(lambda: closing.stats().state == "closed")  # in the callback
    other.close(drain=False)
    host(models.echo)
    assert [future.result() for future in futures[:room]] == [[number] for number in range(room)]
    assert streamer.predict(["next"]) == ["next"]
    assert streamer.stats().pending == 0


def test_calls_of_a_dead_host_are_claimed_by_a_host_without_room(
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


@pytest.mark.parametrize(
    ("timeout", "milliseconds"), [(None, 5000), (2, 1000), (3, 1500), (60, 5000)]
)
def test_reads_do_not_block_for_longer_than_a_connection_lives(
    client: Client, redis_server: str, traffic: Traffic, timeout: float | None, milliseconds: int
) -> None:
    with redis.Redis.from_url(redis_server, socket_timeout=timeout) as own:
        streamer = client(redis_broker=own)
        streamer.submit([1])
        await_that(lambda: traffic.last("XREAD"))
        command = traffic.last("XREAD")
        streamer.close(drain=False)
    assert int(command[command.index("BLOCK") + 1]) == milliseconds


def test_call_in_hand_is_not_handed_back_without_retry(
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


@pytest.fixture
def lost(client: Client, traffic: Traffic) -> Lost:
    """A client that does not hear that Redis has accepted its next call."""
    streamer = client(answer_timeout=3)
    streamer.submit(["first"])
    await_that(lambda: traffic.count("send calls") == 1)  # it has heard that Redis has this one
    is_lost = threading.Event()

    def lose(_: Any) -> None:
        is_lost.set()
        raise redis.ConnectionError

    traffic.at_answer("send calls", lose)
    return streamer, is_lost


@pytest.mark.parametrize("kind", ["call", "stream"])
def test_a_call_is_withdrawn_whose_acceptance_was_not_heard(
    lost: Lost, ask: redis.Redis, keys: Keys, kind: str
) -> None:
    streamer, is_lost = lost
    unheard = streamer.submit(["unheard"]) if kind == "call" else streamer.stream("unheard")
    is_lost.wait()
    assert ask.xlen(keys.calls) == 2
    unheard.close() if isinstance(unheard, Stream) else unheard.cancel()
    await_that(lambda: ask.xlen(keys.calls) == 1)
    [(_, fields)] = ask.xrange(keys.calls)
    assert b"first" in fields[b"m"]


@pytest.mark.long
def test_a_call_that_is_gone_fails_whose_acceptance_was_not_heard(
    lost: Lost, host: Host, ask: redis.Redis, keys: Keys
) -> None:
    streamer, is_lost = lost
    unheard = streamer.submit(["unheard"])
    is_lost.wait()
    kept = streamer.submit(["later"])
    await_that(lambda: ask.xlen(keys.calls) == 3)
    [(id_, _)] = [entry for entry in ask.xrange(keys.calls) if b"unheard" in entry[1][b"m"]]
    ask.xdel(keys.calls, id_)
    host(models.echo)
    assert kept.result() == ["later"]
    with pytest.raises(PredictTimeout, match="answer_timeout"):
        unheard.result()


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
    [*itertools.product(["send calls", "give orders"], PLACES), ("XREAD", "answer")],
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
@pytest.mark.parametrize("kind", ["XREADGROUP", "sign of life", "answer"])
def test_bug_in_a_thread_of_a_host_fails_no_call_that_it_has_not_touched(
    host: Host, client: Client, traffic: Traffic, caplog: pytest.LogCaptureFixture,
    kind: str, place: str,
) -> None:  # fmt: skip
    worker = host(models.double, claim_timeout=0.3)
    streamer = client()
    assert streamer.predict([1]) == [2]
    slip = Slip()
    at(traffic, place, kind, slip)
    if (kind, place) == ("answer", "command"):  # else Redis has the reply already
        with pytest.raises(InternalError, match=slip.words):
            streamer.predict([2])
    else:
        assert streamer.predict([2]) == [4]
    slip.has_happened.wait()
    assert streamer.predict([3]) == [6]
    assert bugs(caplog) == [repr(slip.text)]
    await_that(lambda: (stats := worker.stats()).held == 0 and stats.state == "serving")  # type: ignore[union-attr]


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
