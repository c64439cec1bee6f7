"""What callers call: accepts their calls in any thread, and answers each exactly once.

     caller threads                 engine                                   workers
     --------------                 ------                                   -------
     submit(call)
       encode                       (no lock: pickling runs user code)
       ├─ lock ── batcher: call_submitted ── unlock
       └─ transport.send ─────────────────────────── BatchMessage ─────────▶ one per batch
     wait for the reply
                                    the one thread that waits for workers:
                                    transport.wait ◀──────────────────────── BatchReport
                                    ├─ lock ── batcher, supervisor ── unlock
                                    ├─ transport.send: workers are busy again first
     decode, in the caller's  ◀─────┼─ reply.end: then callers get their results
     thread again                   └─ transport.start, stop, kill: then workers are looked after

``base_engine.py`` has the state that the lock guards.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..batching.batcher import NOTHING, Actions
from ..errors import (
    Overloaded,
    PredictTimeout,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    TooLate,
    WorkerStartError,
)
from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..reporting import counted, quiet_log, report_bug, summary
from ..supervision.supervisor import Loss, Overlap, backoff
from ..workers.protocol import HOLD, RESUME, Failure, WorkerReady
from ..workers.transport import WorkerDied, WorkerEvent
from .backend import IN_CALLBACK, answer
from .base_engine import ABORT_GRACE, BaseEngine, Message
from .fleet import EngineState, FleetEvent
from .fleet import Fleet as Fleet  # beside what it is given to
from .threads import AtExit, is_owned, rest_if_copied

logger = logging.getLogger(__name__)
log = quiet_log(__name__)

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0

#: ``waits_until`` of a loop that has been woken, or is about to be.
WOKEN = -math.inf

S = TypeVar("S")
T = TypeVar("T")


class Engine(BaseEngine):
    """Accepts calls from any thread and answers each exactly once. Built as a ``BaseEngine``."""

    # -- calls

    def submit(self, call: Call) -> None:
        """See ``Backend``. Also raises what the function raises that gives the lengths."""
        # A system call each time: uWSGI forks without the hooks by which it could be known before.
        if os.getpid() != self._pid or self.fleet.refusal is not None:
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
            call.payloads = self.encode(call.payloads)
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
            if is_held and self.fleet.state is EngineState.DRAINING:
                return  # the consumer may be who waits for the end of it
            for batch in self.batcher.slots.set_held(is_held, self.clock(), call=call):
                self.unsent.append((batch.slot, HOLD if is_held else RESUME, batch.id))

        self._change(hold, call)

    # -- in callers' threads

    def check_not_in_callback(self) -> None:
        if threading.get_ident() == self.thread_id:
            self.check_process()  # in a fork made by a callback, that copy of the thread is ours
            raise StreamerError(IN_CALLBACK)

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker has loaded its model, or one could not. See ``BaseStreamer``."""
        self.check_process()
        self.check_not_in_callback()
        self._wait_workers(
            lambda: self.fleet.supervisor.is_ready,
            timeout,
            f"not every worker has loaded its model in {timeout} s",
        )

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace every worker, one at a time: see ``begin_restart`` and ``wait_restarted``."""
        self.check_not_in_callback()
        self.wait_restarted(self.begin_restart(overlap), timeout)

    # -- messages

    def take_up(self, actions: Actions) -> None:
        """Queue the batches, and leave the rest to the loop. Locked."""
        if actions is not NOTHING:
            self.unsent.extend(actions.batches)
            if any(actions[1:]):
                self.undone.append(actions)

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

    # -- the thread

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
        if self.on_answered is not None:
            self.on_answered()
        return news

    def _time_to_wait(self) -> float | None:
        """Seconds until something is due, ``inf`` for never; None when it is time to shut down."""
        fleet, batcher = self.fleet, self.batcher
        with self.lock:
            if self.is_torn or self.left:
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
        if self.unsent:  # orders that follow from what was settled
            self.send()
        return max(0.0, due - now)

    def _handle(self, events: list[WorkerEvent]) -> float | None:
        """Apply what happened, send, answer; returns what ``_time_to_wait`` does.

        Answering is last, with nothing between it and the next wait: a caller that is woken needs
        the interpreter lock, which this thread gives up when it waits.
        """
        fleet, batcher = self.fleet, self.batcher
        if not events and fleet.scaling.is_fixed:
            timeout = self._time_to_wait()  # which may begin to drain
            if timeout and fleet.state is not EngineState.DRAINING:
                return timeout  # nothing is due: it was woken to wait less, or a caller did it
        calls: list[Call] = []
        parts: list[tuple[Call, Any]] = []
        try:
            with self.lock:
                if self.is_torn or self.left:
                    self.settle()
                now = self.clock()
                if len(events) > 1:
                    fleet.foresee(events)
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
            if self.unsent:
                self.send()
            timeout = None if has_more else self._time_to_wait()
        finally:  # they are over, so nothing else would answer them
            if calls or parts:
                self._answer(calls, parts)
                if self.on_answered is not None:
                    self.on_answered()
            if self.records:
                self._hand_out_records()
        if has_more:
            self._look_after_workers(rest)
            timeout = self._time_to_wait()
        return timeout

    def _apply(self, event: FleetEvent, now: float) -> None:
        """Let what happened change the state."""
        self.take_up(self.fleet.apply(event, now))
        if not isinstance(event, BatchReport):
            self.changed.notify_all()

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

    # -- workers

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
            if slots.bound.ends:
                self.transport.kill(slot, self._hang.format(seconds))
            else:
                self._log_hang(slot, seconds)
        for slot, allowed in orders.kill:
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
            for slot in [*batcher.slots]:
                batcher.slots.remove(slot, self.clock())
        self.has_ended = True  # first: code that sets ``on_end`` and then looks misses nothing
        self.on_workers()
        self.cancel_exit()
        self.on_end()
        cut_off = f", {counted(len(calls), 'call')} cut off" if calls else ""
        log(logging.INFO, "the workers have ended%s", cut_off)


def _slot(message: Message) -> int:
    return message.slot if isinstance(message, BatchRecord) else message[0]
