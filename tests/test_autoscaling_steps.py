"""How many workers there are by the load of a model of steps, in simulated time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import pytest

import service_streamer.supervision.autoscaling as autoscaling
from cases import long_cases
from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchReport, Call
from service_streamer.options.table import StreamerOptions
from service_streamer.simulate import Simulation, count_turns
from service_streamer.workers.transport import StepReport

#: What a worker takes to load its model, seconds. The first one has.
START = 5.0
#: Steps of an item, and the spread of their logarithm.
MEAN, SPREAD = 94, 0.8


@dataclass
class Item:
    """What a worker holds."""

    steps: int  # that are left
    begun: float | None = None


class Stepped(Simulation):
    """A simulation of calls to a model that steps.

    A step takes 20 ms and 0.2 ms for each item that has a place. An item takes as many steps as a
    lognormal number says.

    Attributes:
        waited: of each item, when it arrived, and how long it waited until a worker had it.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.random = random.Random(1)
        batcher = Batcher(StreamerOptions(batch_size=places))
        batcher.begin_steps(places)
        super().__init__(batcher, 1, 16, START)
        self.held: dict[int, dict[int, Item]] = {}  # by worker and batch
        self.stepping: set[int] = set()
        self.waited: list[tuple[float, float]] = []

    @property
    def capacity(self) -> float:
        """Items that one worker with no free place computes in a second."""
        return self.places / (MEAN * self.duration(self.places))

    @staticmethod
    def duration(items: int) -> float:
        return 20e-3 + 2e-4 * items

    def run_phases(self, phases: list[tuple[float, float]]) -> None:
        """Let the load be so many times what a worker computes, each until a time."""
        now = 0.0
        for until, share in phases:
            rate = share * self.capacity
            while (now := now + self.random.expovariate(rate)) < until:
                self.add(now, self.call)
            now = until
        self.run(until)

    # -- events

    def call(self, now: float) -> None:
        self.do(self.batcher.call_submitted(Call([now], None), now), now)

    def do(self, actions: Actions, now: float) -> None:
        for batch in actions.batches:
            (arrived,) = batch.payloads
            steps = self.random.lognormvariate(0, SPREAD) * MEAN / math.exp(SPREAD**2 / 2)
            self.held.setdefault(batch.slot, {})[batch.id] = Item(max(1, round(steps)))
            self.waited.append((arrived, now - arrived))
            self.begin(batch.slot, now)

    def begin(self, slot: int, now: float) -> None:
        """A worker that has items and is not at a step takes the next one."""
        if self.held[slot] and slot not in self.stepping:
            self.stepping.add(slot)
            held = dict(itertools.islice(self.held[slot].items(), self.places))
            for item in held.values():
                item.begun = now if item.begun is None else item.begun
            self.add(now + self.duration(len(held)), self.step, slot, held)

    def step(self, slot: int, held: dict[int, Item], now: float) -> None:
        took = self.duration(len(held))
        self.batcher.scheduler.stepped(StepReport(size=len(held), duration=took, slot=slot), now)
        for batch, item in held.items():
            item.steps -= 1
            if not item.steps:
                assert item.begun is not None
                del self.held[slot][batch]
                back = BatchReport(batch, [None], duration=now - item.begun, slot=slot)
                self.return_batch(back, now)
        self.stepping.discard(slot)
        self.begin(slot, now)


@pytest.mark.parametrize("places", [32, *long_cases(8)])
def test_after_a_step_of_the_load_items_wait_for_twice_the_target_at_most(places: int) -> None:
    """Items of very different lengths do not have far more workers started than are needed."""
    run = Stepped(places)
    until = 110.0
    run.run_phases([(until, 0.2), (3 * until, 3.0), (6 * until, 0.2)])
    turn = MEAN * run.duration(places) / places
    target = max(autoscaling.LEAST_TARGET, 2 * turn)
    # Time to load, and as long again for what has gathered meanwhile.
    loaded = until + 3 * START + 4 * target
    later = sorted(took for at, took in run.waited if at < until or at >= loaded)
    assert later[int(0.99 * len(later))] <= 2 * target
    numbers = [number for _, number in run.wanted]
    assert count_turns(run.wanted) == 1
    assert (numbers[0], numbers[-1]) == (1, 1)
    assert 3 <= max(numbers) <= 8


def test_what_a_worker_computes_is_learned_from_many_items() -> None:
    batcher = Batcher(StreamerOptions(batch_size=8))
    batcher.begin_steps(8)
    batcher.worker_ready(0, 0.0)
    for number in range(80):
        (batch,) = batcher.call_submitted(Call([number], None), float(number)).batches
        took = 9.0 if number % 4 == 0 else 1.0  # 3 s on average
        batcher.batch_returned(BatchReport(batch.id, [None], duration=took, slot=0), number + 0.5)
    load = batcher.scheduler.load(0, 0, 1.0)
    assert load.speed == pytest.approx(8 / 3, rel=0.1)
    assert load.turn == pytest.approx(3 / 8, rel=0.1)
    assert (load.served, load.batches) == (80, 10)  # as many as all places compute at once
