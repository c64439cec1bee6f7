"""The contract between the engine and whatever runs the workers, and workers that are threads.

``KnownWorker`` is for the transports whose workers are elsewhere: what such a worker may say, and
how its end is explained.
"""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import StreamerError, WorkerLost, WorkerStartError
from ..observe.record import BatchReport, StepReport
from ..options.checks import Device
from ..reporting import quiet_log, summary
from ..supervision.supervisor import Loss
from .codec import Codec
from .memory_link import MemoryLink
from .model_spec import ModelSpec
from .protocol import (
    Breach,
    Channel,
    DeviceFailure,
    Failure,
    FromWorker,
    Progress,
    StartFailure,
    WorkerReady,
)
from .runner import serve
from .starting import MAIN_FAILURES

_log = quiet_log(__name__)


class WorkerWaits(NamedTuple):
    """The worker waits for a place on a cluster, or has one now: it loads its model next."""

    slot: int
    has_place: bool = False


class WorkerDied(NamedTuple):
    """The worker is gone, with every batch sent to it. The last event of its slot."""

    slot: int
    failure: Failure  # a ``WorkerStartError`` if it never was ready, else an ``errors.WorkerLost``
    loss: Loss
    batch_id: int | None = None  # with ``Loss.DEVICE_FAILED``, one that it may have failed at
    #: What the model raised to end the worker, where it is known. For the log only: it may quote
    #: items of any of the callers whose calls fail.
    report: str | None = None
    #: The batches that it was at; others it had not begun, or between two stages. None if that is
    #: not known.
    begun: frozenset[int] | None = None


#: A report comes with its slot, and with its outputs encoded: see ``Transport.decode``. After that
#: of a step come those of the batches that are over by it.
WorkerEvent = WorkerReady | WorkerWaits | BatchReport | StepReport | WorkerDied


class Transport(ABC):
    """Starts workers, carries one message per batch to them, and reports results and losses.

    The engine owns it. Any thread may call ``encode``, ``decode``, ``device``, ``send``, ``tell``
    and ``wakeup``, also after ``close`` and for a worker that is gone: then nothing happens. For
    each worker, one thread at a time calls ``send``, in the order of the batches' ids, and
    ``tell``. A finalizer that interrupts these calls neither. The rest is for the thread of the
    engine's loop, or before it starts.
    """

    #: Encodes items and decodes outputs; None if they travel as they are.
    codec: Codec | None = None

    def encode(self, items: Sequence[Any]) -> list[Any]:
        """The items as they will travel, in the caller's thread. Raises UnpicklableItem."""
        return list(items) if self.codec is None else self.codec.encode_items(items)

    def decode(self, outputs: list[Any]) -> list[Any]:
        """The outputs of a call as the model returned them, in the caller's thread.

        Raises ModelError.
        """
        return outputs if self.codec is None else self.codec.decode_outputs(outputs)

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
    def send(
        self,
        slot: int,
        batch_id: int,
        payloads: list[Any],
        *,
        calls: int | list[int] = 0,
        is_stream: bool = False,
    ) -> None:
        """Send a batch. Never blocks. A dying worker takes it along: ``WorkerDied`` will say so.

        A batch that was sent before is not sent again: after an exception from a signal handler,
        the engine does not know whether it was, and calls this again.

        Args:
            calls: how many items each call has that shares the batch, in order, if what one of them
                raises is not to fail the others; 1 if each has one, 0 if they fail together.
            is_stream: whether its outputs are wanted as they come, of a model of steps. Then it is
                one item, followed by the outputs that have been handed out, if it is to go on
                where these ended.
        """

    def tell(self, slot: int, what: int, batch_id: int) -> None:  # noqa: B027 - a hint
        """Tell a worker about a batch. Never blocks.

        Args:
            what: ``DROP``: its callers have gone; it is answered all the same. Of a model of steps
                also ``HOLD``: it is not to be stepped for a while. ``RESUME``: it is again.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        """Block until something happened, ``wakeup`` was called, or ``timeout`` seconds passed."""

    @abstractmethod
    def wakeup(self) -> None:
        """Make a ``wait`` that is blocked now, or the next one, return."""

    @abstractmethod
    def stop(self, slot: int) -> None:
        """Let the worker end, which holds no batch. ``WorkerDied`` will say when it has."""

    @abstractmethod
    def kill(self, slot: int, why: str) -> None:
        """End the worker by force, since it hangs. ``WorkerDied`` says ``why``, with its stacks."""

    def stack(self, slot: int) -> str:  # noqa: ARG002 - not every kind can tell
        """What the worker is doing now, where that can be found out; else empty."""
        return ""

    def when_exiting(self, then: Callable[[], None]) -> Callable[[], object]:
        """Have ``then`` called when the interpreter ends, while workers can still be ended.

        It may be called twice. Returns a function that cancels this.
        """
        # At exit multiprocessing joins its processes, and ours would wait for batches for ever. A
        # hook of atexit's would come too late in a child that multiprocessing started itself.
        return util.Finalize(None, then, exitpriority=100).cancel

    @abstractmethod
    def close(self, grace: float) -> None:
        """Ask every worker to end, and end it by force after ``grace`` seconds if possible.

        Releases everything. Idempotent.
        """


# -- workers by their slots, whatever they are


class Worker:
    """A worker as its transport sees it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot  # its name for the engine
        self.last_sent = -1  # the id of the last batch that it was sent, or may have been
        self.has_steps = False
        self.progress = Progress()


W = TypeVar("W", bound=Worker)


class WorkerTransport(Transport, Generic[W]):
    """Finds the worker of a slot. To one that was lost nothing is sent any more."""

    def __init__(self) -> None:
        self._workers: dict[int, W] = {}

    def send(
        self,
        slot: int,
        batch_id: int,
        payloads: list[Any],
        *,
        calls: int | list[int] = 0,
        is_stream: bool = False,
    ) -> None:
        worker = self._workers.get(slot)
        if worker is None or batch_id <= worker.last_sent:
            return  # it was lost, and the batch with it, between its cutting and now; or it has it
        self._send_batch(worker, batch_id, payloads, is_stream or calls)

    def tell(self, slot: int, what: int, batch_id: int) -> None:
        worker = self._workers.get(slot)
        if worker is None:
            return
        if worker.has_steps:
            self._send_order(worker, (what, [batch_id]))
        else:
            worker.progress.add_unwanted(batch_id)

    @abstractmethod
    def _send_batch(
        self, worker: W, batch_id: int, payloads: list[Any], calls: int | list[int]
    ) -> None:
        """Send the batch and set ``last_sent``; ``calls`` is True for a stream."""

    @abstractmethod
    def _send_order(self, worker: W, order: tuple[int, list[int]]) -> None:
        """Send an order to a worker of a model of steps."""


# -- what is known of a worker that is elsewhere


_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: " (perhaps out of memory, or killed by a user)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (a crash in native code, or shared memory exhausted)",
    signal.SIGABRT: " (native code aborted)",
    signal.SIGILL: " (native code built for another processor)",
    signal.SIGTERM: " (it was asked to end)",
}


def _diagnose(exit_code: int | None) -> str:
    """Explain an exit code."""
    if exit_code is None:
        return "for an unknown reason"
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}{_LIKELY_CAUSES.get(-exit_code, '')}"


class KnownWorker(Worker):
    """What is known of a worker by what it was sent and what it has said. Its ``str`` names it."""

    def __init__(self, slot: int, place: int, link: MemoryLink | None = None) -> None:
        super().__init__(slot)
        self.place = place  # its number in messages; decides about its device
        self.link = link  # for what is too large for a message
        #: How many items each batch has that it was sent and has not answered, by the batch's id.
        #: Any thread adds, the loop's removes. A stream has one, followed by outputs that it had.
        self.unanswered: dict[int, int] = {}
        self.final_report: StartFailure | DeviceFailure | None = None  # then it ends by itself
        self.killed_for: str | None = None  # why it was ended by force, in words
        self.is_ready = self.wants_rows = False

    def events(self, message: FromWorker) -> Sequence[WorkerEvent]:
        """What it has said, for the engine; nothing if it says why it is about to end.

        Raises Breach: it does not answer what it was sent.
        """
        if isinstance(message, BatchReport):
            self._take_answer(message)
            return [message]
        if isinstance(message, StepReport):
            for batch_id in message.outputs:
                if batch_id not in self.unanswered:
                    raise _not_held("sent an output of", batch_id)
            payloads = [*message.outputs.values()]
            self._take_in(message, payloads)
            message.outputs = dict(zip(message.outputs, payloads, strict=True))
            for done in message.done:
                self._take_answer(done)
            return message.events()
        if isinstance(message, WorkerReady):
            self.is_ready = True
            self.wants_rows, self.has_steps = message.wants_rows, message.places > 0
            return [message._replace(slot=self.slot)]
        self.final_report = message
        return []

    def note_breach(self, error: Exception) -> None:
        """Reading what it has said raised this, so it is going to be killed."""
        if self.killed_for is None:
            is_known = isinstance(error, Breach)
            why = str(error) if is_known else f"its answer cannot be read ({summary(error)})"
            self.killed_for = f"it broke the protocol: {why}"

    def _take_answer(self, report: BatchReport) -> None:
        size = self.unanswered.pop(report.batch_id, None)
        if size is None:  # a process that the model has forked has answered it, say
            raise _not_held("answered", report.batch_id)
        if report.failure is None and size != len(report.outputs):
            raise Breach(f"it answered a batch of {size} with {len(report.outputs)} results")
        self._take_in(report, report.outputs)

    def _take_in(self, report: BatchReport | StepReport, payloads: list[Any]) -> None:
        """Release the blocks that a report names, and keep its payloads in shared memory."""
        report.slot = self.slot
        if self.link is not None:
            self.link.receive(payloads, report.released)

    def obituary(
        self,
        exit_code: int | None,
        stacks: str = "",
        begun: frozenset[int] | None = None,
        where: str = "",
    ) -> WorkerDied:
        """How it ended, for the engine and the calls that fail: the likely cause, and what to do.

        ``begun`` are the batches that it was at, None if that is not known; ``where`` is its
        device, to follow its name.
        """
        said = self.final_report
        loss = Loss.CRASHED
        error: StreamerError
        if isinstance(said, StartFailure):
            error = WorkerStartError(f"{self} could not load the model: {said.failure.text}")
            loss = Loss.NO_MEMORY if said.is_out_of_memory else Loss.START_FAILED
            return WorkerDied(self.slot, Failure(error, cause=said.failure), loss)
        if self.killed_for is not None:
            kind = WorkerLost if self.is_ready else WorkerStartError
            error = kind(f"{self} was killed: {self.killed_for}")
        elif said is not None:
            error = WorkerLost(
                f"{self}{where} ended itself, since its GPU failed with an error after which every "
                f"call to it fails in the same process: {said.fault}"
            )
            suspects = said.batch_ids | (begun or frozenset())
            batch_id = min(said.batch_ids, default=-1)
            return WorkerDied(
                self.slot, Failure(error), Loss.DEVICE_FAILED, batch_id, said.error, suspects
            )
        elif self.is_ready:
            error = WorkerLost(f"{self} died: {_diagnose(exit_code)}")
        elif exit_code in MAIN_FAILURES:
            error, loss = WorkerStartError(MAIN_FAILURES[exit_code]), Loss.START_FAILED
        else:
            why = _diagnose(exit_code)
            if exit_code == 1:  # Python's after an exception; the model's would be reported
                why += ", probably because importing the main module again raised an exception"
            error = WorkerStartError(
                f"{self} died before it had loaded its model: {why}; see its standard error"
            )
        return WorkerDied(self.slot, Failure(error, stacks or None), loss, begun=begun)


def _not_held(verb: str, batch_id: int) -> Breach:
    return Breach(f"it {verb} batch {batch_id!r:.40}, which it does not hold")


# -- workers that are threads


_Events = queue.SimpleQueue[WorkerEvent | None]

#: So many reports of steps wait for the engine at most. Then the worker does: it would keep the
#: interpreter's lock, and be ahead of its consumers by thousands of steps that take no time.
_MOST_REPORTS = 16


class ThreadTransport(WorkerTransport["_WorkerThread"]):
    """One thread per slot, each with a queue of its own."""

    #: Items travel as they are: then without a call of Python.
    encode = staticmethod(list)  # type: ignore[assignment, var-annotated]

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._spec = spec
        self._events: _Events = queue.SimpleQueue()

    def start(self, slot: int, place: int, worker_num: int) -> None:  # noqa: ARG002 - no devices here
        worker = _WorkerThread(slot, self._spec, self._events)
        worker.thread.start()
        self._workers[slot] = worker

    def _send_batch(
        self, worker: _WorkerThread, batch_id: int, payloads: list[Any], calls: int | list[int]
    ) -> None:
        no_failures: dict[int, Failure] = {}
        message = (batch_id, payloads, no_failures, calls)
        put = worker.batches.put
        # A signal handler can raise after a call only, so not between these two lines.
        worker.last_sent = batch_id
        put(message)

    def _send_order(self, worker: _WorkerThread, order: tuple[int, list[int]]) -> None:
        worker.batches.put(order)

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        try:
            event = self._events.get(timeout=timeout)
            while True:
                # One that hung in its last stage may answer when its worker is gone: too late.
                if event is not None and event.slot in self._workers:
                    events += self._take_in(event, self._workers[event.slot])
                event = self._events.get_nowait()
        except queue.Empty:
            return events

    def _take_in(self, event: WorkerEvent, worker: _WorkerThread) -> Sequence[WorkerEvent]:
        if isinstance(event, StepReport):
            worker.room.release()
            return event.events()
        if isinstance(event, WorkerDied):
            del self._workers[event.slot]
            worker.thread.join()  # which has nothing more to do
        return (event,)

    def wakeup(self) -> None:
        self._events.put(None)

    def stop(self, slot: int) -> None:
        if slot in self._workers:
            self._workers[slot].batches.put(None)

    def kill(self, slot: int, why: str) -> None:
        """Only say so: a thread cannot be ended by force."""
        text = "worker thread %d cannot be ended by force, though %s"
        _log(logging.WARNING, text, slot, why)

    def stack(self, slot: int) -> str:
        worker = self._workers.get(slot)
        frame = None if worker is None else sys._current_frames().get(worker.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self, grace: float) -> None:
        for worker in self._workers.values():
            worker.is_closing = True
            worker.room.release()
            worker.batches.put(None)
        for worker in self._workers.values():
            worker.thread.join(grace)
            if worker.thread.is_alive():
                _log(
                    logging.WARNING,
                    "worker thread %d is still computing and cannot be ended by force; "
                    "it ends with its batch or with the interpreter",
                    worker.slot,
                )
        self._workers.clear()


class _WorkerThread(Worker, Channel):
    """A worker, and its end: a queue of batches in, the engine's queue of events out."""

    def __init__(self, slot: int, spec: ModelSpec, events: _Events) -> None:
        super().__init__(slot)
        self.thread = threading.Thread(
            target=self._run, args=(spec,), name=f"service_streamer worker {slot}", daemon=True
        )
        self._events = events
        self.batches: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.room = threading.Semaphore(_MOST_REPORTS)
        self.is_closing = False  # nobody reads its reports any more

    def receive(self) -> tuple[Any, ...] | None:
        return self.batches.get()

    def is_waiting(self) -> bool:
        return not self.batches.empty()

    def interrupt(self) -> bool:
        self.batches.put(None)
        return True

    def send(self, report: BatchReport | StepReport) -> None:
        report.slot = self.slot
        if type(report) is StepReport and not self.is_closing:
            self.room.acquire()
        self._events.put(report)

    def _run(self, spec: ModelSpec) -> None:
        """Whatever ends this thread, the engine hears of it."""
        loss, report = Loss.START_FAILED, None
        try:
            model = spec.load(None)
            self.has_steps = model.places > 0
            self._events.put(WorkerReady(self.slot, model.description, model.places))
            loss = Loss.CRASHED
            serve(self, model, self.progress)
        except BaseException as error:
            if loss is Loss.CRASHED:
                code = error.code if isinstance(error, SystemExit) else None
                kind = type(error).__qualname__ + (f": {code}" if type(code) is int else "")
                failure = Failure(WorkerLost(f"the worker thread ended by {kind}"))
                report = Failure.caught(error).remote_traceback
            else:
                text = f"the worker thread could not start: {summary(error)}"
                failure = Failure(WorkerStartError(text), cause=Failure.caught(error))
        else:
            failure = Failure(WorkerLost("the worker thread was asked to end"))
        self._events.put(WorkerDied(self.slot, failure, loss, report=report))
