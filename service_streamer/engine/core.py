"""Everything that an engine's lock guards: what callers and the loop share.

The lock is held for a few microseconds only: no I/O, no pickling, no logging, no code of users and
no completing of futures happens under it.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Sequence

from ..batching.actions import Actions
from ..batching.batcher import Batcher
from ..errors import StreamerClosed
from ..observe.metrics import StreamerStats
from ..observe.record import BatchRecord, BatchReport, Call, StepReport
from ..workers.protocol import DROP, RESUME, Failure
from ..workers.transport import Transport, WorkerDied, WorkerEvent, WorkerReady
from .fleet import EngineState, Fleet, Orders


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
        clock: seconds from a monotonic clock.

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
        records: of batches, if somebody watches: the loop hands them out and releases them.
        waits_until: until when the loop waits, if nothing happens.
        is_exiting: whether the interpreter ends.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
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
        self.open: dict[Call, None] = {}  # an ordered set
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
        for event in events:
            if isinstance(event, StepReport):
                for done in event.done:
                    done.slot = event.slot
                returned += event.done
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

    def happened(self, event: WorkerEvent, now: float) -> Actions:
        """Apply an event."""
        actions = self.fleet.happened(event, now)
        if not isinstance(event, (BatchReport, StepReport)):
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

    def watch(self) -> None:
        """Have the loop hand out the record of every batch from now on."""
        self.batcher.on_back = self._came_back

    def _came_back(self, record: BatchRecord) -> None:
        record.worker = self.fleet.supervisor.place(record.slot)
        self.records.append(record)

    def stats(self) -> StreamerStats:
        self.settle()
        return self.fleet.stats(self.clock())


def _to_answer(calls: Sequence[Call]) -> list[Call]:
    """Those that are over and whose callers may not know it: all but those that they withdrew."""
    return [call for call in calls if call.is_over and (call.failure or not call.unanswered)]
