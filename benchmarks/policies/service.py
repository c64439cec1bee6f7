"""Drives one scheduler through a list of jobs: a service under a clock that jumps.

All schedulers are driven alike: they hear of arrivals, of batches that are back and of the time
that they asked for, and answer with batches for workers. Nothing but the model takes time here, so
that a difference is one of decisions. A job that is dropped, or refused, never comes back: it is
missed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol, TypeAlias

__all__ = ["Batch", "Duration", "Job", "Outcome", "Scheduler", "noisy", "serve"]

#: Seconds for a batch: of so many items, the longest of which is so long.
Duration: TypeAlias = Callable[[int, float], float]

#: Of times, so that a batch which ends at a deadline is not late by the last digit, seconds.
_TOLERANCE = 1e-9


class Job(NamedTuple):
    """One call of one item.

    Attributes:
        number: counted from 0.
        arrived: when, seconds.
        deadline: until when it is of use, seconds; infinity for always.
        length: of its item; 1 where items have none.
    """

    number: int
    arrived: float
    deadline: float
    length: float = 1.0


class Batch(NamedTuple):
    """What a worker gets.

    Attributes:
        worker: which one, from 0. If it is busy, it computes this batch after what it has.
        jobs: at least one.
        tag: what the scheduler needs when the batch is back.
    """

    worker: int
    jobs: Sequence[Job]
    tag: Any = None


class Scheduler(Protocol):
    """Decides when to cut batches, and of which jobs. Each event is answered with new batches.

    Attributes:
        wake_at: when to call ``passed`` if nothing happens before, seconds; infinity for never.
    """

    @property
    def wake_at(self) -> float: ...

    def arrived(self, job: Job, now: float) -> Sequence[Batch]: ...

    def returned(self, batch: Batch, took: float, now: float) -> Sequence[Batch]: ...

    def passed(self, now: float) -> Sequence[Batch]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the jobs after the warm-up.

    Attributes:
        jobs: how many there were.
        missed: how many did not have their result at their deadline.
        mean: latency of the others, seconds; not a number if there are none.
        batch_size: of all batches, on average.
        is_complete: whether it ran to the end; otherwise more were missed than was asked for.
    """

    jobs: int
    missed: int
    mean: float
    batch_size: float
    is_complete: bool


def noisy(duration: Duration, noise: float) -> Duration:
    """The same with lognormal noise, of which the mean is 1 and the standard deviation given."""
    variance = math.log1p(noise * noise)
    random = Random(3)

    def drawn(size: int, longest: float) -> float:
        factor = random.lognormvariate(-variance / 2.0, math.sqrt(variance))
        return factor * duration(size, longest)

    return drawn


def serve(
    scheduler: Scheduler,
    jobs: Sequence[Job],
    duration: Duration,
    *,
    warm_up: int = 0,
    most_missed: float = math.inf,
) -> Outcome:
    """Let the jobs arrive and be computed.

    Args:
        jobs: by arrival and by deadline.
        duration: of a batch.
        warm_up: so many jobs are not counted.
        most_missed: stop when more than so many are.
    """
    free_at: dict[int, float] = {}
    running: list[tuple[float, int, Batch, float]] = []
    answered = bytearray(len(jobs))  # in time
    batches = missed = judged = arrived = items = 0
    total = 0.0
    is_complete = True
    while True:
        arrives = jobs[arrived].arrived if arrived < len(jobs) else math.inf
        ends = running[0][0] if running else math.inf
        now = min(arrives, ends, scheduler.wake_at)
        if now == math.inf:
            break
        if ends == now:
            _, _, batch, took = heapq.heappop(running)
            for job in batch.jobs:
                if now <= job.deadline + _TOLERANCE:
                    answered[job.number] = 1
                    if job.number >= warm_up:
                        total += now - job.arrived
            cut = scheduler.returned(batch, took, now)
        elif arrives == now:
            job = jobs[arrived]
            arrived += 1
            cut = scheduler.arrived(job, now)
        else:
            cut = scheduler.passed(now)
        for batch in cut:
            took = duration(len(batch.jobs), max(job.length for job in batch.jobs))
            end = max(now, free_at.get(batch.worker, 0.0)) + took
            free_at[batch.worker] = end
            batches += 1
            items += len(batch.jobs)
            heapq.heappush(running, (end, batches, batch, took))
        while judged < arrived and jobs[judged].deadline + _TOLERANCE < now:
            missed += judged >= warm_up and not answered[judged]
            judged += 1
        if missed > most_missed:
            is_complete = False
            break
    if is_complete:
        missed += sum(not answered[number] for number in range(max(judged, warm_up), len(jobs)))
    count = sum(answered[warm_up:])
    return Outcome(
        jobs=len(jobs) - warm_up,
        missed=missed,
        mean=total / count if count else math.nan,
        batch_size=items / batches if batches else math.nan,
        is_complete=is_complete and missed <= most_missed,
    )
