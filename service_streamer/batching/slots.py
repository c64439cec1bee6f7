"""The workers that are ready: which can take a batch, which holds one, and for how long.

    slot        meaning
    ----        -------
    idle        holds no batch
    busy        holds one batch, and full ones sent ahead: one; more for models with stages
    closing     finishes what it holds and takes no more; vacant when that is done
    held back   finishes what it holds, and takes no more before it is released

What is run again after a worker died with it is alone with its worker: nothing is sent ahead there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..supervision.health import WARM, BatchBound, Health

#: The most batches that a worker holds, but for those that it preprocesses besides.
#: Chosen by reasoning: one in each of three stages, and one that waits.
MOST_ROOM = 4
#: Weight of the newest batch in what is learned about the stages of a worker.
#: Chosen by reasoning: the number of batches in a worker should not change with every batch.
STAGE_RATE = 0.1


class Slot:
    """Room for the batches of one worker, by their ids. Those of steps end in any order.

    Who changes whether it takes batches does so by ``Slots``.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches: dict[int, BatchRecord] = {}
        self.done = 0  # batches or steps that it has computed, as far as that matters
        self.has_computed = False  # a batch; of a model of steps, an item to its end
        self.busy_since = 0.0  # when the worker began with the batch that it computes now
        self.is_closing = self.is_held_back = False
        self.is_hung = False  # it was reported that its batch takes too long
        self.is_ending = False  # it is killed for that, whatever it still reports
        self.free_at = -math.inf  # when its slowest stage has computed all that it was sent

    @property
    def takes(self) -> bool:
        """Whether the worker takes batches."""
        return not (self.is_closing or self.is_held_back)

    def goes_on(self, now: float) -> None:
        """The worker is known to go on with what it holds."""
        self.is_hung = False
        self.busy_since = now


class Slots(dict[int, Slot]):
    """The workers that are ready, by their numbers."""

    # Attributes of a kind of dict are slow without.
    __slots__ = (
        "_seconds", "_slowest", "beside", "bound", "grace", "health", "held_back", "held_items",
        "idle", "next_look", "places", "room", "sends_ahead", "sizes", "taking", "without_ahead",
    )  # fmt: skip

    def __init__(self, bound: BatchBound, *, sends_ahead: bool) -> None:
        self.bound = bound
        self.health = Health()
        self.sends_ahead = sends_ahead
        self.room = 2  # the most batches that each holds
        self.places = 0  # of a model of steps, how many items a worker steps at a time
        #: How many workers may have died with a batch that need not be alone with its worker.
        self.grace = 0
        #: Those that the model pads batches to, ascending; none if it computes any size.
        self.sizes: tuple[int, ...] = ()
        self._seconds = self._slowest = 0.0  # of a batch in all stages, and in the slowest; of late
        #: What a batch takes in other stages than the slowest, seconds; 0 if that is little.
        self.beside = 0.0
        self.taking = 0  # how many workers take batches
        self.held_back: Sequence[int] = ()  # those that would take some, were they not held back
        #: Those that hold nothing and take a batch. A dict as an ordered set: the one that has been
        #: idle for longest is first, so that work is spread evenly over the devices.
        self.idle: dict[int, None] = {}
        #: Those that hold a batch and take a full one ahead; ordered the same way.
        self.without_ahead: dict[int, None] = {}
        self.held_items = 0  # in flight
        #: When to look for hung ones, if something is in flight. May be too early, which spares the
        #: engine a look at every batch, but never late.
        self.next_look = math.inf

    def recount(self, now: float, returned: Iterable[BatchReport]) -> None:
        """Derive what is counted and ordered here from the workers and their batches.

        Of these the ``returned`` ones are no more. No worker is held back, and all begin anew with
        what they hold, as to its time.
        """
        for report in returned:
            if report.slot in self:
                self[report.slot].batches.pop(report.batch_id, None)
        self.held_items = sum(batch.size for batch in self.in_flight())
        self.idle, self.without_ahead = {}, {}
        for slot in self.values():
            slot.is_held_back = False
            slot.busy_since = slot.free_at = now
            self._changed(slot)
        self.next_look = now + self.bound.least if self.held_items else math.inf

    def _changed(self, slot: Slot) -> None:
        """The worker is new, or may take batches now, or not any more."""
        slots = self.values()
        self.taking = sum(each.takes for each in slots)
        self.held_back = [
            each.number for each in slots if each.is_held_back and not each.is_closing
        ]
        self._arrange(slot)

    def _arrange(self, slot: Slot) -> None:
        """Have it among those that are idle, or without a batch ahead, or in neither."""
        number, held, takes = slot.number, slot.batches, slot.takes
        if takes and not held:
            self.idle[number] = None
        else:
            self.idle.pop(number, None)
        takes_ahead = takes and self.sends_ahead and 0 < len(held) < self.room
        if takes_ahead and next(iter(held.values())).losses <= self.grace:  # see ``is_alone``
            self.without_ahead[number] = None
        else:
            self.without_ahead.pop(number, None)

    def is_alone(self, batch: BatchRecord) -> bool:
        """Whether the batch has a worker for itself: another one died with its items."""
        return batch.losses > self.grace

    def add(self, number: int) -> None:
        self[number] = Slot(number)
        self._changed(self[number])

    def remove(self, number: int, now: float) -> list[BatchRecord]:
        """The worker is gone, if it ever took part; the batches that it held."""
        if number not in self:
            return []
        self.close(number)
        lost = [*self.pop(number).batches.values()]
        self.held_items -= sum(batch.size for batch in lost)
        self.health.lost(number, now, had_new_items=any(batch.search is None for batch in lost))
        return lost

    def vacant(self) -> list[int]:
        """Those that are closing, and hold nothing any more."""
        return [slot.number for slot in self.values() if slot.is_closing and not slot.batches]

    def close(self, number: int) -> None:
        """Let the worker take no more."""
        self[number].is_closing = True
        self._changed(self[number])

    def reopen(self, number: int) -> None:
        """The worker is not to end after all, unless it is killed since it hung."""
        slot = self[number]
        slot.is_closing = slot.is_ending
        self._changed(slot)

    def _hold_back(self, number: int, is_held_back: bool) -> None:
        self[number].is_held_back = is_held_back
        self._changed(self[number])

    def judge(self, now: float) -> Sequence[int]:
        """Let some of the workers go on that are held back; the slots of those to be replaced.

        All go on if no other one takes batches.
        """
        is_alone = not self.taking
        for number in self.held_back:
            if is_alone or not self.health.is_suspect(number):
                self._hold_back(number, False)
        return self.health.judge(self.held_back, now)

    @property
    def due(self) -> float:
        """When to look for workers that hang, or to ``judge``; infinity for never."""
        return min(self.next_look, self.health.due) if self.held_back else self.next_look

    def set_held(
        self, is_held: bool, now: float, *, call: Call | None = None, slot: int | None = None
    ) -> list[BatchRecord]:
        """Have items of streams rest, or go on: of a call, of a worker, or all; returns which do.

        None rests in a worker that is to end when it has finished what it holds. The item of a call
        is returned again if it does so already: a signal handler may have raised before that was
        sent.
        """
        changed = [
            batch
            for batch in self.in_flight()
            if self.places
            and (batch.spans[0][0].is_held if call is None else batch.spans[0][0] is call)
            and slot in (None, batch.slot)
            and not (is_held and self[batch.slot].is_closing)
        ]
        for batch in changed:
            batch.spans[0][0].is_held = is_held
            if not is_held:
                self[batch.slot].goes_on(now)
        return changed

    def stepped(self, report: StepReport, now: float) -> Mapping[int, BatchRecord]:
        """The worker goes on, perhaps after a step with the batches that it holds, by their ids."""
        slot = self.get(report.slot)
        if slot is None:
            return {}
        if not report.is_sign_of_life:
            self._observe(slot, now)
        slot.goes_on(now)
        return slot.batches

    def stages_took(self, stages: Sequence[float]) -> None:
        """A batch was in the stages of its worker for so long, seconds.

        A worker holds so many batches that its slowest stage never waits for one. By Little's law
        so many are on their way while that stage computes back to back; and one more, which is
        there when it is done.
        """
        if not self._seconds:
            self._seconds, self._slowest = sum(stages), max(stages)
        self._seconds += (sum(stages) - self._seconds) * STAGE_RATE
        self._slowest += (max(stages) - self._slowest) * STAGE_RATE
        # A stage of a twentieth needs no batch of its own.
        stages_at_once = math.ceil(self._seconds / self._slowest - 0.05) if self._slowest else 1
        room = max(2, min(MOST_ROOM, 1 + stages_at_once))
        self.beside = self._seconds - self._slowest if room > 2 else 0.0
        if room != self.room:
            self.room = room
            for slot in self.values():
                self._arrange(slot)

    def give(self, batch: BatchRecord, now: float, duration: float) -> None:
        """The batch goes to its slot, and will be in its slowest stage for ``duration`` seconds."""
        slot = self[batch.slot]
        slot.free_at = (now if slot.free_at < now else slot.free_at) + duration
        slot.batches[batch.id] = batch
        self.held_items += batch.size
        if batch.slot in self.idle:
            slot.busy_since = now
        self.without_ahead.pop(batch.slot, None)  # it is last among them from now on
        self._arrange(slot)
        self.next_look = min(self.next_look, now + self.bound.least)

    def next_open(self) -> tuple[int, float]:
        """Which worker's slowest stage is free first, and when; infinity if no worker takes more.

        It holds a batch for each stage at most. One more would wait, and is sent if it is full.
        """
        opens_at = {
            number: self[number].free_at
            for number in self.without_ahead
            if len(self[number].batches) < self.room - 1
        }
        slot = min(opens_at, key=opens_at.__getitem__, default=-1)
        return slot, opens_at.get(slot, math.inf)

    def begins_at(self, slot: int, now: float, duration: Callable[[float], float]) -> float:
        """When the worker begins with a batch that it is given now."""
        holder = self[slot]
        seconds = [duration(batch.cost) for batch in holder.batches.values()]
        return max(now, holder.busy_since + sum(seconds)) if seconds else now

    def take_back(self, report: BatchReport, now: float) -> BatchRecord:
        """Remove a batch that a worker has finished."""
        slot = self[report.slot]
        batch = slot.batches.pop(report.batch_id, None)
        if batch is None:
            raise RuntimeError(
                f"worker {slot.number} answered batch {report.batch_id}, which it has not: our bug"
            )
        self.held_items -= batch.size
        if report.has_failed:  # it may have been short since it failed
            self._suspect(slot, batch, report, now)
        else:
            self.health.computed(slot.number)
            slot.has_computed = True
            self._observe(slot, now)
        slot.goes_on(now)
        if not slot.batches:
            slot.free_at = -math.inf
        self._arrange(slot)
        return batch

    def _suspect(self, slot: Slot, batch: BatchRecord, report: BatchReport, now: float) -> None:
        """No item of the batch has a result: its worker may be at fault, and is held back.

        Not if the failure, opaque here otherwise, blames an item, or the batch failed before.
        """
        failure = report.failure or next(iter(report.failures.values()))
        if batch.search is None and not getattr(failure, "blames_input", False):
            self.health.failed(slot.number, now)
            if slot.takes and self.health.is_suspect(slot.number):
                self._hold_back(slot.number, True)

    def _observe(self, holder: Slot, now: float) -> None:
        took = now - holder.busy_since
        if holder.done < WARM or took > self.bound.notable:
            if not self._was_held_up(now):
                self.bound.observe(took, holder.done)
            holder.done += 1

    def _was_held_up(self, now: float) -> bool:
        """Whether it is much too late for a look: this process was stopped for a while."""
        return now - self.next_look > max(0.1, self.bound.least / 2)

    def hung(self, now: float) -> list[int]:
        """Slots whose batch takes too long, each reported once for it; sets when to look again.

        Those that are to be ended take no more.
        """
        hung: list[int] = []
        if self._was_held_up(now):
            # We come much too late: this process was held up itself. Answers may be in the pipes.
            for slot in self.values():
                slot.busy_since = now
        self.next_look = math.inf
        for number, slot in self.items():
            if slot.batches and not slot.is_hung:
                if self.places and self._rests(slot):
                    slot.busy_since = now  # it takes no step, and says nothing
                ends_at = slot.busy_since + self.limit(number)
                if ends_at <= now:
                    slot.is_hung = True
                    if self.bound.ends:
                        slot.is_ending = True
                        self.close(number)
                    hung.append(number)
                else:
                    self.next_look = min(self.next_look, ends_at)
        return hung

    def _rests(self, slot: Slot) -> bool:
        """Whether all that it could step are held: what is on deck has no place then."""
        held = sum(batch.spans[0][0].is_held for batch in slot.batches.values())
        return held >= min(len(slot.batches), self.places)

    def limit(self, slot: int) -> float:
        """How long the worker may be at its batch, seconds."""
        holder = self[slot]
        calls = [call for batch in holder.batches.values() for call, _, _ in batch.spans]
        patience = max((call.deadline - call.arrived_at for call in calls), default=0.0)
        return self.bound.limit(holder.done, patience)

    def stuck(self, now: float) -> float | None:
        """For how long, seconds, each worker has been at one batch at least, if that is too long.

        None while one of them may soon be free, or when there is none.
        """
        since = [slot.busy_since for slot in self.values() if slot.batches]
        if not since or len(since) < len(self) or now - max(since) <= self.bound.normal:
            return None
        return now - max(since)

    def in_flight(self) -> list[BatchRecord]:
        return [batch for slot in self.values() for batch in slot.batches.values()]

    def check_invariants(self) -> None:
        assert self.held_items == sum(batch.size for batch in self.in_flight())
        assert self.taking == sum(slot.takes for slot in self.values())
        assert {*self.idle, *self.without_ahead} <= {*self}
        for number, slot in self.items():
            batches = [*slot.batches.values()]
            is_alone = any(map(self.is_alone, batches))
            assert len(batches) <= (1 if is_alone else max(self.room, MOST_ROOM))
            assert (number in self.idle) == (not batches and slot.takes)
            takes_ahead = slot.takes and self.sends_ahead and not is_alone
            takes_ahead = takes_ahead and 0 < len(batches) < self.room
            assert (number in self.without_ahead) == takes_ahead
