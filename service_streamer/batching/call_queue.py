"""Calls that wait, and which of their items go into a batch.

As long as all calls are alike they go by arrival. With the first that is of a tenant, has a
priority or a deadline of its own, or is of another class of size, all have turns (``turns``), until
none waits. Where items have lengths, the neighbours in length of the one whose turn it is go along
with it, out of a window (``length_window``), into which calls come in their turn.

Calls that are over are not searched for, only skipped when their turn comes; so ending one costs
the same however many wait.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..observe.record import ORDINARY, BatchRecord, Call, CallState, Reason, Span
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
        work: what they cost: their lengths together, or their number.
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
        self._most_counted = tuning.LARGE * batch_size  # of a call
        self._uncounted = 0
        self._work = 0.0  # while items have lengths
        self._cost = cost
        self._batch_size = batch_size
        self._share = math.inf  # what a batch may cost of large calls beside small ones
        # From how many items on a call is large, and from which cost on.
        self._large_items, self._large_cost = float(tuning.LARGE * batch_size), math.inf
        self._weights = weights or {}
        self._calls: deque[Call] = deque()  # empty while they have turns
        self._turns: TurnOrder | None = None
        self._window = LengthWindow(cost, batch_size, self._weights) if has_lengths else None
        self._large: set[Call] = set()  # those that wait
        # Of all of them, as long as they have no turns. Into a window large ones come in turn.
        self._class = 0
        self._mixed = 0  # batches for which small calls are expected beside the large ones

    def __iter__(self) -> Iterator[Call]:
        if self._window is not None:
            yield from self._window
        if self._turns is None:
            yield from [call for call in self._calls if call.state is _WAITING]
        else:
            held = self._window or ()
            yield from [call for call in self._turns if call not in held]

    @property
    def work(self) -> float:
        return self.items if self._window is None else self._work

    @property
    def counted(self) -> int:
        """How many wait, if each call has at most as many as the smallest large ones."""
        return self.items - self._uncounted

    @property
    def _outside(self) -> int:
        """How many items are not in the window."""
        return self.items if self._window is None else self.items - self._window.items

    def add(self, call: Call) -> None:
        """The call waits from now on."""
        if not self.items:  # batches of lone calls have come back, which were never here
            self._learn()
        call.state = _WAITING
        self.items += call.pending
        if call.pending > self._most_counted:
            self._uncounted += call.pending - self._most_counted
        size_class, work = 0, 0.0
        if self._window is not None:
            work = work_of(call)
            self._work += work
        if call.pending >= self._large_items or work >= self._large_cost:
            size_class = self._size_class(call)
            self._large.add(call)
        if self._window is None and self.items == call.pending:  # nothing waits beside it
            self._class = size_class
        if self._turns is None and size_class == self._class and call.precedence is ORDINARY:
            self._calls.append(call)
        else:
            (self._turns or self._take_turns()).add(call, call.pending, size_class)

    def _take_turns(self) -> TurnOrder:
        """Whose turn it is, from now on until no call waits."""
        if self._turns is None:
            waiting = {call: call.pending for call in self._calls if call.state is _WAITING}
            self._turns = TurnOrder(self._weights, waiting, self._class)
            self._calls.clear()
        return self._turns

    def _size_class(self, call: Call) -> int:
        """0 if the call is small; a class of large ones is within a factor of two."""
        size = max(call.pending / self._large_items, work_of(call) / self._large_cost)
        return int(min(size, 2.0**60)).bit_length()

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """The call waits again with these items; without lengths, its last ones."""
        call.pending = len(positions)
        if self._window is None or call.pending == call.size:
            self.add(call)
            return
        call.state = _WAITING
        self.items += call.pending
        self._uncounted += max(0, call.pending - self._most_counted)
        lengths = call.lengths
        self._work += sum([1.0 if lengths is None else lengths[i] for i in positions])
        size_class, inside = self._size_class(call), call.pending
        if size_class:
            self._large.add(call)
            # The others, its last ones, have turns before they are in the window.
            while inside > 1 and positions[inside - 1] == call.size - call.pending + inside - 1:
                inside -= 1
            if inside < call.pending:
                self._take_turns().add(call, call.pending - inside, size_class)
        self._window.add(call, positions[:inside], size_class)

    def remove(self, call: Call) -> None:
        """The call is about to end."""
        if self._window is not None:
            inside = self._window.remove(call)
            self._work -= sum(inside) + work_of(call, call.size - call.pending + len(inside))
        self.items -= call.pending
        self._shrink(call, call.pending)
        if self._turns is not None:
            if call in self._turns:
                self._turns.remove(call, self._turns.get(call).items)
            self._end_turns()
        elif len(self._calls) > 2 * self._outside + 64:  # so each that is over costs little
            waiting = [each for each in self._calls if each.state is _WAITING and each is not call]
            self._calls.clear()
            self._calls += waiting

    def _end_turns(self) -> None:
        """If no call waits."""
        if not self.items:
            self._turns, self._mixed, self._work = None, 0, 0.0

    def ahead(self, call: Call) -> float:
        """A lower estimate of what is computed before a new call with a deadline is over."""
        if not self.items:
            return 0.0
        size_class, work = self._size_class(call), work_of(call)
        if self._turns is None and size_class == self._class and call.precedence is ORDINARY:
            return self.work
        unit = self.work / self.items
        ahead = self._take_turns().ahead(call, size_class, work, unit)
        if self._window is not None:
            ahead += self._window.ahead(call, size_class, work, unit)
        return ahead

    @property
    def goes_by_arrival(self) -> bool:
        """Whether all calls that wait are alike, and items have no lengths."""
        return self._turns is None and self._window is None

    def oldest_arrival(self) -> float:
        """When the call arrived that has waited longest; there must be one."""
        window = self._window
        if window is None or not window.items:
            return self._oldest().arrived_at
        oldest = window.oldest().arrived_at
        return min(oldest, self._oldest().arrived_at) if self._outside else oldest

    def _oldest(self) -> Call:
        """Of the calls that are not in the window; there must be one."""
        return self._first() if self._turns is None else next(iter(self._turns))

    def first_deadline(self, now: float) -> float:
        """When the time of the call ends whose turn it is; there must be one."""
        if self._window is not None and self._window.items:
            return self._window.head(now).deadline
        return (self._first() if self._turns is None else self._turns.head(now).call).deadline

    def _first(self) -> Call:
        calls = self._calls
        while calls[0].state is not _WAITING:
            calls.popleft()
        return calls[0]

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
        turns, calls, surely = self._turns, self._calls, finish.last(now, min(room, self.items))
        spans: list[Span] = []
        payloads: list[Any] = []
        # How many of each call of several items, if it has several turns: the order within a batch
        # does not matter.
        taken: dict[Call, int] = {}
        count = 0
        large = int(max(1.0, min(self._large_cost_now(), self._batch_size)))
        while count < room and self.items:
            if turns is None:
                call = calls[0]
            else:
                queued = turns.head(now)
                call = queued.call
            if call.state is not _WAITING:
                calls.popleft()
                continue
            if (
                call.deadline <= surely
                and call not in taken  # else it would end while an item of it is in the batch
                and self._is_late(call, count, room - count, now, finish)
            ):
                expire(call)
                continue
            if call.deadline < surely and not count:
                room = finish.room(call.deadline, room)
            size = call.pending
            if turns is not None and size > 1:
                size = turns.most(queued)
            if size > room - count:
                size = room - count
            if turns is not None:
                if queued.size_class:
                    if not large:
                        reason, is_bounded = Reason.TURN, False
                        break
                    size = min(size, large)
                    large -= size
                turns.took(queued, size, 1.0)
            if turns is None or call.size == 1:
                start = call.size - call.pending
                spans.append((call, start, start + size))
                payloads += call.payloads[start : start + size]
            else:
                taken[call] = taken.get(call, 0) + size
            if self._large:
                self._shrink(call, size)
            self.items -= size
            call.pending -= size
            if not call.pending:
                call.state = _RUNNING
            count += size
        self._end_turns()
        for call, size in taken.items():
            stop = call.size - call.pending
            spans.append((call, stop - size, stop))
            payloads += call.payloads[stop - size : stop]
        if not spans:
            return None
        batch = BatchRecord(-1, -1, spans, payloads)
        batch.reason = decision.cost_reason if is_bounded and self.items else reason
        return batch

    def _shrink(self, call: Call, size: int) -> None:
        """A call is about to have so many items less, which counts if it is large."""
        if call.pending > self._most_counted:
            self._uncounted -= min(size, call.pending - self._most_counted)
        if call.pending == size:
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
        if self._turns is None or not self._large:
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

    def _draw(self, window: LengthWindow, now: float) -> None:
        """Calls enter the window in turn: small ones as a whole, so it may be more than full."""
        turns, calls = self._turns, self._calls
        while window.items < window.size and self.items > window.items:
            if turns is None:
                call = calls.popleft()
                if call.state is _WAITING:
                    window.add(call, range(call.size))
                continue
            queued = turns.head(now)
            call, left, size = queued.call, queued.items, queued.items
            if queued.size_class:
                size = min(turns.most(queued), window.size - window.items)
                if size > 1 and 2 * window.items > window.size:
                    break  # it is alone: to sort many at once takes less
            start = call.size - left
            positions = range(start, start + size)
            # Items without length cost too: a tenant with no others would always be next.
            cost = sum(call.lengths[start : start + size]) if call.lengths else 0.0
            turns.took(queued, size, cost or float(size))
            window.add(call, positions, queued.size_class)

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

        self._draw(window, now)
        while self.items and is_left_out(window.head(now)):
            self._draw(window, now)
        if not self.items:
            return None
        chosen, length, reason = window.take(
            room, decision.max_cost, now, is_left_out, self._large, self._large_cost_now()
        )
        calls = dict.fromkeys([call for _, _, call, _ in chosen], 1)  # how many of each
        if len(calls) < len(chosen):  # those of a call together, so that it is one to whoever looks
            order = {call: number for number, call in enumerate(calls)}
            calls = Counter([call for _, _, call, _ in chosen])
            chosen.sort(key=lambda entry: (order[entry[2]], entry[3]))
        spans: list[Span] = []
        payloads: list[Any] = []
        for each, _, call, index in chosen:
            self._work -= each
            if spans and spans[-1][0] is call and spans[-1][2] == index:
                spans[-1] = (call, spans[-1][1], index + 1)
            else:
                spans.append((call, index, index + 1))
            payloads.append(call.payloads[index])
        self.items -= len(chosen)
        for call, count in calls.items():
            if self._large:
                self._shrink(call, count)
            call.pending -= count
            if not call.pending:
                call.state = _RUNNING
        self._end_turns()
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
        most = self._most_counted
        assert self.counted == sum(min(call.pending, most) for call in waiting)
        assert all(call.state is _WAITING for call in waiting)
        assert self._turns is None or not self._calls
        assert self._large <= {*waiting}
        if self._turns is not None:
            self._turns.check_invariants()
        if self._window is not None:
            self._window.check_invariants()
            outside = self._turns or [call for call in self._calls if call.state is _WAITING]
            left = {
                call: call.pending if self._turns is None else self._turns.get(call).items
                for call in outside
            }
            assert self.items - self._window.items == sum(left.values())
            work = self._window.work
            work += sum(work_of(call, call.size - items) for call, items in left.items())
            assert math.isclose(self._work, work, abs_tol=1e-6 * (1.0 + work))


def run(call: Call) -> None:
    """All items of the call, which is new, go into a batch."""
    call.pending = 0
    call.state = _RUNNING
