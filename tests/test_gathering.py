"""How requests of one pass of the event loop are submitted: together, and each with its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from service_streamer import Overloaded, ThreadedStreamer
from service_streamer.server.exchange import Exchange, Gathering
from service_streamer.server.options import ServiceOptions
from service_streamer.waiting import LoopReply


class Recording:
    """A backend that answers at once, and refuses the item "refuse"."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def submit(
        self,
        items: Sequence[Any],
        reply: LoopReply,
        *,
        timeout: float,
        is_watched: bool,
        more: bool,
    ) -> None:
        self.told.append((*items, more))
        if items == ["refuse"]:
            raise Overloaded("full")
        if items == ["fail"]:
            raise RuntimeError("a bug")
        reply.complete(list(items))

    def flush(self) -> None:
        self.told.append("flush")


async def outcomes(gathering: Gathering, *items: Any) -> list[Any]:
    replies = [LoopReply(asyncio.get_running_loop()) for _ in items]
    for reply, item in zip(replies, items, strict=True):
        gathering.add([item], reply, 10)
    return [
        outputs if failure is None else type(failure.exception())
        for outputs, failure in await asyncio.gather(*(reply.future for reply in replies))
    ]


def test_each_has_its_outcome_and_they_are_flushed_whatever_happens() -> None:
    backend: Any = Recording()
    got = asyncio.run(outcomes(Gathering(backend), 1, "refuse", 2, "fail"))
    assert got == [[1], Overloaded, [2], RuntimeError]
    told = [(1, True), ("refuse", True), (2, True), ("fail", True), "flush"]
    assert backend.told == told


def test_one_alone_is_not_flushed() -> None:
    backend: Any = Recording()
    assert asyncio.run(outcomes(Gathering(backend), 1)) == [[1]]
    assert backend.told == [(1, False)]


def test_who_has_gone_away_is_left_out() -> None:
    backend: Any = Recording()

    async def run() -> None:
        reply = LoopReply(asyncio.get_running_loop())
        gathering = Gathering(backend)
        gathering.add([1], reply, 10)
        reply.future.cancel()
        assert await outcomes(gathering, 2) == [[2]]

    asyncio.run(run())
    assert backend.told == [(2, True), "flush"]


def test_what_comes_together_is_computed_together() -> None:
    batches: list[list[Any]] = []

    def model(batch: list[Any]) -> list[Any]:
        batches.append(batch)
        return batch

    with ThreadedStreamer(model) as streamer:
        streamer.wait_ready()
        got = asyncio.run(outcomes(Gathering(streamer._backend), *range(10)))
    assert got == [[number] for number in range(10)]
    assert batches == [[*range(10)]]


def test_what_reading_took_is_no_time_for_computing() -> None:
    given: list[float] = []

    class Timing(Recording):
        def submit(self, items: Any, reply: LoopReply, *, timeout: float, **more: Any) -> None:
            given.append(timeout)
            reply.complete(list(items))

        def decode(self, outputs: list[Any]) -> list[Any]:
            return outputs

    async def run() -> None:
        backend: Any = Timing()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        exchange = Exchange(ServiceOptions(model="m", timeout=10), Gathering(backend), receive)
        exchange._began -= 4  # as if it had been begun so long ago
        await exchange.read([])
        assert await exchange.submit([1]) == [1]
        exchange.close()

    asyncio.run(run())
    assert 0 < given[0] <= 6
