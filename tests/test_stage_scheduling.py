"""The scheduler with workers that have stages, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

import pytest

from batcher_walk import make_batcher
from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchReport, Call

BATCH_SIZE = 64
#: On the way to a worker and back, seconds, each.
WAY = 0.0002
WARM, SECONDS = 1.0, 4.0


class Pipeline:
    """Workers whose stages take ``before``, ``base + per_item * n`` and ``after`` seconds."""

    def __init__(
        self,
        before: float = 0.002,
        base: float = 0.005,
        per_item: float = 1e-4,
        after: float = 0.002,
        *,
        slowest_return: float = 0.003,
        workers: int = 1,
    ) -> None:
        self.batcher = make_batcher(batch_size=BATCH_SIZE, max_latency=0.1)
        self.now = 0.0
        self._stages = (before, base, per_item, after)
        self._slowest_return = slowest_return
        self._free = [[0.0] * 3 for _ in range(workers)]
        self._events: list[tuple[float, int, Any]] = []
        self._number = itertools.count()
        self._random = random.Random(1)
        self._rate: float | None = None
        self._latencies: list[float] = []
        for worker in range(workers):
            self._do(self.batcher.worker_ready(worker, 0.0))

    def callers(self, count: int) -> float:
        """Calls per second of so many callers in a closed loop."""
        for _ in range(count):
            self._at(self._random.uniform(0.0, 0.01), None)
        self._run()
        return len(self._latencies) / SECONDS

    def stream(self, rate: float) -> float:
        """The mean latency of calls that arrive independently, seconds."""
        self._rate = rate
        self._at(0.0, None)
        self._run()
        return sum(self._latencies) / len(self._latencies)

    @property
    def best(self) -> float:
        """Calls per second that ``forward`` alone allows."""
        _, base, per_item, _ = self._stages
        return BATCH_SIZE / (base + per_item * BATCH_SIZE) * len(self._free)

    def _at(self, time: float, event: Any) -> None:
        heapq.heappush(self._events, (time, next(self._number), event))

    def _run(self) -> None:
        while self.now < WARM + SECONDS:
            if self.batcher.deadline < self._events[0][0]:
                self.now = max(self.now, self.batcher.deadline)
                self._do(self.batcher.time_passed(self.now))
                continue
            self.now, _, report = heapq.heappop(self._events)
            if report is not None:
                self._do(self.batcher.batch_returned(report, self.now))
                continue
            self._do(self.batcher.call_submitted(Call([0], None), self.now))
            if self._rate is not None:
                self._at(self.now + self._random.expovariate(self._rate), None)

    def _do(self, actions: Actions) -> None:
        for call in actions.calls:
            if self.now > WARM:
                self._latencies.append(self.now - call.arrived_at)
            if self._rate is None:
                self._at(self.now + self._random.uniform(3e-4, self._slowest_return), None)
        before, base, per_item, after = self._stages
        for batch in actions.batches:
            stages = (before, base + per_item * batch.size, after)
            at, free = self.now + WAY, self._free[batch.slot]
            for stage, seconds in enumerate(stages):
                at = free[stage] = max(at, free[stage]) + seconds
            report = BatchReport(
                batch.id, [0] * batch.size, duration=sum(stages), stages=stages, slot=batch.slot
            )
            self._at(at + WAY, report)


@pytest.mark.parametrize(
    ("callers", "share", "options"),
    # Two batches, and not three, fill the middle stage. Up to one batch of callers they are best
    # all together, and wait for the other stages. What lies between sends batches that are not
    # full: with full ones alone it would be 0.65 for 96 callers.
    [
        *((32, 0.37, {}), (64, 0.6, {}), (96, 0.85, {}), (112, 0.92, {})),
        *((128, 0.99, {}), (256, 0.99, {}), (256, 0.98, {"workers": 2})),
        (128, 0.9, {"slowest_return": 0.009}),  # callers that take their time to come back
    ],
)
def test_the_slowest_stage_is_kept_busy(
    callers: int, share: float, options: dict[str, Any]
) -> None:
    pipeline = Pipeline(**options)
    assert pipeline.callers(callers) >= share * pipeline.best


def test_a_worker_with_enough_batches_waits_until_all_of_them_are_answered() -> None:
    """Callers of one batch stay together: two half batches would take turns at 800 a second."""
    assert Pipeline(0.02, 0.02, 0.0, 0.02).callers(BATCH_SIZE) >= 1000


@pytest.mark.parametrize(("rate", "latency"), [(200, 0.012), (2000, 0.0145), (5000, 0.0205)])
def test_independent_calls_do_not_wait_for_the_stages_of_others(
    rate: float, latency: float
) -> None:
    # With full batches alone, beside a busy worker, it would be 0.014, 0.018 and 0.022.
    assert Pipeline().stream(rate) <= latency


def test_a_lone_caller_waits_for_nothing() -> None:
    pipeline = Pipeline()
    took = 1.0 / pipeline.callers(1)
    assert took <= 0.002 + 0.0051 + 0.002 + 2 * WAY + 0.00165 + 1e-4


def warm_batcher() -> Batcher:
    """Its worker has computed batches whose three stages took 10 ms each."""
    batcher = make_batcher(batch_size=BATCH_SIZE, max_latency=0.1)
    batcher.worker_ready(0, 0.0)
    for number, size in enumerate([1, 2, 4, 8] * 12):
        (batch,) = batcher.call_submitted(Call([0] * size, None), number * 0.03).batches
        stages = (0.01, 0.01, 0.01)
        report = BatchReport(batch.id, [0] * size, duration=0.03, stages=stages, slot=0)
        batcher.batch_returned(report, number * 0.03 + 0.03)
    return batcher


def test_calls_that_come_together_are_one_batch_though_a_stage_is_free() -> None:
    batcher = warm_batcher()
    assert batcher.call_submitted(Call([0], None), 2.0).batches
    for _ in range(8):  # the first two stages are free again
        assert not batcher.call_submitted(Call([0], None, more=True), 2.02).batches
    (batch,) = batcher.calls_submitted(2.02).batches
    assert batch.size == 8


@pytest.mark.parametrize(("waiting", "left", "computed"), [(80, 0.032, 64), (320, 0.02, 0)])
def test_the_time_of_other_stages_counts_once_for_calls_that_are_just_in_time(
    waiting: int, left: float, computed: int
) -> None:
    batcher = warm_batcher()
    batcher.worker_retiring(0, 2.0)
    for number in range(waiting):
        call = Call([0], None, is_watched=True)
        call.deadline = 2.0 + left if number < BATCH_SIZE else math.inf
        batcher.call_submitted(call, 2.0)
    batch = batcher.worker_ready(1, 2.0).batches[0]
    assert sum(call.deadline < math.inf for call, _, _ in batch.spans) == computed
