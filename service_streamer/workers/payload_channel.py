"""What goes beside the messages of one worker and the web process, in memory that both have.

Each side writes to an arena and looks at the other's through a window. With its messages it tells
which blocks it does not look at any more, so that takes no message of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from pickle import dumps, loads
from typing import Any, NamedTuple

from .memory.arena import PAGE, Arena, Lent
from .memory.passing import MemorySocket, Windows
from .memory.payload import ATOMS, LARGE, LARGE_IN_BATCH, PROTOCOL, Parts, dump, dump_whole
from .memory.shared_memory import Memory, Placed, Wire, default_limit
from .memory.window import Look, Window
from .protocol import summary

logger = logging.getLogger(__name__)

_MB = 1_000_000

#: From so many payloads in a batch on, ``LARGE_IN_BATCH`` counts.
_MANY = 4


class Memories(NamedTuple):
    """What a worker is given: to look at, and to write to; and where it gets more to look at."""

    requests: Memory
    responses: Memory
    more: MemorySocket | None = None


#: As ``payload.dump``: a value, and from how many bytes on it comes in parts.
Dump = Callable[[Any, float], bytes | Parts]


class Encoder:
    """Makes items, or results, into what goes with a message. Any thread.

    Args:
        arena: for what is large; None sends everything with the message.
        what: what they are, in words.

    Attributes:
        batch: how many the latest batch had, as far as is known.
    """

    def __init__(self, arena: Arena | None, what: str) -> None:
        self._arena = arena
        self._what = what
        self._has_said = False
        self._large: float = LARGE if arena is not None else math.inf
        self._large_in_batch: float = LARGE_IN_BATCH if arena is not None else math.inf
        self.batch = 1

    def encode(self, value: Any) -> bytes | Placed:
        """Raises whatever pickling it raises."""
        kind = type(value)
        if kind in ATOMS and (kind is not str or len(value) < LARGE_IN_BATCH):  # as most are
            return dumps(value, PROTOCOL)
        pickled = dump(value, self._large if self.batch < _MANY else self._large_in_batch)
        if isinstance(pickled, bytes):
            return pickled
        return self._placed(pickled) or dump_whole(value)

    def encode_with(self, dump: Dump, value: Any) -> bytes | Placed:
        """The same, pickled by another function."""
        pickled = dump(value, self._large if self.batch < _MANY else self._large_in_batch)
        if isinstance(pickled, bytes):
            return pickled
        placed = self._placed(pickled)
        if placed is not None:
            return placed
        whole: Any = dump(value, math.inf)
        return whole  # type: ignore[no-any-return]

    def _placed(self, pickled: Parts) -> Placed | None:
        arena = self._arena
        placed = None if arena is None else arena.put(pickled)
        if placed is None and not self._has_said and arena is not None:
            self._has_said = True
            self._say(arena, pickled)
        return placed

    def close(self) -> None:
        """Let go of the arena. Who is just writing there still can."""
        self._arena = None
        self._large = self._large_in_batch = math.inf

    def _say(self, arena: Arena, parts: Parts) -> None:
        with contextlib.suppress(Exception):  # of a filter or handler of a user's
            logger.warning(
                "%.1f MB do not fit into the shared memory for %s, of which %.1f of %.1f MB are in "
                "use: it goes through a pipe, which is slower. This is said once; "
                "shared_memory_limit sets how much there is",
                parts.size / _MB, self._what, arena.used / _MB, arena.memory.size / _MB,
            )  # fmt: skip


class Received:
    """A result that lies in a worker's arena: its memory is held until nothing looks at it."""

    __slots__ = ("_look", "_window", "_wire")

    def __init__(self, window: Window, wire: Wire, look: Look) -> None:
        self._window = window
        self._wire = wire
        self._look = look

    def load(self) -> Any:
        """The result, whose arrays are views of that memory. Any thread."""
        return self._window.load(self._wire, self._look)

    @property
    def wire(self) -> Wire:
        return self._wire

    @property
    def memory(self) -> Memory:
        return self._window.memory

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it holds."""
        return self._look.size

    def parts(self) -> list[Any]:
        """The stream of its pickle, and its buffers: views, while this lives."""
        return self._window.parts(self._wire, self._look)

    def copied(self) -> list[bytes]:
        """The same, as copies."""
        return [bytes(part) for part in self.parts()]


class Kept:
    """A result for several callers: each that loads it gets memory of its own."""

    __slots__ = ("_parts", "_received", "nbytes")

    def __init__(self, received: Received) -> None:
        self.nbytes = received.nbytes
        self._received: Received | None = received
        self._parts: list[bytes] = []

    def load(self) -> Any:
        """The result, of a copy. Any thread; by the first one it is taken out of the memory."""
        received = self._received
        if received is not None:
            self._parts = received.copied()  # if several do so, each copies the same
            self._received = None
        stream, *buffers = self._parts
        return loads(stream, buffers=map(bytearray, buffers))


def kept(payload: Any) -> Any:
    """What a worker has sent, for several callers: each that decodes it gets a copy of its own."""
    return Kept(payload) if type(payload) is Received else payload


class PayloadChannel:
    """One side's end. Any thread.

    Args:
        arena: that the other side looks at, if any.
        window: for what the other side writes.
        more: windows for what third processes write, if any.
    """

    def __init__(self, arena: Arena | None, window: Window, more: Windows | None = None) -> None:
        self.arena = arena
        self.window = window
        self.more = more
        self._lent = Lent()
        self._lock = threading.RLock()  # a finalizer of a user's may call us while it is held

    def sent(self, payloads: list[Any]) -> list[Any]:
        """These go to the other side now, what is placed as its wire: that is put in its place.

        Returns:
            The blocks to release with them: see ``Window.ended``, and ``Windows.ended``.
        """
        is_arena_used = self.arena is not None and self.arena.is_used
        has_more = self.more is not None and self.more.is_used
        if not (is_arena_used or self.window.is_used or has_more):
            return []
        with self._lock:
            self._lent.lend(payloads)
            ended: list[Any] = self.window.ended()
            if self.more is not None and has_more:
                ended += self.more.ended()
        for position, payload in enumerate(payloads):
            if type(payload) is Placed:
                payloads[position] = payload.wire
        return ended

    def released(self, blocks: list[Any]) -> None:
        """The other side no longer reads these blocks."""
        with self._lock:
            self._lent.ended(blocks)

    def received(self, payloads: list[Any]) -> None:
        """Hold what came and lies in the other side's memory; in place."""
        looks: dict[int, Look] = {}
        with self._lock:
            for position, payload in enumerate(payloads):
                if type(payload) is tuple:
                    look = _look(self.window, payload, looks)
                    payloads[position] = Received(self.window, payload, look)

    def loader(self) -> Callable[[Any], Any]:
        """Loads the items of one batch, one after the other."""
        looks: dict[Any, Look] = {}

        def load(payload: Any) -> Any:
            if type(payload) is not tuple:
                return loads(payload)
            with self._lock:  # or pages that it is about to look at could be given back meanwhile
                window = self.window
                if len(payload) == 6 and self.more is not None:
                    window = self.more.window(payload[5], payload[1])
                look = _look(window, payload, looks)
            return window.load(payload, look)

        return load

    def view(self, address: int, size: int) -> memoryview | None:
        """See ``Window.view``."""
        with self._lock:
            view = self.window.view(address, size)
            return view if view is not None or self.more is None else self.more.view(address, size)

    def close(self) -> None:
        """The other side is gone."""
        self.window.memory.is_left = True


def _look(window: Window, wire: Wire, looks: dict[Any, Look]) -> Look:
    """At its block: the same for all of one message."""
    key = window.memory.number, wire[1]
    look = looks.get(key)
    if look is None:
        look = looks[key] = window.look(wire)
    return look


class SharedMemory:
    """The web process's: an arena for what all workers read, and a window for each of them.

    Args:
        limit: the most that there may be, bytes: half of it for items, half for results. None for
            a quarter of the machine's memory, 0 for none.

    Attributes:
        size: of each half, bytes.
    """

    def __init__(self, limit: int | None) -> None:
        self.size = (default_limit() if limit is None else limit) // 2
        self.arena: Arena | None = None
        if self.size >= PAGE:
            try:
                self.arena = Arena(Memory(self.size))
            except OSError as error:
                with contextlib.suppress(Exception):  # of a filter or handler of a user's
                    logger.warning(
                        "no shared memory can be had here (%s): large items and results go through "
                        "pipes, which is slower",
                        summary(error),
                    )
        self.encoder = Encoder(self.arena, "items")

    def for_worker(self, worker_num: int) -> tuple[Memories, PayloadChannel] | None:
        """For one of ``worker_num`` workers, and this process's end; None if there is none.

        Raises:
            OSError: there are no descriptors left.
        """
        if self.arena is None:
            return None
        responses = Memory(max(PAGE, self.size // worker_num))
        return Memories(self.arena.memory, responses), PayloadChannel(self.arena, Window(responses))

    def expect_rows(self, count: int) -> None:
        """Items of one size are to lie side by side, about ``count`` of them in a batch."""
        arena = self.arena
        if arena is not None:
            arena.rows = max(count, arena.rows - 1)  # one large batch is soon forgotten

    def close(self) -> None:
        """Let go of it. What still looks at it, or writes there, can."""
        self.arena = None
        self.encoder.close()


def in_worker(memories: Memories | None) -> tuple[Encoder, PayloadChannel | None]:
    """The worker's end."""
    if memories is None:
        return Encoder(None, "results"), None
    arena = None
    with contextlib.suppress(OSError):  # results go through the pipe, then
        arena = Arena(memories.responses)
    more = None if memories.more is None else Windows(memories.more, private=True)
    window = Window(memories.requests, private=True)
    return Encoder(arena, "results"), PayloadChannel(arena, window, more)
