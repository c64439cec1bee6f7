"""How a worker is lost, and when another one is started in its place."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class Loss(enum.Enum):
    """How a worker was lost."""

    CRASHED = "died after it had been ready"
    OUTAGE = "was lost with its host, or its connection, whatever it computed"
    DEVICE_FAILED = "ended itself, since its GPU is of no use to it any more"
    DIED_STARTING = "died before it was ready"
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


def backoff(tries: int, first: float, longest: float, jitter: float) -> float:
    """Seconds to wait before the next try, after so many: they double, up to the longest.

    The jitter is random, 0 to 1: what failed together does not try again together.
    """
    return min(longest, first * 2.0 ** min(tries, 60)) * (1.0 - jitter / 2)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When lost workers are started again. Times are in seconds."""

    max_restarts: int = 10  # in a row, of one place, after deaths that no batch had a part in
    window: float = 60.0  # so long a life ends a row
    #: Before the second restart of a row, and the longest: it doubles. The first is at once.
    backoff: float = 0.1
    max_backoff: float = 5.0
    #: Before a place that has failed is tried again, and the longest: it doubles.
    retry: float = 1.0
    max_retry: float = 60.0
    #: Until a worker is ready. None sets no bound, and "auto" one that the supervisor learns.
    start_timeout: float | Literal["auto"] | None = None

    def delay(self, restarts: int, jitter: float) -> float:
        """Seconds to wait after so many restarts in a row."""
        return backoff(restarts - 1, self.backoff, self.max_backoff, jitter) if restarts else 0.0

    def retry_delay(self, tries: int, jitter: float) -> float:
        """Seconds until a place that has failed is tried again, after so many such tries."""
        return backoff(tries, self.retry, self.max_retry, jitter)
