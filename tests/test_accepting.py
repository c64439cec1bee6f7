"""Processes that accept connections of one socket in turn."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from service_streamer.serve.http.accepting import Acceptor, Turns


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
def test_it_is_the_turn_of_who_has_the_fewest(counts: list[int], is_ours: bool) -> None:
    assert Turns(counts, 0).is_ours == is_ours


def test_who_has_closed_does_not_count() -> None:
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
def test_who_is_about_to_end_leaves_new_connections_to_others(
    counts: list[int], leaves: bool
) -> None:
    turns, left = Turns(counts, 0), [False]
    turns.on_ending = lambda: left.append(True)
    turns.end()
    turns.changed(1)
    assert (left[-1], counts[0]) == (leaves, -2)


class Counted(asyncio.Protocol):
    def __init__(self, turns: Turns, made: list[int], number: int, new: asyncio.Event) -> None:
        self._turns, self._made, self._number, self._new = turns, made, number, new

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._turns.changed(1)
        self._made[self._number] += 1
        self._new.set()


async def connect(listener: socket.socket, new: asyncio.Event) -> asyncio.StreamWriter:
    """Connect, and wait until that was accepted."""
    new.clear()
    _, writer = await asyncio.open_connection(*listener.getsockname())
    await new.wait()
    return writer


def test_connections_are_shared_evenly(listener: socket.socket) -> None:
    async def main() -> list[int]:
        counts, made, new = [-1, -1], [0, 0], asyncio.Event()
        with listener.dup() as one, listener.dup() as other:
            acceptors = []
            for number, sock in enumerate((one, other)):
                turns = Turns(counts, number)
                protocol = functools.partial(Counted, turns, made, number, new)
                acceptors.append(Acceptor(sock, protocol, turns))
            writers = [await connect(listener, new) for _ in range(20)]
            for acceptor in acceptors:
                acceptor.close()
                await acceptor.wait_closed()
            for writer in writers:
                writer.close()
                await writer.wait_closed()
        assert counts == [-1, -1]
        return made

    assert asyncio.run(main()) == [10, 10]


def test_a_process_that_does_not_take_its_turn_holds_up_nobody(listener: socket.socket) -> None:
    async def main() -> None:
        made, new = [0], asyncio.Event()
        turns = Turns([7, 0], 0)
        acceptor = Acceptor(listener, functools.partial(Counted, turns, made, 0, new), turns)
        turns.changed(7)
        writer = await connect(listener, new)
        assert made == [1]
        acceptor.close()
        writer.close()
        await writer.wait_closed()

    asyncio.run(main())


def test_a_process_that_hangs_costs_others_no_pause_for_each_connection(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pause = Acceptor._pause
    monkeypatch.setattr(
        Acceptor, "_pause", lambda self, *given: (pauses.append(given[0]), pause(self, *given))
    )

    async def main() -> None:
        made, new = [0], asyncio.Event()
        turns = Turns([7, 0], 0)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(10)]
        acceptor = Acceptor(listener, functools.partial(Counted, turns, made, 0, new), turns)
        turns.changed(7)
        while made != [10]:
            new.clear()
            await new.wait()
        assert len(pauses) == 1
        acceptor.close()
        await acceptor.wait_closed()
        for client in clients:
            client.close()

    asyncio.run(main())


def test_an_acceptor_that_is_about_to_end_accepts_no_more(listener: socket.socket) -> None:
    async def main() -> None:
        made, new = [0], asyncio.Event()
        turns = Turns([0, 0], 0)
        acceptor = Acceptor(listener, functools.partial(Counted, turns, made, 0, new), turns)
        (await connect(listener, new)).close()
        turns.end()
        assert not asyncio.get_running_loop().remove_reader(listener)
        acceptor.close()
        await acceptor.wait_closed()

    asyncio.run(main())


class Refusing(socket.socket):
    """Refuses an option once, as a socket of macOS does whose client is gone."""

    is_asked = False

    def setsockopt(self, *arguments: Any) -> None:
        if not self.is_asked:
            self.is_asked = True
            raise OSError(errno.EINVAL, "Invalid argument")
        super().setsockopt(*arguments)


class Listener:
    """Accepts such sockets."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.fileno, self.setblocking = listener.fileno, listener.setblocking

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = self._listener.accept()
        return Refusing(fileno=connection.detach()), address


def test_an_option_that_a_connection_refuses_is_no_failure(listener: socket.socket) -> None:
    async def main() -> list[int]:
        made, new, turns = [0], asyncio.Event(), Turns([-1], 0)
        protocol = functools.partial(Counted, turns, made, 0, new)
        acceptor = Acceptor(Listener(listener), protocol, turns)  # type: ignore[arg-type]
        writer = await connect(listener, new)
        acceptor.close()
        await acceptor.wait_closed()
        writer.close()
        await writer.wait_closed()
        return made

    assert asyncio.run(main()) == [1]
