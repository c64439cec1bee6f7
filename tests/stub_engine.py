"""An engine on a transport without workers, and on a clock that moves when told to."""

from __future__ import annotations

import math
from typing import Any

from service_streamer import Future, PredictTimeout, WorkerStartError
from service_streamer.batching.batcher import Batcher, CallFailures
from service_streamer.engine.engine import Engine, Fleet
from service_streamer.observe.record import Call
from service_streamer.supervision.supervisor import Loss
from service_streamer.testing import ManualClock, StubTransport
from service_streamer.workers.protocol import Failure
from service_streamer.workers.transport import WorkerDied


class StubEngine:
    """Closes at the end of its block; the options are those of ``Batcher``."""

    def __init__(
        self, worker_num: int = 1, batch_size: int = 4, most: int | None = None, **options: Any
    ) -> None:
        self.clock = ManualClock()
        self.transport = StubTransport(self.clock)
        options = {"max_latency": 0.125, **options}
        failures = CallFailures(Failure(PredictTimeout("expired")))
        self.batcher = Batcher(batch_size=batch_size, call_failures=failures, **options)
        fleet = Fleet(self.batcher, worker_num, most or worker_num)
        self.supervisor, self.scaling = fleet.supervisor, fleet.scaling
        self.supervisor.max_restarts, self.supervisor.jitter = 1, lambda: 0.0
        self.engine = Engine(self.transport, fleet, clock=self.clock)
        self.engine.start()

    def __enter__(self) -> StubEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close(drain=False, timeout=None)

    def submit(self, *items: Any, timeout: float | None = None) -> Future:
        future = Future(self.engine)
        self.engine.submit(Call(items, future, timeout, is_watched=True))
        return future

    def cannot_start(self, slot: int, text: str = "no weights") -> None:
        failure = Failure(WorkerStartError(text))
        self.transport.deliver(WorkerDied(slot, failure, Loss.START_FAILED))

    @property
    def sent(self) -> list[Any]:
        """The items of each batch that was sent."""
        return [payloads for _, _, payloads in self.transport.sent]

    def await_timer(self, drain_deadline: float = math.inf) -> None:
        """Return when the loop waits for what is due next: only then may time pass.

        Between its look at the clock and its wait it would take the new time for the old one.
        """
        left = min(self.batcher.deadline, self.supervisor.due, drain_deadline) - self.clock()
        self.transport.await_that(lambda: self.transport.timeouts[-1:] == [left])

    def advance(self, seconds: float) -> None:
        """Let time pass, and the loop deal with it."""
        self.await_timer()
        waits = self.transport.waits
        self.clock.advance(seconds)
        self.transport.await_that(lambda: self.transport.waits > waits)
