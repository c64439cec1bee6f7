"""A batcher with workers that a test plays."""

from __future__ import annotations

import math
from typing import Any

from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from service_streamer.options.table import StreamerOptions
from service_streamer.supervision.health import BatchBound


def make_batcher(batch_timeout: float | BatchBound | None = None, **options: Any) -> Batcher:
    """A batcher with options of ``Streamer``, and others of ``Batcher``."""
    names = options.keys() & {"call_failures", "has_lengths", "round_trip"}
    own = {name: options.pop(name) for name in names}
    bound = BatchBound(fixed=batch_timeout) if isinstance(batch_timeout, float) else batch_timeout
    return Batcher(StreamerOptions(**options), batch_bound=bound, **own)


class Walk:
    """A batcher with ready workers, a clock that stands still, and invariants after every step."""

    def __init__(self, *, slots: int = 1, ready: bool = True, **options: Any) -> None:
        self.batcher = make_batcher(**{"batch_size": 4, **options})
        self.now = 0.0
        if ready:
            for slot in range(slots):
                self.batcher.worker_ready(slot, self.now)

    def submit(
        self, *items: Any, timeout: float = math.inf, more: bool = False
    ) -> tuple[Call, list[BatchRecord]]:
        call = Call(list(items), None, is_watched=True, more=more)
        call.deadline = self.now + timeout
        actions = self.batcher.call_submitted(call, self.now)
        if not more:  # until all have come, an idle worker may be left without
            self.checked(actions)
        return call, list(actions.batches)

    def failed(self, batch: BatchRecord, duration: float = 0.0) -> Actions:
        report = BatchReport(batch.id, failure="why", duration=duration, slot=batch.slot)
        return self.checked(self.batcher.batch_returned(report, self.now))

    def lost(self, slot: int, failure: str = "died") -> Actions:
        return self.checked(self.batcher.worker_lost(slot, failure, self.now))

    def pass_time(self) -> Actions:
        self.now = self.batcher.deadline
        return self.checked(self.batcher.time_passed(self.now))

    def done(
        self,
        batch: BatchRecord,
        duration: float = 0.01,
        padding: float | None = None,
        runs: int = 0,
        **failures: Any,
    ) -> Actions:
        """It comes back; ``_1="why"`` is why its item 1 has failed."""
        outputs = [f"result of {payload}" for payload in batch.payloads]
        by_position = {int(position[1:]): failure for position, failure in failures.items()}
        report = BatchReport(
            batch.id, outputs, by_position, duration=duration, padding=padding, runs=runs,
            slot=batch.slot,
        )  # fmt: skip
        return self.checked(self.batcher.batch_returned(report, self.now))

    def checked(self, actions: Actions) -> Actions:
        self.batcher.check_invariants()
        return actions
