"""Who is answered by whose computation: identical items in flight are computed once.

    flight    held by                            leaves when
    ------    -------                            -----------
    OPEN      Computations._open, and by its keys     it comes back, fails, or nobody waits for it
    OVER      nothing                            -

A flight is one call of the backend's: those items of a passenger's that were not in flight. A
passenger is one call of a caller's: each of its items is on a flight, its own or another's, or has
been answered. The passenger that a flight was made for may leave it as any other.

A flight is boarded only if it serves as well as one's own would:

    the flight                                  is boarded by
    ----------                                  -------------
    is with a worker                            everybody
    waits, of another tenant                    nobody: the flood of one must not hold up the others
    waits, with a deadline of its caller's      those whose own is not before it, and who have none
    waits, with a priority                      those without a deadline whose own is not higher
    ends before the passenger's time does       nobody, if it cannot be extended

Whoever can board none makes a flight of their own. Nothing here does I/O, reads a clock, locks or
logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from ..observe.record import ORDINARY
from .callers import Caller, Computation

__all__ = ["Caller", "Computation", "Computations", "Joined", "Outcome"]


class Joined(NamedTuple):
    """What became of a call.

    Attributes:
        flight: to be submitted: the items that were not in flight. None if there were none.
        outlived: flights that the passenger waits for longer than the backend: to be extended.
        is_complete: whether all of it was in the cache: then it is over.
    """

    flight: Computation | None
    outlived: Sequence[Computation]
    is_complete: bool


class Outcome(NamedTuple):
    """What to do when a flight has failed.

    Attributes:
        failed: passengers that fail with it: all of its items are theirs.
        bystanders: passengers that fail, too, though only some of its items are theirs.
        launched: flights to be submitted for the others.
        abandoned: flights that nobody waits for any more: to be withdrawn, if they are submitted.
    """

    failed: Sequence[Caller]
    bystanders: Sequence[Caller]
    launched: Sequence[Computation]
    abandoned: Sequence[Computation]


class Computations:
    """All that are in flight.

    Args:
        can_extend: whether the backend can be told to keep a call longer.
        slack: otherwise, how many times longer than its first passenger waits it keeps a flight,
            for those that come later.
        may_rerun: whether an item may be computed again for others, when the call failed that it
            was a part of.
        cache: of outputs by key; None keeps none.
        shared: makes of an output one that several get, and the cache; None takes it as it is.

    Attributes:
        deduplicated: items that were answered by the computation of another, so far.
        cached: items that were answered from the cache, so far.
    """

    def __init__(
        self,
        *,
        can_extend: bool = True,
        slack: float = 1.0,
        may_rerun: bool = True,
        cache: MutableMapping[bytes, Any] | None = None,
        shared: Callable[[Any], Any] | None = None,
    ) -> None:
        self._can_extend = can_extend
        self._slack = slack
        self._may_rerun = may_rerun
        self._cache = cache
        self._shared = shared
        # Nearly always one for each; never many: one that waits for each tenant and priority.
        self._by_key: dict[bytes, list[tuple[Computation, int]]] = {}
        self._stale: set[Computation] = set()  # those whose outputs are too old for the cache
        self._open: dict[Computation, None] = {}
        self.deduplicated = self.cached = 0

    def __len__(self) -> int:
        return len(self._open)

    # -- callers

    def board(
        self, passenger: Caller, keys: Sequence[bytes | None], items: Sequence[Any], now: float
    ) -> Joined:
        """A call has come. If nothing is missing then, it is over."""
        by_key, cache = self._by_key, self._cache
        passenger.boarded_at = now
        own: Computation | None = None
        outlived: list[Computation] = []
        for position, key in enumerate(keys):
            if key is not None:
                if cache is not None:
                    output = cache.get(key, _MISSING)
                    if output is not _MISSING:
                        passenger.outputs[position] = output
                        passenger.missing -= 1
                        self.cached += 1
                        continue
                found = by_key.get(key)
                place = None if found is None else self._place(found, own, passenger)
                if place is not None:
                    flight, slot = place
                    flight.waiting[slot].append((passenger, position))
                    if flight not in passenger.flights:
                        passenger.flights[flight] = None
                        flight.aboard += 1
                        if passenger.deadline > flight.until and not flight.precedence.has_deadline:
                            outlived.append(flight)
                    continue
            if own is None:
                until = deadline = passenger.deadline
                if self._slack > 1:
                    until += (self._slack - 1) * (deadline - now)
                own = Computation(passenger.precedence, deadline, until, now)
                own.aboard = 1
                passenger.flights[own] = None
                self._open[own] = None
            slot = own.add(key, items[position])
            own.waiting[slot].append((passenger, position))
            if key is not None:
                by_key.setdefault(key, []).append((own, slot))
        passenger.is_over = not passenger.missing
        return Joined(own, outlived, passenger.is_over)

    def _place(
        self, found: list[tuple[Computation, int]], own: Computation | None, passenger: Caller
    ) -> tuple[Computation, int] | None:
        for place in reversed(found):
            if place[0] is own or self._serves(place[0], passenger):
                return place
        return None

    def _serves(self, flight: Computation, passenger: Caller) -> bool:
        """Whether the passenger fares no worse with the flight than with its own."""
        if not self._can_extend and passenger.deadline > flight.until:
            return False
        has, wants = flight.precedence, passenger.precedence
        if (has is ORDINARY and wants is ORDINARY) or flight.is_running:
            return True
        if has.tenant != wants.tenant:
            return False
        if wants.has_deadline:
            return has.has_deadline and flight.due <= passenger.deadline
        return has.has_deadline or has.priority >= wants.priority

    def can_cancel(self, passenger: Caller) -> bool:
        """Whether nothing of it is with a worker but what others wait for, too."""
        return not passenger.is_over and not any(
            flight.aboard == 1 and flight.is_running for flight in passenger.flights
        )

    def leave(self, passenger: Caller) -> list[Computation]:
        """It is not waited for any more; returns the flights that nobody waits for then."""
        abandoned: list[Computation] = []
        if passenger.is_over:
            return abandoned
        for flight in passenger.flights:
            flight.aboard -= 1
            flight.gone += 1
            if not flight.aboard:
                self._end(flight)
                abandoned.append(flight)
            # Or callers who try again and again would fill up a flight that never ends.
            elif flight.gone > 32 and flight.gone > flight.aboard:
                flight.waiting = [
                    [
                        (each, at)
                        for each, at in waiting
                        if each is not passenger and not each.is_over
                    ]
                    for waiting in flight.waiting
                ]
                flight.gone = 0
        passenger.is_over = True
        passenger.flights = {}
        passenger.outputs = []
        return abandoned

    # -- the backend

    def answered(
        self, flight: Computation, outputs: Sequence[Any], call: Any = None
    ) -> list[Caller]:
        """Outputs by item, of the backend's call; returns who has all of theirs now."""
        if flight.is_over:  # given up, just now
            return []
        complete: list[Caller] = []
        cache = None if flight in self._stale else self._cache
        for key, waiting, output in zip(flight.keys, flight.waiting, outputs, strict=True):
            if len(waiting) > 1:
                waiting = [entry for entry in waiting if not entry[0].is_over]
                self.deduplicated += max(0, len(waiting) - 1)
            if self._shared is not None and (cache is not None or len(waiting) > 1):
                output = self._shared(output)
            if cache is not None and key is not None:
                cache[key] = output
            for passenger, position in waiting:
                if passenger.is_over:
                    continue
                passenger.outputs[position] = output
                passenger.missing -= 1
                if not passenger.missing:
                    passenger.is_over = True
                    passenger.answered_by = call
                    passenger.missed = max(0.0, passenger.boarded_at - flight.launched_at)
                    complete.append(passenger)
        for waiting in flight.waiting:
            for passenger, _ in waiting:
                passenger.flights.pop(flight, None)
        self._end(flight)
        return complete

    def failed(
        self, flight: Computation, now: float, *, is_late: bool = False, is_final: bool = False
    ) -> Outcome:
        """A flight has failed, or was refused.

        Args:
            is_late: it was not with a worker by its time. That is the end for those only whose time
                ends then, too.
            is_final: nothing is to be tried again.
        """
        if flight.is_over:
            return Outcome((), (), (), ())
        left = self._aboard(flight)
        self._end(flight)
        failed: list[Caller] = []
        bystanders: list[Caller] = []
        for passenger, items in left.items():
            # A call fails of any of its items. Whoever waits for some of them only does not know
            # that it is of theirs: so these are computed again, each by itself.
            is_all_theirs = items == len(flight.items)
            if is_final or (passenger.deadline <= flight.until if is_late else is_all_theirs):
                failed.append(passenger)
            elif not self._may_rerun and not is_late:
                bystanders.append(passenger)
            del passenger.flights[flight]
        over = [*failed, *bystanders]
        abandoned = [left for passenger in over for left in self.leave(passenger)]
        return Outcome(failed, bystanders, [*self._launch_again(flight, now)], abandoned)

    def _launch_again(self, flight: Computation, now: float) -> Iterable[Computation]:
        """Make a new flight for each item of the old one that somebody waits for."""
        for key, item, waiting in zip(flight.keys, flight.items, flight.waiting, strict=True):
            waiting = [entry for entry in waiting if not entry[0].is_over]
            if not waiting:
                continue
            passengers = {passenger: None for passenger, _ in waiting}
            first = min(passengers, key=_urgency)
            until = due = first.deadline
            if not first.precedence.has_deadline:
                until = max(passenger.deadline for passenger in passengers)
            again = Computation(first.precedence, due, until, now)
            again.add(key, item)
            again.waiting[0] = waiting
            again.aboard = len(passengers)
            for passenger in passengers:
                passenger.flights[again] = None
            self._open[again] = None
            if key is not None:
                self._by_key.setdefault(key, []).append((again, 0))
            yield again

    def refused(self, flight: Computation, passenger: Caller) -> list[Computation]:
        """The backend did not accept the flight of a passenger, which is told so itself.

        Returns:
            Computations without a caller then. A caller that joined this one meanwhile stays.
        """
        return [left for left in self.leave(passenger) if left is not flight]

    # -- the cache

    def forget(self) -> None:
        """Empty the cache; what is in flight now does not come into it either."""
        if self._cache is not None:
            self._cache.clear()
            self._stale = set(self._open)

    # -- inside

    def _end(self, flight: Computation) -> None:
        flight.is_over = True
        del self._open[flight]
        self._stale.discard(flight)
        for key in flight.keys:
            if key is not None:
                found = self._by_key[key]
                if len(found) == 1:
                    del self._by_key[key]
                else:
                    found[:] = [entry for entry in found if entry[0] is not flight]

    @staticmethod
    def _aboard(flight: Computation) -> dict[Caller, int]:
        """Who waits for how many of the flight's items."""
        counts: dict[Caller, int] = {}
        for waiting in flight.waiting:
            for passenger in {passenger: None for passenger, _ in waiting}:
                if not passenger.is_over:
                    counts[passenger] = counts.get(passenger, 0) + 1
        return counts

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        for flight in self._open:
            assert not flight.is_over
            aboard = self._aboard(flight)
            assert flight.aboard == len(aboard) > 0
            assert all(flight in passenger.flights for passenger in aboard)
            assert len(flight.items) == len(flight.keys) == len(flight.waiting) > 0
        for key, found in self._by_key.items():
            assert found
            assert all(flight in self._open and flight.keys[slot] == key for flight, slot in found)
        assert self._stale <= self._open.keys()


_MISSING = object()


def _urgency(passenger: Caller) -> tuple[bool, float]:
    """The least is the most urgent."""
    has_deadline = passenger.precedence.has_deadline
    return not has_deadline, passenger.deadline if has_deadline else -passenger.precedence.priority
