"""Which worker fails everything while others do not, and whether no worker answers at all.

A worker that has failed ``ROW`` batches in a row is replaced if most of the other workers have
computed their last batch: at most one a minute, and until then it is held back. It goes on if most
of the others fail meanwhile, or if no other worker takes batches. Callers who send nothing but bad
items may have a worker replaced by that, now and then.

How long a worker may be at one batch, before it is taken for hung, is given or learned:

    least     60 s, or twice as long as callers wait, if that is more
    usually   ten times the longest batch so far, but no less than the least; nor less than twice as
              long as a call of the batch may take, ten times the least if that is for ever
    at first  ten times the least, until ten batches have come back: models compile and warm up. An
              hour, if neither the callers as a rule nor those of the batch have said how long they
              wait. A later worker's first ten batches are measured by those of earlier workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

#: So many batches in a row say that a worker is at fault. Chosen by reasoning: where one batch in
#: ten fails at random, one of 10,000 batches ends such a row.
ROW = 4

#: Between two replacements, seconds: loading may take nearly as long.
INTERVAL = 60.0

#: Batches in a row, of all workers, that fail and are reason to say that none answers.
TROUBLE_ROW = 10

#: After so many seconds without another failure nothing is known any more: else a service that
#: gets no calls, since it is not ready, could never become ready again.
TROUBLE_FADES = 60.0


class Health:
    """The rows of failures of workers, by their slots. Not thread-safe."""

    def __init__(self) -> None:
        self.row = 0  # batches in a row that have failed, of all workers
        self._failed_at = -math.inf
        self._rows: Counter[int] = Counter()  # by worker; 0 if its last batch was computed
        #: When another worker may be replaced, and so when to ``judge`` while one is held back.
        self.due = -math.inf

    def computed(self, slot: int) -> None:
        """The worker has computed a batch."""
        self.row = self._rows[slot] = 0

    def failed(self, slot: int, now: float) -> None:
        """The worker has failed a batch of which it is not known that its items are bad."""
        self.row += 1
        self._failed_at = now
        self._rows[slot] += 1

    def is_suspect(self, slot: int) -> bool:
        """Whether the worker fails everything while most of the others do not."""
        others = [row for each, row in self._rows.items() if each != slot]
        return self._rows[slot] >= ROW and 2 * others.count(0) > len(others)

    def judge(self, suspects: Sequence[int], now: float) -> Sequence[int]:
        """The slots of workers that are replaced, of these that fail everything."""
        if now < self.due or not suspects:
            return ()
        self.due = now + INTERVAL
        return suspects[:1]

    def lost(self, slot: int, now: float, *, had_new_items: bool) -> None:
        """The worker has died."""
        if had_new_items:
            self.failed(slot, now)
        self._rows.pop(slot, None)

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
    """

    def __init__(
        self, patience: float | None = None, *, fixed: float | None = None, ends: bool = True
    ) -> None:
        self.ends = ends
        self._fixed = fixed
        least = max(_LEAST, _PATIENCE_FACTOR * (patience or 0.0)) if fixed is None else fixed
        self.least = least  # it never is below that, seconds
        #: A longer batch may change it, seconds.
        self.notable = least / _FACTOR if fixed is None else math.inf
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
