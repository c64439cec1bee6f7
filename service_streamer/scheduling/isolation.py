"""Who is at fault when a batch comes to grief: it is run again in halves, until that is known.

Two things can happen to a batch. The model raises: then the calls that share the batch are parted,
and one that is alone with its error has earned it. Or its worker dies: then the items are parted,
also those of one call (fewer items may be all that was needed), and one that was alone when a
worker died, and has been there ``max_attempts`` times, is given up.

Both searches are breadth first, so that when one is broken off the parts are small. A batch of n
items may be split 2 log2(n) - 1 times: enough for any two bad items, with 4 log2(n) - 2 extra model
calls at the most (22 for 64), those aside that give a lone item its ``max_attempts``. What fails
after that fails together: then it is the model that is bad and not an item, and calling it again
and again would only take it away from everybody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .records import Batch, Call, Span

__all__ = ["Retries", "Search", "Suspects"]

#: How often a call may be there when the device of a worker fails, at the most.
_MOST_DEVICE_FAILURES = 2


class Search:
    """What is known about one batch that came to grief; shared by all the parts of it.

    Attributes:
        items: of the batch.
        calls: of the batch.
        failure: what began it, opaque here.
        is_loss: whether that was the loss of a worker; otherwise the model raised.
        splits_left: how often a part may still be split.
        parts: that are not over: they wait to be run, or are being run.
        runs: extra model calls so far.
        failed: calls that failed so far.
    """

    __slots__ = (
        "calls",
        "failed",
        "failure",
        "is_loss",
        "items",
        "parts",
        "runs",
        "splits_left",
    )

    def __init__(self, batch: Batch, failure: Any, *, is_loss: bool) -> None:
        self.items = batch.size
        self.calls = len(batch.spans)
        self.failure = failure
        self.is_loss = is_loss
        self.splits_left = 2 * (batch.size - 1).bit_length() - 1
        self.parts = 1  # the batch itself
        self.runs = 0
        self.failed = 0


class Suspects:
    """A part of a batch, to be run again by itself."""

    __slots__ = ("losses", "search", "size", "spans")

    def __init__(self, spans: list[Span], search: Search, losses: int) -> None:
        self.spans = spans
        self.search = search
        self.losses = losses
        self.size = sum(stop - start for _, start, stop in spans)


class Retries:
    """The parts of batches that came to grief and wait to be run again, and their searches.

    Args:
        max_attempts: how many deaths of workers an item may have been there for; 1 for none again.
        isolate_errors: whether what the model raised on is run again.

    Attributes:
        retried_items: how many were to be run again since their worker died.
        isolated_calls: how many failed by themselves, so that others did not.
    """

    __slots__ = ("_isolate_errors", "_max_attempts", "_parts", "isolated_calls", "retried_items")

    def __init__(self, *, max_attempts: int, isolate_errors: bool) -> None:
        self._max_attempts = max_attempts
        self._isolate_errors = isolate_errors
        self._parts: deque[Suspects] = deque()
        self.retried_items = 0
        self.isolated_calls = 0

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Suspects]:
        return iter(self._parts)

    @property
    def items(self) -> int:
        """Of calls that are not over."""
        return sum(
            stop - start for part in self._parts for _, start, stop in _unanswered(part.spans)
        )

    def take(
        self, now: float, expire: Callable[[Call], None], over: list[Search]
    ) -> Suspects | None:
        """The next part that somebody waits for.

        Args:
            expire: ends a call on the way there whose time has ended.
            over: gets the searches that end since nobody waits for the rest of them.
        """
        while self._parts:
            part = self._parts.popleft()
            for call, _, _ in _unanswered(part.spans):
                if call.deadline <= now and not call.is_over:  # it may have several spans
                    expire(call)
            spans = _unanswered(part.spans)
            if spans:
                part.search.runs += 1
                return Suspects(spans, part.search, part.losses)
            over += self.part_over(part.search)
        return None

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        for part in self._parts:
            self.part_over(part.search)
        self._parts.clear()

    def raised(self, batch: Batch, failure: Any) -> bool:
        """The model raised on the batch; whether it is run again, in parts: else its calls fail."""
        spans = _unanswered(batch.spans)
        # As it ran, not as it is now: one that is over meanwhile may have been to blame.
        if batch.calls < 2 or not spans or not self._isolate_errors:
            return False
        search = batch.search or Search(batch, failure, is_loss=False)
        if search.splits_left <= 0:
            return False
        middle = len(spans) // 2
        batch.search = search  # for who wants to know what comes of it
        self._split(search, [spans[:middle], spans[middle:]], batch.losses)
        return True

    def lost(self, batch: Batch, failure: Any) -> bool:
        """A worker died with the batch; whether it is run again: else its calls fail."""
        losses = batch.losses + 1
        spans = _unanswered(batch.spans)
        if not spans or self._max_attempts == 1:
            return False
        search = batch.search or Search(batch, failure, is_loss=True)
        size = sum(stop - start for _, start, stop in spans)
        if batch.size > 1 and search.splits_left > 0:
            self._split(search, _halved(spans, size // 2), losses)
        elif losses < self._max_attempts:
            self._parts.append(Suspects(spans, search, losses))
        else:
            return False
        self.retried_items += size
        return True

    def device_failed(self, batch: Batch, failure: Any) -> bool:
        """The device of its worker failed with the batch; whether it is run again, as ``lost``.

        Each call by itself, so that one at fault takes no other with it; and once only, since
        another such end costs another start of a worker.
        """
        losses = batch.losses + 1
        spans = _unanswered(batch.spans)
        if not spans or losses >= min(self._max_attempts, _MOST_DEVICE_FAILURES):
            return False
        calls: dict[Call, list[Span]] = {}
        for span in spans:
            calls.setdefault(span[0], []).append(span)
        self._split(batch.search or Search(batch, failure, is_loss=True), calls.values(), losses)
        self.retried_items += sum(stop - start for _, start, stop in spans)
        return True

    def not_begun(self, batch: Batch, failure: Any) -> bool:
        """Its worker was lost before it began with the batch: that is run again as it was."""
        spans = _unanswered(batch.spans)
        if not spans or self._max_attempts == 1:
            return False
        search = batch.search or Search(batch, failure, is_loss=True)
        self._split(search, [spans], batch.losses)
        self.retried_items += sum(stop - start for _, start, stop in spans)
        return True

    def again(self, batch: Batch, failure: Any) -> Search | None:
        """Have the batch run again as it is, to see what comes of it; None if it may not be."""
        spans = _unanswered(batch.spans)
        if not spans or not self._isolate_errors:
            return None
        search = Search(batch, failure, is_loss=False)
        self._split(search, [spans], batch.losses)
        return search

    def _split(self, search: Search, halves: Iterable[list[Span]], losses: int) -> None:
        parts = [Suspects(half, search, losses) for half in halves if half]
        search.splits_left -= 1
        search.parts += len(parts) - 1
        self._parts += parts

    def given_up(self, batch: Batch, failed: int) -> list[Search]:
        """So many calls of the batch have failed for good; the search, if it has ended by that."""
        if batch.search is None:
            return []
        batch.search.failed += failed
        if failed == 1:
            self.isolated_calls += 1
        return self.part_over(batch.search)

    def part_over(self, search: Search) -> list[Search]:
        """One part less to be run; the search itself if it was the last."""
        search.parts -= 1
        return [] if search.parts else [search]


def _unanswered(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if not span[0].is_over]


def _halved(spans: Sequence[Span], room: int) -> tuple[list[Span], list[Span]]:
    """The first ``room`` items, and the others."""
    first: list[Span] = []
    rest: list[Span] = []
    for call, start, stop in spans:
        middle = min(stop, start + room)
        room -= middle - start
        if middle > start:
            first.append((call, start, middle))
        if stop > middle:
            rest.append((call, middle, stop))
    return first, rest
