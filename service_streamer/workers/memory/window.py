"""The reader's side of shared memory: views of blocks, and the report of their release.

A reader may write to what it gets. If another reader may need the same data later (an item that is
computed again after a crash), the mapping is private: a write copies the page, and the copy is
dropped with the last view.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pickle import loads
from typing import Any, TypeAlias

from .arena import Lease, Memory, Wire, positions

#: Highest bytes of /proc/self/pagemap for pages that are no copies: absent, or present (bit 63) and
#: of a file or shared (61), and not swapped out (62).
#: https://docs.kernel.org/admin-guide/mm/pagemap.html
_CLEAN = bytes(
    byte for byte in range(256) if not byte & 0xC0 or (byte & 0xA0 == 0xA0 and not byte & 0x40)
)

#: One ctypes type per block size: making one is expensive.
_region_types: dict[int, Any] = {}


#: Leases that have ended, or have seemed to.
Ended: TypeAlias = "collections.deque[ReadLease]"


class ReadLease(Lease):
    """Referenced by all views of a block; its end means that there are no more views.

    A finalizer may come too early: the garbage collector calls all finalizers of a cycle before it
    knows whether one revives a part of it. So ``pop_ended`` counts the references of what it kept.

    Attributes:
        number: that of the memory.
        start, stop: the viewed part of the memory; empty at first.
        is_copied: whether readers get copies instead of views.
    """

    __slots__ = ("__weakref__", "is_copied", "number", "start", "stop")

    def __init__(
        self, ended: Ended, number: int, block: int, size: int, *, is_copied: bool
    ) -> None:
        super().__init__(ended, block, size)
        self.number = number
        self.start, self.stop = block + size, block
        self.is_copied = is_copied


def _references(lease: ReadLease) -> int:
    return sys.getrefcount(lease)


def _fewest_references() -> int:
    """Reference count of a lease in one variable, which depends on Python's version."""
    lease = ReadLease(collections.deque(), 0, 0, 0, is_copied=True)
    return _references(lease)


_FEWEST_REFERENCES = _fewest_references()


def pop_ended(ended: Ended) -> list[ReadLease]:
    """Take out the leases that have ended."""
    leases = []
    for _ in range(len(ended)):
        try:
            lease = ended.popleft()
        except IndexError:  # a finalizer in between emptied it
            break
        if _references(lease) > _FEWEST_REFERENCES:  # a finalizer has revived a view
            ended.append(lease)
        else:
            leases.append(lease)
    return leases


class Window:
    """Reads payloads from another process's arena.

    ``parts`` and ``copies`` are for any thread, the other methods for one thread at a time.

    Args:
        memory: that of the arena.
        ended: where leases report their end; see ``pop_ended``.
        private: whether readers' writes are hidden from later readers; also enables ``view``.
    """

    def __init__(self, memory: Memory, ended: Ended, *, private: bool) -> None:
        self.memory = memory
        self._ended = ended
        self._viewed: dict[int, weakref.ref[ReadLease]] = {}  # by block, if its views are private
        self._map: mmap.mmap | None = None
        self._address = 0  # of a private mapping; 0 if there is none
        self._pagemap = -1  # tells which of its pages were written to
        with contextlib.suppress(OSError):  # then everything is copied
            self._map = memory.map(private=private)
            if private:
                self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
                self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._pagemap >= 0:
            close(self._pagemap)

    def lease(self, wire: Wire) -> ReadLease:
        """Count a block as in use until the returned lease is dropped.

        One lease per block and message; payloads of a batch in one block share it.
        """
        _, block, size, _, _, number = wire
        # A reader of an earlier batch's rows may have written to the page that its last row shares
        # with our first.
        is_copied = self._map is None or block in self._viewed
        lease = ReadLease(self._ended, number, block, size, is_copied=is_copied)
        if self._address and not is_copied:
            self._viewed[block] = weakref.ref(lease)
        return lease

    def parts(self, wire: Wire, lease: ReadLease) -> list[Any]:
        """The stream and the buffers of a payload's pickle, as bytes that keep the lease alive."""
        if lease.is_copied:
            return self.copies(wire)
        stream, block, _, start, lengths, *_ = wire
        *starts, end = positions(lengths)
        lease.start, lease.stop = min(lease.start, start), max(lease.stop, start + end)
        region, start = self._region(lease), start - block
        views = [region[start + at : start + at + n] for at, n in zip(starts, lengths, strict=True)]
        return views if stream is None else [stream, *views]

    def copies(self, wire: Wire) -> list[Any]:
        """The same as they were sent, whatever readers have written to them since."""
        stream, _, _, start, lengths, *_ = wire
        starts = positions(lengths)[:-1]
        copies = [self._copy(start + at, n) for at, n in zip(starts, lengths, strict=True)]
        return copies if stream is None else [stream, *copies]

    def view(self, address: int, size: int) -> memoryview | None:
        """The memory at an address, if all of it is in use in one block."""
        start = address - self._address
        for reference in [*self._viewed.values()]:
            lease = reference()
            if lease is None or lease in self._ended:
                continue
            if lease.start <= start and start + size <= lease.stop:
                return self._region(lease)[start - lease.block : start - lease.block + size]
        return None

    def end(self, lease: ReadLease) -> None:
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
            entries = os.pread(self._pagemap, length, (self._address // size + first) * 8)
            highest = entries[7::8] if sys.byteorder == "little" else entries[::8]
            if len(entries) == length and not highest.translate(None, _CLEAN):
                return
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED, first * size, (last - first) * size)

    def _region(self, lease: ReadLease) -> memoryview:
        """A lease's block. Views of it reference the ctypes object, which references the lease."""
        kind: Any = _region_types.get(lease.size)
        if kind is None:
            kind = _region_types[lease.size] = ctypes.c_char * lease.size
        region: Any = kind.from_buffer(self._map, lease.block)
        region.lease = lease
        return memoryview(region).cast("B")

    def _copy(self, start: int, length: int) -> bytearray:
        copy = bytearray(length)
        done = 0
        while done < length:
            rest = memoryview(copy)[done:]
            count = os.preadv(self.memory.descriptor, [rest], start + done)
            if not count:
                raise EOFError("shared memory is shorter than expected")
            done += count
        return copy


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
