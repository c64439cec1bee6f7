"""When calls arrive in a simulation: closed loops, Poisson, bursts, a recorded trace, in turn."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

from ..observe.record import ORDINARY, Precedence
from ..options.kinds import Count


class Arrival(NamedTuple):
    """One call.

    Attributes:
        at: seconds since the start.
        items: how many it has.
        lengths: of its items, if they are known.
        precedence: of those that wait.
    """

    at: float
    items: int = 1
    lengths: Sequence[float] | None = None
    precedence: Precedence = ORDINARY


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many callers, each of which calls again when it has its answer.

    Attributes:
        callers: how many.
        think_time: the mean of what each takes before it calls again, seconds; exponential.
        items: of each call.

    Raises:
        TypeError, ValueError: a value is out of range.
    """

    callers: int
    think_time: float = 0.0
    items: int = 1

    def __post_init__(self) -> None:
        Count().check("callers", self.callers)
        Count().check("items", self.items)
        _check_number("think_time", self.think_time, zero=True)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Calls of very many independent callers.

    Attributes:
        rate: calls per second.
        items: of each call.

    Raises:
        TypeError, ValueError: a value is out of range.
    """

    rate: float
    items: int = 1

    def __post_init__(self) -> None:
        _check_number("rate", self.rate)
        Count().check("items", self.items)

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

    Raises:
        TypeError, ValueError: a value is out of range, or bursts overlap.
    """

    size: int
    every: float
    rate: float = 0.0
    gap: float = 0.0
    items: int = 1

    def __post_init__(self) -> None:
        Count().check("size", self.size)
        _check_number("every", self.every)
        _check_number("rate", self.rate, zero=True)
        _check_number("gap", self.gap, zero=True)
        Count().check("items", self.items)
        if self.gap * self.size > self.every:
            raise ValueError(
                f"{self.size} calls {self.gap} s apart take longer than {self.every} s"
            )

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """The calls in their order, without end."""
        besides = Poisson(self.rate, self.items).arrivals(random) if self.rate else None
        between = next(besides) if besides else None
        for number in itertools.count():
            now = number // self.size * self.every + number % self.size * self.gap
            while besides and between and between.at < now:
                yield between
                between = next(besides)
            yield Arrival(now, self.items)


class Replay:
    """Calls as they were recorded.

    Args:
        recorded: of a trace; see ``read_trace``.
        speed: 2 replays them twice as fast.

    Raises:
        TypeError, ValueError: there is nothing to replay, or the speed is out of range.
    """

    def __init__(self, recorded: Sequence[Arrival], speed: float = 1.0) -> None:
        if not recorded:
            raise ValueError("the trace has no calls")
        _check_number("speed", speed)
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
    """A load that changes: one after the other. Callers of a phase that is over call no more.

    Args:
        phases: until when, in seconds since the start, and which load there is until then. The
            last one may be until infinity.

    Raises:
        ValueError: the times do not increase, or there are none.
    """

    def __init__(self, phases: Sequence[tuple[float, ClosedLoop | OpenLoad]]) -> None:
        ends = [0.0, *(until for until, _ in phases)]
        if not phases or any(not first < then for first, then in itertools.pairwise(ends)):
            raise ValueError("the times until which the phases last must be above 0 and increase")
        self.phases = tuple(phases)


Load: TypeAlias = ClosedLoop | OpenLoad | Phases


def _check_number(name: str, value: object, *, zero: bool = False) -> None:
    wanted = f"{name} must be a finite number {'of at least' if zero else 'above'} 0; not {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(wanted)
    if not 0 <= value < math.inf or (not value and not zero):
        raise ValueError(wanted)


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
            except ValueError as error:
                what = "no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ValueError(f"{path}, line {number}: {what}") from None
    return arrivals


def _arrival(found: Any) -> Arrival:
    if not isinstance(found, dict):
        raise ValueError('not an object such as {"at": 0.0015, "items": 2}')
    items = found.get("items", 1)
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise ValueError(f'"items" must be a whole number of at least 1, not {items!r}')
    lengths = found.get("lengths")
    if lengths is not None:
        if not isinstance(lengths, list) or len(lengths) != items:
            raise ValueError(f'"lengths" must be a list of {items}, one for each item')
        lengths = [_number(length, "a length") for length in lengths]
    priority, tenant = found.get("priority", 0), found.get("tenant", "")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f'"priority" must be a whole number, not {priority!r}')
    if not isinstance(tenant, str):
        raise ValueError(f'"tenant" must be a string, not {tenant!r}')
    precedence = Precedence(priority, tenant) if priority or tenant else ORDINARY
    return Arrival(_number(found.get("at"), '"at"'), items, lengths, precedence)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)
