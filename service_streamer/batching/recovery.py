"""What becomes of batches that failed or were lost: run again, or their calls fail; and of workers.

what happened                   what follows
-------------                   ------------
the model raised on a batch     it is run again in parts, as ``isolation`` says; or its calls
                                fail
the worker may be at fault      it is held back, as ``supervision.health`` says, and another
                                worker runs the batch
the worker died                 batches that it had not begun are run again as they were; those
                                that it was at in parts, each alone with a worker
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..observe.record import BatchRecord, Call
from ..supervision.health import Health, Quarantine
from .cost import LearnedCost
from .endings import Endings
from .isolation import Retries, Search, parts_after_death
from .slots import Slots


class Recovery:
    """Decides on batches that failed, and on the workers that they failed on.

    Args:
        slots: workers, of which it holds some back.
        retries: gets what is run again.
        health: of the workers.
        endings: ends the calls of what is not run again.
        cost: what a batch costs.

    Attributes:
        start_duration: what a worker takes to be ready, seconds.
    """

    __slots__ = ("_cost", "_endings", "_health", "_retries", "_slots", "start_duration")

    def __init__(
        self, slots: Slots, retries: Retries, health: Health, endings: Endings, cost: LearnedCost
    ) -> None:
        self._slots = slots
        self._retries = retries
        self._health = health
        self._endings = endings
        self._cost = cost
        self.start_duration = 0.0

    def batch_failed(self, batch: BatchRecord) -> tuple[list[Call], list[Search]]:
        """The model raised on the batch; the calls that fail, and the searches that end by that."""
        failure = batch.report.failure
        is_doubted = self._is_doubted(batch, failure)
        is_rerun = self._retries.raised(batch, failure)
        if is_doubted:
            is_rerun = self._try_worker(batch, failure, is_rerun=is_rerun) or is_rerun
        if is_rerun:
            return [], []
        if batch.calls > 1:  # as it ran
            calls = self._endings.fail_shared(batch.spans, failure, is_loss=False)
        else:
            calls = self._endings.fail_spans(batch.spans, failure)
        searches = self._retries.given_up(batch, len(calls))
        if batch.calls > 1 and calls:
            searches.append(Search.not_made(batch, failure, len(calls)))
        return calls, searches

    def none_crossed(self, batch: BatchRecord) -> bool:
        """No item of the batch could cross between the processes; whether it is run again."""
        failure = next(iter(batch.report.failures.values()))
        is_doubted = batch.search is None and self._is_doubted(batch, failure)
        return is_doubted and self._try_worker(batch, failure)

    def _is_doubted(self, batch: BatchRecord, failure: Any) -> bool:
        """Whether the worker may be at fault, which failed the batch.

        Not if the failure, opaque here otherwise, blames an item.
        """
        if getattr(failure, "blames_input", False):
            return False
        is_alone = batch.calls < 2
        if batch.search is not None:
            return self._health.failed_part(batch.slot, is_alone=is_alone)
        return self._health.failed(batch.slot, batch.back_at, is_alone=is_alone)

    def _try_worker(self, batch: BatchRecord, failure: Any, *, is_rerun: bool = False) -> bool:
        """Find out whether the worker that failed the batch is at fault; whether it is run again.

        The batch is run by another worker, in parts if it has several calls.

        Args:
            is_rerun: whether the batch has been cut in parts already.
        """
        slots = self._slots
        others = slots.taking - slots.takes(batch.slot)
        if not others or 2 * others < len(slots):  # at most half of the workers are held back
            return False
        trial = batch.search if is_rerun else self._retries.again(batch, failure)
        if batch.slot not in self._health.trials:
            self._health.begin_trial(batch.slot, trial or Quarantine(), batch.back_at)
            slots.hold_back(batch.slot)
        return trial is not None

    def judge(self, now: float) -> list[int]:
        """End the trials that are over; the slots of workers to be replaced."""
        released, condemned = self._health.judge(now)
        for slot in released:
            self._slots.release(slot)
        if not self._slots.taking:
            for slot in self._health.no_other():
                self._slots.release(slot)
        return condemned

    def worker_lost(
        self,
        lost: Sequence[BatchRecord],
        failure: Any,
        now: float,
        batch_id: int | None,
        begun: frozenset[int] | None,
        *,
        is_outage: bool = False,
    ) -> tuple[list[Call], list[Search]]:
        """A worker has died with these batches; the calls that fail, and the searches that end.

        Args:
            lost: the batches, in the order in which they were sent.
            failure, batch_id, begun, is_outage: as for ``Batcher.worker_lost``.
        """
        calls: list[Call] = []
        searches: list[Search] = []
        for position, batch in enumerate(lost):
            is_begun = begun is None or batch.id in begun
            # One that was sent ahead has probably not begun, and is run as a whole first.
            is_ahead = begun is None and position > 0
            if is_outage and is_begun and not (is_ahead and self._is_one_by_one):
                is_rerun = self._retries.met_outage(batch, failure, self._parts(batch, now))
            elif is_outage or (batch_id is None and not is_begun):
                is_rerun = self._retries.not_begun(batch, failure)
            elif batch_id is None:
                count = 1 if is_ahead else self._parts(batch, now)
                is_rerun = self._retries.lost(batch, failure, count)
            elif batch.id == batch_id or (begun is not None and is_begun):
                # What a device was asked to do it may say later, of another batch.
                is_rerun = self._retries.device_failed(batch, failure)
            else:
                is_rerun = self._retries.not_begun(batch, failure)
            if not is_rerun:
                calls += self._give_up(batch, failure, searches)
        return calls, searches

    @property
    def _is_one_by_one(self) -> bool:
        """Whether a worker is at one batch at a time: its model has neither steps nor stages."""
        return not self._slots.places and not self._slots.beside

    def _parts(self, batch: BatchRecord, now: float) -> int:
        """In how many parts to run a batch again with which a worker died."""
        died_after = max(0.0, now - batch.cut_at)
        cost = self._cost
        run = cost.duration(batch.cost / batch.size) if cost.is_known else died_after
        return parts_after_death(batch.size, run, died_after + self.start_duration)

    def _give_up(self, batch: BatchRecord, failure: Any, searches: list[Search]) -> list[Call]:
        """Fail the calls of a batch with which a worker died; returns what has failed.

        If its search may cost no more deaths, all that wait there fail with it.

        Args:
            searches: gets the search, if it has ended by that.
        """
        endings, search = self._endings, batch.search
        # Of a call that was alone it is known that it kills, at the end of a search too.
        if search is None or batch.calls == 1:
            failed = endings.fail_spans(batch.spans, failure)
        else:
            failed = endings.fail_shared(batch.spans, failure, is_loss=True)
        if search is not None and search.deaths_left <= 0:
            for part in self._retries.drop(search):
                failed += endings.fail_shared(part.spans, failure, is_loss=True)
        searches += self._retries.given_up(batch, len(failed))
        return failed
