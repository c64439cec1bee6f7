"""How long what took, how large it was, and why: pure counting, without a clock.

    arrival ──── queued ───▶ cut ──────────── batch ───────────▶ back
                                └─ transport ─ inference ─ transport ─┘

A batch is one invocation of the model that came back, with results or with the model's error. One
that is run again, to find out whose item was at fault, is another batch; how long its items had
waited before the first run is not counted again. A batch that went down with its worker is none,
but how long its items had waited is counted.

Recent batches, which ``explain`` is about, are the last 256 that came back, and of them those of
the last minute. If none came back in the last minute, they are the last 256 whenever that was.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from .record import BatchRecord, Reason, StepReport


def nonzero(stats: object, *names: str) -> list[str]:
    """Of these totals those that are not 0, for a line such as "failed 2 | taken over 1"."""
    counts = [(name.replace("_", " "), getattr(stats, name)) for name in names]
    return [f"{name} {count}" for name, count in counts if count]


@dataclass(frozen=True, slots=True)
class StreamerStats:
    """A snapshot; totals are since the streamer was built.

    Attributes:
        state: "starting", "running", "broken", "draining" or "closed".
        pending: items that wait for a worker.
        in_flight: items that workers hold.
        batches_in_flight: batches that workers hold; at most two each.
        workers: how many are "starting", "idle", "busy", "retiring", "stopping", "backing off"
            (dead, about to be started again) and "failed" (could not be started; tried again at
            least once a minute). Every state is there.
        restarts: starts of workers in place of lost ones, in total.
        accepted: calls that were accepted, in total. Each is answered, fails, expires or is
            cancelled in the end.
        answered: calls whose results came, in total.
        failed: calls that ended with an error of the model, of a worker or of closing, in total.
        retries: items that were to be computed again because their worker died, in total; an item
            counts each time.
        expired: calls whose time ended before their result came, in total.
        cancelled: calls that were cancelled, or whose callers stopped waiting, in total.
        rejected: calls that were refused since too much waited, in total: with ``Overloaded``, or
            with ``TooLate`` if they could not be computed in time.
        isolated: calls that failed alone, after a batch had failed with them in it, in total.
        ceilings: of the workers that run out of device memory, by their number: the most that they
            compute at once. An int is a number of items; where items have lengths it is a float,
            items times the longest of them.
        deduplicated: items that were answered by the computation of another caller's, in total. A
            call all of whose items are is not counted among the accepted ones.
        cached: items that were answered from the cache, in total; likewise.
        trouble: why no worker gives answers at present, in a sentence; None while one does.
        wanted: workers that there should be now by the load; None if their number is fixed. So are
            the following.
        worker_range: the least and the most of them.
        target_wait: how long items may wait for a worker before more are started, seconds.
        wait: how long an item that comes now would wait, seconds.
    """

    state: str
    pending: int
    in_flight: int
    batches_in_flight: int
    workers: Mapping[str, int]
    restarts: int
    accepted: int
    answered: int
    failed: int
    retries: int
    expired: int
    cancelled: int
    rejected: int
    isolated: int
    ceilings: Mapping[int, float]
    deduplicated: int = 0
    cached: int = 0
    trouble: str | None = None
    wanted: int | None = None
    worker_range: tuple[int, int] | None = None
    target_wait: float | None = None
    wait: float | None = None

    @property
    def gist(self) -> str:
        """What matters, in one line."""
        workers = (f"{count} {state}" for state, count in self.workers.items() if count)
        text = (
            f"{self.state} | pending {self.pending} | in flight {self.batches_in_flight} "
            f"batches/{self.in_flight} items | workers {', '.join(workers) or 'none'}"
        )
        if self.worker_range is not None:
            text += " ({} wanted, {} to {})".format(self.wanted, *self.worker_range)
        totals = nonzero(
            self, "restarts", "failed", "retries", "expired", "cancelled", "rejected", "isolated",
            "deduplicated", "cached",
        )  # fmt: skip
        return " | ".join([text, *totals])


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker. There are two of one number while one replaces the other.

    Attributes:
        number: as in messages: from 0, and kept by those that are started in its place.
        device: its entry of ``cuda_devices`` as it was written, with "auto" the GPU's number; None
            if it was given none.
        state: one of those in ``StreamerStats.workers``.
        restarts: how often a worker of this number was started in place of a lost one, in total.
    """

    number: int
    device: int | str | None
    state: str
    restarts: int


#: Of batches, in items.
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

#: From the wait of a lone call to more than callers wait; 1 - 2.5 - 5 between.
SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

#: A share of a batch's elements; the first bucket is for batches without any padding.
PADDING = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Histogram:
    """How many values fell into which bucket. Not thread-safe.

    Args:
        bounds: the upper ends of the buckets, ascending; each belongs to its bucket. A last bucket
            takes what is above them all.

    Attributes:
        counts: by bucket: one more than there are bounds.
        total: the sum of all values.

    Raises:
        ValueError: there are no bounds, or they do not ascend.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of a histogram must ascend; not {bounds!r}")
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.count}, total {self.total:g}>"

    def add(self, value: float, n: int = 1) -> None:
        """Count a value, ``n`` times."""
        self.counts[bisect_left(self.bounds, value)] += n
        self.total += value * n

    def add_all(self, values: Sequence[float]) -> None:
        """Count values."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Of all values; None if there are none."""
        count = self.count
        return self.total / count if count else None

    def quantile(self, q: float) -> float | None:
        """About which value a share of ``q`` (0 to 1) of all does not exceed; None without values.

        Interpolated within its bucket, of which the first begins at 0, or at its bound if that is
        less. What is above the last bound is taken to be there.
        """
        count = self.count
        if not count:
            return None
        rank, below = q * count, 0
        start = min(0.0, self.bounds[0])
        for bound, n in zip(self.bounds, self.counts, strict=False):
            if n and below + n >= rank:
                return start + (bound - start) * max(0.0, rank - below) / n
            below += n
            start = bound
        return start

    def copy(self) -> Self:
        """As it is now."""
        return self - type(self)(self.bounds)

    def __sub__(self, earlier: Self) -> Self:
        """What was added since ``earlier``, a copy of this one: of the last ten seconds, say."""
        if earlier.bounds != self.bounds:
            raise ValueError("only histograms of the same bounds can be compared")
        difference = type(self)(self.bounds)
        difference.counts[:] = [
            now - before for now, before in zip(self.counts, earlier.counts, strict=True)
        ]
        difference.total = self.total - earlier.total
        return difference


class BatchMetrics:
    """Histograms of the batches of a streamer since it was built. Not thread-safe.

    Of a model of steps ``sizes`` and ``inference`` are of its steps. The others are of items: each
    is cut, as a batch of one, when it goes to a worker, and is back when it is over.

    Attributes:
        sizes: of batches, in items.
        queued: how long the items of a call had waited when they were cut into a batch, seconds;
            counted once for each batch that the call was cut into, not for each of its items.
        inference: what the model took for a batch, seconds.
        batch: from when a batch was cut until it was back, seconds: with the transport, and with
            the wait behind another batch if it was sent ahead.
        padding: the share of a batch's elements that were padding, of models that tell it (see
            ``ManagedModel.padding``).
        first_output: of streams, from a call until its first output was here, seconds.
        between_outputs: of streams, from one output to the next, seconds.
        stages: seconds that workers were in preprocess (with decoding), forward (or predict) and
            postprocess (with encoding), in total, of batches for which that is known.
        reasons: how many batches were cut why; one that is run again counts again, as ``AGAIN``.
    """

    def __init__(self) -> None:
        self.sizes = Histogram(SIZES)
        self.queued = Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self.batch = Histogram(SECONDS)
        self.padding = Histogram(PADDING)
        self.first_output = Histogram(SECONDS)
        self.between_outputs = Histogram(SECONDS)
        self.stages = [0.0, 0.0, 0.0]
        self.reasons: Counter[Reason] = Counter()

    def came_back(self, batch: BatchRecord) -> None:
        """A batch came back, with results or with the model's error."""
        report = batch.report
        self.sizes.add(batch.size)
        self.inference.add(report.duration)
        if report.padding is not None:
            self.padding.add(report.padding)
        if report.stages is not None:
            for stage, seconds in enumerate(report.stages):
                self.stages[stage] += seconds
        self.item_over(batch)

    def stepped(self, size: int, duration: float) -> None:
        """A model of steps has taken one with so many items."""
        if size:
            self.sizes.add(size)
            self.inference.add(duration)

    def item_over(self, batch: BatchRecord) -> None:
        """An item of a model of steps is over."""
        self.batch.add(batch.back_at - batch.cut_at)
        self.reasons[batch.reason] += 1
        if batch.search is None:
            self.was_cut(batch)

    def was_cut(self, batch: BatchRecord) -> None:
        """Count how long the items of a batch had waited; once for each batch of new items."""
        cut_at = batch.cut_at
        if batch.calls == 1:
            self.queued.add(cut_at - batch.spans[0][0].arrived_at)
        else:
            self.queued.add_all([cut_at - call.arrived_at for call in batch.each_call()])

    def copy(self) -> Self:
        """As they are now."""
        return self - type(self)()

    def __sub__(self, earlier: Self) -> Self:
        """What happened since ``earlier``, a copy of these."""
        difference = type(self)()
        for name, now in vars(self).items():
            before = getattr(earlier, name)
            if isinstance(now, list):
                new: Any = [each - then for each, then in zip(now, before, strict=True)]
            else:  # a histogram, or a counter
                new = now - before
            setattr(difference, name, new)
        return difference


#: How many batches are kept, and how many steps. Enough for shares to the nearest percent or so.
RECENT = 256

#: How many times until a first output are kept.
FIRST_OUTPUTS = 64

#: For how long batches count as recent, seconds.
_HORIZON = 60.0


class Figures:
    """Counts calls and batches since the start."""

    def __init__(self) -> None:
        self.accepted_calls = self.accepted_items = self.answered_calls = 0
        self.served_items = 0  # of batches that came back
        self.failed_calls = 0  # of anything but their time
        self.expired_calls = self.cancelled_calls = 0  # whose time ended, or that were withdrawn
        #: Refused since too much waited; the engine counts those that found no room.
        self.rejected_calls = 0
        #: Of those calls, if they would have been in time by themselves; counted there, too.
        self.refused_items = 0
        #: What the model has taken for a batch of late, seconds; infinity before the first.
        self.batch_duration = math.inf
        self.metrics = BatchMetrics()
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT)  # that came back, the oldest first
        #: Of a model of steps the same, and how long its last streams took to their first output.
        self.steps: deque[StepReport] = deque(maxlen=RECENT)
        self.first_outputs: deque[float] = deque(maxlen=FIRST_OUTPUTS)

    def took(self, duration: float, batches: int) -> None:
        """The model took so long for a batch; of about so many batches the mean is known."""
        known = self.batch_duration
        self.batch_duration = (
            duration if known == math.inf else known + (duration - known) / batches
        )

    def came_back(self, batch: BatchRecord, pending: int, *, is_item: bool) -> None:
        """A batch is back, with results or a failure; of a model of steps, it is one item."""
        if is_item:
            self.metrics.item_over(batch)
        else:
            self.metrics.came_back(batch)
        self.served_items += batch.size
        self.note(batch, pending)
        self.recent.append(batch)

    def note(self, batch: BatchRecord, pending: int) -> None:
        """Note in a batch that is back, or lost, what was counted until then."""
        batch.queued, batch.pending = self.metrics.queued.total, pending
        batch.answered, batch.failed = self.answered_calls, self.failed_calls
        batch.expired, batch.rejected = self.expired_calls, self.rejected_calls


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
    **known: Any,
) -> Summary:
    """Sum up the batches, in the order in which they came back, and the state at ``now``.

    Args:
        recent: fewer than ``RECENT`` are all that there ever were.
        known: fields of the summary that do not follow from batches.
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
    summary = Summary(now=stats, reasons={}, **counts, **known)
    if not batches:
        return summary
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
    workers = summary.ready or len({one.slot for one in batches})
    spent = sum(one.report.pace for one in batches)
    items = sum(one.size for one in batches)
    reports = [one.report for one in batches]
    paddings = [(one.padding, one.duration) for one in reports if one.padding is not None]
    weight = sum(duration for _, duration in paddings)
    stages = [one.stages for one in reports if one.stages is not None]
    return dataclasses.replace(
        summary,
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
        cost=sum(one.cost for one in batches) / items,
    )


def _pending(batches: Sequence[BatchRecord]) -> float:
    return sum(one.pending for one in batches) / len(batches)


def summarize_steps(
    steps: Sequence[StepReport], first_outputs: Iterable[float], places: int, workers: int
) -> StepSummary | None:
    """Sum up steps, with the number of workers that are ready; None if there were none."""
    stepped = [step for step in steps if step.size]
    if not stepped:
        return None
    begin = min(step.at - step.duration - step.starting for step in steps)
    seconds = max(steps[-1].at - begin, 1e-9) * max(1, workers)
    ordered = sorted(first_outputs)
    return StepSummary(
        places=places,
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
