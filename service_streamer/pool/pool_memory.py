"""Shared memory of a pool: workers also read in that of clients, and clients in that of workers.

The pool copies nothing: it passes the descriptor of a client's memory on to each worker that gets
an item from there, and that of a worker's to each client that gets a result. It copies items only
for workers that cannot have the memory: a device reads the pool's own, or the worker has the memory
of too many clients.

     PassingLink                                         ReadingLink
     -----------                                         -----------
     lend(payloads) ─ a memory's number and descriptor ─▶ take_in(): mapped
     message with a wire of that number ────────────────▶ payloads: views of the pages, no copy
     ◀── message: blocks without views, with the number   pop_ended()
     review() ─ the number, once the writer is gone ────▶ take_in(): unmapped

Descriptors go through a socket of their own, so they need no ``/proc``, which may be hidden or
missing, and the other messages need no ``recvmsg``. A descriptor is sent before the message that
needs it. So it is there when that message is read.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..workers.arena import Arena, Block, Memory, Placed, Wire
from ..workers.memory_link import (
    MakeLink,
    MemoryLink,
    Received,
    SharedMemory,
    Window,
    copied,
    results_arena,
)

#: Most memories that a reader has at a time: each costs it a mapping and two descriptors. Far below
#: the usual limit of 1024 descriptors; arbitrary.
_MOST = 128

_NUMBER_SIZE = 8


# -- memory that is passed on


class MemorySocket:
    """An end of a socket for descriptors. Closed when collected. A new process can be given it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection

    def __reduce__(self) -> Any:
        return MemorySocket, (self.connection,)

    def __del__(self) -> None:
        self.connection.close()


class ReadingLink(MemoryLink):
    """An end that also reads memory of third processes, which comes by ``source``. Any thread."""

    def __init__(
        self,
        arena: Arena | None,
        memory: Memory | None,
        source: MemorySocket,
        *,
        private: bool = False,
    ) -> None:
        super().__init__(arena, memory, private=private)
        #: None when it is closed. The other end sees that when nothing is viewed any more.
        self._source: MemorySocket | None = source
        self._private = private

    def _window(self, number: int) -> Window:
        if number not in self._windows:
            self.take_in()
        if number not in self._windows:
            self._windows[number] = Window(None, self._ended, private=self._private)
        return self._windows[number]

    def fileno(self) -> int:
        return -1 if self._source is None else self._source.connection.fileno()

    def take_in(self) -> bool:
        """Take in what was passed on or is to be forgotten; whether more may come."""
        with self._lock:
            try:
                while self._source is not None:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._source.connection, _NUMBER_SIZE, 1, socket.MSG_CMSG_CLOEXEC
                    )
                    if not data:
                        return False
                    number = int.from_bytes(data, "little", signed=True)
                    if number < 0:
                        self._windows.pop(-number, None)
                    elif descriptors:  # else this process may not have more
                        memory = Memory(descriptors[0])
                        self._windows[number] = Window(
                            memory, self._ended, self._source, private=self._private
                        )
            except BlockingIOError:
                return True
            except OSError:  # the other end is gone
                pass
            return False

    def close(self) -> None:
        with self._lock:
            super().close()
            self._source = None

    def abandon(self) -> None:
        """Close this process's copies, in a forked child: another thread may hold the lock."""
        if self._source is not None:
            with contextlib.suppress(OSError):  # without gevent's hub, which is the parent's
                os.close(self._source.connection.detach())
        self._windows = {}


class PassingLink(MemoryLink):
    """An end that passes memory of third processes on to the other one. Any thread. Never blocks.

    Passed memory whose writer is gone is forgotten when the other end reads nothing there.
    """

    def __init__(self, arena: Arena | None, memory: Memory | None) -> None:
        """Raises OSError: there are no descriptors left."""
        super().__init__(arena, memory)
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sender, self._receiver = map(MemorySocket, ends)
        self._passed: dict[int, Memory] = {}
        self._forgotten: collections.deque[int] = collections.deque()  # the reader is not told yet

    def pop_receiver(self) -> MemorySocket:
        """The reader's end. Once."""
        receiver = self._receiver
        del self._receiver
        return receiver

    def pass_on(self, memory: Memory) -> bool:
        """Pass memory on if that was not done; whether the reader has it."""
        with self._lock:
            if memory.number in self._passed:
                return True
            self._send_forgotten()
            if self._forgotten or len(self._passed) >= _MOST:
                return False
            with contextlib.suppress(OSError):  # the reader takes nothing more, or is gone
                number = _pack(memory.number)
                socket.send_fds(self._sender.connection, [number], [memory.descriptor])
                self._passed[memory.number] = memory
                return True
            return False

    def release(self, blocks: list[Block]) -> None:
        super().release(blocks)
        if any(number and number not in self._lent for number, _ in blocks):
            self.review()

    def review(self) -> None:
        """Have the reader unmap the memory of processes that are gone, unless it reads there."""
        with self._lock:
            for number, memory in [*self._passed.items()]:
                if memory.is_left and number not in self._lent:
                    del self._passed[number]
                    self._forgotten.append(number)
            self._send_forgotten()

    def _send_forgotten(self) -> None:
        with contextlib.suppress(OSError):
            while self._forgotten:
                self._sender.connection.send(_pack(-self._forgotten[0]))
                self._forgotten.popleft()

    def close(self) -> None:
        """The reader is gone."""
        with self._lock:
            super().close()
            self._passed.clear()
            self._sender.connection.close()


def _pack(number: int) -> bytes:
    return number.to_bytes(_NUMBER_SIZE, "little", signed=True)


# -- of the workers


def _reading_link(requests: Memory, responses: Memory, source: MemorySocket) -> ReadingLink:
    """A worker's end; the memory of clients comes by ``source``."""
    return ReadingLink(results_arena(responses), requests, source, private=True)


class PoolMemory(SharedMemory):
    """What the workers of a pool read.

    Attributes:
        clients: how many there are that use shared memory.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self.clients = 0
        self._links: weakref.WeakSet[_WorkerLink] = weakref.WeakSet()
        self._lock = threading.RLock()  # of these: the engine's thread adds, the server's looks

    def _share(self, arena: Arena, responses: Memory) -> tuple[MakeLink, MemoryLink]:
        link = _WorkerLink(arena, responses)
        with self._lock:
            self._links.add(link)
        source = link.pop_receiver()
        return functools.partial(_reading_link, arena.memory, responses, source), link

    def forget_client(self, memory: Memory) -> None:
        """A client has gone: workers unmap its memory when they have read it."""
        memory.is_left = True
        with self._lock:
            links = [*self._links]
        for link in links:
            link.review()


class _WorkerLink(PassingLink):
    """The pool's end of what it shares with one worker."""

    def _lend(self, payloads: list[Any]) -> None:
        for position, payload in enumerate(payloads):
            if type(payload) is Placed and type(payload.lease) is _ItemLease:
                items = payload.lease.items
                if not self.pass_on(items.memory):
                    payloads[position] = items.copy(payload.wire, self.arena)
        super()._lend(payloads)


# -- of the clients


class ClientItems:
    """The memory that a client writes its items to. Any thread."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def place(self, payloads: Sequence[Any], on_end: Callable[[], None]) -> list[Any]:
        """The payloads of a call, for workers.

        Args:
            on_end: called when no worker reads them any more, nor will; in a finalizer.

        Raises:
            ValueError: one is no wire.
        """
        lease = _ItemLease(self, on_end)
        placed: list[Any] = []
        for payload in payloads:
            if type(payload) is tuple:
                _, block, size, start, lengths, stream = payload
                wire = self.memory.number, block, size, start, lengths, stream
                payload = Placed(wire, lease)
            placed.append(payload)
        return placed

    def copy(self, wire: Wire, arena: Arena | None) -> Any:
        """A payload in the pool's memory, or in the message if there is no room."""
        parts = copied(self.memory, wire)
        placed = None if arena is None else arena.put(parts)
        return parts if placed is None else placed


class _ItemLease:
    """Held by whatever may read the items of a call."""

    __slots__ = ("_on_end", "items")

    def __init__(self, items: ClientItems, on_end: Callable[[], None]) -> None:
        self.items = items
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end()


def in_message(payload: Any) -> Any:
    """An item for a worker that shares no memory: it goes with the message."""
    if type(payload) is Placed and type(payload.lease) is _ItemLease:
        return payload.lease.items.copy(payload.wire, None)
    return payload


class ClientMemory(PassingLink):
    """The pool's end, for one client. Any thread.

    Args:
        theirs: what the client writes its items to.
        pool: what the workers read.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, theirs: Memory, pool: PoolMemory) -> None:
        super().__init__(None, None)
        self._items = ClientItems(theirs)
        self._pool = pool
        self._sizes: collections.Counter[int] = collections.Counter()  # bytes lent, by memory
        pool.clients += 1

    def place_items(self, payloads: Sequence[Any], on_end: Callable[[], None]) -> list[Any]:
        """See ``ClientItems.place``."""
        if self._pool.arena is None:  # it could not be had: workers map nothing
            on_end()
            return [
                self._items.copy(each, None) if type(each) is tuple else each for each in payloads
            ]
        return self._items.place(payloads, on_end)

    def share(self, outputs: list[Any]) -> list[Any]:
        """What the client can read, for what workers have written."""
        given = []
        seen: set[Block] = set()
        with self._lock:
            for output in outputs:
                if type(output) is not Received:
                    given.append(output)
                elif self._has_room(output) and self.pass_on(output.memory):
                    wire = (output.memory.number, *output.wire[1:])
                    if wire[:2] not in seen:  # the client reports a block once for each message
                        seen.add(wire[:2])
                        self._sizes[wire[0]] += output.nbytes
                    given.append(Placed(wire, output))
                else:
                    given.append(output.parts().copy())
            self._lend(given)
        return given

    def _has_room(self, output: Received) -> bool:
        """Whether the client may hold one more: a part is left even if all hold what they may."""
        memory = output.memory
        lent = self._sizes[memory.number] + output.nbytes
        return lent <= memory.size // (1 + self._pool.clients)

    def release(self, blocks: list[Block]) -> None:
        """The client no longer reads these."""
        with self._lock:
            for number, start in blocks:
                self._sizes[number] -= self._lent[number][start][-1].nbytes
            self._sizes = +self._sizes  # without those of workers that have ended
            super().release(blocks)

    def fileno(self) -> int:
        """Readable when the client looks at no result any more."""
        return self._sender.connection.fileno()

    def leave(self) -> None:
        """The client has left. Its process may keep results, which are there until ``close``."""
        memory = self._items.memory
        del self._items
        with self._lock:
            self._pool.clients -= 1
        self._pool.forget_client(memory)

    def close(self) -> None:
        """Let workers use the memory of its results again."""
        with self._lock:
            super().close()
            self._lent.clear()


def results_of_workers(descriptor: int) -> ReadingLink:
    """The client's end: reads results in the memory of workers, whose descriptors come there."""
    return ReadingLink(None, None, MemorySocket(socket.socket(fileno=descriptor)))


def inline_results(outputs: list[Any]) -> list[Any]:
    """What a client without shared memory can read."""
    return [each.parts().copy() if type(each) is Received else each for each in outputs]
