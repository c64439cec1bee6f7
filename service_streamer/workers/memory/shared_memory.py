"""Memory that two processes share, and who may use which part of it until when.

     Arena (one process writes)                        Window (another one reads)
     --------------------------                        --------------------------
     put(parts): take room, copy ─▶ Placed
         its ``wire`` ────────────── message ────────▶ load(wire): views of the pages, no copy
         its ``lease``: held by the payload,               a lease of the reader's own, held
         and for each reader it was told to                by all the views
     when the last one is dropped: room again
     ◀────────────── message ───────────────────────── ended(): what nothing looks at any more

The pages of a block are written once, before anybody reads them, and not again while anybody holds
a lease of it. The memory has no name (``memfd_create``): nothing is ever in ``/dev/shm``, so that
its size does not matter, and the kernel frees it when the last process that has it is dead, however
it died.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Lease", "Memory", "Placed", "Wire", "default_limit", "positions"]

#: Where parts start, so that they are as aligned as any memory that a model gets.
_ALIGNMENT = 64

#: The pickle's stream, if it travels with the message; the block's start and size; where in the
#: memory the parts start, of which the first is the stream if that is among them; their lengths.
Wire: TypeAlias = tuple[bytes | None, int, int, int, tuple[int, ...]]


class Memory:
    """Anonymous memory that other processes can have: a descriptor, closed with the last use of it.

    Pages of it exist once they have been written to. Passed to a new process as an argument.

    Raises:
        OSError, AttributeError: there is no such memory here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("service_streamer", os.MFD_CLOEXEC)
        os.truncate(self.descriptor, size)

    def __reduce__(self) -> Any:
        return _passed, (reduction.DupFd(self.descriptor), self.size)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: when the interpreter ends the module may be gone before its objects are.
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1
        if descriptor >= 0:
            close(descriptor)

    def mapped(self, *, private: bool = False) -> mmap.mmap:
        """All of it, to be read and written.

        Raises:
            OSError: there is no room for it among this process's addresses.
        """
        flags = mmap.MAP_SHARED
        if private:  # and not counted as if all of it would be written to
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(self.descriptor, self.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def _passed(descriptor: Any, size: int) -> Memory:
    memory = Memory.__new__(Memory)
    memory.descriptor, memory.size = descriptor.detach(), size
    return memory


class Lease:
    """Held by whatever needs a block to stay as it is; tells when the last one lets go of it.

    Attributes:
        block: where it starts.
        size: of it, in bytes.
    """

    __slots__ = ("_ended", "block", "size")

    def __init__(self, ended: collections.deque[Any], block: int, size: int) -> None:
        self._ended = ended
        self.block = block
        self.size = size

    def __del__(self) -> None:
        # Perhaps in a finalizer that interrupts any other code: no lock.
        self._ended.append((self.block, self.size))


class Placed:
    """Something large that lies in an arena.

    Attributes:
        wire: what its readers need to know.
        lease: of its block.
    """

    __slots__ = ("lease", "wire")

    def __init__(self, wire: Wire, lease: Lease) -> None:
        self.wire = wire
        self.lease = lease


def positions(lengths: Sequence[int]) -> list[int]:
    """Where parts of such lengths start, one behind the other; at last, where they stop."""
    starts, at = [], 0
    for length in lengths:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        starts.append(at)
        at += length
    return [*starts, at]


def default_limit() -> int:
    """How much memory may be shared if nobody says it, bytes: a quarter of what there is."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the container; v2 and v1
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            sizes.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(sizes) // 4
