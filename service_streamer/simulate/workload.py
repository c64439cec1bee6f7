"""What is simulated: when calls arrive, how long their items are, and what a batch takes."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

from ..observe.record import ORDINARY, CallOptions
from ..options import kinds
from ..options.kinds import Kind

_COUNT = kinds.count()
_ABOVE_0 = kinds.number()
_AT_LEAST_0 = kinds.number(zero=True)


def _check_fields(record: Any, **kinds: Kind) -> None:
    """Check fields by name; those that are not named must be numbers of at least 0."""
    for field in fields(record):
        kinds.get(field.name, _AT_LEAST_0).check(field.name, getattr(record, field.name))


class Arrival(NamedTuple):
    """One call.

    Attributes:
        at: seconds since the start.
        items: how many it has.
        lengths: of its items, if they are known.
        options: of those that wait.
    """

    at: float
    items: int = 1
    lengths: Sequence[float] | None = None
    options: CallOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many callers, each of which calls again when it has its answer.

    Attributes:
        callers: how many.
        think_time: the mean of what each takes before it calls again, seconds; exponential.
        items: of each call.
    """

    callers: int
    think_time: float = 0.0
    items: int = 1

    def __post_init__(self) -> None:
        _check_fields(self, callers=_COUNT, items=_COUNT)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Calls of very many independent callers.

    Attributes:
        rate: calls per second.
        items: of each call.
    """

    rate: float
    items: int = 1

    def __post_init__(self) -> None:
        _check_fields(self, rate=_ABOVE_0, items=_COUNT)

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The calls in their order, without end."""
        now = 0.0
        while True:
            now += random.expovariate(self.rate)
            yield Arrival(now, self.items)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Many calls at once, again and again.

    Attributes:
        size: calls of one burst.
        every: from one burst to the next, seconds.
        rate: calls per second that arrive besides, as in ``Poisson``.
        gap: between the calls of a burst, seconds.
        items: of each call.
    """

    size: int
    every: float
    rate: float = 0.0
    gap: float = 0.0
    items: int = 1

    def __post_init__(self) -> None:
        _check_fields(self, size=_COUNT, every=_ABOVE_0, items=_COUNT)
        if self.gap * self.size > self.every:
            raise ValueError(
                f"{self.size} calls {self.gap} s apart take longer than {self.every} s"
            )

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The calls in their order, without end."""
        calls = (
            Arrival(number // self.size * self.every + number % self.size * self.gap, self.items)
            for number in itertools.count()
        )
        besides = Poisson(self.rate, self.items).arrivals(random) if self.rate else ()
        return heapq.merge(calls, besides, key=lambda arrival: arrival.at)


class Replay:
    """Calls as they were recorded, see ``read_trace``; a speed of 2 replays them twice as fast."""

    def __init__(self, recorded: Sequence[Arrival], speed: float = 1.0) -> None:
        if not recorded:
            raise ValueError("the trace has no calls")
        _ABOVE_0.check("speed", speed)
        # Threads that record at the same time may write in another order than they arrived.
        self._recorded = sorted(recorded, key=lambda arrival: arrival.at)
        self._speed = speed
        #: Whether items have lengths.
        self.has_lengths = any(arrival.lengths is not None for arrival in recorded)

    def arrivals(self, random: Random) -> Iterator[Arrival]:  # noqa: ARG002
        """The calls in their order, once. Nothing of them is random."""
        for arrival in self._recorded:
            yield arrival._replace(at=arrival.at / self._speed)


OpenLoad: TypeAlias = Poisson | Bursts | Replay


class Phases:
    """A load that changes. Callers of a phase that is over call no more.

    A phase is a load, and until when it lasts, in seconds since the start. The last one may be
    until infinity.
    """

    def __init__(self, phases: Sequence[tuple[float, ClosedLoop | OpenLoad]]) -> None:
        ends = [0.0, *(until for until, _ in phases)]
        if not phases or any(not first < then for first, then in itertools.pairwise(ends)):
            raise ValueError("the times until which the phases last must be above 0 and increase")
        self.phases = tuple(phases)


Load: TypeAlias = ClosedLoop | OpenLoad | Phases


def read_trace(path: str | os.PathLike[str]) -> list[Arrival]:
    """The calls of a trace, in the order of its lines.

    Args:
        path: of the file: one line of JSON for each call, such as ``{"at": 0.0015, "items": 2}``;
            "lengths", "priority" and "tenant" may be there, too. Empty lines are skipped.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is none of a trace; its message has the file and the line.
    """
    arrivals = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                arrivals.append(_arrival(json.loads(line)))
            except (TypeError, ValueError) as error:
                what = "no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ValueError(f"{path}, line {number}: {what}") from None
    return arrivals


def _arrival(found: Any) -> Arrival:
    if not isinstance(found, dict):
        raise ValueError('not an object such as {"at": 0.0015, "items": 2}')
    items = _COUNT.check('"items"', found.get("items", 1))
    lengths = found.get("lengths")
    if lengths is not None:
        if not isinstance(lengths, list) or len(lengths) != items:
            raise ValueError(f'"lengths" must be a list of {items}, one for each item')
        lengths = [_AT_LEAST_0.check('"lengths"', length) for length in lengths]
    priority = kinds.count(least=-math.inf).check('"priority"', found.get("priority", 0))
    tenant = kinds.text().check('"tenant"', found.get("tenant", ""))
    options = CallOptions(priority, tenant) if priority or tenant else ORDINARY
    return Arrival(_AT_LEAST_0.check('"at"', found.get("at")), items, lengths, options)


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
    """

    base: float
    per_item: float = 0.0
    per_unit: float = 0.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)
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
    """

    transport: float = 50e-6
    return_time: float = 150e-6
    per_caller: float = 20e-6
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths as those of sentences: whole numbers of at least 1, most short and a few long.

    Attributes:
        mean: of the lengths.
        sigma: how far they spread: the standard deviation of their logarithm.
    """

    mean: float
    sigma: float = 0.6

    def __post_init__(self) -> None:
        _check_fields(self, mean=_ABOVE_0)

    def __call__(self, random: Random) -> float:
        mu = math.log(self.mean) - self.sigma * self.sigma / 2
        return max(1.0, float(round(random.lognormvariate(mu, self.sigma))))
