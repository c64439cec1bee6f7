"""The state of an engine, and the one thread that waits for the workers and answers the calls.

transport.wait ◀──── BatchReport ─────── one per batch
├─ lock ── batcher: batch_returned, ...; supervisor: lost, ... ── unlock
├─ transport.send: workers are busy again first,
├─ reply.end: then callers get their results,
└─ transport.start, stop, kill: then workers are looked after

The lock guards the calls, what is on its way to workers, and how all that stands. It is held for a
few microseconds only: no I/O, no pickling, no logging, no code of users and no completing of
futures happens under it. One thread that waits alone is woken under it, which releases a lock.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..batching.batcher import NOTHING, Actions
from ..errors import StreamerBroken, StreamerClosed, WorkerStartError
from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..reporting import counted, quiet_log, report_bug, summary
from ..supervision.supervisor import Loss, backoff
from ..workers.protocol import DROP, RESUME, Failure, WorkerReady
from ..workers.transport import Transport, WorkerDied, WorkerEvent
from .backend import BlockingReply, Lengths, answer
from .fleet import EngineState, Fleet, FleetEvent
from .threads import AtExit, is_owned, rest_if_copied

logger = logging.getLogger(__name__)
log = quiet_log(__name__)

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0
#: The same for one that is still loading, or computing for callers that have their answer already.
ABORT_GRACE = 0.5


#: ``Loop.waits_until`` of a loop that has been woken, or is about to be.
WOKEN = -math.inf

#: A batch, or an order about one: its slot, the order, and its id.
Message = BatchRecord | tuple[int, int, int]


class Loop:
    """The state of an engine, and its thread: no other one waits for the transport, or starts and
    ends workers. ``Engine`` adds what callers and owners call.

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
        on_workers, on_end: see ``Engine.when_workers_change``, ``when_ended``.
        on_batch, on_call: see ``Engine.watch``.
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
        self.decode = transport.decode
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
        self.on_answered: Callable[[], None] = lambda: None
        self.on_workers: Callable[[], None] = lambda: None
        self.on_batch: Callable[[BatchRecord], None] = lambda _: None
        self.on_call: Callable[[Call], None] | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.cancel_exit: Callable[[], object] = lambda: None
        #: Runs the loop, and logs what becomes of the workers.
        self.thread = threading.Thread(target=self._run, name="service_streamer", daemon=True)
        self.thread_id: int | None = None
        self._ended = threading.Event()

    # -- the state: locked

    def take_up(self, actions: Actions) -> None:
        """Queue the batches, and leave the rest to the loop. Locked."""
        if actions is not NOTHING:
            self.unsent.extend(actions.batches)
            if any(actions[1:]):
                self.undone.append(actions)

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
        if failure is None:
            self.batcher.rebuild(unanswered, self.clock())
        else:
            returned = [event for event in events if isinstance(event, BatchReport)]
            self.batcher.end_all(unanswered, failure, self.clock(), returned)
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
        steps = self.batcher.steps
        if steps is not None:
            for batch in steps.wake(now, slot):
                self.unsent.append((batch.slot, RESUME, batch.id))

    def _apply(self, event: FleetEvent, now: float) -> None:
        """Let what happened change the state."""
        self.take_up(self.fleet.apply(event, now))
        if not isinstance(event, BatchReport):
            self.changed.notify_all()

    def keep_record(self, record: BatchRecord) -> None:
        """Have the loop hand out the record of a batch. Locked."""
        record.worker = self.fleet.supervisor.place(record.slot)
        self.records.append(record)

    # -- the thread

    def send(self) -> None:
        """Send what is unsent. For any thread, without the lock."""
        if is_owned(self.sending):
            # A signal handler has interrupted this thread. It may wait for its own call, so other
            # workers get theirs; what the first message's worker gets stays in order. One that
            # interrupts this in turn would overtake what is being sent here.
            if not self._sends_to_others:
                self._sends_to_others = True
                try:
                    for message in [*self.unsent][1:]:
                        if _slot(message) != _slot(self.unsent[0]):
                            self._send(message)
                finally:
                    self._sends_to_others = False
            return
        # No thread waits for the others: what is added while one of them sends, that one sends,
        # since it looks again when it has released the lock.
        while self.unsent and self.sending.acquire(blocking=False):
            try:
                while self.unsent:
                    self._send(self.unsent[0])
            finally:
                self.let_others_send()

    def _send(self, message: Message) -> None:
        if isinstance(message, BatchRecord):
            self._send_batch(message)
        else:
            self.transport.tell(*message)
        self.unsent.remove(message)
        if isinstance(message, BatchRecord):
            message.payloads = []

    def _send_batch(self, batch: BatchRecord) -> None:
        batcher = self.batcher
        is_stream = batcher.has_steps and any(call.is_stream for call, _, _ in batch.spans)
        calls = batch.items_by_call() if batch.calls > 1 and batcher.isolates_errors else 0
        self.transport.send(batch.slot, batch.id, batch.payloads, calls=calls, is_stream=is_stream)
        if logger.isEnabledFor(logging.DEBUG):
            size = counted(batch.size, "item")
            log(logging.DEBUG, "batch %d has %s: %s", batch.id, size, batch.reason.value)

    def let_others_send(self) -> None:
        """Release the lock if this thread holds it: perhaps a signal handler has raised."""
        if is_owned(self.sending):
            self.sending.release()

    def join(self) -> None:
        """Block until the workers have ended, and the thread with them.

        Not by joining the thread alone: Python takes a thread for ended once a KeyboardInterrupt
        has ended a ``join``, and every later one returns at once.
        """
        self._ended.wait()
        self.thread.join()

    def _run(self) -> None:
        reason: Failure | None = None
        failures = 0  # in a row
        events: list[WorkerEvent] = []
        self.thread_id = self.thread.ident
        try:
            timeout = self._time_to_wait()
            while timeout is not None:
                try:
                    # No operating system waits for years at once.
                    wait = None if timeout == math.inf else min(timeout, 1e5)
                    events = events or self.transport.wait(wait)
                    timeout = self._handle(events)
                    events, failures = [], 0  # or the last results would live until the next come
                except Exception as error:
                    rest_if_copied(self._pid)
                    failures += 1
                    # What fails twice is left out, and what fails on and on is tried more seldom.
                    events = self._recover(error, events)
                    if failures > 1:
                        events = []
                        time.sleep(backoff(failures, first=0.01, longest=1.0, jitter=0.0))
                    timeout = 0.0
        except BaseException as error:
            # Nobody may wait for a thread that is dead, whatever it died of.
            log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
            reason = Failure(StreamerBroken(f"the streamer failed: {summary(error)}"))
        finally:
            try:
                self._shut_down(reason)
            finally:
                self.thread_id = None
                self._ended.set()

    def _recover(self, error: Exception, events: list[WorkerEvent]) -> list[WorkerEvent]:
        """An exception of our own: end the calls that are open, and go on with a new state.

        Args:
            events: that were being applied.

        Returns:
            Those that are still to be applied.
        """
        bug = report_bug("the streamer", error)
        with self.lock:
            calls = self._restore(Failure(bug), events)
            self.is_torn = False
            known, ready = self.fleet.supervisor, self.batcher.slots
            news: list[WorkerEvent] = [  # of what workers have done, the new state knows
                event
                for event in events
                if not isinstance(event, (BatchReport, StepReport))
                and event.slot in known
                and not (isinstance(event, WorkerReady) and event.slot in ready)
            ]
        if calls:
            log(
                logging.ERROR,
                "%s failed by that; the streamer goes on",
                counted(len(calls), "call"),
            )
        self._answer(calls)
        self.on_answered()
        return news

    def _time_to_wait(self) -> float | None:
        """Seconds until something is due, ``inf`` for never; None when it is time to shut down."""
        fleet, batcher = self.fleet, self.batcher
        with self.lock:
            self.settle()
            now = self.clock()
            due = min(batcher.deadline, fleet.supervisor.due, fleet.scaling.due)
            if fleet.state is EngineState.DRAINING:
                if batcher.is_answered or self.drain_deadline <= now:
                    return None
                due = min(due, self.drain_deadline)
            if self.undone or self.left:
                due = now
            self.waits_until = due
        self.send()  # orders that follow from what was settled
        return max(0.0, due - now)

    def _handle(self, events: list[WorkerEvent]) -> float | None:
        """Apply what happened, send, answer; returns what ``_time_to_wait`` does.

        Answering is last, with nothing between it and the next wait: a caller that is woken needs
        the interpreter lock, which this thread gives up when it waits.
        """
        fleet, batcher = self.fleet, self.batcher
        calls: list[Call] = []
        parts: list[tuple[Call, Any]] = []
        try:
            with self.lock:
                self.settle()
                now = self.clock()
                if len(events) > 1:
                    fleet.foresee(events)
                elif events and isinstance(events[0], BatchReport):
                    self._answer_alone(events[0])
                for event in events:
                    if isinstance(event, StepReport):
                        parts += batcher.scheduler.stepped(event, now)
                    else:
                        self._apply(event, now)
                # While draining no caller may be left to flush what was submitted.
                is_draining = fleet.state is EngineState.DRAINING
                if not (fleet.scaling.is_fixed or is_draining):
                    fleet.scale_by_load(now)
                if batcher.deadline <= now or is_draining:
                    self.take_up(batcher.time_passed(now))
                self._drop_unwanted()
                undone, self.undone = self.undone, []
                calls = [call for actions in undone for call in actions.calls]
                rest = [actions for actions in undone if any(actions[2:])]
                has_more = rest or fleet.notes or fleet.supervisor.due <= now
            self.send()
            timeout = None if has_more else self._time_to_wait()
        finally:  # they are over, so nothing else would answer them
            self._answer(calls, parts)
            if calls or parts:
                self.on_answered()
            self._hand_out_records()
        if has_more:
            self._look_after_workers(rest)
            timeout = self._time_to_wait()
        return timeout

    def _answer_alone(self, report: BatchReport) -> None:
        """Let the thread go on whose results are all that a batch brings. Locked.

        Until it runs, this thread learns from the batch. Many threads would wake up too early, and
        wait for the interpreter lock.
        """
        call = self.batcher.answered_alone(report)
        if call is not None and type(call.reply) is BlockingReply:
            reply, call.reply = call.reply, None
            reply.end(report.outputs)

    def _look_after_workers(self, rest: Sequence[Actions]) -> None:
        """Do what happens seldom: end and start workers, and log.

        Args:
            rest: what the batcher wanted done, but for its batches and calls.
        """
        fleet, slots = self.fleet, self.batcher.slots
        with self.lock:
            self.settle()
            now = self.clock()
            hung = [(slot, slots.limit(slot)) for a in rest for slot in a.hung if slot in slots]
            orders, more = fleet.look_after_workers(rest, now)
            for slot in orders.retire:
                self._resume_all(now, slot)  # or it would not end before all consumers catch up
            for actions in more:  # the loop looks again at once
                self.take_up(actions)
            self.changed.notify_all()
            notes, fleet.notes = fleet.notes, []
        self.on_workers()
        for level, text, arguments in notes:
            log(level, text, *arguments)
        for slot in orders.stop:
            self.transport.stop(slot)
        for slot, seconds in hung:
            if slots.ends_hung:
                self.transport.kill(slot, self._hang.format(seconds))
            else:
                self._log_hang(slot, seconds)
        for slot in orders.kill:
            allowed = fleet.supervisor.start_bound(slot)
            why = f"it had not loaded its model within start_timeout of {allowed:g} s"
            self.transport.kill(slot, why)
        for slot, place in orders.start:
            self._start_worker(slot, place)

    def _log_hang(self, slot: int, seconds: float) -> None:
        stack = self.transport.stack(slot)  # first, or it might be done meanwhile
        text = "worker %d has been at one batch for more than %.0f s, and is not ended: %s"
        log(logging.WARNING, text, self.fleet.supervisor.place(slot), seconds, self._hang)
        if stack:
            log(logging.WARNING, "what it was doing:\n%s", stack)

    def _start_worker(self, slot: int, place: int) -> None:
        try:
            self.transport.start(slot, place, self.fleet.scaling.most)
        except Exception as error:  # no memory for a process, no descriptors: perhaps later
            failed = WorkerStartError(f"worker {place} could not be started: {summary(error)}")
            failed.__cause__ = error.with_traceback(None)
            with self.lock:
                self._apply(WorkerDied(slot, Failure(failed), Loss.CRASHED), self.clock())

    def _shut_down(self, reason: Failure | None) -> None:
        """End all. With a reason of None it was closed."""
        fleet, batcher = self.fleet, self.batcher
        if reason is None:
            kind = AtExit if self.is_exiting else Failure
            reason = kind(StreamerClosed("the streamer was closed before the call was served"))
        with self.lock:
            fleet.state = EngineState.CLOSED
            fleet.refusal = fleet.refusal or reason  # there is one if it was closed
            is_idle = batcher.is_empty and not fleet.supervisor.is_loading
            calls = self._restore(reason)
            self.is_torn = False
            self.changed.notify_all()
        self._answer(calls)
        self.open_calls.clear()
        self.transport.close(_STOP_GRACE if is_idle else ABORT_GRACE)
        with self.lock:
            batcher.slots.clear()
        self.has_ended = True  # first: code that sets ``on_end`` and then looks misses nothing
        self.on_workers()
        self.cancel_exit()
        self.on_end()
        cut_off = f", {counted(len(calls), 'call')} cut off" if calls else ""
        log(logging.INFO, "the workers have ended%s", cut_off)

    # -- answers

    def _answer(self, calls: Sequence[Call], parts: Sequence[tuple[Call, Any]] = ()) -> None:
        answer(calls, parts)
        for call in calls:
            self.open_calls.pop(call, None)

    def _hand_out_records(self) -> None:
        records, self.records = self.records, []  # only this thread adds to them
        for record in records:
            try:
                self.on_batch(record)
            except BaseException:  # as of a callback: this thread does not end for it
                log(logging.ERROR, "what watches the batches raised", exc_info=True)
            record.release()


def _slot(message: Message) -> int:
    return message.slot if isinstance(message, BatchRecord) else message[0]
