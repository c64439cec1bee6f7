"""Calls that arrive by the clock, whether or not others have been answered: as those of many users.

A call's time counts from when it was due, never from when it was made: a system, or a machine, that
keeps calls from being made in time would else hide the very moments at which it is slow.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.adapter import Adapter, Outcome
from yardstick import judging
from yardstick.stats import poisson

__all__ = ["Log", "judged", "load", "stepped"]

#: In a log.
_CODES: dict[Outcome, int] = {
    "served": judging.SERVED,
    "rejected": judging.REJECTED,
    "expired": judging.EXPIRED,
    "failed": judging.FAILED,
}
#: The shortest sleep between two calls, seconds: more of them would take the processor.
_TICK = 2e-4
#: How long is waited for what has no deadline, after the last call was due.
_GRACE = 1.0


@dataclass
class Log:
    """All calls of a load, in the order in which they are due. Times are ``time.monotonic``'s.

    Attributes:
        due: when each is due.
        made: when it was; 0 for those that never were.
        ended: when it was known what became of it; 0 if it never was.
        outcomes: what did, in the numbers of ``judging``.
    """

    due: Sequence[float]
    made: array[float]
    ended: array[float]
    outcomes: bytearray

    @classmethod
    def of(cls, due: Sequence[float]) -> Log:
        """Of calls that are still to be made."""
        # Flat, so that the garbage collector has nothing to look through.
        empty = bytes(8 * len(due))
        return cls(due, array("d", empty), array("d", empty), bytearray(len(due)))

    @property
    def is_over(self) -> bool:
        """Whether it is known of each call what became of it."""
        return judging.UNANSWERED not in self.outcomes

    def ended_with(self, number: int, outcome: Outcome) -> None:
        """From any thread, once for each call."""
        self.ended[number] = time.monotonic()
        self.outcomes[number] = _CODES[outcome]


def load(
    system: Adapter,
    ask: Callable[[int], Any],
    rate: float,
    warm_up: float,
    seconds: float,
    deadline: float | None,
    capacity: float,
) -> tuple[dict[str, Any], bool]:
    """Have a system asked at a rate; the figures, and whether it has ended every call.

    Args:
        ask: the item of a call, by its number.
        warm_up: seconds before those that count.
        deadline: seconds that an answer may take from when its call was due; None for any.
        capacity: items per second that the system could compute at best.
    """
    start = time.monotonic() + 0.05
    log = Log.of([start + at for at in poisson(rate, warm_up + seconds)])
    end = start + warm_up + seconds
    patience = _GRACE if deadline is None else deadline
    _make(system, ask, log, deadline, end + patience)
    # A tenth more, in which those that end with their deadline can say so.
    while not log.is_over and time.monotonic() < end + patience + 0.1:
        time.sleep(0.005)
    figures = judged(log, start + warm_up, end, deadline, capacity)
    return figures, log.is_over


def stepped(
    system: Adapter,
    ask: Callable[[int], Any],
    phases: Sequence[tuple[float, float]],
    patience: float,
) -> tuple[Log, list[float]]:
    """Have a system asked at one rate after another; its log, and when each phase began.

    Args:
        phases: calls per second, and for how many seconds.
        patience: seconds to wait for answers after the last phase.
    """
    begin = time.monotonic() + 0.05
    due: list[float] = []
    begins: list[float] = []
    for rate, seconds in phases:
        begins.append(begin)
        due += (begin + at for at in poisson(rate, seconds))
        begin += seconds
    log = Log.of(due)
    _make(system, ask, log, None, begin + patience)
    while not log.is_over and time.monotonic() < begin + patience:
        time.sleep(0.005)
    return log, begins


def _make(
    system: Adapter, ask: Callable[[int], Any], log: Log, deadline: float | None, ends: float
) -> None:
    """Make each call when it is due, or as soon as can be; what is not made by the end never is."""
    for number, due in enumerate(log.due):
        while (now := time.monotonic()) < due:
            time.sleep(max(due - now, _TICK))
        if now > ends:
            return
        log.made[number] = now
        until = None if deadline is None else due + deadline
        system.start(ask(number), until, functools.partial(log.ended_with, number))


def judged(
    log: Log, begin: float, end: float, deadline: float | None, capacity: float
) -> dict[str, Any]:
    """The figures of the window from ``begin`` to ``end``: see ``judging``.

    Calls that were never made count as those that were not answered. ``offered`` is of those that
    were made in it, so that it shows what a system, or the machine, kept from being made.
    """
    offered = sum(begin <= at < end for at in log.made) / (end - begin)
    # Of what never was, it is known that it was later than the last.
    latest = max(log.made, default=0.0)
    made = [at or max(latest, due) for at, due in zip(log.made, log.due, strict=True)]
    calls = judging.Calls(log.due, made, log.ended, log.outcomes)
    if deadline is None:
        return {**judging.load(calls, begin, end), "offered": offered}
    return {**judging.overload(calls, begin, end, deadline, capacity), "offered": offered}
