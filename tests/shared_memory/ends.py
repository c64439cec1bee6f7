"""Both ends of shared memory in one process, each with a mapping of its own, as two have."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from service_streamer.workers.memory.arena import PAGE, Arena
from service_streamer.workers.memory.payload import Parts, dump
from service_streamer.workers.memory.shared_memory import (
    Memory,
    Placed,
)
from service_streamer.workers.memory.window import Window
from service_streamer.workers.payload_channel import (
    Encoder,
    PayloadChannel,
)

MB = 1 << 20
#: Of an item that is shared, bytes: no multiple of a page, so that rows share some.
SIZE = 10 * PAGE + 100


def filled(value: int, size: int = SIZE) -> Any:
    return np.full(size, value, "u1")


def put(arena: Arena, item: Any) -> Placed:
    parts = dump(item)
    assert type(parts) is Parts
    placed = arena.put(parts)
    assert placed is not None
    return placed


def used(arena: Arena) -> int:
    """How much is taken, now that what has ended is given back."""
    with arena._lock:
        arena._reclaim()
    return arena.used


def pages_of(memory: Memory) -> int:
    """How much of it there is, bytes."""
    return os.fstat(memory.descriptor).st_blocks * 512


class Link:
    """A writer and its readers, and the messages between them.

    Args:
        private: whether readers may write.
        readers: how many there are, each with a mapping of its own.
        rows: how many items of one size are to lie side by side.
    """

    def __init__(
        self, size: int = 4 * MB, *, private: bool = True, readers: int = 1, rows: int = 0
    ) -> None:
        memory = Memory(size)
        self.arena = Arena(memory)
        self.arena.rows = rows
        self.windows = [Window(memory, private=private) for _ in range(readers)]
        self.readers = [PayloadChannel(None, window) for window in self.windows]
        back = Window(Memory(PAGE))
        self.writers = [PayloadChannel(self.arena, back) for _ in range(readers)]
        self.encode: Callable[[Any], Any] = Encoder(self.arena, "items").encode

    def send(self, *payloads: Any, to: int = 0) -> list[Any]:
        """The items of a batch, as the reader has them."""
        batch = [*payloads]
        assert self.writers[to].sent(batch) == []
        load = self.readers[to].loader()
        return [load(payload) for payload in batch]

    def share(self, *items: Any) -> list[Any]:
        return self.send(*map(self.encode, items))

    def settle(self) -> None:
        """The readers' next messages."""
        for reader, writer in zip(self.readers, self.writers, strict=True):
            writer.released(reader.sent([]))

    @property
    def used(self) -> int:
        self.settle()
        return used(self.arena)


def read_only(of: Any) -> Any:
    of.flags.writeable = False
    return of


class Unmapped(Memory):
    """Cannot be mapped, as if the process's addresses were limited."""

    def mapped(self, *, private: bool = False) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")


def decode(payload: Any) -> Any:
    """What the other side has sent, as the transport does it."""
    return pickle.loads(payload) if type(payload) is bytes else payload.load()
