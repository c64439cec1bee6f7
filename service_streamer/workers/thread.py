"""Workers that are threads of this process: for models that release the interpreter lock."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from ..errors import WorkerLost, WorkerStartError
from ..supervision.supervisor import Loss
from .protocol import BatchReport, Failure, summary
from .runner import ModelSpec, serve
from .transport import Transport, WorkerDied, WorkerEvent, WorkerReady

__all__ = ["ThreadTransport"]

logger = logging.getLogger(__name__)

_Events = queue.SimpleQueue[WorkerEvent | None]


class ThreadTransport(Transport):
    """One thread per slot, each with a queue of its own; items travel as they are."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._events: _Events = queue.SimpleQueue()
        self._channels: dict[int, _ThreadChannel] = {}
        self._threads: dict[int, threading.Thread] = {}

    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        return list(items)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def start(self, slot: int, place: int, worker_num: int) -> None:  # noqa: ARG002 - no devices here
        channel = self._channels[slot] = _ThreadChannel(slot, self._events)
        thread = threading.Thread(
            target=_run,
            args=(self._spec, channel),
            name=f"service_streamer worker {slot}",
            daemon=True,
        )
        thread.start()
        self._threads[slot] = thread

    def send(self, slot: int, batch_id: int, payloads: list[Any]) -> None:
        channel = self._channels.get(slot)
        if channel is not None:  # else it was lost, and the batch with it
            channel.batches.put((batch_id, payloads, {}))

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        events: list[WorkerEvent | None] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        happened = [event for event in events if event is not None]
        for event in happened:
            if type(event) is WorkerDied:
                del self._channels[event.slot]
                self._threads.pop(event.slot).join()  # which has nothing more to do
        return happened

    def wakeup(self) -> None:
        self._events.put(None)

    def stop(self, slot: int) -> None:
        channel = self._channels.get(slot)
        if channel is not None:
            channel.batches.put(None)

    def kill(self, slot: int, why: str) -> None:
        """Only say so: a thread cannot be ended by force."""
        logger.warning("worker thread %d cannot be ended by force, though %s", slot, why)

    def stack(self, slot: int) -> str:
        thread = self._threads.get(slot)
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self, grace: float) -> None:
        for channel in self._channels.values():
            channel.batches.put(None)
        for slot, thread in self._threads.items():
            thread.join(grace)
            if thread.is_alive():
                logger.warning(
                    "worker thread %d is still computing and cannot be ended by force; "
                    "it ends with its batch or with the interpreter",
                    slot,
                )
        self._threads.clear()


class _ThreadChannel:
    """A worker thread's end: a queue of batches in, the engine's queue of events out."""

    def __init__(self, slot: int, events: _Events) -> None:
        self.slot = slot
        self.events = events
        self.batches: queue.SimpleQueue[tuple[int, list[Any], dict[int, Failure]] | None]
        self.batches = queue.SimpleQueue()

    def receive(self) -> tuple[int, list[Any], dict[int, Failure]] | None:
        return self.batches.get()

    def send(self, report: BatchReport) -> None:
        report.slot = self.slot
        self.events.put(report)


def _run(spec: ModelSpec, channel: _ThreadChannel) -> None:
    """Whatever ends this thread, the engine hears of it."""
    loss = Loss.START_FAILED
    lost: WorkerLost | WorkerStartError
    try:
        predict = spec.load(None)
        channel.events.put(WorkerReady(channel.slot, predict.description))
        loss = Loss.CRASHED
        serve(channel, predict)
    except BaseException as error:
        if loss is Loss.CRASHED:
            lost = WorkerLost(f"the worker thread ended by {summary(error)}")
        else:
            lost = WorkerStartError(f"the worker thread could not start: {summary(error)}")
        failure = Failure(lost, cause=Failure.caught(error))
    else:
        failure = Failure(WorkerLost("the worker thread was told to end"))
    channel.events.put(WorkerDied(channel.slot, failure, loss))
