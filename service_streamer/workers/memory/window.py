"""The reader's side of memory that processes share: looks at what is there, and says until when.

A reader may do as it likes with what it gets, also write to it. Where the same may be read again
(an item that is computed again, after a crash), its mapping is a private one: what it writes is a
copy of its own of that page, which is dropped when nothing looks at it any more.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

from .pinning import Pinned
from .shared_memory import Memory, Wire, positions

__all__ = ["Look", "Window"]

#: As many types as there are sizes of blocks: making one costs more than all the rest.
_region_types: dict[int, Any] = {}


class Look:
    """Held by all that looks at a part of a block: when it is let go of, nothing does any more.

    Attributes:
        block: where it starts.
        size: of it, in bytes.
        start, stop: the part of the memory that is looked at; empty before there is any.
        is_copied: whether copies are to be looked at.
    """

    __slots__ = ("__weakref__", "_ended", "block", "is_copied", "size", "start", "stop")

    def __init__(
        self, ended: collections.deque[Look], block: int, size: int, *, is_copied: bool
    ) -> None:
        self._ended = ended
        self.block = block
        self.size = size
        self.start, self.stop = block + size, block
        self.is_copied = is_copied

    def __del__(self) -> None:
        # Perhaps in the midst of any other code: no lock. And perhaps too early: of a circle, the
        # garbage collector calls all finalizers before it knows that none of them saves a part of
        # it. So it is kept, and asked how many references there are to it.
        self._ended.append(self)


def _references(look: Look) -> int:
    return sys.getrefcount(look)


def _fewest_references() -> int:
    """Those to a look that one variable has; how many that are depends on Python's version."""
    look = Look(collections.deque(), 0, 0, is_copied=True)
    return _references(look)


_FEWEST_REFERENCES = _fewest_references()


class Window:
    """Reads what an arena of another process has put down.

    ``load`` is for any thread, the rest for one at a time.

    Args:
        private: whether readers may write there without later readers seeing it. Of these it is
            also known where in memory they are.

    Attributes:
        is_used: whether anything has ever been looked at.
    """

    def __init__(self, memory: Memory, *, private: bool = False) -> None:
        self.is_used = False
        self._memory = memory
        self._ended: collections.deque[Look] = collections.deque()
        self._looks: collections.Counter[int] = collections.Counter()  # by block, not yet told
        self._seen: weakref.WeakValueDictionary[int, Look] = weakref.WeakValueDictionary()
        self._map: mmap.mmap | None = None
        self._address = 0  # of the mapping; not asked for if it is of no use
        self._pages: _PrivatePages | None = None
        self._pinned: Pinned | None = None
        with contextlib.suppress(OSError):  # then everything is copied
            self._map = memory.mapped(private=private)
            if private:
                self._address = _address(self._map)
                self._pages = _PrivatePages(self._map, self._address)

    def pin(self, runtime: Any) -> bool:
        """Register it with CUDA from now on; before the first look. Then it is not private.

        Returns:
            Whether that is so now.

        Args:
            runtime: see ``Pinned``.
        """
        with contextlib.suppress(OSError):
            self._map = self._memory.mapped()
            self._address = _address(self._map)
            self._pages = None
            self._pinned = Pinned(runtime, self._address, self._memory.size)
        return self._pinned is not None

    def look(self, wire: Wire) -> Look:
        """Count its block as looked at until what is returned is dropped.

        One for each time that a block is told; things of a batch that lie in one block share it.
        """
        _, block, size, _, _ = wire
        # If an earlier batch's rows are still looked at, whoever does may have written to the page
        # that the last of them shares with our first.
        is_copied = self._map is None or (self._pages is not None and block in self._looks)
        self.is_used = True
        self._looks[block] += 1
        look = Look(self._ended, block, size, is_copied=is_copied)
        if self._address and not is_copied:
            self._seen[block] = look
            if self._pinned is not None:
                self._pinned.cover(block + size)
        return look

    def load(self, wire: Wire, look: Look) -> Any:
        """What was put down there. Its memory is under the look until nothing looks at it.

        Raises:
            Exception: whatever unpickling it raises.
        """
        stream, *buffers = self.parts(wire, look)
        return pickle.loads(stream, buffers=buffers)

    def parts(self, wire: Wire, look: Look) -> list[Any]:
        """The stream of its pickle and the buffers, as bytes."""
        stream, block, _, start, lengths = wire
        *starts, end = positions(lengths)
        parts: list[Any] = [] if stream is None else [stream]
        if look.is_copied:
            parts += [self._copy(start + at, n) for at, n in zip(starts, lengths, strict=True)]
        else:
            look.start, look.stop = min(look.start, start), max(look.stop, start + end)
            region, start = self._region(look), start - block
            parts += [
                region[start + at : start + at + n] for at, n in zip(starts, lengths, strict=True)
            ]
        return parts

    def view(self, address: int, size: int) -> memoryview | None:
        """The memory there, if all of it is what somebody looks at, in one block."""
        start = address - self._address
        for look in self._seen.values():
            is_part = look.start <= start and start + size <= look.stop
            if is_part and look not in self._ended:
                return self._region(look)[start - look.block : start - look.block + size]
        return None

    def ended(self) -> list[int]:
        """The blocks that are not looked at any more; each as often as it was told."""
        blocks = []
        for _ in range(len(self._ended)):
            try:
                look = self._ended.popleft()
            except IndexError:  # a finalizer that came in between was here, too
                break
            if _references(look) > _FEWEST_REFERENCES:  # some finalizer has saved what holds it
                self._ended.append(look)
                continue
            blocks.append(look.block)
            self._looks[look.block] -= 1
            if not self._looks[look.block]:
                del self._looks[look.block]
            if self._pages is not None and look.start < look.stop:
                try:
                    self._pages.drop(look.start, look.stop)
                except OSError:  # all pages of this process are locked, say
                    self._map = None  # so everything is copied from now on
        return blocks

    def _region(self, look: Look) -> memoryview:
        """All of its block. Views of it hold the object that it is of, and that one the look."""
        kind: Any = _region_types.get(look.size)
        if kind is None:
            kind = _region_types[look.size] = ctypes.c_char * look.size
        region: Any = kind.from_buffer(self._map, look.block)
        region.look = look
        return memoryview(region).cast("B")

    def _copy(self, start: int, length: int) -> bytearray:
        copy = bytearray(length)
        done = 0
        while done < length:
            rest = memoryview(copy)[done:]
            count = os.preadv(self._memory.descriptor, [rest], start + done)
            if not count:
                raise EOFError("shared memory is shorter than it should be")
            done += count
        return copy


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class _PrivatePages:
    """Knows which pages of a private mapping are copies, since they were written to."""

    #: What the kernel says about a page in the highest byte of 64 bits, if it is no such copy: that
    #: it is not there, or there (bit 63) and a file's or shared (61); not swapped out (62).
    #: https://docs.kernel.org/admin-guide/mm/pagemap.html
    _CLEAN = bytes(
        byte for byte in range(256) if not byte & 0xC0 or (byte & 0xA0 == 0xA0 and not byte & 0x40)
    )

    def __init__(self, mapping: mmap.mmap, address: int) -> None:
        self._address = address
        self._mapping = mapping
        self._size = mmap.PAGESIZE
        self._pagemap = -1
        with contextlib.suppress(OSError):  # then all pages are taken for copies
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._pagemap >= 0:
            close(self._pagemap)

    def drop(self, start: int, stop: int) -> None:
        """Have the pages from ``start`` to ``stop`` show again what all others see."""
        start = start // self._size * self._size
        stop = -(-stop // self._size) * self._size
        if self._has_copies(start, stop):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _has_copies(self, start: int, stop: int) -> bool:
        """Asked for, since dropping pages that are none means to have them mapped anew."""
        length = (stop - start) // self._size * 8
        with contextlib.suppress(OSError):
            told = os.pread(self._pagemap, length, (self._address + start) // self._size * 8)
            if len(told) == length:
                highest = told[7::8] if sys.byteorder == "little" else told[::8]
                return bool(highest.translate(None, self._CLEAN))
        return True
