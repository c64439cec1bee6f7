"""What callers call: accepts their calls in any thread, and answers each exactly once.

     caller threads                 engine                                   workers
     --------------                 ------                                   -------
     submit(call)
       encode                       (no lock: pickling runs user code)
       ├─ lock ── batcher: call_submitted ── unlock
       └─ transport.send ─────────────────────────── BatchMessage ─────────▶ one per batch
     wait for the reply

                                    loop thread: see loop.py
     ◀──────────────────────────────┘ decode, in the caller's thread again

``loop.py`` has the state that the lock guards, ``fleet.py`` the states by name.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..batching.batcher import NOTHING
from ..errors import (
    Overloaded,
    PredictTimeout,
    StreamerError,
    StreamerForked,
    TooLate,
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
from ..observe.record import BatchRecord, Call
from ..options.checks import Workers, worker_range
from ..supervision.supervisor import Overlap
from ..workers.protocol import HOLD, RESUME, Failure
from . import threads
from .backend import IN_CALLBACK
from .fleet import EngineState
from .fleet import Fleet as Fleet  # beside what it is given to
from .loop import ABORT_GRACE, WOKEN, Loop
from .threads import is_owned

S = TypeVar("S")
T = TypeVar("T")


class Engine(Loop):
    """Accepts calls from any thread and answers each exactly once. Built as a ``Loop``."""

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

    # -- calls

    def submit(self, call: Call) -> None:
        """See ``Backend``. Also raises what the function raises that gives the lengths."""
        if threads.known_pid != self._pid or self.fleet.refusal is not None:
            self.check_process()
            self._check_accepting()
        timeout, size = call.timeout, call.size
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("the call had no time left when it was made")
        if not size:
            call.reply.end([])
            return
        if self.batcher.max_pending != math.inf:
            self.check_room(size)  # a refusal needs no encoding
        if self.lengths is not None:
            call.lengths = self.lengths(call.payloads)
        try:
            call.payloads = self.transport.encode(call.payloads)
        except StreamerError as error:
            call.reply.end(Failure(error.with_traceback(None)))  # its frames hold the items
            return
        if self.on_call is not None:
            self.on_call(call)
        refusal = self._change(self._accept, call)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # a cycle with its traceback, which would keep the items

    def _change(self, change: Callable[[S], T], subject: S) -> T:
        """Let it change the state, with the lock held; then send what it has queued.

        An exception comes from a handler of a signal, or since no memory is left: between any two
        lines. What it cuts off halfway is mended by whoever takes the lock next.
        """
        try:
            with self.lock:
                try:
                    if self.is_torn or self.left:
                        self.settle()
                    result = change(subject)
                    is_early = False
                    if self.waits_until is not WOKEN and (
                        self.batcher.deadline < self.waits_until
                        or self.undone  # callbacks of others: not in this thread
                        # Perhaps there are too few workers.
                        or (not self.fleet.scaling.is_watching and self.batcher.pending_items > 0)
                    ):  # the loop would look too late by itself; to wake it once is enough
                        self.waits_until = WOKEN
                        is_early = True
                except BaseException:
                    self.is_torn = True  # before another thread takes the lock
                    raise
            if self.unsent:
                self.send()
            if is_early:
                self.transport.wakeup()
        except BaseException:
            self.is_torn = True
            self.let_others_send()
            self.transport.wakeup()
            raise
        return result

    def _accept(self, call: Call) -> BaseException | None:
        """Let the batcher have a call, or return why not. Locked."""
        batcher = self.batcher
        if self.fleet.refusal is not None:
            return self.fleet.refusal.exception()
        if batcher.max_pending != math.inf and not batcher.has_room_for(call.size):
            return self._overloaded(call.size)
        now = self.clock()
        timeout = call.timeout
        if timeout is not None:
            call.deadline = now + timeout
            # Of one item without a length it is known only under overload.
            is_usual = call.size == 1 and call.lengths is None and not batcher.is_behind
            takes = 0.0 if is_usual else batcher.hopeless_for(call, now)
            if takes:
                return TooLate(
                    f"this call would take {takes:.3g} s at the least, with {batcher.queue.items} "
                    f"items waiting, and its timeout is {timeout:.3g} s; send less at once, or try "
                    "again later"
                )
        call.reply.call = call  # not before it is accepted: who holds a call may withdraw it
        self.open_calls[call] = None
        actions = batcher.call_submitted(call, now)
        if actions is not NOTHING:
            self.take_up(actions)
        return None

    def check_room(self, size: int = 1) -> None:
        """Raises Overloaded if so many items would not be accepted now."""
        batcher = self.batcher
        if batcher.has_room_for(size):  # a look without the lock
            return
        self.check_process()  # before the lock, which a fork may have copied while held
        self.flush()  # what has come together may go to workers that are free
        with self.lock:
            if not batcher.has_room_for(size):
                raise self._overloaded(size)

    def _overloaded(self, size: int) -> Overloaded:
        """Count a call of so many items as refused; what its caller gets. Locked."""
        batcher = self.batcher
        batcher.figures.rejected_calls += 1
        if size > batcher.max_pending:
            return Overloaded(
                f"the call has {size} items, more than max_pending of {batcher.max_pending} ever "
                "lets wait; send fewer at once"
            )
        batcher.figures.refused_items += size  # a shorter queue would have had room for them
        return Overloaded(
            f"{batcher.queue.counted} items wait, and {size} more would be beyond max_pending of "
            f"{batcher.max_pending}; try again later"
        )

    def flush(self) -> None:
        self._change(
            lambda batcher: self.take_up(batcher.calls_submitted(self.clock())), self.batcher
        )

    def cancel(self, call: Call) -> bool:
        """Withdraw a call of which nothing has been sent; whether that was so."""
        self.check_process()
        return self._change(lambda call: not call.is_running and self.let_go((call, False)), call)

    def withdraw(self, call: Call, *, has_expired: bool = False) -> None:
        self.check_process()
        if is_owned(self.lock):  # a finalizer interrupts this thread in the middle of a change
            self.left.append((call, has_expired))
            self.transport.wakeup()
        else:  # at once, so that a stream's place is free before the next step
            self._change(self.let_go, (call, has_expired))

    def extend(self, call: Call, deadline: float) -> bool:
        with self.lock:
            call.deadline = max(call.deadline, deadline)
            return not call.is_over

    def hold(self, call: Call, *, is_held: bool) -> None:
        """Let the model of steps take no step with the call's item for a while, or again."""

        def hold(call: Call) -> None:
            steps = self.batcher.steps
            if steps is None or (is_held and self.fleet.state is EngineState.DRAINING):
                return  # the consumer may be who waits for the end of it
            for batch in steps.hold(call, self.clock(), is_held=is_held):
                self.unsent.append((batch.slot, HOLD if is_held else RESUME, batch.id))

        self._change(hold, call)

    def late(self, timeout: float | None) -> StreamerError:
        text = f"no result within {timeout} s ({self.describe()})"
        if self.batcher.retries.has_waiting_alone:
            text += "; a worker died, and the search for the item at fault is still running"
        return PredictTimeout(text)

    # -- how it stands

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

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker has loaded its model, or one could not. See ``BaseStreamer``."""
        self.check_process()
        self.check_not_in_callback()
        self._wait_workers(
            lambda: self.fleet.supervisor.is_ready,
            timeout,
            f"not every worker has loaded its model in {timeout} s",
        )

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

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace every worker, one at a time: see ``begin_restart`` and ``wait_restarted``."""
        self.check_not_in_callback()
        self.wait_restarted(self.begin_restart(overlap), timeout)

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

    # -- the end

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
        if threading.get_ident() != self.thread_id and not is_interrupting:
            self.join()

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

    def check_not_in_callback(self) -> None:
        if threading.get_ident() == self.thread_id:
            self.check_process()  # in a fork made by a callback, that copy of the thread is ours
            raise StreamerError(IN_CALLBACK)

    def _check_accepting(self) -> None:
        refusal = self.fleet.refusal
        if refusal is not None:
            raise refusal.exception()
