"""Shared memory of a pool's workers, which also read items in the memory of clients.

The pool copies nothing: it passes the descriptor of a client's memory on to each worker that gets
an item from there. It copies items only for workers that cannot have the memory: a device reads the
pool's own, or the worker has the memory of too many clients.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..workers.memory.arena import PAGE, Arena, Memory, Placed, Wire
from ..workers.memory.memory_link import (
    Memories,
    MemoryLink,
    MemorySender,
    Received,
    SharedMemory,
    memory_sockets,
)
from ..workers.memory.payload import Parts
from ..workers.memory.window import Window


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

    def for_worker(self, worker_num: int) -> tuple[Memories, MemoryLink] | None:
        if self.arena is None:
            return None
        responses = Memory(max(PAGE, self.size // worker_num))
        sender, receiver = memory_sockets()
        link = _WorkerLink(self.arena, Window(responses), sender)
        with self._lock:
            self._links.add(link)
        return Memories(self.arena.memory, responses, receiver), link

    def expect_items(self) -> None:
        """Messages to workers may have large items from now on."""
        if self.arena is not None:
            self.arena.is_used = True

    def left(self, memory: Memory) -> None:
        """A client has gone: workers unmap its memory when they have read it."""
        memory.is_left = True
        with self._lock:
            links = [*self._links]
        for link in links:
            link.forget(memory.number)


class _WorkerLink(MemoryLink):
    """The pool's end of what it shares with one worker. Any thread."""

    def __init__(self, arena: Arena, window: Window, sender: MemorySender) -> None:
        super().__init__(arena, window)
        self._sender = sender

    def lend(self, payloads: list[Any]) -> list[Any]:
        if not self.is_used:
            return []
        with self._lock:
            for position, payload in enumerate(payloads):
                if type(payload) is not Placed or type(payload.lease) is not _ItemLease:
                    continue
                items = payload.lease.items
                if not self._sender.send(items.memory):
                    payloads[position] = items.copied(payload.wire, self.arena)
            return super().lend(payloads)

    def release(self, blocks: list[Any]) -> None:
        with self._lock:
            super().release(blocks)
            if any(type(block) is tuple for block in blocks):
                for memory in self._sender.passed():
                    if memory.is_left:
                        self.forget(memory.number)

    def forget(self, number: int) -> None:
        """Have the worker unmap a memory, unless it still reads there."""
        with self._lock:
            if not any(type(block) is tuple and block[0] == number for block in self._lent):
                self._sender.forget(number)

    def close(self) -> None:
        with self._lock:
            super().close()
            self._sender.close()


class ClientItems:
    """The memory that a client writes its items to. Any thread."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._window: Window | None = None
        self._lock = threading.RLock()

    def placed(self, payloads: Sequence[Any], on_end: Callable[[], None]) -> list[Any]:
        """The payloads of a call, for workers.

        Args:
            on_end: called when no worker reads them any more, nor will; in a finalizer.
        """
        end = _End(on_end)
        number = self.memory.number
        return [
            Placed((*payload, number), _ItemLease(self, (number, payload[1]), end))
            if type(payload) is tuple
            else payload
            for payload in payloads
        ]

    def copied(self, wire: Wire, arena: Arena | None) -> Any:
        """A payload in the pool's memory, or in the message if there is no room."""
        with self._lock:
            if self._window is None:
                self._window = Window(self.memory)
            window = self._window
            stream, *buffers = window.parts(wire, window.lease(wire))
            buffers = [memoryview(each) for each in buffers]  # copies, if it could not be mapped
            placed = None if arena is None else arena.put(Parts([stream], buffers))
            payload = whole(stream, buffers) if placed is None else placed
            del buffers
            window.pop_ended()  # which the client is not told: the lease holds the block
            return payload


class _ItemLease:
    """Held by whatever may read an item.

    Attributes:
        block: with the number of its memory.
    """

    __slots__ = ("_end", "block", "items")

    def __init__(self, items: ClientItems, block: tuple[int, int], end: _End) -> None:
        self.items = items
        self.block = block
        self._end = end


class _End:
    """Held by the leases of a call."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end()


def in_message(payload: Any) -> Any:
    """An item for a worker that shares no memory: it goes with the message."""
    if type(payload) is Placed and type(payload.lease) is _ItemLease:
        return payload.lease.items.copied(payload.wire, None)
    return payload


def inlined(received: Received) -> bytes:
    """A result that goes with the message."""
    stream, *buffers = received.parts()
    return whole(stream, buffers)


def whole(stream: Any, buffers: list[Any]) -> bytes:
    """The parts of a pickle as one that goes with the message."""
    return pickle.dumps(_Whole(stream, buffers), 5)


class _Whole:
    """Pickles to what the parts of a pickle make."""

    def __init__(self, stream: Any, buffers: list[Any]) -> None:
        self._parts = bytes(stream), [bytes(each) for each in buffers]

    def __reduce__(self) -> Any:
        return restored, self._parts


def restored(stream: bytes, buffers: list[bytes]) -> Any:
    """Where it is unpickled: what was pickled in parts, in memory that may be written to."""
    return pickle.loads(stream, buffers=map(bytearray, buffers))
