"""The worker's side, the same in every transport: answer batches until it is asked to end.

A worker begins by computing batch after batch, all stages of each in one thread: a lone caller
waits for no other thread. When a batch has arrived before the last one was answered, and more
than one stage takes time, it goes on with three threads:

    intake thread     receive, decode, preprocess      batch k + 1
                          │
    this thread       forward                          batch k
                          │
    outlet thread     postprocess, encode, send        batch k - 1

until batches come one by one again. The batches keep their order, but for one that is
computed in parts. If ``forward`` or ``predict`` of a process returns memory that the model keeps,
batches do not overlap: its next call could write to what is not sent yet.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ..gpu.accelerators import copy_thread_modes
from ..gpu.device_errors import DeviceFailed
from ..reporting import quiet_log, summary
from .model_spec import LoadedModel
from .protocol import Progress
from .stages import Channel, Job, Stages

#: Batches do not overlap if that saves less than so many seconds of each: handing a batch on to
#: another thread takes about 5e-5 each time.
_WORTH = 2e-4

#: Overlap ends after so many batches in a row for which it was of no use: that came while no other
#: one was there; or of which it saved too little.
_USELESS = 8

#: At most so many batches are in the stages and between them. The scheduler sends no more.
_MOST_BATCHES = 4

#: How long results that are on their way may take when the worker has to end, seconds.
_LAST_RESULTS = 5.0


def serve(channel: Channel, model: LoadedModel, progress: Progress) -> None:
    """Answer batches until the channel says to end. Nothing that a model raises ends it.

    ``SystemExit`` and the like are no errors of a batch: they end the worker, as they say. So does
    ``DeviceFailed`` of the model's guard.
    """
    if model.places:
        from .stepper import serve_steps  # other models' workers need not import it

        serve_steps(channel, model, progress)
        return
    stages = Stages(channel, model, progress)
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
        stages.complete(job)
        overlaps = may_overlap and job.saves(_WORTH) and not stages.model.keeps_outputs
        if overlaps and channel.is_waiting():
            overlap = _Overlap(stages)
            if overlap.start(warn_once):
                received = overlap.run()
                del overlap  # it holds that batch
                continue
        received = channel.receive()


def _has_real_threads() -> bool:
    """False where gevent has made greenlets of them: one that reads a pipe would block all."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is None or not monkey.is_module_patched("threading")


class _Overlap:
    """Runs the stages of consecutive batches at the same time."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        #: For this thread, also batches that came back from the outlet. At its end, each of the
        #: other threads adds what it raised, or None.
        self._prepared: SimpleQueue[Job | BaseException | None] = SimpleQueue()
        #: For the outlet, which ends at None.
        self._computed: SimpleQueue[Job | None] = SimpleQueue()
        self._room = threading.Semaphore(_MOST_BATCHES)
        self._answered = 0  # batches
        self._saved_nothing = 0  # of those, in a row until now
        self._received: tuple[Any, ...] | None = None  # the batch with which ``serve`` goes on
        self._has_failed = False  # no batch is received any more
        self._take_over_modes = copy_thread_modes()
        self._intake, self._outlet = (
            threading.Thread(
                target=self._run, args=(target,), name=f"service_streamer {name}", daemon=True
            )
            for target, name in ((self._take_batches, "intake"), (self._send_batches, "outlet"))
        )

    def start(self, warn: Callable[..., None]) -> bool:
        """Start the other two threads; False if the system has none left."""
        try:
            self._outlet.start()
            self._intake.start()
        except (RuntimeError, MemoryError) as error:
            if self._outlet.ident is not None:
                self._computed.put(None)
                self._outlet.join()
            warn(
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

        Raises what ended one of the threads.
        """
        try:
            while (job := self._next()) is not None:
                self._stages.compute(job)
                self._computed.put(job)
                del job
            self._computed.put(None)
            self._outlet.join()
            while (job := self._next()) is not None:  # it came back after the intake's end
                self._stages.complete(job)
        except BaseException:
            self._has_failed = True
            self._room.release()
            # Results that are on their way are sent before the worker ends.
            self._computed.put(None)
            self._outlet.join(_LAST_RESULTS)
            if self._stages.channel.interrupt():
                self._intake.join(_LAST_RESULTS)
            raise
        self._intake.join()
        return self._received

    def _next(self) -> Job | None:
        job = self._prepared.get()
        if isinstance(job, BaseException):
            raise job
        return job

    def _run(self, target: Callable[[], None]) -> None:
        """Run one of the other threads."""
        end: BaseException | None = None
        try:
            self._take_over_modes()
            target()
        except BaseException as error:
            end = error
        self._prepared.put(end)

    def _take_batches(self) -> None:
        """Until the channel says to end, or overlap is of no use."""
        stages = self._stages
        taken = lonely = 0
        while True:
            self._room.acquire()
            if self._has_failed:
                return
            self._received = stages.channel.receive()
            lonely = lonely + 1 if taken == self._answered else 0
            is_of_use = max(lonely, self._saved_nothing) <= _USELESS
            if self._received is None or not is_of_use or stages.model.keeps_outputs:
                return
            job = stages.take_in(self._received)
            self._received = None
            taken += 1
            self._prepared.put(job)
            del job

    def _send_batches(self) -> None:
        """Until this thread says to end."""
        while (job := self._computed.get()) is not None:
            if self._stages.finish(job, is_overlapped=True):
                self._answered += 1
                self._saved_nothing = 0 if job.saves(_WORTH) else self._saved_nothing + 1
                self._room.release()
            else:
                self._prepared.put(job)
            del job
