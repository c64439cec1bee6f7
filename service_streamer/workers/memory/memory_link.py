"""Links between the web process and its workers: what of their messages lies in shared memory.

Each side writes large payloads to an arena of its own, and reads those of the other side through a
window. Its messages also say which blocks it no longer reads, so that takes no message of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pickle import loads
from typing import Any, NamedTuple

from ...reporting import quiet_log, summary
from .passing import MemorySocket, Windows
from .shared_memory import PAGE, Arena, Loans, Memory, Placed, Wire, default_limit
from .window import Look, Window

_log = quiet_log(__name__)


class Memories(NamedTuple):
    """The shared memory that a new worker is given.

    Attributes:
        requests: what it reads.
        responses: what it writes to.
        more: where it gets memory of third processes, if there are any.
    """

    requests: Memory
    responses: Memory
    more: MemorySocket | None = None


class Received:
    """A payload in the other side's memory, which keeps it until there are no views of it."""

    __slots__ = ("_look", "_window", "wire")

    def __init__(self, window: Window, wire: Wire, look: Look) -> None:
        self._window = window
        self._look = look
        self.wire = wire

    def load(self) -> Any:
        """The value, whose arrays are views of that memory. Any thread."""
        return self._window.load(self.wire, self._look)

    def load_again(self) -> Any:
        """The value as it was sent, in memory of its own."""
        return self._window.load_again(self.wire)

    @property
    def memory(self) -> Memory:
        return self._window.memory

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return self._look.size

    def parts(self) -> list[Any]:
        """The stream of its pickle, and its buffers: views, while this lives."""
        return self._window.parts(self.wire, self._look)


class _Unreadable:
    """In place of a payload in memory that this process could not map."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def load(self) -> Any:
        raise self._error


class _Shared:
    """A result for several callers: each that loads it gets memory of its own."""

    __slots__ = ("_parts", "_received", "nbytes")

    def __init__(self, received: Received) -> None:
        self.nbytes = received.nbytes
        self._received: Received | None = received
        self._parts: list[bytes] = []

    def load(self) -> Any:
        """The value, of a copy. Any thread; the first call takes it out of the shared memory."""
        received = self._received
        if received is not None:
            self._parts = [bytes(part) for part in received.parts()]  # any thread makes the same
            self._received = None
        stream, *buffers = self._parts
        return loads(stream, buffers=map(bytearray, buffers))


def shareable(payload: Any) -> Any:
    """A worker's payload for several callers: each that decodes it gets a copy of its own."""
    return _Shared(payload) if type(payload) is Received else payload


def receive(payloads: list[Any], window_of: Callable[[Wire], Window]) -> bool:
    """Replace wires by payloads that keep their memory, in place; whether all can be read.

    Args:
        window_of: returns the window for a wire; raises OSError if its memory cannot be read.
    """
    looks: dict[tuple[int, int], Look] = {}  # one for each block of a message
    is_whole = True
    for position, wire in enumerate(payloads):
        if type(wire) is not tuple:
            continue
        try:
            window = window_of(wire)
        except OSError as error:
            payloads[position] = _Unreadable(error)
            is_whole = False
            continue
        key = window.memory.number, wire[1]
        look = looks.get(key)
        if look is None:
            look = looks[key] = window.look(wire)
        payloads[position] = Received(window, wire, look)
    return is_whole


class MemoryLink:
    """One side's end of the memory that the web process shares with one worker. Any thread.

    Args:
        arena: what the other side reads; None sends everything with the messages.
        window: reads what the other side writes.
        more: windows for what third processes write, if any.
    """

    def __init__(self, arena: Arena | None, window: Window, more: Windows | None = None) -> None:
        self.arena = arena
        self.window = window
        self.more = more
        self._loans = Loans()
        self._lock = threading.RLock()  # a finalizer of a user's may call us while it is held

    @property
    def is_used(self) -> bool:
        """Whether any payload was ever put there, or came from there."""
        return (
            self.window.is_used
            or (self.arena is not None and self.arena.is_used)
            or (self.more is not None and self.more.is_used)
        )

    def expect(self, count: int) -> None:
        """The next batch has so many payloads."""
        if self.arena is not None:
            self.arena.batch = count

    def lend(self, payloads: list[Any]) -> list[Any]:
        """Let the other side read these payloads, which go there now: as wires, in place.

        Returns:
            The blocks that this side no longer reads: see ``pop_ended`` of the windows.
        """
        if not self.is_used:
            return []
        with self._lock:
            self._loans.lend(payloads)
            ended: list[Any] = self.window.pop_ended()
            if self.more is not None and self.more.is_used:
                ended += self.more.pop_ended()
        for position, payload in enumerate(payloads):
            if type(payload) is Placed:
                payloads[position] = payload.wire
        return ended

    def release(self, blocks: list[Any]) -> None:
        """The other side no longer reads these blocks."""
        with self._lock:
            self._loans.end(blocks)

    def receive(self, payloads: list[Any]) -> None:
        """Keep what has come in the other side's memory, in place."""
        with self._lock:  # or pages that are about to be read could be given back meanwhile
            receive(payloads, self._window_of)

    def _window_of(self, wire: Wire) -> Window:
        if len(wire) == 6 and self.more is not None:
            return self.more.window(wire[5], wire[1])
        return self.window

    def view(self, address: int, size: int) -> memoryview | None:
        """See ``Window.view``."""
        with self._lock:
            view = self.window.view(address, size)
            return view if view is not None or self.more is None else self.more.view(address, size)

    def close(self) -> None:
        """The other side is gone."""
        self.window.memory.is_left = True


class SharedMemory:
    """The web process's: an arena for what all workers read, and a link to each of them.

    Args:
        limit: maximum bytes: half of it for items, half for results. None for a quarter of the
            machine's memory, 0 for none.

    Attributes:
        size: of each half, bytes.
    """

    def __init__(self, limit: int | None) -> None:
        self.size = (default_limit() if limit is None else limit) // 2
        self.arena: Arena | None = None
        if self.size >= PAGE:
            try:
                self.arena = Arena(Memory(self.size), "items")
            except OSError as error:
                _log(
                    logging.WARNING,
                    "no shared memory can be had here (%s): large items and results go through "
                    "pipes, which is slower",
                    summary(error),
                )

    def for_worker(self, worker_num: int) -> tuple[Memories, MemoryLink] | None:
        """For one of ``worker_num`` workers, and this process's end; None if there is none.

        Raises:
            OSError: there are no descriptors left.
        """
        if self.arena is None:
            return None
        responses = Memory(max(PAGE, self.size // worker_num))
        return Memories(self.arena.memory, responses), MemoryLink(self.arena, Window(responses))

    def expect_rows(self, count: int) -> None:
        """Items of one size should lie side by side, about ``count`` of them in a batch."""
        arena = self.arena
        if arena is not None:
            arena.rows = max(count, arena.rows - 1)  # one large batch is soon forgotten

    def close(self) -> None:
        """Let go of it. What still looks at it, or writes there, can."""
        self.arena = None


def link_in_worker(memories: Memories | None) -> MemoryLink | None:
    """The worker's end."""
    if memories is None:
        return None
    arena = None
    with contextlib.suppress(OSError):  # results go through the pipe, then
        arena = Arena(memories.responses, "results")
    more = None if memories.more is None else Windows(memories.more, private=True)
    return MemoryLink(arena, Window(memories.requests, private=True), more)
