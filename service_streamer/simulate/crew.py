"""The workers of a simulation: the supervisor and the autoscaling of the engine, and time to load.

Nothing is lost here and nothing fails: a worker is ready when it has loaded its model, and ends
when it holds nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..batching.batcher import Actions, Batcher
from ..supervision.autoscaling import Autoscaling
from ..supervision.supervisor import Loss, RestartPolicy, Supervisor


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
        self._batcher = batcher
        self._scaling = Autoscaling(least, most)
        self._supervisor = Supervisor(least, RestartPolicy())
        self._start_duration = start_duration
        self._will_be_ready = will_be_ready
        self._do = do
        self.wanted = [(0.0, least)]
        self.lives: dict[int, tuple[float, float]] = {}

    def start(self) -> None:
        """The first workers are ready."""
        for slot, _ in self._supervisor.orders(-self._start_duration).start:
            self.ready(slot, 0.0)

    def ready(self, slot: int, now: float) -> None:
        """The worker has loaded its model."""
        if slot not in self._supervisor:
            return  # it was ended meanwhile
        self._supervisor.ready(slot, now)
        self.lives[slot] = now, math.inf
        self._do(self._batcher.worker_ready(slot, now, self._start_duration), now)
        self._obey(now)  # one that stood in for it may have to end

    @property
    def due(self) -> float:
        """When to ``look`` at the latest."""
        return self._scaling.due

    @property
    def changes(self) -> int:
        """How often workers were added after some had been ended, or the other way round."""
        return self._scaling.changes

    def look(self, now: float) -> None:
        """Have more workers, or fewer, if the load says so."""
        scaling, supervisor = self._scaling, self._supervisor
        if not scaling.is_due(self._batcher.pending_items, now):
            return
        load = self._batcher.load(0, self._start_duration)
        wanted = scaling.decide(load, now)
        if wanted == supervisor.wanted:
            return
        self.wanted.append((now, wanted))
        supervisor.want(wanted)
        self._obey(now)

    def _obey(self, now: float) -> None:
        """Do what the supervisor wants done now. It kills none, as starts have no bound here."""
        supervisor = self._supervisor
        while supervisor.due <= now:
            orders = supervisor.orders(now)
            for slot, _ in orders.start:
                self._will_be_ready(slot, now + self._start_duration)
            for slot in orders.stop:
                supervisor.lost(slot, Loss.DIED_STARTING, now, 0.0)
            for slot in orders.keep:
                self._do(self._batcher.worker_kept(slot, now), now)
            for slot in orders.retire:
                actions = self._batcher.worker_retiring(slot, now)
                self.vacant(actions, now)
                self._do(actions, now)

    def vacant(self, actions: Actions, now: float) -> None:
        """End the workers that were to end and hold nothing any more."""
        for slot in actions.vacant:
            if self._supervisor.vacant(slot):
                self.lives[slot] = self.lives[slot][0], now
                self._supervisor.lost(slot, Loss.CRASHED, now, 0.0)
                self._do(self._batcher.worker_lost(slot, None, now), now)
                self._obey(now)  # its place may be wanted again

    def worked(self, since: float, until: float) -> float:
        """Seconds of all workers that were ready, in this time."""
        return sum(
            max(0.0, min(ends, until) - max(begins, since)) for begins, ends in self.lives.values()
        )
