"""Both ends of shared memory in one process, each with a mapping of its own, as two have."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from service_streamer.workers.codec import Codec
from service_streamer.workers.memory_link import SharedMemory

MB = 1 << 20
#: An item of so many bytes is shared.
LARGE = 16 << 10
#: What is shared begins on a page, or some.
PAGE = max(4096, mmap.PAGESIZE)
#: Of an item that is shared, bytes: no multiple of a page, so that rows share some.
SIZE = 10 * PAGE + 100


def filled(value: int, size: int = SIZE) -> Any:
    return np.full(size, value, "u1")


def is_shared(payload: Any) -> bool:
    """Whether it lies in shared memory, and does not go with the message."""
    return type(payload) is not bytes


def used(arena: Any) -> int:
    """How much is taken, now that what has ended is given back."""
    taken: int = arena.reclaim()
    return taken


def pages_of(memory: Any) -> int:
    """How much of it there is, bytes."""
    return os.fstat(memory.descriptor).st_blocks * 512


class Link:
    """A writer and its readers, and the messages between them.

    Args:
        private: whether readers may write: what goes to workers. Else what comes from one.
        readers: how many there are, each with a mapping of its own.
        rows: how many items of one size are to lie side by side.
    """

    def __init__(
        self, size: int = 4 * MB, *, private: bool = True, readers: int = 1, rows: int = 0
    ) -> None:
        web = SharedMemory(2 * size)
        ends = [web.for_worker(1) for _ in range(readers)]
        here = [end[1] for end in ends if end is not None]
        there = [end[0]() for end in ends if end is not None]
        self.writers, self.readers = (here, there) if private else (there, here)
        self.arena: Any = self.writers[0].arena
        self.arena.rows = rows
        self.encode: Callable[[Any], Any] = Codec(self.arena.put).encode

    def send(self, *payloads: Any, to: int = 0) -> list[Any]:
        """The items of a batch, as the reader has them."""
        batch = [*payloads]
        assert self.writers[to].lend(batch) == []
        self.readers[to].receive(batch)
        return [decode(payload) for payload in batch]

    def share(self, *items: Any) -> list[Any]:
        return self.send(*map(self.encode, items))

    def receive(self, *payloads: Any) -> list[Any]:
        """The payloads of an answer, held by their reader but not loaded."""
        batch = [*payloads]
        self.writers[0].lend(batch)
        self.readers[0].receive(batch)
        return batch

    def settle(self) -> None:
        """The readers' next messages."""
        for reader, writer in zip(self.readers, self.writers, strict=True):
            writer.release(reader.lend([]))

    @property
    def used(self) -> int:
        self.settle()
        return used(self.arena)

    def close_rows(self) -> None:
        """No block is filled any further with rows: there is none for something so large."""
        self.encode(filled(0, self.arena.memory.size))


def read_only(of: Any) -> Any:
    of.flags.writeable = False
    return of


def decode(payload: Any) -> Any:
    """What the other side has sent, as the transport does it."""
    return Codec().decode(payload)
