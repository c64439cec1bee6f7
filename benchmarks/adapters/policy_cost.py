"""What the scheduler itself takes for an item.

The real batcher in a tight loop: no threads, no clock, no model, nothing sent. Callers of single
items call again as soon as they are answered, on one worker that takes 5 ms + 0.1 ms per item. Each
figure is the processor's time of submitting, cutting and answering, of this loop around them too.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call, CallOptions
from service_streamer.options.table import StreamerOptions

__all__ = ["CASES", "Case", "cost"]

BATCH_SIZE = 64
#: Those who wait, beside the two full batches that a busy worker has.
WAITING = 256


def _nothing(call: Call, number: int) -> None:
    """Most calls are ordinary."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        callers: how many there are.
        dress: gives a call what it has beside its item.
        options: of the batcher.
    """

    name: str
    callers: int
    dress: Callable[[Call, int], None] = _nothing
    options: dict[str, Any] = field(default_factory=dict)


def _lengths() -> Callable[[Call, int], None]:
    source = random.Random(1)
    mean, sigma = math.log(25), 0.8
    drawn = [max(1.0, round(source.lognormvariate(mean, sigma))) for _ in range(4096)]

    def dress(call: Call, number: int) -> None:
        call.lengths = (drawn[number % len(drawn)],)

    return dress


def _priority(call: Call, number: int) -> None:
    call.options = _PRIORITIES[number % len(_PRIORITIES)]


def _deadline(call: Call, number: int) -> None:
    # Farther away than anything takes here, so that none is missed, and in no order.
    call.deadline = 1e6 + number * 7919 % 1000
    call.options = _WITH_DEADLINE


def _tenant(call: Call, number: int) -> None:
    call.options = _TENANTS[number % len(_TENANTS)]


_PRIORITIES = [CallOptions(priority=priority) for priority in range(4)]
_WITH_DEADLINE = CallOptions(has_deadline=True)
_TENANTS = [CallOptions(tenant=f"tenant {number}") for number in range(16)]

CASES = (
    Case("batches of one, one caller", 1),
    Case("full batches of 64", WAITING + 2 * BATCH_SIZE),
    Case("the same, with lengths", WAITING + 2 * BATCH_SIZE, _lengths(), {"has_lengths": True}),
    Case("the same, four priorities", WAITING + 2 * BATCH_SIZE, _priority),
    Case("the same, deadlines", WAITING + 2 * BATCH_SIZE, _deadline),
    Case("the same, 16 tenants", WAITING + 2 * BATCH_SIZE, _tenant),
)


def cost(case: Case, count: int) -> float:
    """Processor seconds for each of so many items."""
    made = []
    for number in range(count):
        call = Call([number], None)
        case.dress(call, number)
        made.append(call)
    batcher = Batcher(StreamerOptions(batch_size=BATCH_SIZE, max_latency=0.1), **case.options)
    gc.collect()
    gc.disable()
    started = time.thread_time()
    sizes = _drive(batcher, iter(made), case.callers)
    taken = time.thread_time() - started
    gc.enable()
    assert sizes == count
    assert batcher.figures.answered_calls == count
    return taken / count


def _drive(batcher: Batcher, calls: Iterator[Call], callers: int) -> int:
    """Run a closed loop until the calls are used up; returns how many items were computed."""
    now = 0.0
    computed = 0
    in_flight: deque[BatchRecord] = deque()

    def do(actions: Actions) -> None:
        in_flight.extend(actions.batches)

    do(batcher.worker_ready(0, now))
    for call in itertools.islice(calls, callers):
        do(batcher.call_submitted(call, now))
    while not batcher.is_empty:
        if not in_flight:
            now = batcher.deadline
            do(batcher.time_passed(now))
            continue
        batch = in_flight.popleft()
        duration = 5e-3 + 1e-4 * batch.size
        now += duration
        computed += batch.size
        report = BatchReport(batch.id, batch.payloads, {}, None, duration, slot=0)
        actions = batcher.batch_returned(report, now)
        do(actions)
        for call in itertools.islice(calls, len(actions.calls)):
            now += 1e-6
            do(batcher.call_submitted(call, now))
    return computed
