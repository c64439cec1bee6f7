"""What is run again of the batches that workers died with.

Which item ended its worker is not known. So n items are run again in about sqrt(n) parts of as many
items, and those of a part that ends its worker, too, one by one. Each has a worker for itself. That
takes about 2 sqrt(n) model calls and, with three attempts, no more deaths than one by one from the
beginning; halves would take log2(n) deaths, and a worker may load its model for long. The search
ends when each item that kills was alone with a worker that died, ``max_attempts`` deaths in all; or
after ``deaths_left``: what remains then fails.

What is run again takes turns with batches of new items, so a search delays no other call. What the
model raises on it, its worker deals with as for any other batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..observe.record import BatchRecord, Call, Span
from .slots import Slots

#: The most failures of a device that an item may be involved in.
#: Chosen by reasoning: each costs the start of a worker.
MOST_DEVICE_FAILURES = 2
#: So often a batch may be with a worker that is lost with its host, and it counts as no attempt.
#: Chosen by reasoning: hosts come and go, and one batch seldom meets that twice. But one that takes
#: all memory may end host after host.
MOST_OUTAGES = 3


@dataclass(eq=False)
class Search:
    """What is known about one batch that was lost with its worker; all its parts share it."""

    items: int  # of the batch
    failure: Any  # what began it, opaque here
    deaths_left: int  # how many more workers may die of it
    runs: int = 0  # extra model calls so far
    failed: int = 0  # calls that failed so far


class Raised(NamedTuple):
    """A batch of several calls on which the model raised, for the log."""

    calls: int  # of the batch
    failed: int  # how many of them failed
    failure: Any  # of the first one, opaque here; None if none failed
    runs: int  # model calls that it took to find them; 0 if they were not looked for


class Retries:
    """The parts of lost batches that wait to be run again, and the searches that they belong to."""

    def __init__(self, slots: Slots, *, max_attempts: int) -> None:
        self._slots = slots
        self._max_attempts = max_attempts
        self.searches: list[Search] = []  # that have not ended
        self.waiting: list[BatchRecord] = []  # without a number and a slot, in their order
        self.is_turn_of_new = False  # the next batch is one of new items, if some wait
        self.raised: list[Raised] = []  # since ``take_ended``
        self.retried_items = 0  # that were to be run again since their worker died
        self.isolated_calls = 0  # that failed by themselves, so that others did not

    def take_ended(self) -> Sequence[Search | Raised]:
        """What is to be logged since the last time: searches of which nothing is left, too."""
        left = {part.search for part in [*self.waiting, *self._slots.in_flight()]}
        ended: list[Search | Raised] = [*self.raised]
        ended += [search for search in self.searches if search not in left]
        self.raised = []
        self.searches = [search for search in self.searches if search in left]
        return ended

    @property
    def items(self) -> int:
        """That wait, of calls that are not over."""
        return sum(
            stop - start for part in self.waiting for _, start, stop in _unanswered(part.spans)
        )

    @property
    def has_waiting_alone(self) -> bool:
        """Whether a part waits that is to be run alone with its worker."""
        return any(self._slots.is_alone(part) for part in self.waiting)

    @property
    def may_go_ahead(self) -> bool:
        """Whether a part may be sent to a worker that is busy.

        Not behind another part, also if no new items wait: when the callers have their answers,
        they come back.
        """
        has_steps = self._slots.places > 0
        return not self.has_waiting_alone and (has_steps or not self.is_turn_of_new)

    def drop_unwanted(self) -> None:
        """Drop the parts for which no caller waits."""
        self.waiting = [part for part in self.waiting if _unanswered(part.spans)]

    def next(self, now: float, expire: Callable[[Call], None]) -> BatchRecord | None:
        """The first part; None if nobody waits for it. It stays the first until ``del waiting[0]``.

        Args:
            expire: ends a call of it whose time has ended.
        """
        self.is_turn_of_new = True
        part = self.waiting[0]
        for call, _, _ in part.spans:
            if call.deadline <= now and not call.is_over:  # it may have several spans
                expire(call)
        spans = _unanswered(part.spans)
        if not spans:
            return None
        if len(spans) < len(part.spans):
            part = self.waiting[0] = _part(spans, part.search, part.losses, part.outages)
        part.search.runs += 1
        return part

    # -- what became of batches

    def run_again(
        self,
        lost: Sequence[BatchRecord],
        failure: Any,
        batch_id: int | None,
        begun: frozenset[int] | None,
        *,
        is_outage: bool,
    ) -> Iterator[BatchRecord]:
        """A worker was lost with these batches, in the order in which they were sent.

        See ``Batcher.worker_lost``. Yields those that are not run again. Their calls are to fail at
        once: what the next batches have of them is not run again, either.
        """
        for position, batch in enumerate(lost):
            is_begun = begun is None or batch.id in begun
            # One that was sent ahead has probably not begun, and is run as a whole first.
            is_ahead = begun is None and position > 0
            attempts = self._max_attempts
            if is_outage:  # whatever it computed; but an item may end one host after the other
                is_one_by_one = not (self._slots.places or self._slots.beside)
                is_to_blame = is_begun and not (is_ahead and is_one_by_one)
                is_ahead = False
                if is_to_blame and batch.outages < MOST_OUTAGES:
                    batch.outages, is_to_blame = batch.outages + 1, False
            elif batch_id is not None:
                # What a device was asked to do it may say later, of another batch.
                is_to_blame = batch.id == batch_id or (begun is not None and is_begun)
                is_ahead, attempts = False, min(attempts, MOST_DEVICE_FAILURES)
            else:
                is_to_blame = is_begun
            if not self._run_again(batch, failure, is_to_blame, is_ahead, attempts):
                yield batch

    def _run_again(
        self, batch: BatchRecord, failure: Any, is_to_blame: bool, as_it_was: bool, attempts: int
    ) -> bool:
        """Run it again, unless its calls are to fail.

        If its items may have killed the worker it is run in parts, or once more ``as_it_was``. If
        another death is the last that they may be there for, they are run one by one.
        """
        spans = _unanswered(batch.spans)
        if self._max_attempts == 1 or not spans:
            return False
        search: Search | None = batch.search
        if search is None:
            # As many deaths of workers as it takes if one item in eight kills.
            deaths = 2 * ((batch.size - 1).bit_length() + self._max_attempts)
            search = Search(batch.size, failure, deaths)
            self.searches.append(search)
        losses, parts = batch.losses, [spans]
        if is_to_blame:
            search.deaths_left -= 1
            losses += 1
            # As it ran: if one item is left of several, it is not known to be to blame.
            is_guilty = batch.size == 1 and losses >= attempts
            if is_guilty or search.deaths_left <= 0:
                return False
            if not as_it_was:
                items = [(call, i, i + 1) for call, start, end in spans for i in range(start, end)]
                room = 1 if losses + 1 >= attempts else math.isqrt(len(items))
                parts = [items[at : at + room] for at in range(0, len(items), room)]
        again = [_part(spans, search, losses, batch.outages) for spans in parts]
        self.retried_items += sum(part.size for part in again)
        self.waiting += again
        return True

    def given_up(self, batch: BatchRecord, failed: int) -> None:
        """So many calls of the batch have failed for good."""
        if batch.search is not None:
            batch.search.failed += failed
            if failed == 1:
                self.isolated_calls += 1

    def some_failed(self, batch: BatchRecord, failed: int) -> None:
        """So many calls of the batch have failed, each by itself."""
        report = batch.report
        if batch.search is not None:
            batch.search.failed += failed
        if report.runs:
            self.isolated_calls += failed
            failure = next(iter(report.failures.values()), None)
            self.raised.append(Raised(batch.calls, failed, failure, report.runs))


def _part(spans: Sequence[Span], search: Search, losses: int, outages: int) -> BatchRecord:
    payloads = [item for call, start, stop in spans for item in call.payloads[start:stop]]
    part = BatchRecord(-1, -1, spans, payloads, search, losses, outages)
    part.calls = len({call for call, _, _ in spans})
    return part


def _unanswered(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if not span[0].is_over]
