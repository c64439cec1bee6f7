"""Shared memory between a pool and one of its clients, for what is large.

    client                                    pool                                worker
    ------                                    ----                                ------
    its memory: an item, written once         passes the descriptor on ────────▶ reads it in place
    reads it in place ◀───────────────────── passes the descriptor on           its memory: a result

The items are in memory of the client's own, so they are still there when the pool dies and the next
one needs them. A client may hold only a part of a worker's memory. What is more goes with the
message, so that a client that keeps results, or is stopped, takes no room from others.
"""

from __future__ import annotations

import collections
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..workers.memory.arena import Memory
from ..workers.memory.memory_link import MemorySocket, Received, Windows, memory_sockets, receive
from ..workers.memory.window import Window
from .pool_memory import ClientItems, PoolMemory, inlined

_FIRST = b"\0"


def first_sent(connection: socket.socket, descriptor: int | None) -> None:
    """Send the first byte, with a descriptor if any. Raises OSError: the other end is gone."""
    if descriptor is None:
        connection.send(_FIRST)
    else:
        socket.send_fds(connection, [_FIRST], [descriptor])


def first_taken(connection: socket.socket) -> int | None:
    """Take the first byte, and the descriptor that came with it, if any.

    Raises:
        BlockingIOError: it has not come yet.
        EOFError, OSError: the other end is gone, or there is no descriptor left for what it passed.
    """
    first, descriptors, flags, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not first:
        raise EOFError
    if flags & socket.MSG_CTRUNC:  # the other end would count on it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors[0] if descriptors else None


class ClientMemory:
    """The pool's end, for one client. Any thread.

    Args:
        theirs: what the client writes its items to.
        pool: what the workers read.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, theirs: Memory, pool: PoolMemory) -> None:
        self._sender, self._receiver = memory_sockets()
        self._items = ClientItems(theirs)
        self._pool = pool
        self._held: dict[tuple[int, int], list[Received]] = {}  # by memory and block
        self._sizes: collections.Counter[int] = collections.Counter()  # bytes of these, by memory
        self._lock = threading.RLock()
        pool.clients += 1

    def introduce(self, connection: socket.socket) -> None:
        """Send the client its end. Once. Raises OSError: it is gone."""
        first_sent(connection, self._receiver.connection.fileno())
        del self._receiver  # closes this process's copy

    def taken(self, payloads: Sequence[Any], on_end: Callable[[], None]) -> list[Any]:
        """See ``ClientItems.placed``."""
        if self._pool.arena is None:  # it could not be had: workers map nothing
            on_end()
            return [
                self._items.copied(each, None) if type(each) is tuple else each for each in payloads
            ]
        self._pool.expect_items()
        return self._items.placed(payloads, on_end)

    def given(self, outputs: list[Any]) -> list[Any]:
        """What the client can read, for what workers have written."""
        given = []
        seen: set[tuple[int, int]] = set()
        with self._lock:
            for output in outputs:
                if type(output) is not Received:
                    given.append(output)
                elif self._has_room(output) and self._sender.send(output.memory):
                    key = output.memory.number, output.wire[1]
                    if key not in seen:  # the client reports a block once for each message
                        seen.add(key)
                        self._held.setdefault(key, []).append(output)
                        self._sizes[output.memory.number] += output.nbytes
                    given.append((*output.wire, output.memory.number))
                else:
                    given.append(inlined(output))
        return given

    def _has_room(self, output: Received) -> bool:
        """Whether the client may hold one more: a part is left even if all hold what they may."""
        memory = output.memory
        held = self._sizes[memory.number] + output.nbytes
        return held <= memory.size // (1 + self._pool.clients)

    def released(self, blocks: list[tuple[int, int]]) -> None:
        """The client no longer reads these."""
        with self._lock:
            for block in blocks:
                held = self._held[block]
                received = held.pop()
                self._sizes[block[0]] -= received.nbytes
                if not held:
                    del self._held[block]
                if received.memory.is_left:
                    self.review()

    def review(self) -> None:
        """Have the client unmap the memory of workers that have ended."""
        with self._lock:
            for memory in self._sender.passed():
                if memory.is_left and not self._sizes[memory.number]:
                    del self._sizes[memory.number]
                    self._sender.forget(memory.number)

    def close(self) -> None:
        """The client is gone."""
        with self._lock:
            self._pool.clients -= 1
            self._held.clear()
            self._sizes.clear()
            self._sender.close()
        self._pool.left(self._items.memory)


class ResultMemory:
    """The client's end: results in the memory of workers. For the thread that reads."""

    def __init__(self, descriptor: int) -> None:
        self._windows = Windows(MemorySocket(socket.socket(fileno=descriptor)), private=False)
        self.fileno = self._windows.fileno
        self.take_in = self._windows.take_in
        self.pop_ended = self._windows.pop_ended

    def close(self) -> None:
        """The pool is gone. What was received can still be read."""
        self._windows.close()

    def abandon(self) -> None:
        """The same in a forked child, without a lock."""
        self._windows.abandon()

    def received(self, outputs: list[Any]) -> bool:
        """Hold what came and lies in such memory; in place. False: some of it cannot be read."""
        return receive(outputs, self._window_of)

    def _window_of(self, wire: Any) -> Window:
        return self._windows.window(wire[5], wire[1])


def inline(outputs: list[Any]) -> list[Any]:
    """What a client without shared memory can read."""
    return [inlined(each) if type(each) is Received else each for each in outputs]
