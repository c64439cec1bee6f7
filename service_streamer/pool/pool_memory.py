"""Shared memory of a pool's workers, which also read items in the memory of clients.

The pool copies nothing: it passes the descriptor of a client's memory on to each worker that gets
an item from there. It copies items only for workers that cannot have the memory: a device reads the
pool's own, or the worker has the memory of too many clients.
"""

from __future__ import annotations

import collections
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..workers.arena import Arena, Memory, Placed, Wire
from ..workers.codec import Parts
from ..workers.memory_link import (
    Block,
    Memories,
    MemoryLink,
    MemorySender,
    MemorySocket,
    Received,
    SharedMemory,
    memory_sockets,
)


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

    def _share(self, arena: Arena, responses: Memory) -> tuple[Memories, MemoryLink]:
        sender, receiver = memory_sockets()
        link = _WorkerLink(arena, responses, sender)
        with self._lock:
            self._links.add(link)
        return Memories(arena.memory, responses, receiver), link

    def forget_client(self, memory: Memory) -> None:
        """A client has gone: workers unmap its memory when they have read it."""
        memory.is_left = True
        with self._lock:
            links = [*self._links]
        for link in links:
            link.forget(memory.number)


class _WorkerLink(MemoryLink):
    """The pool's end of what it shares with one worker. Any thread."""

    def __init__(self, arena: Arena, responses: Memory, sender: MemorySender) -> None:
        super().__init__(arena, responses)
        self._sender = sender

    def _lend(self, payloads: list[Any]) -> None:
        for position, payload in enumerate(payloads):
            if type(payload) is Placed and type(payload.lease) is _ItemLease:
                items = payload.lease.items
                if not self._sender.send(items.memory):
                    payloads[position] = items.copy(payload.wire, self.arena)
        super()._lend(payloads)

    def release(self, blocks: list[Block]) -> None:
        with self._lock:
            super().release(blocks)
            if any(number for number, _ in blocks):
                for memory in self._sender.memories():
                    if memory.is_left:
                        self.forget(memory.number)

    def forget(self, number: int) -> None:
        """Have the worker unmap a memory, unless it still reads there."""
        with self._lock:
            if not any(block[0] == number for block in self._lent):
                self._sender.forget(number)

    def close(self) -> None:
        with self._lock:
            super().close()
            self._sender.close()


class ClientItems:
    """The memory that a client writes its items to. Any thread."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._link: MemoryLink | None = None
        self._lock = threading.RLock()

    def place(self, payloads: Sequence[Any], on_end: Callable[[], None]) -> list[Any]:
        """The payloads of a call, for workers.

        Args:
            on_end: called when no worker reads them any more, nor will; in a finalizer.

        Raises:
            IndexError: one is no wire.
        """
        lease = _ItemLease(self, on_end)
        number = self.memory.number
        return [
            Placed((*payload[:4], payload[4], number), lease) if type(payload) is tuple else payload
            for payload in payloads
        ]

    def copy(self, wire: Wire, arena: Arena | None) -> Any:
        """A payload in the pool's memory, or in the message if there is no room."""
        with self._lock:
            if self._link is None:
                self._link = MemoryLink(None, self.memory)
            received: list[Any] = [(*wire[:5], 0)]
            self._link.receive(received)
            parts: Parts = received.pop().parts()
            payload: Any = None if arena is None else arena.put(parts)
            if payload is None:
                payload = parts.copy()
            del parts
            self._link.pop_ended()  # which the client is not told: the lease holds the block
            return payload


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
        self._held: dict[Block, list[Received]] = {}
        self._sizes: collections.Counter[int] = collections.Counter()  # bytes of these, by memory
        self._lock = threading.RLock()
        pool.clients += 1

    def pop_receiver(self) -> MemorySocket:
        """The client's end, which closes when it is collected. Once."""
        receiver = self._receiver
        del self._receiver
        return receiver

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
                elif self._has_room(output) and self._sender.send(output.memory):
                    key = output.memory.number, output.wire[1]
                    if key not in seen:  # the client reports a block once for each message
                        seen.add(key)
                        self._held.setdefault(key, []).append(output)
                        self._sizes[output.memory.number] += output.nbytes
                    given.append((*output.wire[:5], output.memory.number))
                else:
                    given.append(output.parts().copy())
        return given

    def _has_room(self, output: Received) -> bool:
        """Whether the client may hold one more: a part is left even if all hold what they may."""
        memory = output.memory
        held = self._sizes[memory.number] + output.nbytes
        return held <= memory.size // (1 + self._pool.clients)

    def release(self, blocks: list[Block]) -> None:
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
            for memory in self._sender.memories():
                if memory.is_left and not self._sizes[memory.number]:
                    del self._sizes[memory.number]
                    self._sender.forget(memory.number)

    def close(self) -> None:
        """The client has left. Its process may keep results, which are there until ``free``."""
        memory = self._items.memory
        del self._items
        with self._lock:
            self._pool.clients -= 1
        self._pool.forget_client(memory)

    def fileno(self) -> int:
        """Readable when the client looks at no result any more."""
        return self._sender.fileno()

    def free(self) -> None:
        """Let workers use the memory of its results again."""
        with self._lock:
            self._held.clear()
            self._sizes.clear()
            self._sender.close()


def results_of_workers(descriptor: int) -> MemoryLink:
    """The client's end: reads results in the memory of workers, whose descriptors come there."""
    return MemoryLink(None, None, MemorySocket(socket.socket(fileno=descriptor)))


def inline_results(outputs: list[Any]) -> list[Any]:
    """What a client without shared memory can read."""
    return [each.parts().copy() if type(each) is Received else each for each in outputs]
