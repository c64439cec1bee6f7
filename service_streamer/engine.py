"""The owner of all state in the web process: does what the batcher decides.

     caller threads                 engine                                   workers
     --------------                 ------                                   -------
     submit(items, reply)
       encode                       (no lock: pickling runs user code)
       ├─ lock ── batcher: call_submitted ── unlock
       └─ transport.send ─────────────────────────── BatchMessage ─────────▶ one per batch
     wait for the reply

                                    loop thread
                                    transport.wait ◀──── BatchOutcome ────── one per batch
                                    ├─ lock ── batcher: batch_done, ... ── unlock
                                    ├─ transport.send: workers are busy again first,
                                    └─ reply.complete / reply.fail: then callers are told
     ◀──────────────────────────────┘

     state      meaning                                    leaves when
     -----      -------                                    -----------
     STARTING   accepts calls; a worker still loads        each is ready or lost
     RUNNING    accepts calls                              closed, or its last worker is lost
     BROKEN     no worker can ever serve a call again:     closed
                they fail at once, with the reason
     DRAINING   refuses calls, finishes accepted ones      nothing is left, or its time ends
     CLOSED     refuses calls; nothing of it is left       -

The lock guards the batcher and the state. Held for a few microseconds only: no I/O, no pickling, no
logging, no code of users and no completing of futures happens under it.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any, Protocol

from .errors import (
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    StreamerForked,
    WorkerStartTimeout,
)
from .scheduling.batcher import Actions, Batcher
from .scheduling.records import Batch, Call, Statistics
from .workers.messages import Failure, summary
from .workers.transport import (
    BatchDone,
    BatchFailed,
    Transport,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)

__all__ = ["Engine", "EngineState", "Reply"]

logger = logging.getLogger(__name__)

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0
#: The same for one that is still loading, or computing for callers who were told that it is over.
_ABORT_GRACE = 0.5


class EngineState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    DRAINING = "draining"
    CLOSED = "closed"


class Reply(Protocol):
    """Where the outcome of a call goes: one of the methods is called, once, never under the lock.

    Attributes:
        call: set by the engine when it makes the call, before it can be over. To let go of then.
    """

    call: Call | None

    def complete(self, outputs: list[Any]) -> None:
        """The call succeeded; ``outputs`` are in the order of its items."""

    def fail(self, error: BaseException) -> None:
        """The call failed; nobody else has this exception instance."""


class Engine:
    """Accepts calls from any thread and answers each exactly once.

    Args:
        transport: not started yet; the engine starts, owns and closes it.
        batcher: new, with as many slots as there are to be workers.
        worker_num: that number.
        clock: seconds from a monotonic clock.
    """

    def __init__(
        self,
        transport: Transport,
        batcher: Batcher,
        *,
        worker_num: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._batcher = batcher
        self._worker_num = worker_num
        self._clock = clock
        self._pid = os.getpid()
        # Reentrant, since a finalizer of a user's that closes may run while we hold it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the state, or that of a worker
        #: Cut and not sent yet. Filled under the lock; whoever comes by sends what is there, so
        #: that nothing is left behind by a thread that was interrupted in between.
        self._unsent: collections.deque[Batch] = collections.deque()
        self._state = EngineState.STARTING
        self._refusal: Failure | None = None  # why new calls are refused; None accepts them
        self._start_failure: Failure | None = None
        self._drain_deadline = math.inf
        self._is_abandoned = False
        self._last_loss = ""
        self._thread = threading.Thread(target=self._run, name="service_streamer", daemon=True)

    def start(self) -> None:
        """Start the workers and the loop; does not wait for them."""
        try:
            for slot in range(self._worker_num):
                self._transport.start(slot)
            self._thread.start()
        except BaseException:
            self._transport.close(_ABORT_GRACE)
            raise
        # At exit multiprocessing joins its processes, and ours would wait for batches for ever. A
        # hook of atexit's would come too late in a child that multiprocessing started itself.
        self._at_exit = util.Finalize(None, self._close_at_exit, exitpriority=100)

    # -- for any thread

    @property
    def state(self) -> EngineState:
        return self._state

    def statistics(self) -> Statistics:
        with self._lock:
            return self._batcher.statistics()

    def describe(self) -> str:
        """The state in one line, for a ``repr``."""
        if os.getpid() != self._pid:
            return f"of process {self._pid}"
        counts = self.statistics()
        workers = (f"{count} {state.value}" for state, count in counts.workers.items() if count)
        return (
            f"{self._state.value} | pending {counts.pending_items} | in flight "
            f"{counts.batches_in_flight} batches/{counts.items_in_flight} items | "
            f"workers {', '.join(workers)}"
        )

    def submit(self, items: Sequence[Any], reply: Reply) -> None:
        """Accept a call of any number of items.

        Raises:
            StreamerError: it was not accepted: the streamer is closed, broken, or of another
                process; ``reply`` is not called.
        """
        if os.getpid() != self._pid or self._refusal is not None:
            self.check_process()
            self._check_accepting()
        if not len(items):
            reply.complete([])
            return
        try:
            payloads = self._transport.encode(items)
        except StreamerError as error:
            reply.fail(error.with_traceback(None))  # its frames hold the items
            return
        call = reply.call = Call(payloads, reply)
        with self._lock:
            if self._refusal is not None:
                self._check_accepting()
            deadline = self._batcher.deadline
            self._unsent += self._batcher.call_submitted(call, self._clock()).batches
            new_deadline = self._batcher.deadline
        if self._unsent:
            self._send()
        elif new_deadline is not None and (deadline is None or new_deadline < deadline):
            self._transport.wakeup()  # the loop waits for something later

    def cancel(self, call: Call) -> bool:
        """Withdraw a call of which nothing has been sent; whether that was so."""
        self.check_process()
        with self._lock:
            is_cancelled = self._batcher.call_cancelled(call)
        self._after_withdrawal()
        return is_cancelled

    def withdraw(self, call: Call) -> None:
        """Nobody waits for the call any more: drop what has not been sent, forget the rest."""
        self.check_process()
        with self._lock:
            self._batcher.call_withdrawn(call)
        self._after_withdrawal()

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker has loaded its model.

        Raises:
            WorkerStartError: one could not.
            WorkerStartTimeout: the time ended first; they go on loading.
            StreamerClosed: it was closed meanwhile.
        """
        self.check_process()
        self.check_not_in_callback()
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._start_failure is not None or self._state is not EngineState.STARTING,
                timeout,
            )
            if self._start_failure is not None:
                raise self._start_failure.exception()
            if not in_time:
                raise WorkerStartTimeout(f"not every worker has loaded its model in {timeout} s")
            self._check_accepting()

    def close(self, *, drain: bool, timeout: float | None) -> None:
        """Refuse new calls, finish or fail the accepted ones, end the workers. Idempotent.

        Returns when all that is done; but from the loop thread itself (a callback of a future),
        and from a finalizer that interrupts this engine, when it has begun.
        """
        if os.getpid() != self._pid:
            return  # a fork's copy: nothing of it is here to be ended
        if not drain:
            timeout = 0.0
        self._begin_drain(math.inf if timeout is None else self._clock() + timeout)
        self._transport.wakeup()
        # A finalizer may run while this thread holds the lock, which the loop needs to end.
        if threading.current_thread() is not self._thread and not self._changed._is_owned():  # type: ignore[attr-defined]
            self._thread.join()

    def abandon(self) -> None:
        """Have the loop drain and close, soon. For a finalizer, which may run under our locks."""
        self._is_abandoned = True
        if os.getpid() == self._pid:
            self._transport.wakeup()

    def _close_at_exit(self) -> None:
        """The interpreter ends: nobody is left to wait for a result."""
        self.close(drain=False, timeout=None)

    def check_not_in_callback(self) -> None:
        """Refuse to block the loop thread: it would wait for itself."""
        if threading.current_thread() is self._thread:
            raise StreamerError(
                "a callback of a future cannot wait for this streamer, whose thread it runs in; "
                "use submit, and a callback of that future"
            )

    def check_process(self) -> None:
        """Refuse use in a forked child."""
        if os.getpid() != self._pid:
            raise StreamerForked(
                f"this streamer was built in process {self._pid} and came to process {os.getpid()} "
                "by fork, where its workers do not answer; build it after the fork "
                "(gunicorn: without --preload, or in post_fork; uWSGI: with lazy-apps)"
            )

    def _check_accepting(self) -> None:
        refusal = self._refusal
        if refusal is not None:
            raise refusal.exception()

    def _begin_drain(self, deadline: float) -> None:
        with self._changed:
            if self._state is not EngineState.CLOSED:
                self._state = EngineState.DRAINING
                self._refusal = Failure(StreamerClosed("the streamer is closed"))
                self._drain_deadline = min(self._drain_deadline, deadline)
                self._changed.notify_all()

    def _after_withdrawal(self) -> None:
        if self._state is EngineState.DRAINING:
            self._transport.wakeup()  # it may have been the last call that the drain waited for

    # -- the loop thread

    def _run(self) -> None:
        reason = Failure(StreamerClosed("the streamer was closed before the call was served"))
        try:
            timeout = self._time_to_wait()
            while timeout is not None:
                # No operating system waits for years at once.
                events = self._transport.wait(None if timeout == math.inf else min(timeout, 1e5))
                timeout = self._handle(events)
                del events  # or the last results would live until the next ones come
        except BaseException as error:
            # Nobody may wait for a thread that is dead, whatever it died of.
            logger.critical("the streamer failed; this is a bug in it", exc_info=True)
            reason = Failure(StreamerBroken(f"the streamer failed: {summary(error)}"))
        finally:
            self._shut_down(reason)

    def _time_to_wait(self) -> float | None:
        """Seconds until something is due, ``inf`` for never; None when it is time to shut down."""
        if self._is_abandoned:
            self._begin_drain(math.inf)
        with self._lock:
            now = self._clock()
            due = math.inf if self._batcher.deadline is None else self._batcher.deadline
            if self._state is EngineState.DRAINING:
                if self._batcher.is_answered or self._drain_deadline <= now:
                    return None
                due = min(due, self._drain_deadline)
            return max(0.0, due - now)

    def _handle(self, events: list[WorkerEvent]) -> float | None:
        """Apply what happened, send, answer; returns what ``_time_to_wait`` does.

        Answering is last, with nothing between it and the next wait: a caller who is woken needs
        the interpreter lock, which this thread gives up when it waits.
        """
        calls: list[Call] = []
        try:
            with self._lock:
                now = self._clock()
                for event in events:
                    actions = self._applied(event, now)
                    self._unsent += actions.batches
                    calls += actions.calls
                if self._batcher.deadline is not None and self._batcher.deadline <= now:
                    self._unsent += self._batcher.time_passed(now).batches
            if self._unsent:
                self._send()
            for event in events:
                self._log(event)
            return self._time_to_wait()
        finally:  # they are over, so nobody else would answer them
            for call in calls:
                self._answer(call)

    def _applied(self, event: WorkerEvent, now: float) -> Actions:
        match event:
            case BatchDone(slot, batch_id, outputs, failures, duration):
                return self._batcher.batch_done(slot, batch_id, outputs, failures, duration, now)
            case BatchFailed(slot, batch_id, failure):
                return self._batcher.batch_failed(slot, batch_id, failure, now)
            case WorkerReady(slot):
                actions = self._batcher.worker_ready(slot, now)
                self._notice_workers(None)
                return actions
            case WorkerLost(slot, failure, has_started):
                broken = failure
                if has_started:
                    error = StreamerBroken("no worker is left: the last one was lost")
                    error.__cause__ = failure.exception()
                    broken = Failure(error)
                elif self._start_failure is None:
                    self._start_failure = failure
                actions = self._batcher.worker_lost(slot, failure, broken, now)
                self._notice_workers(broken)
                return actions

    def _notice_workers(self, broken: Failure | None) -> None:
        """Bring the state in line with the workers'. Under the lock.

        Args:
            broken: what calls are refused with if no worker is left.
        """
        if self._state in (EngineState.STARTING, EngineState.RUNNING):
            if self._batcher.is_broken:
                self._state = EngineState.BROKEN
                self._refusal = broken
            elif not self._batcher.is_starting:
                self._state = EngineState.RUNNING
            self._changed.notify_all()

    def _shut_down(self, reason: Failure) -> None:
        with self._changed:
            self._state = EngineState.CLOSED
            if self._refusal is None:
                self._refusal = reason
            is_idle = self._batcher.is_empty and not self._batcher.is_starting
            calls = self._batcher.fail_all(reason)
            self._changed.notify_all()
        for call in calls:
            self._answer(call)
        self._transport.close(_STOP_GRACE if is_idle else _ABORT_GRACE)
        self._at_exit.cancel()
        logger.info("streamer closed, %d calls cut off", len(calls))

    # -- doing

    def _send(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                batch = unsent.popleft()
            except IndexError:  # another thread was faster
                return
            payloads, batch.payloads = batch.payloads, []
            self._transport.send(batch.slot, batch.id, payloads)

    def _answer(self, call: Call) -> None:
        reply: Reply = call.reply
        try:
            if call.failure is None:
                reply.complete(call.outputs)
            else:
                failure: Failure = call.failure
                reply.fail(failure.exception())
        except BaseException:
            # A callback of a user's may raise anything, SystemExit too. Others wait for their
            # answers, and this thread does not end for it.
            logger.exception("a callback of a future raised")

    def _log(self, event: WorkerEvent) -> None:
        if type(event) is BatchDone:
            return
        with contextlib.suppress(Exception):  # of a filter or handler of a user's
            self._log_lifecycle(event)

    def _log_lifecycle(self, event: WorkerEvent) -> None:
        match event:
            case WorkerReady(slot):
                logger.info("worker %d is ready", slot)
            case WorkerLost(_, failure, _):
                text = summary(failure.exception())
                if text != self._last_loss:  # often all workers fail for the one same reason
                    logger.error("%s", text)
                self._last_loss = text
            case BatchFailed(slot, batch_id, failure) if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "batch %d failed on worker %d: %s", batch_id, slot, summary(failure.exception())
                )
