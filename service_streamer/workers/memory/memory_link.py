"""Links between the web process and its workers: what of their messages lies in shared memory.

Each side writes large payloads to an arena of its own, and reads those of the other side through a
window. Its messages also say which blocks it no longer reads, so that takes no message of its own.

A worker of a pool also reads memory of third processes, which came after the worker had started:

     MemorySender                                        Windows
     ------------                                        -------
     send(memory) ── its number and descriptor ────────▶ window(number): mapped when it is needed
     message with a wire of that number ───────────────▶ payloads: views of the pages, no copy
     ◀── message: blocks without views, with the number  pop_ended()
     forget(number) ───────────────────────────────────▶ unmapped

Descriptors go through a socket of their own, so they need no ``/proc``, which may be hidden or
missing, and the other messages need no ``recvmsg``. A descriptor is sent before the message that
needs it. So it is there when that message is read.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from pickle import loads
from typing import Any, NamedTuple

from ...reporting import quiet_log, summary
from .arena import PAGE, Arena, Lease, Memory, Placed, Wire, default_limit
from .window import ReadLease, Window

_log = quiet_log(__name__)

#: Most memories that a reader has at a time: each costs it a mapping and two descriptors. Far below
#: the usual limit of 1024 descriptors; arbitrary.
_MOST = 128

_NUMBER_SIZE = 8


class Memories(NamedTuple):
    """The shared memory that a new worker is given."""

    requests: Memory  # what it reads
    responses: Memory  # what it writes to
    more: MemorySocket | None = None  # where it gets memory of third processes, if there are any


class Received:
    """A payload in the other side's memory, which keeps it until there are no views of it."""

    __slots__ = ("_lease", "_window", "wire")

    def __init__(self, window: Window, wire: Wire, lease: ReadLease) -> None:
        self._window = window
        self._lease = lease
        self.wire = wire

    def load(self) -> Any:
        """The value, whose arrays are views of that memory. Any thread."""
        stream, *buffers = self.parts()
        return loads(stream, buffers=buffers)

    def load_again(self) -> Any:
        """The value as it was sent, in memory of its own."""
        stream, *buffers = self._window.copies(self.wire)
        return loads(stream, buffers=buffers)

    @property
    def memory(self) -> Memory:
        return self._window.memory

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return self._lease.size

    def parts(self) -> list[Any]:
        """The stream of its pickle, and its buffers: views, while this lives."""
        return self._window.parts(self.wire, self._lease)


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
    leases: dict[tuple[int, int], ReadLease] = {}  # one for each block of a message
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
        lease = leases.get(key)
        if lease is None:
            lease = leases[key] = window.lease(wire)
        payloads[position] = Received(window, wire, lease)
    return is_whole


class MemoryLink:
    """One side's end of the memory that the web process shares with one worker. Any thread.

    Args:
        arena: what the other side reads; None sends everything with the messages.
        window: reads what the other side writes.
        more: windows for what third processes write, if any.

    Attributes:
        has_received: whether any payload ever came in the other side's memory.
    """

    def __init__(self, arena: Arena | None, window: Window, more: Windows | None = None) -> None:
        self.arena = arena
        self.window = window
        self.more = more
        #: What the other side may be reading, by block; in a third process's memory by its number
        #: and the block.
        self._lent: dict[Any, list[Lease]] = {}
        self.has_received = False
        self._lock = threading.RLock()  # a finalizer of a user's may call us while it is held

    @property
    def is_used(self) -> bool:
        """Whether any payload was ever put there, or came from there."""
        return self.has_received or (self.arena is not None and self.arena.is_used)

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
        leases: dict[Any, Lease] = {}
        for position, payload in enumerate(payloads):
            if type(payload) is Placed:
                leases[payload.lease.block] = payload.lease
                payloads[position] = payload.wire
        with self._lock:
            for block, lease in leases.items():
                self._lent.setdefault(block, []).append(lease)
            ended: list[Any] = self.window.pop_ended()
            if self.more is not None:
                ended += self.more.pop_ended()
        return ended

    def release(self, blocks: list[Any]) -> None:
        """The other side no longer reads these blocks, each as often as it was lent."""
        with self._lock:
            for block in blocks:
                leases = self._lent[block]
                leases.pop()
                if not leases:
                    del self._lent[block]

    def receive(self, payloads: list[Any]) -> None:
        """Keep what has come in the other side's memory, in place."""
        with self._lock:  # or pages that are about to be read could be given back meanwhile
            self.has_received = True
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


# -- memory of third processes


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_SIZE, "little", signed=True)


class MemorySocket:
    """The receiving end; closed when it is collected. It can be passed to a new process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection

    def __reduce__(self) -> Any:
        return MemorySocket, (self.connection,)

    def __del__(self) -> None:
        self.connection.close()


def memory_sockets() -> tuple[MemorySender, MemorySocket]:
    """Both ends. Raises OSError: there are no descriptors left."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return MemorySender(ours), MemorySocket(theirs)


class MemorySender:
    """Passes memory on to one reader. Not thread-safe. Never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._passed: dict[int, Memory] = {}
        self._forgotten: collections.deque[int] = collections.deque()  # the reader is not told yet

    def __del__(self) -> None:
        self._connection.close()

    def send(self, memory: Memory) -> bool:
        """Pass memory on if that was not done; whether the reader has it."""
        if memory.number in self._passed:
            return True
        self._say_forgotten()
        if self._forgotten or len(self._passed) >= _MOST:
            return False
        with contextlib.suppress(OSError):  # the reader takes nothing more, or is gone
            socket.send_fds(self._connection, [_packed(memory.number)], [memory.descriptor])
            self._passed[memory.number] = memory
            return True
        return False

    def passed(self) -> list[Memory]:
        """What the reader has."""
        return [*self._passed.values()]

    def forget(self, number: int) -> None:
        """The reader reads nothing of this memory, and will not: let it unmap that."""
        if self._passed.pop(number, None) is not None:
            self._forgotten.append(number)
            self._say_forgotten()

    def _say_forgotten(self) -> None:
        with contextlib.suppress(OSError):
            while self._forgotten:
                self._connection.send(_packed(-self._forgotten[0]))
                self._forgotten.popleft()

    def close(self) -> None:
        """The reader is gone."""
        self._passed.clear()
        self._connection.close()


class Windows:
    """Reads payloads from memory that a ``MemorySender`` passes on.

    For any thread, except ``pop_ended``.

    Args:
        received: from where the memory comes.
        private: see ``Window``.
    """

    def __init__(self, received: MemorySocket, *, private: bool) -> None:
        self._received = received
        self._private = private
        self._windows: dict[int, Window] = {}
        self._unread: list[tuple[int, int]] = []
        self._lock = threading.RLock()  # a finalizer of a user's may interrupt us

    def close(self) -> None:
        """Nothing more is to come. What was loaded can still be read."""
        with self._lock:
            self._received.connection.close()
            self._windows.clear()

    def abandon(self) -> None:
        """Close this process's copies, in a forked child: another thread may hold the lock."""
        with contextlib.suppress(OSError):  # without gevent's hub, which is the parent's
            os.close(self._received.connection.detach())
        self._windows = {}

    def fileno(self) -> int:
        """Readable when ``take_in`` has something to do."""
        return self._received.connection.fileno()

    def take_in(self) -> bool:
        """Take in what was passed on or is to be forgotten; whether more may come."""
        with self._lock:
            try:
                while True:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._received.connection, _NUMBER_SIZE, 1, socket.MSG_CMSG_CLOEXEC
                    )
                    if not data:
                        return False
                    self._take(int.from_bytes(data, "little", signed=True), descriptors)
            except BlockingIOError:
                return True
            except OSError:  # the other end is gone
                return False

    def _take(self, number: int, descriptors: list[int]) -> None:
        if number < 0:
            self._windows.pop(-number, None)
        elif descriptors:  # else this process may not have more
            memory = Memory.received(descriptors[0])
            self._windows[number] = Window(memory, private=self._private)

    def window(self, number: int, block: int) -> Window:
        """For a payload in a block of this memory.

        Raises:
            OSError: this process had no descriptor free when the memory came.
        """
        window = self._windows.get(number)
        if window is None:
            self.take_in()
            window = self._windows.get(number)
        if window is None:
            self._unread.append((number, block))
            raise OSError("this process has too many files open to read shared memory")
        return window

    def pop_ended(self) -> list[tuple[int, int]]:
        """The blocks that are no longer in use, with the numbers of their memories."""
        with self._lock:
            unread, self._unread = self._unread, []
            return unread + [
                (number, block)
                for number, window in self._windows.items()
                for block in window.pop_ended()
            ]

    def view(self, address: int, size: int) -> memoryview | None:
        """See ``Window.view``."""
        with self._lock:
            views = (each.view(address, size) for each in self._windows.values())
            return next((each for each in views if each is not None), None)
