"""What an engine's lock guards: the calls, what is on its way to workers, and how all that stands.

The lock is held for a few microseconds only: no I/O, no pickling, no logging, no code of users and
no completing of futures happens under it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batching.batcher import Actions, Batcher
from ..errors import StreamerClosed, StreamerForked, WorkerStartTimeout
from ..observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from ..observe.recent import Summary, summarize
from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..options.checks import Workers, worker_range
from ..reporting import counted
from ..supervision.supervisor import Overlap
from ..workers.protocol import DROP, RESUME, Failure, WorkerReady
from ..workers.transport import Transport, WorkerDied, WorkerEvent
from .fleet import EngineState, Fleet, FleetEvent, Orders

logger = logging.getLogger(__name__)

#: What items cost, in any unit. Raises what the user's function raises, or ValueError.
Lengths = Callable[[Sequence[Any]], list[float]]


class WorkerOutbox:
    """What is on its way to one worker, which gets it in this order.

    A thread that has found the outbox in ``Core.unsent`` sends all that it finds there, also what
    another thread has put in: so it overtakes no thread that was stopped on its way here.

    Attributes:
        messages: batches, and what the worker is to be told of one: what, and its id. One is taken
            out when the transport has it, and not before: a signal handler may raise in between.
        lock: held from the look at one until it is taken out. Reentrant, as ``Core.lock``.
    """

    __slots__ = ("_is_locked_here", "_slot", "lock", "messages")

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self.lock = threading.RLock()
        self._is_locked_here: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.messages: collections.deque[BatchRecord | tuple[int, int]] = collections.deque()

    def send(self, transport: Transport, batcher: Batcher) -> list[BatchRecord]:
        """Send everything; the batches that were sent. For any thread, without the engine's lock.

        Args:
            batcher: which has cut the batches.
        """
        sent: list[BatchRecord] = []
        if self._is_locked_here():  # a signal handler has interrupted this thread, which goes on
            return sent
        # No thread waits for the lock: what is added while another one holds it that one sends,
        # since it looks again when it has released it.
        while self.messages and self.lock.acquire(blocking=False):
            try:
                while self.messages:
                    message = self.messages[0]
                    self._send(message, transport, batcher)
                    self.messages.popleft()
                    if isinstance(message, BatchRecord):
                        message.payloads = []
                        sent.append(message)
            finally:
                self.release()
        return sent

    def release(self) -> None:
        """Let others send, if this thread holds the lock: perhaps a signal handler has raised."""
        if self._is_locked_here():
            self.lock.release()

    def _send(
        self, message: BatchRecord | tuple[int, int], transport: Transport, batcher: Batcher
    ) -> None:
        if isinstance(message, tuple):
            transport.tell(self._slot, *message)
        elif batcher.has_steps and message.spans and message.spans[0][0].is_stream:
            transport.send(self._slot, message.id, message.payloads, is_stream=True)
        elif message.calls > 1 and batcher.isolates_errors:
            calls = message.items_by_call()
            transport.send(self._slot, message.id, message.payloads, calls=calls)
        else:
            transport.send(self._slot, message.id, message.payloads)


class Core:
    """The state of an engine, and what its owner asks about it.

    Call the methods up to ``came_back`` with ``lock`` held, unless they say otherwise. The others
    are for any thread, without it.

    Args:
        lengths: of items, as calls have them; None if each counts one.
        clock: seconds from a monotonic clock.

    Attributes:
        unsent: outboxes into which something was put. Whoever comes by sends what is there, so that
            nothing is left behind by a thread that was interrupted in between.
        outboxes: by slot.
        open_calls: those that are accepted and not answered, in the order of their arrival. What
            they need and what workers hold is the truth from which ``settle`` derives the rest.
        is_torn: whether an exception has ended a change in a caller's thread halfway, as a signal
            handler may raise one anywhere. Whoever takes the lock next calls ``settle``.
        left: calls whose callers have gone while their thread held the lock. A finalizer may say so
            at any line: then it only appends, and wakes the loop.
        undone: what a caller's call made necessary and the loop is to do.
        records: of batches, if somebody watches: the loop hands them out and releases them.
        waits_until: until when the loop waits, if nothing happens.
        is_exiting: whether the interpreter ends.
    """

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        lengths: Lengths | None,
        clock: Callable[[], float],
    ) -> None:
        self.transport = transport
        self.lengths = lengths
        self._pid = os.getpid()
        # Reentrant, since a signal handler that closes may run while we hold it.
        self.lock = threading.RLock()
        # The state, or that of a worker. Take ``lock`` itself to wait: a signal handler that raises
        # within ``Condition.__enter__``, which is Python, would leave it locked for ever.
        self.changed = threading.Condition(self.lock)
        self.fleet = fleet
        self.batcher = fleet.batcher
        self.clock = clock
        self.unsent: collections.deque[WorkerOutbox] = collections.deque()
        self.outboxes: dict[int, WorkerOutbox] = {}
        self.open_calls: dict[Call, None] = {}  # an ordered set
        self.is_torn = False
        self.left: collections.deque[Call] = collections.deque()
        self.undone: list[Actions] = []
        self.records: list[BatchRecord] = []
        self.drain_deadline = math.inf
        self.waits_until = math.inf
        self.is_exiting = False

    def queue(self, batches: Sequence[BatchRecord]) -> None:
        """Have batches sent that were just cut: of each worker in this order."""
        for batch in batches:
            self._put(batch.slot, batch)

    def tell(self, slot: int, what: int, batch_id: int) -> None:
        """Have a worker told something about a batch."""
        self._put(slot, (what, batch_id))

    def _put(self, slot: int, message: BatchRecord | tuple[int, int]) -> None:
        outbox = self.outboxes.get(slot)
        if outbox is None:
            outbox = self.outboxes[slot] = WorkerOutbox(slot)
        outbox.messages.append(message)
        self.unsent.append(outbox)

    def send(self) -> None:
        """Send what is in the outboxes. For any thread, without the lock."""
        unsent = self.unsent
        while unsent:
            try:
                outbox = unsent.popleft()
            except IndexError:  # another thread was faster
                break
            sent = outbox.send(self.transport, self.batcher)
            if logger.isEnabledFor(logging.DEBUG):
                for batch in sent:
                    size = counted(batch.size, "item")
                    log(logging.DEBUG, "batch %d has %s: %s", batch.id, size, batch.reason.value)

    def settle(self) -> None:
        """Call it first whenever the lock was taken: apply what could not be when it happened."""
        if self.is_torn:
            self._mend()
        if not self.left:
            return
        self.is_torn = True  # until this is done: a signal handler may raise in between
        while self.left:
            call = self.left[0]
            if self.batcher.call_withdrawn(call):
                self.forget(call)
            self.left.popleft()
        self.is_torn = False

    def _mend(self) -> None:
        """A change was left halfway: derive the state anew, so that nothing is lost by that."""
        calls = [*self.open_calls]  # at once: the loop forgets some without the lock
        self.batcher.rebuild([call for call in calls if not call.is_over], self.clock())
        self._list_unsent()
        ended = _to_answer(calls)
        for call in calls:
            if call.is_over and call not in ended:
                self.open_calls.pop(call, None)  # its caller has withdrawn it
        self.undone.append(Actions(calls=ended))
        self.waits_until = math.inf
        self.is_torn = False

    def forget(self, call: Call) -> None:
        """No caller waits for the call any more, which is over."""
        call.reply = None
        self.open_calls.pop(call, None)
        self.collect_unwanted()

    def fail_open(self, failure: Failure, events: Sequence[WorkerEvent] = ()) -> list[Call]:
        """End every call that is not over, when the state is in doubt; returns those to answer.

        The state is derived anew. Workers go on with what they hold, for no caller.

        Args:
            events: happened, and may have been applied or not.
        """
        calls = [*self.open_calls]  # at once, as above
        returned = [event for event in events if isinstance(event, BatchReport)]
        unanswered = [call for call in calls if not call.is_over]
        vacant = self.batcher.end_all(unanswered, failure, self.clock(), returned)
        self.undone.append(Actions(vacant=vacant))
        self._list_unsent()
        self.is_torn = False
        return _to_answer(calls)

    def is_news(self, event: WorkerEvent) -> bool:
        """Whether it is not known yet that a worker has become ready, waits, or has died."""
        if isinstance(event, (BatchReport, StepReport)) or event.slot not in self.fleet.supervisor:
            return False
        return not (isinstance(event, WorkerReady) and event.slot in self.batcher.slots)

    def _list_unsent(self) -> None:
        """Have every batch sent that a worker is to have, and may not have been sent."""
        listed = {message for box in self.outboxes.values() for message in [*box.messages]}
        # The others were cut last. One that another thread is done with at this moment may be among
        # them: the transport does not send it again.
        batches = [batch for batch in self.batcher.in_flight() if batch.payloads]
        self.queue([batch for batch in batches if batch not in listed])
        self.unsent.extend([*self.outboxes.values()])

    def begin_drain(self, deadline: float) -> None:
        """Accept nothing any more."""
        fleet = self.fleet
        if fleet.state is not EngineState.CLOSED:
            if fleet.state is not EngineState.DRAINING:
                # Its consumer may be the thread that waits for the end: then no item may rest.
                self._wake(self.clock())
            fleet.begin_drain(Failure(StreamerClosed("the streamer is closed")))
            self.drain_deadline = min(self.drain_deadline, deadline)
            self.changed.notify_all()

    def _wake(self, now: float, slot: int | None = None) -> None:
        """No item of a model of steps is to rest any more, of this worker or of all."""
        steps = self.batcher.steps
        if steps is not None:
            for batch in steps.wake(now, slot):
                self.tell(batch.slot, RESUME, batch.id)

    def happened(self, event: FleetEvent, now: float) -> Actions:
        """Apply an event."""
        actions = self.fleet.happened(event, now)
        if not isinstance(event, BatchReport):
            if isinstance(event, WorkerDied):
                self.outboxes.pop(event.slot, None)
            self.changed.notify_all()
        return actions

    def look_after_workers(self, rest: Sequence[Actions]) -> Orders:
        """What to do about workers now.

        Args:
            rest: what the batcher wanted done, but for its batches and calls.
        """
        now = self.clock()
        orders, more = self.fleet.look_after_workers(rest, now)
        for slot in orders.retired:
            self._wake(now, slot)  # or it would not end before all consumers have caught up
        for actions in more:
            if any(actions):  # the loop looks again at once
                self.queue(actions.batches)
                self.undone.append(actions)
        self.changed.notify_all()
        return orders

    def collect_unwanted(self) -> None:
        """Workers are told which batches have lost their callers."""
        for slot, batch_id in self.batcher.take_unwanted():
            self.tell(slot, DROP, batch_id)

    def came_back(self, record: BatchRecord) -> None:
        """For whoever watches: the loop hands the record out."""
        record.worker = self.fleet.supervisor.place(record.slot)
        self.records.append(record)

    # -- how it stands

    def model_description(self) -> Mapping[str, Any] | None:
        """What the model says of itself; empty if nothing, None while no worker has loaded it.

        Raises:
            WorkerStartError, StreamerBroken, StreamerClosed: no worker will load it.
            StreamerForked: in a forked child.
        """
        self.check_process()  # before the lock, which a fork may have copied while held
        with self.lock:
            if self.fleet.description is None:
                self.check_accepting()
            return self.fleet.description

    @property
    def has_steps(self) -> bool:
        """Whether the model is known to be one of steps: not before a worker has loaded it."""
        return self.batcher.has_steps

    @property
    def resumes(self) -> bool:
        """Whether such a model can go on with an item that has begun elsewhere."""
        steps = self.batcher.steps
        return steps is not None and steps.resumes

    @property
    def state(self) -> EngineState:
        return self.fleet.state

    def stats(self) -> StreamerStats:
        self.check_process()
        with self.lock:
            self.settle()
            return self.fleet.stats(self.clock())

    def metrics(self) -> BatchMetrics:
        """A copy of them as they are now."""
        self.check_process()
        with self.lock:
            return self.batcher.figures.metrics.copy()

    def summary(self) -> Summary:
        """The recent batches and the state of the engine, for ``explain``."""
        self.check_process()
        with self.lock:
            now, stats = self.clock(), self.stats()
            figures, steps = self.batcher.figures, self.batcher.steps
            recent, restarted_at = [*figures.recent], [*self.fleet.restarted_at]
            line = self.batcher.policy.cost.line
            of_steps = None if steps is None else steps.log.summary(len(self.batcher.slots))
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
        with self.lock:
            return self.fleet.workers(self.transport.device)

    def describe(self) -> str:
        """The state in one line, for a ``repr``."""
        if os.getpid() != self._pid:
            return f"of process {self._pid}"
        return self.stats().gist

    @property
    def serving(self) -> int:
        """How many workers take batches."""
        return len(self.batcher.slots)

    @property
    def batch_duration(self) -> float:
        """What the model has taken for a batch of late, seconds; infinity before the first."""
        return self.batcher.figures.batch_duration

    @property
    def room(self) -> int:
        """The most batches that a worker holds."""
        return self.batcher.slots.room

    def wait_serving(self, timeout: float | None) -> int:
        """Block until a worker takes batches; returns how many do, 0 if the time ended first.

        Raises:
            WorkerStartError, StreamerBroken: none will.
            StreamerClosed: it is closed, or was meanwhile.
        """
        serving = 0 if self.fleet.refusal is not None else len(self.batcher.slots)
        if not serving:
            with self.lock:
                self.changed.wait_for(lambda: self.batcher.slots or self.fleet.refusal, timeout)
                self.check_accepting()  # also with workers, if the loop has failed
                serving = len(self.batcher.slots)
        return serving

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
        """Begin to replace every worker; returns the number of this restart.

        Args:
            overlap: whether a new one is ready before the old one ends: see ``Supervisor``.

        Raises:
            StreamerClosed: it is closed.
        """
        self.check_process()
        with self.lock:
            if self.is_over:
                self.check_accepting()
            self.fleet.revive()
            generation = self.fleet.supervisor.renew(overlap)
        self.transport.wakeup()
        return generation

    def wait_restarted(self, generation: int, timeout: float | None) -> None:
        """Block until a restart is over.

        Raises:
            WorkerStartError: a new one could not be started; the old ones that are left go on.
            WorkerStartTimeout: the time ended first; the restart goes on.
            StreamerClosed: it was closed meanwhile.
        """
        fleet = self.fleet
        supervisor = fleet.supervisor
        with self.lock:
            in_time = self.changed.wait_for(
                lambda: (
                    supervisor.aborted >= generation
                    or supervisor.failed
                    or supervisor.is_renewed(generation)
                    or self.is_over
                ),
                timeout,
            )
            if supervisor.aborted >= generation and fleet.roll_failure is not None:
                raise fleet.roll_failure.exception()
            if supervisor.failed and fleet.failure is not None:
                raise fleet.failure.exception()
            self.check_accepting()
            if not in_time:
                raise WorkerStartTimeout(
                    f"not every worker has been replaced in {timeout} s; the restart goes on"
                )

    def scale(self, worker_num: Workers) -> None:
        """Want another number of workers, or other bounds of it; does not wait for them."""
        self.check_process()
        with self.lock:
            if self.is_over:
                self.check_accepting()
            self.fleet.revive()
            self.fleet.set_bounds(*worker_range(worker_num), self.clock())
        self.transport.wakeup()

    @property
    def is_over(self) -> bool:
        return self.fleet.state in (EngineState.DRAINING, EngineState.CLOSED)

    # -- refusals

    def check_process(self) -> None:
        """Refuse use in a forked child."""
        if os.getpid() != self._pid:
            raise StreamerForked(
                f"this streamer was built in process {self._pid} and came to process {os.getpid()} "
                "by fork, where its workers do not answer; build it after the fork "
                "(gunicorn: without --preload, or in post_fork; uWSGI: with lazy-apps)"
            )

    def check_accepting(self) -> None:
        refusal = self.fleet.refusal
        if refusal is not None:
            raise refusal.exception()


def log(level: int, text: str, *arguments: Any, exc_info: bool = False) -> None:
    with contextlib.suppress(Exception):  # of a filter or handler of a user's
        logger.log(level, text, *arguments, exc_info=exc_info)


def _to_answer(calls: Sequence[Call]) -> list[Call]:
    """Those that are over and whose callers may not know it: all but those that they withdrew."""
    return [call for call in calls if call.is_over and (call.failure or not call.unanswered)]
