"""The items that workers step: whose outputs are handed out as they come, and who has gone.

A worker of a model of steps has places, one for each item that it steps. The scheduler fills those
that are free, and sends a few items more, so that a place that becomes free is taken before the
next step: to ask for one would take a step. Who waits is better kept here than there, since here
deadlines, priorities and tenants are looked at to the last. So they are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..observe.metrics import BatchMetrics
from ..observe.recent import StepLog
from ..observe.record import BatchRecord, Call, StepReport
from . import tuning
from .slots import Slots


def room_of_places(places: int) -> int:
    """How many items a worker holds that steps so many of them."""
    return places + max(1, math.ceil(places * tuning.DECK_SHARE))


class Stepping:
    """What a batcher knows of a model of steps: each batch is one item, in a place of its worker.

    Args:
        places: how many items a worker steps at a time.
        resumes: whether a stream can go on with another worker where its outputs ended.
        slots, metrics: of the batcher.

    Attributes:
        log: the last steps.
        resumes: see above.
    """

    def __init__(self, places: int, slots: Slots, metrics: BatchMetrics, *, resumes: bool) -> None:
        self._slots, self._metrics = slots, metrics
        self.resumes = resumes
        self.log = StepLog(places)

    def stepped(self, report: StepReport, pending: int, now: float) -> list[tuple[Call, Any]]:
        """A worker has taken a step; the calls of streams, each with an output to be handed out.

        Args:
            pending: items that wait for a worker.
        """
        metrics, log = self._metrics, self.log
        held = self._slots.stepped(report.slot, now)
        metrics.stepped(report.size, report.duration)
        log.add(report, pending, now)
        parts: list[tuple[Call, Any]] = []
        between: list[float] = []
        for batch_id, output in report.outputs.items():
            batch = held.get(batch_id)
            if batch is None:
                continue
            call = batch.spans[0][0]
            if call.is_over:
                continue
            pause = call.handed_out_at(now)
            if pause is None:
                metrics.first_output.add(call.first_output)
                log.first_outputs.append(call.first_output)
                if call.handed_out is None and self.resumes:  # else it has begun elsewhere
                    call.handed_out = []
            else:
                between.append(pause)
            if call.handed_out is not None:
                if type(output) is bytes:
                    call.handed_out.append(output)
                else:  # it lies in memory that the worker takes with it
                    call.handed_out = None
            parts.append((call, output))
        if between:
            metrics.between_outputs.add_all(between)
        return parts

    def hold(self, call: Call, now: float, *, is_held: bool) -> list[BatchRecord]:
        """A stream's item is about to rest, or to go on; returns those of it that are in flight.

        None rests in a worker that is to end when it has finished what it holds.
        """
        slots = self._slots
        found = [batch for batch in slots.in_flight() if batch.spans[0][0] is call]
        if is_held:
            found = [batch for batch in found if not slots.is_closing(batch.slot)]
            call.is_held = bool(found)
        else:
            self._go_on(found, now)
        return found

    def wake(self, now: float, slot: int | None = None) -> list[BatchRecord]:
        """No item is to rest any more, of this worker or of all; returns those that did."""
        rested = [
            batch
            for batch in self._slots.in_flight()
            if batch.spans[0][0].is_held and slot in (None, batch.slot)
        ]
        self._go_on(rested, now)
        return rested

    def _go_on(self, batches: Sequence[BatchRecord], now: float) -> None:
        for batch in batches:
            batch.spans[0][0].is_held = False
            self._slots.resumed(batch.slot, now)

    def apart(
        self, lost: Sequence[BatchRecord]
    ) -> tuple[Sequence[BatchRecord], Sequence[BatchRecord]]:
        """Of what a worker took with it: what can begin again or go on, and what cannot.

        What a caller has got of a stream cannot be taken back.
        """
        again: list[BatchRecord] = []
        cut_off: list[BatchRecord] = []
        for batch in lost:
            call = batch.spans[0][0]
            call.is_held = False  # the next worker does not know of it
            is_cut_off = call.part_at is not None and call.handed_out is None
            (cut_off if is_cut_off else again).append(batch)
        return again, cut_off
