"""An engine that runs in the caller's thread, so that a test decides what happens next.

Everything that depends on the inside of the package is in this module. The rest of the walks uses
the public API of the streamer that it builds, and the events of a transport.

The engine's loop runs in a greenlet. It runs until it waits for its workers and nothing is due;
then the test goes on. So a test meets the same states, in the same order, in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from service_streamer import (
    PredictTimeout,
    SharedBatchError,
    Streamer,
    WorkerLost,
    WorkerStartError,
)
from service_streamer.batching.batcher import Batcher, CallFailures
from service_streamer.engine.backend import BlockingReply
from service_streamer.engine.engine import Engine, Fleet
from service_streamer.observe.record import ORDINARY, Call, CallOptions
from service_streamer.options.table import StreamerOptions
from service_streamer.supervision.health import BatchBound
from service_streamer.supervision.supervisor import Loss
from service_streamer.testing import ManualClock, StubTransport
from service_streamer.workers.protocol import DROP, HOLD, Failure
from service_streamer.workers.transport import (
    BatchReport,
    StepReport,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
    WorkerWaits,
)

__all__ = [
    "DROP", "HOLD", "BatchReport", "EngineStreamer", "Failure", "InlineTransport", "Loss",
    "Prediction", "StepReport", "WorkerDied", "WorkerReady", "WorkerWaits", "build", "died",
]  # fmt: skip

#: A loop that looks so often without being woken would never rest.
_MOST_LOOKS = 10_000


class InlineTransport(StubTransport):
    """A transport without workers, whose ``wait`` lets the test go on instead of blocking.

    Attributes:
        told: what workers of a model of steps were told, since somebody emptied it.
        due: when the engine looks next by itself, by the clock; None for never.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.told: list[tuple[int, int, int]] = []
        self.due: float | None = None
        self._is_woken = False
        self._now = clock
        self._happened: list[WorkerEvent] = []
        self._looks = 0  # of the loop since it last had to wait
        self._fault = ""
        self._test = getcurrent()
        self._loop: greenlet | None = None

    def run(self, loop: Callable[[], None]) -> None:
        """Run the engine's loop until it waits."""
        self._loop = greenlet(loop, self._test)
        self._loop.switch()

    def pump(self) -> None:
        """Let the engine do what it can do now."""
        if self._loop is not None and not self._loop.dead:
            self._loop.switch()
        assert not self._fault, self._fault

    @property
    def has_ended(self) -> bool:
        """Whether the engine has."""
        return self._loop is not None and self._loop.dead

    def deliver(self, *events: WorkerEvent) -> None:
        for event in events:
            self._happened += event.events() if isinstance(event, StepReport) else [event]
        self.pump()

    def tell(self, slot: int, what: int, batch_id: int) -> None:
        self.told.append((slot, what, batch_id))

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        self.due = None if timeout is None else self._now() + timeout
        self._looks += 1
        while not (self._happened or self._is_woken or self._is_due()):
            self._looks = 0
            self._test.switch()
        if self._looks > _MOST_LOOKS:
            self._fault = "the engine looks again and again, though nothing happens"
            self._test.switch()
        self._is_woken = False
        events, self._happened = self._happened, []
        return events

    def _is_due(self) -> bool:
        return self.due is not None and self.due <= self._now()

    def wakeup(self) -> None:
        self._is_woken = True

    def when_exiting(self, then: Callable[[], None]) -> Callable[[], object]:
        return lambda: None  # no thread and no process of it is left to be ended


class EngineStreamer(Streamer):
    """A streamer over an engine that runs in this thread.

    Attributes:
        clock, transport: of the engine.
        check_invariants: of the batcher.
        held_back: gives the workers that get no batches since they seem to fail them.
    """

    def __init__(
        self,
        options: StreamerOptions,
        clock: ManualClock,
        transport: InlineTransport,
        engine: Engine,
    ) -> None:
        super(Streamer, self).__init__(options.worker_timeout)
        self.clock, self.transport = clock, transport
        # The loop's thread is never started: what it would run is run in a greenlet. And ``close``
        # returns when it has begun, since this thread has the loop to run.
        thread: Any = engine.thread
        thread.start = lambda: transport.run(thread.run)
        engine.join = transport.pump  # type: ignore[method-assign]
        self._run(options, lambda: engine)

        def check_invariants() -> None:
            with engine.lock:  # or a finalizer of a stream might change what is looked at
                engine.batcher.check_invariants()

        self.check_invariants = check_invariants
        self.held_back = lambda: engine.batcher.slots.held_back


@functools.cache
def _options(**options: Any) -> StreamerOptions:
    """To check options takes longer than a short walk."""
    return StreamerOptions.select({"worker_timeout": None, **options})


def build(
    *, workers: int = 2, most: int | None = None, has_lengths: bool = False, **options: Any
) -> EngineStreamer:
    """A streamer over a stub of a transport.

    Args:
        workers, most: the least and the most; a fixed number without ``most``.
        has_lengths: whether an item costs its own length, by ``item.length``.
        options: of ``Streamer``.
    """
    chosen = _options(**options)
    timeout, clock = chosen.batch_timeout, ManualClock()
    transport = InlineTransport(clock)
    batcher = Batcher(
        chosen,
        has_lengths=has_lengths,
        batch_bound=BatchBound(fixed=timeout) if isinstance(timeout, float) else None,
        call_failures=CallFailures(
            expired=(expired := Failure(PredictTimeout("it could not be computed in its time"))),
            expired_suspect=expired,
            shared=lambda failure, lost: failure if lost else Failure(SharedBatchError("shared")),
        ),
    )
    fleet = Fleet(batcher, workers, most or workers)
    fleet.supervisor.jitter = lambda: 0.5
    engine = Engine(
        transport,
        fleet,
        lengths=(lambda items: [item.length for item in items]) if has_lengths else None,
        clock=clock,
    )
    return EngineStreamer(chosen, clock, transport, engine)


class Prediction:
    """A ``predict`` whose caller does not block: the test says when it looks, and when it leaves.

    Raises what ``submit`` raises.
    """

    def __init__(
        self, streamer: EngineStreamer, items: list[Any], timeout: float | None, **options: Any
    ) -> None:
        self._backend = streamer.backend
        self._reply = BlockingReply()
        is_ordinary = timeout is None and not any(options.values())
        kind = ORDINARY if is_ordinary else CallOptions(**options, has_deadline=timeout is not None)
        call = Call(items, self._reply, timeout, kind)
        try:
            self._backend.submit(call)
        except BaseException:
            self._reply.leave()
            raise

    def done(self) -> bool:
        return self._reply.call is None

    def result(self) -> list[Any]:
        return self._backend.decode(self._reply.result())

    def leave(self, *, has_expired: bool) -> None:
        """The caller goes."""
        call = self._reply.call
        if call is not None:
            self._backend.withdraw(call, has_expired=has_expired)


def died(
    slot: int,
    loss: Loss,
    batch_id: int | None = None,
    begun: frozenset[int] | None = None,
    *,
    is_loading: bool,
) -> WorkerDied:
    """A worker is lost."""
    error = WorkerStartError("no") if is_loading else WorkerLost("died")
    return WorkerDied(slot, Failure(error), loss, batch_id, begun=begun)
