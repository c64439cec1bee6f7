"""The recent steps of a model of steps, summed up for ``explain``. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .record import StepReport

#: The number of steps that ``explain`` looks at.
_STEPS = 256

#: And of the time until a first output.
_FIRST_OUTPUTS = 64


class Step(NamedTuple):
    """One step of one worker.

    Attributes:
        at: when it was reported, by the engine's clock.
        slot: the worker's.
        size, duration, started, starting, waiting, evicted: see ``StepReport``.
        pending: items that waited for a worker.
    """

    at: float
    slot: int
    size: int
    duration: float
    started: int
    starting: float
    waiting: int
    evicted: int
    pending: int


class StepLog:
    """The last steps, the oldest first. Not thread-safe.

    Attributes:
        places: how many items a worker steps at a time.
        steps: the last ones.
        first_outputs: of the last streams, how long after their calls the first output was here.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        self.first_outputs: deque[float] = deque(maxlen=_FIRST_OUTPUTS)

    def add(self, report: StepReport, pending: int, now: float) -> None:
        """A worker has reported one."""
        self.steps.append(
            Step(
                now,
                report.slot,
                report.size,
                report.duration,
                report.started,
                report.starting,
                report.waiting,
                report.evicted,
                pending,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The recent steps. Durations are in seconds.

    Attributes:
        places: how many items a worker steps at a time.
        steps: how many there were.
        seconds: from the first to the last.
        size: items of a step, on average.
        duration: of a step, on average.
        starting: the share of the workers' time in which items began.
        stepping: the share in which they were stepped.
        pending: items that waited for a worker, on average.
        evicted: items that were given up for lack of memory.
        first_output: how long after its call the first output of a stream was here, the median;
            None without streams.
    """

    places: int
    steps: int
    seconds: float
    size: float
    duration: float
    starting: float
    stepping: float
    pending: float
    evicted: int
    first_output: float | None


def summarize_steps(
    places: int, steps: Sequence[Step], first_outputs: Sequence[float], workers: int
) -> StepSummary | None:
    """Sum up; None if there were no steps.

    Args:
        workers: how many are ready.
    """
    stepped = [step for step in steps if step.size]
    if not stepped:
        return None
    begin = min(step.at - step.duration - step.starting for step in steps)
    seconds = max(steps[-1].at - begin, 1e-9)
    ordered = sorted(first_outputs)
    return StepSummary(
        places=places,
        steps=len(stepped),
        seconds=seconds,
        size=sum(step.size for step in stepped) / len(stepped),
        duration=sum(step.duration for step in stepped) / len(stepped),
        starting=min(1.0, sum(step.starting for step in steps) / (seconds * max(1, workers))),
        stepping=min(1.0, sum(step.duration for step in steps) / (seconds * max(1, workers))),
        pending=sum(step.pending for step in steps) / len(steps),
        evicted=sum(step.evicted for step in steps),
        first_output=ordered[len(ordered) // 2] if ordered else None,
    )
