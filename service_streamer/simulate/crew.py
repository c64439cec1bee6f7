"""The workers of a simulation: the fleet of the engine, and time to load.

Nothing is lost here and nothing fails: a worker is ready when it has loaded its model, and ends
when it holds nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..batching.batcher import Actions, Batcher
from ..engine.fleet import Fleet
from ..errors import WorkerLost
from ..supervision.autoscaling import Autoscaling
from ..supervision.restarts import Loss, RestartPolicy
from ..supervision.supervisor import Supervisor
from ..workers.protocol import Failure, WorkerReady
from ..workers.transport import WorkerDied

_ENDED = Failure(WorkerLost("it has ended"))


class Crew:
    """Has as many workers as the load needs, within bounds.

    Args:
        least, most: the bounds.
        start_duration: what a worker takes to load its model, seconds. The first ones have done so
            when the simulation begins.
        will_be_ready: called with a slot whose worker has begun to load its model: call ``ready``
            when it has.
        do: called with what the batcher wants done, and when.

    Attributes:
        wanted: when the number of workers changed, and to how many.
        lives: from when until when each worker was ready, seconds.
    """

    def __init__(
        self,
        batcher: Batcher,
        least: int,
        most: int,
        *,
        start_duration: float,
        will_be_ready: Callable[[int, float], None],
        do: Callable[[Actions, float], None],
    ) -> None:
        supervisor = Supervisor(least, RestartPolicy())
        scaling = Autoscaling(least, most)
        self._fleet = Fleet(batcher, supervisor, scaling, jitter=lambda: 0.0)
        self._start_duration = start_duration
        self._will_be_ready = will_be_ready
        self._do = do
        self.wanted = [(0.0, least)]
        self.lives: dict[int, tuple[float, float]] = {}

    def start(self) -> None:
        """The first workers are ready."""
        orders, _ = self._fleet.look_after_workers((), -self._start_duration)
        for slot, _ in orders.start:
            self.ready(slot, 0.0)

    def ready(self, slot: int, now: float) -> None:
        """The worker has loaded its model."""
        if slot in self._fleet.supervisor:  # else it was ended meanwhile
            self.lives[slot] = now, math.inf
            self._do(self._fleet.apply(WorkerReady(slot), now), now)
            self._obey((), now)  # one that stood in for it may have to end

    @property
    def due(self) -> float:
        """When to ``look`` at the latest."""
        return self._fleet.scaling.due

    @property
    def changes(self) -> int:
        """How often workers were added after some had been ended, or the other way round."""
        return self._fleet.scaling.changes

    def look(self, now: float) -> None:
        """Have more workers, or fewer, if the load says so."""
        self._fleet.scale_by_load(now)
        wanted = self._fleet.supervisor.wanted
        if wanted != self.wanted[-1][1]:
            self.wanted.append((now, wanted))
            self._obey((), now)

    def vacant(self, actions: Actions, now: float) -> None:
        """End the workers that were to end and hold nothing any more."""
        if actions.vacant:
            self._obey([actions], now)

    def _obey(self, rest: Sequence[Actions], now: float) -> None:
        """Do what is to be done about workers. None is killed, as starts have no bound here."""
        fleet = self._fleet
        while rest or fleet.supervisor.due <= now:
            orders, rest = fleet.look_after_workers(rest, now)
            for slot, _ in orders.start:
                self._will_be_ready(slot, now + self._start_duration)
            for actions in rest:
                self._do(actions, now)
            rest = ()
            for slot in orders.stop:
                loss = Loss.DIED_STARTING
                if slot in self.lives:
                    self.lives[slot] = self.lives[slot][0], now
                    loss = Loss.CRASHED
                self._do(fleet.apply(WorkerDied(slot, _ENDED, loss), now), now)
        fleet.notes.clear()

    def worked(self, since: float, until: float) -> float:
        """Seconds of all workers that were ready, in this time."""
        return sum(
            max(0.0, min(ends, until) - max(begins, since)) for begins, ends in self.lives.values()
        )
