"""Workers that are processes: each with a private pair of queues to the web process.

    web process                                          worker process
    -----------                                          --------------
    encode (caller)  items -> bytes
    send (any thread)      one message ── request pipe ──▶ receive: bytes -> items ── predict
    wait (loop thread)     one message ◀── response pipe ── send: results -> bytes
    decode (caller)  bytes -> results

A queue here is a one-way pipe with frames on it. No locks, no semaphores, no feeder threads:
nothing that a dying process could keep, and nothing that works differently under gevent. The
parent's ends do not block, so no worker can hold up the web process (what a pipe does not take
stays in the worker's writer until the loop finds room); a worker's ends do block, and may, since
the parent always reads.

How ends are noticed: the parent sees a worker die through its process descriptor and reads the
response pipe to its end before it says so; a worker sees its parent die by end-of-file on the
request pipe, also in the midst of a batch (see ``worker_main.py``).

Large payloads lie outside of the messages, in shared memory (see ``memory_link.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing.process
import os
import pickle
import selectors
import sys
import time
import weakref
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, Pipe
from typing import Any

from ..options.checks import Device
from ..options.table import WorkerOptions
from ..reporting import quiet_log
from . import starting
from .arena import Memory
from .codec import ByValue, Codec, encode_spec
from .memory_link import MakeLink, MemoryLink, SharedMemory
from .model_spec import ModelSpec
from .protocol import (
    FORWARD,
    INTAKE,
    PROGRESS_BYTES,
    FrameReader,
    FrameWriter,
    Progress,
    decode,
)
from .starting import STACKS_SIGNAL, Placement, block_signals, startable
from .transport import KnownWorker, WorkerDied, WorkerEvent, WorkerTransport
from .worker_main import Boot, run_worker

_log = quiet_log(__name__)

_READ = selectors.EVENT_READ

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0

#: How long a worker that hangs has to write down its stacks, seconds. It takes some milliseconds.
_STACKS_GRACE = 0.5

#: Bytes of a pipe, so that it holds whole batches: else one side waits for the other in the midst
#: of each. Memory is used for what is in it only. With 16 and 64 callers, payloads of 8 and 12 kB
#: and this size give 1.07 to 1.27 times the calls of 64 kB, and 1 MiB up to 1.41 times. But a user
#: has 64 MiB for all pipes (pipe-user-pages-soft), and beyond that new ones hold 8 kB only. So it
#: is enough for 128 workers.
_PIPE_SIZE = 1 << 18

#: Enough for a hundred threads; a pipe does not hold more.
_STACKS_SIZE = 65_536


class ProcessTransport(WorkerTransport["_WorkerProcess"]):
    """One process per slot, reached over a private pair of pipes.

    This process encodes no items and decodes no outputs if the spec has a codec, or if another
    process has pickled the spec: it does so itself then.
    """

    def __init__(
        self,
        spec: ModelSpec | bytes,
        options: WorkerOptions,
        memory: SharedMemory | None = None,
        *,
        noun: str = "worker",
    ) -> None:
        super().__init__()
        self._noun = noun
        self._method = options.mp_start_method
        is_forked = self._method == "fork"
        monkey: Any = sys.modules.get("gevent.monkey")
        if is_forked and monkey and monkey.is_module_patched("threading"):
            raise ValueError(
                'mp_start_method="fork" does not work with gevent, whose greenlets would go on in '
                'every worker; use "spawn"'
            )
        self._placement = Placement(options)
        self._spec = spec
        by_value: ByValue | None = None
        # A forked child has the parent's memory, so what cannot be pickled can go there as it is.
        if not (is_forked or isinstance(spec, bytes)):
            by_value = ByValue()
            self._spec = encode_spec(spec, by_value)
        is_encoded = not isinstance(spec, bytes) and spec.codec is not None
        self.memory = memory or SharedMemory(0 if is_encoded else options.shared_memory_limit)
        if not (is_encoded or isinstance(spec, bytes)):
            arena = self.memory.arena
            put = arena.put if arena else None
            self.codec = Codec(put, by_value, spec.cannot_load)
        #: Each descriptor with its worker, and what to call with that when it is ready.
        self._selector = selectors.DefaultSelector()
        ends = Pipe(duplex=False)
        for end in ends:
            os.set_blocking(end.fileno(), False)
        self._selector.register(ends[0], _READ)
        #: By which other threads wake the loop; None when it is closed.
        self._wakeup: tuple[Connection, Connection] | None = ends
        #: Workers whose pipes have not taken everything; the loop watches these for room.
        self._full: set[_WorkerProcess] = set()
        #: What ``wait`` has found and not returned: an exception may come in between.
        self._events: list[WorkerEvent] = []
        _transports.add(self)

    def device(self, place: int) -> Device | None:
        return self._placement.at(place).device

    def start(self, slot: int, place: int, worker_num: int) -> None:
        # Known before the fork, whose hook in the child closes the copies of our ends.
        make_link, link = self.memory.for_worker(worker_num) or (None, None)
        worker = self._workers[slot] = _WorkerProcess(slot, place, link, self._noun)
        spec = None if isinstance(self._spec, bytes) else self._spec
        try:
            worker.start(self._method, self._placement, worker_num, spec, make_link)
            self._selector.register(worker.responses, _READ, (worker, self._read))
            self._selector.register(worker.death, _READ, (worker, self._on_death))
        except BaseException:
            del self._workers[slot]
            self._unwatch(worker.responses)
            worker.discard()
            raise
        if isinstance(self._spec, bytes):
            # Not with what multiprocessing sends to a new process: that blocks until the process
            # reads it, after it has imported the main module, or for ever if it dies before.
            self._write(worker, self._spec)

    def _send_batch(
        self, worker: _WorkerProcess, batch_id: int, payloads: list[Any], calls: int | list[int]
    ) -> None:
        try:
            worker.last_sent = batch_id
            # Before it can answer.
            worker.unanswered[batch_id] = 1 if calls is True else len(payloads)
            link, arena = worker.link, self.memory.arena
            released = None
            if link is not None and arena is not None:
                if worker.wants_rows:  # one large batch is soon forgotten
                    arena.rows = max(len(payloads), arena.rows - 1)
                released = link.lend(payloads) or None
            message = batch_id, payloads, released, calls
            self._write(worker, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except BaseException:
            worker.kill()
            raise

    def _send_order(self, worker: _WorkerProcess, order: tuple[int, list[int]]) -> None:
        self._write(worker, pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def _write(self, worker: _WorkerProcess, frame: bytes) -> None:
        """Write a frame. If this raises, the worker is killed: it could wait for the rest."""
        try:
            if not worker.writer.write(frame):
                self._full.add(worker)
                self.wakeup()
        except BaseException:
            worker.kill()
            raise

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        for worker in self._workers.values():
            if worker.kill_at is not None:
                timeout = worker.kill_if_overdue(timeout)
        while self._full:
            worker = self._full.pop()
            if not (worker.is_gone or worker.requests in self._selector.get_map()):
                flush = worker, self._flush
                self._selector.register(worker.requests, selectors.EVENT_WRITE, flush)
        for key, _ in self._selector.select(0 if self._events else timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
                continue
            worker, react = key.data
            if not worker.is_gone:  # else two of its descriptors were ready, and one was enough
                react(worker)
        events, self._events = self._events, []
        return events

    def wakeup(self) -> None:
        ends = self._wakeup  # held here, so that no descriptor is closed or reused meanwhile
        if ends is not None:
            # A full pipe wakes the loop as well as one more byte would.
            with contextlib.suppress(BlockingIOError):
                os.write(ends[1].fileno(), b"\0")

    def stop(self, slot: int) -> None:
        if slot in self._workers:
            self._end_gently(self._workers[slot], _STOP_GRACE)

    def kill(self, slot: int, why: str) -> None:
        if slot in self._workers:
            self._workers[slot].end_by_force(why)

    def close(self, grace: float) -> None:
        if self._wakeup is None:
            return
        for worker in self._workers.values():
            self._end_gently(worker, grace)
        while self._workers:
            self.wait(None)  # what still comes back has no caller any more
        self._release()
        _transports.discard(self)  # now that a fork has nothing to let go of

    def abandon_in_forked_child(self) -> None:
        """Close the copies of the parent's ends, or workers would not see the end of the parent."""
        for worker in self._workers.values():
            worker.abandon_in_forked_child()
        self._workers.clear()
        self._release()

    def _release(self) -> None:
        self._selector.close()
        self._wakeup = None  # closed when no thread holds it any more
        self.memory.close()
        if self.codec is not None:
            self.codec.close()

    # -- what happens to a worker

    def _end_gently(self, worker: _WorkerProcess, grace: float) -> None:
        """Ask a worker to end; it is killed if it has not within ``grace`` seconds."""
        if worker.killed_for is None:
            worker.grace, worker.kill_at = grace, time.monotonic() + grace
            self._write(worker, b"")  # the stop sentinel

    def _read(self, worker: _WorkerProcess) -> bool:
        """Take in what the worker has written; whether there may be more."""
        try:
            frames = worker.reader.read()
        except BlockingIOError:
            return False  # a system may call a pipe ready that is empty
        except EOFError:
            self._unwatch(worker.responses)
            return False
        except Exception as error:  # no memory for the frame, or it is none
            return self._give_up(worker, error)
        try:
            for frame in frames:
                self._events += worker.events(decode(pickle.loads(frame)))
        except Exception as error:
            return self._give_up(worker, error)
        if worker.final_report is not None:  # it ends by itself; an event says so when it has
            self._end_gently(worker, _STOP_GRACE)
        return True

    def _give_up(self, worker: _WorkerProcess, error: Exception) -> bool:
        """What the worker has written cannot be read; the rest makes no sense then."""
        self._unwatch(worker.responses)
        worker.note_breach(error)
        worker.kill()
        return False

    def _on_death(self, worker: _WorkerProcess) -> None:
        """The worker is dead: what it had written still counts, then it is gone."""
        while worker.responses in self._selector.get_map() and self._read(worker):
            pass
        for descriptor in (worker.death, worker.responses, worker.requests):
            self._unwatch(descriptor)
        del self._workers[worker.slot]
        self._events.append(worker.collect(self.device(worker.place)))

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _flush(self, worker: _WorkerProcess) -> None:
        """The worker's pipe has room for what it has not taken."""
        if worker.writer.flush():
            self._unwatch(worker.requests)


#: Those that are open, for the fork hook below: it has to find them by itself.
_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def _abandon_all() -> None:
    for transport in list(_transports):
        transport.abandon_in_forked_child()
    _transports.clear()


os.register_at_fork(after_in_child=_abandon_all)


class _WorkerProcess(KnownWorker):
    """One process and the parent's ends of its pipes. ``writer`` and ``kill`` are for any thread.

    No call interrupts the writing of another one: see ``Transport``. A finalizer's may.
    """

    def __init__(self, slot: int, place: int, link: MemoryLink | None, noun: str) -> None:
        super().__init__(slot, place, link)
        self._noun = noun
        self.kill_at: float | None = None  # unless it has ended, on the monotonic clock
        self.grace = 0.0
        self._process: Any = None
        self.death = -1  # a descriptor that is readable when the process has ended
        for_requests, requests = Pipe(duplex=False)
        responses, for_responses = Pipe(duplex=False)
        self._stacks, for_stacks = Pipe(duplex=False)
        self._ends = requests, responses, self._stacks
        self._ends_of_child = for_requests, for_responses, for_stacks
        self.requests, self.responses = requests.fileno(), responses.fileno()
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # on Linux
            for pipe in (self.requests, self.responses):
                with contextlib.suppress(OSError):  # the user has too many already
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        for end in self._ends:
            os.set_blocking(end.fileno(), False)
        self.writer = FrameWriter(self.requests)
        self.reader = FrameReader(self.responses)

    def __str__(self) -> str:
        return f"{self._noun} {self.place} (pid {self._process.pid})"

    def start(
        self,
        method: str,
        placement: Placement,
        worker_num: int,
        spec: ModelSpec | None,
        make_link: MakeLink | None,
    ) -> None:
        """Start the process. After an error ``discard`` it.

        ``spec`` is for a forked child, which has it in its memory; None if it comes as a frame.
        """
        context: Any = multiprocessing.get_context(method)
        progress: Memory | None = None
        with contextlib.suppress(OSError):  # without it, all that the worker holds is suspect
            progress = Memory.new(PROGRESS_BYTES)
            self.progress = Progress(progress)
        try:
            with startable():
                if method == "forkserver":
                    forkserver.ensure_running()  # or it keeps the environment of its first child
                elif method == "spawn":
                    # Not within the block below: starting it lets signals through. It knows
                    # SIGTERM, but a SIGHUP would end it, if it were not held back from its start.
                    with block_signals():
                        resource_tracker.ensure_running()
                with placement.environment(self.place, worker_num) as place:
                    prepare = starting.preparation and starting.preparation()
                    boot = Boot(spec, place, make_link, progress, prepare)
                    # Not a daemon in multiprocessing's sense: those may not have children, which a
                    # model may want (data loaders). The engine ends all before the interpreter.
                    self._process = context.Process(
                        target=run_worker,
                        args=(boot, *self._ends_of_child),
                        name=f"service_streamer {self._noun} {self.place}",
                        daemon=False,
                    )
                    with block_signals():
                        self._process.start()
        finally:
            # The child has its own copies; with ours open there would be no end-of-file.
            for end in self._ends_of_child:
                end.close()
        if hasattr(os, "pidfd_open"):
            # Unlike multiprocessing's sentinel, a pipe whose other end a model's own child
            # processes may inherit, this tells the end of the worker itself.
            with contextlib.suppress(OSError):  # Linux before 5.3
                self.death = os.pidfd_open(self._process.pid)
        if self.death < 0:
            self.death = os.dup(self._process.sentinel)

    def discard(self) -> None:
        """Leave nothing of it, after a start that has failed halfway."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()
            _forget(self._process)
        self._release()

    @property
    def is_gone(self) -> bool:
        """Whether it was collected, and its descriptors are closed."""
        return self.writer.is_closed

    def kill(self) -> None:
        """End it by force, at once."""
        if not self.is_gone:
            self._process.kill()

    def end_by_force(self, why: str) -> None:
        """Have it write down its stacks; then it is killed."""
        if self.killed_for is None:
            self.killed_for, self.kill_at = why, time.monotonic() + _STACKS_GRACE
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, STACKS_SIGNAL)

    def kill_if_overdue(self, timeout: float | None) -> float | None:
        """Kill it if its time has come; else how long to wait for that, ``timeout`` at most."""
        assert self.kill_at is not None
        left = self.kill_at - time.monotonic()
        if left > 0:
            return left if timeout is None else min(timeout, left)
        self.kill_at = None
        self.kill()  # SIGTERM it leaves to us: see ``ignore_group_signals``
        if self.killed_for is None:
            name = str(self)  # or whoever keeps the record would keep all of us
            text = "%s did not end within %.1f s: it is killed"
            _log(logging.WARNING, text, name, self.grace)
        return timeout

    def collect(self, device: Device | None) -> WorkerDied:
        """Collect the dead process; how it ended, for the engine."""
        # If its device failed, batches that had not come to the device do not count.
        first = INTAKE if self.final_report is None else FORWARD
        at = self.progress.batches(first) or None
        self._process.join()
        stacks = ""
        with contextlib.suppress(OSError):  # it wrote none, and another process has the pipe
            stacks = os.read(self._stacks.fileno(), _STACKS_SIZE).decode(errors="replace")
        exit_code: int | None = self._process.exitcode
        # Not closed: another thread may join it at this time, as multiprocessing does at the exit
        # of the interpreter, and a closed one raises ValueError there. Nor can one be closed that
        # somebody else has collected, as gevent does, so that it seems alive.
        _forget(self._process)
        self._release()
        where = "" if device is None else f" on device {device}"
        return self.obituary(exit_code, stacks, at, where)

    def abandon_in_forked_child(self) -> None:
        """Let go of a process that is not this one's child."""
        self.writer = FrameWriter(self.requests)  # another thread may have held its lock
        self.link = None  # nor is it to be closed, whose lock may be held
        self._release()
        # multiprocessing does not notice a plain fork, and would fail to join it at the exit.
        _forget(self._process)

    def _release(self) -> None:
        self.writer.close()
        if self.death >= 0:
            os.close(self.death)
        if self.link is not None:
            self.link.close()
        for end in self._ends:
            end.close()


def _forget(process: Any) -> None:
    """Have multiprocessing let go of a process that it cannot wait for: there is no public way."""
    getattr(multiprocessing.process, "_children", set()).discard(process)
    popen = getattr(process, "_popen", None)
    if popen is not None:
        popen.close()
