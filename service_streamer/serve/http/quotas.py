"""Limits of an API key: requests per minute, and open requests. Pure.

The rate is a bucket that holds the requests of a minute, and that is full at the start. Its one
number is the time at which it will be full again. Each request moves that time forward.

The numbers are in cells that all web processes of a service have, so the limits hold for all of
them together. There is no lock, which a dying process could keep: two that take at the same moment
may count as one.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence
from typing import NamedTuple

from .api_keys import ApiKey

#: Seconds that a bucket takes to fill.
_MINUTE = 60.0

#: Cells of a key, besides one for each web process with the number of its open requests.
CELLS = 1
_FULL_AT = 0


class Shortage(NamedTuple):
    """Why a request has to wait.

    Attributes:
        limit: which limit is reached, as the file has it.
        seconds: until it may be admitted; rounded up.
    """

    limit: str
    seconds: int


def new_cells(processes: int = 1) -> MutableSequence[float]:
    """The cells of a key that was not used yet."""
    return [0.0] * (CELLS + processes)


class Quota:
    """The limits of one key, as one web process sees them.

    Args:
        key: with its limits.
        cells: of the key, see ``new_cells``.
        number: of this process.
    """

    __slots__ = ("_cells", "_own", "key")

    def __init__(self, key: ApiKey, cells: MutableSequence[float], number: int = 0) -> None:
        self.key = key
        self._cells = cells
        self._own = CELLS + number

    def renewed(self, key: ApiKey) -> Quota:
        """The same key with other limits; what was used of them stays used."""
        return Quota(key, self._cells, self._own - CELLS)

    def enter(self, now: float) -> Shortage | None:
        """Admit a request, or say why not. Who is admitted has to ``leave``.

        Args:
            now: seconds of a monotonic clock that all web processes share.
        """
        key, cells = self.key, self._cells
        if key.concurrency is not None and sum(cells[CELLS:]) >= key.concurrency:
            return Shortage(f"concurrency = {key.concurrency}", 1)
        if key.requests_per_minute is not None:
            full_at = max(cells[_FULL_AT], now) + _MINUTE / key.requests_per_minute
            late = full_at - now - _MINUTE
            if late > 1e-6:  # the sum of many shares of a minute is not exact
                seconds = max(1, math.ceil(late))
                return Shortage(f"requests-per-minute = {key.requests_per_minute}", seconds)
            cells[_FULL_AT] = full_at
        cells[self._own] += 1
        return None

    def leave(self) -> None:
        """A request that was admitted is over."""
        self._cells[self._own] -= 1
