"""Streams over Redis: outputs in order and once, whoever leaves, and nothing that stays behind."""

from __future__ import annotations

import contextlib
import gc
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from conftest import await_that
from contract.streams import Streams
from redis_peers import Keys, RawClient, Traffic, await_paused, client_name, wire
from service_streamer import (
    BrokerUnavailable,
    ModelError,
    Overloaded,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    Stream,
    WorkerLost,
)
from service_streamer.redis.wire import OutputRun
from service_streamer.testing import Gate
from stream_models import Countdown, LongTexts, Resumed

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]

FOR_EVER = 10**9


@pytest.fixture
def gated(host: Host, gate: Gate) -> RedisWorker:
    """A host with one place, whose steps wait at the gate; it soon looks what is still its own."""
    return host(Countdown, 1, model_init_args=(gate,), claim_timeout=1)


@pytest.fixture
def silent(host: Host, gate: Gate) -> RedisWorker:
    """The same, as after a pause: it gives no sign of life, and takes no call of others over."""
    return host(Countdown, 1, model_init_args=(gate,), claim_timeout=6000)


def held(worker: RedisWorker) -> int:
    stats = worker.stats()
    return -1 if stats is None else stats.held


def await_output(stream: Stream, gate: Gate) -> int:
    """The first output of a stream that begins when the one before it has gone.

    That one steps until its worker is told, which may be late: so the gate lets through what it
    takes.
    """
    await_that(lambda: gate.let_through() or stream.is_ready)
    output: int = next(stream)
    return output


# -- what comes


class TestStreams(Streams):
    has_timings = False  # calls over Redis have none

    @pytest.fixture(params=["redis"])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        return request.param


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

    await_that(lambda: worker.stats().pool.in_flight == 8)  # type: ignore[union-attr]
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


def test_an_output_that_is_too_large_fails_its_stream(host: Host, client: Client) -> None:
    class Growing(Countdown):
        def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
            return [("x" * output**3, done) for output, done in super().step(states)]

    host(Growing, 4, max_message_bytes=1024, mp_start_method="fork")
    stream = client().stream(50)
    assert [len(next(stream)) for _ in range(8)] == [n**3 for n in range(1, 9)]
    with pytest.raises(ModelError, match="too large"):
        list(stream)


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
def test_consumer_that_leaves_frees_the_place(
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


@pytest.mark.parametrize("is_gone", [False, True], ids=["dropped", "client gone"])
def test_stream_that_is_given_up_while_the_host_submits_it_is_dropped(
    host: Host, client: Client, ask: redis.Redis, keys: Keys, is_gone: bool
) -> None:
    streamer = client()
    streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()

    def length(item: int) -> int:
        if item == FOR_EVER:  # the host has claimed it, and submits it when it knows its length
            stream = streams.get()
            if is_gone:
                key = keys.client(client_name(ask, keys))
                await_that(lambda: ask.delete(key) < 2 and held(worker) == 0)
            else:
                stream.close()
                await_that(lambda: held(worker) == 0)
        return 1

    worker = host(Countdown, 2, length=length, claim_timeout=1)
    left = streamer.stream(FOR_EVER)
    streams.put(left)
    await_that(lambda: worker.stats().pool.cancelled == 1)  # type: ignore[union-attr]
    assert [*streamer.stream(3)] == [1, 2, 3]
    pool = worker.stats().pool  # type: ignore[union-attr]
    assert (pool.pending, pool.in_flight) == (0, 0)
    left.close()


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


def test_close_lets_streams_finish_that_are_paused(
    host: Host, client: Client, gate: Gate, traffic: Traffic, ask: redis.Redis, keys: Keys
) -> None:
    host(Countdown, 2, model_init_args=(gate,))
    streamer = client()
    streams = []
    for count in (1, 2):
        streams.append(streamer.stream(3000, max_buffered=10))
        gate.let_through(100)  # not to its end, which could come before the order to pause
        await_paused(count, traffic, ask, keys)
    gate.let_through(5800)
    streamer.close()
    assert [[*stream] for stream in streams] == [[*range(1, 3001)]] * 2


def test_stream_fails_when_it_is_behind_if_its_consumer_wants_that(
    host: Host, client: Client
) -> None:
    worker = host(Countdown, 2)
    slow = client().stream(FOR_EVER, max_buffered=10, fails_behind=True)
    await_that(lambda: worker.stats().claimed == 1 and held(worker) == 0)  # type: ignore[union-attr]
    assert [next(slow) for _ in range(10)] == [*range(1, 11)]
    with pytest.raises(Overloaded, match=r"^10 outputs of the stream wait"):
        next(slow)


#: Of outputs that a client has not read: from here on it gets no more.
MOST_UNREAD = 1000
MOST_BYTES_UNREAD = 16 << 20


def read_all(raw: RawClient) -> list[Any]:
    """Read the rest of a stream, from an output of which the number is returned first."""
    outputs: list[tuple[int, Any]] = []
    end = None
    while end is None:
        more, end = raw.read()
        outputs += more
    assert [number for number, _ in outputs] == [*range(outputs[0][0], outputs[-1][0] + 1)]
    assert end.failure is None
    return [outputs[0][0], *(output for _, output in outputs)]


def test_client_that_reads_no_messages_gets_a_thousand_and_then_its_item_is_paused(
    host: Host, client: Client, raw: RawClient
) -> None:
    raw.pretend_unread(1, count=MOST_UNREAD - 5)
    worker = host(Countdown, 2)
    raw.stream(8000)
    await_that(lambda: raw.unread == MOST_UNREAD)
    # Each step is of both items: by now the one that is behind would have made too many to wait.
    assert len([*client().stream(4000)]) == 4000
    assert raw.unread == MOST_UNREAD
    assert read_all(raw) == [0, *range(1, 8001)]
    await_that(lambda: held(worker) == 0)


@pytest.mark.parametrize("is_gone", [False, True], ids=["reads later", "is gone"])
def test_client_that_reads_no_bytes_does_not_fill_redis(
    host: Host, raw: RawClient, is_gone: bool
) -> None:
    worker = host(LongTexts, 1)
    raw.stream(FOR_EVER if is_gone else 300)
    await_that(lambda: sum(raw.sizes) > MOST_BYTES_UNREAD)
    assert sum(raw.sizes[:-1]) <= MOST_BYTES_UNREAD
    assert max(raw.sizes) < 1_500_000, "outputs that wait go in several messages"
    if is_gone:
        raw.close()
    else:
        assert len(read_all(raw)) == 301
    await_that(lambda: held(worker) == 0)


def read_some(raw: RawClient) -> list[tuple[int, Any]]:
    """Read what is there as soon as there are outputs."""
    outputs: list[tuple[int, Any]] = []
    while not outputs:
        outputs, _ = raw.read()
    return outputs


def test_client_that_was_full_gets_nothing_until_it_has_read_and_others_go_on(
    host: Host, client: Client, raw: RawClient, ask: redis.Redis, keys: Keys
) -> None:
    raw.pretend_unread(MOST_BYTES_UNREAD + 1)
    id_ = raw.stream(FOR_EVER)
    worker = host(Countdown, 2)
    assert len([*client().stream(500)]) == 500
    assert raw.sizes == []
    [pending] = ask.xpending_range(keys.calls, "hosts", id_, id_, 1)
    assert pending["times_delivered"] == 1, "another host may begin it again"
    raw.read()
    raw.pretend_unread(MOST_BYTES_UNREAD)  # which a single message may exceed
    first = read_some(raw)
    assert first[0] == (0, 1)
    assert read_some(raw)[0] == (len(first), len(first) + 1)
    raw.close()
    await_that(lambda: held(worker) == 0)


@pytest.mark.parametrize("model", [Countdown, Resumed])
def test_stream_ends_whose_last_output_is_one_too_many_to_wait(
    host: Host, raw: RawClient, model: Any
) -> None:
    raw.pretend_unread(MOST_BYTES_UNREAD + 1)
    raw.stream({"n": 1024})
    worker = host(model, 1)
    await_that(lambda: worker.stats().claimed == 1 and held(worker) == 0)  # type: ignore[union-attr]
    assert read_all(raw) == [0, *range(1, 1025)]


# -- once and in order


@pytest.mark.parametrize("begun", [False, True])
def test_stream_that_another_host_has_is_not_written_and_not_computed(
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


class Forged:
    """A client with one stream, whose outputs a test writes into Redis itself."""

    def __init__(self, streamer: RedisStreamer, ask: redis.Redis, keys: Keys, prefix: str) -> None:
        self.streamer = streamer
        self.stream = streamer.stream(1)
        await_that(lambda: ask.xlen(keys.calls) == 1)
        self.name = client_name(ask, keys)
        self.replies = keys.replies(self.name)
        self._ask = ask
        self._wire = wire(prefix)

    def message(self, first: int, outputs: list[int]) -> bytes:
        run = OutputRun(1, first, [*map(self._wire.codec.encode, outputs)], b"")
        return self._wire.outputs(self.name, [run])

    def write(self, *runs: tuple[int, list[int]], end: int | None = None) -> None:
        with self._ask.pipeline(transaction=True) as pipeline:
            for run in runs:
                pipeline.xadd(self.replies, {"p": self.message(*run)})
            if end is not None:
                pipeline.xadd(self.replies, {"r": self._wire.stream_end(self.name, 1, end, [])})
            pipeline.execute()


@pytest.fixture
def forged(client: Client, ask: redis.Redis, keys: Keys, prefix: str) -> Iterator[Forged]:
    yield Forged(client(), ask, keys, prefix)
    ask.delete(keys.calls)  # no host was there to finish it


def test_outputs_are_handed_out_once_and_in_order_if_they_can_be_read(
    forged: Forged, ask: redis.Redis
) -> None:
    ask.xadd(forged.replies, {"p": b"nonsense"})
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


def test_outputs_that_wait_for_a_client_are_counted_once_however_often_it_reads_them(
    forged: Forged, ask: redis.Redis, keys: Keys
) -> None:
    # Given more replies than it reads at once, the first of which comes too early
    unread = keys.unread(forged.name)
    outputs = [forged.message(1, [1]), *[forged.message(0, [0])] * 64]
    with ask.pipeline(transaction=True) as pipeline:
        for message in outputs:
            pipeline.xadd(forged.replies, {"p": message})
        pipeline.xadd(unread, {"b": sum(map(len, outputs))})
        pipeline.execute()
    # Then hosts never think that less waits than there is
    waits = len(outputs)
    while waits > 1:  # the last one is deleted later
        with ask.pipeline(transaction=True) as pipeline:
            replies, counted = pipeline.xrange(forged.replies).xrange(unread).execute()
        waiting = sum(len(fields.get(b"p", b"")) for _, fields in replies)
        assert sum(int(fields[b"b"]) for _, fields in counted) >= waiting
        waits = len(replies)
    forged.write(end=2)
    assert [*forged.stream] == [0, 1]
