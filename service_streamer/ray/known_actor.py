"""One actor as the driver sees it: what it has said, and how it was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..errors import StreamerError, WorkerLost, WorkerStartError
from ..observe.record import BatchReport
from ..supervision.supervisor import Loss
from ..workers.protocol import Failure, decode
from ..workers.transport import KnownWorker, WorkerDied, WorkerEvent
from .clock import RemoteClock
from .cluster import Actor
from .frames import Frame, unframed
from .losses import Verdict


class KnownActor(KnownWorker):
    """One actor as the driver sees it; ``actor`` is None until Ray has taken it up."""

    def __init__(self, slot: int, place: int) -> None:
        super().__init__(slot, place)
        self.actor: Actor | None = None
        self._made: Actor | None = None
        self.host, self.pid, self.gpus = "", 0, ""
        self.is_placed = False
        self.is_waiting = False  # for a place, as the engine was told
        self.is_gone = False
        self.has_ended = False
        self.exit_code: int | None = None
        self.loss: tuple[Verdict, BaseException] | None = None
        self.stacks = ""
        self.lock = threading.Lock()
        self.open_calls = 0
        self.taken = 0
        self._clock = RemoteClock()

    def heard(self, received: Frame) -> Sequence[WorkerEvent]:
        """What it says, as ``events``; times by this process's clock.

        Raises:
            Breach: see ``events``. Whatever else is raised, it is no message at all.
        """
        sent, message = unframed(received)
        events = self.events(decode(message))
        self._clock.learn(sent, time.monotonic())
        for event in events:
            if isinstance(event, BatchReport):
                event.started_at = self._clock.local(event.started_at)
        return events

    def died(self) -> WorkerDied:
        """How it was lost, for the engine."""
        if self.killed_for is not None or self.final_report is not None or self.loss is None:
            return self.obituary(self.exit_code, self.stacks)
        found, cause = self.loss
        error: StreamerError
        if self.is_ready:
            error = WorkerLost(f"{self} was lost: {found.end}")
            loss = Loss.OUTAGE if found.is_outage else Loss.CRASHED
        else:
            error = WorkerStartError(f"{self} was lost before it had loaded its model: {found.end}")
            loss = Loss.START_FAILED if found.is_final else Loss.CRASHED
        failure = Failure(error, cause=Failure(cause.with_traceback(None)))
        return WorkerDied(self.slot, failure, loss)

    def made(self, actor: Actor) -> None:
        """Ray has taken it up. If nobody wants it any more, it is killed. Any thread."""
        with self.lock:
            self._made = actor
            is_unwanted = self.is_gone
        if is_unwanted:
            actor.kill(is_made=False)

    def forget(self) -> None:
        """Nobody wants it any more: end it by force, also if it is still to be made."""
        with self.lock:
            self.is_gone = True
        self.kill()

    def lose_contact(self) -> None:
        """This process may be in the midst of leaving: nothing is asked of the actor any more."""
        with self.lock:
            self.actor = self._made = None

    def kill(self) -> bool:
        """End it by force, if it is there. Does not wait for its end.

        Returns:
            Whether Ray is asked to.
        """
        with self.lock:
            actor = self._made
        return actor is not None and actor.kill(is_made=self.is_placed)

    def __str__(self) -> str:
        where = f" (pid {self.pid} on {self.host})" if self.is_placed else ""
        return f"Ray worker {self.place}{where}"
