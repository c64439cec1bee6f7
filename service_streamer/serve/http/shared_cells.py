"""The cells of all API keys, in memory that all web processes of a service have."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from .quotas import CELLS, new_cells

#: Keys that there is room for, including those that were used before and are gone. Later ones are
#: limited by each process alone.
SLOTS = 4096


def cells_needed(processes: int) -> int:
    """Numbers in an array for ``SharedCells``."""
    return SLOTS * (1 + CELLS + processes)


class SharedCells:
    """Finds the cells of a key by its digest. For one web process.

    A slot is a number made of the digest, then the key's cells. All processes read the same file,
    so they look for the same slots in the same order. Only if they claim one for two keys at the
    same moment do these keys share it, until the service ends.

    Args:
        array: ``multiprocessing.RawArray("d", cells_needed(processes))``, which no process has used
            before the first one.
        number: of this process. Its open requests are none: an earlier process of that number died.
            So whoever sees it die makes one as well; there may be no later process.
    """

    def __init__(self, array: Any, number: int, processes: int) -> None:
        self.number = number
        self._processes = processes
        self._width = 1 + CELLS + processes
        self._cells = memoryview(array).cast("B").cast("d")
        for slot in range(SLOTS):
            self._cells[slot * self._width + 1 + CELLS + number] = 0.0

    def of(self, digest: bytes) -> MutableSequence[float]:
        """The cells of a key."""
        name = float(1 + int.from_bytes(digest[:6]))  # exact, and never 0
        first = int.from_bytes(digest[6:10])
        for step in range(SLOTS):
            at = (first + step) % SLOTS * self._width
            if self._cells[at] == 0.0:
                self._cells[at] = name
            if self._cells[at] == name:
                own: Any = self._cells[at + 1 : at + self._width]
                return own  # type: ignore[no-any-return]
        return new_cells(self._processes)
