"""Memory that two processes share: leases of its blocks, and the side that writes to it.

     Arena (one process writes)                        Window (another one reads)
     --------------------------                        --------------------------
     put(parts): allocate, copy ──▶ Placed
         its ``wire`` ────────────── message ────────▶ load(wire): views of the pages, no copy
         its ``lease``: held by the payload,               a lease of the reader, held by all
         and by each reader that got it                    views
     freed with the last lease
     ◀────────────── message ───────────────────────── pop_ended(): blocks without views

A block is written once, before it is read, and not again while there is a lease of it. The memory
has no name (``memfd_create``). So the size of ``/dev/shm`` does not matter, and the kernel frees it
when the last process that has it ends, even by a crash.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..reporting import quiet_log
from .codec import Parts

#: Unit of allocation in bytes: a page of the processor, at least 4096.
PAGE = max(4096, mmap.PAGESIZE)

#: Blocks allocated between two reviews. Arbitrary: gives memory back after a burst, but not between
#: two batches.
_REVIEW_INTERVAL = 512

_MB = 1_000_000

#: Maximum bytes of a stream inside the message.
_SMALL_STREAM = 4096

#: Bytes copied at once; other threads may run in between.
_COPIED_AT_ONCE = 1 << 20

#: Maximum number of open blocks of rows, one per row size. Arbitrary.
_MOST_OPEN = 4

#: Batches per block of rows. One batch in so many spans two blocks, and needs a copy.
_BATCHES_PER_BLOCK = 4

#: A block of rows takes at most this fraction of the memory (1/n).
_PARTS_OF_MEMORY = 8

#: Alignment of parts in bytes, like that of other memory for models.
_ALIGNMENT = 64

#: A block: the number of its memory, which is 0 unless a third process writes to it, and its start.
Block: TypeAlias = tuple[int, int]

#: A payload in a message: the two of its block, the block's size, the start of the parts and their
#: lengths, and the pickle's stream, or None if that is the first part.
Wire: TypeAlias = tuple[int, int, int, int, tuple[int, ...], bytes | None]

_numbers = itertools.count(1)


class Memory:
    """Anonymous memory that can be passed to new processes: a descriptor, closed after use.

    Its pages exist once they have been written to.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.number = next(_numbers)  # what this process calls it; never used again
        self.is_left = False  # the process that writes to it is gone

    @classmethod
    def new(cls, size: int) -> Memory:
        """Raises OSError: the system has no such memory."""
        # Elsewhere the second is missing even where the first is there: no page is given back.
        if not (hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")):
            raise OSError(errno.ENOSYS, "it needs Linux")
        memory = cls(os.memfd_create("service_streamer", os.MFD_CLOEXEC))
        os.truncate(memory.descriptor, size)
        memory.size = size
        return memory

    def __reduce__(self) -> Any:
        return _from_pickle, (reduction.DupFd(self.descriptor),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at interpreter exit, the module may be gone before its objects.
        close(self.descriptor)

    def map(self, *, private: bool = False) -> mmap.mmap:
        """Map all of it for reading and writing. Raises OSError: there are no addresses left."""
        flags = mmap.MAP_SHARED
        if private:  # without reserving memory for all pages
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(self.descriptor, self.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def _from_pickle(descriptor: Any) -> Memory:
    return Memory(descriptor.detach())


class Lease:
    """Keeps a block unchanged while it is referenced, as by all views of it; reports its end."""

    __slots__ = ("__weakref__", "_ended", "block", "is_copied", "number", "size", "start", "stop")

    # A reader sets these:
    number: int  # of the memory
    start: int  # of the viewed part of the memory
    stop: int
    is_copied: bool  # there are copies instead of views

    def __init__(self, ended: Ended, block: int, size: int) -> None:
        self._ended = ended
        self.block = block
        self.size = size

    def __del__(self) -> None:
        # A finalizer may interrupt any code: no lock.
        self._ended.append(self)


#: Leases that have ended, or have seemed to.
Ended: TypeAlias = collections.deque[Lease]


class Placed(NamedTuple):
    """A large payload in shared memory, as its writer has it; a reader has a ``Received``."""

    wire: Wire
    lease: Any


def positions(lengths: Sequence[int]) -> list[int]:
    """Aligned starts of consecutive parts of these lengths, and the end of the last one."""
    starts, at = [], 0
    for length in lengths:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        starts.append(at)
        at += length
    return [*starts, at]


def default_limit() -> int:
    """Default limit of shared memory in bytes: a quarter of the machine's or container's memory.

    0 if that is not known.
    """
    sizes = []
    with contextlib.suppress(OSError, ValueError):  # not every system says it
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the container; v2 and v1
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            sizes.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(sizes, default=0) // 4


class Arena:
    """Allocates blocks of shared memory and writes to them. Any thread.

    No one else writes to its memory. Raises OSError: that cannot be mapped.
    """

    def __init__(self, memory: Memory, contents: str) -> None:
        self.memory = memory
        #: How many payloads of one size and one buffer to place side by side; at most 1 gives each
        #: its own pages.
        self.rows = 0
        self._contents = contents
        self._log_once = quiet_log(__name__, once=True)
        self._map = memory.map()
        self._bytes = memoryview(self._map)
        self._pages = bytearray(memory.size // PAGE)  # by page: 1 if it is in a block
        self._first_free = 0  # no page below is free
        self._used = 0  # bytes in blocks
        self._reach = 0  # end of the existing pages
        self._peak = 0  # end of the used part since the last review
        self._takes = 0  # blocks allocated since the last review
        self._ended: Ended = collections.deque()
        # Blocks of adjacent payloads of one size, by that, least recently used first, and how many
        # bytes are filled.
        self._open: dict[int, tuple[Lease, int]] = {}
        self._lock = threading.RLock()  # reentrant: a user's finalizer may call us
        self._is_busy = False

    def reclaim(self) -> int:
        """Free the blocks that have ended; returns the number of allocated bytes."""
        with self._lock:
            while self._ended:
                lease = self._ended.popleft()
                page, count = lease.block // PAGE, lease.size // PAGE
                self._pages[page : page + count] = b"\0" * count
                if page < self._first_free:
                    self._first_free = page
                self._used -= lease.size
            if self._takes >= _REVIEW_INTERVAL:
                self._review()
            return self._used

    def put(self, parts: Parts) -> Placed | None:
        """Copy a payload to shared memory; None if there is no room."""
        stream: bytes | None = None
        chunks = parts.stream
        length = sum(map(len, chunks))
        buffers = [memoryview(each) for each in parts.buffers]
        lengths = [buffer.nbytes for buffer in buffers]
        if length <= _SMALL_STREAM:
            stream, chunks = b"".join(chunks), []
        else:
            lengths.insert(0, length)
        *starts, size = positions(lengths)
        is_row = self.rows > 1 and stream is not None and len(lengths) == 1
        room = self._room(size, is_row=is_row)
        if room is None:
            self._log_once(
                logging.WARNING,
                "%.1f MB do not fit into the shared memory for %s, of which %.1f of %.1f MB are in "
                "use: it goes through a pipe, which is slower. This is said once; "
                "shared_memory_limit sets how much there is",
                size / _MB, self._contents, self._used / _MB, self.memory.size / _MB,
            )  # fmt: skip
            return None
        lease, start = room
        at = start
        for chunk in chunks:
            self._copy(at, memoryview(chunk))
            at += len(chunk)
        if chunks:
            del starts[0]
        for position, buffer in zip(starts, buffers, strict=True):
            self._copy(start + position, buffer)
        return Placed((0, lease.block, lease.size, start, (*lengths,), stream), lease)

    def _copy(self, start: int, source: memoryview) -> None:
        for done in range(0, source.nbytes, _COPIED_AT_ONCE):
            part = source[done : done + _COPIED_AT_ONCE]
            self._bytes[start + done : start + done + part.nbytes] = part

    def _room(self, size: int, *, is_row: bool) -> tuple[Lease, int] | None:
        """Allocate; returns the lease of a block, and the position."""
        with self._lock:
            if self._is_busy:  # this thread was interrupted inside this block
                return None
            self._is_busy = True
            try:
                return (self._row(size) if is_row else None) or self._block(size)
            finally:
                self._is_busy = False

    # The rest is called with the lock held.

    def _review(self) -> None:
        """Give the pages at the top back if more than half of all was not needed for a while."""
        top = self._pages.rfind(1, 0, self._reach // PAGE) + 1
        needed = max(self._peak, top * PAGE)
        self._takes = self._peak = 0
        if needed <= self._reach // 2:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, needed, self.memory.size - needed)
                self._reach = needed

    def _block(self, size: int) -> tuple[Lease, int] | None:
        """The lowest free pages: they exist and may be cached, and the top can be given back."""
        size = round_up(size)
        count = size // PAGE
        wanted = b"\0" * count
        self.reclaim()
        page = self._pages.find(wanted, self._first_free)
        while page < 0 and self._open:  # release blocks kept for more rows
            del self._open[next(iter(self._open))]
            self.reclaim()
            page = self._pages.find(wanted, self._first_free)
        if page < 0:
            return None
        block = page * PAGE
        stop = block + size
        if stop > self._reach:  # writing without memory for the pages would kill the process
            try:
                os.posix_fallocate(self.memory.descriptor, self._reach, stop - self._reach)
            except OSError:
                return None
            self._reach = stop
        self._peak = max(self._peak, stop)
        # No call before that of the lease: a signal handler may raise after one, and nothing would
        # free the pages.
        self._pages[page : page + count] = b"\1" * count
        if page == self._first_free:
            self._first_free += count
        self._used += size
        self._takes += 1
        return Lease(self._ended, block, size), block

    def _row(self, size: int) -> tuple[Lease, int] | None:
        lease, filled = self._open.pop(size, (None, 0))
        if lease is None or filled + size > lease.size:
            largest = self.memory.size // _PARTS_OF_MEMORY
            wanted = min(_BATCHES_PER_BLOCK * self.rows * size, largest)
            room = self._block(wanted) if wanted >= 2 * size else None
            if room is None:
                return None
            lease, filled = room[0], 0
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
        self._open[size] = lease, filled + size
        return lease, lease.block + filled


def round_up(size: int) -> int:
    """``size`` rounded up to one of few sizes, which reduces fragmentation.

    From 16 pages on, at most an eighth more.
    """
    pages = max(1, -(-size // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE
