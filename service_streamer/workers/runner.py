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
from collections.abc import Callable, MutableSequence, Sequence
from queue import SimpleQueue
from typing import Any

from ..gpu.accelerators import copy_thread_modes
from ..gpu.device_errors import DeviceFailed
from ..observe.record import StepReport
from ..reporting import quiet_log, summary
from .model_spec import LoadedModel
from .stages import FORWARD, INTAKE, OUTLET, Channel, Job, Stages

#: Batches do not overlap if that saves less than so many seconds of each: handing a batch on to
#: another thread takes about 5e-5 each time.
_WORTH = 2e-4

#: Overlap ends after so many batches in a row for which it was of no use: that came while no other
#: one was there; or of which it saved too little.
_USELESS = 8

#: How long results that are on their way may take when the worker has to end, seconds.
_LAST_RESULTS = 5.0


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
    stages = Stages(channel, model, progress, unwanted)
    try:
        _serve(stages)
    except DeviceFailed as end:
        end.batch_ids |= stages.launched
        raise


def _serve(stages: Stages) -> None:
    channel, may_overlap = stages.channel, _has_real_threads()
    warn_once = quiet_log(__name__, once=True)  # it tries again and again
    received = channel.receive()
    while received is not None:
        job = stages.take_in(received)
        # Nothing here may hold the batch: it would stay in memory until the next one comes, and
        # its blocks of shared memory are released with the report.
        del received
        stages.progress[FORWARD] = job.batch_id + 1
        stages.progress[INTAKE] = 0
        stages.compute(job)
        while not stages.finish(job):
            stages.compute(job)
        stages.answer(job)
        stages.progress[FORWARD] = 0
        overlaps = may_overlap and job.saves(_WORTH) and not stages.model.keeps_outputs
        if overlaps and channel.is_waiting():
            overlap = _Overlap(stages, warn_once)
            if overlap.start():
                received = overlap.run()
                del overlap  # it holds that batch
                continue
        received = channel.receive()


def _has_real_threads() -> bool:
    """False where gevent has made greenlets of them: one that reads a pipe would block all."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is None or not monkey.is_module_patched("threading")


class _Overlap:
    """Runs the stages of consecutive batches at the same time.

    Each queue takes one batch: what puts it there takes a token first, and what takes it out gives
    the token back. A batch that comes back from the outlet needs none.
    """

    def __init__(self, stages: Stages, warn: Callable[..., None]) -> None:
        self._warn = warn
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
            if self._stages.channel.interrupt():
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
            received = self._stages.channel.receive()
            lonely = lonely + 1 if self._taken == self._answered else 0
            is_of_use = max(lonely, self._saved_nothing) <= _USELESS
            if received is None or not is_of_use or self._stages.model.keeps_outputs:
                return received
            job = self._stages.take_in(received)
            del received
            self._stages.channel.check_owner()
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
            self._stages.channel.check_owner()
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
                    self._stages.channel.send(job)
                    continue
                if not job.is_redone:
                    self._before_outlet.put(None)
                stages.progress[OUTLET] = job.batch_id + 1
                if stages.finish(job, is_overlapped=True):
                    stages.answer(job, is_overlapped=True)
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
