"""How much of a batch a worker computes at once, learned from out-of-memory errors. Pure.

A chunk costs its items times its longest item, as a padded batch does. Without lengths, each item
counts 1, and the cost is the number of items.

    no limit    --- a batch of cost c ran out ------>  limit c / 2, and so on until it fits
    limit       --- a chunk within it ran out ------>  limit half of that chunk
    limit       --- enough full chunks fitted ------>  the next chunk is a probe: a quarter more
    probe       --- fitted ------------------------->  limit the cost of the probe; none, if no
                                                       batch since was larger
    probe       --- ran out ------------------------>  limit as before; twice as many to the next
    an item     --- ran out alone ------------------>  limit as before it was cut for this item

So one gigantic item does not slow down others: the chunks that ran out because of it say nothing
about other items. An item that costs more than the limit is computed alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Number of full chunks that must fit before a probe. Arbitrary: a probe that runs out costs about
#: two runs, little beside 32.
FIRST_INTERVAL = 32

#: Upper bound of that number, which doubles when a probe runs out. Arbitrary: minutes at 0.1 s.
LONGEST_INTERVAL = 1024

#: A probe exceeds the limit by 1/4. Arbitrary: recovers from half the size after four probes.
_PROBE_PART = 4

#: A chunk counts as full if no further item fits, and it costs at least 3/4 of the limit.
_FULL_PARTS = 3

#: Minimum length of the longest item, so that items of length 0 have a cost.
_LEAST_LENGTH = 1e-9


class Chunk:
    """A part of a batch, ``items[start:stop]``, to compute at once.

    Attributes:
        is_last_try: whether running out is final for these items.
        has_run_out: the caller sets it before it asks for the next chunk.
    """

    __slots__ = ("has_run_out", "is_last_try", "start", "stop")

    def __init__(self, start: int, stop: int, *, is_last_try: bool) -> None:
        self.start = start
        self.stop = stop
        self.is_last_try = is_last_try
        self.has_run_out = False


class Ceiling:
    """Limit on what one worker computes at once. Not thread-safe: one per worker.

    If b of n items of one length run out alone, at most (b + 1) * (ceil(log2(n)) + 1) runs of their
    batch run out, plus one per ``FIRST_INTERVAL`` runs that fitted. With lengths, it is log2 of the
    ratio of the costliest chunk to the cheapest. Later, while the device's memory stays the same,
    only probes run out: at most one per interval, which doubles.

    Attributes:
        limit: maximum cost of a chunk that is no probe; 0 for no limit. An int without lengths,
            else a float.
    """

    __slots__ = ("_asked", "_interval", "_until_probe", "limit")

    def __init__(self) -> None:
        self.limit: float = 0
        self._asked: float = 0  # cost of the largest batch since the limit was set
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL  # full chunks until the next probe

    def chunks(
        self, size: int, lengths: Sequence[float] | None = None, *, may_rerun: bool
    ) -> Iterator[Chunk]:
        """The chunks of a batch, from left to right; chunks that ran out are cut smaller.

        Args:
            size: number of items.
            lengths: lengths of the items, at least 0; None if unknown. A ceiling must always get
                the one or the other.
            may_rerun: whether items of a chunk that ran out may be computed again. If not, the
                ceiling only learns from it.
        """
        asked = size * _longest(lengths, 0, size)
        self._asked = max(self._asked, asked) if self.limit else asked
        before: float | None = None  # the limit before the cut
        todo = [(0, size)] if size else []  # a stack, the left-most chunk last
        while todo:
            start, end = todo.pop()
            stop = self._stop(lengths, start, end)
            if stop < end:
                todo.append((stop, end))
            ran = stop - start
            chunk = Chunk(start, stop, is_last_try=ran == 1 or not may_rerun)
            yield chunk
            longest = _longest(lengths, start, stop)
            if not chunk.has_run_out:
                self._fitted(ran, longest, was_cut=stop < end)
            elif ran > 1:
                if may_rerun:
                    todo.append((start, stop))
                    before = self.limit if before is None else before
                self._ran_out(ran, longest)
            elif before is not None:
                # One item was to blame, so the old limit is right. If the device is full after all,
                # the remaining chunks start small and run out again.
                self.limit, before = before, None

    def planned(self, size: int, lengths: Sequence[float] | None = None) -> list[tuple[int, int]]:
        """The chunks of a batch if all of them fit, as ``(start, stop)``. Changes nothing."""
        planned: list[tuple[int, int]] = []
        start = 0
        while start < size:
            stop = self._stop(lengths, start, size)
            planned.append((start, stop))
            start = stop
        return planned

    def _stop(self, lengths: Sequence[float] | None, start: int, end: int) -> int:
        """The end of the chunk that begins at ``start``."""
        if not self.limit:
            return end
        stop = _within(self.limit, lengths, start, end)
        if stop == end or self._until_probe:
            return stop
        # A probe: 1/4 more, at least one item more.
        probe = _within(self.limit * (_PROBE_PART + 1) / _PROBE_PART, lengths, start, end)
        return max(stop + 1, probe)

    def _fitted(self, size: int, longest: float, *, was_cut: bool) -> None:
        cost = size * longest
        if not self.limit:
            return
        if cost > self.limit and size > 1:
            self.limit = cost if cost < self._asked else 0
            self._interval = self._until_probe = FIRST_INTERVAL
        # A single item is no probe, even beyond the limit.
        elif cost >= self.limit or (was_cut and cost * _PROBE_PART >= self.limit * _FULL_PARTS):
            self._until_probe = max(0, self._until_probe - 1)

    def _ran_out(self, size: int, longest: float) -> None:
        if self.limit and size * longest > self.limit:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        else:
            # Rounded up, so that two chunks cover the whole.
            self.limit = (size + 1) // 2 * longest
            self._interval = FIRST_INTERVAL
        self._until_probe = self._interval


def _longest(lengths: Sequence[float] | None, start: int, stop: int) -> float:
    if lengths is None or start == stop:
        return 1
    return float(max(_LEAST_LENGTH, *lengths[start:stop]))


def _within(limit: float, lengths: Sequence[float] | None, start: int, end: int) -> int:
    """The end of a chunk from ``start`` that costs at most ``limit``; at least one item."""
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
