"""How long a worker may be at one batch before it is taken for hung: a given or a learned time.

What "auto" allows:

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
from typing import Literal

__all__ = ["WARM", "BatchBound", "Timeout"]

#: Seconds; "auto" learns, None sets no bound.
Timeout = float | Literal["auto"] | None

#: A worker that has computed so many batches is warm. The first one may compile nothing yet: a
#: service asks its model to describe itself.
WARM = 10

_LEAST = 60.0
_PATIENCE_FACTOR = 2.0
_FACTOR = 10.0
#: Until ``WARM`` batches have come back, if nobody has said how long callers wait, seconds.
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
