"""Streams over Redis: outputs in order and once, whoever leaves, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

import models
from conftest import await_that
from service_streamer import (
    BrokerUnavailable,
    InvalidInput,
    Overloaded,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    Stream,
    WorkerLost,
)
from service_streamer.errors import ModelError
from service_streamer.redis import host_streams, receiver
from service_streamer.redis.claims import Claim, Claims
from service_streamer.redis.codec import MsgpackCodec
from service_streamer.redis.host_streams import HostStreams
from service_streamer.redis.outflow import Outflows
from service_streamer.redis.scripts import Keys
from service_streamer.redis.wire import Wire
from service_streamer.remote.open_calls import OutputRun
from service_streamer.testing import Gate
from stream_models import Countdown, Resumed, Summed

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]

FOR_EVER = 10**9


@pytest.fixture
def gated(host: Host, gate: Gate) -> RedisWorker:
    """A host with one place, whose steps wait at the gate."""
    return host(Countdown, 1, model_init_args=(gate,))


@pytest.fixture
def silent(host: Host, gate: Gate) -> RedisWorker:
    """The same, as after a pause: it gives no sign of life, and takes no call of others over."""
    return host(Countdown, 1, model_init_args=(gate,), claim_timeout=6000)


def held(worker: RedisWorker) -> int:
    stats = worker.stats()
    return -1 if stats is None else stats.held


def in_flight(worker: RedisWorker) -> int:
    stats = worker.stats()
    return -1 if stats is None else stats.pool.in_flight


def await_output(stream: Stream, gate: Gate) -> int:
    """The first output of a stream that begins when the one before it has gone.

    That one steps until its worker is told, which may be late: so the gate lets through what it
    takes.
    """
    await_that(lambda: gate.let_through() or stream.is_ready)
    output: int = next(stream)
    return output


def streams_of(worker: RedisWorker) -> list[Claim]:
    assert worker._host is not None
    outflows = worker._host._held.streams._outflows
    return [claim for client in outflows.clients() for claim in outflows.of(client)]


# -- what comes


@pytest.mark.parametrize(
    "options", [{}, {"serializer": "pickle", "secret": "of sixteen bytes or more"}], ids=["", "own"]
)
def test_outputs_come_in_order_to_threads_and_tasks(
    host: Host, client: Client, options: dict[str, Any]
) -> None:
    host(Countdown, 4, **options)
    streamer = client(**options)
    assert [*streamer.stream(300)] == [*range(1, 301)]
    assert [*streamer.stream({"n": 6, "every": 3})] == [3, 6]
    assert [*streamer.stream({"n": 2, "every": 3})] == []

    async def consume(n: int) -> list[int]:
        return [output async for output in streamer.astream(n)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(consume, range(1, 12)))

    assert asyncio.run(main()) == [[*range(1, n + 1)] for n in range(1, 12)]


def test_they_come_while_the_item_is_computed(
    gated: RedisWorker, client: Client, gate: Gate
) -> None:
    stream = client().stream(3)
    for number in (1, 2, 3):
        gate.let_through()
        assert next(stream) == number
    assert [*stream] == []


def test_and_to_a_task_that_waits(gated: RedisWorker, client: Client, gate: Gate) -> None:
    streamer = client()

    async def main() -> None:
        stream = streamer.astream(3)
        for number in (1, 2, 3):
            gate.let_through()
            assert await anext(stream) == number
        assert [output async for output in stream] == []

    asyncio.run(main())


def test_predict_and_submit_get_all_outputs_joined(host: Host, client: Client) -> None:
    host(Summed, 4)
    streamer = client()
    assert streamer.predict([3, 4]) == [6, 10]
    assert streamer.submit([5]).result() == [15]
    assert [*streamer.stream(3)] == [1, 2, 3]


def test_a_model_without_steps_is_a_stream_of_one_output(host: Host, client: Client) -> None:
    host(models.double)
    assert [*client().stream(4)] == [8]


def test_a_host_of_an_older_version_gives_all_outputs_at_once(
    host: Host, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know the mark of a stream, and answers as to a call of one item."""
    monkeypatch.setattr(Wire, "read_stream_mark", lambda *_: None)
    host(Countdown, 4)
    assert [*client().stream(3)] == [[1, 2, 3]]


def test_two_hosts_and_two_clients(host: Host, client: Client) -> None:
    workers = [host(Countdown, 4) for _ in range(2)]
    streamers = [client(), client()]
    got: dict[int, list[int]] = {}

    def consume(n: int) -> None:
        got[n] = [*streamers[n % 2].stream(n)]

    threads = [threading.Thread(target=consume, args=(n,)) for n in range(1, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: [*range(1, n + 1)] for n in range(1, 60)}
    await_that(lambda: [held(worker) for worker in workers] == [0, 0])


def test_a_host_claims_as_many_items_as_its_places_and_a_few(
    host: Host, client: Client, gate: Gate
) -> None:
    worker = host(Countdown, 8, model_init_args=(gate,))
    worker.wait_ready()
    streamer = client()
    streams = [streamer.stream(1) for _ in range(100)]
    gate.await_arrival()
    await_that(lambda: held(worker) >= 8)
    stats = worker.stats()
    assert stats is not None
    assert stats.held <= 2 * 8, "another host could compute the others"
    gate.let_through(200)
    assert [[*stream] for stream in streams] == [[1]] * 100


def test_outputs_of_a_step_are_one_message_to_each_client(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    worker = host(Countdown, 8, model_init_args=(gate,))
    streamer = client()
    first = streamer.stream(FOR_EVER)
    gate.await_arrival()
    streams = [first, *(streamer.stream(FOR_EVER) for _ in range(7))]

    await_that(lambda: in_flight(worker) == 8)
    for _ in range(20):  # the others begin with one of the first of these
        gate.let_through()
        gate.await_arrival()
    assert [next(first) for _ in range(20)] == [*range(1, 21)]
    assert all(next(stream) == 1 for stream in streams[1:])
    [replies] = ask.keys(keys.replies("*"))
    assert {name for _, fields in ask.xrange(replies) for name in fields} == {b"p"}
    assert ask.xlen(replies) < 60, "one for each step, or two if the sender comes in its midst"
    del first, streams
    gate.let_through(20)


# -- faults of items


def test_a_failure_comes_after_the_outputs_before_it(host: Host, client: Client) -> None:
    host(Countdown, 4)
    streamer = client()
    good = streamer.stream(200)
    bad = streamer.stream({"n": 5, "raise_at": 3})
    assert [next(bad), next(bad)] == [1, 2]
    with pytest.raises(ValueError, match="cannot make 3"):
        next(bad)
    with pytest.raises(InvalidInput, match="no number"):
        next(streamer.stream({"n": 1, "invalid": "no number"}))
    assert [*good] == [*range(1, 201)]


def test_an_output_that_is_too_large_fails_its_stream(host: Host, client: Client) -> None:
    class Growing(Countdown):
        def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
            return [("x" * output**3, done) for output, done in super().step(states)]

    host(Growing, 4, max_message_bytes=1024, mp_start_method="fork")
    stream = client().stream(50)
    assert [len(next(stream)) for _ in range(8)] == [n**3 for n in range(1, 9)]
    with pytest.raises(ModelError, match="too large"):
        list(stream)


def test_a_worker_that_dies_fails_streams_with_outputs_and_begins_others_again(
    host: Host, client: Client, gate: Gate
) -> None:
    worker = host(Countdown, 8, model_init_args=(gate,))
    streamer = client()
    begun = streamer.stream(FOR_EVER)
    gate.let_through(1)
    assert next(begun) == 1
    killer = streamer.stream({"n": 1, "kill_at": 1})
    new = streamer.stream(3)
    await_that(lambda: in_flight(worker) == 3)
    gate.let_through(1000)
    with pytest.raises(WorkerLost):
        list(begun)
    with pytest.raises(WorkerLost):
        list(killer)
    assert [*new] == [1, 2, 3]


# -- leaving


def begun_in_time(streamer: RedisStreamer, gate: Gate) -> Stream:
    """A stream whose time ends, but not before its first output has come."""
    for seconds in (1, 10, 100):
        gate.let_through()
        stream = streamer.stream(FOR_EVER, timeout=seconds)
        with contextlib.suppress(PredictTimeout):
            assert next(stream) == 1
            return stream
    pytest.fail("no output came in time")


@pytest.mark.parametrize("leave", ["close", "forget", "time"])
def test_to_leave_frees_the_place(
    gated: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys, leave: str
) -> None:
    """The only place: the next one can begin only when the first has gone."""
    streamer = client()
    gated.wait_ready()
    streamer.wait_ready()
    gate.let_through(2)
    if leave == "time":
        stream = begun_in_time(streamer, gate)
    else:
        stream = streamer.stream(FOR_EVER)
        assert next(stream) == 1
    if leave == "close":
        stream.close()
    elif leave == "forget":
        del stream
        gc.collect()
    else:
        with pytest.raises(PredictTimeout):  # the client or the host says so, whoever is first
            list(stream)
    await_that(lambda: held(gated) == 0)  # though the step goes on, without any more output
    stream = streamer.stream(2)
    assert await_output(stream, gate) == 1
    gate.let_through()
    assert [*stream] == [2]
    await_that(lambda: held(gated) == 0 and ask.xlen(keys.calls) == 0)
    await_that(lambda: ask.xpending(keys.calls, "hosts")["pending"] == 0)


def test_a_task_that_is_cancelled_frees_the_place(
    host: Host, client: Client, ask: redis.Redis, keys: Keys
) -> None:
    host(Countdown, 1)
    streamer = client()

    async def consume(begun: asyncio.Event) -> None:
        async for _ in streamer.astream(FOR_EVER):
            begun.set()

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(consume(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [*streamer.stream(2)] == [1, 2]
    await_that(lambda: ask.xlen(keys.calls) == 0)


def test_a_stream_that_no_host_has_is_withdrawn(
    client: Client, ask: redis.Redis, keys: Keys
) -> None:
    stream = client().stream(1)
    await_that(lambda: ask.xlen(keys.calls) == 1)
    stream.close()
    await_that(lambda: ask.xlen(keys.calls) == 0)


@pytest.mark.parametrize("how", ["cancelled", "expired", "closed"])
def test_a_call_that_is_given_up_frees_its_place_too(
    gated: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys, how: str
) -> None:
    gated.wait_ready()
    streamer = client()
    future = streamer.submit([FOR_EVER], timeout=0.5 if how == "expired" else None)
    if how == "expired":
        assert isinstance(future.exception(), PredictTimeout)
    else:
        gate.await_arrival()
        streamer.close(drain=False) if how == "closed" else future.cancel()
    await_that(lambda: ask.xlen(keys.calls) == held(gated) == 0)
    stream = client().stream(FOR_EVER)
    assert await_output(stream, gate) == 1
    stream.close()
    gate.let_through(9)


@pytest.mark.parametrize("is_gone", [False, True], ids=["dropped", "client gone"])
def test_what_is_given_up_while_the_host_submits_it_is_dropped(
    host: Host, client: Client, is_gone: bool
) -> None:
    worker = host(Countdown, 2)
    worker.wait_ready()
    assert worker._host is not None
    assert worker._pool is not None
    held_calls, engine = worker._host._held, worker._pool.engine
    submit = engine.submit

    def give_up_first(call: Any) -> None:
        engine.submit = submit  # type: ignore[method-assign]
        [claim] = held_calls.claims
        call.reply.call = call  # as the engine does first
        if is_gone:
            held_calls.streams._client_is_gone(claim.client)
        else:
            held_calls.forget([claim.id])
        submit(call)

    engine.submit = give_up_first  # type: ignore[method-assign]
    streamer = client()
    left = streamer.stream(FOR_EVER)
    await_that(lambda: worker._pool.stats().cancelled == 1)  # type: ignore[union-attr]
    assert [*streamer.stream(3)] == [1, 2, 3]
    stats = worker._pool.stats()
    assert (stats.pending, stats.in_flight) == (0, 0)
    left.close()


def test_hundreds_of_streams_that_are_dropped_leave_nothing(
    host: Host, client: Client, ask: redis.Redis, keys: Keys, prefix: str
) -> None:
    worker = host(Countdown, 16)
    streamer = client()
    for number in range(300):
        stream = streamer.stream(FOR_EVER)
        if number % 2:  # the others are dropped wherever they are
            assert next(stream) == 1
        stream.close()
    assert [*streamer.stream(2)] == [1, 2]
    await_that(lambda: held(worker) == 0 and ask.xlen(keys.calls) == 0)
    await_that(lambda: not ask.exists(keys.orders_of(worker._options.name)))
    assert ask.xpending(keys.calls, "hosts")["pending"] == 0
    assert streamer.stats().cancelled == 300
    await_that(lambda: not streamer._client._calls.to_tell)
    kinds = sorted(
        key.decode().rpartition(prefix)[2][2:].split(":")[0] for key in ask.keys(f"*{prefix}*")
    )
    if "unread" in kinds:  # not while the client has read all
        kinds.remove("unread")
    assert kinds == ["calls", "client", "host", "model", "replies"]


def test_the_streams_of_a_client_that_is_gone_are_dropped(
    gated: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys
) -> None:
    stream = client().stream(FOR_EVER)
    gate.let_through()
    assert next(stream) == 1
    [key] = ask.keys(keys.client("*"))
    # As when it has given no sign of life. It may give one just now, so again and again.
    await_that(lambda: ask.delete(key) < 2 and held(gated) == 0)
    assert ask.xlen(keys.calls) == 0
    gate.let_through(9)


# -- slow consumers


def test_the_item_of_a_consumer_that_lags_rests(host: Host, client: Client) -> None:
    worker = host(Countdown, 2)
    streamer = client()
    slow = streamer.stream(FOR_EVER, max_buffered=10)
    for number in range(1, 3):
        assert next(slow) == number
    await_that(lambda: [each.outflow.is_held for each in streams_of(worker)] == [True])  # type: ignore[union-attr]
    assert [*streamer.stream(500)] == [*range(1, 501)], "others go on"
    assert [next(slow) for _ in range(2000)] == [*range(3, 2003)]
    slow.close()


def test_a_stream_whose_last_output_is_one_too_many_is_over(
    host: Host, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_streams, "_MOST_WAITING", 1)
    host(Resumed, 1)
    assert [*client().stream({"n": 1})] == [1]


def test_close_lets_streams_finish_that_rest(host: Host, client: Client, gate: Gate) -> None:
    worker = host(Countdown, 2, model_init_args=(gate,))
    streamer = client()
    streams = [streamer.stream(3000, max_buffered=10) for _ in range(2)]
    lag = [stream._outputs.buffer for stream in streams]
    await_that(lambda: min(map(len, lag)) > 10 or gate.let_through())
    await_that(lambda: [each.outflow.is_held for each in streams_of(worker)] == [True] * 2)  # type: ignore[union-attr]
    gate.let_through(6000)
    streamer.close()
    assert [[*stream] for stream in streams] == [[*range(1, 3001)]] * 2


def test_one_that_wants_to_fail_instead_does(host: Host, client: Client) -> None:
    worker = host(Countdown, 2)
    slow = client().stream(FOR_EVER, max_buffered=10, fails_behind=True)
    await_that(lambda: slow._outputs.is_over)
    assert [next(slow) for _ in range(10)] == [*range(1, 11)]
    with pytest.raises(Overloaded, match=r"^10 outputs of the stream wait"):
        next(slow)
    await_that(lambda: held(worker) == 0)


@pytest.fixture
def goes_on() -> Iterator[threading.Event]:
    """Set at the end, also if the test has failed."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(
    ("bound", "most"),
    [("_MOST_UNREAD", 5), ("_MOST_BYTES_UNREAD", 2000), ("_MOST_BYTES_WAITING", 20)],
)
def test_a_client_that_reads_nothing_does_not_fill_redis(
    host: Host, client: Client, ask: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch,
    bound: str, most: int, goes_on: threading.Event,
) -> None:  # fmt: skip
    if bound == "_MOST_BYTES_WAITING":  # of the host, which waits for Redis
        monkeypatch.setattr(host_streams, "_MOST_UNREAD", 5)
    monkeypatch.setattr(host_streams, bound, most)
    monkeypatch.setattr(receiver, "_READ_ENTRIES", 2)
    monkeypatch.setattr(receiver, "_READ_BYTES", 100)
    worker = host(Countdown, 2)
    streamer = client()
    reads = threading.Event()
    hand_out = streamer._client._receiver.hand_out

    def stop(message: bytes) -> None:
        reads.set()
        goes_on.wait()
        hand_out(message)

    monkeypatch.setattr(streamer._client._receiver, "hand_out", stop)
    stream = streamer.stream(10_000, max_buffered=FOR_EVER)
    reads.wait()
    await_that(lambda: [each.outflow.is_behind for each in streams_of(worker)] == [True])  # type: ignore[union-attr]
    [name] = ask.keys(keys.replies("*"))
    replies, unread = name.decode(), keys.unread(streamer._client._name)

    def sizes() -> list[int]:
        return [len(fields[b"p"]) for _, fields in ask.xrange(replies) if b"p" in fields]

    def outputs() -> int:
        return sum(sizes())

    def counted() -> int:
        return sum(int(fields[b"b"]) for _, fields in ask.xrange(unread))

    if bound == "_MOST_BYTES_UNREAD":
        assert sum(sizes()[:-1]) <= most
    else:
        assert ask.xlen(replies) <= 5
    if bound == "_MOST_BYTES_WAITING":
        assert [len(each.outflow.waiting) < 5000 for each in streams_of(worker)] == [True]  # type: ignore[union-attr]
    await_that(lambda: counted() == outputs())
    goes_on.set()
    assert [*stream] == [*range(1, 10_001)]
    await_that(lambda: counted() == outputs())


# -- once and in order


@pytest.mark.parametrize("begun", [False, True])
def test_what_another_host_has_is_not_written_and_not_computed(
    silent: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys, begun: bool
) -> None:
    """As after a pause of the host in which another one has claimed the call."""
    stream = client().stream(FOR_EVER)
    if begun:
        gate.let_through()
        assert next(stream) == 1
    gate.await_arrival()
    [(id_, _)] = ask.xrange(keys.calls)
    written = [ask.xrange(key) for key in ask.keys(keys.replies("*"))]
    ask.xclaim(keys.calls, "hosts", "another", 0, [id_])
    gate.let_through()
    await_that(lambda: held(silent) == 0)
    assert [ask.xrange(key) for key in ask.keys(keys.replies("*"))] == written
    stream.close()
    gate.let_through(9)


@pytest.mark.parametrize("begun", [False, True])
def test_another_host_begins_what_was_not_handed_out_and_fails_the_rest(
    silent: RedisWorker, host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys,
    begun: bool,
) -> None:  # fmt: skip
    stream = client().stream(3)
    gate.await_arrival()
    if begun:
        gate.let_through()
        assert next(stream) == 1
        gate.await_arrival()
    [(id_, _)] = ask.xrange(keys.calls)
    ask.xclaim(keys.calls, "hosts", "dead", 0, [id_], idle=10**9)
    heir = host(Countdown, 1)
    await_that(lambda: heir.stats().taken_over == 1)  # type: ignore[union-attr]
    gate.let_through(9)  # the first one goes on for a while, as after a pause
    if begun:
        with pytest.raises(WorkerLost, match="after outputs were handed out"):
            list(stream)
    else:
        assert [*stream] == [1, 2, 3]
    await_that(lambda: held(silent) == held(heir) == 0)


def test_another_host_does_not_go_on_past_the_end(
    host: Host, client: Client, gate: Gate, ask: redis.Redis, keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As if the first one died before it said that its last output had been the last."""
    doomed = host(Resumed, 1, model_init_args=(gate,))
    stream = client().stream({"n": 3})
    gate.let_through(2)
    got = [next(stream), next(stream)]
    assert doomed._host is not None
    held_calls, is_done = doomed._host._held, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(held_calls, "computed", lambda *_, **__: is_done.set())
        gate.let_through()
        is_done.wait()
    streams = held_calls.streams
    await_that(lambda: not streams.is_ready and not streams.is_under_way)
    [(id_, _)] = ask.xrange(keys.calls)
    ask.xclaim(keys.calls, "hosts", "dead", 0, [id_], idle=10**9, justid=True)
    host(Resumed, 1)
    gate.let_through(9)  # the first one may be who goes on
    assert [*got, *stream] == [1, 2, 3]


def test_a_last_output_that_is_large_comes_with_the_end(
    host: Host, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_streams, "_MOST_AT_END", 0)
    host(Countdown, 1)
    assert [*client().stream(30)] == [*range(1, 31)]


def test_a_host_that_leaves_at_once_fails_what_was_handed_out_and_hands_back_the_rest(
    host: Host, client: Client, gate: Gate
) -> None:
    leaving = host(Countdown, 1, model_init_args=(gate,))
    streamer = client()
    begun = streamer.stream(FOR_EVER)
    gate.let_through()
    assert next(begun) == 1
    new = streamer.stream(3)
    await_that(lambda: held(leaving) == 2)
    leaving.close(drain=False)
    with pytest.raises(WorkerLost, match="after outputs were handed out"):
        list(begun)
    host(Countdown, 1)
    assert [*new] == [1, 2, 3]


def test_a_host_that_drains_finishes_its_streams(
    gated: RedisWorker, client: Client, gate: Gate
) -> None:
    stream = client().stream(4)
    gate.let_through()
    assert next(stream) == 1
    closing = threading.Thread(target=gated.close)
    closing.start()
    gate.let_through(9)
    assert [*stream] == [2, 3, 4]
    closing.join()


class Forged:
    """A client with one stream, whose outputs a test writes into Redis itself."""

    def __init__(self, streamer: RedisStreamer, ask: redis.Redis, keys: Keys, prefix: str) -> None:
        self.stream = streamer.stream(1)
        await_that(lambda: ask.xlen(keys.calls) == 1)
        self._ask, self._name = ask, streamer._client._name
        self._replies = keys.replies(self._name)
        self._wire = Wire(MsgpackCodec(), secret=None, prefix=prefix, max_bytes=10_000)

    def write(self, *runs: tuple[int, list[int]], end: int | None = None) -> None:
        encode = MsgpackCodec().encode
        with self._ask.pipeline(transaction=True) as pipeline:
            for first, outputs in runs:
                run = OutputRun(1, first, [encode(output) for output in outputs], b"")
                pipeline.xadd(self._replies, {"p": self._wire.outputs(self._name, [run])})
            if end is not None:
                pipeline.xadd(self._replies, {"r": self._wire.stream_end(self._name, 1, end, [])})
            pipeline.execute()


@pytest.fixture
def forged(client: Client, ask: redis.Redis, keys: Keys, prefix: str) -> Iterator[Forged]:
    yield Forged(client(), ask, keys, prefix)
    ask.delete(keys.calls)  # no host was there to finish it


def test_what_comes_twice_is_handed_out_once_and_in_order(forged: Forged) -> None:
    forged.write((0, [0, 1]), (0, [0, 1]), (1, [1, 2, 3]), (6, [6]), (4, [4, 5]), end=7)
    assert [*forged.stream] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("gap", ["outputs", "end"])
def test_outputs_that_redis_has_lost_fail_the_stream(forged: Forged, gap: str) -> None:
    forged.write((0, [0, 1]))
    if gap == "end":
        forged.write(end=5)
    else:
        forged.write((5, [5, 6]), (7, [7]))
    assert [next(forged.stream), next(forged.stream)] == [0, 1]
    with pytest.raises(
        BrokerUnavailable, match="lost the outputs of the stream from number 2 to 4"
    ):
        next(forged.stream)


def test_outputs_that_cannot_be_read_are_dropped(forged: Forged) -> None:
    forged._ask.xadd(forged._replies, {"p": b"nonsense"})
    forged.write((0, [0]), end=1)
    assert [*forged.stream] == [0]


def test_the_host_of_a_stream_is_told_even_if_its_acceptance_was_not(
    gated: RedisWorker, client: Client, gate: Gate
) -> None:
    """Redis had the call, but the answer with its id was lost: its first outputs tell it."""
    streamer = client()
    calls = streamer._client._calls
    put_in = calls.put_in
    calls.put_in = lambda ids: put_in([b""] * len(ids))  # type: ignore[method-assign]
    left = streamer.stream(FOR_EVER)
    gate.await_arrival()
    left.close()
    gate.let_through()
    await_that(lambda: held(gated) == 0)
    stream = streamer.stream(FOR_EVER)
    assert await_output(stream, gate) == 1
    stream.close()
    await_that(lambda: held(gated) == 0)
    gate.let_through(9)


# -- what waits at a host


class FakeLink:
    """Keeps what is sent by its client, and gives the answers of a test."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.answers: list[Any] = []

    def send(self, script: Any, keys: Any, *arguments: Any) -> None:
        messages, at = [], 5
        while at < len(arguments):
            messages.append(arguments[at])
            at += 3 + arguments[at + 1] + arguments[at + 2]
        self.messages = messages

    def receive(self) -> Any:
        return [], self.answers


def test_a_client_that_was_full_is_asked_at_each_request_and_gets_nothing_before(
    keys: Keys, prefix: str
) -> None:
    wire = Wire(MsgpackCodec(), secret=None, prefix=prefix, max_bytes=10_000)
    options = SimpleNamespace(name="host", reply_life=1000)
    parts: Any = SimpleNamespace(engine=None, wire=wire, keys=keys, options=options)
    held: list[Claim] = [Claim(b"1-0", "full", 1, 1), Claim(b"2-0", "other", 1, 1)]
    known = Claims(4)

    def nothing(*_: Any) -> bool:
        return False

    streams = HostStreams(
        parts, known, threading.RLock(), on_failed=nothing, on_outcome=nothing, on_dropped=nothing,
        hand_over=nothing, is_leaving=threading.Event(),
    )  # fmt: skip
    for claim in held:
        known.claimed(claim)
        streams.open(claim, 0)
    full, other = held
    assert full.outflow is not None
    link: Any = FakeLink()

    def request(now: float, *answers: int) -> list[bool]:
        assert streams.send(link, now, 10**6)
        link.answers = answers
        streams.receive(link)
        return [message != b"" for message in link.messages]

    streams.put(full, b"1")
    assert request(0.0, -1, 1) == [True, False]
    assert not full.outflow.has_begun, "it was not written, so another host may begin again"
    for _ in range(2):
        assert not streams.is_ready
        streams.put(other, b"2")
        assert request(0.01, -1, 1) == [False, True]
    streams.put(other, b"2")
    assert request(0.01, 1, 1) == [False, True]
    assert streams.is_ready
    assert request(0.01, 1, 1) == [True, False]
    assert full.outflow.has_begun
    assert full.outflow.written == 1


def test_one_message_may_exceed_what_a_client_leaves_unread(
    gated: RedisWorker, client: Client, gate: Gate, ask: redis.Redis, keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(receiver.Receiver, "_trim", lambda *_: None)  # it has read, but says no
    streamer = client()
    stream = streamer.stream(9)
    gate.let_through()
    assert next(stream) == 1
    [(_, fields)] = ask.xrange(keys.replies(streamer._client._name))
    monkeypatch.setattr(host_streams, "_MOST_BYTES_UNREAD", len(fields[b"p"]))
    gate.let_through()
    assert next(stream) == 2
    stream.close()
    gate.let_through(9)


def claims(outflows: Outflows, *clients: str) -> list[Claim]:
    made = [Claim(b"%d-0" % number, client, number, 1) for number, client in enumerate(clients)]
    for claim in made:
        outflows.open(claim)
    return made


def taken(outflows: Outflows, most: int = 10**6, per_client: int = 10**6) -> list[Any]:
    return [
        (client, [(claim.number, outputs) for claim, outputs in runs])
        for client, runs in outflows.next(most, per_client)
    ]


def test_outputs_of_a_client_go_together_and_stay_until_they_are_written() -> None:
    outflows = Outflows()
    a, b, c = claims(outflows, "one", "one", "two")
    for claim, output in ((a, b"1"), (b, b"2"), (a, b"3"), (c, b"4")):
        outflows.put(claim, output)
    whole = [("one", [(0, [b"1", b"3"]), (1, [b"2"])]), ("two", [(2, [b"4"])])]
    assert taken(outflows) == taken(outflows) == whole
    outflows.written(a, 1)
    outflows.written(c, 1)
    assert taken(outflows) == [("one", [(0, [b"3"]), (1, [b"2"])])]
    assert (a.outflow.written, a.outflow.size) == (1, 1)  # type: ignore[union-attr]
    outflows.close(a)
    outflows.written(a, 1)  # its answer comes later
    outflows.written(b, 1)
    assert not outflows.is_ready
    assert len(outflows) == 2
    outflows.close(b)
    outflows.close(c)
    outflows.close(c)
    assert outflows.clients() == []


def test_messages_are_bounded_and_all_have_their_turn() -> None:
    outflows = Outflows()
    for claim in claims(outflows, "one", "one", "two"):
        for _ in range(2):
            outflows.put(claim, b"x" * 100)
    assert taken(outflows, 10**6, 50) == [
        ("one", [(0, [b"x" * 100])]), ("two", [(2, [b"x" * 100])])
    ], "one at least"  # fmt: skip
    assert taken(outflows, 50, 50) == [("one", [(1, [b"x" * 100])])]
    assert taken(outflows, 50, 50) == [("two", [(2, [b"x" * 100])])]
    outflows.is_full("one")
    assert [client for client, _ in taken(outflows)] == ["two"]
    outflows.has_room("one")
    assert len(taken(outflows)) == 2
