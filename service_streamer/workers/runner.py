"""The worker's side, the same in every transport: answer batches until it is asked to end.

A worker begins by computing batch after batch, all stages of each in one thread: a lone caller
waits for no other thread. When a batch has arrived before the last one was answered, and more
than one stage takes time, it goes on with three threads:

    intake thread     receive, decode, preprocess      batch k + 1
                          │ one batch
    this thread       forward                          batch k
                          │ one batch
    outlet thread     postprocess, encode, send        batch k - 1

until batches come one by one again. The batches keep their order, but for one that is
computed in parts. If ``forward`` or ``predict`` of a process returns memory that the model keeps,
batches do not overlap: its next call could write to what is not sent yet.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence, Sequence
from queue import SimpleQueue
from typing import Any

from ..gpu.accelerators import copy_thread_modes
from ..gpu.device_errors import DeviceFailed
from ..observe.record import BatchReport, StepReport
from ..reporting import quiet_log, summary
from .model_spec import LoadedModel
from .protocol import Failure
from .stages import FORWARD, INTAKE, OUTLET, Job, Stages

#: Batches do not overlap if that saves less than so many seconds of each: handing a batch on to
#: another thread takes about 5e-5 each time.
_WORTH = 2e-4

#: Overlap ends after so many batches in a row for which it was of no use: that came while no other
#: one was there; or of which it saved too little.
_USELESS = 8

#: How long results that are on their way may take when the worker has to end, seconds.
_LAST_RESULTS = 5.0


class Channel(ABC):
    """A worker's end of its private connection to the web process.

    ``receive`` and ``decode`` are called by one thread, ``encode`` and ``send`` by one other.
    """

    @abstractmethod
    def receive(self) -> tuple[Any, ...] | None:
        """Block for the next batch: its id, and the rest of it for ``decode``. None: end now.

        Its fourth member are the items of each call, as in ``Transport.send``; of a model of steps
        it says whether it is a stream. Such a model may also get ``DROP``, ``HOLD`` or ``RESUME``
        with the ids of batches: whose callers have gone, that are not to be stepped for a while,
        and that are again.
        """

    @abstractmethod
    def send(self, report: BatchReport | StepReport) -> None:
        """Answer a batch, or report a step; it is encoded."""

    def encode_step(self, report: StepReport) -> None:  # noqa: B027 - optional
        """Make the outputs of a step, and of the batches that are over, ready to travel.

        A stream of which an output cannot travel is to be ended: its batch is then among those that
        are over, with that failure.
        """

    def is_waiting(self) -> bool:
        """Whether ``receive`` would return at once."""
        return False

    def decode(self, received: Any) -> tuple[int, list[Any], dict[int, Failure]]:
        """The batch's id, its items, and by position why an item is missing."""
        batch: tuple[int, list[Any], dict[int, Failure]] = received[:3]
        return batch

    #: Whether ``decoded`` is wanted: it keeps the memory of large items.
    keeps_decoded = False
    #: The last batch of several items that ``decode`` has decoded; whoever takes it empties this.
    decoded: Sequence[Any] = ()

    def decode_again(self, payload: Any) -> Any:
        """An item as it was sent: the model may have written to it."""
        return payload

    def encode(self, report: BatchReport) -> None:  # noqa: B027 - optional
        """Make the outputs ready to travel; one that cannot becomes a failure of its position."""

    def check_owner(self) -> None:  # noqa: B027
        """End a process that the model has forked and that came back from the model."""

    def interrupt(self) -> bool:
        """Make ``receive`` return None, now or soon, for another thread; False if it cannot."""
        return False


def serve(
    channel: Channel,
    model: LoadedModel,
    progress: MutableSequence[int] | None = None,
    unwanted: Sequence[int] = (),
) -> None:
    """Answer batches until the channel says to end. Nothing that a model raises ends it.

    ``SystemExit`` and the like are no errors of a batch: they end the worker, as they say.

    Args:
        progress: see ``Stages``; of a model of steps, ``serve_steps``.
        unwanted: see ``Stages``. Workers of a model of steps get messages instead.

    Raises:
        DeviceFailed: of the model's guard.
    """
    if model.places:
        from .stepper import serve_steps  # other models' workers need not import it

        serve_steps(channel, model, progress)
        return
    stages = Stages(model, progress, unwanted)
    try:
        _serve(channel, stages)
    except DeviceFailed as end:
        end.batch_ids |= stages.launched
        raise


def _serve(channel: Channel, stages: Stages) -> None:
    may_overlap = _has_real_threads()
    channel.keeps_decoded = stages.model.may_rerun
    stages.on_run = lambda: channel.send(StepReport())
    warn_once = quiet_log(__name__, once=True)  # it tries again and again
    received = channel.receive()
    while received is not None:
        job = _take_in(channel, stages, received)
        # Nothing here may hold the batch: it would stay in memory until the next one comes, and
        # its blocks of shared memory are released with the report.
        del received
        stages.progress[FORWARD] = job.batch_id + 1
        stages.progress[INTAKE] = 0
        stages.compute(job)
        while not stages.finish(job):
            stages.compute(job)
        _answer(channel, stages, job)
        stages.progress[FORWARD] = 0
        overlaps = may_overlap and job.saves(_WORTH) and not stages.model.keeps_outputs
        if overlaps and channel.is_waiting():
            overlap = _Overlap(channel, stages, warn_once)
            if overlap.start():
                received = overlap.run()
                del overlap  # it holds that batch
                continue
        received = channel.receive()


def _take_in(channel: Channel, stages: Stages, received: tuple[Any, ...]) -> Job:
    """INTAKE: decode and preprocess."""
    began = time.monotonic()
    stages.progress[INTAKE] = received[0] + 1
    job = Job(*channel.decode(received), received[3])
    payloads, channel.decoded = channel.decoded, ()
    if payloads:
        job.again = lambda position: channel.decode_again(payloads[position])
    job.decoding = time.monotonic() - began
    stages.take_in(job)
    return job


def _answer(channel: Channel, stages: Stages, job: Job, *, is_overlapped: bool = False) -> None:
    """The rest of OUTLET: encode and send."""
    report = stages.report(job)
    began = time.monotonic()
    channel.encode(report)
    if job.memory is not None:
        stages.sent(job)
    job.encoding = time.monotonic() - began
    if is_overlapped or stages.has_stages:
        report.stages = job.by_stage
    channel.send(report)


def _has_real_threads() -> bool:
    """False where gevent has made greenlets of them: one that reads a pipe would block all."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is None or not monkey.is_module_patched("threading")


class _Overlap:
    """Runs the stages of consecutive batches at the same time.

    Each queue takes one batch: what puts it there takes a token first, and what takes it out gives
    the token back. A batch that comes back from the outlet needs none.
    """

    def __init__(self, channel: Channel, stages: Stages, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._channel = channel
        self._stages = stages
        #: For this thread. None: the intake has ended, and at last the outlet.
        self._prepared: SimpleQueue[Job | None] = SimpleQueue()
        #: For the outlet. None: the intake has ended, or else all ends at once.
        self._computed: SimpleQueue[Job | StepReport | None] = SimpleQueue()
        self._before_forward: SimpleQueue[None] = SimpleQueue()
        self._before_outlet: SimpleQueue[None] = SimpleQueue()
        self._before_forward.put(None)
        self._before_outlet.put(None)
        self._taken = self._answered = 0  # batches; each is counted by one thread
        self._saved_nothing = 0  # of those, in a row until now
        self._received: tuple[Any, ...] | None = None  # the batch with which ``serve`` goes on
        self._intake_error: BaseException | None = None
        self._outlet_error: BaseException | None = None
        self._has_ended = False  # the intake; the outlet goes on until all is answered
        self._has_failed = False  # nothing is computed any more
        self._take_over_modes = copy_thread_modes()
        self._intake, self._outlet = (
            threading.Thread(target=target, name=f"service_streamer {name}", daemon=True)
            for target, name in ((self._run_intake, "intake"), (self._run_outlet, "outlet"))
        )

    def start(self) -> bool:
        """Start the other two threads; False if the system has none left."""
        try:
            self._outlet.start()
            self._intake.start()
        except (RuntimeError, MemoryError) as error:
            if self._outlet.ident is not None:
                self._computed.put(None)
                self._outlet.join()
            self._warn(
                logging.WARNING,
                "the worker computes batches one after the other, since no threads can be started "
                "(%s). It tries again while batches wait; raise the limit of processes and threads "
                "(ulimit -u, or pids of the container)",
                summary(error),
            )
            return False
        return True

    def run(self) -> tuple[Any, ...] | None:
        """Answer batches; returns one that came alone, or None at the end.

        Raises:
            BaseException: what ended one of the threads.
        """
        stages, on_run = self._stages, self._stages.on_run
        stages.on_run = lambda: self._computed.put(StepReport())
        try:
            self._compute()
            if self._intake_error is not None:
                raise self._intake_error
        except BaseException:
            self._has_failed = True  # first, or the intake thread would wait for a second token
            self._before_forward.put(None)
            # Results that are on their way are sent before the worker ends.
            self._computed.put(None)
            self._outlet.join(_LAST_RESULTS)
            if self._channel.interrupt():
                self._intake.join(_LAST_RESULTS)
            raise
        stages.on_run = on_run
        self._intake.join()
        self._outlet.join()
        return self._received

    def _run_intake(self) -> None:
        try:
            self._take_over_modes()
            self._received = self._take_batches()
        except BaseException as error:
            self._intake_error = error
        self._prepared.put(None)

    def _take_batches(self) -> tuple[Any, ...] | None:
        """Until the channel says to end, or overlap is of no use: returns the batch after that."""
        lonely = 0
        while True:
            received = self._channel.receive()
            lonely = lonely + 1 if self._taken == self._answered else 0
            is_of_use = max(lonely, self._saved_nothing) <= _USELESS
            if received is None or not is_of_use or self._stages.model.keeps_outputs:
                return received
            job = _take_in(self._channel, self._stages, received)
            del received
            self._channel.check_owner()
            self._stages.progress[INTAKE] = 0
            self._before_forward.get()
            if self._has_failed:
                return None
            self._taken += 1
            self._prepared.put(job)
            del job

    def _compute(self) -> None:
        """Until the outlet has answered all batches."""
        stages = self._stages
        while True:
            job = self._prepared.get()
            if self._outlet_error is not None:
                raise self._outlet_error
            if job is None:
                if self._has_ended:
                    return
                self._has_ended = True
                self._computed.put(None)
                continue
            if not job.is_redone:
                self._before_forward.put(None)
            stages.progress[FORWARD] = job.batch_id + 1
            stages.compute(job)
            self._channel.check_owner()
            stages.progress[FORWARD] = 0
            if not job.is_redone:
                self._before_outlet.get()
            self._computed.put(job)
            del job

    def _run_outlet(self) -> None:
        stages, is_ending = self._stages, False
        try:
            self._take_over_modes()
            while not is_ending or self._answered < self._taken:
                job = self._computed.get()
                if job is None:
                    if is_ending or not self._has_ended:
                        return
                    is_ending = True
                    continue
                if isinstance(job, StepReport):
                    self._channel.send(job)
                    continue
                if not job.is_redone:
                    self._before_outlet.put(None)
                stages.progress[OUTLET] = job.batch_id + 1
                if stages.finish(job, is_overlapped=True):
                    _answer(self._channel, stages, job, is_overlapped=True)
                    self._answered += 1
                    self._saved_nothing = 0 if job.saves(_WORTH) else self._saved_nothing + 1
                else:
                    self._prepared.put(job)
                stages.progress[OUTLET] = 0
                del job
        except BaseException as error:
            self._outlet_error = error
            self._before_outlet.put(None)
        self._prepared.put(None)
