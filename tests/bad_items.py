"""A service in simulated time, with callers of whom some send what fails: the real batcher."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from batcher_walk import make_batcher
from service_streamer.batching.batcher import Actions, CallFailures
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from worker_loop import served

#: The time in which a worker finds that a batch kills it, as a share of that of the batch.
_DEATH = 0.5


class Text(str):
    """Equal ones are not identical."""


class Service:
    """Callers in closed loops, each with one call of one item at a time.

    Args:
        callers: how many.
        item: what a caller sends next: "good", "bad" (the model raises) or "kill" (its worker
            dies).
        seconds: what the model takes for a batch.
        fails: whether the model raises on a batch.
        failure: what calls fail with then.
        restart: what a worker takes to be ready, seconds.
        timeout: how long callers wait, seconds.

    Attributes:
        ends: what calls ended with, by item: "done", a failure, or "expired".
        waits: how long those took that were sent as good and answered, seconds.
        batches: how often the model was called.
        new_batches: how many batches were of new items.
        deaths: of workers.
        condemned: when which worker was to be replaced.
    """

    def __init__(
        self,
        item: Callable[[int], str],
        *,
        callers: int = 64,
        workers: int = 1,
        seconds: Callable[[BatchRecord], float] = lambda _: 0.001,
        fails: Callable[[BatchRecord], bool] = lambda batch: "bad" in batch.payloads,
        failure: Any = "raised",
        restart: float = 0.0,
        timeout: float = math.inf,
        **options: Any,
    ) -> None:
        self._item = item
        self._seconds, self._fails, self._failure = seconds, fails, failure
        self._restart = restart
        self._timeout = timeout
        failures = CallFailures(
            "expired", "expired", lambda _, is_loss: "shared loss" if is_loss else "shared"
        )
        self.batcher = make_batcher(call_failures=failures, **options)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._looks = itertools.count(), itertools.count()
        self.now = 0.0
        self._queues: dict[int, deque[BatchRecord]] = {}  # what workers have not begun with
        self._computing: dict[int, BatchRecord] = {}
        self._next_slot = 0
        self.ends: Counter[tuple[str, str]] = Counter()
        self.waits: list[float] = []
        self.batches = self.new_batches = self.deaths = 0
        self.condemned: list[tuple[float, int]] = []
        for _ in range(workers):
            self._at(restart, self._ready)
        for caller in range(callers):
            self._at(0.0, lambda caller=caller: self._call(caller))

    def run(self, until: float) -> None:
        """Let this time pass, seconds."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if next(self._looks) % 16 == 0:
                self.batcher.check_invariants()
            if self.batcher.deadline <= self.now:
                self._do(self.batcher.time_passed(self.now))
            if self.batcher.deadline < math.inf:
                self._at(max(self.now, self.batcher.deadline), lambda: None)
        self.now = until

    def answered(self, item: str = "good") -> int:
        return self.ends[item, "done"]

    def failed(self, item: str = "good") -> int:
        return sum(n for (sent, end), n in self.ends.items() if sent == item and end != "done")

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), event))

    def _call(self, caller: int) -> None:
        item = self._item(caller)
        call = Call([item], (caller, item), is_watched=True)
        call.deadline = self.now + self._timeout
        self._do(self.batcher.call_submitted(call, self.now))

    def _ready(self) -> None:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._queues[slot] = deque()
        self._do(self.batcher.worker_ready(slot, self.now))

    def _do(self, actions: Actions) -> None:
        for batch in actions.batches:
            self._queues[batch.slot].append(batch)
            self._begin(batch.slot)
        for slot in actions.condemned:
            self.condemned.append((self.now, slot))
            self._do(self.batcher.worker_retiring(slot, self.now))
            self._lose(slot, None)
        for call in actions.calls:
            caller, item = call.reply
            self.ends[item, "done" if call.failure is None else str(call.failure)] += 1
            if item == "good" and call.failure is None:
                self.waits.append(self.now - call.arrived_at)
            # To come back takes a little, and so they come one by one.
            self._at(self.now + 2e-5 + 1e-6 * caller, lambda caller=caller: self._call(caller))

    def _begin(self, slot: int) -> None:
        """Have the worker compute the next batch that it has, unless it is at one."""
        if slot in self._computing or not self._queues[slot]:
            return
        batch = self._computing[slot] = self._queues[slot].popleft()
        self.new_batches += batch.search is None
        if "kill" in batch.payloads:
            self.batches += 1
            self._at(self.now + _DEATH * self._seconds(batch), lambda: self._die(slot))
        else:
            report = self._computed(batch)
            self._at(self.now + report.duration, lambda: self._end(slot, report))

    def _computed(self, batch: BatchRecord) -> BatchReport:
        """What its worker says of the batch: which items are bad, if these may be looked for."""
        took, runs = 0.0, 0
        if not self._fails(batch):
            self.batches += 1
            outputs = ["result"] * batch.size
            return BatchReport(batch.id, outputs, duration=self._seconds(batch), slot=batch.slot)

        def predict(positions: list[int]) -> list[int]:
            nonlocal took, runs
            items = [batch.payloads[position] for position in positions]
            part = BatchRecord(0, batch.slot, [], items)
            took, runs = took + self._seconds(part), runs + 1
            if self._fails(part):
                raise ValueError
            return positions

        may_search = batch.calls > 1 and self.batcher.isolates_errors
        (report,) = served(predict, [*range(batch.size)], calls=int(may_search))
        self.batches += runs
        failures = {position: self._new_failure() for position in report.failures}
        failure = None if report.failure is None else self._failure
        return BatchReport(
            batch.id, report.outputs, failures, failure, took, runs=report.runs, slot=batch.slot
        )

    def _new_failure(self) -> Any:
        """Another one for each time that the model raises."""
        failure = self._failure
        return Text(failure) if isinstance(failure, str) else copy.copy(failure)

    def _die(self, slot: int) -> None:
        if self._computing.pop(slot, None) is not None:  # else it was replaced
            self.deaths += 1
            self._lose(slot, "died")

    def _end(self, slot: int, report: BatchReport) -> None:
        if self._computing.pop(slot, None) is not None:  # else it was replaced
            self._begin(slot)
            self._do(self.batcher.batch_returned(report, self.now))

    def _lose(self, slot: int, failure: str | None) -> None:
        del self._queues[slot]
        self._computing.pop(slot, None)
        self._do(self.batcher.worker_lost(slot, failure, self.now))
        self._at(self.now + self._restart, self._ready)


def share_of_bad(share: float, seed: int = 0, bad: str = "bad") -> Callable[[int], str]:
    """Each item is bad with this probability."""
    random = Random(seed)
    return lambda _: bad if random.random() < share else "good"
