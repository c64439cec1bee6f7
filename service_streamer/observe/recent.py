"""The recent batches, or steps, summed up for ``explain``. Pure arithmetic, without a clock.

Recent batches are the last 256 that came back, and of them those of the last minute. If none came
back in the last minute, they are the last 256 whenever that was.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .metrics import StreamerStats
from .record import BatchRecord, Reason, StepReport

#: How many batches are kept, and how many steps. Enough for shares to the nearest percent or so.
RECENT = 256

#: How many times until a first output are kept.
_FIRST_OUTPUTS = 64

#: For how long batches count as recent, seconds.
_HORIZON = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The recent batches and the state of the engine. Durations are in seconds, and averages."""

    now: StreamerStats
    has_lengths: bool = False  # whether the items have lengths
    steps: StepSummary | None = None  # of a model of steps

    # Of the recent batches:
    batches: int = 0
    items: int = 0
    parts: int = 0  # calls, each once for every batch that it had items in
    answered: int = 0  # calls; so are the next three
    failed: int = 0
    expired: int = 0
    rejected: int = 0
    restarts: int = 0  # of workers in place of lost ones
    seconds: float = 0.0  # from when the first was cut until the last was back
    ago: float = 0.0  # how long ago that was
    reasons: Mapping[Reason, int]  # why they had no more items
    singles: int = 0  # those with items of one call only
    largest: int = 0  # the most items of a batch
    busy: float = 0.0  # the share of the time in which the average worker computed
    callers: float = 0.0  # calls that were under way at a time
    # Of all the parts:
    queued: float = 0.0  # waiting for its batch
    behind: float = 0.0  # waiting then for the batch before, with its worker
    moved: float = 0.0  # on the way, with its results
    computed: float = 0.0  # in the model
    # Of all batches:
    padding: float | None = None  # the share of it; None if the model does not report it
    stages: tuple[float, ...] | None = None  # seconds of each of ``STAGES``; None without stages
    pending: float = 0.0  # items that waited for a worker when one was back
    pending_before: float = 0.0  # the same of the first quarter of them
    pending_after: float = 0.0  # and of the last
    #: What a batch takes, however small, and what each unit of its cost adds; None if the batches
    #: were too much alike to tell.
    line: tuple[float, float] | None = None
    cost: float = 1.0  # of an item: its length, or 1 without lengths

    @property
    def ready(self) -> int:
        """Workers that take batches now."""
        return self.now.workers.get("idle", 0) + self.now.workers.get("busy", 0)

    @property
    def latency(self) -> float:
        """Of a call, on average; of its part in a batch, if it took several."""
        return self.queued + self.behind + self.moved + self.computed

    @property
    def mean_size(self) -> float:
        return self.items / self.batches if self.batches else 0.0

    def share(self, *reasons: Reason) -> float:
        """Of the batches, those cut for one of these reasons."""
        return sum(self.reasons.get(reason, 0) for reason in reasons) / max(1, self.batches)

    def gain(self, size: float, other: float) -> float | None:
        """How many more items per second batches of another size would compute, as a share.

        If the model's time goes on as it does; None if that is not known.
        """
        if self.line is None or not size:
            return None
        base, per_unit = self.line
        took = (base + per_unit * self.cost * size) / size
        other_took = (base + per_unit * self.cost * other) / other
        return took / other_took - 1 if other_took > 0 else None


def summarize(
    recent: Sequence[BatchRecord],
    stats: StreamerStats,
    now: float,
    *,
    restarted_at: Sequence[float] = (),
    line: tuple[float, float] | None = None,
    has_lengths: bool = False,
    steps: StepSummary | None = None,
) -> Summary:
    """Sum up the batches, in the order in which they came back, and the state at ``now``.

    Fewer batches than ``RECENT`` are all that there ever were.
    """
    first = next((i for i, one in enumerate(recent) if one.back_at >= now - _HORIZON), 0)
    if len(recent) >= RECENT:
        first = max(first, 1)  # so that there is a batch before the first that counts
    before = recent[first - 1] if first else None
    batches = recent[first:]
    counts = {
        name: getattr(stats, name) - (getattr(before, name) if before else 0)
        for name in ("answered", "failed", "expired", "rejected")
    }
    since = min(batches[0].cut_at, now - _HORIZON) if batches else now - _HORIZON
    counts["restarts"] = sum(at >= since for at in restarted_at)
    if not batches:
        return Summary(now=stats, has_lengths=has_lengths, steps=steps, reasons={}, **counts)
    ends: dict[int, float] = {one.slot: one.back_at for one in recent[:first]}
    parts = sum(one.calls for one in batches)
    behind = moved = computed = 0.0
    for one in batches:
        began_at = max(one.cut_at, ends.get(one.slot, one.cut_at))
        ends[one.slot] = one.back_at
        behind += one.calls * (began_at - one.cut_at)
        inference = min(one.report.duration, one.back_at - began_at)
        moved += one.calls * (one.back_at - began_at - inference)
        computed += one.calls * inference
    queued = batches[-1].queued - (before.queued if before else 0.0)
    seconds = max(one.back_at for one in batches) - min(one.cut_at for one in batches)
    ready = stats.workers.get("idle", 0) + stats.workers.get("busy", 0)
    workers = max(1, ready or len({one.slot for one in batches}))
    spent = sum(one.report.pace for one in batches)
    items = sum(one.size for one in batches)
    reports = [one.report for one in batches]
    paddings = [(one.padding, one.duration) for one in reports if one.padding is not None]
    weight = sum(duration for _, duration in paddings)
    stages = [one.stages for one in reports if one.stages is not None]
    return Summary(
        now=stats,
        has_lengths=has_lengths,
        steps=steps,
        batches=len(batches),
        items=items,
        parts=parts,
        seconds=seconds,
        ago=max(0.0, now - batches[-1].back_at),
        reasons=Counter(one.reason for one in batches),
        singles=sum(one.calls == 1 for one in batches),
        largest=max(one.size for one in batches),
        busy=min(1.0, spent / (seconds * workers)) if seconds > 0 else 0.0,
        callers=(queued + behind + moved + computed) / seconds if seconds > 0 else 0.0,
        queued=queued / parts,
        behind=behind / parts,
        moved=moved / parts,
        computed=computed / parts,
        padding=sum(p * duration for p, duration in paddings) / weight if weight else None,
        stages=tuple(sum(each) / len(stages) for each in zip(*stages, strict=True)) or None,
        pending=_pending(batches),
        pending_before=_pending(batches[: len(batches) // 4 + 1]),
        pending_after=_pending(batches[-(len(batches) // 4 + 1) :]),
        line=line,
        cost=sum(one.cost for one in batches) / items,
        **counts,
    )


def _pending(batches: Sequence[BatchRecord]) -> float:
    return sum(one.pending for one in batches) / len(batches)


class Step(NamedTuple):
    """One step of one worker: what ``explain`` needs of its ``StepReport``."""

    at: float  # when it was reported, by the engine's clock
    size: int
    duration: float
    starting: float
    evicted: int
    pending: int  # items that waited for a worker


class StepLog:
    """The last steps, the oldest first. Not thread-safe."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._steps: deque[Step] = deque(maxlen=RECENT)
        #: Of the last streams, seconds from the call to the first output.
        self.first_outputs: deque[float] = deque(maxlen=_FIRST_OUTPUTS)

    def add(self, report: StepReport, pending: int, now: float) -> None:
        self._steps.append(
            Step(now, report.size, report.duration, report.starting, report.evicted, pending)
        )

    def summary(self, workers: int) -> StepSummary | None:
        """Sum up, with the number of workers that are ready; None if there were no steps."""
        steps = self._steps
        stepped = [step for step in steps if step.size]
        if not stepped:
            return None
        begin = min(step.at - step.duration - step.starting for step in steps)
        seconds = max(steps[-1].at - begin, 1e-9) * max(1, workers)
        ordered = sorted(self.first_outputs)
        return StepSummary(
            places=self._places,
            steps=len(stepped),
            size=sum(step.size for step in stepped) / len(stepped),
            duration=sum(step.duration for step in stepped) / len(stepped),
            starting=min(1.0, sum(step.starting for step in steps) / seconds),
            stepping=min(1.0, sum(step.duration for step in steps) / seconds),
            pending=sum(step.pending for step in steps) / len(steps),
            evicted=sum(step.evicted for step in steps),
            first_output=ordered[len(ordered) // 2] if ordered else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The recent steps. Durations are in seconds, and averages."""

    places: int  # how many items a worker steps at a time
    steps: int
    size: float  # items of a step
    duration: float  # of a step
    starting: float  # the share of the workers' time in which items began
    stepping: float  # the share in which they were stepped
    pending: float  # items that waited for a worker
    evicted: int  # items that were given up for lack of memory
    first_output: float | None  # of a stream, after its call, the median; None without streams
