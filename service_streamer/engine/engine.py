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

``core.py`` has what the lock guards, ``fleet.py`` the states.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..batching.batcher import NOTHING, Actions, Batcher
from ..errors import (
    Overloaded,
    PredictTimeout,
    StreamerError,
    TooLate,
    WorkerStartTimeout,
)
from ..observe.record import BatchRecord, Call
from ..supervision.autoscaling import Autoscaling
from ..supervision.supervisor import Overlap, Supervisor
from ..workers.protocol import HOLD, RESUME, Failure
from ..workers.transport import Transport
from .backend import IN_CALLBACK
from .core import Core, Lengths
from .fleet import EngineState, Fleet
from .loop import ABORT_GRACE, Loop
from .timer import is_owned

T = TypeVar("T")


class Engine(Core):
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
        decode: what ``Reply.complete`` gets, as the model returned it. Raises ModelError. For any
            thread.
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
        fleet = Fleet(batcher, supervisor, scaling, jitter=jitter)
        super().__init__(transport, fleet, lengths, clock)
        self._loop = Loop(self, hang=hang, slow_start=slow_start)
        self._max_pending = max_pending
        self._on_call: Callable[[Call], None] | None = None
        self._on_end: Callable[[], None] = lambda: None
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
        with self.lock:
            self._loop.on_batch = on_batch
            self._on_call = on_call
            self.batcher.on_back = self.came_back

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """Have it called in the engine's thread when a worker is ready or lost, and at the end.

        Now and then also for nothing. It must neither block nor raise.
        """
        self._loop.on_workers = callback

    def late(self, timeout: float | None) -> StreamerError:
        """What to raise when the results were not there within ``timeout`` seconds."""
        text = f"no result within {timeout} s ({self.describe()})"
        if self.batcher.retries.has_waiting_alone:
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
        # A system call each time: uWSGI forks without the hooks by which it could be known before.
        if os.getpid() != self._pid or self.fleet.refusal is not None:
            self.check_process()
            self.check_accepting()
        if not self._is_encoded(call):
            return
        try:
            with self.lock:
                if self.is_torn or self.left:
                    self.settle()
                is_early = self._accept(call, self.clock())
            if is_early or self.unsent:
                self._send(is_early)
        except BaseException as error:
            if isinstance(error, StreamerError) and call not in self.open_calls:  # it was refused
                self._keep_promises()
            else:  # KeyboardInterrupt, what a signal handler raises, no memory: between any lines
                self.is_torn = True
                self._interrupted()
            raise

    def _change(self, change: Callable[[], T]) -> T:
        """Let it change the state, with the lock held. What cuts it off halfway is mended later."""
        try:
            with self.lock:
                self.settle()
                result = change()
        except BaseException:
            self.is_torn = True
            self._interrupted()
            raise
        return result

    def _interrupted(self) -> None:
        """A change was cut off, as by a signal handler that raises: have the loop mend it."""
        for outbox in [*self.outboxes.values()]:
            outbox.release()
        self.transport.wakeup()

    def _keep_promises(self) -> None:
        """Let the loop do what ``submit`` has begun, after an error.

        Batches may be cut and not sent. And ``waits_until`` may say that the loop is woken, so that
        no other thread would do it.
        """
        if self.unsent or self.waits_until == -math.inf:
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
        timeout = call.timeout
        batcher = self.batcher
        if self.fleet.refusal is not None:
            self.check_accepting()
        if self._max_pending is not None:
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
        self.open_calls[call] = None
        actions = batcher.call_submitted(call, now)
        return self._is_early(actions)

    def check_room(self, size: int = 1) -> None:
        """Raises Overloaded if so many items would not be accepted now."""
        if self._max_pending is not None and not self.batcher.has_room_for(size):
            self.check_process()  # before the lock, as above
            self.flush()  # what has come together may go to workers that are free
            with self.lock:  # a look without it is free
                self.settle()
                self._check_room(size)

    def flush(self) -> None:
        """All the calls have been submitted that were said to follow: have them sent."""
        self._send(self._change(lambda: self._is_early(self.batcher.calls_submitted(self.clock()))))

    def _send(self, is_early: bool) -> None:
        """Send what was cut, and let the loop look early if it has to."""
        try:
            if self.unsent:
                self.send()
            if is_early:
                self.transport.wakeup()
        except BaseException:  # as in ``submit``
            self.is_torn = True
            self._interrupted()
            raise

    def _is_early(self, actions: Actions) -> bool:
        """Take up what is to be done; whether the loop has to look before it would. Locked."""
        is_early = self.batcher.deadline < self.waits_until
        if not self.fleet.scaling.is_watching and self.waits_until > -math.inf:
            is_early |= self.batcher.pending_items > 0  # perhaps there are too few workers
        if actions is not NOTHING:
            self.queue(actions.batches)
            if (
                actions.calls or actions.searches or actions.condemned
            ):  # callbacks of others: not in this thread
                self.undone.append(actions)
                is_early = True
        if is_early:
            self.waits_until = -math.inf  # once is enough
        return is_early

    def cancel(self, call: Call) -> bool:
        """Withdraw a call of which nothing has been sent; whether that was so."""
        return self._withdraw(self.batcher.call_cancelled, call)

    def withdraw(self, call: Call) -> None:
        """The caller has gone: drop what has not been sent, forget the rest."""
        if is_owned(self.lock):  # a finalizer interrupts this thread in the middle of a change
            self.check_process()
            self.left.append(call)
            self.transport.wakeup()
        else:  # at once, so that a stream's place is free before the next step
            self._withdraw(self.batcher.call_withdrawn, call)

    def expire(self, call: Call) -> None:
        """The same, because the call's time has ended."""
        self._withdraw(self.batcher.call_expired, call)

    def extend(self, call: Call, deadline: float) -> bool:
        """Somebody waits for the call until ``deadline`` of the clock; False if it is over."""
        with self.lock:
            call.deadline = max(call.deadline, deadline)
            return not call.is_over

    def hold(self, call: Call, *, is_held: bool) -> None:
        """Let the model of steps take no step with the call's item for a while, or again."""

        def tell() -> None:
            if is_held and self.fleet.state is EngineState.DRAINING:
                return  # the consumer may be who waits for the end of it
            what = HOLD if is_held else RESUME
            steps = self.batcher.steps
            if steps is not None:
                for batch in steps.hold(call, self.clock(), is_held=is_held):
                    self.tell(batch.slot, what, batch.id)

        self._change(tell)
        self._send(is_early=False)

    def _withdraw(self, how: Callable[[Call], bool], call: Call) -> bool:
        self.check_process()

        def withdraw() -> bool:
            is_withdrawn = how(call)
            if is_withdrawn:
                self.forget(call)
            return is_withdrawn

        is_withdrawn = self._change(withdraw)
        self._send(is_early=False)
        if self.fleet.state is EngineState.DRAINING:
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
        fleet = self.fleet
        supervisor = fleet.supervisor
        with self.lock:
            in_time = self.changed.wait_for(
                lambda: supervisor.failed or supervisor.is_ready or self.is_over, timeout
            )
            if supervisor.failed and fleet.failure is not None:
                raise fleet.failure.exception()
            self.check_accepting()
            if not in_time:
                raise WorkerStartTimeout(f"not every worker has loaded its model in {timeout} s")

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace every worker, one at a time: see ``begin_restart`` and ``wait_restarted``."""
        self.check_not_in_callback()
        self.wait_restarted(self.begin_restart(overlap), timeout)

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
        # A signal handler may run while this thread holds the lock, which the loop needs to end.
        is_ours = threading.current_thread() is self._loop.thread
        if not is_ours and not is_owned(self.lock):
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
        self.is_exiting = True
        with contextlib.suppress(KeyboardInterrupt):
            self.close(drain=False, timeout=None)

    # -- refusals

    def check_not_in_callback(self) -> None:
        """Refuse to block the loop thread: it would wait for itself."""
        thread = self._loop.thread  # whose number another one has when it has ended
        if threading.get_ident() == thread.ident and threading.current_thread() is thread:
            self.check_process()  # in a fork made by a callback, that copy of the thread is ours
            raise StreamerError(IN_CALLBACK)

    def _check_room(self, size: int) -> None:
        batcher = self.batcher
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
