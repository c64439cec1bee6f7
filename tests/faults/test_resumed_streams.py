"""Streams over Redis whose hosts end: another one goes on where the outputs ended, if it can."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis_processes import Program, made, stream_hosts

from redis_peers import Keys, Traffic, await_paused
from serve_process import until
from service_streamer import RedisStreamer, RedisWorker, WorkerLost
from service_streamer.redis.local import LocalRedis
from service_streamer.testing import Gate
from stream_models import Countdown, LongNumbers, Resumed

FOR_EVER = 10**9

Client = Callable[..., RedisStreamer]
Host = Callable[..., RedisWorker]


@pytest.fixture
def program(redis_server: str, prefix: str, ask: redis.Redis) -> Iterator[Callable[..., Program]]:
    with stream_hosts(ask, prefix, redis_broker=redis_server, model="Resuming") as program:
        yield program


def test_a_stream_goes_on_at_another_host_when_its_own_is_killed(
    program: Callable[..., Program], client: Client, gate: Gate
) -> None:
    doomed = program(gate)
    streamer = client(reply_ttl=5)
    begun, new = streamer.stream({"n": 500}), streamer.stream({"n": 3})
    gate.let_through(2)
    got = [next(begun), next(begun)]
    until(lambda: doomed.stats()["held"] == 2)
    doomed.kill()
    program()
    got += begun
    assert made(got) == [*range(1, 501)]
    assert len({host for host, _ in got[2:]}) == 1
    assert made(new) == [1, 2, 3]


def test_a_host_that_was_frozen_adds_nothing_when_another_one_has_gone_on(
    program: Callable[..., Program], client: Client, gate: Gate
) -> None:
    frozen = program(gate, claim_timeout=60)  # so that it never takes over from its heir
    stream = client(reply_ttl=5).stream({"n": 500})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    gate.await_arrival()
    frozen.signal(signal.SIGSTOP)
    heir = program()
    until(lambda: heir.stats()["taken_over"] == 1)
    got += [next(stream) for _ in range(10)]
    gate.let_through(500)
    frozen.signal(signal.SIGCONT)  # it steps on, and knows nothing of it
    got += stream
    assert made(got) == [*range(1, 501)]
    assert [host for host, _ in got[2:]] == [got[2][0]] * 498
    assert got[0][0] != got[2][0]
    until(lambda: frozen.stats()["held"] == 0)
    frozen.signal(signal.SIGTERM, alone=True)
    assert frozen.left()[0] == 0


@pytest.mark.parametrize(
    ("options", "losses"), [({"retry": False}, 1), ({"max_attempts": 2}, 2)], ids=["", "twice"]
)
def test_stream_is_lost_after_too_many_hosts(
    program: Callable[..., Program],
    client: Client,
    gate: Gate,
    options: dict[str, Any],
    losses: int,
) -> None:
    stream = client(reply_ttl=5).stream({"n": FOR_EVER})
    for _ in range(losses):
        doomed = program(gate, **options)
        gate.let_through()
        next(stream)
        gate.await_arrival()
        doomed.kill()
    program(**options)
    with pytest.raises(WorkerLost, match="after outputs were handed out"):
        next(stream)


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


def test_stream_that_goes_on_is_not_refused_when_others_have_taken_its_room(
    host: Host, client: Client, gate: Gate
) -> None:
    leaving = host(Resumed, 1, model_init_args=(gate,))
    stream = client(max_pending=1).stream({"n": 100})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    other = client().submit([{"n": 1}])
    until(lambda: leaving.stats().held == 2)  # type: ignore[union-attr]
    leaving.close(drain=False)
    host(Resumed, 1)
    assert [*got, *stream] == [*range(1, 101)]
    assert other.result() == [[1]]


def test_stream_that_is_over_keeps_neither_its_item_nor_its_outputs(
    host: Host, client: Client
) -> None:
    host(Resumed, 1)
    streamer = client()
    tracemalloc.start()
    try:
        streams = [streamer.stream({"n": 1, "text": "x" * (1 << 20)}) for _ in range(16)]
        assert [[*stream] for stream in streams] == [[1]] * 16
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("when", ["before", "while"], ids="it lags {} the host closes".format)
def test_host_that_drains_does_not_wait_for_a_consumer_that_lags(
    host: Host, client: Client, gate: Gate, traffic: Traffic, ask: redis.Redis, keys: Keys,
    when: str,
) -> None:  # fmt: skip
    leaving = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": FOR_EVER}, max_buffered=10)
    gate.let_through(5)
    assert [next(stream) for _ in range(5)] == [*range(1, 6)]
    if when == "before":
        gate.let_through(1000)
        await_paused(1, traffic, ask, keys)
    closing = threading.Thread(target=leaving.close)
    closing.start()
    until(lambda: leaving.stats().state == "leaving")  # type: ignore[union-attr]
    gate.let_through(1000)
    closing.join()
    host(Resumed, 1)
    assert [next(stream) for _ in range(500)] == [*range(6, 506)]
    stream.close()


def test_host_that_drains_has_a_consumer_that_lags_get_all_if_its_model_cannot_resume(
    host: Host, client: Client, traffic: Traffic, ask: redis.Redis, keys: Keys
) -> None:
    leaving = host(Countdown, 1)
    stream = client().stream(2000, max_buffered=10)
    await_paused(1, traffic, ask, keys)
    leaving.close()
    assert [*stream] == [*range(1, 2001)]


def test_client_that_reads_a_reply_again_does_not_send_the_stream_again(
    host: Host, client: Client, gate: Gate, traffic: Traffic
) -> None:
    """It reads its replies again after a pause, and after an outage."""
    read: list[Any] = []

    def keep(answer: Any) -> Any:
        """The reply by which the stream may go on elsewhere."""
        [(_, entries)] = answer
        read.extend(entries)
        traffic.at_answer("XREAD", repeat)
        return answer

    def repeat(answer: Any) -> Any:
        [(key, entries)] = answer
        return [[key, [*read, *entries]]]

    leaving = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": 100})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    traffic.at_answer("XREAD", keep)
    leaving.close(drain=False)
    heir = host(Resumed, 1, model_init_args=(gate,))
    gate.let_through()
    got.append(next(stream))  # with which the reply came again
    gate.let_through(200)
    assert [*got, *stream] == [*range(1, 101)]
    assert heir.stats().claimed == 1  # type: ignore[union-attr]


def test_stream_goes_on_after_a_worker_and_a_host_were_lost(
    host: Host, client: Client, gate: Gate
) -> None:
    """What another worker of the heir gets is the item with the outputs of all before it."""
    leaving = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": 100})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    leaving.close(drain=False)
    heir = host(Resumed, 1, model_init_args=(gate,))
    gate.let_through()
    got.append(next(stream))
    gate.await_arrival()
    [process] = multiprocessing.active_children()
    process.kill()
    gate.let_through(200)
    assert [*got, *stream] == [*range(1, 101)]
    assert heir.stats().pool.restarts == 1  # type: ignore[union-attr]


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


def test_a_redis_that_has_lost_its_data_fails_the_stream() -> None:
    """Nothing is left by which anything could go on."""
    with (
        LocalRedis() as server,
        RedisWorker(Resumed, 1, redis_broker=server.url, claim_timeout=0.5),
        RedisStreamer(server.url, worker_timeout=None, reply_ttl=2) as streamer,
    ):
        stream = streamer.stream({"n": FOR_EVER}, timeout=60)
        assert next(stream) == 1
        server.kill()
        server.start()
        with pytest.raises(Exception) as failed:  # noqa: PT011 - which one, below
            for _ in stream:
                pass
        assert type(failed.value).__name__ in ("BrokerUnavailable", "WorkerLost")
