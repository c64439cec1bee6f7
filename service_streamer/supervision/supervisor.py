"""How many workers there should be, which there are, and what to do about the difference.

    worker      meaning                                        leaves when
    ------      -------                                        -----------
    STARTING    its process starts and loads the model         ready, or lost
    READY       takes batches                                  retired, or lost
    RETIRING    finishes what it holds and takes no more       it holds nothing, or is lost; or it
                                                               is wanted after all: READY again
    STOPPING    was asked to end                               lost

    place       meaning
    -----       -------
    served      has a worker (two while one replaces the other)
    BACKING_OFF has none; one starts when its time comes
    FAILED      has none that is ready: starting it again and again did not help. It is tried
                again for ever, but seldom; ready ends that

A *place* is one of the wanted number of workers; it decides about the device. A *slot* is the name
of one worker, never used again. A place has failed when its workers were lost more than
``max_restarts`` times in a row, while they started or had nothing to do. Computing a batch, or
living for ``WINDOW`` seconds, ends the row. Losses of workers that compute do not count: else some
bad requests would end the service for everybody.

A renewal replaces the workers one at a time. With overlap the new one is ready before the old one
ends, which takes memory for both. A renewal that comes while another one is under way joins it,
with whichever overlap takes less memory. Renewals do not wait for a worker that waits for a place
on a cluster. One that waited before the renewal is replaced when it is ready: it may have begun to
load before, unheard.
"""

from __future__ import annotations

import collections
import enum
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from .health import Timeout

#: Whether a renewal starts the new worker before the old one ends; "auto" does if both fit.
Overlap = bool | Literal["auto"]

#: From the one that takes the least memory.
_OVERLAPS: list[Overlap] = [False, "auto", True]

#: So long a life ends a row, seconds.
WINDOW = 60.0

#: Before the second restart of a row, and the longest such pause, seconds. The first is at once.
BACKOFF, MAX_BACKOFF = 0.1, 5.0
#: The same before a place is tried again that has failed.
RETRY, MAX_RETRY = 1.0, 60.0

#: How often a place is tried again that never had a worker, if its processes die while they load:
#: several that load at the same time may run out of memory together.
_FIRST_RESTARTS = 2

#: What "auto" allows for loading a model, seconds, when none has been loaded yet: 140 GB of weights
#: at 40 MB/s. And when it is known how long that takes: so many times as long, but never less than
#: this, since the files may have been in memory then, and have to come from a network now.
_FIRST_START_TIMEOUT = 3600.0
_START_FACTOR = 10.0
_LEAST_START_TIMEOUT = 600.0


class Loss(enum.Enum):
    """How a worker was lost."""

    CRASHED = "died"
    OUTAGE = "was lost with its host, or its connection, whatever it computed"
    DEVICE_FAILED = "ended itself, since its GPU is of no use to it any more"
    START_FAILED = "said that it cannot load its model"
    NO_MEMORY = "said that it cannot load its model for lack of memory"
    NEVER_AGAIN = "cannot be started, and no other one can"


class Fate(enum.Enum):
    """What becomes of a lost worker, for the log."""

    EXPECTED = "not replaced, since it was about to end"
    GONE = "gone"
    RESTARTED = "started again"
    OLD_FIRST = "tried again when the old worker has ended: there is no memory for both"
    ABORTED = "gone, and the old worker stays"
    FAILED = "tried again, but seldom"
    FAILED_AGAIN = "tried again, but ever more seldom"


def backoff(tries: int, first: float, longest: float, jitter: float) -> float:
    """Seconds until the next try: they double. Jitter, 0 to 1, parts what failed together."""
    return min(longest, first * 2.0 ** min(tries, 60)) * (1.0 - jitter / 2)


class WorkerState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    FAILED = "failed"


class WorkerActions(NamedTuple):
    """What to do now with the workers of these slots."""

    start: list[tuple[int, int]]  # with the place of each
    retire: list[int]  # take no more batches
    stop: list[int]  # end: they hold nothing
    kill: list[tuple[int, float]]  # they took longer to be ready than so many seconds
    keep: list[int]  # were retiring, and take batches again


class _Worker:
    def __init__(self, slot: int, place: int, generation: int, now: float, bound: float) -> None:
        self.slot = slot
        self.place = place
        self.started_at = now
        self.bound = bound  # of loading, seconds
        self.ready_by = now + bound
        self.generation = generation
        self.state = WorkerState.STARTING
        self.is_condemned = False  # it ends in any case, and not only while fewer are wanted
        self.is_waiting = False  # for a place on a cluster
        self.ready_at = math.inf


class _Place:
    def __init__(self) -> None:
        self.restarts = 0  # in a row
        self.idle_losses = 0  # in a row: of workers that loaded, or had nothing to do
        self.tries = 0  # since it has failed
        self.restart_at = -math.inf  # at once
        self.has_failed = False
        self.was_served = False  # by a worker that was ready
        #: How many workers had become ready, here or elsewhere, when the one here was ended for a
        #: new one, which is not ready yet; None if none is awaited.
        self.awaited_at: int | None = None

    def forgive(self) -> None:
        """The row has ended."""
        self.restarts = self.idle_losses = self.tries = 0


class Supervisor:
    """Reconciles the workers that there are with those that there should be. Not thread-safe.

    Call its methods for what happens, and do what ``orders`` says whenever ``due`` is reached.

    Args:
        start_timeout: how long a worker may take to be ready, seconds; "auto" is learned, None sets
            no bound.
    """

    max_restarts = 10  # of one place in a row, after deaths that no batch had a part in

    def __init__(self, worker_num: int, start_timeout: Timeout = None) -> None:
        self._start_timeout = start_timeout
        self.jitter: Callable[[], float] = random.random
        self._workers: dict[int, _Worker] = {}
        self._places = [_Place() for _ in range(worker_num)]
        self._slots = itertools.count()
        self._generation = 0
        self._overlap: Overlap = "auto"  # of the renewals under way
        #: When to call ``orders``; minus infinity when something has changed.
        self.due = -math.inf
        self.restarts_at: collections.Counter[int] = collections.Counter()  # in total, by place
        #: When workers were lost that were started again, the last ones.
        self.restarted_at: collections.deque[float] = collections.deque(maxlen=100)
        self.aborted = -1  # the last generation whose replacement could not be started
        self.start_duration = 0.0  # what the last worker that is ready took to be so, seconds
        #: Whether failed places wait until a worker of another place is ready. For an owner that
        #: ends if none is: an unsuitable model would only be loaded again.
        self.tries_once = False
        #: The end is near: no more than one worker is started, for what is still to be computed.
        self.is_winding_down = False
        self._longest_start = 0.0  # seconds that loading has taken
        self._readied = 0  # how often a worker has become ready

    # -- what users want

    @property
    def wanted(self) -> int:
        """How many workers there should be."""
        return len(self._places)

    def scale(self, worker_num: int) -> None:
        """As ``want``; also, places that have failed get another chance."""
        self._retry_failed()
        self.want(worker_num)

    def want(self, worker_num: int) -> None:
        """Want another number of workers."""
        del self._places[worker_num:]
        self._places += [_Place() for _ in range(worker_num - len(self._places))]
        self.due = -math.inf

    def renew(self, overlap: Overlap = "auto") -> int:
        """Want every worker replaced, and failed places tried again; returns the generation."""
        if any(map(self._is_old, self._in(WorkerState.STARTING, WorkerState.READY))):
            overlap = min(overlap, self._overlap, key=_OVERLAPS.index)
        self._overlap = overlap
        self._generation += 1
        self._retry_failed()
        self.due = -math.inf
        return self._generation

    def _retry_failed(self) -> None:
        for place in self._places:
            if place.has_failed:
                place.forgive()
                place.restart_at, place.has_failed = -math.inf, False

    def is_renewed(self, generation: int) -> bool:
        """Whether every worker is of this generation or a later one, and ready.

        One that waits for a place on a cluster is new when it comes. But one must be ready, or
        nobody knows whether the new model can be loaded.
        """
        workers = self._workers.values()
        served = {worker.place for worker in workers if self._is_settled(worker)}
        return (
            bool(self._in(WorkerState.READY))
            and served >= set(range(len(self._places)))
            and all(worker.generation >= generation or worker.is_waiting for worker in workers)
        )

    # -- what workers do

    def _is_wanted(self, worker: _Worker) -> bool:
        return worker.place < len(self._places)

    def _beside(self, worker: _Worker) -> list[_Worker]:
        """The other workers of its place."""
        return [w for w in self._workers.values() if w.place == worker.place and w is not worker]

    def waits(self, slot: int, *, has_place: bool) -> None:
        """The worker waits for a place on a cluster; or has one, and begins to load its model."""
        worker = self._workers[slot]
        if worker.state is WorkerState.STARTING:
            worker.is_waiting = not has_place
            if not has_place:  # one that has it may have begun to load before the last renewal
                worker.generation = self._generation
            self.due = -math.inf

    def ready(self, slot: int, now: float) -> bool:
        """The worker has loaded its model; whether it may take batches: not if it is ended."""
        worker = self._workers[slot]
        if worker.state is WorkerState.STOPPING or worker.is_condemned:
            return False
        worker.state = WorkerState.READY
        worker.ready_at = now
        worker.is_waiting = False
        self._readied += 1
        self.start_duration = now - worker.started_at
        self._longest_start = max(self._longest_start, self.start_duration)
        if self._is_wanted(worker):
            place = self._places[worker.place]
            if place.has_failed:
                self.restarts_at[worker.place] += 1
            place.awaited_at, place.has_failed, place.was_served = None, False, True
        self.due = -math.inf
        return True

    def condemn(self, slot: int, now: float, *, ends_row: bool = False) -> bool:
        """Replace the worker, which fails everything; whether that is news.

        It ends first: a device may not have the memory for two. Its successor waits as after a
        death, so that a place whose workers all end like that does not load one after the other.
        """
        worker = self._workers.get(slot)
        if worker is None or worker.is_condemned:
            return False
        worker.is_condemned = True
        if worker.state is not WorkerState.READY:
            return False
        self.due = -math.inf
        if self._is_wanted(worker):
            if ends_row:
                self._places[worker.place].forgive()
            self._restart(worker.place, now)
        return True

    def vacant(self, slot: int) -> bool:
        """The worker holds nothing; whether it is to end, since it was retiring."""
        worker = self._workers.get(slot)
        if worker is None or worker.state is not WorkerState.RETIRING:
            return False
        worker.state = WorkerState.STOPPING
        return True

    def lost(
        self, slot: int, loss: Loss, now: float, *, was_busy: bool = False, ends_row: bool = False
    ) -> Fate:
        """The worker is gone; returns what follows.

        Args:
            was_busy: whether it held a batch, which may have been the cause.
            ends_row: whether it has computed a batch, or it is known that the batch was the cause.
        """
        worker = self._workers.pop(slot)
        self.due = -math.inf
        if worker.state in (WorkerState.RETIRING, WorkerState.STOPPING):
            return Fate.EXPECTED
        if self._beside(worker):  # one of a pair of which one was to replace the other
            if worker.state is not WorkerState.STARTING:
                return Fate.GONE
            can_spare = len(self._in(WorkerState.READY)) > 1
            may_end = self._overlap is False or (self._overlap == "auto" and can_spare)
            if loss is not Loss.NO_MEMORY or not may_end:
                self._abort()
                return Fate.ABORTED
            self._overlap = False
            return Fate.OLD_FIRST
        if not self._is_wanted(worker):
            return Fate.GONE
        place = self._places[worker.place]
        if ends_row or now - worker.ready_at >= WINDOW:
            place.forgive()
        place.was_served |= worker.ready_at < math.inf  # the place may be newer than the worker
        if place.awaited_at is not None and not self._is_settled(worker):
            self._abort()
        budget = 0 if loss is Loss.NEVER_AGAIN else self.max_restarts
        if not place.was_served:  # a start that has failed would say the same again
            budget = 0 if loss is Loss.START_FAILED else min(budget, _FIRST_RESTARTS)
        if not place.has_failed and (was_busy or place.idle_losses < budget):
            place.idle_losses += not was_busy
            self._restart(worker.place, now)
            return Fate.RESTARTED
        fate = Fate.FAILED_AGAIN if place.has_failed else Fate.FAILED
        place.has_failed = True
        place.restart_at = now + backoff(place.tries, RETRY, MAX_RETRY, self.jitter())
        place.tries += 1
        return fate

    def _restart(self, number: int, now: float) -> None:
        place = self._places[number]
        place.restart_at = now
        if place.restarts:
            place.restart_at += backoff(place.restarts - 1, BACKOFF, MAX_BACKOFF, self.jitter())
        place.restarts += 1
        self.restarts_at[number] += 1
        self.restarted_at.append(now)

    def _without(self, *states: WorkerState) -> dict[int, _Place]:
        """The places without a worker in one of these states, by number."""
        served = {worker.place for worker in self._in(*states)}
        return {each: place for each, place in enumerate(self._places) if each not in served}

    def _in(self, *states: WorkerState) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.state in states]

    def _abort(self) -> None:
        """Leave the workers that are not replaced yet: their successors would not start either."""
        self.aborted = self._generation
        for place in self._places:
            place.awaited_at = None
        for worker in self._workers.values():
            worker.generation = self._generation

    def _is_settled(self, worker: _Worker) -> bool:
        """Whether it is ready, or waits on a cluster, perhaps without end.

        If the old worker was ended for it, it may have that one's room, unless another one has
        become ready since.
        """
        if worker.state is WorkerState.READY:
            return True
        is_awaited = (
            self._is_wanted(worker) and self._places[worker.place].awaited_at == self._readied
        )
        return worker.is_waiting and not is_awaited and not self._beside(worker)

    # -- the difference

    def orders(self, now: float) -> WorkerActions:
        """What to do now; sets ``due``."""
        orders = WorkerActions([], [], [], [], [])
        self.due = math.inf
        for number in self._without(*WorkerState):
            if self.is_winding_down and self._in(WorkerState.STARTING, WorkerState.READY):
                break  # there is a worker for what is still to be computed, or will be
            if self.retry_at(number) <= now:
                self._start(number, orders, now)
            else:
                self.due = min(self.due, self.retry_at(number))
        for worker in self._workers.values():
            if self._is_missed(worker):
                # Its stream may take hours more, and there may be no room for another one beside.
                worker.state = WorkerState.READY
                orders.keep.append(worker.slot)
            elif worker.state is WorkerState.READY:
                successors = [w for w in self._beside(worker) if w.generation > worker.generation]
                worker.is_condemned |= any(w.state is WorkerState.READY for w in successors)
                if worker.is_condemned:
                    self._retire(worker, orders)
            elif worker.state is WorkerState.STARTING:
                self._check_start(worker, orders, now)
        # Never fewer than are wanted, if others can stand in for them.
        ready = self._in(WorkerState.READY)
        unwanted = [worker for worker in ready if not self._is_wanted(worker)]
        for worker in unwanted[: max(0, len(ready) - self.wanted)]:
            self._retire(worker, orders)
        # One at a time, so that there is never much less room nor a need for much more memory.
        vacant = self._without(*WorkerState).values()
        is_short = any(place.awaited_at is not None for place in vacant)
        if not is_short and all(map(self._is_settled, self._workers.values())):
            self._renew_next(orders, now)
        return orders

    def _check_start(self, worker: _Worker, orders: WorkerActions, now: float) -> None:
        """End a worker that loads, if it is unwanted or takes too long."""
        if not self._is_wanted(worker):
            worker.state, worker.is_waiting = WorkerState.STOPPING, False
            orders.stop.append(worker.slot)
            return
        if worker.ready_by + worker.bound / 2 < now:
            # We come much too late: this process was held up itself, and maybe all of them.
            worker.ready_by = now + worker.bound / 2
        elif worker.ready_by <= now:
            worker.is_condemned, worker.ready_by = True, math.inf
            orders.kill.append((worker.slot, worker.bound))
        self.due = min(self.due, worker.ready_by)

    def _is_missed(self, worker: _Worker) -> bool:
        """Whether it retires since fewer were wanted, but its place is wanted again, and free."""
        return (
            worker.state is WorkerState.RETIRING
            and not worker.is_condemned
            and self._is_wanted(worker)
            and not self.is_winding_down
            and all(w.state is WorkerState.STOPPING for w in self._beside(worker))
        )

    def _renew_next(self, orders: WorkerActions, now: float) -> None:
        """Replace one of the old workers, if there are any, and time for it."""
        old = list(filter(self._is_old, self._in(WorkerState.READY)))
        if not old or self.is_winding_down:
            return
        worker = min(old, key=lambda worker: worker.place)
        if self._overlap:
            self._start(worker.place, orders, now)
        else:
            self._places[worker.place].awaited_at = self._readied
            worker.is_condemned = True
            self._retire(worker, orders)

    def _start(self, place: int, orders: WorkerActions, now: float) -> None:
        slot, bound = next(self._slots), self._start_timeout
        if bound == "auto":
            learned = max(_LEAST_START_TIMEOUT, _START_FACTOR * self._longest_start)
            bound = learned if self.was_served else _FIRST_START_TIMEOUT
        worker = _Worker(slot, place, self._generation, now, math.inf if bound is None else bound)
        self._workers[slot] = worker
        self.due = min(self.due, worker.ready_by)
        orders.start.append((slot, place))

    def _retire(self, worker: _Worker, orders: WorkerActions) -> None:
        worker.state = WorkerState.RETIRING
        orders.retire.append(worker.slot)

    def _is_old(self, worker: _Worker) -> bool:
        """Whether a renewal is to replace it."""
        return worker.generation < self._generation and self._is_wanted(worker)

    # -- how it stands

    def __contains__(self, slot: int) -> bool:
        """Whether there is such a worker."""
        return slot in self._workers

    def place(self, slot: int) -> int:
        """The place of a worker that there is: what messages call its number."""
        return self._workers[slot].place

    def retry_at(self, place: int) -> float:
        """When a place is tried again; infinity if it waits for another: see ``tries_once``."""
        is_held = self.tries_once and not self.was_served and self._places[place].has_failed
        return math.inf if is_held else self._places[place].restart_at

    @property
    def is_loading(self) -> bool:
        """Whether a worker loads its model, be it in a place that has failed."""
        return bool(self._in(WorkerState.STARTING))

    @property
    def is_ready(self) -> bool:
        """Whether every place is served by a worker that is ready."""
        return not self._without(WorkerState.READY)

    @property
    def is_starting(self) -> bool:
        """Whether a place is not served by a worker that is ready, but soon will be, or fail."""
        return not all(place.has_failed for place in self._without(WorkerState.READY).values())

    @property
    def failed(self) -> int:
        """How many places have failed: by so many there are fewer workers than wanted."""
        return sum(place.has_failed for place in self._places)

    @property
    def is_broken(self) -> bool:
        """Whether no worker is left, and every place has failed."""
        return self.failed == self.wanted and not self._in(WorkerState.READY, WorkerState.RETIRING)

    @property
    def was_served(self) -> bool:
        """Whether any worker was ever ready."""
        return self._readied > 0

    def workers(self) -> Iterator[tuple[int, int | None, WorkerState]]:
        """Each worker as (place, slot, state), and each place without one, whose slot is None."""
        failed = [number for number, place in enumerate(self._places) if place.has_failed]
        for slot, worker in self._workers.items():
            is_retry = worker.state is WorkerState.STARTING and worker.place in failed
            yield worker.place, slot, WorkerState.FAILED if is_retry else worker.state
        for number, place in self._without(*WorkerState).items():
            yield number, None, WorkerState.FAILED if place.has_failed else WorkerState.BACKING_OFF
