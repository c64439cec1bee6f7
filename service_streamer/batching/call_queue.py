"""Calls that wait, and which of their items go into a batch.

Calls have turns (``turns``). Where items have lengths, the neighbours in length of the one whose
turn it is go along with it, out of a window (``length_window``), into which calls come in their
turn.

Calls that are over are not searched for, only skipped when their turn comes; so ending one costs
the same however many wait.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..observe.record import BatchRecord, Call, CallState, Reason, Span
from . import tuning
from .learning import LearnedCost
from .length_window import LengthWindow
from .policy import Decision, Finish
from .turns import TurnOrder, work_of

#: Members of an enum are looked up in Python, and every call asks for these.
_WAITING, _RUNNING = CallState.WAITING, CallState.RUNNING


class CallQueue:
    """The queue of calls with items that are not cut yet.

    Args:
        cost: what batches cost; learned elsewhere.
        batch_size: the most items of a batch.
        weights: of the tenants whose weight is not 1.
        has_lengths: whether items have lengths.

    Attributes:
        items: how many wait.
    """

    def __init__(
        self,
        cost: LearnedCost,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        *,
        has_lengths: bool = False,
    ) -> None:
        self.items = 0
        self._cost = cost
        self._batch_size = batch_size
        self._weights = weights or {}
        self._turns = TurnOrder(self._weights)  # of what is not in the window
        self._window = LengthWindow(cost, batch_size, self._weights) if has_lengths else None
        self._large: set[Call] = set()  # those that wait
        # From how many items on a call is large, and from which cost on.
        self._large_items, self._large_cost = float(tuning.LARGE * batch_size), math.inf
        self._share = math.inf  # what a batch may cost of large calls beside small ones
        self._mixed = 0  # batches for which small calls are expected beside the large ones

    def __iter__(self) -> Iterator[Call]:
        inside: Sequence[Call] = () if self._window is None else [*self._window]
        yield from inside
        yield from [call for call in self._turns if call not in inside]

    @property
    def work(self) -> float:
        """What those cost that wait: their lengths together, or their number."""
        return self.items if self._window is None else self._turns.work + self._window.work

    @property
    def counted(self) -> int:
        """How many wait, if each call has at most as many as the smallest large ones."""
        most = tuning.LARGE * self._batch_size
        return self.items - sum([max(0, call.pending - most) for call in self._large])

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        if not self.items:  # batches of lone calls have come back, which were never here
            self._learn()
        call.state = _WAITING
        self.items += call.pending
        self._turns.add(call, call.pending, self._classify(call))

    def _classify(self, call: Call) -> int:
        """The class of size of a call that is about to wait."""
        size_class = self._size_class(call)
        if size_class:
            self._large.add(call)
        return size_class

    def _size_class(self, call: Call) -> int:
        """0 if the call is small; a class of large ones is within a factor of two."""
        size = call.pending / self._large_items
        if self._window is not None:
            size = max(size, work_of(call) / self._large_cost)
        return int(min(size, 2.0**60)).bit_length() if size >= 1.0 else 0

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items; without lengths, its last ones."""
        call.pending = len(positions)
        if self._window is None or call.pending == call.size:
            self.add(call)
            return
        call.state = _WAITING
        self.items += call.pending
        size_class, inside = self._classify(call), call.pending
        if size_class:
            # The others, its last ones, have turns before they are in the window.
            while inside > 1 and positions[inside - 1] == call.size - call.pending + inside - 1:
                inside -= 1
            if inside < call.pending:
                self._turns.add(call, call.pending - inside, size_class)
        self._window.add(call, positions[:inside], size_class)

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        if self._window is not None:
            self._window.remove(call)
        if call in self._turns:
            self._turns.remove(call, self._turns.get(call).items)
        self.items -= call.pending
        self._large.discard(call)
        self._forget_turns()

    def _forget_turns(self) -> None:
        """If no call waits: who had more turns than others has not to wait for that later."""
        if not self.items:
            self._turns, self._mixed = TurnOrder(self._weights), 0

    def ahead(self, call: Call) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over."""
        if not self.items:
            return 0.0
        size_class, work, unit = self._size_class(call), work_of(call), self.work / self.items
        ahead = self._turns.ahead(call, size_class, work, unit)
        if self._window is not None:
            ahead += self._window.ahead(call, size_class, work, unit)
        return ahead

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self._window is None and self._turns.is_by_arrival

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        oldest = next(iter(self._turns), None)
        arrived_at = math.inf if oldest is None else oldest.arrived_at
        if self._window is None or not self._window.items:
            return arrived_at
        return min(arrived_at, self._window.oldest().arrived_at)

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        if self._window is not None and self._window.items:
            return self._window.head(now).deadline
        return self._turns.head(now).call.deadline

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
        if self._window is not None:
            return self._take_neighbours(self._window, decision, now, finish, expire)
        room, reason = decision.size, decision.reason
        is_bounded = decision.max_cost < room
        if is_bounded:  # each costs one
            room = max(1, int(decision.max_cost))
        turns, surely = self._turns, finish.last(now, min(room, self.items))
        # How many of each call, which may have several turns.
        taken: dict[Call, int] = {}
        count = 0
        large = int(max(1.0, min(self._large_cost_now(), self._batch_size)))
        while count < room and self.items:
            queued = turns.head(now)
            call = queued.call
            if (
                call.deadline <= surely
                and call not in taken  # else it would end while an item of it is in the batch
                and self._is_late(call, count, room - count, now, finish)
            ):
                expire(call)
                turns = self._turns
                continue
            if call.deadline < surely and not count:
                room = finish.room(call.deadline, room)
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
        if not taken:
            return None
        spans: list[Span] = []
        payloads: list[Any] = []
        for call, size in taken.items():
            stop = call.size - call.pending
            spans.append((call, stop - size, stop))
            payloads += call.payloads[stop - size : stop]
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.reason = decision.cost_reason if is_bounded and self.items else reason
        return batch

    def _cut(self, call: Call, size: int) -> None:
        """So many items of the call are in a batch now."""
        self.items -= size
        call.pending -= size
        if not call.pending:
            call.state = _RUNNING
            self._large.discard(call)

    def _learn(self) -> None:
        """What is large, now that more batches are back."""
        base, per_unit = self._cost.padding
        has_lengths = self._window is not None
        if not per_unit or not (has_lengths or self._cost.is_fitted):
            return  # without lengths all items are alike: nothing has to be guessed
        self._share = max(tuning.LARGE_SECONDS, tuning.FIXED_COSTS * base) / per_unit
        if not has_lengths:
            self._large_items = min(
                tuning.LARGE * self._batch_size, max(2.0, tuning.LARGE * self._share)
            )
        else:
            self._large_cost = max(tuning.LARGE * self._share, sys.float_info.min)

    def _large_cost_now(self) -> float:
        """What the next batch may cost of large calls, where small ones come beside them.

        The next small one waits for all of the batch. So that is no longer than it has to be to be
        nearly as fast as a full one, or to be felt.
        """
        if not self._large:
            return math.inf
        if self.items > sum([call.pending for call in self._large]):
            self._mixed = tuning.MIXED_BATCHES
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

    # -- where items have lengths

    def _fill(self, window: LengthWindow, now: float) -> None:
        """Calls enter the window in turn: small ones as a whole, so it may be more than full."""
        turns = self._turns
        while window.items < window.size and self.items > window.items:
            queued = turns.head(now)
            call, left, size = queued.call, queued.items, queued.items
            if queued.size_class:
                size = min(turns.most(queued), window.size - window.items)
                if size > 1 and 2 * window.items > window.size:
                    break  # it is alone: to sort many at once takes less
            start = call.size - left
            # Items without length cost too: a tenant with no others would always be next.
            cost = sum(call.lengths[start : start + size]) if call.lengths else 0.0
            turns.took(queued, size, cost or float(size))
            window.add(call, range(start, start + size), queued.size_class)

    def _take_neighbours(
        self,
        window: LengthWindow,
        decision: Decision,
        now: float,
        finish: Finish,
        expire: Callable[[Call], None],
    ) -> BatchRecord | None:
        """Cut the first item in turn, and its neighbours in length, as ``take`` does."""
        room = decision.size
        surely = finish.last(now, min(room, self.items))

        def is_left_out(call: Call) -> bool:
            """Whether an entry of the call is not to be cut, now or any more."""
            if call.state is not _WAITING:
                return True
            if call.deadline > surely or not self._is_late(call, 0, room, now, finish):
                return False  # as nearly always
            expire(call)
            return True

        self._fill(window, now)
        while self.items and is_left_out(window.head(now)):
            self._fill(window, now)
        if not self.items:
            return None
        chosen, length, reason = window.take(
            room, decision.max_cost, now, is_left_out, self._large, self._large_cost_now()
        )
        calls = Counter([call for _, _, call, _ in chosen])  # how many of each
        if len(calls) < len(chosen):  # those of a call together, so that it is one to whoever looks
            order = {call: number for number, call in enumerate(calls)}
            chosen.sort(key=lambda entry: (order[entry[2]], entry[3]))
        spans: list[Span] = []
        payloads: list[Any] = []
        for _, _, call, index in chosen:
            if spans and spans[-1][0] is call and spans[-1][2] == index:
                spans[-1] = (call, spans[-1][1], index + 1)
            else:
                spans.append((call, index, index + 1))
            payloads.append(call.payloads[index])
        for call, count in calls.items():
            self._cut(call, count)
        self._forget_turns()
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.cost, batch.calls = batch.size * length, len(calls)
        if reason is None or batch.size == room or not self.items:
            reason = decision.reason
        batch.reason = decision.cost_reason if reason is Reason.COST else reason
        return batch

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if what waits and the counts differ. For tests."""
        waiting = [*self]
        assert self.items == sum(call.pending for call in waiting)
        assert all(call.state is _WAITING for call in waiting)
        assert self._large <= {*waiting}
        most = tuning.LARGE * self._batch_size
        assert self.counted == sum(min(call.pending, most) for call in waiting)
        self._turns.check_invariants()
        inside = 0
        if self._window is not None:
            self._window.check_invariants()
            inside = self._window.items
        assert self.items - inside == sum(self._turns.get(call).items for call in self._turns)


def run(call: Call) -> None:
    """All items of the call, which is new, go into a batch."""
    call.pending = 0
    call.state = _RUNNING
