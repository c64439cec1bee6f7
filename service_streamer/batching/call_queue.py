"""Calls that wait, and which of their items go into a batch.

Calls have turns (``turns``). As long as all are small, of one tenant and without a priority or a
deadline of their own, that is the order of arrival, and a deque: turns would take ten microseconds
more a call where thousands wait. Where items have lengths, the queue is a ``LengthQueue``.

Calls that are over are not searched for, only skipped when their turn comes; so ending one costs
the same however many wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..observe.record import ORDINARY, BatchRecord, Call, CallState, Reason, Span
from .learning import LearnedCost
from .policy import FIXED_COSTS, Decision, Finish
from .turns import Queued, TurnOrder, work_of

#: What a batch has of large calls, where small ones come beside them, takes at least this time,
#: seconds. Chosen by reasoning: nobody feels it, and no hand-over costs as much.
LARGE_SECONDS = 0.05
#: A call of so many batches is large, or of so many times what a batch may have of large ones.
#: Chosen by reasoning: a smaller one is over in the time of one, and another one.
LARGE = 2
#: Small calls are expected beside large ones for so many batches after the last.
#: Chosen by reasoning: who has an answer calls again within a few batches.
MIXED_BATCHES = 16

#: Members of an enum are looked up in Python, and every call asks for these.
_WAITING, _RUNNING = CallState.WAITING, CallState.RUNNING


class CallQueue:
    """The queue of calls with items that are not cut yet.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.

    Attributes:
        items: how many wait.
    """

    def __init__(
        self,
        cost: LearnedCost,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.items = 0
        self._cost = cost
        self._batch_size = batch_size
        self._weights = weights or {}
        self._turns = TurnOrder(self._weights)
        #: By arrival, with some that are over; None from the first call on that is not like the
        #: others, until none waits.
        self._alike: deque[Call] | None = deque()
        self._large: set[Call] = set()  # those that wait
        # Items of these beyond so many of each, which ``counted`` leaves out. A number of its own:
        # callers look at it without the engine's lock.
        self._most_counted, self._uncounted = LARGE * batch_size, 0
        self._large_items = float(LARGE * batch_size)  # from so many on a call is large
        self._share = math.inf  # what a batch may cost of large calls beside small ones
        self._mixed = 0  # batches for which small calls are expected beside the large ones

    def __iter__(self) -> Iterator[Call]:
        if self._alike is None:
            return iter(self._turns)
        return iter([call for call in self._alike if call.state is _WAITING])

    @property
    def work(self) -> float:
        """What those cost that wait: their lengths together, or their number."""
        return self.items

    @property
    def counted(self) -> int:
        """How many wait, if each call has at most as many as the smallest large ones."""
        return self.items - self._uncounted

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        if not self.items:  # batches of lone calls have come back, which were never here
            self._learn()
        call.state = _WAITING
        pending, alike = call.pending, self._alike
        self.items += pending
        if alike is not None:
            if pending < self._large_items and call.precedence is ORDINARY:
                alike.append(call)
                return
            self._begin_turns()
        size_class = self._size_class(call)
        if size_class:
            self._add_large(call)
        self._turns.add(call, call.pending, size_class)

    def _add_large(self, call: Call) -> None:
        self._large.add(call)
        self._uncounted += max(0, call.pending - self._most_counted)

    def _shrink_large(self, call: Call, size: int) -> None:
        """So many items of a large call are about to wait no more."""
        self._uncounted -= max(0, min(size, call.pending - self._most_counted))
        if call.pending == size:
            self._large.discard(call)

    def _begin_turns(self) -> None:
        """One call is not like the others: until none waits they have turns."""
        for call in self:
            self._turns.add(call, call.pending, 0)
        self._alike = None

    def _size_class(self, call: Call) -> int:
        """0 if the call is small."""
        return class_of(call.pending / self._large_items)

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items; without lengths, its last ones."""
        call.pending = len(positions)
        self.add(call)

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        self.items -= call.pending
        if self._alike is None:
            if call in self._turns:
                self._turns.remove(call, self._turns.get(call).items)
            if call in self._large:
                self._shrink_large(call, call.pending)
        elif len(self._alike) > 2 * self.items + 64:  # so each that is over costs little
            self._alike = deque([each for each in self if each is not call])
        self._forget_turns()

    def _forget_turns(self) -> None:
        """If no call waits: who had more turns than others has not to wait for that later."""
        if not self.items and self._alike is None:
            self._turns, self._mixed = TurnOrder(self._weights), 0
            self._alike = deque()

    def ahead(self, call: Call) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over."""
        if not self.items:
            return 0.0
        size_class = self._size_class(call)
        if self._alike is not None:
            if not size_class and call.precedence is ORDINARY:
                return self.work
            self._begin_turns()
        return self._turns.ahead(call, size_class, work_of(call), self.work / self.items)

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self._alike is not None or self._turns.is_by_arrival

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        first = next(iter(self._turns)) if self._alike is None else self._first(self._alike)
        return first.arrived_at

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        alike = self._alike
        first = self._turns.head(now).call if alike is None else self._first(alike)
        return first.deadline

    @staticmethod
    def _first(alike: deque[Call]) -> Call:
        while alike[0].state is not _WAITING:
            alike.popleft()
        return alike[0]

    def take(
        self, decision: Decision, now: float, finish: Finish, expire: Callable[[Call], None]
    ) -> BatchRecord | None:
        """Cut what was decided: the first items in order, but nothing that comes too late.

        A call whose time ends before the batch is likely back gives way as long as there are others
        to fill the batch. Under overload the oldest calls are always those whose time is about to
        end: to compute them would waste every batch. Without that need such a call is computed,
        since the expectation may be wrong. But one that is late at the earliest is left out, too,
        so that the others are sooner back; except the last one.

        Args:
            expire: ends a call that is left out.

        Returns:
            The batch, which has no number and no slot yet; None if all came too late.
        """
        self._learn()
        room, reason = decision.size, decision.reason
        is_bounded = decision.max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(decision.max_cost))
        turns, alike = self._turns, self._alike
        surely = finish.last(now, min(room, self.items))
        spans: list[Span] = []
        payloads: list[Any] = []
        # How many of each call that has turns, perhaps several.
        taken: dict[Call, int] = {}
        count = 0
        large = int(max(1.0, min(self._large_cost_now(), self._batch_size)))
        queued: Queued | None
        while count < room and self.items:
            if alike is None:
                queued = turns.head(now)
                call = queued.call
            else:
                queued, call = None, alike[0]
                if call.state is not _WAITING:
                    alike.popleft()
                    continue
            if (
                call.deadline <= surely
                and call not in taken  # else it would end while an item of it is in the batch
                and self._is_late(call, count, room - count, now, finish)
            ):
                expire(call)
                turns, alike = self._turns, self._alike
                continue
            if call.deadline < surely and not count:
                room = finish.room(call.deadline, room)
            if queued is None:
                size = call.pending if call.pending < room - count else room - count
                start = call.size - call.pending
                spans.append((call, start, start + size))
                payloads += call.payloads[start : start + size]
            else:
                size = min(turns.most(queued), room - count)
                if queued.size_class:
                    if not large:
                        reason, is_bounded = Reason.TURN, False
                        break
                    size = min(size, large)
                    large -= size
                turns.took(queued, size, float(size))
                taken[call] = taken.get(call, 0) + size
            self._cut(call, size)
            count += size
        self._forget_turns()
        for call, size in taken.items():
            stop = call.size - call.pending
            spans.append((call, stop - size, stop))
            payloads += call.payloads[stop - size : stop]
        if not spans:
            return None
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.reason = decision.cost_reason if is_bounded and self.items else reason
        return batch

    def _cut(self, call: Call, size: int) -> None:
        """So many items of the call are in a batch now."""
        if self._large and call in self._large:
            self._shrink_large(call, size)
        self.items -= size
        call.pending -= size
        if not call.pending:
            call.state = _RUNNING

    def _learn(self) -> None:
        """What is large, now that more batches are back."""
        if self._cost.is_fitted and self._learn_share():
            most = LARGE * self._batch_size
            self._large_items = min(most, max(2.0, LARGE * self._share))

    def _learn_share(self) -> bool:
        """What a batch may cost of large calls; whether that is known."""
        base, per_unit = self._cost.padding
        if per_unit:
            self._share = max(LARGE_SECONDS, FIXED_COSTS * base) / per_unit
        return per_unit > 0.0

    def _large_cost_now(self) -> float:
        """What the next batch may cost of large calls, where small ones come beside them.

        The next small one waits for all of the batch. So that is no longer than it has to be to be
        nearly as fast as a full one, or to be felt.
        """
        if not self._large:
            return math.inf
        if self.items > sum([call.pending for call in self._large]):
            self._mixed = MIXED_BATCHES
        elif self._mixed:
            self._mixed -= 1
        else:
            return math.inf
        return self._share

    def _is_late(self, call: Call, taken: int, room: int, now: float, finish: Finish) -> bool:
        """Whether the call comes too late in a batch of what was taken, and what fits besides.

        The first one only if it does in the smallest batch that is worth it.
        """
        size = taken + min(room, self.items)
        judged = size if taken or size < finish.least else finish.least
        deadline, added = call.deadline, finish.each * judged
        if deadline <= now:
            return True
        if not taken and self.items == call.pending:
            return False  # if none was computed, it would never be known that they are not late
        if deadline < finish.earliest + added:
            return True
        return deadline < finish.likely + added and self.items > room

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        waiting = [*self]
        assert self.items == sum(call.pending for call in waiting)
        assert all(call.state is _WAITING for call in waiting)
        assert self._large <= {*waiting}
        most = LARGE * self._batch_size
        assert self.counted == sum(min(call.pending, most) for call in waiting)
        self._turns.check_invariants()


def class_of(size: float) -> int:
    """The class of a call that is so many times as large as the smallest large ones; 0 if small.

    Those of one class are within a factor of two.
    """
    return int(min(size, 2.0**60)).bit_length() if size >= 1.0 else 0
