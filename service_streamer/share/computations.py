"""Which callers each computation answers: identical items in flight are computed once.

    computation  held by                            leaves when
    -----------  -------                            -----------
    OPEN         Computations._open and its keys    it comes back, fails, or all its callers left
    OVER         nothing                            -

A computation is one call of the backend's: those items of a caller that were not in flight. A
caller is one call that came here: each of its items is in a computation, its own or another's, or
has been answered. The caller that a computation was made for may leave it like any other.

A caller joins a computation only if it serves as well as its own would:

    the computation                             is joined by
    ---------------                             ------------
    is with a worker                            every caller
    waits, of another tenant                    none: a flood must not delay the other tenants
    waits, with a deadline of its caller's      callers with a later deadline, or without one
    waits, with a priority                      callers without a deadline, of at most that priority
    ends before the caller's time does          none, if it cannot be extended

A caller that can join none gets a computation of its own. Nothing here does I/O, reads a clock,
locks or logs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from ..observe.record import ORDINARY
from .callers import Caller, Computation


class Ending(enum.Enum):
    """Why a computation has no results, and who fails of that; the others are served anew.

    Only what was ``COMPUTED`` may have run in a worker: see ``may_rerun`` of ``Computations``.
    """

    COMPUTED = "it was with a worker: callers fail all of whose items it had"
    NOT_SENT = "an item cannot travel, or it cannot start again: the same callers fail"
    LATE = "it was not with a worker by its time: callers fail whose time ends then, too"
    HOPELESS = "it was refused for its time: of the same callers those whose time ends then, too"
    REFUSED = "the backend did not accept it from the caller that it was made for: no other fails"


class Joined(NamedTuple):
    """What became of a call.

    Attributes:
        computation: to be submitted: the items that were not in flight. None if there were none.
        outlived: computations that the caller waits for longer than the backend: to be extended.
        is_complete: whether all of it was in the cache: then it is over.
    """

    computation: Computation | None
    outlived: Sequence[Computation]
    is_complete: bool


class Outcome(NamedTuple):
    """What to do when a computation has failed.

    Attributes:
        failed: callers that fail with it.
        sharers: callers that fail, too, though they wait for only some of its items.
        restarted: computations to be submitted for the others.
        abandoned: computations without a caller now: to be withdrawn, if they are submitted.
    """

    failed: Sequence[Caller]
    sharers: Sequence[Caller]
    restarted: Sequence[Computation]
    abandoned: Sequence[Computation]


class Computations:
    """All that are in flight.

    Args:
        can_extend: whether the backend can keep a call longer.
        slack: otherwise, how many times longer than its first caller waits it keeps a computation,
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

    def join(
        self, caller: Caller, keys: Sequence[bytes | None], items: Sequence[Any], now: float
    ) -> Joined:
        """A call has come. If the cache has all of it, it is over."""
        by_key, cache = self._by_key, self._cache
        caller.joined_at = now
        own: Computation | None = None
        outlived: list[Computation] = []
        for position, key in enumerate(keys):
            if key is not None:
                if cache is not None:
                    output = cache.get(key, _MISSING)
                    if output is not _MISSING:
                        caller.outputs[position] = output
                        caller.missing -= 1
                        self.cached += 1
                        continue
                found = by_key.get(key)
                place = None if found is None else self._place(found, own, caller)
                if place is not None:
                    computation, slot = place
                    computation.waiting[slot].append((caller, position))
                    if computation not in caller.computations:
                        caller.computations[computation] = None
                        computation.caller_count += 1
                        if (
                            caller.deadline > computation.until
                            and not computation.precedence.has_deadline
                        ):
                            outlived.append(computation)
                    continue
            if own is None:
                until = deadline = caller.deadline
                if self._slack > 1:
                    until += (self._slack - 1) * (deadline - now)
                own = Computation(caller.precedence, deadline, until, now)
                own.caller_count = 1
                caller.own = own
                caller.computations[own] = None
                self._open[own] = None
            slot = own.add(key, items[position])
            own.waiting[slot].append((caller, position))
            if key is not None:
                by_key.setdefault(key, []).append((own, slot))
        caller.is_over = not caller.missing
        return Joined(own, outlived, caller.is_over)

    def _place(
        self, found: list[tuple[Computation, int]], own: Computation | None, caller: Caller
    ) -> tuple[Computation, int] | None:
        for place in reversed(found):
            if place[0] is own or self._serves(place[0], caller):
                return place
        return None

    def _serves(self, computation: Computation, caller: Caller) -> bool:
        """Whether the caller fares no worse with the computation than with its own."""
        if not self._can_extend and caller.deadline > computation.until:
            return False
        has, wants = computation.precedence, caller.precedence
        if (has is ORDINARY and wants is ORDINARY) or computation.is_running:
            return True
        if has.tenant != wants.tenant:
            return False
        if wants.has_deadline:
            return has.has_deadline and computation.due <= caller.deadline
        return has.has_deadline or has.priority >= wants.priority

    def can_cancel(self, caller: Caller) -> bool:
        """Whether nothing of it is with a worker but what others wait for, too."""
        return not caller.is_over and not any(
            computation.caller_count == 1 and computation.is_running
            for computation in caller.computations
        )

    def leave(self, caller: Caller) -> list[Computation]:
        """The caller no longer waits; returns the computations that no caller waits for then."""
        abandoned: list[Computation] = []
        if caller.is_over:
            return abandoned
        for computation in caller.computations:
            computation.caller_count -= 1
            computation.left_count += 1
            if not computation.caller_count:
                self._end(computation)
                abandoned.append(computation)
            # Or callers that try again and again would fill up a computation that never ends.
            elif computation.left_count > 32 and computation.left_count > computation.caller_count:
                computation.waiting = [
                    [(each, at) for each, at in waiting if each is not caller and not each.is_over]
                    for waiting in computation.waiting
                ]
                computation.left_count = 0
        caller.is_over = True
        caller.computations = {}
        caller.outputs = []
        return abandoned

    # -- the backend

    def answered(
        self, computation: Computation, outputs: Sequence[Any], call: Any = None
    ) -> list[Caller]:
        """Outputs of the backend's call, by item; returns the callers that are complete now."""
        if computation.is_over:  # given up, just now
            return []
        complete: list[Caller] = []
        cache = None if computation in self._stale else self._cache
        for key, waiting, output in zip(
            computation.keys, computation.waiting, outputs, strict=True
        ):
            if len(waiting) > 1:
                waiting = [entry for entry in waiting if not entry[0].is_over]
                self.deduplicated += max(0, len(waiting) - 1)
            if self._shared is not None and (cache is not None or len(waiting) > 1):
                output = self._shared(output)
            if cache is not None and key is not None:
                cache[key] = output
            for caller, position in waiting:
                if caller.is_over:
                    continue
                caller.outputs[position] = output
                caller.missing -= 1
                if not caller.missing:
                    caller.is_over = True
                    caller.answered_by = call
                    caller.missed = max(0.0, caller.joined_at - computation.submitted_at)
                    complete.append(caller)
        for waiting in computation.waiting:
            for caller, _ in waiting:
                caller.computations.pop(computation, None)
        self._end(computation)
        return complete

    def failed(
        self, computation: Computation, now: float, ending: Ending = Ending.COMPUTED
    ) -> Outcome:
        """A computation has failed, or was refused."""
        if computation.is_over:
            return Outcome((), (), (), ())
        left = self._waiting_callers(computation)
        self._end(computation)
        failed: list[Caller] = []
        sharers: list[Caller] = []
        for caller, items in left.items():
            # A call fails of any of its items. Whoever waits for some of them only does not know
            # that it is of theirs: so these are computed again, each by itself.
            fails = ending is not Ending.REFUSED and items == len(computation.items)
            if ending is Ending.LATE:
                fails = caller.deadline <= computation.until
            elif ending is Ending.HOPELESS:
                fails = fails and caller.deadline <= computation.until
            if fails:
                failed.append(caller)
            elif ending is Ending.COMPUTED and not self._may_rerun:
                sharers.append(caller)
            del caller.computations[computation]
        over = [*failed, *sharers]
        abandoned = [left for caller in over for left in self.leave(caller)]
        return Outcome(failed, sharers, [*self._split(computation, now)], abandoned)

    def _split(self, computation: Computation, now: float) -> Iterable[Computation]:
        """Make a new computation for each item of the old one that somebody waits for."""
        for key, item, waiting in zip(
            computation.keys, computation.items, computation.waiting, strict=True
        ):
            waiting = [entry for entry in waiting if not entry[0].is_over]
            if not waiting:
                continue
            callers = {caller: None for caller, _ in waiting}
            first = min(callers, key=_urgency)
            until = due = first.deadline
            if not first.precedence.has_deadline:
                until = max(caller.deadline for caller in callers)
            again = Computation(first.precedence, due, until, now)
            again.add(key, item)
            again.waiting[0] = waiting
            again.caller_count = len(callers)
            for caller in callers:
                caller.computations[again] = None
            self._open[again] = None
            if key is not None:
                self._by_key.setdefault(key, []).append((again, 0))
            yield again

    def refused(self, computation: Computation | None, caller: Caller) -> list[Computation]:
        """The backend did not accept the computation of a caller, which gets the error itself.

        Returns:
            Computations without a caller then. A caller that joined this one meanwhile stays.
        """
        return [left for left in self.leave(caller) if left is not computation]

    # -- the cache

    def forget(self) -> None:
        """Empty the cache; what is in flight now does not come into it either."""
        if self._cache is not None:
            self._cache.clear()
            self._stale = set(self._open)

    # -- inside

    def _end(self, computation: Computation) -> None:
        computation.is_over = True
        self._open.pop(computation, None)  # ``join`` may have been interrupted
        self._stale.discard(computation)
        for key in computation.keys:
            if key is not None:
                found = self._by_key.get(key, [])
                found[:] = [entry for entry in found if entry[0] is not computation]
                if not found:
                    self._by_key.pop(key, None)

    @staticmethod
    def _waiting_callers(computation: Computation) -> dict[Caller, int]:
        """Who waits for how many of the computation's items."""
        counts: dict[Caller, int] = {}
        for waiting in computation.waiting:
            for caller in {caller: None for caller, _ in waiting}:
                if not caller.is_over:
                    counts[caller] = counts.get(caller, 0) + 1
        return counts

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself: a bug here. For tests."""
        for computation in self._open:
            assert not computation.is_over
            callers = self._waiting_callers(computation)
            assert computation.caller_count == len(callers) > 0
            assert all(computation in caller.computations for caller in callers)
            assert len(computation.items) == len(computation.keys) == len(computation.waiting) > 0
        for key, found in self._by_key.items():
            assert found
            assert all(
                computation in self._open and computation.keys[slot] == key
                for computation, slot in found
            )
        assert self._stale <= self._open.keys()


_MISSING = object()


def _urgency(caller: Caller) -> tuple[bool, float]:
    """The least is the most urgent."""
    has_deadline = caller.precedence.has_deadline
    return not has_deadline, caller.deadline if has_deadline else -caller.precedence.priority
