"""The contract between the engine and whatever runs the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from .messages import Failure

__all__ = ["BatchDone", "BatchFailed", "Transport", "WorkerEvent", "WorkerLost", "WorkerReady"]


class WorkerReady(NamedTuple):
    """The worker has loaded its model and waits for batches."""

    slot: int


class BatchDone(NamedTuple):
    """A batch of the slot came back.

    Attributes:
        outputs: one for each item.
        failures: by position, of items and outputs that could not cross the border.
        duration: what the model took, in seconds.
    """

    slot: int
    batch_id: int
    outputs: list[Any]
    failures: dict[int, Failure]
    duration: float


class BatchFailed(NamedTuple):
    """The model raised on a batch of the slot, or returned something unusable."""

    slot: int
    batch_id: int
    failure: Failure


class WorkerLost(NamedTuple):
    """The worker is gone, with every batch sent to it. The last event of its slot.

    Attributes:
        failure: a ``WorkerStartError`` if it never was ready, else an ``errors.WorkerLost``.
        has_started: whether it ever was ready.
    """

    slot: int
    failure: Failure
    has_started: bool


WorkerEvent = WorkerReady | BatchDone | BatchFailed | WorkerLost


class Transport(ABC):
    """Starts workers, carries one message per batch to them, and says what came back or who died.

    The engine owns it and closes it. ``encode``, ``send`` and ``wakeup`` may be called by any
    thread at any time, also after ``close`` (then nothing happens); the rest only by the thread
    that runs the engine's loop, or before that loop starts.
    """

    @abstractmethod
    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items as they will travel. Runs in the caller's thread: its items are its own risk.

        Raises:
            UnpicklableItem: an item cannot travel; says which and why.
        """

    @abstractmethod
    def start(self, slot: int) -> None:
        """Start the worker of this slot. Returns before it is ready: an event will say so."""

    @abstractmethod
    def send(self, slot: int, batch_id: int, payloads: list[Any]) -> None:
        """Send a batch. Never blocks, whatever the worker is doing.

        If the worker is dying, the batch goes down with it: ``WorkerLost`` will say so.
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
    def close(self, grace: float) -> None:
        """End every worker and release everything. Idempotent.

        Each is asked to end; what has not after ``grace`` seconds is ended by force, if it can be.
        """
