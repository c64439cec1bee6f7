"""Links between the web process and its workers: what of their messages lies in shared memory.

Each side writes large payloads to an arena of its own, and reads those of the other side through a
window. Its messages also say which blocks it no longer reads, so that takes no message of its own.

A reader may write to what it gets. If another reader may need the same data later (an item that is
computed again after a crash), the mapping is private: a write copies the page, and the copy is
dropped with the last view.

A worker of a pool also reads memory of third processes: see ``pool/pool_memory.py``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from ..reporting import quiet_log, summary
from .arena import (
    PAGE,
    Arena,
    Block,
    Ended,
    Lease,
    Memory,
    Placed,
    Wire,
    default_limit,
    positions,
)
from .codec import Parts

_log = quiet_log(__name__)

# -- the reader's side

#: Highest bytes of /proc/self/pagemap for pages that are no copies: absent, or present (bit 63) and
#: of a file or shared (61), and not swapped out (62).
#: https://docs.kernel.org/admin-guide/mm/pagemap.html
_CLEAN = bytes(
    byte for byte in range(256) if not byte & 0xC0 or (byte & 0xA0 == 0xA0 and not byte & 0x40)
)


@functools.cache
def _pagemap(_: int) -> int:
    """A descriptor that tells which pages of this process, by its id, were written to."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


@functools.cache  # there are few block sizes, and making a type is expensive
def _region_type(size: int) -> Any:
    return ctypes.c_char * size


def _references(lease: Lease) -> int:
    return sys.getrefcount(lease)


def _fewest_references() -> int:
    """Reference count of a lease in one variable, which depends on Python's version."""
    lease = Lease(collections.deque(), 0, 0)
    return _references(lease)


_FEWEST_REFERENCES = _fewest_references()


class Window:
    """Reads payloads from another process's arena. Leases report their end to ``ended``.

    ``memory`` is None if this process could not take it in.
    ``region`` is for any thread, the other methods for one thread at a time.
    ``private`` hides readers' writes from later readers, and enables ``view``.
    """

    def __init__(
        self, memory: Memory | None, ended: Ended, source: object = None, *, private: bool
    ) -> None:
        self._memory = memory
        self._source = source  # where it came from: kept as long as anything is viewed
        self._ended = ended
        self._viewed: dict[int, weakref.ref[Lease]] = {}  # by block, if its views are private
        self._map: mmap.mmap | None = None
        self._address = 0  # of a private mapping; 0 if there is none
        with contextlib.suppress(OSError):  # then everything is copied
            self._map = self.memory.map(private=private)
            if private:
                self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            raise OSError("this process has too many files open to read shared memory")
        return self._memory

    def lease(self, wire: Wire) -> Lease:
        """Count a block as in use until the returned lease is dropped.

        One lease per block and message; payloads of a batch in one block share it.
        """
        number, block, size, *_ = wire
        # A reader of an earlier batch's rows may have written to the page that its last row shares
        # with our first.
        is_copied = self._map is None or block in self._viewed
        lease = Lease(self._ended, block, size)
        lease.number, lease.is_copied = number, is_copied
        lease.start, lease.stop = block + size, block  # nothing is viewed yet
        if self._address and not is_copied:
            self._viewed[block] = weakref.ref(lease)
        return lease

    def view(self, address: int, size: int) -> memoryview | None:
        """The memory at an address, if all of it is in use in one block."""
        start = address - self._address
        for reference in [*self._viewed.values()]:
            lease = reference()
            if lease is None or lease in self._ended:
                continue
            if lease.start <= start and start + size <= lease.stop:
                return self.region(lease)[start - lease.block : start - lease.block + size]
        return None

    def end(self, lease: Lease) -> None:
        """There are no more views of a lease."""
        if not lease.is_copied:
            self._viewed.pop(lease.block, None)
        if self._address and lease.start < lease.stop:
            try:
                self._drop_written(lease.start, lease.stop)
            except OSError:  # such as locked pages
                self._map = None  # copy everything from now on

    def _drop_written(self, start: int, stop: int) -> None:
        """Drop the copies of pages that a reader has written to, if there are any.

        Not otherwise: dropping other pages would map them again.
        """
        size = mmap.PAGESIZE
        first, last = start // size, -(-stop // size)
        with contextlib.suppress(OSError):  # there is no /proc: all pages count as copies
            length = (last - first) * 8
            entries = os.pread(_pagemap(os.getpid()), length, (self._address // size + first) * 8)
            highest = entries[7::8] if sys.byteorder == "little" else entries[::8]
            if len(entries) == length and not highest.translate(None, _CLEAN):
                return
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED, first * size, (last - first) * size)

    def region(self, lease: Lease) -> memoryview:
        """A lease's block. Views of it reference the ctypes object, which references the lease."""
        region = _region_type(lease.size).from_buffer(self._map, lease.block)
        region.lease, region.source = lease, self._source
        return memoryview(region).cast("B")


def copied(memory: Memory, wire: Wire) -> Parts:
    """A payload as it was sent, whatever readers have written to it. It need not be mapped."""
    _, _, _, start, lengths, stream = wire
    starts = positions(lengths)[:-1]
    copies = [_copy(memory, start + at, n) for at, n in zip(starts, lengths, strict=True)]
    return _parts(stream, copies)


def _copy(memory: Memory, start: int, length: int) -> bytearray:
    copy = bytearray(length)
    done = 0
    while done < length:
        rest = memoryview(copy)[done:]
        count = os.preadv(memory.descriptor, [rest], start + done)
        if not count:
            raise EOFError("shared memory is shorter than expected")
        done += count
    return copy


def _parts(stream: bytes | None, rest: list[Any]) -> Parts:
    return Parts(rest[:1], rest[1:]) if stream is None else Parts([stream], rest)


class Received:
    """A payload in the other side's memory, which keeps it until there are no views of it."""

    __slots__ = ("_lease", "_window", "wire")

    def __init__(self, window: Window, wire: Wire, lease: Lease) -> None:
        self._window = window
        self._lease = lease
        self.wire = wire

    def load(self) -> Any:
        """The value, whose arrays are views of that memory. Any thread."""
        return self.parts().view()

    def load_again(self) -> Any:
        """The value as it was sent, in memory of its own."""
        return copied(self.memory, self.wire).view()

    @property
    def memory(self) -> Memory:
        return self._window.memory

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return self._lease.size

    def parts(self) -> Parts:
        """The payload, as views of that memory that keep the lease alive."""
        lease = self._lease
        if lease.is_copied:
            return copied(self.memory, self.wire)
        _, block, _, start, lengths, stream = self.wire
        *starts, end = positions(lengths)
        lease.start, lease.stop = min(lease.start, start), max(lease.stop, start + end)
        region, start = self._window.region(lease), start - block
        views = [region[start + at : start + at + n] for at, n in zip(starts, lengths, strict=True)]
        return _parts(stream, views)


# -- both ends


def worker_link(requests: Memory, responses: Memory) -> MemoryLink:
    """A worker's end."""
    return MemoryLink(results_arena(responses), requests, private=True)


def results_arena(memory: Memory) -> Arena | None:
    """In a worker; None if it cannot be mapped: then results go through the pipe."""
    with contextlib.suppress(OSError):
        return Arena(memory, "results")
    return None


class _Shared:
    """A result for several callers, each of which gets memory of its own."""

    __slots__ = ("_payload", "nbytes")

    def __init__(self, received: Received) -> None:
        self.nbytes = received.nbytes
        self._payload: Received | Parts = received

    def load(self) -> Any:
        """The value. Any thread; the first call takes it out of the shared memory."""
        payload = self._payload
        if isinstance(payload, Received):
            payload = self._payload = payload.parts().copy()  # any thread makes the same
        return payload.load()


def shareable(payload: Any) -> Any:
    """A worker's payload for several callers: each that decodes it gets a copy of its own."""
    return _Shared(payload) if type(payload) is Received else payload


class MemoryLink:
    """One process's end of the memory that it shares with others. Any thread.

    Args:
        arena: what the other side reads; None sends everything with the messages.
        memory: what the other side writes to, if it does.
        private: see ``Window``.
    """

    def __init__(
        self,
        arena: Arena | None,
        memory: Memory | None,
        *,
        private: bool = False,
    ) -> None:
        self.arena = arena
        self.memory = memory
        self._private = private
        #: What the other side may be reading, by the number of its memory and the block's start.
        self._lent: dict[int, dict[int, list[Any]]] = {}
        self._windows: dict[int, Window] = {}  # by the number of the memory
        self._ended: Ended = collections.deque()
        if memory is not None:
            self._windows[0] = Window(memory, self._ended, private=private)
        # A block that ends while another thread receives would be given back with pages that are
        # about to be read. Reentrant: a finalizer of a user's may interrupt us.
        self._lock = threading.RLock()

    # -- what the other side reads

    def lend(self, payloads: list[Any]) -> list[Block]:
        """Let the other side read these payloads, which go there now: as wires, in place.

        Returns:
            The blocks that this side no longer reads.
        """
        if Placed in map(type, payloads):
            with self._lock:
                self._lend(payloads)
        return self.pop_ended()

    def _lend(self, payloads: list[Any]) -> None:
        leases: dict[Block, Any] = {}
        for position, payload in enumerate(payloads):
            if type(payload) is Placed:
                payloads[position] = wire = payload.wire
                leases[wire[:2]] = payload.lease
        for (number, start), lease in leases.items():
            self._lent.setdefault(number, {}).setdefault(start, []).append(lease)

    def release(self, blocks: list[Block]) -> None:
        """The other side no longer reads these blocks, each as often as it was lent."""
        with self._lock:
            for number, start in blocks:
                lent = self._lent[number]
                lent[start].pop()
                if not lent[start]:
                    del lent[start]
                if not lent:
                    del self._lent[number]

    # -- what this side reads

    def receive(self, payloads: list[Any], released: list[Block] | None = None) -> None:
        """Take in a message: its wires become payloads that keep their memory, in place.

        ``released`` are blocks that the other side no longer reads.
        """
        if released:
            self.release(released)
        if tuple not in map(type, payloads):
            return
        leases: dict[Block, Lease] = {}  # one for each block of a message
        with self._lock:
            for position, wire in enumerate(payloads):
                if type(wire) is not tuple:
                    continue
                window = self._window(wire[0])
                lease = leases.get(wire[:2])
                if lease is None:
                    lease = leases[wire[:2]] = window.lease(wire)
                payloads[position] = Received(window, wire, lease)

    def _window(self, number: int) -> Window:
        return self._windows[number]

    def pop_ended(self) -> list[Block]:
        """The blocks that are no longer in use, each as often as it was sent."""
        blocks: list[Block] = []
        if not self._ended:  # as for most messages
            return blocks
        with self._lock:
            for _ in range(len(self._ended)):
                try:
                    lease = self._ended.popleft()
                except IndexError:  # a finalizer in between emptied it
                    break
                # The garbage collector calls all finalizers of a cycle before it knows whether one
                # revives a part of it, such as a view.
                if _references(lease) > _FEWEST_REFERENCES:
                    self._ended.append(lease)
                elif lease.number in self._windows:
                    self._windows[lease.number].end(lease)
                    blocks.append((lease.number, lease.block))
            return blocks

    def view(self, address: int, size: int) -> memoryview | None:
        """See ``Window.view``."""
        with self._lock:
            views = (window.view(address, size) for window in self._windows.values())
            return next((view for view in views if view is not None), None)

    def fileno(self) -> int:
        """Readable when ``take_in`` has something to do; -1 if it never has."""
        return -1

    def take_in(self) -> bool:
        """Take in memory of third processes; whether more may come."""
        return False

    def close(self) -> None:
        """The other side is gone. What was received can still be read."""
        with self._lock:
            if self.memory is not None:
                self.memory.is_left = True
            self._windows.clear()


#: Makes a worker's end there; picklable.
MakeLink: TypeAlias = Callable[[], MemoryLink]


class SharedMemory:
    """The web process's: an arena for what all workers read, and a link to each of them.

    ``limit`` is for both: half of it for items, half for results, bytes. None for a quarter of the
    machine's memory, 0 for none.
    """

    def __init__(self, limit: int | None) -> None:
        self.size = (default_limit() if limit is None else limit) // 2
        self.arena: Arena | None = None
        if self.size >= PAGE:
            try:
                self.arena = Arena(Memory.new(self.size), "items")
            except OSError as error:
                _log(
                    logging.WARNING,
                    "no shared memory can be had here (%s): large items and results go through "
                    "pipes, which is slower",
                    summary(error),
                )

    def for_worker(self, worker_num: int) -> tuple[MakeLink, MemoryLink] | None:
        """The ends of one of ``worker_num`` workers and of this process; None without memory.

        Raises:
            OSError: there are no descriptors left.
        """
        if self.arena is None:
            return None
        return self._share(self.arena, Memory.new(max(PAGE, self.size // worker_num)))

    def _share(self, arena: Arena, responses: Memory) -> tuple[MakeLink, MemoryLink]:
        make = functools.partial(worker_link, arena.memory, responses)
        return make, MemoryLink(arena, responses)

    def close(self) -> None:
        """Let go of it. What still looks at it, or writes there, can."""
        self.arena = None
