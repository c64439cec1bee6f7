"""Which parts of a range are free: room is given out from the bottom up. Pure.

From the bottom, so that what was used last is used again first: its pages are there already, and
perhaps in the processor's caches; and so that what is above can be given back.
"""

from __future__ import annotations

import bisect
import mmap

__all__ = ["PAGE", "Extents", "rounded"]

#: What memory is shared out in, bytes: the processor's pages, of which some have more than others.
PAGE = max(4096, mmap.PAGESIZE)

#: After so many ``take`` it is looked at how much of the range they needed. Arbitrary: often enough
#: to give back after a burst, and seldom enough not to give back between two batches.
_REVIEW_INTERVAL = 512


def rounded(size: int) -> int:
    """The size that room is taken in for ``size`` bytes: an eighth more at most, from 16 pages on.

    Few different sizes fit better into what others have left.
    """
    pages = max(1, -(-size // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE


class Extents:
    """The free parts of ``range(size)``. Not thread-safe.

    Attributes:
        used: how much is taken.
    """

    __slots__ = ("_free", "_peak", "_reach", "_takes", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._free = [(0, size)] if size else []  # start and stop of each, in order, none touching
        self._reach = 0  # up to where it has been used, since the last cut
        self._peak = 0  # the same since the last review
        self._takes = 0

    def take(self, size: int) -> int | None:
        """The start of ``size`` that were free and adjacent; None if there are none."""
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
        """What ``take`` has given, and whole."""
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
        """Now and then, where to cut off what has not been needed for long; else None.

        What is above holds nothing. Only worth it if that is more than half of it.
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
