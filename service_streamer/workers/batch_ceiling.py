"""How much of a batch a worker computes at once, learned from what ran out of memory. Pure.

A chunk costs its items times the longest of them, as a padded batch does. Where lengths are not
known each item counts one, and the cost is the number of items.

    no limit    --- a batch of cost c ran out ------>  limit c / 2, and so on until it fits
    limit       --- a chunk within it ran out ------>  limit half of that chunk
    limit       --- enough full chunks fitted ------>  the next chunk is a probe: a quarter more
    probe       --- fitted ------------------------->  limit what fitted; none, if no batch since
                                                       it was set was larger
    probe       --- ran out ------------------------>  limit as it was; twice as many to the next
    an item     --- ran out alone ------------------>  limit as before it was cut for this item

The last line is why one gigantic item slows nobody else down: the chunks that ran out because it
was in them say nothing about others. An item that costs more than the limit is computed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["FIRST_INTERVAL", "LONGEST_INTERVAL", "Ceiling", "Chunk"]

#: How many chunks of the limit's size must fit before a larger one is tried. Arbitrary: a probe
#: that runs out costs about two runs, which is little beside 32.
FIRST_INTERVAL = 32

#: What that doubles up to, while probes run out. Arbitrary: minutes, where a run takes 0.1 s.
LONGEST_INTERVAL = 1024

#: A probe is larger than the limit by one part in so many. Arbitrary: a quarter is back from half
#: the size after four probes.
_PROBE_PART = 4

#: A chunk counts as full, in parts of ``_PROBE_PART``, if no item more would have fitted and it
#: costs at least so much of the limit. Where each item counts one it costs the limit.
_FULL_PARTS = 3

#: What the longest item counts at least, or a batch of items of length 0 would cost nothing.
_LEAST_LENGTH = 1e-9


class Chunk:
    """A part of a batch, ``items[start:stop]``, to be computed at once.

    Attributes:
        is_last_try: if it runs out, that is final: these items are not computed again.
        has_run_out: for the caller to set before it asks for the next chunk.
    """

    __slots__ = ("has_run_out", "is_last_try", "start", "stop")

    def __init__(self, start: int, stop: int, *, is_last_try: bool) -> None:
        self.start = start
        self.stop = stop
        self.is_last_try = is_last_try
        self.has_run_out = False


class Ceiling:
    """The most that one worker computes at once. Not thread-safe: one per worker.

    Let a batch have n items of one length, of which b run out alone. At most
    (b + 1) * (ceil(log2(n)) + 1) of its runs run out, and one more for each ``FIRST_INTERVAL`` that
    fitted. With lengths it is log2 of the ratio of the costliest chunk to the cheapest. While what
    fits stays the same, only the probes of later batches run out: at most one per interval, which
    doubles.

    Attributes:
        limit: the highest cost of a chunk that is no probe; 0 for as much as a batch costs. An int
            if each item counts one, else a float.
    """

    __slots__ = ("_asked", "_interval", "_until_probe", "limit")

    def __init__(self) -> None:
        self.limit: float = 0
        self._asked: float = 0  # the costliest batch since there is a limit
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL  # full chunks that have yet to fit

    def chunks(
        self, size: int, lengths: Sequence[float] | None = None, *, may_rerun: bool
    ) -> Iterator[Chunk]:
        """The chunks in which to compute a batch: from left to right, what ran out cut smaller.

        Args:
            size: of the batch, in items.
            lengths: of its items, at least 0; None if they are not known. For one ceiling it must
                always be the one or the other.
            may_rerun: whether the items of a chunk that ran out may be computed again; otherwise
                it is only learned from.
        """
        asked = size * _longest(lengths, 0, size)
        self._asked = max(self._asked, asked) if self.limit else asked
        before: float | None = None  # the limit before it was cut, perhaps because of one item
        todo = [(0, size)] if size else []  # a stack: the left-most last
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
                # What is left to do is in pieces that grow from its size, so if this was not the
                # item but the device, which is full, then only they run out again.
                self.limit, before = before, None

    def _stop(self, lengths: Sequence[float] | None, start: int, end: int) -> int:
        """Where the chunk ends that begins at ``start``."""
        if not self.limit:
            return end
        stop = _within(self.limit, lengths, start, end)
        if stop == end or self._until_probe:
            return stop
        # A part more, and one item at least.
        probe = _within(self.limit * (_PROBE_PART + 1) / _PROBE_PART, lengths, start, end)
        return max(stop + 1, probe)

    def _fitted(self, size: int, longest: float, *, was_cut: bool) -> None:
        cost = size * longest
        if not self.limit:
            return
        if cost > self.limit and size > 1:
            self.limit = cost if cost < self._asked else 0
            self._interval = self._until_probe = FIRST_INTERVAL
        # One item alone says nothing of several: also beyond the limit it was no probe.
        elif cost >= self.limit or (was_cut and cost * _PROBE_PART >= self.limit * _FULL_PARTS):
            self._until_probe = max(0, self._until_probe - 1)

    def _ran_out(self, size: int, longest: float) -> None:
        if self.limit and size * longest > self.limit:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        else:
            # Rounded up, so that two chunks of it are the whole.
            self.limit = (size + 1) // 2 * longest
            self._interval = FIRST_INTERVAL
        self._until_probe = self._interval


def _longest(lengths: Sequence[float] | None, start: int, stop: int) -> float:
    if lengths is None or start == stop:
        return 1
    return float(max(_LEAST_LENGTH, *lengths[start:stop]))


def _within(limit: float, lengths: Sequence[float] | None, start: int, end: int) -> int:
    """Where to stop so that a chunk from ``start`` costs at most ``limit``; one item at least."""
    if lengths is None:
        return min(end, start + max(1, int(limit)))
    longest = _LEAST_LENGTH
    for stop in range(start, end):
        longest = max(longest, lengths[stop])
        if (stop + 1 - start) * longest > limit:
            return max(stop, start + 1)
    return end
