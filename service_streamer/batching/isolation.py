"""Which item is at fault when a worker dies: its batches are run again in parts.

A part with which a worker dies is cut in as many parts as is fastest, within calls, too. The search
ends when each item that kills was alone with a worker that died, ``max_attempts`` deaths in all; or
after ``deaths_allowed``: what is left then fails.

Parts alternate with batches of new items, so that a search delays no other call. A part has a
worker for itself: if that dies, its items are known. What the model raises on the items of a part,
its worker deals with as for any other batch.

The oldest search goes first, and of its parts those that were cut off first, which are the largest:
so most calls are answered early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ..observe.record import BatchRecord, Call, Span

#: The most failures of a device that a call may be involved in.
#: Chosen by reasoning: each costs the start of a worker.
MOST_DEVICE_FAILURES = 2
#: So often a batch may be with a worker that is lost with its host, and it counts as no attempt.
#: Chosen by reasoning: hosts come and go, and one batch seldom meets that twice. But one that takes
#: all memory may end host after host.
MOST_OUTAGES = 3


def parts_after_death(items: int, run: float, death: float) -> int:
    """Into how many parts to cut items of which one kills its worker, to find it soonest.

    With g parts a level of the search takes g model calls and one death, and there are
    log(items) / log(g) levels. So where a model is loaded in a moment halves are best; where that
    takes seconds, and a model call a few milliseconds, it is best to run the items one by one.
    """
    bits = max(1, (items - 1).bit_length())
    seconds = {
        exponent: -(-bits // exponent) * ((1 << exponent) * run + death)
        for exponent in range(1, bits + 1)
    }
    return min(items, 1 << min(seconds, key=seconds.__getitem__))


def deaths_allowed(items: int, max_attempts: int) -> int:
    """How many deaths of workers a search may cost: by halves enough to find two items that kill.

    One by one, which is what is done where deaths take long, it is enough for one item in eight.
    """
    return 2 * ((items - 1).bit_length() + max_attempts)


#: The order of the parts that wait.
_BY_SEARCH = attrgetter("search.number")


@dataclass(eq=False)
class Search:
    """What is known about one batch that was lost with its worker; all its parts share it."""

    items: int  # of the batch
    failure: Any  # what began it, opaque here
    deaths_left: int  # how many more workers may die of it
    number: int  # of the searches so far; the oldest goes first
    parts: int = 1  # that are not over: they wait to be run, or are being run
    runs: int = 0  # extra model calls so far
    failed: int = 0  # calls that failed so far


class Raised(NamedTuple):
    """A batch of several calls on which the model raised, for the log."""

    calls: int  # of the batch
    failed: int  # how many of them failed
    failure: Any  # of the first one, opaque here; None if none failed
    runs: int  # model calls that it took to find them; 0 if they were not looked for


@dataclass(eq=False, slots=True)
class Suspects:
    """A part of a batch, to be run again."""

    spans: list[Span]
    search: Search
    losses: int  # workers that died while they held its items; if any, it is to be run alone
    #: Workers that were lost with their host while they held its items. Not a number of the search:
    #: a host with many workers takes many parts with it at once.
    outages: int

    @property
    def size(self) -> int:
        return _size(self.spans)


class Retries:
    """The parts of batches that failed and wait to be run again, and their searches.

    Args:
        max_attempts: how many deaths of workers an item may have been there for; 1 for none again.
    """

    def __init__(self, *, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._searches = 0  # so far
        self._is_turn_of_new = False
        #: How many workers may have died with a part that need not be alone with its worker.
        self.grace = 0
        self.waiting: list[Suspects] = []  # in their order
        self.ended: list[Search | Raised] = []  # to be logged since ``take_ended``
        self.retried_items = 0  # that were to be run again since their worker died
        self.isolated_calls = 0  # that failed by themselves, so that others did not

    def take_ended(self) -> Sequence[Search | Raised]:
        """What is to be logged since the last time."""
        ended, self.ended = self.ended, []
        return ended

    @property
    def items(self) -> int:
        """That wait, of calls that are not over."""
        return sum(_size(_unanswered(part.spans)) for part in self.waiting)

    @property
    def has_waiting_alone(self) -> bool:
        """Whether a part waits that is to be run alone."""
        return any(part.losses > self.grace for part in self.waiting)

    # -- whose turn it is

    @property
    def goes_first(self) -> bool:
        """Whether the next batch is a part, though new items wait as well."""
        return not self._is_turn_of_new

    @property
    def may_go_ahead(self) -> bool:
        """Whether a part may be sent to a worker that is busy.

        Not behind another part, also if no new items wait: when the callers have their answers,
        they come back.
        """
        return not self.has_waiting_alone and (self.grace > 0 or not self._is_turn_of_new)

    def gave_way(self) -> None:
        """The batch that was cut is one of new items."""
        self._is_turn_of_new = False

    def take(self, now: float, expire: Callable[[Call], None]) -> Suspects | None:
        """The next part that somebody waits for. It waits until ``gone`` is called with it.

        Args:
            expire: ends a call on the way there whose time has ended.
        """
        self._is_turn_of_new = True
        while self.waiting:
            part = self.waiting[0]
            for call, _, _ in _unanswered(part.spans):
                if call.deadline <= now and not call.is_over:  # it may have several spans
                    expire(call)
            spans = _unanswered(part.spans)
            if spans:
                part.search.runs += 1
                return Suspects(spans, part.search, part.losses, part.outages)
            self.gone()
            self.part_over(part.search)
        return None

    def drop_unwanted(self) -> bool:
        """Drop the next parts if no caller waits for them; whether another is the next by that."""
        before = len(self.waiting)
        while self.waiting and not _unanswered(self.waiting[0].spans):
            search = self.waiting[0].search
            self.gone()
            self.part_over(search)
        return len(self.waiting) < before

    def gone(self) -> None:
        """The first part, which ``take`` has returned, is with a worker now."""
        del self.waiting[0]

    def recount(self, in_flight: Sequence[BatchRecord]) -> None:
        """Derive what waits, of which these batches have some, and what is left of each search."""
        taken = {id(span) for batch in in_flight for span in batch.spans}
        self.waiting = [
            part for part in self.waiting if not any(id(span) in taken for span in part.spans)
        ]
        parts = Counter(part.search for part in self.waiting)
        parts.update(batch.search for batch in in_flight if batch.search is not None)
        for search, count in parts.items():
            search.parts = count

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        for part in self.waiting:
            part.search.parts -= 1
        self.waiting = []

    def drop(self, search: Search) -> list[Suspects]:
        """Run none of its parts any more; returns those that waited."""
        dropped = [part for part in self.waiting if part.search is search]
        self.waiting = [part for part in self.waiting if part.search is not search]
        search.parts -= len(dropped)
        return dropped

    # -- what became of batches: whether they are run again, or else their calls fail

    def lost(self, batch: BatchRecord, failure: Any, count: int) -> bool:
        """A worker died with the batch: it is run again in so many parts, each with its worker."""
        search = self._search(batch, failure)
        if search is None:
            return False
        search.deaths_left -= 1
        # As it ran: if one item is left of several, it is not known to be to blame.
        is_guilty = batch.size == 1 and batch.losses + 1 >= self._max_attempts
        if is_guilty or search.deaths_left <= 0:
            return False
        spans = _unanswered(batch.spans)
        size = _size(spans)
        parts = _in_parts(spans, -(-size // min(count, size)))
        self._run_again(batch, search, parts, losses=batch.losses + 1)
        return True

    def device_failed(self, batch: BatchRecord, failure: Any) -> bool:
        """The device of its worker failed with the batch.

        Each call is run again by itself, so that one at fault takes no other with it; and once
        only, since another such end costs another start of a worker.
        """
        if batch.search is not None:
            batch.search.deaths_left -= 1
        if batch.losses + 1 >= min(self._max_attempts, MOST_DEVICE_FAILURES):
            return False
        search = self._search(batch, failure)
        if search is None:
            return False
        calls: dict[Call, list[Span]] = {}
        for span in _unanswered(batch.spans):
            calls.setdefault(span[0], []).append(span)
        self._run_again(batch, search, calls.values(), losses=batch.losses + 1)
        return True

    def not_begun(self, batch: BatchRecord, failure: Any, *, is_outage: bool = False) -> bool:
        """Its worker was lost before it began with the batch: that is run again as it was."""
        search = self._search(batch, failure)
        if search is None:
            return False
        outages = batch.outages + is_outage
        spans = _unanswered(batch.spans)
        self._run_again(batch, search, [spans], losses=batch.losses, outages=outages)
        return True

    def met_outage(self, batch: BatchRecord, failure: Any, count: int) -> bool:
        """Its worker was lost with its host, whatever it computed: it is run again as it was.

        After some times it counts as ``lost``: perhaps an item of it has ended these hosts.
        """
        if batch.outages >= MOST_OUTAGES:
            return self.lost(batch, failure, count)
        return self.not_begun(batch, failure, is_outage=True)

    def _search(self, batch: BatchRecord, failure: Any) -> Search | None:
        """The batch's, which begins if it has none; None if it is not run again."""
        if self._max_attempts == 1 or not _unanswered(batch.spans):
            return None
        if batch.search is not None:
            search: Search = batch.search
            return search
        self._searches += 1
        deaths = deaths_allowed(batch.size, self._max_attempts)
        return Search(batch.size, failure, deaths, self._searches)

    def _run_again(
        self,
        batch: BatchRecord,
        search: Search,
        parts: Iterable[list[Span]],
        *,
        losses: int,
        outages: int | None = None,
    ) -> None:
        outages = batch.outages if outages is None else outages
        suspects = [Suspects(part, search, losses, outages) for part in parts]
        search.parts += len(suspects) - 1
        self.retried_items += sum(part.size for part in suspects)
        self.waiting += suspects
        self.waiting.sort(key=_BY_SEARCH)  # of one search they stay in order

    def given_up(self, batch: BatchRecord, failed: int) -> None:
        """So many calls of the batch have failed for good."""
        if batch.search is not None:
            batch.search.failed += failed
            if failed == 1:
                self.isolated_calls += 1
            self.part_over(batch.search)

    def some_failed(self, batch: BatchRecord, failed: int) -> None:
        """So many calls of the batch have failed, each by itself."""
        report = batch.report
        if batch.search is not None:
            batch.search.failed += failed
        if report.runs:
            self.isolated_calls += failed
            failure = next(iter(report.failures.values()), None)
            self.ended.append(Raised(batch.calls, failed, failure, report.runs))

    def part_over(self, search: Search) -> None:
        """One part less to be run."""
        search.parts -= 1
        if not search.parts:
            self.ended.append(search)

    def check_invariants(self) -> None:
        waiting = Counter(part.search for part in self.waiting)
        assert all(search.parts >= count for search, count in waiting.items())


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for _, start, stop in spans)


def _unanswered(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if not span[0].is_over]


def _in_parts(spans: Sequence[Span], room: int) -> Iterator[list[Span]]:
    """Parts of ``room`` items each, the last of the rest."""
    part: list[Span] = []
    left = room
    for call, start, stop in spans:
        while start < stop:
            middle = min(stop, start + left)
            part.append((call, start, middle))
            left -= middle - start
            start = middle
            if not left:
                yield part
                part, left = [], room
    if part:
        yield part
