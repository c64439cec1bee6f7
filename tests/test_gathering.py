"""How calls of one pass of the event loop are submitted: together, and each with its outcome."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from http_in_process import (
    StubClient,
    StubStreamer,
    await_that,
    in_still_time,
    pass_time,
    post,
    run,
    serving,
    settled,
)
from service_streamer import InvalidInput, ThreadedStreamer
from service_streamer.testing import Gate

pytestmark = pytest.mark.no_gevent


def request(item: Any, *headers: tuple[bytes, bytes]) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return post(json.dumps({"inputs": item}).encode(), lines, b"/predict")


async def answers(site: Any, *items: Any) -> list[tuple[int, Any]]:
    """Status and answer of requests that come in one pass of the loop, from a client each."""
    clients = [StubClient(site) for _ in items]
    for client, item in zip(clients, items, strict=True):
        client.send(request(item))
    await await_that(lambda: all(client.received for client in clients))
    for client in clients:
        client.leave()
    parts = [client.received.partition(b"\r\n\r\n") for client in clients]
    return [(int(head.split()[1]), json.loads(body)) for head, _, body in parts]


async def by_apredict(streamer: ThreadedStreamer, *items: Any) -> list[Any]:
    calls = await asyncio.gather(*(streamer.apredict([item]) for item in items))
    return [output for [output] in calls]


async def by_requests(streamer: ThreadedStreamer, *items: Any) -> list[Any]:
    async with serving(streamer) as application:
        return [output for _, output in await answers(application.site, *items)]


Ask = Callable[..., Awaitable[list[Any]]]
WAYS = pytest.mark.parametrize("ask", [by_apredict, by_requests])


@WAYS
def test_calls_of_one_pass_are_computed_together(ask: Ask) -> None:
    batches: list[list[Any]] = []

    def model(batch: list[Any]) -> list[Any]:
        batches.append(batch)
        return batch

    with ThreadedStreamer(model) as streamer:
        streamer.wait_ready()
        assert run(ask(streamer, *range(10))) == [*range(10)]
    assert batches == [[*range(10)]]


@WAYS
def test_calls_that_a_free_worker_takes_do_not_count_as_waiting(ask: Ask) -> None:
    with ThreadedStreamer(lambda batch: batch, max_pending=1) as streamer:
        streamer.wait_ready()
        assert run(ask(streamer, 1, 2)) == [1, 2]


@in_still_time
async def test_requests_have_their_outcomes_and_one_flush_when_some_are_refused() -> None:
    streamer = StubStreamer()
    async with serving(streamer) as application:
        got = await answers(application.site, 1, "refuse", 2, "fail")
    assert got[::2] == [(200, 1), (200, 2)]
    assert [(status, told["error"]["code"]) for status, told in got[1::2]] == [
        (503, "overloaded"), (500, "model_failed"),
    ]  # fmt: skip
    assert streamer.told == [[1], ["refuse"], [2], ["fail"], "flush"]


@in_still_time
async def test_loop_flushes_both_streamers_when_requests_go_to_two() -> None:
    one, other = StubStreamer(), StubStreamer()
    async with serving(one) as first, serving(other) as second:
        await asyncio.gather(*(answers(each.site, 1, 2) for each in (first, second)))
    assert one.told == other.told == [[1], [2], "flush"]


@in_still_time
async def test_time_to_read_a_request_counts_against_its_timeout() -> None:
    streamer = StubStreamer()
    async with serving(streamer, timeout=10) as application:
        client, sent = StubClient(application.site), request(1)
        client.send(sent[:-1])
        await settled()
        await pass_time(4)
        client.send(sent[-1:])
        await settled()
        client.leave()
    assert [call.timeout for call in streamer.calls] == [6]


class Odd(InvalidInput):
    """One that cannot be copied, so that the same one is raised again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize("ending", ["served", "failed", "gone"])
def test_ended_request_leaves_no_cycle(ending: str, gate: Gate) -> None:
    """Or the service stands still, from time to time, while thousands of them are collected."""

    def model(batch: list[Any]) -> list[Any]:
        gate.go_through()
        if ending == "failed":
            raise Odd(1, 2)
        return batch

    def alive() -> Counter[str]:
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        return Counter({name: kinds[name] for name in ("HTTPExchange", "RequestContext")})

    def left() -> list[str]:
        return sorted(alive() - before)

    async def main() -> None:
        async with serving(streamer) as application:
            client = StubClient(application.site)
            client.send(request(1))
            await asyncio.to_thread(gate.await_arrival)
            assert left() == ["HTTPExchange", "RequestContext"]
            if ending == "gone":
                client.leave()
                await settled()
                gate.let_through(1)
            else:
                gate.let_through(1)
                await await_that(lambda: client.received)
                client.leave()

    gc.collect()
    before = alive()  # what something of an earlier test holds
    gc.disable()
    try:
        with ThreadedStreamer(model) as streamer:  # its thread holds the last error
            run(main())
        assert left() == []
    finally:
        gc.enable()


# -- who goes first

#: Priority, tenant, and whether the call has a deadline of its own.
Order = tuple[int, str, bool]

ORDINARY = (0, "", False)
KEYS = ("one", "two")
LATE = (b"x-request-timeout", b"5")
HEADERS: dict[str, Any] = {"priority_header": b"x-rank", "tenant_header": b"x-user"}


def exchanged(headers: list[tuple[bytes, bytes]], **options: Any) -> tuple[int, bytes, list[Order]]:
    """Status and body of a request with these headers, and the order of its call."""
    streamer = StubStreamer()

    async def main() -> tuple[int, bytes]:
        async with serving(streamer, **options) as application:
            client = StubClient(application.site)
            answer = await client.ask(request(1, *headers))
            client.leave()
            return answer

    return *run(main()), [call.options[:3] for call in streamer.calls]


@pytest.mark.parametrize(
    ("headers", "options", "order"),
    [
        ([], {}, ORDINARY),
        ([LATE, (b"x-rank", b"9"), (b"x-user", b"a")], {}, ORDINARY),  # a stranger's
        ([(b"x-rank", b"-9"), (b"x-user", b"a")], HEADERS, (-9, "a", False)),
        ([LATE], HEADERS, (0, "", True)),
        ([(b"x-rank", b"7")], {"priority_header": b"x-rank"}, (7, "", False)),
        ([(b"x-api-key", b"two")], {"api_keys": KEYS}, (0, "key 2", False)),
        ([(b"x-api-key", b"one"), LATE], {"api_keys": KEYS}, (0, "key 1", True)),
        ([(b"x-api-key", b"one")], {"api_keys": KEYS[:1]}, ORDINARY),  # there is but one
        ([(b"x-user", "Zoë".encode("latin-1")), (b"x-api-key", b"one")],
         {"api_keys": KEYS, **HEADERS}, (0, "key 1: Zoë", False)),
        ([(b"x-user", b""), (b"x-api-key", b"one")], {"api_keys": KEYS, **HEADERS},
         (0, "key 1", False)),
    ],
)  # fmt: skip
def test_order_comes_from_headers_of_clients_that_may_say_it(
    headers: list[tuple[bytes, bytes]], options: dict[str, Any], order: Order
) -> None:
    assert exchanged(headers, **options) == (200, b"1", [order])


def test_bad_header_of_order_is_refused_and_a_long_value_is_not_repeated() -> None:
    ranks = [b"high", b"1.5", b"", b"1000000001", b"9" * 5000]
    for name, value in (*((b"x-rank", rank) for rank in ranks), (b"x-user", b"x" * 257)):
        status, body, calls = exchanged([(name, value)], **HEADERS)
        error = json.loads(body)["error"]
        assert (status, error["param"], calls) == (422, name.decode().title(), [])
        assert len(error["message"]) < 200
