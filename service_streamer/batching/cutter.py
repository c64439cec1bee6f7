"""Decides what is cut now, of what waits, and for which worker; or when to look again.

What is too late is left out when a batch is made.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from ..observe.record import ORDINARY, BatchRecord, Call, Reason
from ..supervision.health import Health
from . import tuning
from .actions import NOTHING, Actions
from .call_queue import CallQueue, run
from .deadlines import Deadlines
from .isolation import Raised, Retries, Search
from .outcomes import Endings
from .overload import Overload
from .policy import UNKNOWN, Backlog, Decision, Finish, Policy
from .slots import Slots

#: Of a model of steps, a free place takes the next item.
_PLACE = Decision(1, Reason.PLACE)

#: Items of such batches should not wait for the next one.
_URGENT = (Reason.DEADLINE, Reason.MAX_LATENCY)

#: Least ratio of the rates for which items are left to the next batch. Arbitrary: costs are learned
#: with some noise, and every further batch takes time in the scheduler and in the worker.
_FITTING_GAIN = 1.1

#: Most batches end no search.
_NONE: Sequence[Search | Raised] = ()


class Cutter:
    """Cuts batches of what waits, and gives them to the workers.

    Args:
        pending: calls with items that are not cut.
        retries: parts of batches that wait to be run again.
        slots: of the workers; get the batches.
        endings: ends the calls that are too late, and judges workers.
        health: of the workers.
        overload: knows how long batches take while more wait than fit into one.
        policy: see below.
        ids: of the next batches.
        batch_size: the most items of a batch.

    Attributes:
        deadline: as for ``Batcher``.
        policy: decides when to cut and how much; not asked about a model of steps.
    """

    def __init__(
        self,
        pending: CallQueue,
        retries: Retries,
        slots: Slots,
        endings: Endings,
        health: Health,
        overload: Overload,
        policy: Policy,
        ids: Iterator[int],
        *,
        batch_size: int,
    ) -> None:
        self._pending = pending
        self._retries = retries
        self._slots = slots
        self._endings = endings
        self._health = health
        self._overload = overload
        self._ids = ids
        self._batch_size = batch_size
        # Of the last decision. With fewer items, and before that time, it is the same.
        self._waited_until, self._enough = -math.inf, 0
        self._was_alone = False  # it was to compute one item at once, as no others were expected
        self._deadlines: Deadlines[Call] = Deadlines()
        self.deadline = math.inf
        self.policy = policy

    # -- what happens

    def arrived(self, call: Call, now: float, *, is_watched: bool, more: bool) -> Actions:
        """A call has arrived: as for ``Batcher.call_submitted``."""
        pending, slots = self._pending, self._slots
        if is_watched and call.deadline < math.inf:
            self._deadlines.add(call)
            self.set_deadline(self.deadline)
        if not slots.places:
            is_first = not pending.items and bool(slots.idle)
            is_alone = self.policy.call_arrived(call.size, now, is_first=is_first)
            if is_alone and self._is_alone_again(call, more=more):
                batch = self._cut_alone(call, now)
                self.set_deadline(math.inf)
                return Actions([batch])
        pending.add(call)
        if slots.idle:
            if pending.items < self._enough and now < self._waited_until and self._is_usual(call):
                if self._waited_until < self.deadline:  # all that waited before it have left
                    self.set_deadline(self._waited_until)
                return NOTHING
            if not more or pending.items >= self._batch_size * len(slots.idle):
                return self.cut(now)
        elif slots.without_ahead and (
            pending.items >= self._overload.full or (slots.beside and not more)
        ):
            return self.cut(now)
        return NOTHING  # no worker is free: the usual case under load, so without a look

    def _is_alone_again(self, call: Call, *, more: bool) -> bool:
        """Whether a first call is to be computed at once, as the one before, and nothing is due."""
        return (
            self._was_alone
            and call.size == 1
            and not more
            and self._slots.items < self._slots.taking
            and not (self._retries.waiting or self._health.held_back)
        )

    def _is_usual(self, call: Call) -> bool:
        """Whether the call waits behind others, and nothing else is to be looked at."""
        return (
            call.precedence is ORDINARY
            and self._pending.goes_by_arrival
            and not (self._retries.waiting or self._health.held_back)
        )

    def restore(self, call: Call, positions: Sequence[int]) -> None:
        """A call is there that arrived before the queue was made anew. Decides nothing.

        Args:
            positions: of its items that are not cut.
        """
        if call.is_watched and call.deadline < math.inf:
            self._deadlines.add(call)
        if positions:
            self._pending.restore(call, positions)
        else:
            run(call)

    def all_arrived(self, now: float) -> Actions:
        """Nothing follows of what has arrived together."""
        return self.cut(now) if self._slots.idle or self._slots.beside else NOTHING

    def came_back(
        self, batch: BatchRecord, answered: int, duration: float, now: float
    ) -> Sequence[Search | Raised]:
        """A batch came back, and the policy learns of it; the searches that end by that.

        Args:
            answered: calls that are over by that.
            duration: what the model took for it, seconds.
        """
        if batch.search is not None:  # it says nothing of what batches are like
            return self._retries.part_over(batch.search)
        slots = self._slots
        if not slots.places:
            # What it took to find who is at fault says nothing of what items cost.
            failed = batch.size if batch.report.runs else len(batch.report.failures)
            waiting = self._pending.items
            self.policy.batch_returned(
                batch, answered, duration, slots.taking, waiting, now, failed
            )
        return _NONE

    def ended(self, now: float) -> list[Call]:
        """The calls whose time has ended, of those that are watched."""
        return self._deadlines.ended(now) if self._deadlines.next <= now else []

    # -- what is done about it

    def cut(
        self,
        now: float,
        calls: list[Call] | tuple[()] = (),
        vacant: Sequence[int] = (),
        searches: Sequence[Search | Raised] = (),
        hung: Sequence[int] = (),
    ) -> Actions:
        """Cut every batch that should go out now, and set the deadline of what should wait instead.

        Args:
            calls, vacant, searches, hung: what is to be done besides.
        """
        pending, retries = self._pending, self._retries
        batches: list[BatchRecord] = []
        late: list[Call] = []
        over: list[Search] = []

        def expire(call: Call) -> None:
            self._endings.expire(call)
            late.append(call)

        condemned = self._endings.judge_workers(now) if self._health.held_back else ()
        wait_until, self._enough = math.inf, 0
        idle, without_ahead = self._slots.idle, self._slots.without_ahead
        while True:
            if retries.waiting and (not pending.items or retries.goes_first):
                if idle:
                    self._cut_part(next(iter(idle)), batches, over, expire, now)
                elif without_ahead and retries.may_go_ahead:
                    slot = next(iter(without_ahead))
                    self._cut_part(slot, batches, over, expire, now, is_ahead=True)
                elif not retries.drop_unwanted(over):
                    break  # nothing is sent ahead, so that a worker becomes free for them
            elif not pending.items or not (idle or without_ahead):
                break
            else:
                is_ahead = not idle
                slot, decision = self._decide_ahead(now) if is_ahead else self._decide(now)
                if not decision.size and not is_ahead and retries.waiting:
                    self._cut_part(slot, batches, over, expire, now)  # something to do meanwhile
                    continue
                if not decision.size:
                    wait_until = decision.wait_until
                    break
                self._cut_pending(slot, decision, batches, expire, now, is_ahead=is_ahead)
        self.set_deadline(wait_until)
        if not (batches or calls or late or vacant or searches or over or hung or condemned):
            return NOTHING
        # Most often there are none, and a new list for each batch would be felt.
        calls = [*calls, *late] if late else calls
        searches = [*searches, *over] if over else searches
        return Actions(batches, calls, hung, vacant, searches, condemned)

    def _decide(self, now: float) -> tuple[int, Decision]:
        """The idle worker that is next, and what to do with the items that wait."""
        slots = self._slots
        slot = next(iter(slots.idle))
        if slots.places:
            return slot, _PLACE
        decision = self.policy.decide(self._backlog(len(slots.idle), now))
        self._waited_until, self._enough = decision.wait_until, decision.enough
        self._was_alone = decision.size == 1 and decision.reason is Reason.ALONE
        return slot, decision

    def _decide_ahead(self, now: float) -> tuple[int, Decision]:
        """The busy worker that is next, and what to do with the items that wait."""
        slots, policy = self._slots, self.policy
        if slots.places:
            return slots.emptiest(), _PLACE
        backlog = self._backlog(0, now)
        slot, decision = next(iter(slots.without_ahead)), policy.decide_ahead(backlog)
        if decision.size or not slots.beside or policy.stays_together(backlog, slots.beside):
            return slot, decision
        slot, opens_at = slots.next_open()
        if opens_at > now:
            return slot, decision._replace(wait_until=opens_at)
        decision = policy.decide_stage(backlog._replace(free=1))
        self._waited_until = decision.wait_until
        return slot, decision

    def _backlog(self, free: int, now: float) -> Backlog:
        """What waits, of which so many workers could begin a part now."""
        pending, slots = self._pending, self._slots
        deadline = pending.first_deadline(now) - tuning.URGENCY * slots.beside
        return Backlog(
            pending.items, pending.oldest_arrival(), deadline, free, slots.taking, slots.items,
            self._waited_until, now,
        )  # fmt: skip

    def set_deadline(self, wait_until: float) -> None:
        """Set ``deadline``: of what waits the one that is given, or an earlier one."""
        # Without ``min``, which takes longer: every cut comes here.
        deadline = self._slots.next_look
        if wait_until < deadline:
            deadline = wait_until
        if self._deadlines.next < deadline:
            deadline = self._deadlines.next
        if self._health.held_back and self._health.due < deadline:
            deadline = self._health.due
        self.deadline = deadline

    # -- how a batch is made

    def _cut_alone(self, call: Call, now: float) -> BatchRecord:
        """A batch of a call of one item that no other waits beside: past the queue.

        It is what deciding and taking it would do, at a third of the cost: a caller alone waits for
        all of it.
        """
        run(call)
        slot = next(iter(self._slots.idle))
        batch = BatchRecord(next(self._ids), slot, [(call, 0, 1)], [*call.payloads])
        if call.lengths is not None:
            batch.cost = float(call.lengths[0])
        batch.reason = Reason.ALONE
        self.policy.batch_cut(batch, now)
        return self._give(batch, now)

    def _cut_pending(
        self,
        slot: int,
        decision: Decision,
        batches: list[BatchRecord],
        expire: Callable[[Call], None],
        now: float,
        *,
        is_ahead: bool = False,
    ) -> None:
        """A batch for the slot, unless all that waited came too late.

        Args:
            batches: gets the batch.
            expire: ends a call that comes too late.
        """
        pending, retries = self._pending, self._retries
        size, reason = decision.size, decision.reason
        if self._slots.sizes and reason not in _URGENT:
            fitted = _fit_size(min(size, pending.items), self._slots.sizes, self.policy.duration)
            if fitted < min(size, pending.items):
                size, reason = fitted, Reason.PAYS
        if size != decision.size:
            decision = decision._replace(size=size, reason=reason)
        batch = pending.take(decision, now, self._finish(slot, size, now), expire)
        if batch is not None:
            batch.id, batch.slot, batch.is_full = next(self._ids), slot, pending.items > 0
            self.policy.batch_cut(batch, now)
            if retries.waiting:
                retries.gave_way()
            batches.append(self._give(batch, now, is_ahead=is_ahead))

    def _finish(self, slot: int, size: int, now: float) -> Finish:
        """When a batch that is cut now will be back."""
        slots, waiting = self._slots, self._pending.items
        if slots.places:
            return UNKNOWN  # how long an item takes is not known before
        is_overloaded = waiting > self.policy.full
        if not (is_overloaded or self._pending.first_deadline(now) < math.inf):
            return UNKNOWN
        policy = self.policy
        if slots.room == 2:  # else several stages are at several batches
            start = slots.begins_at(slot, now, policy.cost.duration)
            finish = policy.finish(start, min(size, waiting), slots.taking)
            if finish is not None:
                return finish
        if is_overloaded:
            return Finish(now + self._overload.duration())
        return Finish(now + policy.duration(size)) if waiting > size else UNKNOWN

    def _cut_part(
        self,
        slot: int,
        batches: list[BatchRecord],
        over: list[Search],
        expire: Callable[[Call], None],
        now: float,
        *,
        is_ahead: bool = False,
    ) -> None:
        """A part of a batch that failed, to be run again.

        Args:
            batches: gets the batch.
            expire: ends a call that comes too late.
            over: gets the searches that end by that.
        """
        part = self._retries.take(now, expire, over)
        if part is not None:
            items = [item for call, start, stop in part.spans for item in call.payloads[start:stop]]
            batch = BatchRecord(next(self._ids), slot, part.spans, items, part.search, part.losses)
            batch.calls = len({call for call, _, _ in part.spans})
            batches.append(self._give(batch, now, is_ahead=is_ahead))
            self._retries.gone()

    def _give(self, batch: BatchRecord, now: float, *, is_ahead: bool = False) -> BatchRecord:
        """Have the batch sent to its worker."""
        batch.cut_at = now
        begun = batch.spans[0][0].handed_out if self._slots.places else None
        if begun:  # with the item go the outputs that it has had
            batch.payloads = [*batch.payloads, *begun]
        # With one stage a worker is free when its batch is back.
        duration = 0.0 if self._slots.room == 2 else self.policy.cost.duration(batch.cost)
        self._slots.give(batch, now, is_ahead=is_ahead, duration=duration)
        return batch

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if something waits that should have been cut. For tests."""
        slots, waiting, retries = self._slots, self._pending.items, self._retries
        if slots.idle and (retries.waiting or waiting):
            assert not retries.waiting
            assert waiting < self._batch_size
            assert self.deadline < math.inf
        elif slots.without_ahead and waiting and not retries.waiting:
            full = self._overload.full
            # One that retires leaves more to the others, who are asked when something comes back.
            # And what has a deadline may wait until a worker is free.
            may_wait = slots.taking < len(slots) or any(
                call.deadline < math.inf for call in self._pending
            )
            assert may_wait or waiting < self._batch_size * len(slots)
            assert (
                may_wait
                or waiting < full
                or (slots.taking > 1 and slots.items < full * slots.taking)
            )


def _fit_size(size: int, sizes: Sequence[int], duration: Callable[[float], float]) -> int:
    """How many of ``size`` items to cut now: all of them, or as many as need no padding.

    33 items that are padded to 64 take as long as 64. If a batch of 32 computes more items per
    second, the last item is better left to the next batch.

    Args:
        size: items that would be cut; at least 1.
        sizes: those that batches are padded to, ascending.
        duration: seconds for a batch of so many items.
    """
    at = bisect_right(sizes, size)
    if at in (0, len(sizes)) or sizes[at - 1] == size:
        return size
    below, above = sizes[at - 1], sizes[at]
    is_faster = below * duration(above) > _FITTING_GAIN * size * duration(below)
    return below if is_faster else size
