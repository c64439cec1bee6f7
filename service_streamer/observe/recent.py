"""The recent batches, summed up. Pure arithmetic, without a clock.

Recent batches are the last 256 that came back, and of them those of the last minute. If none came
back in the last minute, they are the last 256 whenever that was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .record import BatchRecord, Reason
from .step_log import StepSummary

#: How many batches are kept. Enough for shares to the nearest percent or so.
RECENT = 256

#: For how long they count as recent, seconds.
_HORIZON = 60.0


class Snapshot(NamedTuple):
    """The state of an engine now, without its recent batches.

    Attributes:
        state: see ``StreamerStats``.
        workers: how many are in which state.
        pending: items that wait for a worker.
        answered, failed, expired, rejected: calls, in total.
        restarted_at: when workers were started in place of lost ones, the last times.
        ceilings: see ``StreamerStats``.
        batch_size, max_latency, max_batch_cost, max_pending: the bounds.
        has_lengths: whether the items have lengths.
        is_local: whether the model is in this process.
        line: what a batch takes however small it is, and what each unit of its cost adds, seconds;
            None if the batches were too much alike to tell.
        worker_range, wanted, target_wait, wait: see ``StreamerStats``.
        steps: of a model of steps, the recent ones; None if there were none.
    """

    state: str
    workers: Mapping[str, int]
    pending: int
    answered: int
    failed: int
    expired: int
    rejected: int
    restarted_at: Sequence[float]
    ceilings: Mapping[int, float]
    batch_size: int
    max_latency: float
    max_batch_cost: float | None
    max_pending: int | None
    has_lengths: bool
    is_local: bool
    line: tuple[float, float] | None = None
    worker_range: tuple[int, int] | None = None
    wanted: int | None = None
    target_wait: float | None = None
    wait: float | None = None
    steps: StepSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The recent batches and the state of the engine. Durations are in seconds.

    Attributes:
        now: the state of the engine.
        batches, items: that came back.
        parts: calls, each once for every batch that it had items in.
        answered, failed, expired, rejected: calls.
        restarts: of workers in place of lost ones.
        seconds: from when the first of the batches was cut until the last was back.
        ago: how long ago that was.
        reasons: why the batches had no more items.
        singles: of the batches, those with items of one call only.
        largest: the most items of a batch.
        busy: the share of the time in which the average worker computed.
        callers: how many calls were under way at a time, on average.
        queued: how long a call waited for its batch, on average, of all the parts.
        behind: how long it waited then for the batch before, with its worker.
        moved: how long it and its results were on the way.
        computed: how long it was in the model.
        padding: the share of padding; None if the model does not report it.
        stages: seconds of a batch in each of ``STAGES``, on average; None without stages.
        pending: how many items waited for a worker when a batch was back, on average.
        pending_before, pending_after: the same for the first quarter of them, and for the last.
        base, per_unit: what a batch takes, however small, and what each unit of its cost adds; None
            if the batches were too much alike to tell.
        cost: of an item: its length, or 1 without lengths.
    """

    now: Snapshot
    batches: int = 0
    items: int = 0
    parts: int = 0
    answered: int = 0
    failed: int = 0
    expired: int = 0
    rejected: int = 0
    restarts: int = 0
    seconds: float = 0.0
    ago: float = 0.0
    reasons: Mapping[Reason, int]
    singles: int = 0
    largest: int = 0
    busy: float = 0.0
    callers: float = 0.0
    queued: float = 0.0
    behind: float = 0.0
    moved: float = 0.0
    computed: float = 0.0
    padding: float | None = None
    stages: tuple[float, ...] | None = None
    pending: float = 0.0
    pending_before: float = 0.0
    pending_after: float = 0.0
    base: float | None = None
    per_unit: float | None = None
    cost: float = 1.0

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
        if self.base is None or self.per_unit is None or not size:
            return None
        took = (self.base + self.per_unit * self.cost * size) / size
        other_took = (self.base + self.per_unit * self.cost * other) / other
        return took / other_took - 1 if other_took > 0 else None


def summarize(recent: Sequence[BatchRecord], snapshot: Snapshot, now: float) -> Summary:
    """Sum up.

    Args:
        recent: the last batches, in the order in which they came back. These are all that there
            ever were, if there are fewer than ``RECENT`` of them.
        now: by the engine's clock.
    """
    first = next((i for i, one in enumerate(recent) if one.back_at >= now - _HORIZON), 0)
    if len(recent) >= RECENT:
        first = max(first, 1)  # so that there is a batch before the first that counts
    before = recent[first - 1] if first else None
    batches = recent[first:]
    counts = {
        name: getattr(snapshot, name) - (getattr(before, name) if before else 0)
        for name in ("answered", "failed", "expired", "rejected")
    }
    since = min(batches[0].cut_at, now - _HORIZON) if batches else now - _HORIZON
    counts["restarts"] = sum(at >= since for at in snapshot.restarted_at)
    if not batches:
        return Summary(now=snapshot, reasons={}, **counts)
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
    ready = snapshot.workers.get("idle", 0) + snapshot.workers.get("busy", 0)
    slots = max(1, ready, len({one.slot for one in batches}) if not ready else 0)
    spent = sum(one.report.pace for one in batches)
    base, per_unit = snapshot.line or (None, None)
    items = sum(one.size for one in batches)
    reports = [one.report for one in batches]
    paddings = [(one.padding, one.duration) for one in reports if one.padding is not None]
    weight = sum(duration for _, duration in paddings)
    stages = [one.stages for one in reports if one.stages is not None]
    return Summary(
        now=snapshot,
        batches=len(batches),
        items=items,
        parts=parts,
        seconds=seconds,
        ago=max(0.0, now - batches[-1].back_at),
        reasons=Counter(one.reason for one in batches),
        singles=sum(one.calls == 1 for one in batches),
        largest=max(one.size for one in batches),
        busy=min(1.0, spent / (seconds * slots)) if seconds > 0 else 0.0,
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
        base=base,
        per_unit=per_unit,
        cost=sum(one.cost for one in batches) / items,
        **counts,
    )


def _pending(batches: Sequence[BatchRecord]) -> float:
    return sum(one.pending for one in batches) / len(batches)
