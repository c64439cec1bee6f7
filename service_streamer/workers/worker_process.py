"""One worker as its parent sees it: what it has said, its process and pipes, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from ..errors import StreamerError, WorkerLost, WorkerStartError
from ..observe.record import BatchReport, StepReport
from ..options.checks import Device
from ..reporting import quiet_log, summary
from ..supervision.restarts import Loss
from . import starting
from .memory.memory_link import Memories, MemoryLink
from .model_spec import ModelSpec
from .protocol import (
    EXIT_NO_FREEZE_SUPPORT,
    EXIT_UNGUARDED_MAIN,
    Breach,
    DeviceFailure,
    Failure,
    FrameReader,
    FrameWriter,
    FromWorker,
    StageProgress,
    WorkerReady,
)
from .stages import FORWARD, INTAKE
from .starting import STACKS_SIGNAL, Placement, held_back, startable
from .transport import WorkerDied, WorkerEvent
from .worker_main import Boot, run_worker

_log = quiet_log(__name__)

#: How long one that hangs has to write down its stacks, seconds. It takes some milliseconds.
_STACKS_GRACE = 0.5

#: Bytes of a pipe. Memory is used for what is in it only. With 16 and 64 callers, payloads of 8 and
#: 12 kB and this size give 1.07 to 1.27 times the calls of 64 kB, and 1 MiB up to 1.41 times. But a
#: user has 64 MiB for all pipes (pipe-user-pages-soft), and beyond that new ones hold 8 kB only. So
#: it is enough for 128 workers.
_PIPE_SIZE = 1 << 18

#: Enough for a hundred threads; a pipe does not hold more.
_STACKS_SIZE = 65_536


def _widen(pipe: int) -> None:
    """Let a pipe hold whole batches: else one side waits for the other in the midst of each."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # on Linux
        with contextlib.suppress(OSError):  # the user has too many already
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)


#: Errors of the main module by exit code; a retry would fail too.
_MAIN_FAILURES = {
    EXIT_UNGUARDED_MAIN: (
        "the Streamer is built while the main module is imported, and every worker imports "
        "that module again: build it under `if __name__ == '__main__':`, or in a function "
        "that only the web process calls"
    ),
    EXIT_NO_FREEZE_SUPPORT: (
        "this is a frozen program, which every worker runs again: call "
        "multiprocessing.freeze_support() first under `if __name__ == '__main__':`"
    ),
}


_LIKELY_CAUSES = {
    signal.SIGKILL: "perhaps out of memory, or killed by a user",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or shared memory exhausted",
    signal.SIGABRT: "native code aborted",
    signal.SIGILL: "native code built for another processor",
    signal.SIGTERM: "it was asked to end",
}


def _diagnose(exit_code: int | None) -> str:
    """Explain an exit code."""
    if exit_code is None:
        return "for an unknown reason"
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    cause = _LIKELY_CAUSES.get(number)
    return f"killed by {number.name}" + (f" ({cause})" if cause else "")


class KnownWorker:
    """What is known of a worker by what it was sent and what it has said. Its ``str`` names it.

    Attributes:
        slot: its name for the engine.
        place: its number in messages; decides about its device.
        link: for what is too large for a message; None if there is none.
        unanswered: the number of items in each batch that it was sent and has not answered, by id.
        last_sent: the id of the last batch that it was sent, or may have been.
        is_ready: whether it has loaded its model.
        start_failure: what that raised.
        device_failure: what it said of its GPU before it ended; None if it did not.
        killed_for: why it was ended by force, in words; None if it was not.
        wants_rows: see ``WorkerReady``.
        has_steps: whether its model is one of steps.
    """

    def __init__(self, slot: int, place: int) -> None:
        self.slot = slot
        self.place = place
        self.link: MemoryLink | None = None
        self.unanswered: dict[int, int] = {}  # any thread adds, the loop's removes
        self.last_sent = -1
        self.is_ready = False
        self.start_failure: Failure | None = None
        self.device_failure: DeviceFailure | None = None
        self.killed_for: str | None = None
        self.wants_rows = self.has_steps = False

    def events(self, message: FromWorker) -> Sequence[WorkerEvent]:
        """What it has said, for the engine; nothing if it says why it is about to end.

        Raises:
            Breach: it does not answer what it was sent.
        """
        if isinstance(message, BatchReport):
            self._check_answer(message)
            self._take_in(message, message.outputs)
            return [message]
        if isinstance(message, StepReport):
            if not message.outputs.keys() <= self.unanswered.keys():
                unknown = min(message.outputs.keys() - self.unanswered.keys())
                raise _not_held("sent an output of", unknown)
            payloads = [*message.outputs.values()]
            self._take_in(message, payloads)
            message.outputs = dict(zip(message.outputs, payloads, strict=True))
            for done in message.done:
                self._check_answer(done)
                self._take_in(done, done.outputs)
            return message.events()
        if isinstance(message, WorkerReady):
            self.is_ready = True
            self.wants_rows, self.has_steps = message.wants_rows, message.places > 0
            return [message._replace(slot=self.slot)]
        if isinstance(message, DeviceFailure):
            self.device_failure = message
            return []
        self.start_failure = failure = message.failure
        reason = WorkerStartError(f"{self} could not load the model: {failure.text}")
        loss = Loss.NO_MEMORY if message.is_out_of_memory else Loss.START_FAILED
        return [WorkerDied(self.slot, Failure(reason, cause=failure), loss)]

    def note_breach(self, error: Exception) -> None:
        """Reading what it has said raised this, so it is going to be killed."""
        if self.killed_for is None:
            is_known = isinstance(error, Breach)
            why = str(error) if is_known else f"its answer cannot be read ({summary(error)})"
            self.killed_for = f"it broke the protocol: {why}"

    def _check_answer(self, report: BatchReport) -> None:
        size = self.unanswered.pop(report.batch_id, None)
        if size is None:  # a process that the model has forked has answered it, say
            raise _not_held("answered", report.batch_id)
        if report.failure is None and size != len(report.outputs):
            raise Breach(f"it answered a batch of {size} with {len(report.outputs)} results")

    def _take_in(self, report: BatchReport | StepReport, payloads: list[Any]) -> None:
        """Release the blocks that a report names, and keep its payloads in shared memory."""
        report.slot = self.slot
        link = self.link
        if link is not None:
            if report.released:
                link.release(report.released)
            if tuple in map(type, payloads):
                link.windows.receive(payloads)

    def obituary(
        self,
        exit_code: int | None,
        stacks: str = "",
        begun: frozenset[int] | None = None,
        where: str = "",
    ) -> WorkerDied:
        """How it ended, for the engine and the calls that fail: the likely cause, and what to do.

        Args:
            exit_code: None if it is not known.
            stacks: that it has written down.
            begun: the batches that it was at; None if that is not known.
            where: its device, to follow its name.
        """
        failed = self.device_failure
        loss = Loss.CRASHED if self.is_ready else Loss.DIED_STARTING
        error: StreamerError
        if self.killed_for is not None:
            kind = WorkerLost if self.is_ready else WorkerStartError
            error = kind(f"{self} was killed: {self.killed_for}")
        elif failed is not None:
            error = WorkerLost(
                f"{self}{where} ended itself, since its GPU failed with an error after which every "
                f"call to it fails in the same process: {failed.fault}"
            )
            suspects = failed.batch_ids | (begun or frozenset())
            batch_id = min(failed.batch_ids, default=-1)
            return WorkerDied(
                self.slot, Failure(error), Loss.DEVICE_FAILED, batch_id, failed.error, suspects
            )
        elif self.is_ready:
            error = WorkerLost(f"{self} died: {_diagnose(exit_code)}")
        elif exit_code in _MAIN_FAILURES:
            error, loss = WorkerStartError(_MAIN_FAILURES[exit_code]), Loss.START_FAILED
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


class WorkerProcess(KnownWorker):
    """One process and the parent's ends of its pipes. ``write`` and ``kill`` are for any thread.

    Args:
        memory: what it shares with this process, and this one's end of that; None for nothing.
        noun: what it is called in messages.

    Attributes:
        requests, responses: descriptors of its pipes.
        death: a descriptor that is readable when the process has ended.
        reader: reads the responses.
        kill_at: when it is to be killed unless it has ended, on the monotonic clock; None for
            never.
        is_gone: whether it was collected, and its descriptors are closed.
    """

    def __init__(
        self,
        slot: int,
        place: int,
        memory: tuple[Memories, MemoryLink] | None = None,
        noun: str = "worker",
    ) -> None:
        super().__init__(slot, place)
        self._noun = noun
        self._memories: Memories | None = None
        if memory is not None:
            self._memories, self.link = memory
        self._progress: StageProgress | None = None
        with contextlib.suppress(OSError):  # then all that it holds is suspect
            self._progress = StageProgress()
        self.kill_at: float | None = None
        self._grace = 0.0
        self._process: Any = None
        self.is_gone = False
        self.death = -1
        # Reentrant: a finalizer of a user's, which makes a call, may run while the loop flushes.
        self._write_lock = threading.RLock()
        for_requests, requests = multiprocessing.connection.Pipe(duplex=False)
        responses, for_responses = multiprocessing.connection.Pipe(duplex=False)
        self._stacks, for_stacks = multiprocessing.connection.Pipe(duplex=False)
        self._ends = requests, responses, self._stacks
        self._ends_of_child = for_requests, for_responses, for_stacks
        self.requests, self.responses = requests.fileno(), responses.fileno()
        for pipe in (self.requests, self.responses):
            _widen(pipe)
        for end in self._ends:
            os.set_blocking(end.fileno(), False)
        self._writer = FrameWriter(self.requests)
        self.reader = FrameReader(self.responses)

    def __str__(self) -> str:
        return f"{self._noun} {self.place} (pid {self._process.pid})"

    def start(
        self, method: str, placement: Placement, worker_num: int, spec: ModelSpec | None
    ) -> None:
        """Start the process. After an error ``discard`` it.

        Args:
            method: how, for multiprocessing.
            placement: where the workers run.
            worker_num: how many there are to be; decides about its share of the cores.
            spec: for a forked child, which has it in its memory; None if it comes as a frame.
        """
        try:
            self._start(method, placement, worker_num, spec)
        finally:
            # The child has its own copies; with ours open there would be no end-of-file.
            for end in self._ends_of_child:
                end.close()
            self._memories = None  # closes the end of its socket, too

    def kill(self) -> None:
        """End it by force, at once."""
        self._process.kill()

    def discard(self) -> None:
        """Leave nothing of it, after a start that has failed halfway."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self.reap()
        else:
            self._release()

    def _start(
        self, method: str, placement: Placement, worker_num: int, spec: ModelSpec | None
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        with startable():
            if method == "forkserver":
                forkserver.ensure_running()  # or it would keep the environment of its first child
            elif method == "spawn":
                # Not within the block below: starting it lets signals through. It knows SIGTERM,
                # but a SIGHUP would end it, if it were not held back from its start on.
                with held_back():
                    resource_tracker.ensure_running()
            with placement.environment(self.place, worker_num) as variables:
                boot = Boot(
                    spec,
                    placement.at(self.place),
                    variables,
                    self._memories,
                    placement.sharers(self.place, worker_num),
                    self._progress,
                    starting.preparation and starting.preparation(),
                )
                # Not a daemon in multiprocessing's sense: those may not have children, which a
                # model may want (data loaders). The engine ends all before the interpreter ends.
                self._process = context.Process(
                    target=run_worker,
                    args=(boot, *self._ends_of_child),
                    name=f"service_streamer {self._noun} {self.place}",
                    daemon=False,
                )
                with held_back():
                    self._process.start()
        if hasattr(os, "pidfd_open"):
            # Unlike multiprocessing's sentinel, a pipe whose other end a model's own child
            # processes may inherit, this tells the end of the worker itself.
            with contextlib.suppress(OSError):  # Linux before 5.3
                self.death = os.pidfd_open(self._process.pid)
        if self.death < 0:
            self.death = os.dup(self._process.sentinel)

    def drop(self, batch_id: int) -> None:
        """Nobody waits for the batch any more."""
        progress = self._progress
        if progress is not None:
            progress.drop(batch_id)

    def write(self, frame: bytes) -> bool:
        """Write or keep the frame; False if some is kept and the loop should flush it.

        No call interrupts another one: see ``Transport``. A finalizer's may interrupt ``flush``.
        """
        with self._write_lock:
            try:
                return self.is_gone or self._writer.write(frame)
            except BrokenPipeError:  # it is dying, and its descriptor will say so
                return True

    def flush(self) -> None:
        """Write what is kept, as far as the pipe has room."""
        with self._write_lock:
            try:
                self._writer.flush()
            except BrokenPipeError:
                self._writer.drop()

    @property
    def has_unwritten(self) -> bool:
        return self._writer.has_rest

    def end_gently(self, grace: float) -> None:
        """Ask it to end; it is killed if it has not within ``grace`` seconds."""
        if self.killed_for is None:
            self._grace, self.kill_at = grace, time.monotonic() + grace
            self.write(b"")  # the stop sentinel

    def end_by_force(self, why: str) -> None:
        """Have it write down its stacks; then it is killed."""
        if self.killed_for is None:
            self.killed_for, self.kill_at = why, time.monotonic() + _STACKS_GRACE
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, STACKS_SIGNAL)

    def kill_if_overdue(self, timeout: float | None) -> float | None:
        """Kill it if its time has come; else how long to wait for that, ``timeout`` at most."""
        if self.kill_at is None:
            return timeout
        left = self.kill_at - time.monotonic()
        if left > 0:
            return left if timeout is None else min(timeout, left)
        self.kill_at = None
        self.kill()  # SIGTERM it leaves to us: see ``leave_to_parent``
        if self.killed_for is None:
            name = str(self)  # or whoever keeps the record would keep all of us
            text = "%s did not end within %.1f s: it is killed"
            _log(logging.WARNING, text, name, self._grace)
        return timeout

    def died(self, device: Device | None) -> WorkerDied | None:
        """Collect the dead process; how it ended, for the engine. None if it has said so itself.

        Args:
            device: that it computed on; None if it was given none.
        """
        progress = self._progress
        # If its device failed, batches that had not come to the device do not count.
        first = INTAKE if self.device_failure is None else FORWARD
        begun = (progress and progress.begun(first)) or None
        exit_code, stacks = self.reap()
        if self.start_failure is not None:
            return None
        return self.obituary(
            exit_code, stacks, begun, "" if device is None else f" on device {device}"
        )

    def reap(self) -> tuple[int | None, str]:
        """Collect the dead process and release everything of it; its exit code and its stacks."""
        self._process.join()
        exit_code: int | None = self._process.exitcode
        stacks = ""
        with contextlib.suppress(OSError):  # it wrote none, and another process has the pipe
            stacks = os.read(self._stacks.fileno(), _STACKS_SIZE).decode(errors="replace")
        self._release()
        # Not closed: another thread may join it at this time, as multiprocessing does at the exit
        # of the interpreter, and a closed one raises ValueError there. Nor can one be closed that
        # somebody else has collected, as gevent does, so that it seems alive.
        _forget(self._process)
        return exit_code, stacks

    def abandon_in_forked_child(self) -> None:
        """Let go of a process that is not this one's child."""
        self._write_lock = threading.RLock()  # another thread may have held it at the fork
        self._release()
        self.link = None
        # multiprocessing does not notice a plain fork, and would fail to join it at the exit.
        _forget(self._process)

    def _release(self) -> None:
        with self._write_lock:
            self.is_gone = True
            self._writer.drop()
        if self.death >= 0:
            os.close(self.death)
        if self.link is not None:
            self.link.close()
        self.kill_at = self._progress = None
        for end in self._ends:
            end.close()


def _forget(process: Any) -> None:
    """Have multiprocessing let go of a process that it cannot wait for: there is no public way."""
    getattr(multiprocessing.process, "_children", set()).discard(process)
    popen = getattr(process, "_popen", None)
    if popen is not None:
        popen.close()
