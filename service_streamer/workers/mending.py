"""How a worker mends a batch by itself: it runs the batch in parts. Pure.

``Bisection`` finds the calls on which the model raises, and ``Ceiling`` how much fits into memory:

    a part             what follows
    ------             ------------
    raised             it is run again in halves, until a call fails alone
    has results        if it is half of a part that raised, the other half is run in halves, too:
                       the call at fault is there; else the next part has up to twice as many calls
    has invalid items  they fail, and the rest of the part is run again
    ran out of memory  batches and steps differ: smaller parts, or items that fail or wait

The parts go from left to right. One bad call among n takes about log2(n) + 3 more runs, and no
mixture of good and bad ones more than 2n + log2(n). Each part that raises halves the number of
calls for the parts after it: where a share p of the calls is bad, parts settle at about 0.7 / p
calls, of which half raise. Group testing is cheapest there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from ..errors import BadModelOutput, InvalidItems
from .protocol import Failure

T = TypeVar("T")


class Invalid(NamedTuple):
    """Why items fail that the model named, by position in the part."""

    failures: dict[int, Failure]


class OutOfMemory(NamedTuple):
    """The device had not enough memory."""

    failure: Failure


#: What became of a run: a result for each item, or why there is none. A Failure is what the model
#: raised.
Outcome: TypeAlias = list[Any] | Invalid | OutOfMemory | Failure


def by_position(invalid: InvalidItems, positions: Sequence[int]) -> dict[int, Exception]:
    """The errors, of a call with the items at these positions. Raises BadModelOutput: none such."""
    wrong = [i for i in invalid.errors if type(i) is not int or not 0 <= i < len(positions)]
    if wrong:
        raise BadModelOutput(
            f"InvalidItems names item {wrong[0]!r}, but the model was called with "
            f"{len(positions)}: positions count from 0"
        )
    return {positions[i]: error for i, error in invalid.errors.items()}


def failures_by_position(invalid: InvalidItems, size: int) -> Invalid:
    """What follows for the items of a call with so many. Raises BadModelOutput: it has no such."""
    errors = by_position(invalid, range(size))
    return Invalid({position: Failure.caught(error) for position, error in errors.items()})


@contextmanager
def at_positions(positions: Sequence[int]) -> Iterator[None]:
    """The block calls the model with the items at these positions: InvalidItems names those."""
    try:
        yield
    except InvalidItems as error:
        raise InvalidItems(by_position(error, positions)) from None


class Bisection(ABC, Generic[T]):
    """Items, of which those of a call are adjacent. ``run_all`` runs them until none is left."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = list(items)  # that are left: they have no result, and have not failed
        self.results: dict[T, Any] = {}  # of the others, in the order in which they came
        self.failures: dict[T, Failure] = {}
        self._suspects: list[T] = []  # the first items, if a call of them is known to be at fault
        self._most_calls = self._most_items = 0  # in a part; 0 for no bound

    def call_of(self, item: T) -> object:
        """The call of the item; without a definition, each item is a call of its own."""
        return item

    def room(self, items: list[T]) -> int:
        """How many of these to run at once, as far as memory goes: at least one."""
        return len(items)

    @abstractmethod
    def run(self, part: list[T]) -> Outcome:
        """Have the model compute these: it returned a result for each, or a Failure."""

    @abstractmethod
    def ran_out(self, part: list[T], failure: Failure) -> None:
        """The part ran out of memory: have it fail, drop items, or have fewer run at once."""

    def fitted(self, part: list[T]) -> None:
        """The part has results. The items are those that were left before it ran."""

    def run_all(self, *, may_rerun: bool, known: Outcome | None = None) -> int:
        """Run all items; returns how many runs it took since one raised.

        Without ``may_rerun`` all of a part fail on which the model raised. ``known`` is what became
        of the first part, if that was run already.
        """
        runs, has_raised = 0, False
        while self.items:
            part = self.next_part()
            runs += has_raised
            outcome, known = self.run(part) if known is None else known, None
            if isinstance(outcome, list):
                self._passed(part, outcome)
            elif isinstance(outcome, Invalid):
                invalid = {part[position]: each for position, each in outcome.failures.items()}
                self.failures |= invalid
                self.drop(invalid)
            elif isinstance(outcome, OutOfMemory):
                self.ran_out(part, outcome.failure)
            elif may_rerun:
                has_raised = True
                self._narrow(part, outcome)
            else:
                self.fail(part, outcome)
        return runs

    def next_part(self) -> list[T]:
        """What to run next: at least one item."""
        items, calls = self.items, self._most_calls
        if self._suspects:
            items, calls = self._suspects, (self._count_calls(self._suspects) + 1) // 2
        part = items[: min(self.room(self.items), self._most_items or len(items))]
        if calls:
            groups = islice(groupby(part, self.call_of), calls)
            part = [item for _, group in groups for item in group]
        return part

    def fail(self, items: Iterable[T], failure: Failure) -> None:
        """These fail, together."""
        failures = dict.fromkeys(items, failure)
        self.failures |= failures
        self.drop(failures)

    def drop(self, items: Iterable[T]) -> None:
        """These are not run any more."""
        dropped = set(items)
        self.items = [item for item in self.items if item not in dropped]
        self._suspects = [item for item in self._suspects if item not in dropped]

    def reorder(self, items: Iterable[T]) -> None:
        """Run these in this order, which are all that are left."""
        self.items = list(items)
        self._suspects = []  # which are the first ones

    def shrink(self, part: Sequence[T]) -> None:
        """The part ran out of memory: run half as many items next, whatever their calls are."""
        self._most_items = (len(part) + 1) // 2

    def _passed(self, part: list[T], values: Iterable[Any]) -> None:
        self.fitted(part)
        for item, value in zip(part, values, strict=True):
            found = self.failures if isinstance(value, Failure) else self.results
            found[item] = value
        self.items = self.items[len(part) :]
        self._most_items *= 2
        if self._suspects:
            del self._suspects[: len(part)]
        else:
            self._most_calls *= 2

    def _narrow(self, part: list[T], failure: Failure) -> None:
        """A call of the part is at fault."""
        calls = self._count_calls(part)
        if not self._suspects:
            self._most_calls = (calls + 1) // 2
        self._suspects = part if calls > 1 else []
        if calls == 1:
            call = self.call_of(part[0])
            self.fail([item for item in self.items if self.call_of(item) == call], failure)

    def _count_calls(self, items: Sequence[T]) -> int:
        return sum(1 for _ in groupby(items, self.call_of))


# -- lack of memory

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
    """Limit on what one worker computes at once, learned from out-of-memory errors.

    A part costs its items times its longest item, as a padded batch does. ``lengths`` are those of
    its items, always in one unit: without any, each item counts 1.

        no limit    --- a batch of cost c ran out ------>  limit c / 2, and so on until it fits
        limit       --- a part within it ran out ------>  limit half of that part
        limit       --- enough full parts fitted ------>  the next part is a probe: a quarter more
        probe       --- fitted ------------------------>  limit the cost of the probe; none, if no
                                                          batch since was larger
        probe       --- ran out ----------------------->  limit as before; the next one comes later
        an item     --- ran out alone ----------------->  limit as before it was cut for this item

    So one gigantic item does not slow down others. An item that costs more than the limit is
    computed alone.

    If b of n items of one length run out alone, at most (b + 1) * (ceil(log2(n)) + 1) runs of their
    batch run out, plus one per ``FIRST_INTERVAL`` runs that fitted. Later only probes run out, as
    long as the device's memory stays the same.
    """

    def __init__(self, growth: float = GROWTH, asked: float = 0) -> None:
        #: Maximum cost of a part that is no probe; 0 for no limit. An int if all lengths are.
        self.limit: float = 0
        self._growth = growth  # by which share of it a probe exceeds it, and by one item at least
        self._asked = asked  # cost of the largest batch since the limit was set
        self._before: float | None = None  # the limit before a batch ran out
        self._interval = FIRST_INTERVAL
        self._until_probe = FIRST_INTERVAL  # full parts until the next probe

    def begin(self, lengths: Sequence[float]) -> None:
        """A batch is to be computed."""
        asked = _cost(lengths)
        self._asked = max(self._asked, asked) if self.limit else asked
        self._before = None

    def room(self, lengths: Sequence[float]) -> int:
        """How many of these items to compute at once: at least one."""
        if not self.limit:
            return len(lengths)
        room = _within(self.limit, lengths)
        if room == len(lengths) or self._until_probe:
            return room
        # A probe: at least one item more.
        return max(room + 1, _within(self.limit * (1 + self._growth), lengths))

    def fitted(self, lengths: Sequence[float], *, was_cut: bool = False) -> None:
        """A part was computed; ``was_cut`` says that there were more items."""
        if not self.limit:
            return
        cost = _cost(lengths)
        if cost > self.limit and len(lengths) > 1:
            self.limit = cost if cost < self._asked else 0
            self._interval = self._until_probe = FIRST_INTERVAL
        # A single item is no probe, even beyond the limit.
        elif cost >= self.limit or (was_cut and cost >= self.limit * FULL):
            self._until_probe = max(0, self._until_probe - 1)

    def ran_out(self, lengths: Sequence[float], *, keep: int | None = None) -> None:
        """A part ran out of memory: from now on ``keep`` items fit at once, or else half of it."""
        size = len(lengths)
        if size == 1 and keep is None:
            # One item was to blame, so the old limit is right. If the device is full after all,
            # others run out again.
            if self._before is not None:
                self.limit, self._before = self._before, None
            return
        if self._before is None:
            self._before = self.limit
        if self.limit and _cost(lengths) > self.limit:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        else:
            # Rounded up, so that two parts cover the whole.
            kept = (size + 1) // 2 if keep is None else keep
            self.limit = kept * max(_LEAST_LENGTH, *lengths)
            self._interval = FIRST_INTERVAL
        self._until_probe = self._interval


def _cost(lengths: Sequence[float]) -> float:
    return len(lengths) * max(_LEAST_LENGTH, *lengths)


def _within(limit: float, lengths: Sequence[float]) -> int:
    """How many of the items cost at most ``limit``; at least one."""
    longest = _LEAST_LENGTH
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if (count + 1) * longest > limit:
            return max(count, 1)
    return len(lengths)
