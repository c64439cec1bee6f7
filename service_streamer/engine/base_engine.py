"""The state of an engine, how it stands, and what its owner asks of it.

The lock guards the calls, what is on its way to workers, and how all that stands. It is held for a
few microseconds only: no I/O, no pickling, no logging, no code of users and no completing of
futures happens under it. ``fleet.py`` has the states by name.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..batching.batcher import NOTHING, Actions
from ..errors import (
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    StreamerForked,
    WorkerStartTimeout,
)
from ..observe.metrics import (
    BatchMetrics,
    StreamerStats,
    Summary,
    WorkerStats,
    summarize,
    summarize_steps,
)
from ..observe.record import BatchRecord, BatchReport, Call
from ..options.checks import Workers, worker_range
from ..supervision.supervisor import Overlap
from ..workers.protocol import DROP, RESUME, Failure
from ..workers.transport import Transport, WorkerEvent
from .backend import Lengths
from .fleet import EngineState, Fleet
from .threads import is_owned

T = TypeVar("T")

#: How long a worker may take to end that is still loading, or computing for callers that have their
#: answer already, seconds.
ABORT_GRACE = 0.5

#: A batch, or an order about one: its slot, the order, and its id.
Message = BatchRecord | tuple[int, int, int]


class BaseEngine:
    """The state of an engine. ``Engine`` adds what happens to calls, and the thread.

    Methods that say "Locked" want ``lock`` to be held.

    Args:
        transport: not started yet; the engine starts, owns and closes it.
        fleet: new.
        hang: why a worker was killed whose batch took too long, with "{:g}" for the seconds. Where
            workers are not killed for their batch, why not.
        lengths: of items, as calls have them; None if each counts one.
        clock: seconds from a monotonic clock.

    Attributes:
        unsent: messages. Workers get them in this order. A thread that sends one sends all, so it
            overtakes no thread that was stopped on its way. One is taken out when the transport has
            it, and not before: a signal handler may raise in between.
        sending: held by the one thread that sends these. Reentrant, as ``lock``.
        open_calls: those that are accepted and not answered, in the order of their arrival. What
            they need and what workers hold is the truth from which ``settle`` derives the rest.
        is_torn: whether an exception has ended a change in a caller's thread halfway, as a signal
            handler may raise one anywhere. Whoever takes the lock next calls ``settle``.
        left: what finalizers say, at any line and within the lock: they only append, and wake the
            loop. Calls whose callers have gone, and whether for lack of time; None if the engine is
            to drain and close, since its owner has gone.
        undone: what is to be done but for batches, which are queued: the loop's affair.
        records: of batches, if they are watched: the loop hands them out and releases them.
        waits_until: until when the loop waits, if nothing happens.
        on_answered: called when all is answered that came back at a time. Must not block or raise.
        on_workers, on_end: see ``when_workers_change`` and ``when_ended``.
        on_batch, on_call: see ``watch``.
        cancel_exit: has the engine not be closed any more when the interpreter ends.
        thread_id: of the thread; None before and afterwards, when another may have that number.
    """

    # More than 30 attributes of an instance would make all of them slower.
    is_exiting = has_ended = _is_settling = _sends_to_others = False

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        *,
        hang: str = "its batch took too long",
        lengths: Lengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.encode, self.decode = transport.encode, transport.decode
        self.lengths = lengths
        self.fleet = fleet
        self.batcher = fleet.batcher
        self.clock = clock
        self._hang = hang
        self._pid = os.getpid()
        # Reentrant, since a signal handler that closes may run while we hold it.
        self.lock = threading.RLock()
        # The state, or that of a worker. Take ``lock`` itself to wait: a signal handler that raises
        # within ``Condition.__enter__``, which is Python, would leave it locked for ever.
        self.changed = threading.Condition(self.lock)
        self.unsent: collections.deque[Message] = collections.deque()
        self.sending = threading.RLock()
        self.open_calls: dict[Call, None] = {}  # an ordered set
        self.is_torn = False
        self.left: collections.deque[tuple[Call, bool] | None] = collections.deque()
        self.undone: list[Actions] = []
        self.records: list[BatchRecord] = []
        self.drain_deadline = math.inf
        self.waits_until = math.inf
        self.on_answered: Callable[[], None] | None = None
        self.on_workers: Callable[[], None] = lambda: None
        self.on_batch: Callable[[BatchRecord], None] = lambda _: None
        self.on_call: Callable[[Call], None] | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.cancel_exit: Callable[[], object] = lambda: None
        #: Runs the loop, and logs what becomes of the workers.
        self.thread = threading.Thread(target=self._run, name="service_streamer", daemon=True)
        self.thread_id: int | None = None
        self._ended = threading.Event()

    def _run(self) -> None:
        """The thread: no other one waits for the transport, or ends workers."""
        raise NotImplementedError

    # -- hooks

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call it when the engine ends, in its thread, or now if it has: perhaps twice."""
        self.on_end = callback
        if self.has_ended:
            callback()

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        self.on_workers = callback

    def watch(
        self,
        on_batch: Callable[[BatchRecord], None],
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        """Watch every batch that comes back from now on. There is one watcher at a time.

        Args:
            on_batch: called in the engine's thread after the callers were answered; of a model of
                steps also with items whose worker has died. The calls of the record are there until
                it returns. What it raises is logged; as long as it takes, nothing else is answered.
            on_call: called with each call in the thread that submits it, to note in its
                ``context`` what is to be known when its record comes.
        """
        with self._guarded():
            self.on_batch = on_batch
            self.on_call = on_call
            self.batcher.on_back = self.keep_record

    def keep_record(self, record: BatchRecord) -> None:
        """Have the loop hand out the record of a batch. Locked."""
        record.worker = self.fleet.supervisor.place(record.slot)
        self.records.append(record)

    # -- the state: locked

    def settle(self) -> None:
        """Call it first whenever the lock was taken: apply what could not be when it happened."""
        # If it is settling, a signal handler has interrupted it. It goes on afterwards.
        if self._is_settling or not (self.is_torn or self.left):
            return
        try:
            self._is_settling = True
            if self.is_torn:
                self.undone.append(Actions(calls=self._restore()))
                self.is_torn = False
            if self.left:
                self.is_torn = True  # until this is done: a signal handler may raise in between
                while self.left:
                    entry = self.left[0]
                    if entry is None:
                        self.begin_drain(math.inf)
                    else:
                        self.let_go(entry)
                    self.left.popleft()
                self.is_torn = False
        finally:
            self._is_settling = False

    def _restore(
        self, failure: Failure | None = None, events: Sequence[WorkerEvent] = ()
    ) -> list[Call]:
        """Derive the state anew, since it is in doubt; returns the calls that are to be answered.

        ``is_torn`` is the caller's to reset, when it has taken up these calls. Locked.

        Args:
            failure: ends every open call. Workers go on with what they hold, for no caller.
            events: happened, and may have been applied or not.
        """
        calls = [*self.open_calls]  # at once: others forget some without the lock
        unanswered = [call for call in calls if not call.is_over]
        returned = [event for event in events if isinstance(event, BatchReport)]
        self.batcher.rebuild(unanswered, self.clock(), failure, returned)
        if failure is not None:
            self.fleet.supervisor.due = -math.inf  # some workers may hold nothing now
        listed = {*[*self.unsent]}  # in one step, since others take out
        # The others were cut last. One that another thread is done with at this moment may be among
        # them: the transport does not send it again.
        self.unsent.extend(
            batch for batch in self.batcher.in_flight() if batch.payloads and batch not in listed
        )
        self.waits_until = math.inf
        ended: list[Call] = []
        for call in [call for call in calls if call.is_over]:
            if call.failure or not call.unanswered:
                ended.append(call)
            else:
                self.open_calls.pop(call, None)  # its caller has withdrawn it
        return ended

    def let_go(self, leaving: tuple[Call, bool]) -> bool:
        """The caller of a call has gone, perhaps for lack of time; whether it was open. Locked."""
        call, has_expired = leaving
        is_withdrawn = self.batcher.withdraw(call, has_expired=has_expired)
        if is_withdrawn:
            call.reply = None
            self.open_calls.pop(call, None)
            self._drop_unwanted()
            if self.fleet.state is EngineState.DRAINING:
                self.undone.append(NOTHING)  # have the loop look whether it waited for this one
        return is_withdrawn

    def _drop_unwanted(self) -> None:
        """Workers are told which batches have lost their callers."""
        for slot, batch_id in self.batcher.take_unwanted():
            self.unsent.append((slot, DROP, batch_id))

    def begin_drain(self, deadline: float) -> None:
        """Accept nothing any more. Locked."""
        fleet = self.fleet
        if fleet.state is not EngineState.CLOSED:
            if fleet.state is not EngineState.DRAINING:
                # Its consumer may be the thread that waits for the end: then no item may rest.
                self._resume_all(self.clock())
            fleet.begin_drain(Failure(StreamerClosed("the streamer is closed")))
            self.drain_deadline = min(self.drain_deadline, deadline)
            self.changed.notify_all()

    def _resume_all(self, now: float, slot: int | None = None) -> None:
        """No item of a model of steps is to rest any more, of this worker or of all."""
        for batch in self.batcher.slots.set_held(False, now, slot=slot):
            self.unsent.append((batch.slot, RESUME, batch.id))

    # -- how it stands

    def late(self, timeout: float | None) -> StreamerError:
        text = f"no result within {timeout} s ({self.describe()})"
        if self.batcher.retries.has_waiting_alone:
            text += "; a worker died, and the search for the item at fault is still running"
        return PredictTimeout(text)

    def model_description(self) -> Mapping[str, Any] | None:
        with self._guarded():
            if self.fleet.description is None:
                self._check_accepting()
            return self.fleet.description

    @property
    def state(self) -> EngineState:
        return self.fleet.state

    @property
    def is_over(self) -> bool:
        return self.fleet.state in (EngineState.DRAINING, EngineState.CLOSED)

    def stats(self) -> StreamerStats:
        with self._guarded():
            self.settle()
            return self.fleet.stats(self.clock())

    def metrics(self) -> BatchMetrics:
        """A copy of them as they are now."""
        with self._guarded():
            return self.batcher.figures.metrics.copy()

    def summary(self) -> Summary:
        """The recent batches and the state of the engine, for ``explain``."""
        with self._guarded():
            now, stats = self.clock(), self.stats()
            figures, slots = self.batcher.figures, self.batcher.slots
            recent, restarted_at = [*figures.recent], [*self.fleet.supervisor.restarted_at]
            known = {
                "line": self.batcher.queue.cost.line,
                "has_lengths": self.lengths is not None,
                "steps": summarize_steps(
                    figures.steps, figures.first_outputs, slots.places, len(slots)
                ),
            }
        return summarize(recent, stats, now, restarted_at=restarted_at, **known)

    def workers(self) -> list[WorkerStats]:
        """Each worker, by number."""
        with self._guarded():
            return self.fleet.workers(self.transport.device)

    def describe(self) -> str:
        if os.getpid() != self._pid:
            return f"of process {self._pid}"
        return self.stats().gist

    # -- workers

    def _wait_workers(self, is_done: Callable[[], bool], timeout: float | None, late: str) -> None:
        """Block until a change of the workers is done, or one of them could not be started."""
        fleet = self.fleet
        with self.lock:
            in_time = self.changed.wait_for(
                lambda: is_done() or fleet.supervisor.failed or self.is_over, timeout
            )
            if fleet.supervisor.failed and fleet.failure is not None:
                raise fleet.failure.exception()
            self._check_accepting()
        if not in_time:
            raise WorkerStartTimeout(late)

    def wait_serving(self, timeout: float | None) -> int:
        """Block until a worker takes batches; returns how many do, 0 if the time ended first.

        Raises:
            WorkerStartError, StreamerBroken: none will.
            StreamerClosed: it is closed, or was meanwhile.
        """
        with self.lock:
            self.changed.wait_for(lambda: self.batcher.slots or self.fleet.refusal, timeout)
            self._check_accepting()  # also with workers, if the loop has failed
            return len(self.batcher.slots)

    def try_start_once(self) -> None:
        """Start no worker again that could not load its model, unless another one is ready.

        For an owner that ends if no worker can be started.
        """
        with self.lock:
            self.fleet.supervisor.tries_once = True

    @property
    def can_recover(self) -> bool:
        """Whether it has served, and tries to again where it does not."""
        return self.fleet.supervisor.was_served and not self.is_over

    def wait_recovered(self) -> None:
        """Block while no worker can be started; returns when one is ready, or it is closed."""
        with self.lock:
            self.changed.wait_for(lambda: self.fleet.state is not EngineState.BROKEN)

    def begin_restart(self, overlap: Overlap) -> int:
        """Begin to replace every worker; returns the number of this restart."""
        return self._change_workers(lambda: self.fleet.supervisor.renew(overlap))

    def wait_restarted(self, generation: int, timeout: float | None) -> None:
        """Block until a restart is over. Raises what ``ScaledStreamer.restart_workers`` does."""
        fleet = self.fleet
        supervisor = fleet.supervisor

        def is_done() -> bool:
            if supervisor.aborted >= generation and fleet.roll_failure is not None:
                raise fleet.roll_failure.exception()
            return supervisor.is_renewed(generation)

        late = f"not every worker has been replaced in {timeout} s; the restart goes on"
        self._wait_workers(is_done, timeout, late)

    def scale(self, worker_num: Workers) -> None:
        """Want another number of workers, or other bounds of it; does not wait for them."""
        bounds = worker_range(worker_num)
        self._change_workers(lambda: self.fleet.set_bounds(*bounds, self.clock()))

    def _change_workers(self, change: Callable[[], T]) -> T:
        """Let it change which workers there are to be. Raises StreamerClosed."""
        with self._guarded():
            if self.is_over:
                self._check_accepting()
            self.fleet.revive()
            result = change()
        self.transport.wakeup()
        return result

    # -- the beginning and the end

    def start(self) -> None:
        """Start the workers and the loop; does not wait for them."""
        try:
            for slot, place in self.fleet.supervisor.orders(self.clock()).start:
                self.transport.start(slot, place, self.fleet.scaling.most)
            self.thread.start()
        except BaseException:
            self.transport.close(ABORT_GRACE)
            raise
        self.cancel_exit = self.transport.when_exiting(self._close_at_exit)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        """Refuse new calls, finish or fail the accepted ones, end the workers. Idempotent.

        Returns when all that is done; but from the loop thread itself (a callback of a future),
        and from a signal handler that interrupts this engine, when it has begun.
        """
        if os.getpid() != self._pid:
            return  # a fork's copy: nothing of it is here to be ended
        if not drain:
            timeout = 0.0
        with self.lock:
            self.begin_drain(math.inf if timeout is None else self.clock() + timeout)
        self.transport.wakeup()
        # A signal handler may run while this thread holds a lock that the loop needs to end; it may
        # hold some of the transport's while it sends.
        is_interrupting = is_owned(self.lock) or is_owned(self.sending)
        if threading.current_thread() is not self.thread and not is_interrupting:
            self.join()

    def join(self) -> None:
        """Block until the workers have ended, and the thread with them.

        Not by joining the thread alone: Python takes a thread for ended once a KeyboardInterrupt
        has ended a ``join``, and every later one returns at once.
        """
        self._ended.wait()
        self.thread.join()

    def abandon(self) -> None:
        """Have the loop drain and close, soon. For a finalizer, which may run under our locks."""
        self.left.append(None)
        if os.getpid() == self._pid:
            self.transport.wakeup()

    def _close_at_exit(self) -> None:
        """The interpreter ends: no caller is left."""
        # A KeyboardInterrupt here would only print a traceback. The workers are ending already, and
        # multiprocessing, which runs this, joins them next.
        self.is_exiting = True
        with contextlib.suppress(KeyboardInterrupt):
            self.close(drain=False, timeout=None)

    # -- refusals

    def _guarded(self) -> threading.RLock:
        """The lock; raises in a forked child, which may have a copy of it that is held."""
        self.check_process()
        return self.lock

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StreamerForked(
                f"this streamer was built in process {self._pid} and came to process {os.getpid()} "
                "by fork, where its workers do not answer; build it after the fork "
                "(gunicorn: without --preload, or in post_fork; uWSGI: with lazy-apps)"
            )

    def _check_accepting(self) -> None:
        refusal = self.fleet.refusal
        if refusal is not None:
            raise refusal.exception()
