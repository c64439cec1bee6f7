"""For tests, ours and yours: time that stands still, workers made of nothing, models that wait.

None of these sleeps or polls: a test says what happens, and in which order.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import WorkerLost
from .observe.record import BatchReport, StepReport
from .supervision.supervisor import Loss
from .workers.protocol import Failure, WorkerReady
from .workers.transport import Transport, WorkerDied, WorkerEvent

__all__ = ["Gate", "ManualClock", "StubTransport"]


class ManualClock:
    """A clock, in seconds, that a test moves by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._listeners: list[Callable[[], None]] = []

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on, and let whoever waits for this clock look at it."""
        self._now += seconds
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after each move."""
        self._listeners.append(listener)


class StubTransport(Transport):
    """A transport without workers: the test reads what was sent and says what comes back.

    It fails where a real one can: ``deliver`` takes any event, ``refused_items`` cannot be encoded.

    Attributes:
        sent: ``(slot, batch_id, payloads)`` of each batch, in order.
        started: ``(slot, place, worker_num)`` of each worker, in order.
        stopped, killed: the slots of workers that were asked to end, and of those ended by force.
        timeouts: what ``wait`` was called with, in order.
        waits: how often that was.
        is_closed: whether ``close`` was called.
        refused_items: ``(item, error)``: what an item raises when it is encoded.
        refused_starts: errors that the next starts raise.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.sent: list[tuple[int, int, list[Any]]] = []
        self.started: list[tuple[int, int, int]] = []
        self.stopped: list[int] = []
        self.killed: list[int] = []
        self.timeouts: list[float | None] = []
        self.is_closed = False
        self.refused_items: list[tuple[Any, Exception]] = []
        self.refused_starts: list[Exception] = []
        self._clock = clock
        self._events: list[WorkerEvent] = []
        self._is_woken = False
        self.waits = 0
        self._taken = 0  # at which wait the last events were taken
        self._changed = threading.Condition()
        clock.listen(self._notify)

    def encode(self, items: Sequence[Any]) -> list[Any]:
        for item in items:
            for refused, error in self.refused_items:
                if item == refused:
                    raise error
        return list(items)

    def start(self, slot: int, place: int, worker_num: int) -> None:
        """Nothing to start: ``ready`` says when it is."""
        if self.refused_starts:
            raise self.refused_starts.pop(0)
        self.started.append((slot, place, worker_num))
        self._notify()

    def stop(self, slot: int) -> None:
        self.stopped.append(slot)
        self._notify()

    def kill(self, slot: int, why: str) -> None:
        self.killed.append(slot)
        self._notify()

    def send(
        self,
        slot: int,
        batch_id: int,
        payloads: list[Any],
        *,
        calls: int | list[int] = 0,
        is_stream: bool = False,
    ) -> None:
        self.sent.append((slot, batch_id, payloads))

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        with self._changed:
            self.timeouts.append(timeout)
            self.waits += 1
            self._changed.notify_all()
            until = None if timeout is None else self._clock() + timeout
            self._changed.wait_for(
                lambda: (
                    self._events or self._is_woken or (until is not None and until <= self._clock())
                )
            )
            self._is_woken = False
            if self._events:
                self._taken = self.waits
            events, self._events = self._events, []
            return events

    def wakeup(self) -> None:
        self._is_woken = True
        self._notify()

    def close(self, grace: float) -> None:
        self.is_closed = True
        self._notify()

    def deliver(self, *events: WorkerEvent) -> None:
        """Let these happen, and return when the loop has dealt with them and waits again."""
        with self._changed:
            taken = self._taken
            for event in events:
                self._events += event.events() if isinstance(event, StepReport) else [event]
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.waits > self._taken > taken or self.is_closed)

    def await_that(self, predicate: Callable[[], bool]) -> None:
        """Return when something holds that the engine does: waiting, starting, stopping, ..."""
        with self._changed:
            self._changed.wait_for(predicate)

    def ready(self, *slots: int) -> None:
        """Let the workers of these slots become ready."""
        self.deliver(*(WorkerReady(slot) for slot in slots))

    def lose(self, *slots: int, loss: Loss = Loss.CRASHED, text: str = "died") -> None:
        """Let the workers of these slots be lost."""
        self.deliver(*(WorkerDied(slot, Failure(WorkerLost(text)), loss) for slot in slots))

    def echo(
        self, position: int = -1, *, duration: float = 0.0, started_at: float = -math.inf
    ) -> None:
        """Let a batch that was sent (the last one) come back with its items as its results."""
        slot, batch_id, payloads = self.sent[position]
        self.report(slot, batch_id, payloads, duration=duration, started_at=started_at)

    def report(self, slot: int, batch_id: int, *results: Any, **fields: Any) -> None:
        """Let a batch come back, with results or as the other fields of a ``BatchReport`` say."""
        self.deliver(BatchReport(batch_id, *results, slot=slot, **fields))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Gate:
    """Where a model waits until the test lets it go on; works in threads and across processes.

    Pass it to the model (it pickles as a path). The model calls ``go_through``; the test calls
    ``await_arrival`` to know that the model has arrived, and ``let_through`` for it to go on.

    Args:
        folder: where it makes two named pipes; one that a gate has made leads to the same gate.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        if not path.exists():
            path.mkdir(parents=True)
            os.mkfifo(path / "arrivals")
            os.mkfifo(path / "permits")
        self.__setstate__(path)

    def go_through(self) -> None:
        """In the model: say that it has arrived, and block until a permit comes."""
        os.write(self._arrivals, b".")
        os.read(self._permits, 1)

    def await_arrival(self) -> None:
        """In the test: block until the model has arrived; each arrival is reported once."""
        os.read(self._arrivals, 1)

    def let_through(self, times: int = 1) -> None:
        """In the test: have the next ``times`` passages permitted, also those yet to come."""
        os.write(self._permits, b"." * times)

    def close(self) -> None:
        """Release the pipes of this process."""
        os.close(self._arrivals)
        os.close(self._permits)

    def __getstate__(self) -> Path:
        return self._folder

    def __setstate__(self, folder: Path) -> None:
        self._folder = folder
        # For both directions: opening does not wait for the other side, and what is written is not
        # lost while no other end has the pipe open.
        self._arrivals = os.open(folder / "arrivals", os.O_RDWR)
        self._permits = os.open(folder / "permits", os.O_RDWR)
