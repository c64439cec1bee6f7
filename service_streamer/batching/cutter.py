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
from .deadlines import UNKNOWN, Deadlines, Finish
from .endings import Endings
from .isolation import Retries, Search
from .overload import Overload
from .policy import Backlog, Decision, Policy
from .slots import Slots

#: A member of an enum is looked up in Python, and a lone call asks for this one.
_ALONE = Reason.ALONE

#: Items of such batches should not wait for the next one.
_URGENT = (Reason.DEADLINE, Reason.MAX_LATENCY)

#: Least ratio of the rates for which items are left to the next batch. Arbitrary: costs are learned
#: with some noise, and every further batch takes time in the scheduler and in the worker.
_FITTING_GAIN = 1.1

#: Most batches end no search.
_NONE: Sequence[Search] = ()


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
        has_lengths: whether the items of calls have lengths.

    Attributes:
        deadline: as for ``Batcher``.
        policy: decides when to cut and how much. Another one takes its place if the model is one of
            steps.
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
        has_lengths: bool,
    ) -> None:
        self._pending = pending
        self._retries = retries
        self._slots = slots
        self._endings = endings
        self._health = health
        self._overload = overload
        self._ids = ids
        self._batch_size = batch_size
        self._has_lengths = has_lengths
        self._backlog = Backlog(Decision(0, _ALONE, -math.inf, math.inf, Reason.COST, batch_size))
        # Of the last decision to wait: with fewer items, and before that time, it is the same.
        self._ask_from, self._ask_at = 0, -math.inf
        self._deadlines: Deadlines[Call] = Deadlines()
        self.deadline = math.inf
        self.policy = policy

    # -- what happens

    def arrived(self, call: Call, now: float, *, is_watched: bool, more: bool) -> Actions:
        """A call has arrived: as for ``Batcher.call_submitted``."""
        size = call.size
        pending, slots = self._pending, self._slots
        if is_watched and call.deadline < math.inf:
            self._deadlines.add(call)
            self.set_deadline(self.deadline)
        is_first = not pending.items and bool(slots.idle)
        if self.policy.arrived(size, now, is_first) and size == 1 and not more:
            last = self._backlog.last
            if (  # the same is decided again, and nothing else is due
                last.size == 1
                and last.reason is _ALONE
                and last.trial is None
                and slots.items < slots.taking
                and call.deadline - now > self.policy.near
                and not (self._retries.waiting or self._health.held_back)
            ):
                batch = self._alone(call, now)
                self.set_deadline(math.inf)
                return Actions([batch])
        pending.add(call)
        if slots.idle:
            if pending.items < self._ask_from and now < self._ask_at and self._is_usual(call):
                if self._ask_at < self.deadline:  # all that waited before it have left
                    self.set_deadline(self._ask_at)
                return NOTHING
            if not more or pending.items >= self._batch_size * len(slots.idle):
                return self.cut(now)
        elif slots.without_ahead:
            waiting = pending.items
            if waiting >= self.policy.full or waiting >= self._backlog.last.best_size:
                decision = self.policy.decide_ahead(self._backlog_ahead(now))
                if decision.size:
                    return self.cut(now, ahead=decision)
                self._backlog.last = decision
            if slots.next_open < math.inf and not more:
                return self._cut_early(now)
        return NOTHING  # no worker is free: the usual case under load, so without a look

    def _is_usual(self, call: Call) -> bool:
        """Whether the call waits behind others, and nothing else is to be looked at."""
        return (
            call.precedence is ORDINARY
            and not (self._has_lengths or self._pending.is_fair)
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
        return self.cut(now) if self._slots.idle else self._cut_early(now)

    def came_back(
        self, batch: BatchRecord, answered: int, duration: float, now: float, failures: int
    ) -> Sequence[Search]:
        """A batch came back, and the policy learns of it; the searches that end by that.

        Args:
            answered: calls that are over by that.
            duration: what the model took for it, seconds.
            failures: items that failed.
        """
        policy, retries, searches = self.policy, self._retries, _NONE
        if batch.search is not None:  # it says nothing of what batches are like
            searches = retries.part_over(batch.search)
        else:
            if retries.limit < retries.no_limit:
                retries.came_back_clean()
            policy.came_back(
                batch, answered, duration, self._slots.taking, self._pending.items, now, failures
            )
        return searches

    def begin_steps(self, policy: Policy) -> None:
        """The model is one of steps, and has this policy."""
        self.policy = policy
        self._backlog.last = policy.decide(self._backlog)

    def none_waits(self) -> None:
        """What waited has left: its time need not come."""
        self._ask_from = 0
        self.set_deadline(math.inf)

    def ended(self, now: float) -> list[Call]:
        """The calls whose time has ended, of those that are watched."""
        return self._deadlines.ended(now) if self._deadlines.next <= now else []

    # -- what is done about it

    def cut(
        self,
        now: float,
        calls: list[Call] | tuple[()] = (),
        vacant: Sequence[int] = (),
        searches: Sequence[Search] = (),
        hung: Sequence[int] = (),
        ahead: Decision | None = None,
    ) -> Actions:
        """Cut every batch that should go out now, and set the deadline of what should wait instead.

        Args:
            calls, vacant, searches, hung: what is to be done besides.
            ahead: what the policy has said about a batch to send ahead, if it was asked already.
        """
        pending, retries = self._pending, self._retries
        batches: list[BatchRecord] = []
        late: list[Call] = []
        over: list[Search] = []

        def expire(call: Call) -> None:
            self._endings.expire(call)
            late.append(call)

        condemned = self._endings.judge_workers(now) if self._health.held_back else ()
        wait_until, self._ask_from = math.inf, 0
        idle, without_ahead = self._slots.idle, self._slots.without_ahead
        while True:
            if retries.waiting and (
                not pending.items or retries.go_first(pending.items, self._slots.taking)
            ):
                if idle:
                    self._cut_part(next(iter(idle)), batches, over, expire, now)
                elif without_ahead and retries.may_go_ahead:
                    slot = next(iter(without_ahead))
                    self._cut_part(slot, batches, over, expire, now, is_ahead=True)
                elif not retries.drop_unwanted(over):
                    break  # nothing is sent ahead, so that a worker becomes free for them
            elif not pending.items:
                break
            elif idle:
                backlog = self._backlog_now(len(idle), now)
                decision = backlog.last = self.policy.decide(backlog)
                slot = next(iter(idle))
                if not decision.size:
                    if pending.items >= retries.limit:  # more items would not be taken along
                        decision = decision._replace(size=int(retries.limit), reason=Reason.FAILING)
                    elif retries.waiting:  # there is something to do meanwhile
                        self._cut_part(slot, batches, over, expire, now)
                        continue
                    else:
                        wait_until = self._ask_at = decision.wait_until
                        self._ask_from = backlog.ask_from
                        break
                self._cut_pending(slot, decision, batches, expire, now)
            elif without_ahead:
                decision = ahead or self.policy.decide_ahead(self._backlog_ahead(now))
                self._backlog.last, ahead = decision, None
                slot = self._slots.emptiest() if self._slots.places else next(iter(without_ahead))
                if not decision.size:
                    if self._slots.next_open > now:
                        wait_until = self._slots.next_open
                        break
                    slot = self._slots.opened()
                    decision = self._early(slot, now)
                    if not decision.size:
                        wait_until = decision.wait_until
                        if wait_until < math.inf:
                            break
                        self._slots.have_wait(slot)
                        continue
                self._cut_pending(slot, decision, batches, expire, now, is_ahead=True)
            else:
                break
        self.set_deadline(wait_until)
        if not (batches or calls or late or vacant or searches or over or hung or condemned):
            return NOTHING
        # Most often there are none, and a new list for each batch would be felt.
        calls = [*calls, *late] if late else calls
        searches = [*searches, *over] if over else searches
        return Actions(batches, calls, hung, vacant, searches, condemned)

    def _cut_early(self, now: float) -> Actions:
        """Cut a batch for a busy worker if its slowest stage is free; or come back when it is."""
        opens_at = self._slots.next_open
        if opens_at <= now:
            return self.cut(now)
        if opens_at < self.deadline and self._pending.items and not self._retries.waiting:
            self.deadline = opens_at
        return NOTHING

    def _early(self, slot: int, now: float) -> Decision:
        """What to do with what waits, now that the slowest stage of this worker is free."""
        backlog, slots = self._backlog_now(1, now), self._slots
        backlog.last = self.policy.decide_early(backlog, *slots.held(slot), slots.beside)
        return backlog.last

    def _backlog_now(self, free: int, now: float) -> Backlog:
        """What waits for the workers that are free."""
        self.policy.time_passed(now)
        backlog, pending, slots = self._backlog, self._pending, self._slots
        backlog.ask_from = 0
        backlog.items, backlog.oldest = pending.items, pending.oldest_arrival()
        backlog.deadline = pending.first_deadline(now) - tuning.URGENCY * slots.beside
        backlog.free, backlog.slots, backlog.in_flight = free, slots.taking, slots.items
        backlog.now = now
        return backlog

    def _backlog_ahead(self, now: float) -> Backlog:
        """What waits while no worker is free."""
        backlog, slots = self._backlog, self._slots
        backlog.deadline = self._pending.first_deadline(now)
        backlog.oldest = self._pending.oldest_arrival()
        backlog.items = self._pending.items
        backlog.slots, backlog.in_flight = slots.taking, slots.items
        return backlog

    def set_deadline(self, wait_until: float) -> None:
        """Set ``deadline``: of what waits the one that is given, or an earlier one."""
        # Without ``min``, which takes longer: every cut comes here.
        deadline = self._slots.next_look
        if wait_until < deadline:
            deadline = wait_until
        if self._deadlines.next < deadline:
            deadline = self._deadlines.next
        if self._health.due < deadline:
            deadline = self._health.due
        self.deadline = deadline

    # -- how a batch is made

    def _alone(self, call: Call, now: float) -> BatchRecord:
        """A batch of a call of one item that no other waits beside: past the queue.

        What deciding and taking it would do, at a third of its cost. A caller alone waits for all
        of it.
        """
        run(call)
        slot = next(iter(self._slots.idle))
        batch = BatchRecord(next(self._ids), slot, [(call, 0, 1)], [*call.payloads])
        if self._has_lengths and call.lengths is not None:
            batch.cost = float(call.lengths[0])
        batch.reason = _ALONE
        self.policy.was_cut(batch, self._backlog.last, now)
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
        if self._slots.sizes and decision.trial is None and reason not in _URGENT:
            fitted = _fit_size(min(size, pending.items), self._slots.sizes, self.policy.duration)
            if fitted < min(size, pending.items):
                size, reason = fitted, Reason.PAYS
        if size > retries.limit:
            size, reason = int(retries.limit), Reason.FAILING
        if size != decision.size:
            decision = decision._replace(size=size, reason=reason)
        batch = pending.take(decision, now, self._finish(slot, size, now), expire)
        if batch is not None:
            batch.id, batch.slot, batch.is_full = next(self._ids), slot, pending.items > 0
            self.policy.was_cut(batch, decision, now)
            if retries.waiting:
                retries.gave_way()
            batches.append(self._give(batch, now, is_ahead=is_ahead))

    def _finish(self, slot: int, size: int, now: float) -> Finish:
        """When a batch that is cut now will be back."""
        waiting, deadline = self._pending.items, self._backlog.deadline
        slots = self._slots
        is_overloaded = waiting > self.policy.full
        if slots.places or not (is_overloaded or deadline < math.inf):
            return UNKNOWN  # how long an item takes is not known before
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
            assert waiting < min(self._batch_size, retries.limit)
            assert self.deadline < math.inf
        elif slots.without_ahead and waiting and not retries.waiting:
            full = self.policy.full
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
