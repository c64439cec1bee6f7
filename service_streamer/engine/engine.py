"""What callers call: accepts their calls in any thread, and answers each exactly once.

     caller threads                 engine, core                             workers
     --------------                 ------------                             -------
     submit(call)
       encode                       (no lock: pickling runs user code)
       ├─ lock ── batcher: call_submitted ── unlock
       └─ transport.send ─────────────────────────── BatchMessage ─────────▶ one per batch
     wait for the reply

                                    loop thread: see loop.py
     ◀──────────────────────────────┘ decode, in the caller's thread again

``core.py`` has the states, and what the lock guards.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..batching.batcher import NOTHING, Actions, Batcher
from ..errors import (
    Overloaded,
    PredictTimeout,
    StreamerError,
    StreamerForked,
    TooLate,
    WorkerStartTimeout,
)
from ..observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from ..observe.recent import Summary, summarize
from ..observe.record import BatchRecord, Call
from ..options.checks import Workers, worker_range
from ..supervision.autoscaling import Autoscaling
from ..supervision.supervisor import Overlap, Supervisor
from ..workers.protocol import HOLD, RESUME, Failure
from ..workers.transport import Transport
from .backend import IN_CALLBACK
from .core import Core, EngineState
from .loop import ABORT_GRACE, Loop, send
from .timer import is_owned

T = TypeVar("T")

#: What items cost, in any unit. Raises what the user's function raises, or ValueError.
Lengths = Callable[[Sequence[Any]], list[float]]


class Engine:
    """Accepts calls from any thread and answers each exactly once.

    Args:
        transport: not started yet; the engine starts, owns and closes it.
        batcher: new.
        supervisor: new; wants as many workers as there are to be at first.
        scaling: decides how many there are to be later; None if that is no matter of the load.
        max_pending: the bound of the batcher, for messages and for a look before the encoding.
        hang: what a worker is said to have been killed for whose batch took too long; "{:g}" stands
            for how long. Where workers are not ended for that, why.
        slow_start: the same for one that took too long to be ready.
        lengths: of items, as calls have them; None if each counts one.
        clock: seconds from a monotonic clock.
        jitter: random numbers from 0 to 1.

    Attributes:
        core: its state; see there for what needs its lock.
        transport: as given.
    """

    def __init__(
        self,
        transport: Transport,
        batcher: Batcher,
        supervisor: Supervisor,
        *,
        scaling: Autoscaling | None = None,
        max_pending: int | None = None,
        hang: str = "its batch took too long",
        slow_start: str = "loading its model took too long",
        lengths: Lengths | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.transport = transport
        self.core = Core(batcher, supervisor, scaling=scaling, clock=clock, jitter=jitter)
        self._loop = Loop(self.core, transport, hang=hang, slow_start=slow_start)
        self._max_pending = max_pending
        self.lengths = lengths
        self._pid = os.getpid()
        self._on_call: Callable[[Call], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
        #: What ``Reply.complete`` gets, as the model returned it. Raises ModelError. Any thread.
        self.decode = transport.decode

    def start(self) -> None:
        """Start the workers and the loop; does not wait for them."""
        try:
            self._loop.start()
        except BaseException:
            self.transport.close(ABORT_GRACE)
            raise
        cancel = self.transport.when_exiting(self._close_at_exit)

        def ended() -> None:
            cancel()
            self._on_end()

        self._loop.on_end = ended

    @property
    def thread(self) -> threading.Thread:
        """Runs the loop, and logs what becomes of the workers."""
        return self._loop.thread

    def when_answered(self, callback: Callable[[], None]) -> None:
        """Have it called in the engine's thread whenever replies were called, also with outputs.

        Not after each of them: after all that came back at a time. It must neither block nor raise.
        """
        self._loop.on_answered = callback

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have it called when the engine ends, in its thread; at once if it has ended already.

        It must not raise, and may be called twice.
        """
        self._on_end = callback
        if self._loop.has_ended:
            callback()

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

        Raises:
            StreamerForked: in a forked child.
        """
        self.check_process()  # before the lock, which a fork may have copied while held
        with self.core.lock:
            self._loop.on_batch = on_batch
            self._on_call = on_call
            self.core.watch()

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """Have it called in the engine's thread when a worker is ready or lost, and at the end.

        Now and then also for nothing. It must neither block nor raise.
        """
        self._loop.on_workers = callback

    # -- how it stands

    def model_description(self) -> Mapping[str, Any] | None:
        """What the model says of itself; empty if nothing, None while no worker has loaded it.

        Raises:
            WorkerStartError, StreamerBroken, StreamerClosed: no worker will load it.
            StreamerForked: in a forked child.
        """
        self.check_process()  # before the lock, which a fork may have copied while held
        core = self.core
        with core.lock:
            if core.description is None:
                self._check_accepting()
            return core.description

    @property
    def has_steps(self) -> bool:
        """Whether the model is known to be one of steps: not before a worker has loaded it."""
        return self.core.batcher.has_steps

    @property
    def resumes(self) -> bool:
        """Whether such a model can go on with an item that has begun elsewhere."""
        steps = self.core.batcher.steps
        return steps is not None and steps.resumes

    @property
    def state(self) -> EngineState:
        return self.core.state

    def stats(self) -> StreamerStats:
        self.check_process()
        with self.core.lock:
            return self.core.stats()

    def metrics(self) -> BatchMetrics:
        """A copy of them as they are now."""
        self.check_process()
        with self.core.lock:
            return self.core.batcher.figures.metrics.copy()

    def summary(self) -> Summary:
        """The recent batches and the state of the engine, for ``explain``."""
        self.check_process()
        core = self.core
        with core.lock:
            now, stats = core.clock(), core.stats()
            figures, steps = core.batcher.figures, core.batcher.steps
            recent, restarted_at = [*figures.recent], [*core.restarted_at]
            line = core.batcher.policy.cost.line
            of_steps = None if steps is None else steps.log.summary(len(core.batcher.slots))
        return summarize(
            recent,
            stats,
            now,
            restarted_at=restarted_at,
            line=line,
            has_lengths=self.lengths is not None,
            steps=of_steps,
        )

    def workers(self) -> list[WorkerStats]:
        """Each worker, by number."""
        self.check_process()
        with self.core.lock:
            return self.core.workers(self.transport.device)

    def describe(self) -> str:
        """The state in one line, for a ``repr``."""
        if os.getpid() != self._pid:
            return f"of process {self._pid}"
        return self.stats().gist

    def late(self, timeout: float | None) -> StreamerError:
        """What to raise when the results were not there within ``timeout`` seconds."""
        text = f"no result within {timeout} s ({self.describe()})"
        if self.core.batcher.retries.has_waiting_alone:
            text += "; a worker died, and the search for the item at fault is still running"
        return PredictTimeout(text)

    # -- calls

    def submit(self, call: Call) -> None:
        """Accept a call of any number of items. What is not sent in its time is never computed.

        Raises:
            StreamerError: it was not accepted: the streamer is closed, broken, overloaded, or of
                another process, or the call has no time left, or too little; its reply is not
                called.
            Exception: of the function that gives the lengths; as above.
        """
        core = self.core
        # A system call each time: uWSGI forks without the hooks by which it could be known before.
        if os.getpid() != self._pid or core.refusal is not None:
            self.check_process()
            self._check_accepting()
        if not self._is_encoded(call):
            return
        try:
            with core.lock:
                if core.is_torn or core.left:
                    core.settle()
                is_early = self._accept(call, core.clock())
            if is_early or core.unsent:
                self._send(is_early)
        except BaseException as error:
            if isinstance(error, StreamerError) and call not in core.open:  # it was refused
                self._keep_promises()
            else:  # KeyboardInterrupt, what a signal handler raises, no memory: between any lines
                core.is_torn = True
                self._interrupted()
            raise

    def submit_all(self, calls: Sequence[Call]) -> list[tuple[Call, Exception]]:
        """Accept calls that have come together, for less than ``submit`` of each costs.

        Those that wait for others to follow are sent by ``flush``.

        Returns:
            Those that were not accepted, with what ``submit`` would have raised.

        Raises:
            StreamerForked: in a forked child.
        """
        core = self.core
        self.check_process()
        refused: list[tuple[Call, Exception]] = []
        encoded: list[Call] = []
        for call in calls:
            try:
                if core.refusal is not None:
                    self._check_accepting()
                if self._is_encoded(call):
                    encoded.append(call)
            except Exception as error:
                refused.append((call, error))

        def accept_all() -> bool:
            now, is_early = core.clock(), False
            for call in encoded:
                try:
                    is_early |= self._accept(call, now)
                except Exception as error:
                    if call in core.open or not isinstance(error, StreamerError):
                        core.open.pop(call, None)  # not refused: as if the call had not come
                        core.is_torn = True
                        core.settle()
                    refused.append((call, error))
            return is_early

        self._send(self._change(accept_all))
        if refused:
            self._keep_promises()
        return refused

    def _change(self, change: Callable[[], T]) -> T:
        """Let it change the state, with the lock held. What cuts it off halfway is mended later."""
        core = self.core
        try:
            with core.lock:
                core.settle()
                result = change()
        except BaseException:
            core.is_torn = True
            self._interrupted()
            raise
        return result

    def _interrupted(self) -> None:
        """A change was cut off, as by a signal handler that raises: have the loop mend it."""
        for outbox in [*self.core.outboxes.values()]:
            outbox.release()
        self.transport.wakeup()

    def _keep_promises(self) -> None:
        """Let the loop do what ``submit`` has begun, after an error.

        Batches may be cut and not sent. And ``waits_until`` may say that the loop is woken, so that
        no other thread would do it.
        """
        core = self.core
        if core.unsent or core.waits_until == -math.inf:
            self.transport.wakeup()

    def _is_encoded(self, call: Call) -> bool:
        """Prepare a call without the lock; False if it is over. Raises what ``submit`` does."""
        timeout = call.timeout
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("the call had no time left when it was made")
        size = call.size
        if not size:
            call.reply.complete([])
            return False
        if self._max_pending is not None:
            self.check_room(size)  # a refusal needs no encoding
        if self.lengths is not None:
            call.lengths = self.lengths(call.payloads)
        try:
            call.payloads = self.transport.encode(call.payloads)
        except StreamerError as error:
            self._cannot_travel(call, error)
            return False
        if self._on_call is not None:
            self._on_call(call)
        return True

    def _cannot_travel(self, call: Call, error: StreamerError) -> None:
        call.reply.fail(Failure(error.with_traceback(None)))  # its frames hold the items

    def _accept(self, call: Call, now: float) -> bool:
        """Let the batcher have a call; whether the loop has to look early. Locked.

        Raises:
            StreamerError: see ``submit``.
        """
        core, timeout = self.core, call.timeout
        batcher = core.batcher
        is_early = False
        if core.refusal is not None:
            self._check_accepting()
        if self._max_pending is not None:
            if not batcher.has_room_for(call.size):  # after those that have come with it
                is_early = self._is_early(batcher.calls_submitted(now))
            self._check_room(call.size)
        if timeout is not None:
            call.deadline = now + timeout
            # Of one item without a length it is known only under overload.
            is_usual = call.size == 1 and call.lengths is None and not batcher.is_behind
            takes = 0.0 if is_usual else batcher.hopeless_for(call, now)
            if takes:
                raise TooLate(
                    f"this call would take {takes:.3g} s at the least, with {batcher.queue.items} "
                    f"items waiting, and its timeout is {timeout:.3g} s; send less at once, or try "
                    "again later"
                )
        call.reply.call = call  # not before it is accepted: who holds a call may withdraw it
        core.open[call] = None
        actions = batcher.call_submitted(call, now)
        return self._is_early(actions) or is_early

    def check_room(self, size: int = 1) -> None:
        """Raises Overloaded if so many items would not be accepted now."""
        if self._max_pending is not None and not self.core.batcher.has_room_for(size):
            self.check_process()  # before the lock, as above
            self.flush()  # what has come together may go to workers that are free
            with self.core.lock:  # a look without it is free
                self.core.settle()
                self._check_room(size)

    def flush(self) -> None:
        """All the calls have been submitted that were said to follow: have them sent."""
        core = self.core
        self._send(self._change(lambda: self._is_early(core.batcher.calls_submitted(core.clock()))))

    def _send(self, is_early: bool) -> None:
        """Send what was cut, and let the loop look early if it has to."""
        core = self.core
        try:
            if core.unsent:
                send(core, self.transport)
            if is_early:
                self.transport.wakeup()
        except BaseException:  # as in ``submit``
            core.is_torn = True
            self._interrupted()
            raise

    def _is_early(self, actions: Actions) -> bool:
        """Take up what is to be done; whether the loop has to look before it would. Locked."""
        core = self.core
        is_early = core.batcher.deadline < core.waits_until
        if not core.scaling.is_watching and core.waits_until > -math.inf:
            is_early |= core.batcher.pending_items > 0  # perhaps there are too few workers
        if actions is not NOTHING:
            core.queue(actions.batches)
            if (
                actions.calls or actions.searches or actions.condemned
            ):  # callbacks of others: not in this thread
                core.undone.append(actions)
                is_early = True
        if is_early:
            core.waits_until = -math.inf  # once is enough
        return is_early

    def cancel(self, call: Call) -> bool:
        """Withdraw a call of which nothing has been sent; whether that was so."""
        return self._withdraw(self.core.batcher.call_cancelled, call)

    def withdraw(self, call: Call) -> None:
        """The caller has gone: drop what has not been sent, forget the rest."""
        core = self.core
        if is_owned(core.lock):  # a finalizer interrupts this thread in the middle of a change
            self.check_process()
            core.left.append(call)
            self.transport.wakeup()
        else:  # at once, so that a stream's place is free before the next step
            self._withdraw(core.batcher.call_withdrawn, call)

    def expire(self, call: Call) -> None:
        """The same, because the call's time has ended."""
        self._withdraw(self.core.batcher.call_expired, call)

    def extend(self, call: Call, deadline: float) -> bool:
        """Somebody waits for the call until ``deadline`` of the clock; False if it is over."""
        with self.core.lock:
            call.deadline = max(call.deadline, deadline)
            return not call.is_over

    def hold(self, call: Call, *, is_held: bool) -> None:
        """Let the model of steps take no step with the call's item for a while, or again."""
        core = self.core

        def tell() -> None:
            if is_held and core.state is EngineState.DRAINING:
                return  # the consumer may be who waits for the end of it
            what = HOLD if is_held else RESUME
            steps = core.batcher.steps
            if steps is not None:
                for batch in steps.hold(call, core.clock(), is_held=is_held):
                    core.tell(batch.slot, what, batch.id)

        self._change(tell)
        self._send(is_early=False)

    def _withdraw(self, how: Callable[[Call], bool], call: Call) -> bool:
        self.check_process()
        core = self.core

        def withdraw() -> bool:
            is_withdrawn = how(call)
            if is_withdrawn:
                core.forget(call)
            return is_withdrawn

        is_withdrawn = self._change(withdraw)
        self._send(is_early=False)
        if core.state is EngineState.DRAINING:
            self.transport.wakeup()  # it may have been the last call that the drain waited for
        return is_withdrawn

    # -- workers

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker has loaded its model.

        Raises:
            WorkerStartError, WorkerLost: one could not, and is tried only seldom from now on.
            WorkerStartTimeout: the time ended first; they go on loading.
            StreamerClosed: it was closed meanwhile.
        """
        self.check_process()
        self.check_not_in_callback()
        core = self.core
        with core.lock:
            in_time = core.changed.wait_for(
                lambda: core.supervisor.failed or core.supervisor.is_ready or self._is_over, timeout
            )
            if core.supervisor.failed and core.failure is not None:
                raise core.failure.exception()
            self._check_accepting()
            if not in_time:
                raise WorkerStartTimeout(f"not every worker has loaded its model in {timeout} s")

    @property
    def serving(self) -> int:
        """How many workers take batches."""
        return len(self.core.batcher.slots)

    @property
    def batch_duration(self) -> float:
        """What the model has taken for a batch of late, seconds; infinity before the first."""
        return self.core.batcher.figures.batch_duration

    @property
    def room(self) -> int:
        """The most batches that a worker holds."""
        return self.core.batcher.slots.room

    def wait_serving(self, timeout: float | None) -> int:
        """Block until a worker takes batches; returns how many do, 0 if the time ended first.

        Raises:
            WorkerStartError, StreamerBroken: none will.
            StreamerClosed: it is closed, or was meanwhile.
        """
        core = self.core
        serving = 0 if core.refusal is not None else len(core.batcher.slots)
        if not serving:
            with core.lock:
                core.changed.wait_for(lambda: core.batcher.slots or core.refusal, timeout)
                self._check_accepting()  # also with workers, if the loop has failed
                serving = len(core.batcher.slots)
        return serving

    def try_start_once(self) -> None:
        """Start no worker again that could not load its model, unless another one is ready.

        For an owner that ends if no worker can be started.
        """
        with self.core.lock:
            self.core.supervisor.tries_once = True

    @property
    def can_recover(self) -> bool:
        """Whether it has served, and tries to again where it does not."""
        core = self.core
        return core.supervisor.was_served and not self._is_over

    def wait_recovered(self) -> None:
        """Block while no worker can be started; returns when one is ready, or it is closed."""
        core = self.core
        with core.lock:
            core.changed.wait_for(lambda: core.state is not EngineState.BROKEN)

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace every worker, one at a time: see ``begin_restart`` and ``wait_restarted``."""
        self.check_not_in_callback()
        self.wait_restarted(self.begin_restart(overlap), timeout)

    def begin_restart(self, overlap: Overlap) -> int:
        """Begin to replace every worker; returns the number of this restart.

        Args:
            overlap: whether a new one is ready before the old one ends: see ``Supervisor``.

        Raises:
            StreamerClosed: it is closed.
        """
        self.check_process()
        core = self.core
        with core.lock:
            if self._is_over:
                self._check_accepting()
            core.revive()
            generation = core.supervisor.renew(overlap)
        self.transport.wakeup()
        return generation

    def wait_restarted(self, generation: int, timeout: float | None) -> None:
        """Block until a restart is over.

        Raises:
            WorkerStartError: a new one could not be started; the old ones that are left go on.
            WorkerStartTimeout: the time ended first; the restart goes on.
            StreamerClosed: it was closed meanwhile.
        """
        core = self.core
        with core.lock:
            in_time = core.changed.wait_for(
                lambda: (
                    core.supervisor.aborted >= generation
                    or core.supervisor.failed
                    or core.supervisor.is_renewed(generation)
                    or self._is_over
                ),
                timeout,
            )
            if core.supervisor.aborted >= generation and core.roll_failure is not None:
                raise core.roll_failure.exception()
            if core.supervisor.failed and core.failure is not None:
                raise core.failure.exception()
            self._check_accepting()
            if not in_time:
                raise WorkerStartTimeout(
                    f"not every worker has been replaced in {timeout} s; the restart goes on"
                )

    def scale(self, worker_num: Workers) -> None:
        """Want another number of workers, or other bounds of it; does not wait for them."""
        self.check_process()
        with self.core.lock:
            if self._is_over:
                self._check_accepting()
            self.core.revive()
            self.core.set_bounds(*worker_range(worker_num))
        self.transport.wakeup()

    @property
    def _is_over(self) -> bool:
        return self.core.state in (EngineState.DRAINING, EngineState.CLOSED)

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
        core = self.core
        with core.lock:
            core.begin_drain(math.inf if timeout is None else core.clock() + timeout)
        self.transport.wakeup()
        # A signal handler may run while this thread holds the lock, which the loop needs to end.
        is_ours = threading.current_thread() is self._loop.thread
        if not is_ours and not is_owned(core.lock):
            self._loop.join()

    def abandon(self) -> None:
        """Have the loop drain and close, soon. For a finalizer, which may run under our locks."""
        self._loop.is_abandoned = True
        if os.getpid() == self._pid:
            self.transport.wakeup()

    def _close_at_exit(self) -> None:
        """The interpreter ends: no caller is left."""
        # A KeyboardInterrupt here would only print a traceback. The workers are ending already, and
        # multiprocessing, which runs this, joins them next.
        self.core.is_exiting = True
        with contextlib.suppress(KeyboardInterrupt):
            self.close(drain=False, timeout=None)

    # -- refusals

    def check_not_in_callback(self) -> None:
        """Refuse to block the loop thread: it would wait for itself."""
        thread = self._loop.thread  # whose number another one has when it has ended
        if threading.get_ident() == thread.ident and threading.current_thread() is thread:
            self.check_process()  # in a fork made by a callback, that copy of the thread is ours
            raise StreamerError(IN_CALLBACK)

    def check_process(self) -> None:
        """Refuse use in a forked child."""
        if os.getpid() != self._pid:
            raise StreamerForked(
                f"this streamer was built in process {self._pid} and came to process {os.getpid()} "
                "by fork, where its workers do not answer; build it after the fork "
                "(gunicorn: without --preload, or in post_fork; uWSGI: with lazy-apps)"
            )

    def _check_accepting(self) -> None:
        refusal = self.core.refusal
        if refusal is not None:
            raise refusal.exception()

    def _check_room(self, size: int) -> None:
        batcher = self.core.batcher
        if not batcher.has_room_for(size):
            batcher.figures.rejected_calls += 1
            if size > (self._max_pending or 0):
                raise Overloaded(
                    f"the call has {size} items, more than max_pending of {self._max_pending} ever "
                    "lets wait; send fewer at once"
                )
            batcher.figures.refused_items += size  # a shorter queue would have had room for them
            raise Overloaded(
                f"{batcher.queue.counted} items wait, and {size} more would be beyond max_pending "
                f"of {self._max_pending}; try again later"
            )
