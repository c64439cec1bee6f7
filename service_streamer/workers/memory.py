"""How much of a batch a worker computes at once, learned from what ran out of memory. Pure.

    no limit    --- a batch of n ran out ----------->  limit n / 2, and so on until it fits
    limit       --- a chunk within it ran out ------>  limit half of that chunk
    limit       --- enough full chunks fitted ------>  the next chunk is a probe: a quarter more
    probe       --- fitted ------------------------->  limit what fitted; none, if no batch since
                                                       it was set was larger
    probe       --- ran out ------------------------>  limit as it was; twice as many to the next
    an item     --- ran out alone ------------------>  limit as before it was cut for this item

The last line is why one gigantic item slows nobody else down: the chunks that ran out because it
was in them say nothing about others.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FIRST_INTERVAL", "LONGEST_INTERVAL", "Ceiling", "Chunk"]

#: How many chunks of the limit's size must fit before a larger one is tried. Arbitrary: a probe
#: that runs out costs about two runs, which is little beside 32.
FIRST_INTERVAL = 32

#: What that doubles up to, while probes run out. Arbitrary: minutes, where a run takes 0.1 s.
LONGEST_INTERVAL = 1024

#: A probe is larger than the limit by one part in so many. Arbitrary: a quarter is back from half
#: the size after four probes.
_PROBE_PART = 4


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
    """The most items that one worker computes at once. Not thread-safe: one per worker.

    Let a batch have n items, of which b run out alone. At most (b + 1) * (ceil(log2(n)) + 1) of its
    runs run out, and one more for each ``FIRST_INTERVAL`` that fitted. While what fits stays the
    same, only the probes of later batches run out: at most one per interval, which doubles.

    Attributes:
        limit: the most items of a chunk that is no probe; 0 for as many as a batch has.
    """

    __slots__ = ("_asked", "_interval", "_until_probe", "limit")

    def __init__(self) -> None:
        self.limit = 0
        self._asked = 0  # the largest batch since there is a limit
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL  # full chunks that have yet to fit

    def chunks(self, size: int, *, may_rerun: bool) -> Iterator[Chunk]:
        """The chunks in which to compute a batch: from left to right, what ran out cut smaller.

        Args:
            size: of the batch, in items.
            may_rerun: whether the items of a chunk that ran out may be computed again; otherwise
                it is only learned from.
        """
        self._asked = max(self._asked, size) if self.limit else size
        before: int | None = None  # the limit before it was cut, perhaps because of one item
        todo = [(0, size)] if size else []  # a stack: the left-most last
        while todo:
            start, end = todo.pop()
            stop = start + self._most(end - start)
            if stop < end:
                todo.append((stop, end))
            ran = stop - start
            chunk = Chunk(start, stop, is_last_try=ran == 1 or not may_rerun)
            yield chunk
            if not chunk.has_run_out:
                self._fitted(ran)
            elif ran > 1:
                if may_rerun:
                    todo.append((start, stop))
                    before = self.limit if before is None else before
                self._ran_out(ran)
            elif before is not None:
                # What is left to do is in pieces that grow from its size, so if this was not the
                # item but the device, which is full, then only they run out again.
                self.limit, before = before, None

    def _most(self, size: int) -> int:
        if not self.limit or size <= self.limit:
            return size
        if self._until_probe:
            return self.limit
        return min(size, self.limit + max(1, self.limit // _PROBE_PART))

    def _fitted(self, size: int) -> None:
        if not self.limit or size < self.limit:
            return
        if size == self.limit:
            self._until_probe = max(0, self._until_probe - 1)
        else:
            self.limit = size if size < self._asked else 0
            self._interval = self._until_probe = FIRST_INTERVAL

    def _ran_out(self, size: int) -> None:
        if self.limit and size > self.limit:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        else:
            self.limit = (size + 1) // 2  # rounded up, so that two chunks of it are the whole
            self._interval = FIRST_INTERVAL
        self._until_probe = self._interval
