"""Who takes what waits, and when: one scheduler for batches, and one for models of steps.

A worker of a model of steps has places, one for each item that it steps. Its scheduler fills those
that are free, and sends a few items more, so that a place that becomes free is taken before the
next step: to ask for one would take a step. Who waits is better kept here than there, since here
deadlines, priorities and tenants are looked at to the last. So they are few.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from ..observe.metrics import Figures
from ..observe.record import BatchRecord, Call, Reason, StepReport
from ..supervision.autoscaling import Load
from .call_queue import CallQueue, Decision
from .slots import Slots

#: A new call that takes so many times its time is hopeless. In simulations all of those that are
#: refused would have been late with this, and 95 % without it.
SURELY_LATE = 1.2
#: Items that a worker holds beyond its places, as a share of them; one at least.
#: Chosen by reasoning: more than end in one step, if items take eight steps or more.
DECK_SHARE = 0.125
#: Deaths of workers that an item may be there for before it is computed alone, of a model of steps.
#: Chosen by reasoning: to compute all items of a worker one by one, which may take seconds each,
#: is right only if a worker dies of them again.
GRACE = 1

#: Of a model of steps, a free place takes the next item.
_PLACE = Decision(1, Reason.PLACE)


class Scheduler(ABC):
    """What both schedulers have. Each decides by what it has learned of its model's time.

    Attributes:
        full: items of a full batch.
    """

    full = 1

    def __init__(self, slots: Slots, queue: CallQueue, figures: Figures) -> None:
        self._slots, self._queue, self._figures = slots, queue, figures
        self._workers_before = 0  # that took batches when one was back last

    # -- what happens

    @abstractmethod
    def arrived(self, size: int, now: float) -> None:
        """A call of so many items has just arrived, and is not in the queue yet."""

    @abstractmethod
    def prepare(self, batch: BatchRecord) -> float:
        """A batch is about to be sent; how long it is in the slowest stage of a worker, seconds."""

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        """A worker has reported a step. One whose model has none only says that it has not hung."""
        self._slots.stepped(report, now)
        return []

    @abstractmethod
    def answered(self, batch: BatchRecord, calls: int) -> None:
        """Of a batch that is back, and has not failed as a whole, so many calls are over."""
        self._workers_before = self._slots.taking

    # -- what is decided

    @abstractmethod
    def decide(self, now: float) -> tuple[int, Decision]:
        """Which worker is next, and what to do with the items that wait.

        One takes a batch: an idle one if there is any, else one that is busy.
        """

    def hopeless_for(self, call: Call, now: float) -> float:
        """How long a new call takes at the least, seconds, if it cannot be in time; else 0."""
        takes = self._takes(call, self._queue.ahead(call))
        return takes if takes > SURELY_LATE * (call.deadline - now) else 0.0

    def is_in_time_alone(self, call: Call, now: float) -> bool:
        """Whether a new call could be in time if nothing waited, and no worker was busy."""
        return self._takes(call) <= SURELY_LATE * (call.deadline - now)

    @property
    def _workers(self) -> int:
        """How many take batches. While all of them restart, how many did so before."""
        return self._slots.taking or self._workers_before

    @abstractmethod
    def _takes(self, call: Call, ahead: float = 0.0) -> float:
        """How long a new call takes at the least, behind so much work, seconds."""

    @abstractmethod
    def _full_batch(self) -> tuple[int, float]:
        """How many items a full batch has, and how long it takes, seconds."""

    def load(self, waiting: int, failed: int, start_duration: float) -> Load:
        """What there is to do, for ``Autoscaling``."""
        figures, places = self._figures, self._slots.places or 1
        full, seconds = self._full_batch()
        is_known = 0 < seconds < math.inf
        return Load(
            waiting=waiting,
            in_flight=self._slots.held_items,
            arrived=figures.accepted_items + figures.refused_items,
            served=figures.served_items,
            batches=figures.metrics.batch.count // places,
            ready=self._slots.taking,
            failed=failed,
            full=full,
            speed=full / seconds if is_known else 0.0,
            turn=seconds / places if is_known else 0.0,
            start_duration=start_duration,
            refused=figures.refused_items + figures.expired_calls,
        )


class StepScheduler(Scheduler):
    """Items of a model of steps: each is a batch, in a place of its worker until it is over.

    Args:
        places: how many items a worker steps at a time.
        resumes: whether a stream can go on with another worker where its outputs ended.
    """

    def __init__(
        self, slots: Slots, queue: CallQueue, figures: Figures, places: int, *, resumes: bool
    ) -> None:
        super().__init__(slots, queue, figures)
        slots.places, slots.grace, slots.sends_ahead = places, GRACE, True
        slots.room = places + max(1, math.ceil(places * DECK_SHARE))
        self._resumes = resumes

    def arrived(self, size: int, now: float) -> None:
        """A free place takes the next item, whatever may follow."""

    def prepare(self, batch: BatchRecord) -> float:
        call, start, stop = batch.spans[0]
        if call.handed_out:  # with the item go the outputs that it has had
            # Not added to what is there: this may be the second try, after a signal handler raised.
            batch.payloads = [*call.payloads[start:stop], *call.handed_out]
        return 0.0

    def stepped(self, report: StepReport, now: float) -> list[tuple[Call, Any]]:
        held = self._slots.stepped(report, now)
        if report.is_sign_of_life:
            return []
        figures, metrics = self._figures, self._figures.metrics
        metrics.stepped(report.size, report.duration)
        outputs, report.outputs, report.done = report.outputs, {}, []  # they are not kept with it
        report.at, report.pending = now, self._queue.items
        figures.steps.append(report)
        parts: list[tuple[Call, Any]] = []
        for batch_id, output in outputs.items():
            batch = held.get(batch_id)
            if batch is None:
                continue
            call = batch.spans[0][0]
            if call.is_over:
                continue
            pause = call.handed_out_at(now)
            if pause is None:
                metrics.first_output.add(call.first_output)
                figures.first_outputs.append(call.first_output)
                if call.handed_out is None and self._resumes:  # else it has begun elsewhere
                    call.handed_out = []
            else:
                metrics.between_outputs.add(pause)
            if call.handed_out is not None:
                if type(output) is bytes or getattr(output, "outlives_worker", False):
                    call.handed_out.append(output)
                else:  # it lies in memory that the worker takes with it
                    call.handed_out = None
            parts.append((call, output))
        return parts

    def answered(self, batch: BatchRecord, calls: int) -> None:
        super().answered(batch, calls)
        figures = self._figures
        # Items differ far more than batches do.
        figures.took(batch.report.pace, min(4 * self._slots.places, figures.metrics.batch.count))

    def decide(self, now: float) -> tuple[int, Decision]:  # noqa: ARG002
        slots = self._slots
        if slots.idle:
            return next(iter(slots.idle)), _PLACE
        return min(slots.without_ahead, key=lambda slot: len(slots[slot].batches)), _PLACE

    def _takes(self, call: Call, ahead: float = 0.0) -> float:  # noqa: ARG002
        queue, figures = self._queue, self._figures
        seconds = figures.batch_duration
        if not ahead or seconds == math.inf or figures.metrics.batch.count < self._slots.places:
            return 0.0
        # As many come back, whatever their lengths. Those of no length may leave no work.
        items = ahead * queue.items / (queue.work or 1.0)
        return items * seconds / (self._slots.places * max(1, self._workers))

    def _full_batch(self) -> tuple[int, float]:
        return self._slots.places, self._figures.batch_duration  # all places together are one
