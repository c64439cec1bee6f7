"""The contract between the engine and whatever runs the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..observe.record import BatchReport
from ..options.checks import Device
from ..supervision.supervisor import Loss
from .protocol import Failure

__all__ = ["BatchReport", "Transport", "WorkerDied", "WorkerEvent", "WorkerReady"]


class WorkerReady(NamedTuple):
    """The worker has loaded its model and waits for batches.

    Attributes:
        description: what the model says of itself; None if it says nothing.
    """

    slot: int
    description: dict[str, Any] | None = None


class WorkerDied(NamedTuple):
    """The worker is gone, with every batch sent to it. The last event of its slot.

    Attributes:
        failure: a ``WorkerStartError`` if it never was ready, else an ``errors.WorkerLost``.
        batch_id: with ``Loss.DEVICE_FAILED``, the batch that it was at; others it had not begun.
        report: for the log, what the model raised then; may quote items of callers.
    """

    slot: int
    failure: Failure
    loss: Loss
    batch_id: int | None = None
    report: str | None = None


#: A report comes with its slot, and with its outputs encoded: see ``Transport.decode``.
WorkerEvent = WorkerReady | BatchReport | WorkerDied


class Transport(ABC):
    """Starts workers, carries one message per batch to them, and says what came back or who died.

    The engine owns it and closes it. ``encode``, ``decode``, ``send`` and ``wakeup`` may be called
    by any thread at any time, also after ``close`` and for a worker that is gone (then nothing
    happens); the rest only by the thread that runs the engine's loop, or before that loop starts.
    """

    @abstractmethod
    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items as they will travel. Runs in the caller's thread: its items are its own risk.

        Raises:
            UnpicklableItem: an item cannot travel; says which and why.
        """

    @abstractmethod
    def decode(self, outputs: list[Any]) -> list[Any]:
        """The outputs of a call as the model returned them. Runs in the caller's thread, too.

        Raises:
            ModelError: one cannot be decoded.
        """

    def device(self, place: int) -> Device | None:  # noqa: ARG002 - not every kind has devices
        """The device of worker number ``place``; None if it was given none. For any thread."""
        return None

    @abstractmethod
    def start(self, slot: int, place: int, worker_num: int) -> None:
        """Start a worker. Returns before it is ready: an event will say so.

        Args:
            slot: its name from now on; never used before.
            place: which of the ``worker_num`` wanted ones it is; decides about its device.
        """

    @abstractmethod
    def send(self, slot: int, batch_id: int, payloads: list[Any]) -> None:
        """Send a batch. Never blocks, whatever the worker is doing.

        If the worker is dying, the batch goes down with it: ``WorkerDied`` will say so.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        """Block until something happened, ``wakeup`` was called, or ``timeout`` seconds passed.

        With None and nothing to do it blocks for good: it does not poll.
        """

    @abstractmethod
    def wakeup(self) -> None:
        """Make a ``wait`` that is blocked now, or the next one, return."""

    @abstractmethod
    def stop(self, slot: int) -> None:
        """Let the worker end, which holds no batch. ``WorkerDied`` will say when it has.

        If it is gone already, nothing happens; so with ``kill``.
        """

    @abstractmethod
    def kill(self, slot: int, why: str) -> None:
        """End the worker by force, since it hangs. ``WorkerDied`` will say so, and ``why``.

        Its stacks, if they can be had, are the cause of that failure.
        """

    def stack(self, slot: int) -> str:  # noqa: ARG002 - not every kind can tell
        """What the worker is doing now, where that can be found out; else empty."""
        return ""

    @abstractmethod
    def close(self, grace: float) -> None:
        """End every worker and release everything. Idempotent.

        Each is asked to end; what has not after ``grace`` seconds is ended by force, if it can be.
        """
