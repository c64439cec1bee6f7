"""Processes that accept connections of one socket in turn."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from http_in_process import HTTPServer, Turns, await_that, in_still_time, pass_time, settled

pytestmark = pytest.mark.no_gevent


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.mark.parametrize(
    ("counts", "is_ours"),
    [
        ([0, 0], True),
        ([1, 0], False),
        ([1, 2], True),
        ([3, -1], True),  # the other one is dead, or not there yet
        ([3, -1, 2], False),
        ([3, -2], True),  # the other one is about to end
        ([-2, -2], True),
    ],
)
def test_turn_is_of_the_process_with_fewest_connections(counts: list[int], is_ours: bool) -> None:
    assert Turns(counts, 0).is_ours == is_ours


def test_closed_process_does_not_count() -> None:
    counts = [-1, -1]
    turns = Turns(counts, 0)
    turns.open()
    turns.changed(1)
    assert counts == [1, -1]
    turns.close()
    turns.changed(-1)  # its last connection ends
    assert counts == [-1, -1]


@pytest.mark.parametrize(
    ("counts", "leaves"),
    [
        ([0, 4], True),
        ([0, -1], False),  # nobody else is there
        ([0, -2], False),  # nor will be: this one says that the service ends
        ([0, -2, 3], True),
    ],
)
def test_ending_process_leaves_new_connections_to_others(counts: list[int], leaves: bool) -> None:
    turns, left = Turns(counts, 0), [False]
    turns.on_ending = lambda: left.append(True)
    turns.end()
    turns.changed(1)
    assert (left[-1], counts[0]) == (leaves, -2)


@asynccontextmanager
async def accepting(
    listener: Any, counts: list[int], number: int = 0, most: int | None = None
) -> AsyncIterator[tuple[HTTPServer, Turns]]:
    """One of several processes that accept connections of a socket, and its turns."""

    async def answers(_: Any) -> None:
        """No request comes."""

    turns = Turns(counts, number)
    server = HTTPServer(answers, listener.dup(), turns=turns)
    server.listeners.most = server.listeners.most if most is None else most
    serving = asyncio.create_task(server.serve())
    await settled()
    yield server, turns
    server.stop(in_a_hurry=True)
    await serving


def accepted(*servers: HTTPServer) -> list[int]:
    """The connections of each, with those that it only tells that it is full."""
    return [len(server.listeners.open) + len(server.listeners.refused) for server in servers]


def connect(listener: socket.socket, count: int, stack: ExitStack) -> None:
    for _ in range(count):
        stack.enter_context(socket.create_connection(listener.getsockname()))


async def pauses_until(holds: Callable[[], bool]) -> int:
    """Let the pauses of processes pass until something holds; how many that took."""
    count = 0
    while not holds():
        await pass_time(0.002)
        count += 1
    return count


@in_still_time
async def test_connections_are_shared_evenly(listener: socket.socket) -> None:
    counts = [-1, -1]
    async with accepting(listener, counts) as (one, _), accepting(listener, counts, 1) as (two, _):
        with ExitStack() as stack:
            for number in range(1, 21):
                connect(listener, 1, stack)
                await pauses_until(lambda number=number: sum(accepted(one, two)) == number)
            assert accepted(one, two) == [10, 10]
    assert counts == [-1, -1]


@in_still_time
async def test_process_that_hangs_costs_others_one_pause(listener: socket.socket) -> None:
    """And not one for each connection."""
    async with accepting(listener, [7, 0]) as (server, turns):
        turns.changed(7)
        with ExitStack() as stack:
            connect(listener, 10, stack)
            select.select([listener], [], [])
            await settled()
            assert accepted(server) == [0], "it is the turn of the other process"
            assert await pauses_until(lambda: accepted(server) == [10]) < 5


@in_still_time
async def test_full_process_leaves_connections_to_one_with_room(listener: socket.socket) -> None:
    counts = [-1, 1]
    async with accepting(listener, counts, most=3) as (server, _):
        with ExitStack() as stack:
            connect(listener, 4, stack)
            await pauses_until(lambda: accepted(server) == [3])
            for _ in range(5):
                await pass_time(0.002)
            assert accepted(server) == [3]
            counts[1] = 3  # the other one is as full
            await pauses_until(lambda: accepted(server) == [4])


@in_still_time
async def test_ending_process_accepts_no_more(listener: socket.socket) -> None:
    async with accepting(listener, [0, 0]) as (server, turns):
        with ExitStack() as stack:
            connect(listener, 1, stack)
            await await_that(lambda: accepted(server) == [1])
            turns.end()
            connect(listener, 1, stack)
            for _ in range(5):
                await pass_time(0.002)
            assert accepted(server) == [1]


@in_still_time
async def test_option_that_a_connection_refuses_is_no_failure(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a socket of macOS does whose client is gone."""
    setsockopt, refused = socket.socket.setsockopt, list[Any]()

    def refuse_first(connection: socket.socket, *arguments: Any) -> None:
        if not refused:
            refused.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        setsockopt(connection, *arguments)

    async with accepting(listener, [-1]) as (server, _):
        monkeypatch.setattr(socket.socket, "setsockopt", refuse_first)
        with ExitStack() as stack:
            connect(listener, 1, stack)
            await await_that(lambda: accepted(server) == [1])
    assert refused
