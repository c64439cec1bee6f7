"""This project's scheduler: the batcher that serves, with its defaults."""

from __future__ import annotations

from collections.abc import Sequence

from policies.service import Batch, Job
from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchReport, Call
from service_streamer.options.table import StreamerOptions

__all__ = ["Learned"]


class Learned:
    """Hands all events to a batcher as the engine does. It is told no cost and no rate.

    Args:
        workers: how many there are.
        batch_size: the most items of a batch.
        has_lengths: whether the model has told the length of its items.
    """

    def __init__(self, workers: int, batch_size: int, *, has_lengths: bool) -> None:
        options = StreamerOptions(batch_size=batch_size)
        self._batcher = Batcher(options, has_lengths=has_lengths)
        self._has_lengths = has_lengths
        for slot in range(workers):
            self._batcher.worker_ready(slot, 0.0)

    @property
    def wake_at(self) -> float:
        return self._batcher.deadline

    def arrived(self, job: Job, now: float) -> Sequence[Batch]:
        batcher = self._batcher
        call = Call((job,), None, is_watched=True)
        call.deadline = job.deadline
        if self._has_lengths:
            call.lengths = (job.length,)
        if batcher.hopeless_for(call, now):
            return ()  # refused
        return _batches(batcher.call_submitted(call, now))

    def returned(self, batch: Batch, took: float, now: float) -> Sequence[Batch]:
        record = batch.tag
        report = BatchReport(record.id, list(batch.jobs), duration=took, slot=record.slot)
        return _batches(self._batcher.batch_returned(report, now))

    def passed(self, now: float) -> Sequence[Batch]:
        return _batches(self._batcher.time_passed(now))


def _batches(actions: Actions) -> Sequence[Batch]:
    return [Batch(batch.slot, batch.payloads, batch) for batch in actions.batches]
