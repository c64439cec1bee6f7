"""Finds the calls of a batch on which the model raises, by running it in parts. Pure.

    a part             what follows
    ------             ------------
    raised             it is run again in halves, until a call fails alone
    has results        if it is half of a part that raised, the other half is run in halves, too:
                       the call at fault is there; else the next part has up to twice as many calls
    has invalid items  they fail, and the rest of the part is run again
    ran out of memory  whoever runs the parts decides: smaller parts, or items that fail or wait

The parts go from left to right. To find one bad call among n takes about log2(n) + 3 more runs,
and no mixture of good and bad ones takes more than 2n + log2(n). Each part that raises halves the
number of calls for the parts after it. So where a share p of the calls is bad, the parts settle at
about 0.7 / p calls, of which half raise: group testing is cheapest there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from .protocol import Failure

T = TypeVar("T")


class Returned(NamedTuple):
    """What the model returned."""

    value: Any


class Invalid(NamedTuple):
    """The items that the model called invalid, by position in the part."""

    failures: dict[int, Failure]


class Unreadable(NamedTuple):
    """What the model returned says nothing of any item, though it may have computed them."""

    failure: Failure


class OutOfMemory(NamedTuple):
    """The device had not enough memory."""

    failure: Failure


#: What became of a run. A Failure is what the model raised.
Outcome: TypeAlias = Returned | Invalid | Unreadable | OutOfMemory | Failure


class Bisection(Generic[T]):
    """Items that have neither results nor failed, and how many of them to run at once.

    Args:
        items: in order; those of a call are adjacent.
        call_of: which call an item is of; None if each is a call of its own.

    Attributes:
        items: that are left.
    """

    def __init__(self, items: Iterable[T], call_of: Callable[[T], object] | None = None) -> None:
        self.items = list(items)
        self._call_of: Callable[[T], object] = id if call_of is None else call_of
        self._suspects: list[T] = []  # the first items, if a call of them is known to be at fault
        self._most_calls = self._most_items = 0  # in a part; 0 for no bound

    def part(self, most: int) -> list[T]:
        """What to run next: at most ``most`` items, and at least one."""
        items, calls = self.items, self._most_calls
        if self._suspects:
            items, calls = self._suspects, (self._count(self._suspects) + 1) // 2
        part = items[: min(most, self._most_items or most)]
        if calls:
            groups = [list(group) for _, group in groupby(part, self._call_of)]
            part = [item for group in groups[:calls] for item in group]
        return part

    def drop(self, items: Iterable[T]) -> None:
        """These have failed, or wait for another time."""
        dropped = set(map(id, items))
        self.items = [item for item in self.items if id(item) not in dropped]
        self._suspects = [item for item in self._suspects if id(item) not in dropped]

    def done(self, part: Sequence[T]) -> None:
        """The part has results."""
        del self.items[: len(part)]
        self._most_items *= 2
        if self._suspects:
            del self._suspects[: len(part)]
        else:
            self._most_calls *= 2

    def halve(self, part: Sequence[T]) -> bool:
        """The part raised: run half of its calls next; False if it is of a single one."""
        calls = self._count(part)
        if not self._suspects:
            self._most_calls = (calls + 1) // 2
        self._suspects = list(part) if calls > 1 else []
        return calls > 1

    def reorder(self, items: Iterable[T]) -> None:
        """Run these in this order, which are all that are left."""
        self.items = list(items)
        self._suspects = []  # which are the first ones

    def shrink(self, part: Sequence[T]) -> None:
        """The part ran out of memory: run half as many items next, whatever their calls are."""
        self._most_items = (len(part) + 1) // 2

    def call(self, part: Sequence[T]) -> list[T]:
        """All items of the call that the part begins with, as far as they are left."""
        call = self._call_of(part[0])
        return [item for item in self.items if self._call_of(item) == call]

    def _count(self, items: Sequence[T]) -> int:
        """Of how many calls these are."""
        return sum(1 for _ in groupby(items, self._call_of))


class Runner(Protocol[T]):
    """Runs parts, and takes what comes of them."""

    def room(self, items: Sequence[T]) -> int:
        """How many of these items to run at once, as far as memory goes: at least one."""

    def run(self, part: list[T]) -> Outcome:
        """Have the model compute these."""

    def done(self, part: list[T], value: Any) -> None:
        """The part has results."""

    def fail(self, items: list[T], failure: Failure) -> None:
        """These fail, together."""

    def ran_out(self, search: Bisection[T], part: list[T], failure: Failure) -> None:
        """The part ran out of memory: drop items of the search, or have less run at once."""


def bisect(
    search: Bisection[T], runner: Runner[T], *, may_rerun: bool, known: Outcome | None = None
) -> int:
    """Run all items of the search, until each has results or has failed, or waits.

    Args:
        may_rerun: whether what the model raised on is run again. If not, all of its part fail.
        known: what became of the first part, if that was run already.

    Returns:
        How many runs it took since one raised.
    """
    runs, has_raised = 0, False
    while search.items:
        part = search.part(runner.room(search.items))
        runs += has_raised
        ran, known = runner.run(part) if known is None else known, None
        if isinstance(ran, Returned):
            runner.done(part, ran.value)
            search.done(part)
        elif isinstance(ran, Invalid):
            for position, failure in ran.failures.items():
                runner.fail([part[position]], failure)
            search.drop([part[position] for position in ran.failures])
        elif isinstance(ran, OutOfMemory):
            runner.ran_out(search, part, ran.failure)
        elif isinstance(ran, Unreadable):
            for item in part:  # each by itself: the failure quotes none of them
                runner.fail([item], ran.failure)
            search.drop(part)
        elif not may_rerun:
            runner.fail(part, ran)
            search.drop(part)
        else:
            has_raised = True
            if not search.halve(part):
                call = search.call(part)
                runner.fail(call, ran)
                search.drop(call)
    return runs
