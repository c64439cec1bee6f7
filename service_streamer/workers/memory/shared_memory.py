"""Memory shared by two processes, and leases of its blocks.

     Arena (one process writes)                        Window (another one reads)
     --------------------------                        --------------------------
     put(parts): allocate, copy ──▶ Placed
         its ``wire`` ────────────── message ────────▶ load(wire): views of the pages, no copy
         its ``lease``: held by the payload,               a lease of the reader, held by all
         and by each reader that got it                    views
     freed with the last lease
     ◀────────────── message ───────────────────────── ended(): blocks without views

A block is written once, before it is read, and not again while there is a lease of it. The memory
has no name (``memfd_create``). So the size of ``/dev/shm`` does not matter, and the kernel frees it
when the last process that has it ends, even by a crash.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, TypeAlias

#: Alignment of parts in bytes, like that of other memory for models.
_ALIGNMENT = 64

#: The pickle's stream, if it is in the message; the block's start and size; the start of the parts,
#: the first of which is the stream unless it is in the message; their lengths. In memory that a
#: third process has made, its number follows: see ``passing``.
Wire: TypeAlias = (
    tuple[bytes | None, int, int, int, tuple[int, ...]]
    | tuple[bytes | None, int, int, int, tuple[int, ...], int]
)

_numbers = itertools.count(1)


class Memory:
    """Anonymous memory that can be passed to new processes: a descriptor, closed after use.

    Its pages exist once they have been written to.

    Attributes:
        number: what this process calls it; never used again.
        is_left: whether the process is gone that writes to it.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        # Elsewhere the second is missing even where the first is there: no page is given back.
        if not (hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")):
            raise OSError(errno.ENOSYS, "it needs Linux")
        self._hold(os.memfd_create("service_streamer", os.MFD_CLOEXEC), size)
        os.truncate(self.descriptor, size)

    def _hold(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.number, self.is_left = next(_numbers), False

    @classmethod
    def received(cls, descriptor: int) -> Memory:
        """Memory of another process, which this one owns a descriptor of from now on."""
        memory = cls.__new__(cls)
        memory._hold(descriptor, os.fstat(descriptor).st_size)
        return memory

    def __reduce__(self) -> Any:
        return _passed, (reduction.DupFd(self.descriptor), self.size)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at interpreter exit, the module may be gone before its objects.
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1
        if descriptor >= 0:
            close(descriptor)

    def mapped(self, *, private: bool = False) -> mmap.mmap:
        """Map all of it for reading and writing.

        Raises:
            OSError: this process's address space has no room.
        """
        flags = mmap.MAP_SHARED
        if private:  # without reserving memory for all pages
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(self.descriptor, self.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def _passed(descriptor: Any, size: int) -> Memory:
    memory = Memory.__new__(Memory)
    memory._hold(descriptor.detach(), size)
    return memory


class Lease:
    """Keeps a block unchanged while it is referenced; reports its end.

    Attributes:
        block: start of the block.
        size: bytes of the block.
    """

    __slots__ = ("_ended", "block", "size")

    def __init__(self, ended: collections.deque[Any], block: int, size: int) -> None:
        self._ended = ended
        self.block = block
        self.size = size

    def __del__(self) -> None:
        # A finalizer may interrupt any code: no lock.
        self._ended.append((self.block, self.size))


class Placed:
    """A large payload in an arena.

    Attributes:
        wire: description for its readers.
        lease: lease of its block; of another kind in memory of a third process.
    """

    __slots__ = ("lease", "wire")

    def __init__(self, wire: Wire, lease: Any) -> None:
        self.wire = wire
        self.lease = lease


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
