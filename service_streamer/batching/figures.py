"""What a batcher says of itself: counts, the metrics of batches, and the load."""

from __future__ import annotations

import math
from collections import deque

from ..observe.metrics import BatchMetrics
from ..observe.recent import RECENT
from ..observe.record import BatchRecord
from ..supervision.autoscaling import Load
from .call_queue import CallQueue
from .isolation import Retries
from .policy import Policy
from .slots import Slots

#: So many batches that are back are counted in the metrics at once, which takes less time.
_COUNTED_AT_ONCE = 64


class Figures:
    """Counts calls and batches, and tells of them.

    Args:
        slots: of the workers.

    Attributes:
        retries: parts of batches that wait to be run again, and what was counted of them.
        pending, policy: calls with items that are not cut, and what knows how long they take; both
            set by the batcher.
        accepted_calls, accepted_items, answered_calls: how many, so far.
        failed_calls: those that failed of anything but their time, so far.
        expired_calls: those whose time ended, so far.
        cancelled_calls: those that were withdrawn, so far.
        rejected_calls: how many were refused since too much waited, so far; the engine counts those
            that found no room.
        refused_items: of those calls that were refused since too much waited, and would have been
            in time by themselves; counted there, too.
        batch_duration: what the model has taken for a batch of late, seconds; infinity before the
            first.
        recent: the last batches that came back, the oldest first.
    """

    pending: CallQueue
    policy: Policy

    def __init__(self, retries: Retries, slots: Slots) -> None:
        self.retries = retries
        self._slots = slots
        self.accepted_calls = self.accepted_items = self.answered_calls = 0
        self.failed_calls = self.expired_calls = self.cancelled_calls = 0
        self.rejected_calls = self.refused_items = 0
        self.batch_duration = math.inf
        self._metrics = BatchMetrics()
        self._uncounted: list[BatchRecord] = []  # batches that are not in the metrics yet
        self._waits: list[float] = []  # of the lone calls among them, seconds
        self._waited = 0.0  # the sum of these
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT)

    # -- what happens

    def came_back(self, batch: BatchRecord) -> None:
        """Count a batch that is back, be it with results or a failure."""
        if self._slots.places:
            self._metrics.item_over(batch)
        else:
            self._uncounted.append(batch)
            if batch.calls > 1:
                if batch.search is None:
                    self._metrics.was_cut(batch)
            elif batch.search is None:
                waited = batch.cut_at - batch.spans[0][0].arrived_at
                self._waits.append(waited)
                self._waited += waited
            if len(self._uncounted) >= _COUNTED_AT_ONCE:
                self._count_back()
        self.note(batch)
        self.recent.append(batch)

    def lost(self, batch: BatchRecord) -> None:
        """A batch of new items was lost with its worker."""
        self._metrics.was_cut(batch)

    def note(self, batch: BatchRecord) -> None:
        """Note in a batch that is back, or lost, what was counted until then."""
        batch.queued = self._metrics.queued.total + self._waited
        batch.pending = self.pending.items
        batch.answered, batch.failed = self.answered_calls, self.failed_calls
        batch.expired, batch.rejected = self.expired_calls, self.rejected_calls

    def took(self, duration: float) -> None:
        """The model has taken so long for a batch, or for an item if it is one of steps."""
        known, many = self.batch_duration, 4
        if self._slots.places:  # items differ far more than batches do
            many = min(4 * self._slots.places, self.metrics.batch.count)
        self.batch_duration = duration if known == math.inf else known + (duration - known) / many

    def _count_back(self) -> None:
        """Count the batches that are back in the metrics, which somebody looks at or are many."""
        if self._uncounted:
            self._metrics.came_back(self._uncounted)
            self._uncounted.clear()
        if self._waits:
            self._metrics.queued.add_all(self._waits)
            self._waits.clear()
            self._waited = 0.0

    # -- what it says

    @property
    def metrics(self) -> BatchMetrics:
        """Of the batches so far."""
        self._count_back()
        return self._metrics

    def load(self, failed: int, start_duration: float) -> Load:
        """What there is to do, for ``Autoscaling``.

        Args:
            failed: workers that are wanted and could not be started.
            start_duration: what a worker takes to start, seconds.
        """
        over, places = self.metrics.batch.count, self._slots.places
        if places:  # each item is a batch here, and all places together are one
            full, seconds = places, self.batch_duration
            served, turn = over, seconds / full
            over //= full
        else:
            policy = self.policy
            full = policy.full
            served, turn = int(self.metrics.sizes.total), policy.duration(full)
            seconds = turn
        is_known = 0 < seconds < math.inf
        return Load(
            waiting=self.pending.items + self.retries.items,
            in_flight=self._slots.items,
            arrived=self.accepted_items + self.refused_items,
            served=served,
            batches=over,
            ready=self._slots.taking,
            failed=failed,
            full=full,
            speed=full / seconds if is_known else 0.0,
            turn=turn if is_known else 0.0,
            start_duration=start_duration,
            refused=self.refused_items + self.expired_calls,
        )
