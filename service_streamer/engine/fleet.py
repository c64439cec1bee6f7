"""The workers and the calls together: what follows for one from what happens to the other. Pure.

The engine tells a ``Fleet`` what has happened, under its lock, and does what it says. The simulator
does the same, with workers that only take time. Time comes in as ``now``.

     state      meaning                                    leaves when
     -----      -------                                    -----------
     STARTING   accepts calls; a worker still loads        each is ready or has failed
     RUNNING    accepts calls                              closed, or no worker can be started
     BROKEN     no worker can be started: calls fail at    a worker is ready, since they are tried
                once, with the reason                      again and again; or closed
     DRAINING   refuses calls, finishes accepted ones      nothing is left, or its time ends
     CLOSED     refuses calls; nothing of it is left       -
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..batching.batcher import NOTHING, Actions, Batcher
from ..batching.isolation import Search
from ..errors import StreamerBroken, WorkerStartError
from ..observe.metrics import StreamerStats, WorkerStats
from ..observe.record import BatchReport
from ..reporting import counted
from ..supervision.autoscaling import Autoscaling
from ..supervision.health import Timeout
from ..supervision.supervisor import Fate, Loss, Supervisor, WorkerActions, WorkerState
from ..workers.protocol import Failure, WorkerReady
from ..workers.transport import WorkerDied, WorkerEvent, WorkerWaits

#: Of a step nothing follows for the workers, but for what is over by it.
FleetEvent = BatchReport | WorkerReady | WorkerWaits | WorkerDied

#: Levels of the notes, as those of ``logging``.
_INFO, _WARNING, _ERROR = 20, 30, 40

_REPLACED = (
    "worker %d is replaced: it failed batch after batch, and most of the others computed theirs; "
    "its last error was %s"
)

_STOP_FIRST = (
    "two workers do not fit: restart_workers(overlap=False) ends the old one first; if there is no "
    "other worker, calls wait meanwhile"
)


#: Of workers, as users see them: one that is ready is idle or busy.
_STATES = ["idle", "busy", *(s.value for s in WorkerState if s is not WorkerState.READY)]


class EngineState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"
    DRAINING = "draining"
    CLOSED = "closed"


class Fleet:
    """The workers of an engine or a simulation, and their calls. Not thread-safe.

    There are at least, and at first, ``least`` workers, and ``most`` if the load needs them.
    """

    def __init__(
        self, batcher: Batcher, least: int, most: int, start_timeout: Timeout = None
    ) -> None:
        self.batcher = batcher
        self.supervisor = Supervisor(least, start_timeout)
        self.scaling = Autoscaling(least, most)
        self.state = EngineState.STARTING
        self.refusal: Failure | None = None  # why new calls are refused; None accepts them
        #: To be logged by whoever reports what happened: level, text and its arguments.
        self.notes: list[tuple[int, str, tuple[object, ...]]] = []
        #: Of the model, by the worker that became ready last; None before the first.
        self.description: Mapping[str, Any] | None = None
        self.failure: Failure | None = None  # the last one of a place that has failed
        self.roll_failure: Failure | None = None  # that ended the last rolling restart
        self.ceilings: dict[int, float] = {}  # by slot, see ``StreamerStats``
        self._last_error = ""  # its class
        self._dying: set[int] = set()  # slots of which it is about to be said that they are lost

    def foresee(self, events: list[WorkerEvent]) -> None:
        """Have no batch cut for a worker of which a later one of these events says it is lost."""
        self._dying = {event.slot for event in events if type(event) is WorkerDied}
        for slot in self._dying.intersection(self.batcher.slots):
            self.batcher.slots.close(slot)  # after what it still answered it is lost

    def apply(self, event: FleetEvent, now: float) -> Actions:
        """Apply an event."""
        if isinstance(event, BatchReport):
            if event.ceiling or self.ceilings:
                self._ceiling_changed(event.slot, event.ceiling)
            failure = event.failure
            if event.failures and event.has_failed:
                failure = next(iter(event.failures.values()))
            if failure is not None and not failure.blames_input:
                self._last_error = failure.text[:100].partition(":")[0]
            actions = self.batcher.batch_returned(event, now)
            holder, retries = self.batcher.slots[event.slot], self.batcher.retries
            if holder.is_closing and not holder.batches:
                self.supervisor.due = -math.inf  # it may end
            if retries.searches or retries.raised:
                self._note_searches()
            return actions
        actions = NOTHING
        if isinstance(event, WorkerDied):
            actions = self._lost(event, now)
            self._note_searches()
        elif isinstance(event, WorkerReady):
            actions = self._ready(event, now)
        else:
            self.supervisor.waits(event.slot, has_place=event.has_place)
        self._workers_changed()
        return actions

    def _ready(self, event: WorkerReady, now: float) -> Actions:
        slot = event.slot
        if not self.supervisor.ready(slot, now):
            return NOTHING
        if event.places and not self.batcher.has_steps:
            self.batcher.begin_steps(event.places, resumes=event.resumes)
        self.description = event.description or {}
        self.batcher.slots.sizes = _sizes_of(self.description.get("batch_sizes"))
        self._note(_INFO, "worker %d is ready", self.supervisor.place(slot))
        if self.state is EngineState.BROKEN:
            self._note(_WARNING, "calls are accepted again")
        self.revive()
        if slot in self._dying:
            return NOTHING
        return self.batcher.worker_ready(slot, now)

    def _lost(self, event: WorkerDied, now: float) -> Actions:
        slot, failure, loss, batch_id, report, begun = event
        supervisor, slots, retries = self.supervisor, self.batcher.slots, self.batcher.retries
        place = supervisor.place(slot)
        self.ceilings.pop(slot, None)
        was_busy = slot in slots and len(slots[slot].batches) > 0
        ends_row = slot in slots and slots[slot].has_computed
        retried_before = retries.retried_items
        actions = self.batcher.worker_lost(
            slot, failure, now, batch_id, begun, is_outage=loss is Loss.OUTAGE
        )
        retried = retries.retried_items - retried_before
        # A GPU that has failed for good explains deaths, too, and is no reason for haste.
        if loss is not Loss.DEVICE_FAILED:
            ends_row |= any(call.failure is failure for call in actions.calls)
        aborted = supervisor.aborted
        fate = supervisor.lost(slot, loss, now, was_busy=was_busy, ends_row=ends_row)
        if supervisor.aborted != aborted:
            self.roll_failure = failure
            if loss is Loss.NO_MEMORY and fate is Fate.ABORTED:
                advice = f"{failure.message}; {_STOP_FIRST}"
                self.roll_failure = Failure(WorkerStartError(advice), cause=failure)
        is_news = fate not in (Fate.EXPECTED, Fate.FAILED_AGAIN) or was_busy
        if fate in (Fate.FAILED, Fate.FAILED_AGAIN):
            self._note_failed(failure, supervisor.retry_at(place) - now, is_news=is_news)
            self.failure = failure
        elif is_news:
            more = f"; to be computed again: {counted(retried, 'item')}" if retried else ""
            self._note(_WARNING, "%s; it is %s%s", failure.message, fate.value, more)
        else:
            self._note(_INFO, "worker %d has ended", place)
        if is_news and failure.remote_traceback is not None:
            self._note(_WARNING, "what it was doing:\n%s", failure.remote_traceback)
        if report is not None:  # the log has it if nobody else
            self._note(_WARNING, "what its model raised:\n%s", report)
        if supervisor.is_broken:
            broken = failure
            if supervisor.was_served:
                error = StreamerBroken(
                    "no worker is left, and new ones could not be started; starting them is tried "
                    "again at least once a minute, and by restart_workers() at once"
                )
                broken = Failure(error, cause=failure)
            if self.state not in (EngineState.DRAINING, EngineState.CLOSED):
                self.state, self.refusal = EngineState.BROKEN, broken
            calls = [*actions.calls, *self.batcher.fail_all(broken)]
            actions = actions._replace(calls=calls)
        return actions

    def look_after_workers(
        self, rest: Iterable[Actions], now: float
    ) -> tuple[WorkerActions, list[Actions]]:
        """What to do about workers, and what the batcher wants done then.

        Args:
            rest: what the batcher wanted done, but for its batches and calls.
        """
        supervisor, slots = self.supervisor, self.batcher.slots
        more: list[Actions] = []
        for slot in [slot for actions in rest for slot in actions.condemned]:
            ends_row = slot in slots and slots[slot].has_computed
            if supervisor.condemn(slot, now, ends_row=ends_row):
                self._note(_WARNING, _REPLACED, supervisor.place(slot), self._last_error)
        orders = supervisor.orders(now)
        for slot in orders.keep:
            self._note(
                _INFO, "worker %d is kept, since more are wanted again", supervisor.place(slot)
            )
            more.append(self.batcher.worker_kept(slot, now))
        for slot in orders.retire:
            more.append(self.batcher.worker_retiring(slot, now))  # others go on in its place
        self._workers_changed()
        orders.stop.extend(filter(supervisor.vacant, slots.vacant()))
        return orders, more

    def scale_by_load(self, now: float) -> None:
        """Have more workers, or fewer, if the load says so, and if it is time to look at it."""
        scaling, batcher, supervisor = self.scaling, self.batcher, self.supervisor
        if not scaling.is_due(batcher.pending_items, now):
            return
        waiting = batcher.pending_items
        load = batcher.scheduler.load(waiting, supervisor.failed, supervisor.start_duration)
        wanted, before = scaling.decide(load, now), supervisor.wanted
        if wanted == before:
            return
        supervisor.want(wanted)
        if wanted < before:
            why = ": fewer have been enough for a while"
        elif scaling.wait <= scaling.target:
            why = ", since calls are refused, or their time ends while they wait"
        else:
            queue = counted(load.waiting, "item")
            why = f", since the queue ({queue}) takes {scaling.wait:.2g} s, and the target is "
            why += f"{scaling.target:.2g} s"
        self._note(_INFO, "%s instead of %d%s", counted(wanted, "worker"), before, why)

    def set_bounds(self, least: int, most: int, now: float) -> None:
        """Have as many workers, within these bounds, as the load needs."""
        self.scaling.set_bounds(least, most, now)
        self.supervisor.scale(self.scaling.wanted)

    def revive(self) -> None:
        """A worker is ready, or the supervisor tries again at once."""
        if self.state is EngineState.BROKEN:
            self.state = EngineState.STARTING
            self.refusal = None

    def begin_drain(self, refusal: Failure) -> None:
        """Accept nothing any more; have workers for what is left only."""
        self.state = EngineState.DRAINING
        self.refusal = refusal
        self.supervisor.is_winding_down = True
        self.scaling.due = math.inf

    def _workers_changed(self) -> None:
        if self.state is EngineState.STARTING and not self.supervisor.is_starting:
            self.state = EngineState.RUNNING

    def _ceiling_changed(self, slot: int, ceiling: float) -> None:
        before, place = self.ceilings.get(slot, 0), self.supervisor.place(slot)
        if ceiling == before:
            return
        self.ceilings[slot] = ceiling
        most = f"a cost (items times the longest) of {ceiling:g}"
        if isinstance(ceiling, int):
            most = counted(ceiling, "item")
        if not ceiling:
            del self.ceilings[slot]
            self._note(_INFO, "worker %d computes batches of any size again", place)
        elif 0 < before < ceiling:
            text = "worker %d has more device memory: it computes at most %s at once"
            self._note(_INFO, text, place, most)
        else:
            text = "worker %d ran out of device memory: it computes at most %s at once"
            self._note(_WARNING, text, place, most)

    def _note(self, level: int, text: str, *arguments: object) -> None:
        self.notes.append((level, text, arguments))

    def _note_searches(self) -> None:
        """What the searches for faulty items cost that have come to an end."""
        for search in self.batcher.retries.take_ended():
            failure, level = search.failure, _WARNING if search.failed else _INFO
            failed, runs = counted(search.failed, "call"), counted(search.runs, "model call")
            if isinstance(search, Search):
                items = counted(search.items, "item")
                text = "%s with a worker that was lost (%s): %s to compute again, %s failed"
                self._note(level, text, items, failure.text, runs, failed)
            elif search.runs:
                calls = counted(search.calls, "call")
                why = "none of them when it was alone" if failure is None else failure.text
                text = "%d of %s in a batch failed (%s); to find out took %s more"
                self._note(_WARNING, text, search.failed, calls, why, runs)
            elif search.failed:
                text = "%s failed together with %s, and the call at fault is not known:\n%s"
                cause = failure.remote_traceback or failure.text
                self._note(level, text, failed, failure.text, cause)

    def _note_failed(self, failure: Failure, pause: float, *, is_news: bool) -> None:
        """Of a place without a worker: an error once, then a line for each try, if there is more.

        That is as seldom as the tries are, so that the last lines of the log say what is wrong.
        """
        text = f"; it is tried again in {pause:.1f} s"
        if pause == math.inf:  # the first failure of a place is news
            text = ""
            if self.supervisor.is_starting:  # else there will be none, and the owner ends
                text = "; it is tried again when another worker is ready"
        elif is_news:
            if self.failure is not None and failure.message == self.failure.message:
                return  # often all workers fail for the one same reason
            text += ", and then at least once a minute"
        self._note(_ERROR if is_news else _WARNING, "%s%s", failure.message, text)

    def _states(self) -> Iterator[tuple[int, str]]:
        """Place and state of each worker, and of each place that waits for one or has failed."""
        slots = self.batcher.slots
        workers = () if self.state is EngineState.CLOSED else self.supervisor.workers()
        for place, slot, state in workers:
            if slot is not None and state is WorkerState.READY:
                yield place, "busy" if slot in slots and slots[slot].batches else "idle"
            else:
                yield place, state.value

    def workers(self, device: Callable[[int], int | str | None]) -> list[WorkerStats]:
        """Each worker, and each place that waits for one or has failed, by number."""
        restarts = self.supervisor.restarts_at
        return [
            WorkerStats(place, device(place), state, restarts[place])
            for place, state in sorted(self._states(), key=lambda each: each[0])
        ]

    def stats(self, now: float) -> StreamerStats:
        batcher, supervisor = self.batcher, self.supervisor
        figures, slots, retries = batcher.figures, batcher.slots, batcher.retries
        workers = dict.fromkeys(_STATES, 0)
        for _, state in self._states():
            workers[state] += 1
        scaling = self.scaling
        scaled: dict[str, Any] = {}
        if not scaling.is_fixed:
            wait = scaling.wait_of(batcher.scheduler.load(batcher.pending_items, 0, 0.0))
            scaled = {"wanted": scaling.wanted, "target_wait": scaling.target, "wait": wait}
            scaled["worker_range"] = scaling.least, scaling.most
        return StreamerStats(
            state=self.state.value,
            pending=batcher.pending_items,
            in_flight=slots.held_items,
            batches_in_flight=len(slots.in_flight()),
            workers=workers,
            restarts=supervisor.restarts_at.total(),
            accepted=figures.accepted_calls,
            answered=figures.answered_calls,
            failed=figures.failed_calls,
            retries=retries.retried_items,
            expired=figures.expired_calls,
            cancelled=figures.cancelled_calls,
            rejected=figures.rejected_calls,
            isolated=retries.isolated_calls,
            ceilings={supervisor.place(slot): n for slot, n in self.ceilings.items()},
            trouble=self._trouble(now),
            **scaled,
        )

    def _trouble(self, now: float) -> str | None:
        """Why no worker gives answers at present; None while one does."""
        slots = self.batcher.slots
        health, seconds = slots.health, slots.stuck(now)
        if health.is_failing(now):
            last = f"; the last error was {self._last_error}" if self._last_error else ""
            return f"the last {health.row} batches failed, and none was computed since{last}"
        if seconds is None:
            return None
        return f"every worker has been at one batch for {seconds:.0f} s or longer"


def _sizes_of(sizes: object) -> tuple[int, ...]:
    """The sizes that a model's description names; none if they are not ascending whole numbers."""
    if not isinstance(sizes, (list, tuple)) or any(type(each) is not int for each in sizes):
        return ()
    return tuple(sizes) if [0, *sizes] == sorted({0, *sizes}) else ()
