"""The reader's side of shared memory: views of blocks, the report of their release.

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
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

from .shared_memory import Memory, Wire, positions

#: One ctypes type per block size: making one is expensive.
_region_types: dict[int, Any] = {}


class Look:
    """Referenced by all views of a block; its end means that there are no more views.

    Attributes:
        block: start of the block.
        size: bytes of the block.
        start, stop: the viewed part of the memory; empty at first.
        is_copied: whether readers get copies instead of views.
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
        # A finalizer may interrupt any code: no lock. It may also come too early: the garbage
        # collector calls all finalizers of a cycle before it knows whether one revives a part of
        # it. So this object is kept, and ``pop_ended`` counts its references.
        self._ended.append(self)


def _references(look: Look) -> int:
    return sys.getrefcount(look)


def _fewest_references() -> int:
    """Reference count of a look in one variable, which depends on Python's version."""
    look = Look(collections.deque(), 0, 0, is_copied=True)
    return _references(look)


_FEWEST_REFERENCES = _fewest_references()


class Window:
    """Reads payloads from another process's arena.

    ``load`` is for any thread, the other methods for one thread at a time.

    Args:
        private: whether readers' writes are hidden from later readers; also enables ``view``.

    Attributes:
        memory: that of the arena.
        is_used: whether anything was ever read.
    """

    def __init__(self, memory: Memory, *, private: bool = False) -> None:
        self.is_used = False
        self.memory = memory
        self._ended: collections.deque[Look] = collections.deque()
        self._looks: collections.Counter[int] = collections.Counter()  # by block, not yet reported
        self._seen: weakref.WeakValueDictionary[int, Look] = weakref.WeakValueDictionary()
        self._map: mmap.mmap | None = None
        self._address = 0  # of the mapping; 0 if unused
        self._pages: _PrivatePages | None = None
        with contextlib.suppress(OSError):  # then everything is copied
            self._map = memory.mapped(private=private)
            if private:
                self._address = _address(self._map)
                self._pages = _PrivatePages(self._map, self._address)

    def look(self, wire: Wire) -> Look:
        """Count a block as in use until the returned look is dropped.

        One look per block and message; payloads of a batch in one block share it.
        """
        _, block, size, *_ = wire
        # A reader of an earlier batch's rows may have written to the page that its last row shares
        # with our first.
        is_copied = self._map is None or (self._pages is not None and block in self._looks)
        self.is_used = True
        self._looks[block] += 1
        look = Look(self._ended, block, size, is_copied=is_copied)
        if self._address and not is_copied:
            self._seen[block] = look
        return look

    def load(self, wire: Wire, look: Look) -> Any:
        """Load a payload, whose memory keeps the look alive.

        Raises:
            Exception: whatever unpickling it raises.
        """
        stream, *buffers = self.parts(wire, look)
        return pickle.loads(stream, buffers=buffers)

    def load_again(self, wire: Wire) -> Any:
        """Load a copy of a payload as it was sent, whatever readers have written to it since."""
        _, block, size, *_ = wire
        return self.load(wire, Look(collections.deque(), block, size, is_copied=True))

    def parts(self, wire: Wire, look: Look) -> list[Any]:
        """The stream and the buffers of a payload's pickle, as bytes."""
        stream, block, _, start, lengths, *_ = wire
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
        """The memory at an address, if all of it is in use in one block."""
        start = address - self._address
        for look in self._seen.values():
            is_part = look.start <= start and start + size <= look.stop
            if is_part and look not in self._ended:
                return self._region(look)[start - look.block : start - look.block + size]
        return None

    def pop_ended(self) -> list[int]:
        """The blocks that are no longer in use, each as often as it was sent."""
        blocks = []
        for _ in range(len(self._ended)):
            try:
                look = self._ended.popleft()
            except IndexError:  # a finalizer in between emptied it
                break
            if _references(look) > _FEWEST_REFERENCES:  # a finalizer has revived a view
                self._ended.append(look)
                continue
            blocks.append(look.block)
            self._looks[look.block] -= 1
            if not self._looks[look.block]:
                del self._looks[look.block]
            if self._pages is not None and look.start < look.stop:
                try:
                    self._pages.drop(look.start, look.stop)
                except OSError:  # such as locked pages
                    self._map = None  # copy everything from now on
        return blocks

    def _region(self, look: Look) -> memoryview:
        """A look's block. Views of it reference the ctypes object, which references the look."""
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
            count = os.preadv(self.memory.descriptor, [rest], start + done)
            if not count:
                raise EOFError("shared memory is shorter than expected")
            done += count
        return copy


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class _PrivatePages:
    """Finds and drops the pages of a private mapping that were written to."""

    #: Highest bytes of /proc/self/pagemap for pages that are no copies: absent, or present (bit 63)
    #: and of a file or shared (61), and not swapped out (62).
    #: https://docs.kernel.org/admin-guide/mm/pagemap.html
    _CLEAN = bytes(
        byte for byte in range(256) if not byte & 0xC0 or (byte & 0xA0 == 0xA0 and not byte & 0x40)
    )

    def __init__(self, mapping: mmap.mmap, address: int) -> None:
        self._address = address
        self._mapping = mapping
        self._size = mmap.PAGESIZE
        self._pagemap = -1
        with contextlib.suppress(OSError):  # then all pages count as copies
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._pagemap >= 0:
            close(self._pagemap)

    def drop(self, start: int, stop: int) -> None:
        """Drop the copies of the pages from ``start`` to ``stop``."""
        start = start // self._size * self._size
        stop = -(-stop // self._size) * self._size
        if self._has_copies(start, stop):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _has_copies(self, start: int, stop: int) -> bool:
        """Whether there are copies: dropping other pages would map them again."""
        length = (stop - start) // self._size * 8
        with contextlib.suppress(OSError):
            entries = os.pread(self._pagemap, length, (self._address + start) // self._size * 8)
            if len(entries) == length:
                highest = entries[7::8] if sys.byteorder == "little" else entries[::8]
                return bool(highest.translate(None, self._CLEAN))
        return True
