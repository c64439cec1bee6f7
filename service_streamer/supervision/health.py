"""Which worker fails everything while others do not, and whether no worker answers at all.

That batches fail says little of a worker: one caller's bad items fail wherever they go, and calls
may reach workers in a pattern. So a worker is judged by a trial. It is held back meanwhile, so that
one that fails at once does not draw the traffic.

    what happens                                        what follows
    ------------                                        ------------
    a worker fails two batches in a row                 a trial: the second is run again elsewhere
    another worker computes all of that                 the worker goes on; one trial against it
    another worker fails on a part of that              the worker goes on; twice as many failures
                                                        to the next trial
    no other worker finds the time for it in a minute   the worker goes on; as above
    three trials against it, without a batch that it    it is replaced; at most one worker a minute,
    computed in between                                 and until then it is held back

The parts of its first batch may all reach that worker as well. So when it has failed four model
calls in a row, it fails no lone call before another worker has failed that, too.

Of a batch of several calls, which is run again in parts, that would hold up the worker for long. So
it is only done while the others fail few: where bad items are everywhere, a row says nothing.

Where nothing may be run again, the trial is what the other workers do meanwhile: eight batches
without a failure are against it.

How long a worker may be at one batch, before it is taken for hung, is given or learned. What
"auto" allows:

    least     60 s, or twice as long as callers wait, if that is more
    usually   ten times the longest batch so far, but no less than that; nor less than twice as long
              as a call of the batch may take, ten times the least if that is for ever
    at first  ten times the least, or of what the calls of the batch allow, until ten batches have
              come back: models compile and warm up. An hour, if neither the callers as a rule nor
              those of the batch have said how long they wait. Later a worker's own first ten
              batches are measured by those of the workers before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Protocol

#: After how many failures in a row a worker is tried. With one, each bad call would be run twice.
_PATIENCE = 2

#: The same counted with the parts of batches that failed; more, since in those are bad items.
_PART_PATIENCE = 4

#: What the others fail is few if it is at most so many times what they compute: one of three is.
_FEW = 0.67

#: Up to how many failures that doubles, while trials find nothing against it.
_MOST_PATIENCE = 64

#: So many trials against a worker. Of a model that fails at random once in ten times, about one
#: worker in 15,000 batches; then ``INTERVAL`` bounds it.
TRIALS = 3

#: Between two replacements, seconds: loading may take nearly as long.
INTERVAL = 60.0

#: How long a trial may take, seconds: the others may be at long batches, or hang.
LONGEST_TRIAL = 60.0

#: Batches in a row, of all workers, that fail and are reason to say that none answers.
TROUBLE_ROW = 10

#: After so many seconds without another failure nothing is known any more: else a service that
#: gets no calls, since it is not ready, could never become ready again.
TROUBLE_FADES = 60.0

#: Of how many batches of other workers none may fail, where nothing may be run again.
_QUARANTINE = 8


class Trial(Protocol):
    """What ``isolation.Search`` and ``Quarantine`` have in common.

    Attributes:
        parts: how much is not known yet; 0 when the trial is over.
        runs: model calls of other workers so far.
        failed: how many calls have failed there.
        is_void: whether something failed there after its callers had gone.
    """

    parts: int
    runs: int
    failed: int
    is_void: bool


class Quarantine:
    """A trial in which nothing is run again: the new batches of the other workers count."""

    __slots__ = ("failed", "is_void", "parts", "runs")

    def __init__(self) -> None:
        self.parts = _QUARANTINE
        self.runs = self.failed = 0
        self.is_void = False

    def computed(self) -> None:
        self.runs += 1
        self.parts = max(0, self.parts - 1)

    def has_failed(self) -> None:
        self.failed += 1
        self.parts = 0


class _Row:
    """The batches in a row that a worker has failed.

    Attributes:
        computed, failed: new batches of all workers, up to its beginning.
        failures: new batches in the row; ``runs`` counts also parts of them that failed.
        patience, part_patience: when each of the two is reason for the next trial.
    """

    __slots__ = (
        "computed",
        "failed",
        "failures",
        "part_patience",
        "patience",
        "runs",
        "trials_against",
    )

    def __init__(self, computed: int, failed: int) -> None:
        self.computed = computed
        self.failed = failed
        self.failures = self.runs = 0
        self.patience = _PATIENCE
        self.part_patience = _PART_PATIENCE
        self.trials_against = 0


class Health:
    """The rows of failures of workers, by their slots. Not thread-safe.

    Attributes:
        is_wary: whether there is any; otherwise computed batches need not be reported.
        trials: by slot, of the workers that are held back; those that are over wait for ``judge``.
        row: batches in a row that have failed, of all workers.
        next_end: when to ask ``judge`` at the latest; infinity while there is no trial.
    """

    def __init__(self) -> None:
        self.is_wary = False
        self.trials: dict[int, Trial] = {}
        self.row = 0
        self.next_end = math.inf
        self._ends: dict[int, float] = {}  # of the trials
        self._failed_at = -math.inf
        self._rows: dict[int, _Row] = {}
        self._computed = self._failed = 0  # new batches, while there is a row
        self._next_at = -math.inf  # when another worker may be replaced

    def computed(self, slot: int, *, is_new: bool = True) -> None:
        """The worker has computed a batch of new items, or one that is run again."""
        self.row = 0
        self._rows.pop(slot, None)
        self._computed += is_new
        for trial in self._quarantines(slot):
            trial.computed()
        self.is_wary = bool(self._rows or self.trials)

    def failed(self, slot: int, now: float, *, is_alone: bool = True) -> bool:
        """The worker has failed a batch of new items; whether another is to run that again.

        Args:
            is_alone: whether the batch was of one call.
        """
        self._count(now)
        for trial in self._quarantines(slot):
            trial.has_failed()
        row = self._rows.setdefault(slot, _Row(self._computed, self._failed))
        row.failures += 1
        row.runs += 1
        self._failed += 1
        others_failed = self._failed - row.failed - row.failures
        others_computed = self._computed - row.computed
        # Nor is it done while nothing is known of the others.
        if not is_alone and others_failed >= _FEW * others_computed:
            return False
        return row.failures >= row.patience or slot in self.trials

    def failed_part(self, slot: int, *, is_alone: bool) -> bool:
        """The same for a part of a batch that failed before."""
        row = self._rows.get(slot)
        if row is None:
            return False
        row.runs += 1
        return is_alone and (row.runs >= row.part_patience or slot in self.trials)

    def begin_trial(self, slot: int, trial: Trial, now: float) -> None:
        """The worker is held back until ``judge`` says otherwise."""
        self.trials[slot] = trial
        self._ends[slot] = now + LONGEST_TRIAL
        self._find_next_end()

    def _end_trial(self, slot: int) -> None:
        self.trials.pop(slot, None)
        self._ends.pop(slot, None)
        self._find_next_end()

    def _find_next_end(self) -> None:
        self.next_end = min(self._ends.values(), default=math.inf)

    def lost(self, slot: int, now: float, *, had_new_items: bool) -> None:
        """The worker has died."""
        if had_new_items:
            self._count(now)
        self._rows.pop(slot, None)
        self._end_trial(slot)

    def _count(self, now: float) -> None:
        self.row += 1
        self._failed_at = now
        self.is_wary = True

    def _quarantines(self, but_of: int) -> Iterator[Quarantine]:
        for slot, trial in self.trials.items():
            if slot != but_of and isinstance(trial, Quarantine):
                yield trial

    def judge(self, now: float) -> tuple[list[int], list[int]]:
        """The slots of workers that may go on, and of those to be replaced: their trials are over.

        Neither has those that are to be replaced, but not yet.
        """
        cleared: list[int] = []
        condemned: list[int] = []
        for slot, trial in [*self.trials.items()]:
            is_late = bool(trial.parts)
            if is_late and now < self._ends.get(slot, math.inf):
                continue
            row = self._rows.get(slot)
            if row is None:  # it has computed something meanwhile
                cleared.append(slot)
            elif is_late or not trial.runs or trial.failed or trial.is_void:
                row.patience = row.failures + min(row.failures, _MOST_PATIENCE)
                row.part_patience = row.runs + min(row.runs, _MOST_PATIENCE)
                cleared.append(slot)
            elif row.trials_against < TRIALS - 1:
                row.trials_against += 1
                cleared.append(slot)
            elif now >= self._next_at:
                self._next_at = now + INTERVAL
                condemned.append(slot)
            else:
                self._ends[slot] = self._next_at
        for slot in [*cleared, *condemned]:
            self._end_trial(slot)
        self._find_next_end()
        self.is_wary = bool(self._rows or self.trials or self.row)
        return cleared, condemned

    def no_other(self) -> list[int]:
        """No other worker takes batches: the slots of those that were held back go on."""
        slots = [*self.trials]
        for slot in slots:
            self._end_trial(slot)
        return slots

    def is_failing(self, now: float) -> bool:
        """Whether no worker answers: the last batches of all of them have failed, a while ago."""
        return self.row >= TROUBLE_ROW and now - self._failed_at < TROUBLE_FADES


#: Seconds; "auto" learns, None sets no bound.
Timeout = float | Literal["auto"] | None

#: A worker that has computed so many batches is warm. The first one may compile nothing yet: a
#: service asks its model to describe itself.
WARM = 10

_LEAST = 60.0
_PATIENCE_FACTOR = 2.0
_FACTOR = 10.0
#: Until ``WARM`` batches have come back, if no timeout says how long callers wait, seconds.
_UNKNOWN = 3600.0


class BatchBound:
    """The bound, and what is learned for it. Not thread-safe.

    Args:
        patience: how long callers wait for results as a rule, seconds; None if it is not known.
        fixed: the bound, seconds, instead of a learned one.
        ends: whether a worker is ended that is beyond it; else that is only said.

    Attributes:
        least: what it never is below, seconds.
        notable: a longer batch may change it, seconds.
    """

    __slots__ = (
        "_batches",
        "_fixed",
        "_longest",
        "_longest_cold",
        "_unknown",
        "ends",
        "least",
        "notable",
    )

    def __init__(
        self, patience: float | None = None, *, fixed: float | None = None, ends: bool = True
    ) -> None:
        self.ends = ends
        self._fixed = fixed
        if fixed is None:
            self.least = max(_LEAST, _PATIENCE_FACTOR * (patience or 0.0))
            self.notable = self.least / _FACTOR
        else:
            self.least, self.notable = fixed, math.inf
        self._unknown = _UNKNOWN if patience is None else _FACTOR * self.least  # for ever
        self._batches = 0
        self._longest = self._longest_cold = 0.0

    def observe(self, took: float, batches: int) -> None:
        """A batch came back; for each that took longer than ``notable``, or whose worker was cold.

        Args:
            took: seconds.
            batches: how many its worker had computed before.
        """
        self._batches += 1
        if batches < WARM:
            self._longest_cold = max(self._longest_cold, took)
        if batches:
            self._longest = max(self._longest, took)

    def limit(self, batches: int, patience: float = 0.0) -> float:
        """How long a worker may take for its batch, seconds.

        Args:
            batches: how many it has computed before.
            patience: the longest that a call of the batch may take, seconds; infinity for ever.
        """
        if self._fixed is not None:
            return self._fixed
        most = _PATIENCE_FACTOR * patience if patience < math.inf else _FACTOR * self.least
        longest = self._longest if batches >= WARM else max(self._longest, self._longest_cold)
        limit = max(self.least, _FACTOR * longest, most)
        if self._batches >= WARM:
            return limit
        return max(limit, self._unknown if patience == math.inf else _FACTOR * self.least)

    @property
    def normal(self) -> float:
        """Beyond so many seconds something is wrong as a rule; no reason yet to end a worker."""
        return self.least if self._batches < WARM else self.limit(WARM)
