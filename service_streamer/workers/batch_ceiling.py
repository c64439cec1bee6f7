"""How much a worker computes at once, learned from out-of-memory errors. Pure.

A part costs its items times its longest item, as a padded batch does. Without lengths, each item
counts 1, and the cost is the number of items.

    no limit    --- a batch of cost c ran out ------>  limit c / 2, and so on until it fits
    limit       --- a part within it ran out ------>  limit half of that part
    limit       --- enough full parts fitted ------>  the next part is a probe: a quarter more
    probe       --- fitted ------------------------->  limit the cost of the probe; none, if no
                                                       batch since was larger
    probe       --- ran out ------------------------>  limit as before; twice as many to the next
    an item     --- ran out alone ------------------>  limit as before it was cut for this item

So one gigantic item does not slow down others: the parts that ran out because of it say nothing
about other items. An item that costs more than the limit is computed alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

#: Number of full parts that must fit before a probe. Arbitrary: a probe that runs out costs about
#: two runs, little beside 32.
FIRST_INTERVAL = 32

#: Upper bound of that number, which doubles when a probe runs out. Arbitrary: minutes at 0.1 s.
LONGEST_INTERVAL = 1024

#: A probe exceeds the limit by this share. Arbitrary: recovers from half the size after four.
GROWTH = 0.25

#: A part counts as full if no further item fits, and it costs this share of the limit.
FULL = 0.75

#: Minimum length of the longest item, so that items of length 0 have a cost.
_LEAST_LENGTH = 1e-9


class Ceiling:
    """Limit on what one worker computes at once. Not thread-safe: one per worker.

    If b of n items of one length run out alone, at most (b + 1) * (ceil(log2(n)) + 1) runs of their
    batch run out, plus one per ``FIRST_INTERVAL`` runs that fitted. With lengths, it is log2 of the
    ratio of the costliest part to the cheapest. Later, while the device's memory stays the same,
    only probes run out: at most one per interval, which doubles.

    Args:
        growth: by which share of the limit a probe exceeds it, and by one item at the least.

    Attributes:
        limit: maximum cost of a part that is no probe; 0 for no limit. An int without lengths,
            else a float.
    """

    __slots__ = ("_asked", "_before", "_growth", "_interval", "_until_probe", "limit")

    def __init__(self, growth: float = GROWTH) -> None:
        self.limit: float = 0
        self._growth = growth
        self._asked: float = 0  # cost of the largest batch since the limit was set
        self._before: float | None = None  # the limit before a batch ran out
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL  # full parts until the next probe

    def begin(self, size: int, lengths: Sequence[float] | None = None) -> None:
        """A batch of so many items is to be computed.

        Args:
            lengths: lengths of the items, at least 0; None if unknown. A ceiling must always get
                the one or the other.
        """
        asked = size * _longest(lengths)
        self._asked = max(self._asked, asked) if self.limit else asked
        self._before = None

    def room(self, size: int, lengths: Sequence[float] | None = None) -> int:
        """How many of the next ``size`` items to compute at once: at least one."""
        if not self.limit:
            return size
        room = _within(self.limit, lengths, 0, size)
        if room == size or self._until_probe:
            return room
        # A probe: at least one item more.
        return max(room + 1, _within(self.limit * (1 + self._growth), lengths, 0, size))

    def planned(self, size: int, lengths: Sequence[float] | None = None) -> list[tuple[int, int]]:
        """The parts of a batch if all of them fit, as ``(start, stop)``. Changes nothing."""
        planned: list[tuple[int, int]] = []
        start = 0
        while start < size:
            room = self.room(size - start, lengths and lengths[start:])
            planned.append((start, start + room))
            start += room
        return planned

    def fitted(
        self, size: int, lengths: Sequence[float] | None = None, *, was_cut: bool = False
    ) -> None:
        """A part was computed.

        Args:
            was_cut: whether there were more items.
        """
        cost = size * _longest(lengths)
        if not self.limit:
            return
        if cost > self.limit and size > 1:
            self.limit = cost if cost < self._asked else 0
            self._interval = self._until_probe = FIRST_INTERVAL
        # A single item is no probe, even beyond the limit.
        elif cost >= self.limit or (was_cut and cost >= self.limit * FULL):
            self._until_probe = max(0, self._until_probe - 1)

    def ran_out(
        self, size: int, lengths: Sequence[float] | None = None, *, keep: int | None = None
    ) -> None:
        """A part ran out of memory.

        Args:
            keep: how many items to compute at once from now on; None for half of them.
        """
        longest = _longest(lengths)
        if size == 1 and keep is None:
            # One item was to blame, so the old limit is right. If the device is full after all,
            # others run out again.
            if self._before is not None:
                self.limit, self._before = self._before, None
            return
        if self._before is None:
            self._before = self.limit
        if self.limit and size * longest > self.limit:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        else:
            # Rounded up, so that two parts cover the whole.
            self.limit = ((size + 1) // 2 if keep is None else keep) * longest
            self._interval = FIRST_INTERVAL
        self._until_probe = self._interval


def _longest(lengths: Sequence[float] | None) -> float:
    return float(max(_LEAST_LENGTH, *lengths)) if lengths else 1


def _within(limit: float, lengths: Sequence[float] | None, start: int, end: int) -> int:
    """The end of a part from ``start`` that costs at most ``limit``; at least one item."""
    if lengths is None:
        return min(end, start + max(1, int(limit)))
    longest = _LEAST_LENGTH
    for stop in range(start, end):
        longest = max(longest, lengths[stop])
        if (stop + 1 - start) * longest > limit:
            return max(stop, start + 1)
    return end


#: Maximum bytes of a pickled length function, which may drag a whole tokenizer along. Arbitrary.
_LARGEST = 1 << 20


class Measure:
    """The length function of a model, for a worker's ceiling. Belongs to one thread.

    It is needed only after a batch ran out of memory, and unpickled only then: a function that the
    worker cannot import must not keep it from starting.

    Args:
        function: length of an item. If it does not pickle, or is too large, the copy in a worker
            process knows no lengths.
    """

    __slots__ = ("_function", "_pickled")

    def __init__(self, function: Callable[[Any], Any] | None, pickled: bytes | None = None) -> None:
        self._function = function
        self._pickled = pickled

    def lengths(self, items: Sequence[Any]) -> list[float] | None:
        """Lengths of the items, at least 0; None if unavailable, from now on."""
        try:
            if self._function is None and self._pickled is not None:
                self._function = pickle.loads(self._pickled)
            if self._function is not None:
                found = [float(self._function(item)) for item in items]
                if all(0 <= length < float("inf") for length in found):
                    return found
        except (Exception, SystemExit):  # raised by the user's function
            pass
        self._function = self._pickled = None
        return None

    def __reduce__(self) -> tuple[type[Measure], tuple[None, bytes | None]]:
        pickled = self._pickled
        if self._function is not None:
            try:
                pickled = pickle.dumps(self._function, pickle.HIGHEST_PROTOCOL)
            except (Exception, SystemExit):
                pickled = None
            if pickled is not None and len(pickled) > _LARGEST:
                pickled = None
        return Measure, (None, pickled)
