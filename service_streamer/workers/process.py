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
stays in the slot's writer until the loop finds room); a worker's ends do block, and may, since the
parent always reads.

How ends are noticed: the parent sees a worker die through its process descriptor and reads the
response pipe to its end before it says so; a worker sees its parent die by end-of-file on the
request pipe, also in the midst of a batch (see ``worker_main.py``).

Large payloads lie outside of the messages, in shared memory (see ``memory/memory_link.py``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WorkerLost
from ..options.checks import Device
from ..options.table import WorkerOptions
from ..reporting import summary
from ..supervision.restarts import Loss
from .codec import ByValue, Codec, encode_spec
from .memory.memory_link import SharedMemory
from .model_spec import ModelSpec
from .protocol import Failure, decode
from .starting import Placement
from .transport import Transport, WorkerDied, WorkerEvent
from .worker_process import WorkerProcess

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0


class ProcessTransport(Transport):
    """One process per slot, reached over a private pair of pipes.

    With a codec in ``spec``, items come encoded by it already, and outputs are handed out so:
    ``encode`` and ``decode`` have nothing to do, and this process never looks into them.

    Args:
        spec: what the workers load. If another process has pickled it, items come pickled from
            there as well, and outputs are handed out so.
        noun: what a worker is called in messages.
        memory: for what is large; None for some of its own.

    Attributes:
        memory: for what is large.
    """

    def __init__(
        self,
        spec: ModelSpec | bytes,
        options: WorkerOptions,
        memory: SharedMemory | None = None,
        *,
        noun: str = "worker",
    ) -> None:
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
        self._codec: Codec | None = None
        if not (is_encoded or isinstance(spec, bytes)):
            self._codec = Codec(self.memory.arena, by_value, spec.cannot_load)
        self._workers: dict[int, WorkerProcess] = {}
        #: Each descriptor with its worker and what is to be done when it is ready.
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(self._wakeup_writer, False)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._has_unwritten = False  # whether a pipe may be full, or watched because it was
        self._is_closed = False
        #: What ``wait`` has found and not returned: an exception may come in between.
        self._events: list[WorkerEvent] = []
        # So that wakeup never writes to a reused descriptor. Reentrant, since a finalizer that runs
        # within it may wake us too.
        self._close_lock = threading.RLock()
        _transports.add(self)

    def device(self, place: int) -> Device | None:
        """The device of worker number ``place``; None if it was given none. For any thread."""
        return self._placement.at(place).device

    def encode(self, items: Sequence[Any]) -> list[Any]:
        return list(items) if self._codec is None else self._codec.encode_items(items)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs if self._codec is None else self._codec.decode_outputs(outputs)

    def start(self, slot: int, place: int, worker_num: int) -> None:
        # Known before the fork, whose hook in the child closes the copies of our ends.
        memory = self.memory.for_worker(worker_num)
        worker = self._workers[slot] = WorkerProcess(slot, place, memory, self._noun)
        spec = None if isinstance(self._spec, bytes) else self._spec
        try:
            worker.start(self._method, self._placement, worker_num, spec)
            self._watch(worker.responses, worker, self._read)
            self._watch(worker.death, worker, self._lost)
        except BaseException:
            del self._workers[slot]
            self._unwatch(worker.responses)
            worker.discard()
            raise
        if isinstance(self._spec, bytes):
            # Not with what multiprocessing sends to a new process: that blocks until the process
            # reads it, after it has imported the main module, or for ever if it dies before.
            self._write(worker, self._spec)

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
        try:
            worker.last_sent = batch_id
            # Before the worker can answer. After the item of a stream come outputs that it has had.
            worker.unanswered[batch_id] = 1 if is_stream else len(payloads)
            link, arena = worker.link, self.memory.arena
            released = None
            if link is not None and arena is not None:
                arena.expect(len(payloads), as_rows=worker.wants_rows)
                released = link.lend(payloads) or None
            message = batch_id, payloads, released, is_stream or calls
            self._write(worker, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except BaseException:
            self._interrupted(worker)
            raise

    def tell(self, slot: int, what: int, batch_ids: list[int]) -> None:
        worker = self._workers.get(slot)
        if worker is not None and not worker.has_steps:
            for batch_id in batch_ids:
                worker.drop(batch_id)
        elif worker is not None:
            try:
                self._write(worker, pickle.dumps((what, batch_ids), pickle.HIGHEST_PROTOCOL))
            except BaseException:
                self._interrupted(worker)
                raise

    def _write(self, worker: WorkerProcess, frame: bytes) -> None:
        if not worker.write(frame):
            self._has_unwritten = True
            self.wakeup()  # the loop watches for room in the pipe

    def _interrupted(self, worker: WorkerProcess) -> None:
        """End the worker: an exception has cut off a message to it, perhaps within its frame.

        KeyboardInterrupt, say. The worker could wait for the rest of the frame for ever. Its end is
        reported like any other.
        """
        if not worker.is_gone:
            worker.kill()

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        if self._has_unwritten:
            self._has_unwritten = False  # before the look, which sets it again
            for worker in self._workers.values():
                self._watch_for_room(worker)
        for worker in self._workers.values():
            timeout = worker.kill_if_overdue(timeout)
        for key, _ in self._selector.select(0 if self._events else timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_reader, 4096)
                continue
            worker, react = key.data
            if not worker.is_gone:  # else two of its descriptors were ready, and one was enough
                react(worker)
        events, self._events = self._events, []
        return events

    def wakeup(self) -> None:
        with self._close_lock:
            if not self._is_closed:
                # A full pipe wakes the loop as well as one more byte would.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wakeup_writer, b"\0")

    def stop(self, slot: int) -> None:
        worker = self._workers.get(slot)
        if worker is not None:
            self._end(worker, _STOP_GRACE)

    def kill(self, slot: int, why: str) -> None:
        worker = self._workers.get(slot)
        if worker is not None:
            worker.end_by_force(why)

    def close(self, grace: float) -> None:
        if self._is_closed:
            return
        for worker in self._workers.values():
            self._end(worker, grace)
        while self._workers:
            self.wait(None)  # what still comes back has no caller any more
        with self._close_lock:
            self._release()
        _transports.discard(self)  # now that a fork has nothing to let go of

    def abandon_in_forked_child(self) -> None:
        """Close this process's copies of the parent's ends.

        Otherwise a worker would not see the end of its parent before that of this process too.
        """
        for worker in self._workers.values():
            worker.abandon_in_forked_child()
        self._workers.clear()
        self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._selector.close()
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        self.memory.close()
        if self._codec is not None:
            self._codec.close()

    # -- what happens to a worker

    def _end(self, worker: WorkerProcess, grace: float) -> None:
        worker.end_gently(grace)
        self._has_unwritten = True  # perhaps: the stop sentinel waits for room, too

    def _read(self, worker: WorkerProcess) -> bool:
        """Take in what the worker has written; whether there may be more."""
        try:
            frames = worker.reader.read()
        except BlockingIOError:
            return False  # a system may call a pipe ready that is empty
        except EOFError:
            self._unwatch(worker.responses)
            return False
        except Exception as error:  # no memory for the frame, or it is none
            self._give_up(worker, error)
            return False
        try:
            for frame in frames:
                self._events += worker.events(decode(pickle.loads(frame)))
        except Exception as error:
            self._give_up(worker, error)
            return False
        if worker.device_failure is not None:  # it ends by itself; an event says so when it has
            self._end(worker, _STOP_GRACE)
        return True

    def _give_up(self, worker: WorkerProcess, error: Exception) -> None:
        """What the worker has written cannot be read; the rest makes no sense then."""
        self._unwatch(worker.responses)
        worker.note_breach(error)
        worker.kill()

    def _lost(self, worker: WorkerProcess) -> None:
        """The worker is dead: what it had written still counts, then it is gone."""
        while worker.responses in self._selector.get_map() and self._read(worker):
            pass
        for descriptor in (worker.death, worker.responses, worker.requests):
            self._unwatch(descriptor)
        del self._workers[worker.slot]
        try:
            died = worker.died(self._placement.at(worker.place).device)
        except Exception as error:  # no descriptors, say: the engine must hear of it all the same
            lost = WorkerLost(f"worker {worker.place} died; why cannot be told ({summary(error)})")
            loss = Loss.CRASHED if worker.is_ready else Loss.DIED_STARTING
            died = WorkerDied(worker.slot, Failure(lost), loss)
        if died is not None:
            self._events.append(died)

    def _watch(
        self,
        descriptor: int,
        worker: WorkerProcess,
        react: Callable[[WorkerProcess], object],
        ready: int = selectors.EVENT_READ,
    ) -> None:
        self._selector.register(descriptor, ready, (worker, react))

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _watch_for_room(self, worker: WorkerProcess) -> None:
        """Have the pipe of a worker watched as long as it has not taken everything."""
        is_watched = worker.requests in self._selector.get_map()
        if worker.has_unwritten:
            self._has_unwritten = True
            if not is_watched:
                self._watch(worker.requests, worker, WorkerProcess.flush, selectors.EVENT_WRITE)
        elif is_watched:
            self._selector.unregister(worker.requests)


#: Those that are open, for the fork hook below: it has to find them by itself.
_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def _abandon_all() -> None:
    for transport in list(_transports):
        transport.abandon_in_forked_child()
    _transports.clear()


os.register_at_fork(after_in_child=_abandon_all)
