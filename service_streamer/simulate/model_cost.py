"""How long a simulated batch takes, what else takes time, and a policy to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random

from ..batching.policy import Backlog, Decision, Policy
from ..observe.record import Reason


def _check(record: object) -> None:
    """Refuse what is no finite number of at least 0."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{field.name} must be a number of at least 0; not {value!r}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{field.name} must be a finite number of at least 0; not {value!r}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a batch takes: ``base + per_item · n + per_unit · cost + quadratic · cost² / n``.

    The cost of a batch is n times the length of its longest item, as it is for a model that pads;
    an item without a length counts one.

    Attributes:
        base: what any batch takes, seconds.
        per_item: what each item adds, seconds.
        per_unit: what each unit of length adds, of each item as if it were the longest.
        quadratic: what the square of the longest length adds for each item: attention.

    Raises:
        TypeError, ValueError: a value is no number of at least 0, or all are 0.
    """

    base: float
    per_item: float = 0.0
    per_unit: float = 0.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not (self.base or self.per_item or self.per_unit or self.quadratic):
            raise ValueError("a model that takes no time cannot be simulated")

    def duration(self, items: int, cost: float) -> float:
        """Seconds for a batch of so many items, and of that cost."""
        duration = self.base + self.per_item * items + self.per_unit * cost
        return duration + self.quadratic * cost * cost / items if self.quadratic else duration

    def capacity(self, workers: int, batch_size: int, length: float = 1.0) -> float:
        """Items per second of ``workers`` that always have full batches of items of one length."""
        return workers * batch_size / self.duration(batch_size, batch_size * length)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What takes time beside the model, in seconds.

    Attributes:
        transport: from a batch being cut to the worker having it, and from its end to the results
            being here.
        return_time: from a result going out to the same caller's next call, in a closed loop.
        per_caller: what each caller of a batch takes before the next one is woken.
        jitter: added to each return: exponential, with this mean.

    Raises:
        TypeError, ValueError: a value is no number of at least 0.
    """

    transport: float = 50e-6
    return_time: float = 150e-6
    per_caller: float = 20e-6
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths as those of sentences: whole numbers of at least 1, most short and a few long.

    Attributes:
        mean: of the lengths.
        sigma: how far they spread: the standard deviation of their logarithm.

    Raises:
        TypeError, ValueError: a value is no number of at least 0.
    """

    mean: float
    sigma: float = 0.6

    def __post_init__(self) -> None:
        _check(self)
        if not self.mean:
            raise ValueError("mean must be above 0")

    def __call__(self, random: Random) -> float:
        mu = math.log(self.mean) - self.sigma * self.sigma / 2
        return max(1.0, float(round(random.lognormvariate(mu, self.sigma))))


class Observed:
    """Lengths drawn from those that were seen: of a trace, for example.

    Args:
        lengths: at least one.
    """

    def __init__(self, lengths: list[float]) -> None:
        if not lengths:
            raise ValueError("there are no lengths to draw from")
        self._lengths = lengths

    def __call__(self, random: Random) -> float:
        return random.choice(self._lengths)


class FixedWait(Policy):
    """Waits until there is a full batch, or the oldest item has waited for so long.

    Args:
        batch_size: items of a full batch.
        wait: seconds.
        max_batch_cost: the most that a batch may cost.
    """

    def __init__(self, batch_size: int, wait: float, max_batch_cost: float = math.inf) -> None:
        super().__init__(batch_size, wait, max_batch_cost=max_batch_cost)
        self._wait = wait
        self._full_batch = Decision(batch_size, Reason.FULL, max_cost=max_batch_cost)

    def batch_returned(self, *_: object, **__: object) -> None:
        """Learn nothing."""

    def decide_ahead(self, backlog: Backlog) -> Decision:
        is_full = backlog.items >= self._full_batch.size
        return self._full_batch if is_full else Decision(0, Reason.ALONE, math.inf)

    def decide(self, backlog: Backlog) -> Decision:
        if backlog.items >= self._full_batch.size:
            return self._full_batch
        wait_until = backlog.oldest + self._wait
        if wait_until > backlog.now:
            return Decision(0, Reason.MAX_LATENCY, wait_until)
        return self._full_batch._replace(size=backlog.items, reason=Reason.MAX_LATENCY)
