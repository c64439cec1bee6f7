"""The writer's side of memory that processes share: finds room, and copies what is large there."""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import threading
from typing import Any, NamedTuple

from .extents import PAGE, Extents, rounded
from .payload import Parts
from .shared_memory import Lease, Memory, Placed, positions

__all__ = ["Arena", "Lent"]

#: A stream of at most so many bytes travels with the message.
_SMALL_STREAM = 4096

#: How much is copied at once, bytes: in between, other threads may have the interpreter.
_COPIED_AT_ONCE = 1 << 20

#: How many blocks of rows are open at a time, each for another size. Arbitrary.
_MOST_OPEN = 4

#: Of how many batches the rows fit into one block: one batch in so many begins in one block and
#: ends in the next, and has to be put together by a copy.
_BATCHES_PER_BLOCK = 4

#: A block of rows takes at most one part in so many of the memory.
_PARTS_OF_MEMORY = 8


class _Rows(NamedTuple):
    """A block for things of one size, each right behind the one before."""

    lease: Lease
    filled: int


class Arena:
    """Shares out memory and writes to it. Any thread.

    Args:
        memory: of which it is the only one to write.

    Attributes:
        rows: how many things of one size are to lie side by side, if each has one buffer only; at
            most 1 for each on pages of its own.
        is_used: whether anything has ever been put there.
        is_kept: whether pages that are not needed any more are kept all the same.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.rows = 0
        self.is_used = self.is_kept = False
        self._map = memory.mapped()
        self._bytes = memoryview(self._map)
        self._extents = Extents(memory.size // PAGE * PAGE)
        self._reach = 0  # up to where there are pages
        self._ended: collections.deque[tuple[int, int]] = collections.deque()
        self._open: dict[int, _Rows] = {}  # by the size of a row, the last one used last
        self._lock = threading.RLock()  # a finalizer of a user's may call us while it is held
        self._is_busy = False

    @property
    def used(self) -> int:
        """How many bytes are taken, about."""
        return self._extents.used

    def put(self, parts: Parts) -> Placed | None:
        """Copy it to where its readers can see it; None if there is no room."""
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
        """The lease of a block, and where in the memory there is room."""
        with self._lock:
            if self._is_busy:  # with what this very thread was at when it was interrupted
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
        while block is None and self._open:  # those that nothing lies in are only kept to be filled
            del self._open[next(iter(self._open))]
            self._reclaim()
            block = self._extents.take(size)
        if block is None or not self._has_pages(block + size):
            if block is not None:
                self._extents.give_back(block, size)
            return None
        return Lease(self._ended, block, size), block

    def _has_pages(self, stop: int) -> bool:
        """Make those that are missing. To write where there is no memory for them would kill us."""
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
        if cut is not None and not self.is_kept:
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
    """Which blocks of an arena a reader may be looking at. Not thread-safe."""

    def __init__(self) -> None:
        self._leases: dict[int, list[Lease]] = {}

    def lend(self, payloads: list[Any]) -> None:
        """The reader is told of these, in one message; those that lie in no arena are ignored."""
        leases = {one.lease.block: one.lease for one in payloads if type(one) is Placed}
        for block, lease in leases.items():
            self._leases.setdefault(block, []).append(lease)

    def ended(self, blocks: list[int]) -> None:
        """The reader says that it does not look at these any more; each as often as it was told."""
        for block in blocks:
            leases = self._leases[block]
            leases.pop()
            if not leases:
                del self._leases[block]
