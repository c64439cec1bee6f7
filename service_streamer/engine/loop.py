"""The one thread of an engine: waits for the workers, has decided what follows, and does it.

transport.wait ◀──── BatchReport ─────── one per batch
├─ lock ── batcher: batch_returned, ...; supervisor: lost, ... ── unlock
├─ transport.send: workers are busy again first,
├─ reply.complete / reply.fail: then callers get their results,
└─ transport.start, stop, kill: then workers are looked after
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..batching.batcher import NOTHING, Actions
from ..batching.isolation import Raised, Search
from ..errors import InternalError, StreamerBroken, StreamerClosed, WorkerStartError
from ..observe.record import NO_OUTPUTS, BatchRecord, BatchReport, Call, StepReport
from ..reporting import counted, summary
from ..supervision.restarts import Loss
from ..workers.protocol import Failure
from ..workers.transport import WorkerDied, WorkerEvent
from .at_exit import AtExit
from .backend import BlockingReply, LoopReply, Mailbox, wake
from .core import Core, log, logger
from .fleet import EngineState
from .timer import rest_if_copied

#: How long an idle worker may take to end, seconds: torch takes some tenths of one.
_STOP_GRACE = 5.0
#: The same for one that is still loading, or computing for callers that have their answer already.
ABORT_GRACE = 0.5

#: Between two failures of our own, seconds; arbitrary.
_LONGEST_PAUSE = 1.0

#: After so many seconds the same failure is logged again; arbitrary.
_LOG_AGAIN = 60.0


class Loop:
    """Runs an engine; the only one to wait for the transport, and to start and end workers.

    Args:
        hang: what a worker is said to have been killed for whose batch took too long; "{:g}" stands
            for how long. Where workers are not ended for that, why.
        slow_start: the same for one that took too long to be ready.
    """

    def __init__(self, core: Core, *, hang: str, slow_start: str) -> None:
        self._core = core
        self._hang = hang
        self._slow_start = slow_start
        self._last_bug, self._logged_at = "", 0.0
        #: Set by a finalizer, which may run under our locks: drain and close, soon.
        self.is_abandoned = False
        self.thread = threading.Thread(target=self._run, name="service_streamer", daemon=True)
        self._ended = threading.Event()
        #: Called when all that came back at a time is answered; must not raise.
        self.on_answered: Callable[[], None] | None = None
        #: Called with the record of every batch that came back, if the core is watched.
        self.on_batch: Callable[[BatchRecord], None] = lambda _: None
        #: Called when a worker has become ready, or has been lost; must not raise.
        self.on_workers: Callable[[], None] = lambda: None
        #: Called at the very end.
        self.on_end: Callable[[], None] = lambda: None
        #: Whether ``on_end`` has been called, or is about to be.
        self.has_ended = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the workers and the thread; does not wait for them."""
        core, fleet = self._core, self._core.fleet
        for slot, place in fleet.supervisor.orders(core.clock()).start:
            self._core.transport.start(slot, place, fleet.scaling.most)
        self.thread.start()

    def join(self) -> None:
        """Block until the workers have ended, and the thread with them.

        Not by joining the thread alone: Python takes a thread for ended once a KeyboardInterrupt
        has ended a ``join``, and every later one returns at once.
        """
        self._ended.wait()
        self.thread.join()

    def _run(self) -> None:
        try:
            self._run_to_the_end()
        finally:
            self._ended.set()

    def _run_to_the_end(self) -> None:
        reason: Failure | None = None
        failures = 0  # in a row
        events: list[WorkerEvent] = []
        try:
            timeout = self._time_to_wait()
            while timeout is not None:
                try:
                    # No operating system waits for years at once.
                    wait = None if timeout == math.inf else min(timeout, 1e5)
                    events = events or self._core.transport.wait(wait)
                    timeout = self._handle(events)
                    events, failures = [], 0  # or the last results would live until the next come
                except Exception as error:
                    rest_if_copied(self._pid)
                    failures += 1
                    # What fails twice is left out, and what fails on and on is tried more seldom.
                    events = self._recover(error, events)
                    if failures > 1:
                        events = []
                        time.sleep(min(_LONGEST_PAUSE, 0.01 * 2 ** min(failures, 10)))
                    timeout = 0.0
        except BaseException as error:
            # Nobody may wait for a thread that is dead, whatever it died of.
            log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
            reason = Failure(StreamerBroken(f"the streamer failed: {summary(error)}"))
        finally:
            self._shut_down(reason)

    def _recover(self, error: Exception, events: list[WorkerEvent]) -> list[WorkerEvent]:
        """An exception of our own: end the calls that are open, and go on with a new state.

        Args:
            events: that were being applied.

        Returns:
            Those that are still to be applied.
        """
        core = self._core
        text = f"the streamer failed, which is a bug in it, and goes on: {summary(error)}"
        with core.lock:
            calls = core.fail_open(Failure(InternalError(text)), events)
            news = [event for event in events if core.is_news(event)]
        failed = counted(len(calls), "call")
        if text != self._last_bug or time.monotonic() - self._logged_at > _LOG_AGAIN:
            self._last_bug, self._logged_at = text, time.monotonic()
            log(logging.CRITICAL, "%s; %s failed", text, failed, exc_info=True)
        self._answer_all(calls)
        if self.on_answered is not None:
            self.on_answered()
        return news

    def _time_to_wait(self) -> float | None:
        """Seconds until something is due, ``inf`` for never; None when it is time to shut down."""
        core, fleet = self._core, self._core.fleet
        with core.lock:
            core.settle()
            if self.is_abandoned:
                core.begin_drain(math.inf)
            now = core.clock()
            due = min(core.batcher.deadline, fleet.supervisor.due, fleet.scaling.due)
            if fleet.state is EngineState.DRAINING:
                is_answered = core.batcher.is_answered and not core.unsent
                if is_answered or core.drain_deadline <= now:
                    return None
                due = min(due, core.drain_deadline)
            if core.undone or core.unsent or core.left:
                due = now
            core.waits_until = due
            return max(0.0, due - now)

    def _handle(self, events: list[WorkerEvent]) -> float | None:
        """Apply what happened, send, answer; returns what ``_time_to_wait`` does.

        Answering is last, with nothing between it and the next wait: a caller that is woken needs
        the interpreter lock, which this thread gives up when it waits.
        """
        core, fleet = self._core, self._core.fleet
        calls: list[Call] = []
        rest: list[Actions] = []  # those that say more than what to send and to answer
        parts: list[tuple[Call, Any]] = []
        if logger.isEnabledFor(logging.DEBUG):
            self._log_failures(events)  # before they are applied, which releases the failures
        try:
            with core.lock:
                core.settle()
                now = core.clock()
                if len(events) > 1:
                    fleet.foresee(events)
                for event in events:
                    # Nearly every event is a batch that was computed, with nothing else to note.
                    if (
                        type(event) is BatchReport
                        and event.failure is None
                        and event.slot in fleet.supervisor.progressed
                        and not (event.ceiling or fleet.ceilings)
                    ):
                        actions = core.batcher.batch_returned(event, now)
                    elif isinstance(event, StepReport):
                        parts += core.batcher.stepped(event, now)
                        continue
                    else:
                        actions = core.happened(event, now)
                    if actions.batches:
                        core.queue(actions.batches)
                    calls += actions.calls
                    if actions.vacant or actions.searches or actions.condemned:
                        rest.append(actions)
                # While draining no caller may be left to flush what was submitted.
                is_draining = self.is_abandoned or fleet.state is EngineState.DRAINING
                if not (fleet.scaling.is_fixed or is_draining):
                    fleet.scale_by_load(now)
                if core.batcher.deadline <= now or is_draining:
                    actions = core.batcher.time_passed(now)
                    core.queue(actions.batches)
                    calls += actions.calls
                    if actions is not NOTHING:
                        rest.append(actions)
                if core.undone:
                    calls += [call for actions in core.undone for call in actions.calls]
                    rest += core.undone
                    core.undone = []
                core.collect_unwanted()
                has_more = rest or fleet.notes or fleet.supervisor.due <= now
            if core.unsent:
                core.send()
            timeout = None if has_more else self._time_to_wait()
        finally:  # they are over, so nothing else would answer them
            if parts:
                self._hand_out(parts)
            self._answer_all(calls)
            if self.on_answered is not None and (calls or parts):
                self.on_answered()
            if core.records:
                self._hand_out_records()
        if has_more:
            self._look_after_workers(rest)
            timeout = self._time_to_wait()
        return timeout

    def _hand_out_records(self) -> None:
        core = self._core
        records, core.records = core.records, []  # only this thread adds to them
        for record in records:
            try:
                self.on_batch(record)
            except BaseException:  # as of a callback: this thread does not end for it
                log(logging.ERROR, "what watches the batches raised", exc_info=True)
            record.release()

    def _look_after_workers(self, rest: list[Actions]) -> None:
        """Do what happens seldom: end and start workers, and log."""
        core = self._core
        with core.lock:
            core.settle()
            orders = core.look_after_workers(rest)
            notes, core.fleet.notes = core.fleet.notes, []
        self.on_workers()
        for level, text, arguments in notes:
            log(level, text, *arguments)
        for search in [search for actions in rest for search in actions.searches]:
            _log_search(search)
        for slot in orders.stop:
            self._core.transport.stop(slot)
        for slot, seconds in orders.hung:
            if core.batcher.slots.ends_hung:
                self._core.transport.kill(slot, self._hang.format(seconds))
            else:
                self._log_hang(slot, seconds)
        for slot, seconds in orders.slow:
            self._core.transport.kill(slot, self._slow_start.format(seconds))
        for slot, place in orders.start:
            self._start_worker(slot, place)

    def _log_hang(self, slot: int, seconds: float) -> None:
        with self._core.lock:
            place = self._core.fleet.supervisor.place(slot)
        stack = self._core.transport.stack(slot)  # first, or it might be done meanwhile
        text = "worker %d has been at one batch for more than %.0f s, and is not ended: %s"
        log(logging.WARNING, text, place, seconds, self._hang)
        if stack:
            log(logging.WARNING, "what it was doing:\n%s", stack)

    def _start_worker(self, slot: int, place: int) -> None:
        core = self._core
        try:
            self._core.transport.start(slot, place, core.fleet.scaling.most)
        except Exception as error:  # no memory for a process, no descriptors: perhaps later
            failed = WorkerStartError(f"worker {place} could not be started: {summary(error)}")
            failed.__cause__ = error.with_traceback(None)
            with core.lock:
                lost = WorkerDied(slot, Failure(failed), Loss.DIED_STARTING)
                core.undone.append(core.happened(lost, core.clock()))

    def _shut_down(self, reason: Failure | None) -> None:
        """End all. With a reason of None it was closed."""
        core, fleet = self._core, self._core.fleet
        refusal = reason
        if reason is None:
            kind = AtExit if core.is_exiting else Failure
            error = StreamerClosed("the streamer was closed before the call was served")
            reason, refusal = kind(error), Failure(error)
        with core.lock:
            fleet.state = EngineState.CLOSED
            if fleet.refusal is None:
                fleet.refusal = refusal
            is_idle = core.batcher.is_empty and not fleet.supervisor.is_loading
            calls = core.fail_open(reason)
            core.changed.notify_all()
        self._answer_all(calls)
        core.open_calls.clear()
        self._core.transport.close(_STOP_GRACE if is_idle else ABORT_GRACE)
        with core.lock:
            core.batcher.forget_workers()
        self.has_ended = True  # first: code that sets ``on_end`` and then looks misses nothing
        self.on_workers()
        self.on_end()
        cut_off = f", {counted(len(calls), 'call')} cut off" if calls else ""
        log(logging.INFO, "the workers have ended%s", cut_off)

    def _hand_out(self, parts: list[tuple[Call, Any]]) -> None:
        """Hand out outputs of streams. Tasks of one loop are woken together, when all are there."""
        mailboxes: set[Mailbox] = set()
        for call, output in parts:
            reply = call.reply
            if reply is not None:  # else its caller has gone meanwhile
                mailbox = reply.put_part(output)
                if mailbox is not None:
                    mailboxes.add(mailbox)
        for mailbox in mailboxes:
            mailbox.post_looks()

    def _answer_all(self, calls: Sequence[Call]) -> None:
        """Answer calls that are over; then wake threads and loops, once for all of their calls."""
        waiters: list[BlockingReply] = []
        mailboxes: set[Mailbox] = set()
        for call in calls:
            # Whoever still holds the call does not hold its results.
            reply, outputs, call.reply, call.outputs = call.reply, call.outputs, None, NO_OUTPUTS
            kind = type(reply)
            try:
                if call.failure is not None:
                    if reply is not None:  # else it was answered before a bug of ours
                        reply.fail(call.failure)
                elif kind is BlockingReply:
                    reply.put(outputs)
                    waiters.append(reply)
                elif kind is LoopReply:
                    mailboxes.add(reply.put(outputs))
                elif reply is not None:
                    reply.complete(outputs)
            except BaseException:
                # A callback of a user's may raise anything, SystemExit too. Others wait for their
                # answers, and this thread does not end for it.
                log(logging.ERROR, "a callback of a future raised", exc_info=True)
        wake(waiters)
        for mailbox in mailboxes:
            mailbox.deliver_soon()
        forget = self._core.open_calls.pop
        for call in calls:
            forget(call, None)

    def _log_failures(self, events: list[WorkerEvent]) -> None:
        for event in events:
            if type(event) is BatchReport and event.failure is not None:
                log(logging.DEBUG, "batch %d failed: %s", event.batch_id, event.failure.text)


def _log_search(search: Search | Raised) -> None:
    """Log what the search for the faulty item cost."""
    failure = search.failure
    if isinstance(search, Search):
        log(
            logging.WARNING if search.failed else logging.INFO,
            "%s with a worker that was lost (%s): %s to compute again, %s failed",
            counted(search.items, "item"), failure.text, counted(search.runs, "model call"),
            counted(search.failed, "call"),
        )  # fmt: skip
    elif search.runs:
        log(
            logging.WARNING,
            "%d of %s in a batch failed (%s); to find out took %s more",
            search.failed, counted(search.calls, "call"),
            "none of them when it was alone" if failure is None else failure.text,
            counted(search.runs, "model call"),
        )  # fmt: skip
    elif search.failed:
        log(
            logging.WARNING,
            "%s failed together with %s, and the call at fault is not known:\n%s",
            counted(search.failed, "call"), failure.text,
            failure.remote_traceback or failure.text,
        )  # fmt: skip
