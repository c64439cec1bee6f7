"""A simulation: the batcher of the engine under a clock that jumps from one event to the next.

    arrival ── batcher ── cut ── transport ── [worker: the batch before] ── model ── transport ──┐
       ▲                                                                                         │
       └─ closed loop: return time ◀──────────────────── batch back, calls answered ◀────────────┘

Nothing is imitated that decides: the batcher is the one that serves, with the same events in the
same order. What a worker does is known when its batch is cut, so there is one event for each batch
and one for each call. The workers are those of ``crew``: as many as the load needs, if the number
is not fixed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from ..batching.batcher import Actions, Batcher, build_batcher
from ..observe.record import BatchRecord, BatchReport, Call, Reason
from ..options.checks import Workers, worker_range
from ..options.kinds import PATIENCE, Count, Seconds, WorkerNumber
from ..options.table import StreamerOptions
from .crew import Crew
from .loads import Arrival, ClosedLoop, Load, Phases, Replay
from .model_cost import CostModel, FixedWait, Overheads


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


#: Of events, beside their times.
_BACK, _CALLER, _ARRIVAL, _PHASE, _READY = range(5)

#: time, a number that keeps the rest from being compared, kind, and what it is about.
_Event: TypeAlias = tuple[float, int, int, Any]

_NOTHING: tuple[None] = (None,)


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
    """Run a streamer's batching without a model, a worker or a clock: the same batcher, simulated.

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
    least, most = worker_range(WorkerNumber().check("workers", workers))
    start_duration = Seconds(zero=True).check("start_duration", start_duration)
    if requests is not None:
        Count().check("requests", requests)
    elif seconds is None and _is_endless(load):
        requests = 20_000
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a finite number above 0; not {seconds!r}")
    if not 0 <= warm_up < 1:
        raise ValueError(f"warm_up must be a share of at least 0 and below 1; not {warm_up!r}")
    PATIENCE.check("fixed_wait", fixed_wait)
    options = StreamerOptions(
        batch_size=batch_size,
        max_latency=max_latency,
        max_batch_cost=max_batch_cost,
        tenant_weights=tenant_weights or {},
    )
    policy, has_lengths = None, lengths is not None or _has_lengths(load)
    if fixed_wait is not None:
        policy = FixedWait(batch_size, fixed_wait, max_batch_cost or math.inf)
        has_lengths = False
    batcher = build_batcher(options, has_lengths=has_lengths, policy=policy)
    run = _Run(batcher, model, overheads or Overheads(), lengths, Random(seed))
    run.crew = Crew(
        batcher, least, most, start_duration=start_duration,
        will_be_ready=run.will_be_ready, do=run.do,
    )  # fmt: skip
    run.run(
        load,
        math.inf if requests is None else requests,
        math.inf if seconds is None else seconds,
    )
    return run.report(warm_up)


def _parts(load: Load) -> Sequence[tuple[float, Any]]:
    return load.phases if isinstance(load, Phases) else ((math.inf, load),)


def _has_lengths(load: Load) -> bool:
    return any(isinstance(part, Replay) and part.has_lengths for _, part in _parts(load))


def _is_endless(load: Load) -> bool:
    until, part = _parts(load)[-1]
    return until == math.inf and not isinstance(part, Replay)


def _cost(batch: BatchRecord) -> float:
    """Its items times the longest of them: as a model pays, whatever the batcher reckoned with."""
    longest = 1.0
    if batch.spans[0][0].lengths is not None:
        longest = max(
            max(call.lengths[start:stop]) for call, start, stop in batch.spans if call.lengths
        )
    return batch.size * longest


class _Run:
    """One simulation. Makes its events, and notes down what happens."""

    crew: Crew

    def __init__(
        self,
        batcher: Batcher,
        model: CostModel,
        overheads: Overheads,
        lengths: Callable[[Random], float] | None,
        random: Random,
    ) -> None:
        self._batcher = batcher
        self._model = model
        self._overheads = overheads
        self._lengths = lengths
        self._random = random
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._free_at: dict[int, float] = {}  # when each worker has done what it was given
        self._phase = 0
        self._loop: ClosedLoop | None = None  # of this phase
        self._room = math.inf  # for calls that may still arrive
        self._ends_at = math.inf  # of the load
        self._pending = 0  # items, when the load ended
        # Of each call that is over, and of each batch.
        self._arrived, self._latencies = array("d"), array("d")
        self._begun, self._done = array("d"), array("d")
        self._batches: list[tuple[float, int, Any]] = []  # cut at, size, reason

    def run(self, load: Load, requests: float, seconds: float) -> None:
        """Let calls arrive until one of the bounds is reached, and all that arrived be answered."""
        self._room = requests
        self.crew.start()
        begins = 0.0
        for until, part in _parts(load):
            self._add(begins, _PHASE, part)
            begins = until
        if min(begins, seconds) < math.inf:
            self._add(min(begins, seconds), _PHASE, None)
        batcher, events, pop = self._batcher, self._events, heapq.heappop
        crew = self.crew
        while True:
            due = batcher.deadline
            if events and crew.due < due:  # nothing is done for the load when it is over
                due = crew.due
            if not events or due < events[0][0]:
                if due == math.inf:
                    break
                if batcher.deadline <= due:
                    self.do(batcher.time_passed(due), due)
                crew.look(due)
                continue
            now, _, kind, about = pop(events)
            if kind == _CALLER:
                loop = self._loop
                if about == self._phase and loop is not None:
                    self._call(now, Arrival(now, loop.items), about)
            elif kind == _BACK:
                self._back(about, now)
            elif kind == _ARRIVAL:
                phase, begun, arrival, rest = about
                if phase == self._phase:
                    self._next(phase, begun, rest)
                    self._call(now, arrival, None)
            elif kind == _READY:
                crew.ready(about, now)
            else:
                self._begin(about, now)
            crew.look(now)
        if self._ends_at == math.inf:  # a trace that ended by itself
            self._ends_at = self._arrived[-1] + self._latencies[-1] if self._arrived else 0.0

    def _begin(self, load: Any, now: float) -> None:
        """The next phase; None for the end of all."""
        if self._ends_at < math.inf:
            return
        self._phase += 1
        self._loop = None
        if load is None:
            self._end(now)
        elif isinstance(load, ClosedLoop):
            self._loop = load
            spread = self._overheads.per_caller
            for caller in range(load.callers):
                think = self._random.expovariate(1 / load.think_time) if load.think_time else 0.0
                self._add(now + caller * spread + think, _CALLER, self._phase)
        else:
            self._next(self._phase, now, load.arrivals(self._random))

    def _next(self, phase: int, begun: float, rest: Iterator[Arrival]) -> None:
        arrival = next(rest, None)
        if arrival is not None:
            self._add(begun + arrival.at, _ARRIVAL, (phase, begun, arrival, rest))

    def _call(self, now: float, arrival: Arrival, caller: int | None) -> None:
        """A call arrives; ``caller`` is the phase of the one who comes back, if it does."""
        items = arrival.items
        call = Call(_NOTHING if items == 1 else _NOTHING * items, caller)
        call.precedence = arrival.precedence
        if arrival.lengths is not None:
            call.lengths = arrival.lengths
        elif self._lengths is not None:
            call.lengths = [self._lengths(self._random) for _ in range(items)]
        actions = self._batcher.call_submitted(call, now)
        if actions.batches:
            self.do(actions, now)
        self._room -= 1
        if self._room <= 0:
            self._phase += 1
            self._end(now)

    def _end(self, now: float) -> None:
        self._ends_at = now
        self._pending = self._batcher.pending_items

    def will_be_ready(self, slot: int, at: float) -> None:
        """The worker loads its model until then."""
        self._add(at, _READY, slot)

    def do(self, actions: Actions, now: float) -> None:
        """Let the workers have their batches."""
        transport = self._overheads.transport
        for batch in actions.batches:
            begin = max(now + transport, self._free_at.get(batch.slot, 0.0))
            done = begin + self._model.duration(batch.size, _cost(batch))
            self._free_at[batch.slot] = done
            self._begun.append(begin)
            self._done.append(done)
            self._batches.append((now, batch.size, batch.reason))
            self._add(done + transport, _BACK, (batch, done - begin))

    def _back(self, about: tuple[BatchRecord, float], now: float) -> None:
        batch, duration = about
        outputs = [None] * batch.size
        report = BatchReport(batch.id, outputs, duration=duration, slot=batch.slot)
        actions = self._batcher.batch_returned(report, now)
        self.crew.vacant(actions, now)
        self.do(actions, now)
        loop, phase, random = self._loop, self._phase, self._random
        overheads = self._overheads
        comes_back = now + overheads.return_time
        for call in actions.calls:
            self._arrived.append(call.arrived_at)
            self._latencies.append(now - call.arrived_at)
            if loop is not None and call.reply == phase:
                at = comes_back
                if overheads.jitter:
                    at += random.expovariate(1 / overheads.jitter)
                if loop.think_time:
                    at += random.expovariate(1 / loop.think_time)
                self._add(at, _CALLER, phase)
            comes_back += overheads.per_caller

    def _add(self, at: float, kind: int, about: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), kind, about))

    def report(self, warm_up: float) -> Report:
        """What happened from the end of the warm-up to the end of the load."""
        ends_at = self._ends_at
        since = warm_up * ends_at
        window = ends_at - since or math.nan
        calls = [
            (arrived, latency)
            for arrived, latency in zip(self._arrived, self._latencies, strict=True)
            if since <= arrived <= ends_at
        ]
        latencies = [latency for _, latency in calls]
        worked = self.crew.worked(since, ends_at) or math.nan
        computed = busy = 0.0
        for begun, done, (_, size, _) in zip(self._begun, self._done, self._batches, strict=True):
            within = min(done, ends_at) - max(begun, since)
            if within > 0:
                busy += within
                computed += size * within / (done - begun)
        cut = [batch for batch in self._batches if since <= batch[0] <= ends_at]
        ordered = sorted(latencies)
        return Report(
            seconds=window,
            calls=len(latencies),
            throughput=computed / window,
            busy=busy / worked,
            mean_batch_size=sum(size for _, size, _ in cut) / len(cut) if cut else math.nan,
            sizes=dict(sorted(Counter(size for _, size, _ in cut).items())),
            reasons=dict(Counter(reason for _, _, reason in cut).most_common()),
            pending=self._pending,
            mean=sum(latencies) / len(latencies) if latencies else math.nan,
            p50=percentile(ordered, 0.5),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            latencies=latencies,
            arrived=[arrived for arrived, _ in calls],
            workers=self.crew.wanted,
            mean_workers=worked / window,
            changes=self.crew.changes,
        )
