"""How requests of one pass of the event loop are submitted: together, and each with its outcome."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from service_streamer import Overloaded, ThreadedStreamer
from service_streamer.engine.backend import LoopReply, mailbox_of, predict_in_loop
from service_streamer.observe.record import ORDINARY, Call, Precedence
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.cycle import Cycle
from service_streamer.serve.http.exchange import Disconnected
from service_streamer.serve.http.keyring import Keyring
from service_streamer.serve.http.refusals import Refusal
from service_streamer.workers.protocol import Failure
from stub_exchange import StubExchange


class Recording:
    """A backend that answers when it is flushed, and refuses the item "refuse"."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.accepted: list[tuple[LoopReply, list[Any]]] = []
        self.precedence = ORDINARY

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def submit(self, call: Call) -> None:
        items, reply = call.payloads, call.reply
        self.told.append((*items, call.more))
        self.precedence = call.precedence
        if items == ["refuse"]:
            raise Overloaded("full")
        if items == ["fail"]:
            raise RuntimeError("a bug")
        reply.call = object()
        self.accepted.append((reply, list(items)))

    def flush(self) -> None:
        self.told.append("flush")
        for reply, outputs in self.accepted:
            reply.complete(outputs)
        self.accepted.clear()


async def outcomes(backend: Any, *items: Any) -> list[Any]:
    """What callers in one pass of the loop get; of each."""
    calls = (predict_in_loop(backend, [item], 10) for item in items)
    return await asyncio.gather(*calls, return_exceptions=True)


def cycle_of(backend: Any, exchange: StubExchange, **options: Any) -> Cycle:
    loop = asyncio.get_running_loop()
    about = ServiceOptions(model="m", **options)
    keyring = Keyring(about.api_keys) if about.needs_key else None
    return Cycle(about, backend, exchange, loop, mailbox_of(loop), keyring)


async def through_exchanges(backend: Any, *items: Any) -> list[Any]:
    """The same of requests."""

    async def ask(item: Any) -> list[Any]:
        cycle = cycle_of(backend, StubExchange(), timeout=10)
        cycle.check()
        await cycle.read()
        return await cycle.submit([item])

    return await asyncio.gather(*map(ask, items), return_exceptions=True)


WAYS = pytest.mark.parametrize("ask", [outcomes, through_exchanges])


@WAYS
def test_each_has_its_outcome_and_they_are_flushed_whatever_happens(ask: Any) -> None:
    backend = Recording()
    got = asyncio.run(ask(backend, 1, "refuse", 2, "fail"))
    assert got[::2] == [[1], [2]]
    assert list(map(type, got[1::2])) == [Overloaded, RuntimeError]
    told = [(1, True), ("refuse", True), (2, True), ("fail", True), "flush"]
    assert backend.told == told


@WAYS
def test_what_comes_together_is_computed_together(ask: Any) -> None:
    batches: list[list[Any]] = []

    def model(batch: list[Any]) -> list[Any]:
        batches.append(batch)
        return batch

    with ThreadedStreamer(model) as streamer:
        streamer.wait_ready()
        got = asyncio.run(ask(streamer.backend, *range(10)))
    assert got == [[number] for number in range(10)]
    assert batches == [[*range(10)]]


@WAYS
def test_what_a_free_worker_can_take_does_not_count_as_waiting(ask: Any) -> None:
    with ThreadedStreamer(lambda batch: batch, max_pending=1) as streamer:
        streamer.wait_ready()
        assert asyncio.run(ask(streamer.backend, 1, 2)) == [[1], [2]]


def test_a_loop_that_calls_two_streamers_flushes_both() -> None:
    one, other = Recording(), Recording()

    async def run() -> None:
        calls = [outcomes(backend, 1, 2) for backend in (one, other)]
        assert await asyncio.gather(*calls) == [[[1], [2]], [[1], [2]]]

    asyncio.run(run())
    assert one.told == other.told == [(1, True), (2, True), "flush"]


def test_what_reading_took_is_no_time_for_computing() -> None:
    given: list[float] = []

    class Timing(Recording):
        def submit(self, call: Call) -> None:
            assert call.timeout is not None
            given.append(call.timeout)
            call.reply.complete(list(call.payloads))

    async def run() -> None:
        backend: Any = Timing()

        cycle = cycle_of(backend, StubExchange(), timeout=10)
        cycle._began -= 4  # as if it had been begun so long ago
        cycle.check()
        await cycle.read()
        assert await cycle.submit([1]) == [1]

    asyncio.run(run())
    assert 0 < given[0] <= 6


class Odd(Exception):
    """One that cannot be copied, so that the same one is raised again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize("ending", ["served", "failed", "failed oddly", "gone"])
def test_a_request_leaves_no_cycle(ending: str) -> None:
    """Or the service stands still, from time to time, while thousands of them are collected."""

    async def run() -> None:
        backend: Any = Recording()
        exchange = StubExchange()

        async def ask() -> None:
            cycle = cycle_of(backend, exchange, timeout=10)
            try:
                cycle.check()
                await cycle.read()
                await cycle.submit([1])
            except (Overloaded, Odd, Disconnected):
                pass

        backend.flush = lambda: None
        backend.withdraw = lambda call: None
        asking = asyncio.create_task(ask())
        while not backend.accepted:
            await asyncio.sleep(0)
        [(reply, outputs)] = backend.accepted
        if ending == "served":
            reply.complete(outputs)
        elif ending == "failed":
            reply.fail(Failure(Overloaded("full")))
        elif ending == "failed oddly":
            reply.fail(Failure(Odd(1, 2)))
        else:
            exchange.leave()
        del reply
        backend.accepted.clear()
        await asking

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert [each for each in gc.get_objects() if type(each) is Cycle] == []
    finally:
        gc.enable()


# -- who goes first

KEYS = ("one", "two")
LATE = (b"x-request-timeout", b"5")
HEADERS: dict[str, Any] = {"priority_header": b"x-rank", "tenant_header": b"x-user"}


def exchanged(headers: list[tuple[bytes, bytes]], **options: Any) -> Precedence:
    """With what precedence a request with these headers is submitted."""
    backend: Any = Recording()

    async def run() -> None:
        exchange = StubExchange(headers)
        cycle = cycle_of(backend, exchange, **options)
        cycle.check()
        await cycle.read()
        await cycle.submit([1])

    asyncio.run(run())
    precedence: Precedence = backend.precedence
    return precedence


@pytest.mark.parametrize(
    ("headers", "options", "precedence"),
    [
        ([], {}, ORDINARY),
        ([LATE, (b"x-rank", b"9"), (b"x-user", b"a")], {}, ORDINARY),  # a stranger's
        ([(b"x-rank", b"-9"), (b"x-user", b"a")], HEADERS, Precedence(-9, "a")),
        ([LATE], HEADERS, Precedence(has_deadline=True)),
        ([(b"x-rank", b"7")], {"priority_header": b"x-rank"}, Precedence(7)),
        ([(b"x-api-key", b"two")], {"api_keys": KEYS}, Precedence(tenant="key 2")),
        ([(b"x-api-key", b"one"), LATE], {"api_keys": KEYS}, Precedence(0, "key 1", True)),
        ([(b"x-api-key", b"one")], {"api_keys": KEYS[:1]}, ORDINARY),  # there is but one
        (
            [(b"x-user", "Zoë".encode("latin-1")), (b"x-api-key", b"one")],
            {"api_keys": KEYS, **HEADERS},
            Precedence(tenant="key 1: Zoë"),
        ),
        (
            [(b"x-user", b""), (b"x-api-key", b"one")],
            {"api_keys": KEYS, **HEADERS},
            Precedence(tenant="key 1"),
        ),
    ],
)
def test_who_goes_first_is_said_by_those_who_may(
    headers: list[tuple[bytes, bytes]], options: dict[str, Any], precedence: Precedence
) -> None:
    assert exchanged(headers, **options) == precedence


@pytest.mark.parametrize(
    "header",
    [
        (b"x-rank", b"high"),
        (b"x-rank", b"1.5"),
        (b"x-rank", b""),
        (b"x-rank", b"1000000001"),
        (b"x-rank", b"9" * 5000),
        (b"x-user", b"x" * 257),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_none_is_refused(header: tuple[bytes, bytes], wording: Callable[..., None]) -> None:
    with pytest.raises(Refusal) as caught:
        exchanged([header], **HEADERS)
    wording(caught.value)
    assert caught.value.status == 422
