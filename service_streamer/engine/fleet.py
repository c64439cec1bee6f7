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
from ..batching.isolation import Raised, Search
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

    Args:
        least: how many workers there are at first, and at least.
        most: how many the load may need.
        start_timeout: see ``Supervisor``.
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
        slots = self.batcher.slots
        for slot in self._dying:
            if slot in slots:
                slots.close(slot)  # after what it still answered it is lost

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
        actions, retried, was_busy, ends_row = NOTHING, retries.retried_items, False, False
        if slot in slots:
            was_busy, ends_row = bool(slots[slot].batches), slots[slot].has_computed
            actions = self.batcher.worker_lost(
                slot, failure, now, batch_id, begun, is_outage=loss is Loss.OUTAGE
            )
        retried = retries.retried_items - retried
        # A GPU that has failed for good explains deaths, too, and is no reason for haste.
        if loss is not Loss.DEVICE_FAILED:
            ends_row |= any(call.failure is failure for call in actions.calls)
        was_failing, aborted = supervisor.retry_at(place) is not None, supervisor.aborted
        fate = supervisor.lost(slot, loss, now, was_busy=was_busy, ends_row=ends_row)
        if supervisor.aborted != aborted:
            self.roll_failure = failure
            if loss is Loss.NO_MEMORY and fate is Fate.ABORTED:
                advice = f"{failure.message}; {_STOP_FIRST}"
                self.roll_failure = Failure(WorkerStartError(advice), cause=failure)
        is_news = fate is not Fate.EXPECTED or was_busy
        if fate is Fate.FAILED:
            is_news = not was_failing
            pause = (supervisor.retry_at(place) or 0.0) - now
            self._note_failed(failure, pause, is_news=is_news)
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
        supervisor = self.supervisor
        more: list[Actions] = []
        for slot in [slot for actions in rest for slot in actions.condemned]:
            self._condemn(slot, now)
        orders = supervisor.orders(now)
        for slot in orders.keep:
            self._note(
                _INFO, "worker %d is kept, since more are wanted again", supervisor.place(slot)
            )
            more.append(self.batcher.worker_kept(slot, now))
        for slot in orders.retire:
            more.append(self.batcher.worker_retiring(slot, now))  # others go on in its place
        self._workers_changed()
        orders.stop.extend(filter(supervisor.vacant, self.batcher.slots.vacant()))
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

    def _condemn(self, slot: int, now: float) -> None:
        """Have a worker replaced that fails everything while others do not."""
        slots = self.batcher.slots
        has_computed = slot in slots and slots[slot].has_computed
        if self.supervisor.condemn(slot, now, ends_row=has_computed):
            self._note(
                _WARNING,
                "worker %d is replaced: it failed batch after batch, and most of the others "
                "computed theirs; its last error was %s",
                self.supervisor.place(slot), self._last_error,
            )  # fmt: skip

    def revive(self) -> None:
        """A worker is ready, or the supervisor tries again at once."""
        if self.state is EngineState.BROKEN:
            self.state = EngineState.STARTING
            self.refusal = None

    def begin_drain(self, refusal: Failure) -> None:
        """Accept nothing any more; have workers for what is left only."""
        self.state = EngineState.DRAINING
        self.refusal = refusal
        self.supervisor.wind_down()
        self.scaling.due = math.inf

    def _workers_changed(self) -> None:
        supervisor = self.supervisor
        has_begun = not (supervisor.is_starting or supervisor.is_broken)
        if self.state is EngineState.STARTING and has_begun:
            self.state = EngineState.RUNNING

    def _ceiling_changed(self, slot: int, ceiling: float) -> None:
        before = self.ceilings.get(slot, 0)
        if ceiling == before:
            return
        place = self.supervisor.place(slot)
        if not ceiling:
            del self.ceilings[slot]
            self._note(_INFO, "worker %d computes batches of any size again", place)
            return
        self.ceilings[slot] = ceiling
        is_lower = not before or ceiling < before
        self._note(
            _WARNING if is_lower else _INFO,
            "worker %d %s: it computes at most %s at once",
            place, "ran out of device memory" if is_lower else "has more device memory",
            counted(ceiling, "item") if isinstance(ceiling, int)
            else f"a cost (items times the longest) of {ceiling:g}",
        )  # fmt: skip

    def _note(self, level: int, text: str, *arguments: object) -> None:
        self.notes.append((level, text, arguments))

    def _note_searches(self) -> None:
        """What the searches for faulty items cost that have come to an end."""
        for search in self.batcher.retries.take_ended():
            self._note_search(search)

    def _note_search(self, search: Search | Raised) -> None:
        failure = search.failure
        if isinstance(search, Search):
            self._note(
                _WARNING if search.failed else _INFO,
                "%s with a worker that was lost (%s): %s to compute again, %s failed",
                counted(search.items, "item"), failure.text, counted(search.runs, "model call"),
                counted(search.failed, "call"),
            )  # fmt: skip
        elif search.runs:
            self._note(
                _WARNING,
                "%d of %s in a batch failed (%s); to find out took %s more",
                search.failed, counted(search.calls, "call"),
                "none of them when it was alone" if failure is None else failure.text,
                counted(search.runs, "model call"),
            )  # fmt: skip
        elif search.failed:
            self._note(
                _WARNING,
                "%s failed together with %s, and the call at fault is not known:\n%s",
                counted(search.failed, "call"), failure.text,
                failure.remote_traceback or failure.text,
            )  # fmt: skip

    def _note_failed(self, failure: Failure, pause: float, *, is_news: bool) -> None:
        """Of a place without a worker: an error once, then a line for each try, if there is more.

        That is as seldom as the tries are, so that the last lines of the log say what is wrong.
        """
        if pause == math.inf:  # the first failure of a place is news
            text = "%s; it is tried again when another worker is ready"
            if not self.supervisor.is_starting:  # there will be none, and the owner ends
                text = "%s"
            self._note(_ERROR, text, failure.message)
        elif not is_news:
            text = "%s; it is tried again in %.1f s"
            self._note(_WARNING, text, failure.message, pause)
        elif self.failure is None or failure.message != self.failure.message:
            # Often all workers fail for the one same reason.
            text = "%s; it is tried again in %.1f s, and then at least once a minute"
            self._note(_ERROR, text, failure.message, pause)

    def _states(self) -> Iterator[tuple[int, str]]:
        """Place and state of each worker, and of each place that waits for one or has failed."""
        slots = self.batcher.slots
        for place, slot, state in self.supervisor.workers():
            if slot is not None and state is WorkerState.READY:
                yield place, "busy" if slot in slots and slots[slot].batches else "idle"
            else:
                yield place, state.value

    def workers(self, device: Callable[[int], int | str | None]) -> list[WorkerStats]:
        """Each worker, and each place that waits for one or has failed, by number."""
        if self.state is EngineState.CLOSED:
            return []
        restarts = self.supervisor.restarts_at
        workers = [
            WorkerStats(place, device(place), state, restarts[place])
            for place, state in self._states()
        ]
        return sorted(workers, key=lambda worker: worker.number)

    def stats(self, now: float) -> StreamerStats:
        batcher, supervisor = self.batcher, self.supervisor
        figures, slots, retries = batcher.figures, batcher.slots, batcher.retries
        workers = dict.fromkeys(_STATES, 0)
        if self.state is not EngineState.CLOSED:
            for _, state in self._states():
                workers[state] += 1
        scaling = self.scaling
        scaled: dict[str, Any] = {}
        if not scaling.is_fixed:
            scaled = {
                "wanted": scaling.wanted,
                "worker_range": (scaling.least, scaling.most),
                "target_wait": scaling.target,
                "wait": scaling.wait_of(batcher.scheduler.load(batcher.pending_items, 0, 0.0)),
            }
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
        health = self.batcher.slots.health
        if health.is_failing(now):
            last = f"; the last error was {self._last_error}" if self._last_error else ""
            return f"the last {health.row} batches failed, and none was computed since{last}"
        seconds = self.batcher.slots.stuck(now)
        if seconds is not None:
            return f"every worker has been at one batch for {seconds:.0f} s or longer"
        return None


def _sizes_of(sizes: object) -> tuple[int, ...]:
    """The sizes that a model's description names; none if they are not ascending whole numbers."""
    if not isinstance(sizes, (list, tuple)) or any(type(each) is not int for each in sizes):
        return ()
    is_ascending = all(left < right for left, right in zip((0, *sizes), sizes, strict=False))
    return tuple(sizes) if is_ascending else ()
