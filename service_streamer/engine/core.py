"""Everything that an engine's lock guards: what callers and the loop share.

     state      meaning                                    leaves when
     -----      -------                                    -----------
     STARTING   accepts calls; a worker still loads        each is ready or has failed
     RUNNING    accepts calls                              closed, or no worker can be started
     BROKEN     no worker can be started: calls fail at    a worker is ready, since they are tried
                once, with the reason                      again and again; or closed
     DRAINING   refuses calls, finishes accepted ones      nothing is left, or its time ends
     CLOSED     refuses calls; nothing of it is left       -

The lock is held for a few microseconds only: no I/O, no pickling, no logging, no code of users and
no completing of futures happens under it.
"""

from __future__ import annotations

import collections
import enum
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batching.actions import NOTHING, Actions
from ..batching.batcher import Batcher
from ..errors import StreamerBroken, StreamerClosed, WorkerStartError
from ..observe.metrics import StreamerStats, WorkerStats
from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..reporting import counted
from ..supervision.autoscaling import Autoscaling
from ..supervision.supervisor import Loss, Supervisor, WorkerActions, WorkerState
from ..workers.protocol import DROP, RESUME, Failure, WorkerReady
from ..workers.transport import Transport, WorkerDied, WorkerEvent, WorkerWaits

_STOP_FIRST = (
    "two workers do not fit: restart_workers(overlap=False) ends the old one first; if there is no "
    "other worker, calls wait meanwhile"
)


class EngineState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    DRAINING = "draining"
    CLOSED = "closed"


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
            what, batch_id = message
            transport.tell(self._slot, what, [batch_id])
        elif batcher.has_steps and message.spans and message.spans[0][0].is_stream:
            transport.send(self._slot, message.id, message.payloads, is_stream=True)
        elif message.calls > 1 and batcher.isolates_errors:
            calls = message.items_by_call()
            transport.send(self._slot, message.id, message.payloads, calls=calls)
        else:
            transport.send(self._slot, message.id, message.payloads)


class Core:
    """The state of an engine. Call its methods with ``lock`` held, unless they say otherwise.

    Args:
        scaling: decides how many workers there are to be; None if that is no matter of the load.
        clock: seconds from a monotonic clock.
        jitter: random numbers from 0 to 1.

    Attributes:
        unsent: outboxes into which something was put. Whoever comes by sends what is there, so that
            nothing is left behind by a thread that was interrupted in between.
        outboxes: by slot.
        open: the calls that are accepted and not answered, in the order of their arrival. What
            they need and what workers hold is the truth from which ``settle`` derives the rest.
        is_torn: whether an exception has ended a change in a caller's thread halfway, as a signal
            handler may raise one anywhere. Whoever takes the lock next calls ``settle``.
        left: calls whose callers have gone while their thread held the lock. A finalizer may say so
            at any line: then it only appends, and wakes the loop.
        undone: what a caller's call made necessary and the loop is to do.
        notes: to be logged by the loop: level, text and its arguments.
        records: of batches, if somebody watches: the loop hands them out and releases them.
        refusal: why new calls are refused; None accepts them.
        description: what the model says of itself, as the last worker that became ready reported;
            None before the first.
        failure: the last one of a place that has failed.
        roll_failure: the last one for which a rolling restart was broken off.
        waits_until: until when the loop waits, if nothing happens.
        is_exiting: whether the interpreter ends.
        ceilings: by slot, see ``StreamerStats``.
        proven: slots whose worker has computed a batch.
        restarted_at: when workers were lost that were started again, the last ones.
    """

    def __init__(
        self,
        batcher: Batcher,
        supervisor: Supervisor,
        *,
        scaling: Autoscaling | None = None,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        # Reentrant, since a signal handler that closes may run while we hold it.
        self.lock = threading.RLock()
        # The state, or that of a worker. Take ``lock`` itself to wait: a signal handler that raises
        # within ``Condition.__enter__``, which is Python, would leave it locked for ever.
        self.changed = threading.Condition(self.lock)
        self.batcher = batcher
        self.supervisor = supervisor
        self.scaling = scaling or Autoscaling(supervisor.wanted, supervisor.wanted)
        self.clock = clock
        self.unsent: collections.deque[WorkerOutbox] = collections.deque()
        self.outboxes: dict[int, WorkerOutbox] = {}
        self.open: dict[Call, None] = {}  # an ordered set
        self.is_torn = False
        self.left: collections.deque[Call] = collections.deque()
        self.undone: list[Actions] = []
        self.notes: list[tuple[int, str, tuple[object, ...]]] = []
        self.records: list[BatchRecord] = []
        self.state = EngineState.STARTING
        self.refusal: Failure | None = None
        self.description: Mapping[str, Any] | None = None
        self.failure: Failure | None = None
        self.roll_failure: Failure | None = None
        self.drain_deadline = math.inf
        self.waits_until = math.inf
        self.is_exiting = False
        self.ceilings: dict[int, float] = {}
        self.proven: set[int] = set()
        self.restarted_at: collections.deque[float] = collections.deque(maxlen=100)
        self._jitter = jitter
        self._last_loss = ""
        self._last_error = ""  # its class
        self._dying: set[int] = set()  # slots of which it is about to be said that they are lost

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
        calls = [*self.open]  # at once: the loop forgets some without the lock
        self.batcher.rebuild([call for call in calls if not call.is_over], self.clock())
        self._list_unsent()
        ended = _to_answer(calls)
        for call in calls:
            if call.is_over and call not in ended:
                self.open.pop(call, None)  # its caller has withdrawn it
        self.undone.append(Actions(calls=ended))
        self.waits_until = math.inf
        self.is_torn = False

    def forget(self, call: Call) -> None:
        """No caller waits for the call any more, which is over."""
        call.reply = None
        self.open.pop(call, None)
        self.collect_unwanted()

    def fail_open(self, failure: Failure, events: Sequence[WorkerEvent] = ()) -> list[Call]:
        """End every call that is not over, when the state is in doubt; returns those to answer.

        The state is derived anew. Workers go on with what they hold, for no caller.

        Args:
            events: happened, and may have been applied or not.
        """
        calls = [*self.open]  # at once, as above
        returned = [event for event in events if isinstance(event, BatchReport)]
        unanswered = [call for call in calls if not call.is_over]
        vacant = self.batcher.end_all(unanswered, failure, self.clock(), returned)
        self.undone.append(Actions(vacant=vacant))
        self._list_unsent()
        self.is_torn = False
        return _to_answer(calls)

    def is_news(self, event: WorkerEvent) -> bool:
        """Whether it is not known yet that a worker has become ready, waits, or has died."""
        if isinstance(event, (BatchReport, StepReport)) or event.slot not in self.supervisor:
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
        if self.state is not EngineState.CLOSED:
            if self.state is not EngineState.DRAINING:
                # Its consumer may be the thread that waits for the end: then no item may rest.
                self._wake(self.clock())
            self.state = EngineState.DRAINING
            self.refusal = Failure(StreamerClosed("the streamer is closed"))
            self.drain_deadline = min(self.drain_deadline, deadline)
            self.supervisor.wind_down()
            self.scaling.due = math.inf
            self.changed.notify_all()

    def _wake(self, now: float, slot: int | None = None) -> None:
        """No item of a model of steps is to rest any more, of this worker or of all."""
        steps = self.batcher.steps
        if steps is not None:
            for batch in steps.wake(now, slot):
                self.tell(batch.slot, RESUME, batch.id)

    def foresee(self, events: list[WorkerEvent]) -> None:
        """Have no batch cut for a worker of which a later one of these events says it is lost."""
        self._dying = {event.slot for event in events if type(event) is WorkerDied}
        for slot in self._dying:
            self.batcher.worker_dying(slot)

    def happened(
        self, event: BatchReport | WorkerReady | WorkerWaits | WorkerDied, now: float
    ) -> Actions:
        """Apply an event."""
        if isinstance(event, BatchReport):
            if event.ceiling or self.ceilings:
                self._ceiling_changed(event.slot, event.ceiling)
            if not event.has_failed:
                self.supervisor.progressed(event.slot)
                self.proven.add(event.slot)
            else:
                failure = event.failure or next(iter(event.failures.values()))
                if not failure.blames_input:
                    self._last_error = failure.text[:100].partition(":")[0]
            return self.batcher.batch_returned(event, now)
        if isinstance(event, WorkerDied):
            return self._lost(event, now)
        if isinstance(event, WorkerWaits):
            self.supervisor.waits(event.slot, has_place=event.has_place)
            self._workers_changed()
            return NOTHING
        return self._ready(event, now)

    def _ready(self, event: WorkerReady, now: float) -> Actions:
        slot = event.slot
        if not self.supervisor.ready(slot, now):
            return NOTHING
        if event.places and not self.batcher.has_steps:
            self.batcher.begin_steps(event.places, resumes=event.resumes)
        self.description = event.description or {}
        self.batcher.slots.sizes = _sizes_of(self.description.get("batch_sizes"))
        self._note(logging.INFO, "worker %d is ready", self.supervisor.place(slot))
        if self.state is EngineState.BROKEN:
            self._note(logging.WARNING, "calls are accepted again")
        self.revive()
        self._workers_changed()
        if slot in self._dying:
            return NOTHING
        return self.batcher.worker_ready(slot, now, self.supervisor.start_duration)

    def _lost(self, event: WorkerDied, now: float) -> Actions:
        slot, failure, loss, batch_id, report, begun = event
        supervisor = self.supervisor
        place = supervisor.place(slot)
        self.ceilings.pop(slot, None)
        self.outboxes.pop(slot, None)
        self.proven.discard(slot)
        aborted, restarts = supervisor.aborted, supervisor.restarts
        overlap = supervisor.overlap(slot)
        was_failing = supervisor.retry_at(place) is not None
        self._dying.discard(slot)
        actions, held, retried = Actions(), 0, self.batcher.figures.retries.retried_items
        if loss in (Loss.CRASHED, Loss.DEVICE_FAILED, Loss.OUTAGE):
            held = self.batcher.items_held(slot)
            actions = self.batcher.worker_lost(
                slot, failure, now, batch_id, begun, is_outage=loss is Loss.OUTAGE
            )
            retried = self.batcher.figures.retries.retried_items - retried
        was_unwanted = supervisor.lost(
            slot,
            loss,
            now,
            self._jitter(),
            was_busy=held > 0,
            is_explained=any(call.failure is failure for call in actions.calls),
        )
        if supervisor.aborted != aborted:
            self.roll_failure = failure
            if loss is Loss.NO_MEMORY and overlap:
                advice = f"{failure.message}; {_STOP_FIRST}"
                self.roll_failure = Failure(WorkerStartError(advice), cause=failure)
        retry_at = supervisor.retry_at(place)
        if was_unwanted and retry_at is not None:
            self.failure = failure
            self._note_failed(failure, retry_at - now, is_news=not was_failing)
        elif was_unwanted:
            then = "gone"
            if supervisor.restarts > restarts:
                then = "started again"
                self.restarted_at.append(now)
            elif overlap is not None and loss is Loss.NO_MEMORY and supervisor.aborted == aborted:
                then = "tried again when the old worker has ended: there is no memory for both"
            self._note_loss(failure, retried if held else 0, then)
        elif held:
            self._note_loss(failure, retried, "not replaced, since it was about to end")
        else:
            self._note(logging.INFO, "worker %d has ended", place)
        if report is not None:  # the log has it if nobody else
            self._note(logging.WARNING, "what its model raised:\n%s", report)
        if supervisor.is_broken:
            broken = failure
            if supervisor.was_served:
                error = StreamerBroken(
                    "no worker is left, and new ones could not be started; starting them is tried "
                    "again at least once a minute, and by restart_workers() at once"
                )
                broken = Failure(error, cause=failure)
            if self.state in (EngineState.STARTING, EngineState.RUNNING, EngineState.BROKEN):
                self.state = EngineState.BROKEN
                self.refusal = broken
            calls = [*actions.calls, *self.batcher.fail_all(broken)]
            actions = actions._replace(calls=calls)
        self._workers_changed()
        return actions

    def supervise(self, now: float) -> tuple[WorkerActions, Actions]:
        """What the supervisor wants done about the workers, and the batcher then."""
        orders = self.supervisor.orders(now)
        vacant: list[int] = []
        for slot in orders.keep:
            self._note(
                logging.INFO,
                "worker %d is kept, since more are wanted again",
                self.supervisor.place(slot),
            )
            self._more_to_do(self.batcher.worker_kept(slot, now))
        for slot in orders.retire:
            actions = self.batcher.worker_retiring(slot, now)
            self._wake(now, slot)  # or it would not end before all consumers have caught up
            vacant += actions.vacant
            self._more_to_do(actions._replace(vacant=()))  # others go on in its place
        self._workers_changed()
        return orders, Actions(vacant=vacant)

    def _more_to_do(self, actions: Actions) -> None:
        """Of what the supervisor wanted; the loop looks again at once."""
        if any(actions):
            self.queue(actions.batches)
            self.undone.append(actions)

    def scale_by_load(self, now: float) -> None:
        """Have more workers, or fewer, if the load says so, and if it is time to look at it."""
        scaling, batcher, supervisor = self.scaling, self.batcher, self.supervisor
        if not scaling.is_due(batcher.pending_items, now):
            return
        load = batcher.figures.load(supervisor.failed, supervisor.start_duration)
        wanted, before = scaling.decide(load, now), supervisor.wanted
        if wanted == before:
            return
        supervisor.want(wanted)
        if wanted > before and scaling.wait <= scaling.target:
            text = "%s instead of %d, since calls are refused, or their time ends while they wait"
            self._note(logging.INFO, text, counted(wanted, "worker"), before)
        elif wanted > before:
            self._note(
                logging.INFO,
                "%s instead of %d, since the queue (%s) takes %.2g s, and the target is %.2g s",
                counted(wanted, "worker"), before, counted(load.waiting, "item"),
                scaling.wait, scaling.target,
            )  # fmt: skip
        else:
            text = "%s instead of %d: fewer have been enough for a while"
            self._note(logging.INFO, text, counted(wanted, "worker"), before)

    def set_bounds(self, least: int, most: int) -> None:
        """Have as many workers, within these bounds, as the load needs."""
        self.scaling.set_bounds(least, most, self.clock())
        self.supervisor.scale(self.scaling.wanted)

    def condemn(self, slot: int, now: float) -> None:
        """Have a worker replaced that fails everything while others do not."""
        if self.supervisor.condemn(slot, now, self._jitter()):
            self.restarted_at.append(now)
            self._note(
                logging.WARNING,
                "worker %d is replaced: it failed batch after batch, and most of the others "
                "computed theirs; its last error was %s",
                self.supervisor.place(slot), self._last_error,
            )  # fmt: skip

    def revive(self) -> None:
        """A worker is ready, or the supervisor tries again at once."""
        if self.state is EngineState.BROKEN:
            self.state = EngineState.STARTING
            self.refusal = None

    def _workers_changed(self) -> None:
        supervisor = self.supervisor
        has_begun = not (supervisor.is_starting or supervisor.is_broken)
        if self.state is EngineState.STARTING and has_begun:
            self.state = EngineState.RUNNING
        self.changed.notify_all()

    def _ceiling_changed(self, slot: int, ceiling: float) -> None:
        before = self.ceilings.get(slot, 0)
        if ceiling == before:
            return
        place = self.supervisor.place(slot)
        if not ceiling:
            del self.ceilings[slot]
            self._note(logging.INFO, "worker %d computes batches of any size again", place)
            return
        self.ceilings[slot] = ceiling
        is_lower = not before or ceiling < before
        self._note(
            logging.WARNING if is_lower else logging.INFO,
            "worker %d %s: it computes at most %s at once",
            place, "ran out of device memory" if is_lower else "has more device memory",
            counted(ceiling, "item") if isinstance(ceiling, int)
            else f"a cost (items times the longest) of {ceiling:g}",
        )  # fmt: skip

    def _note(self, level: int, text: str, *arguments: object) -> None:
        self.notes.append((level, text, arguments))

    def _note_loss(self, failure: Failure, retried: int, then: str) -> None:
        more = f"; to be computed again: {counted(retried, 'item')}" if retried else ""
        self._note(logging.WARNING, "%s; it is %s%s", failure.message, then, more)
        if failure.remote_traceback is not None:
            self._note(logging.WARNING, "what it was doing:\n%s", failure.remote_traceback)

    def _note_failed(self, failure: Failure, pause: float, *, is_news: bool) -> None:
        """Of a place without a worker: an error once, then a line for each try, if there is more.

        That is as seldom as the tries are, so that the last lines of the log say what is wrong.
        """
        if pause == math.inf:  # the first failure of a place is news
            text = "%s; it is tried again when another worker is ready"
            if not self.supervisor.is_starting:  # there will be none, and the owner ends
                text = "%s"
            self._note(logging.ERROR, text, failure.message)
        elif not is_news:
            text = "%s; it is tried again in %.1f s"
            self._note(logging.WARNING, text, failure.message, pause)
        elif failure.message != self._last_loss:  # often all workers fail for the one same reason
            text = "%s; it is tried again in %.1f s, and then at least once a minute"
            self._note(logging.ERROR, text, failure.message, pause)
        self._last_loss = failure.message
        if is_news and failure.remote_traceback is not None:
            self._note(logging.WARNING, "what it was doing:\n%s", failure.remote_traceback)

    def collect_unwanted(self) -> None:
        """Workers are told which batches have lost their callers."""
        for slot, batch_id in self.batcher.take_unwanted():
            self.tell(slot, DROP, batch_id)

    def watch(self) -> None:
        """Have the loop hand out the record of every batch from now on."""
        self.batcher.on_back = self._came_back

    def _came_back(self, record: BatchRecord) -> None:
        record.worker = self.supervisor.place(record.slot)
        self.records.append(record)

    def workers(self, device: Callable[[int], int | str | None]) -> list[WorkerStats]:
        """Each worker, and each place that waits for one or has failed, by number."""
        if self.state is EngineState.CLOSED:
            return []
        workers = []
        for place, slot, state in self.supervisor.workers():
            name = state.value
            if slot is not None and state is WorkerState.READY:
                name = "busy" if self.batcher.items_held(slot) else "idle"
            restarts = self.supervisor.restarts_at.get(place, 0)
            workers.append(WorkerStats(place, device(place), name, restarts))
        return sorted(workers, key=lambda worker: worker.number)

    def stats(self) -> StreamerStats:
        self.settle()
        batcher, supervisor = self.batcher, self.supervisor
        states = dict(supervisor.states())
        busy = batcher.slots.busy - states[WorkerState.RETIRING]
        ready = states.pop(WorkerState.READY)
        workers = {"idle": max(0, ready - busy), "busy": min(ready, max(0, busy))}
        workers |= {state.value: count for state, count in states.items()}
        if self.state is EngineState.CLOSED:
            workers = dict.fromkeys(workers, 0)
        return StreamerStats(
            state=self.state.value,
            pending=batcher.pending_items,
            in_flight=batcher.slots.items,
            batches_in_flight=len(batcher.slots.in_flight()),
            workers=workers,
            restarts=supervisor.restarts,
            accepted=batcher.figures.accepted_calls,
            answered=batcher.figures.answered_calls,
            failed=batcher.figures.failed_calls,
            retries=batcher.figures.retries.retried_items,
            expired=batcher.figures.expired_calls,
            cancelled=batcher.figures.cancelled_calls,
            rejected=batcher.figures.rejected_calls,
            isolated=batcher.figures.retries.isolated_calls,
            ceilings={supervisor.place(slot): n for slot, n in self.ceilings.items()},
            trouble=self._trouble(),
            **self._scaling_stats(),
        )

    def _scaling_stats(self) -> dict[str, Any]:
        scaling = self.scaling
        if scaling.is_fixed:
            return {}
        wait = scaling.wait_of(self.batcher.figures.load(0, 0.0))
        return {
            "wanted": scaling.wanted,
            "worker_range": (scaling.least, scaling.most),
            "target_wait": scaling.target,
            "wait": wait,
        }

    def _trouble(self) -> str | None:
        """Why no worker gives answers at present; None while one does."""
        health, now = self.batcher.health, self.clock()
        if health.is_failing(now):
            last = f"; the last error was {self._last_error}" if self._last_error else ""
            return f"the last {health.row} batches failed, and none was computed since{last}"
        seconds = self.batcher.slots.stuck(now)
        if seconds is not None:
            return f"every worker has been at one batch for {seconds:.0f} s or longer"
        return None


def _to_answer(calls: Sequence[Call]) -> list[Call]:
    """Those that are over and whose callers may not know it: all but those that they withdrew."""
    return [call for call in calls if call.is_over and (call.failure or not call.unanswered)]


def _sizes_of(sizes: object) -> tuple[int, ...]:
    """The sizes that a model's description names; none if they are not ascending whole numbers."""
    if not isinstance(sizes, (list, tuple)) or any(type(each) is not int for each in sizes):
        return ()
    is_ascending = all(left < right for left, right in zip((0, *sizes), sizes, strict=False))
    return tuple(sizes) if is_ascending else ()
