"""What went on of late: the last batches, summed up. Pure arithmetic, without a clock.

Of late is: the last 256 batches that came back, and of them those of the last minute; if there were
none in it, the last 256 whenever that was.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .record import Reason

__all__ = ["RECENT", "Past", "Situation", "Standing", "line", "situation"]

#: How many batches are looked back at. Enough for shares to the nearest percent or so.
RECENT = 256

#: And for how long, seconds.
_HORIZON = 60.0

#: A line through durations over costs says something if the costs differ: by so much on average, as
#: a share of them, and with so many batches.
_SPREAD = 0.1
_FEWEST = 8


class Past(NamedTuple):
    """A batch that came back, and how things stood then. Times are those of the engine's clock.

    Attributes:
        slot: the worker's.
        cut_at, back_at: when it was cut, and when it came back.
        reason: why it had no more items.
        size: items.
        calls: whose items it had.
        cost: items times the longest of them; items, without lengths.
        inference: what the model took, seconds.
        padding: the share of it that was padding; None if that is not told.
        has_failed: whether the model raised on it.
        queued: how long all calls so far had waited for their batches, seconds, in total.
        pending: items that still waited for a worker.
        answered, failed, expired, rejected: calls, in total.
    """

    slot: int
    cut_at: float
    back_at: float
    reason: Reason
    size: int
    calls: int
    cost: float
    inference: float
    padding: float | None
    has_failed: bool
    queued: float
    pending: int
    answered: int
    failed: int
    expired: int
    rejected: int


class Standing(NamedTuple):
    """How an engine stands now, besides its last batches.

    Attributes:
        state: see ``StreamerStats``.
        workers: how many are in which state.
        pending: items that wait for a worker.
        answered, failed, expired, rejected: calls, in total.
        restarted_at: when workers were started in place of lost ones, of late.
        ceilings: see ``StreamerStats``.
        batch_size, max_latency, max_batch_cost, max_pending: the bounds.
        has_lengths: whether the items have lengths.
        is_local: whether the model is in this process.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What there is to be said something about. Durations are in seconds.

    Attributes:
        standing: how it stands now.
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
        padding: the share of padding; None if it is not told.
        pending: how many items waited for a worker when a batch was back, on average.
        pending_before, pending_after: the same for the first quarter of them, and for the last.
        base, per_unit: what a batch takes, however small, and what each unit of its cost adds; None
            if the batches were too much alike to tell.
        cost: of an item: its length, or 1 without lengths.
    """

    standing: Standing
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


def situation(recent: Sequence[tuple[Any, ...]], standing: Standing, now: float) -> Situation:
    """Sum up.

    Args:
        recent: the last batches, each with the fields of ``Past``, in the order in which they came
            back; not all that there ever were, if there are ``RECENT`` of them.
        now: by the engine's clock.
    """
    past = [Past(*fields) for fields in recent]
    first = next((i for i, one in enumerate(past) if one.back_at >= now - _HORIZON), 0)
    if len(past) >= RECENT:
        first = max(first, 1)  # what counts is what came after a batch that is known
    before = past[first - 1] if first else None
    lately = past[first:]
    counts = {
        name: getattr(standing, name) - (getattr(before, name) if before else 0)
        for name in ("answered", "failed", "expired", "rejected")
    }
    since = min(lately[0].cut_at, now - _HORIZON) if lately else now - _HORIZON
    counts["restarts"] = sum(at >= since for at in standing.restarted_at)
    if not lately:
        return Situation(standing=standing, reasons={}, **counts)
    ends: dict[int, float] = {one.slot: one.back_at for one in past[:first]}
    parts = sum(one.calls for one in lately)
    behind = moved = computed = 0.0
    for one in lately:
        began_at = max(one.cut_at, ends.get(one.slot, one.cut_at))
        ends[one.slot] = one.back_at
        behind += one.calls * (began_at - one.cut_at)
        inference = min(one.inference, one.back_at - began_at)
        moved += one.calls * (one.back_at - began_at - inference)
        computed += one.calls * inference
    queued = lately[-1].queued - (before.queued if before else 0.0)
    seconds = max(one.back_at for one in lately) - min(one.cut_at for one in lately)
    ready = standing.workers.get("idle", 0) + standing.workers.get("busy", 0)
    slots = max(1, ready, len({one.slot for one in lately}) if not ready else 0)
    spent = sum(one.inference for one in lately)
    base, per_unit = line(
        [(one.cost, one.inference) for one in lately if not one.has_failed and one.cost > 0]
    )
    items = sum(one.size for one in lately)
    paddings = [(one.padding, one.inference) for one in lately if one.padding is not None]
    weight = sum(inference for _, inference in paddings)
    return Situation(
        standing=standing,
        batches=len(lately),
        items=items,
        parts=parts,
        seconds=seconds,
        ago=max(0.0, now - lately[-1].back_at),
        reasons=Counter(one.reason for one in lately),
        singles=sum(one.calls == 1 for one in lately),
        largest=max(one.size for one in lately),
        busy=min(1.0, spent / (seconds * slots)) if seconds > 0 else 0.0,
        callers=(queued + behind + moved + computed) / seconds if seconds > 0 else 0.0,
        queued=queued / parts,
        behind=behind / parts,
        moved=moved / parts,
        computed=computed / parts,
        padding=sum(p * inference for p, inference in paddings) / weight if weight else None,
        pending=_pending(lately),
        pending_before=_pending(lately[: len(lately) // 4 + 1]),
        pending_after=_pending(lately[-(len(lately) // 4 + 1) :]),
        base=base,
        per_unit=per_unit,
        cost=sum(one.cost for one in lately) / items,
        **counts,
    )


def _pending(past: Sequence[Past]) -> float:
    return sum(one.pending for one in past) / len(past)


def line(points: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """What a batch takes however small it is, and what each unit of cost adds: (None, None) if the
    (cost, duration) of the batches do not tell.

    Of batches of a like cost the median counts, so that one that was held up does not; an error of
    a tenth counts the same in a short batch and in a long one.
    """
    if len(points) < _FEWEST:
        return None, None
    steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for cost, duration in points:
        if duration > 0:
            steps[round(4 * math.log2(cost))].append((cost, duration))
    if len(steps) < 2:
        return None, None
    told: list[tuple[float, float, float, int]] = []  # weight, cost, duration, batches
    for of in steps.values():
        cost = sum(cost for cost, _ in of) / len(of)
        duration = sorted(duration for _, duration in of)[len(of) // 2]
        told.append((len(of) / duration**2, cost, duration, len(of)))
    count = sum(n for *_, n in told)
    mean = sum(n * cost for _, cost, _, n in told) / count
    if math.sqrt(sum(n * (cost - mean) ** 2 for _, cost, _, n in told) / count) < _SPREAD * mean:
        return None, None
    weight = sum(w for w, *_ in told)
    middle = sum(w * cost for w, cost, *_ in told) / weight
    took = sum(w * duration for w, _, duration, _ in told) / weight
    spread = sum(w * (cost - middle) ** 2 for w, cost, *_ in told)
    slope = sum(w * (cost - middle) * (duration - took) for w, cost, duration, _ in told) / spread
    slope = min(max(0.0, slope), took / middle)
    return took - slope * middle, slope
