"""What batching does to a load, in seconds instead of hours.

The fleet of the engine runs under a clock that jumps from one event to the next.

    arrival ── batcher ── cut ── transport ── [worker: the batch before] ── model ── transport ──┐
       ▲                                                                                         │
       └─ closed loop: return time ◀──────────────────── batch back, calls answered ◀────────────┘

Nothing is imitated that decides: the batcher and the fleet are those that serve, with the same
events in the same order. What a worker does is known when its batch is cut, so there is one event
for each batch and one for each call.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..batching.batch_scheduler import BatchScheduler
from ..batching.batcher import Actions, Batcher
from ..batching.call_queue import Decision
from ..engine.fleet import Fleet
from ..errors import WorkerLost
from ..observe.record import BatchRecord, BatchReport, Call, Reason
from ..options import kinds
from ..options.checks import Workers, worker_range
from ..options.kinds import PATIENCE
from ..options.table import StreamerOptions
from ..supervision.supervisor import Loss
from ..workers.protocol import Failure, WorkerReady
from ..workers.transport import WorkerDied
from .workload import (
    Arrival,
    Bursts,
    ClosedLoop,
    CostModel,
    Load,
    LogNormal,
    OpenLoad,
    Overheads,
    Phases,
    Poisson,
    Replay,
    read_trace,
)

__all__ = [
    "Arrival", "Bursts", "ClosedLoop", "CostModel", "LogNormal", "Overheads", "Phases", "Poisson",
    "Replay", "Report", "read_trace", "simulate",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What was seen after the warm-up, until the load ended.

    Attributes:
        seconds: how long that was.
        calls: that arrived in that time, and were answered then or later.
        throughput: items per second; of a batch that was computed in that time in part, that part.
        busy: the share of the time that workers computed.
        mean_batch_size: of the batches that were cut in that time.
        sizes: how many batches had how many items.
        reasons: how many batches were cut for which reason.
        pending: items that waited when the load ended: many if it was more than can be computed.
        mean, p50, p95, p99: latency of a call, from its arrival to its results going out, seconds;
            not a number without calls.
        latencies: all of them, in the order of the answers.
        arrived: when each of these calls arrived, seconds since the start.
        workers: when the number of workers that should be there changed, seconds since the start,
            and to how many; the first is that at the start.
        mean_workers: that were ready, on average.
        changes: how often workers were added after some had been ended, or the other way round.
    """

    seconds: float
    calls: int
    throughput: float
    busy: float
    mean_batch_size: float
    sizes: Mapping[int, int]
    reasons: Mapping[Reason, int]
    pending: int
    mean: float
    p50: float
    p95: float
    p99: float
    latencies: Sequence[float] = field(repr=False)
    arrived: Sequence[float] = field(repr=False)
    workers: Sequence[tuple[float, int]]
    mean_workers: float
    changes: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that a share of them does not exceed; not a number without values."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def simulate(
    load: Load,
    model: CostModel,
    *,
    workers: Workers = 1,
    start_duration: float = 0.0,
    batch_size: int = 64,
    max_latency: float = 0.1,
    max_batch_cost: float | None = None,
    tenant_weights: Mapping[str, float] | None = None,
    lengths: Callable[[Random], float] | None = None,
    overheads: Overheads | None = None,
    fixed_wait: float | None = None,
    requests: int | None = None,
    seconds: float | None = None,
    warm_up: float = 0.1,
    seed: int = 0,
) -> Report:
    """Run a streamer's batching without a model, a worker or a clock.

    Two runs with the same arguments have the same result.

    Args:
        load: when calls arrive, and from which callers.
        model: what a batch takes.
        workers: how many there are; all alike. With the least and the most they are started and
            ended by the load, as those of a streamer.
        start_duration: what a worker takes that is started, seconds. The first ones are there.
        batch_size, max_latency, max_batch_cost, tenant_weights: as those of a streamer.
        lengths: draws the length of an item; None where items have none. Those of a trace have
            their own.
        overheads: what takes time beside the model.
        fixed_wait: for comparison: wait for so long after the oldest item came for a full batch,
            seconds, and cut batches in the order of arrival, whatever the lengths. None does as a
            streamer does.
        requests: let so many calls arrive. If neither this nor ``seconds`` is given, and the load
            does not end by itself, 20 000.
        seconds: let calls arrive for so long.
        warm_up: the share of the time that is not counted.
        seed: of all that is random.

    Raises:
        TypeError, ValueError: a value is out of range.
    """
    bounds = worker_range(kinds.WORKERS.check("workers", workers))
    start_duration = kinds.seconds(zero=True).check("start_duration", start_duration)
    kinds.number().or_none("no bound").check("seconds", seconds)
    phases = load.phases if isinstance(load, Phases) else ((math.inf, load),)
    last_end, last = phases[-1]
    ends = last_end if seconds is None else min(last_end, seconds)
    if requests is not None:
        kinds.count().check("requests", requests)
    elif ends == math.inf and not isinstance(last, Replay):
        requests = 20_000
    if not 0 <= warm_up < 1:
        raise ValueError(f"warm_up must be a share of at least 0 and below 1; not {warm_up!r}")
    PATIENCE.check("fixed_wait", fixed_wait)
    options = StreamerOptions(
        batch_size=batch_size,
        max_latency=max_latency if fixed_wait is None else fixed_wait,
        max_batch_cost=max_batch_cost,
        tenant_weights=tenant_weights or {},
    )
    has_lengths = lengths is not None or any(
        isinstance(part, Replay) and part.has_lengths for _, part in phases
    )
    if fixed_wait is None:
        batcher = Batcher(options, has_lengths=has_lengths)
    else:
        batcher = Batcher(options, scheduler_class=FixedWait)
    run = _Run(
        batcher, bounds, start_duration, model, overheads or Overheads(), lengths, Random(seed),
        math.inf if requests is None else requests,
    )  # fmt: skip
    begins = 0.0
    for until, part in phases:
        run.add(begins, run.begin, part)
        begins = until
    if ends < math.inf:
        run.add(ends, run.begin, None)
    run.run()
    return run.report(warm_up)


class FixedWait(BatchScheduler):
    """Waits until there is a full batch, or the oldest item has waited for ``max_latency``."""

    def answered(self, batch: BatchRecord, calls: int) -> None:
        """Learn nothing."""

    def decide(self, now: float) -> tuple[int, Decision]:
        idle, items = self._slots.idle, self._queue.items
        slot, most = next(iter(idle or self._slots.without_ahead)), self._max_batch_cost
        if items >= self._batch_size:
            return slot, Decision(self._batch_size, Reason.FULL, max_cost=most)
        if not idle:  # nothing is sent ahead that is not full
            return slot, Decision(0, Reason.ALONE, math.inf)
        wait_until = self._queue.turns.oldest_arrival() + self._max_latency
        size = 0 if wait_until > now else items
        return slot, Decision(size, Reason.MAX_LATENCY, wait_until, most)


_ENDED = Failure(WorkerLost("it has ended"))
_NOTHING: tuple[None] = (None,)


class Simulation(ABC):
    """A batcher, and as many workers as the load needs, under a clock that jumps between events.

    No worker is lost and nothing fails: one is ready when it has loaded its model, and ends when it
    holds nothing any more. What else happens is added by who derives from this.

    Args:
        start_duration: what a worker takes to load its model, seconds. The first ones have done so
            when the simulation begins.
    """

    def __init__(self, batcher: Batcher, least: int, most: int, start_duration: float) -> None:
        self.batcher = batcher
        self.wanted = [(0.0, least)]  # when the number of workers changed, and to how many
        self.lives: dict[int, tuple[float, float]] = {}  # from when until when each was ready
        self._fleet = Fleet(batcher, least, most)
        self._start_duration = start_duration
        #: When it is, a number that keeps the rest from being compared, and what happens.
        self._events: list[tuple[float, int, functools.partial[None]]] = []
        self._numbers = itertools.count()
        self._look_after_workers(-start_duration)

    @abstractmethod
    def do(self, actions: Actions, now: float) -> None:
        """Let the workers have their batches."""

    def add(self, at: float, happen: Callable[..., None], *about: Any) -> None:
        """Have ``happen`` called when it is time, with what it is about and the time."""
        heapq.heappush(self._events, (at, next(self._numbers), functools.partial(happen, *about)))

    def run(self, until: float = math.inf) -> None:
        """Let everything happen that is to happen before a time."""
        batcher, fleet, events = self.batcher, self._fleet, self._events
        while True:
            happens_at = events[0][0] if events else math.inf
            # Nothing is done for the load when it is over.
            due = min(batcher.deadline, fleet.scaling.due if events else math.inf)
            now = min(due, happens_at)
            if now >= until:
                break
            if happens_at <= due:
                heapq.heappop(events)[2](now)
            elif batcher.deadline <= due:
                self.do(batcher.time_passed(due), due)
            fleet.scale_by_load(now)
            self._look_after_workers(now)

    def _ready(self, slot: int, now: float) -> None:
        """The worker has loaded its model."""
        if slot in self._fleet.supervisor:  # else it was ended meanwhile
            self.lives[slot] = now, math.inf
            self.do(self._fleet.apply(WorkerReady(slot), now), now)

    def return_batch(self, report: BatchReport, now: float) -> Actions:
        """A batch is back; what was done about it, with the calls that are over."""
        actions = self._fleet.apply(report, now)
        self.do(actions, now)
        return actions

    def _look_after_workers(self, now: float) -> None:
        """Start and end workers. None is killed, as starts have no bound here."""
        fleet = self._fleet
        if fleet.supervisor.wanted != self.wanted[-1][1]:
            self.wanted.append((now, fleet.supervisor.wanted))
        while fleet.supervisor.due <= now:
            orders, more = fleet.look_after_workers((), now)
            for slot, _ in orders.start:
                self.add(now + self._start_duration, self._ready, slot)
            for actions in more:
                self.do(actions, now)
            for slot in orders.stop:
                if slot in self.lives:
                    self.lives[slot] = self.lives[slot][0], now
                self.do(fleet.apply(WorkerDied(slot, _ENDED, Loss.CRASHED), now), now)
        fleet.notes.clear()


class _Run(Simulation):
    """One simulation of a load, and what is noted down of it."""

    def __init__(
        self,
        batcher: Batcher,
        workers: tuple[int, int],
        start_duration: float,
        model: CostModel,
        overheads: Overheads,
        lengths: Callable[[Random], float] | None,
        random: Random,
        requests: float,
    ) -> None:
        super().__init__(batcher, *workers, start_duration)
        self._model = model
        self._overheads = overheads
        self._lengths = lengths
        self._random = random
        self._free_at: dict[int, float] = {}  # when each worker has done what it was given
        #: The calls of the current phase that are still to come, but for those of a closed loop.
        #: They name it, too: calls of an earlier phase are dropped when they come.
        self._arrivals: Iterator[Arrival] = iter(())
        self._load: ClosedLoop | OpenLoad | None = None  # of this phase
        self._room = requests  # for calls that may still arrive
        self._ends_at = math.inf  # of the load
        self._pending = 0  # items, when the load ended
        self._calls: list[tuple[float, float]] = []  # those answered: arrival, and latency
        #: When each batch was cut, and its worker began and was done, in seconds since the start;
        #: its size, and why it was cut. Its record takes three times the memory.
        self._batches: list[tuple[float, float, float, int, Reason]] = []

    def begin(self, load: ClosedLoop | OpenLoad | None, now: float) -> None:
        """The next phase; None for the end of all."""
        if self._ends_at < math.inf:
            return
        self._load, self._arrivals = load, iter([])
        if load is None:
            self._ends_at = now
            self._pending = self.batcher.pending_items
        elif isinstance(load, ClosedLoop):
            for caller in range(load.callers):
                called_at = now + caller * self._overheads.per_caller + self._draw(load.think_time)
                self.add(called_at, self._arrive, self._arrivals, Arrival(0.0, load.items))
        else:
            self._arrivals = (
                each._replace(at=now + each.at) for each in load.arrivals(self._random)
            )
            self._next()

    def _draw(self, *means: float) -> float:
        """The sum of exponential times."""
        return sum(self._random.expovariate(1 / mean) for mean in means if mean)

    def _next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.add(arrival.at, self._arrive, self._arrivals, arrival)

    def _arrive(self, phase: Iterator[Arrival], arrival: Arrival, now: float) -> None:
        """A call arrives, if its phase is not over."""
        if phase is not self._arrivals:
            return
        self._next()
        call = Call(_NOTHING * arrival.items, phase, options=arrival.options)
        if arrival.lengths is not None:
            call.lengths = arrival.lengths
        elif self._lengths is not None:
            call.lengths = [self._lengths(self._random) for _ in range(arrival.items)]
        self.do(self.batcher.call_submitted(call, now), now)
        self._room -= 1
        if self._room <= 0:
            self.begin(None, now)

    def do(self, actions: Actions, now: float) -> None:
        transport = self._overheads.transport
        for batch in actions.batches:
            began = max(now + transport, self._free_at.get(batch.slot, 0.0))
            done = began + self._model.duration(batch.size, _cost(batch))
            self._free_at[batch.slot] = done
            self._batches.append((now, began, done, batch.size, batch.reason))
            self.add(done + transport, self._finish, batch, done - began)

    def _finish(self, batch: BatchRecord, duration: float, now: float) -> None:
        """The results of a batch are here: answer its calls, whose callers may call again."""
        outputs = [None] * batch.size
        report = BatchReport(batch.id, outputs, duration=duration, slot=batch.slot)
        actions = self.return_batch(report, now)
        load, overheads = self._load, self._overheads
        comes_back = now + overheads.return_time
        for call in actions.calls:
            self._calls.append((call.arrived_at, now - call.arrived_at))
            if call.reply is self._arrivals and isinstance(load, ClosedLoop):
                at = comes_back + self._draw(overheads.jitter, load.think_time)
                self.add(at, self._arrive, self._arrivals, Arrival(0.0, load.items))
            comes_back += overheads.per_caller

    def report(self, warm_up: float) -> Report:
        """What happened from the end of the warm-up to the end of the load."""
        ends_at = self._ends_at
        if ends_at == math.inf:  # a trace that ended by itself
            ends_at = sum(self._calls[-1]) if self._calls else 0.0
        since = warm_up * ends_at
        window = ends_at - since or math.nan
        calls = [each for each in self._calls if since <= each[0] <= ends_at]
        latencies = [latency for _, latency in calls]
        ordered = sorted(latencies)
        worked = busy = computed = 0.0
        for begins, ends in self.lives.values():
            worked += max(0.0, min(ends, ends_at) - max(begins, since))
        for _, began, done, size, _ in self._batches:
            within = min(done, ends_at) - max(began, since)
            if within > 0:
                busy += within
                computed += size * within / (done - began)
        cut = [(size, why) for at, _, _, size, why in self._batches if since <= at <= ends_at]
        return Report(
            seconds=window,
            calls=len(calls),
            throughput=computed / window,
            busy=busy / (worked or math.nan),
            mean_batch_size=_mean([size for size, _ in cut]),
            sizes=dict(sorted(Counter(size for size, _ in cut).items())),
            reasons=dict(Counter(why for _, why in cut).most_common()),
            pending=self._pending,
            mean=_mean(latencies),
            p50=percentile(ordered, 0.5),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            latencies=latencies,
            arrived=[arrived for arrived, _ in calls],
            workers=self.wanted,
            mean_workers=worked / window,
            changes=count_turns(self.wanted),
        )


def count_turns(numbers: Sequence[tuple[float, int]]) -> int:
    """How often more workers were wanted after fewer, or fewer after more."""
    has_grown = [after > before for (_, before), (_, after) in itertools.pairwise(numbers)]
    return sum(before is not after for before, after in itertools.pairwise(has_grown))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _cost(batch: BatchRecord) -> float:
    """Its items times the longest of them: as a model pays, whatever the batcher reckoned with."""
    lengths = [max(call.lengths[start:stop]) for call, start, stop in batch.spans if call.lengths]
    return batch.size * max(lengths, default=1.0)
