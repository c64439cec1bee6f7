"""The writer's side of shared memory: allocates blocks, and copies large payloads there."""

from __future__ import annotations

import bisect
import collections
import contextlib
import mmap
import os
import threading
from typing import Any, NamedTuple

from .payload import Parts
from .shared_memory import Lease, Memory, Placed, positions

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


class _Rows(NamedTuple):
    """A block of adjacent payloads of one size."""

    lease: Lease
    filled: int


class Arena:
    """Allocates blocks of shared memory and writes to them. Any thread.

    Args:
        memory: memory that no one else writes to.

    Attributes:
        rows: number of payloads of one size and one buffer to place side by side; at most 1 gives
            each its own pages.
        is_used: whether anything was ever put there.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rows = 0
        self.is_used = False
        self._map = memory.mapped()
        self._bytes = memoryview(self._map)
        self._extents = Extents(memory.size // PAGE * PAGE)
        self._reach = 0  # end of the existing pages
        self._ended: collections.deque[tuple[int, int]] = collections.deque()
        self._open: dict[int, _Rows] = {}  # by size of a row, least recently used first
        self._lock = threading.RLock()  # reentrant: a user's finalizer may call us
        self._is_busy = False

    @property
    def used(self) -> int:
        """Approximate number of allocated bytes."""
        return self._extents.used

    def reclaim(self, *, keep_rows: bool = True) -> int:
        """Free the blocks that have ended; returns the number of allocated bytes.

        Args:
            keep_rows: whether to keep blocks that are not filled with rows yet.
        """
        with self._lock:
            if not keep_rows:
                self._open.clear()
            self._reclaim()
            return self.used

    def put(self, parts: Parts) -> Placed | None:
        """Copy a payload to shared memory; None if there is no room."""
        stream: bytes | None = None
        chunks = parts.stream
        length = sum(map(len, chunks))
        lengths = [buffer.nbytes for buffer in parts.buffers]
        if length <= _SMALL_STREAM:
            stream, chunks = b"".join(chunks), []
        else:
            lengths.insert(0, length)
        *starts, size = positions(lengths)
        is_row = self.rows > 1 and stream is not None and len(lengths) == 1
        room = self._room(size, is_row=is_row)
        if room is None:
            return None
        self.is_used = True
        lease, start = room
        at = start
        for chunk in chunks:
            self._copy(at, memoryview(chunk))
            at += len(chunk)
        if chunks:
            del starts[0]
        for position, buffer in zip(starts, parts.buffers, strict=True):
            self._copy(start + position, buffer)
        return Placed((stream, lease.block, lease.size, start, (*lengths,)), lease)

    def _copy(self, start: int, source: memoryview) -> None:
        if source.nbytes <= _COPIED_AT_ONCE:
            self._bytes[start : start + source.nbytes] = source
            return
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

    def _block(self, size: int) -> tuple[Lease, int] | None:
        size = rounded(size)
        self._reclaim()
        block = self._extents.take(size)
        while block is None and self._open:  # release blocks kept for more rows
            del self._open[next(iter(self._open))]
            self._reclaim()
            block = self._extents.take(size)
        if block is None or not self._has_pages(block + size):
            if block is not None:
                self._extents.give_back(block, size)
            return None
        return Lease(self._ended, block, size), block

    def _has_pages(self, stop: int) -> bool:
        """Create missing pages: writing without memory for them would kill the process."""
        if stop > self._reach:
            try:
                os.posix_fallocate(self.memory.descriptor, self._reach, stop - self._reach)
            except OSError:
                return False
            self._reach = stop
        return True

    def _reclaim(self) -> None:
        while self._ended:
            self._extents.give_back(*self._ended.popleft())
        cut = self._extents.review()
        if cut is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, cut, self.memory.size - cut)
                self._reach = min(self._reach, cut)

    def _row(self, size: int) -> tuple[Lease, int] | None:
        rows = self._open.pop(size, None)
        if rows is None or rows.filled + size > rows.lease.size:
            wanted = min(_BATCHES_PER_BLOCK * self.rows * size, self._largest)
            room = self._block(wanted) if wanted >= 2 * size else None
            if room is None:
                return None
            rows = _Rows(room[0], 0)
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
        self._open[size] = _Rows(rows.lease, rows.filled + size)
        return rows.lease, rows.lease.block + rows.filled

    @property
    def _largest(self) -> int:
        return self._extents.size // _PARTS_OF_MEMORY


class Lent:
    """The blocks of an arena that a reader may be using. Not thread-safe."""

    def __init__(self) -> None:
        # By block; in memory of a third process by its number and the block.
        self._leases: dict[Any, list[Lease]] = {}

    def lend(self, payloads: list[Any]) -> None:
        """Note the payloads of one message to the reader; those outside the arena are ignored."""
        leases = {one.lease.block: one.lease for one in payloads if type(one) is Placed}
        for block, lease in leases.items():
            self._leases.setdefault(block, []).append(lease)

    def has_of(self, number: int) -> bool:
        """Whether the reader may be using blocks in a third process's memory of this number."""
        return any(type(block) is tuple and block[0] == number for block in self._leases)

    def ended(self, blocks: list[Any]) -> None:
        """Free blocks that the reader released, each as often as it was sent."""
        for block in blocks:
            leases = self._leases[block]
            leases.pop()
            if not leases:
                del self._leases[block]


#: Unit of allocation in bytes: a page of the processor, at least 4096.
PAGE = max(4096, mmap.PAGESIZE)

#: Number of ``take`` between two reviews. Arbitrary: gives memory back after a burst, but not
#: between two batches.
_REVIEW_INTERVAL = 512


def rounded(size: int) -> int:
    """``size`` rounded up to one of few sizes, which reduces fragmentation.

    From 16 pages on, at most an eighth more.
    """
    pages = max(1, -(-size // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE


class Extents:
    """The free parts of ``range(size)``. Not thread-safe.

    Allocation from the bottom reuses recent pages, which exist and may be cached, and leaves the
    top free to be given back.

    Attributes:
        used: allocated bytes.
    """

    __slots__ = ("_free", "_peak", "_reach", "_takes", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._free = [(0, size)] if size else []  # (start, stop), sorted, not adjacent
        self._reach = 0  # end of the used part since the last cut
        self._peak = 0  # the same since the last review
        self._takes = 0

    def take(self, size: int) -> int | None:
        """Allocate ``size`` adjacent bytes; returns their start, or None if there is no room."""
        for index, (start, stop) in enumerate(self._free):
            end = start + size
            if end <= stop:
                if end == stop:
                    del self._free[index]
                else:
                    self._free[index] = (end, stop)
                self.used += size
                self._takes += 1
                self._peak = max(self._peak, end)
                self._reach = max(self._reach, end)
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free an allocation of ``take``."""
        stop = start + size
        free = self._free
        index = bisect.bisect(free, (start, start))
        if index < len(free) and free[index][0] == stop:
            stop = free.pop(index)[1]
        if index and free[index - 1][1] == start:
            index -= 1
            start = free.pop(index)[0]
        free.insert(index, (start, stop))
        self.used -= size

    def review(self) -> int | None:
        """Where to cut off unused memory at the top; None if it is not worth it.

        Checked every ``_REVIEW_INTERVAL`` allocations. Worth it for more than half of the memory.
        """
        if self._takes < _REVIEW_INTERVAL:
            return None
        needed = max(self._peak, self._free[-1][0] if self._is_top_free else self.size)
        self._takes = 0
        self._peak = 0
        if needed > self._reach // 2:
            return None
        self._reach = needed
        return needed

    @property
    def _is_top_free(self) -> bool:
        return bool(self._free) and self._free[-1][1] == self.size
