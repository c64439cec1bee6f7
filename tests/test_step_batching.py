"""Batching of models of steps: each item has a place, in any order of what happens."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchReport, Call, Precedence, StepReport

LOST = "the worker died"


class World:
    """A batcher, workers that step, and callers; time goes by in whole seconds.

    Attributes:
        held: what each worker holds: by batch its call, and how many outputs are still to come.
        got: what the caller of each call got, and how it ended.
    """

    def __init__(
        self, places: int = 4, workers: int = 1, *, resumes: bool = False, **options: Any
    ) -> None:
        self.places = places
        self.now = 0.0
        self.batcher = Batcher(batch_size=places, max_latency=0.1, expired="expired", **options)
        self.held: dict[int, dict[int, list[Any]]] = {}
        self.got: dict[Call, list[Any]] = {}
        self.calls: list[Call] = []
        self.slots = 0
        self.batcher.begin_steps(places, resumes=resumes)
        for _ in range(workers):
            self.ready()

    def ready(self) -> None:
        slot, self.slots = self.slots, self.slots + 1
        self.held[slot] = {}
        self.do(self.batcher.worker_ready(slot, self.now))

    def submit(
        self, steps: int, *, is_stream: bool = True, deadline: float = 1e9, **precedence: Any
    ) -> Call:
        call = Call([steps], f"call {len(self.calls)}", None, Precedence(**precedence), True)
        call.is_stream, call.deadline = is_stream, deadline
        self.calls.append(call)
        self.got[call] = []
        self.do(self.batcher.call_submitted(call, self.now, True))
        return call

    def leave(self, call: Call) -> None:
        if self.batcher.call_withdrawn(call):
            self.got[call].append("left")
        self.drop()

    def do(self, actions: Actions) -> None:
        for batch in actions.batches:
            assert batch.size == 1
            call = batch.spans[0][0]
            steps, *begun = batch.payloads
            self.held[batch.slot][batch.id] = [call, steps, len(begun)]
            assert len(self.held[batch.slot]) <= self.batcher.room
        for call in actions.calls:
            assert call.is_over
            self.got[call].append(("failed", call.failure) if call.failure else call.outputs)
        self.drop()
        self.batcher.check_invariants()

    def drop(self) -> None:
        """Workers answer what they are told to drop."""
        for slot, batch_id in self.batcher.steps.take_drops():
            del self.held[slot][batch_id]
            self.back(slot, BatchReport(batch_id, [None]))

    def back(self, slot: int, report: BatchReport) -> None:
        report.slot = slot
        self.do(self.batcher.batch_returned(report, self.now))

    def step(self, slot: int = 0) -> None:
        """One step of what the worker has places for: the first that it got."""
        self.now += 1.0
        held = self.held[slot]
        outputs, done = {}, []
        for batch_id in [*held][: self.places]:
            call, steps, made = held[batch_id]
            held[batch_id][2] = made = made + 1
            if made == steps:
                done.append(BatchReport(batch_id, [None if call.is_stream else "all"]))
            if call.is_stream:
                outputs[batch_id] = b"%d" % made
        for report in done:
            del held[report.batch_id]
        parts = self.batcher.stepped(StepReport(outputs, slot=slot), self.now)
        for call, output in parts:
            self.got[call].append(int(output))
        for report in done:
            self.back(slot, report)

    def lose(self, slot: int) -> None:
        del self.held[slot]
        self.do(self.batcher.worker_lost(slot, LOST, self.now))

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(10_000):
            busy = [slot for slot, held in self.held.items() if held]
            if not busy:
                break
            for slot in busy:
                self.step(slot)
        assert self.batcher.is_empty
        self.batcher.check_invariants()


def test_the_record_of_an_item_that_is_lost_says_as_much_as_that_of_another() -> None:
    world = World(places=1)
    records: list[Any] = []
    world.batcher.on_back = records.append
    for _ in range(3):
        world.submit(3)
    world.step()
    world.lose(0)  # the first has had an output, and fails; the second begins again
    counted = [(each.pending, each.failed, each.answered, each.expired) for each in records]
    assert counted == [(1, 1, 0, 0)] * 2
    assert all(each.rejected == 0 and each.queued >= 0.0 for each in records)


def test_timing_says_when_outputs_of_a_stream_came() -> None:
    world = World()
    call, short, silent = world.submit(4), world.submit(1), world.submit(2, is_stream=False)
    world.step()
    assert call.timing is None, "it is not over"
    world.step()
    world.now += 4.0
    world.run()
    assert call.timing is not None
    assert call.timing[4:] == (1.0, 7.0 / 3, 5.0)
    assert short.timing is not None
    assert short.timing[4:] == (1.0, None, None)
    assert silent.timing is not None
    assert silent.timing[4:] == (None, None, None), "its worker told nothing"


def test_a_worker_whose_items_all_rest_is_not_hung() -> None:
    world = World(places=2, batch_timeout=5.0)
    calls = [world.submit(50) for _ in range(3)]  # one of them is on deck
    world.step()
    for call in calls[:2]:
        world.batcher.steps.hold(call, world.now, is_held=True)
    for _ in range(10):
        world.now += 4.0
        assert not world.batcher.time_passed(world.now).hung
    world.batcher.steps.hold(calls[0], world.now, is_held=False)
    hung: list[int] = []
    while not hung:
        world.now = world.batcher.deadline
        hung += world.batcher.time_passed(world.now).hung
    assert hung == [0]


def test_the_worker_with_the_fewest_items_gets_the_next() -> None:
    world = World(places=4, workers=2)
    for _ in range(6):
        world.submit(9)
    assert [len(held) for held in world.held.values()] == [3, 3]
    for call in [call for call, *_ in world.held[0].values()][:2]:
        world.leave(call)
    world.submit(9)
    assert [len(held) for held in world.held.values()] == [2, 3]


def test_what_was_lost_once_shares_a_worker_and_is_alone_after_that() -> None:
    world = World(places=4)
    for _ in range(4):
        world.submit(2, is_stream=False)
    world.lose(0)
    world.ready()
    assert len(world.held[1]) == 4
    world.lose(1)
    world.ready()
    assert len(world.held[2]) == 1, "one of them may be what kills"
    world.run()
    assert all(world.got[call] == [["all"]] for call in world.calls)


def test_one_that_kills_its_worker_again_and_again_fails_alone() -> None:
    world = World(places=4)
    calls = [world.submit(2, is_stream=False) for _ in range(4)]
    for _ in range(100):
        (slot,) = world.held
        if any(call is calls[1] for call, *_ in world.held[slot].values()):
            world.lose(slot)
            world.ready()
        elif world.held[slot]:
            world.step(slot)
        else:
            break
    assert world.got[calls[1]] == [("failed", LOST)]
    assert all(world.got[call] == [["all"]] for call in calls if call is not calls[1])
    assert world.slots <= 5


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 10**9))
def test_in_any_order_each_call_ends_once_with_all_its_outputs(
    places: int, workers: int, resumes: bool, seed: int
) -> None:
    rng = random.Random(seed)
    world = World(places=places, workers=workers, resumes=resumes)
    waiting: deque[Call] = deque()
    for _ in range(rng.randint(5, 80)):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                waiting.append(
                    world.submit(
                        rng.randint(1, 6),
                        is_stream=rng.random() < 0.7,
                        tenant=rng.choice("ab"),
                        deadline=rng.choice([1e9, 1e9, world.now + rng.randint(1, 9)]),
                    )
                )
            case 4 if world.calls:
                world.leave(rng.choice(world.calls))
            case 5 if rng.random() < 0.3:
                world.lose(rng.choice([*world.held]))
                world.ready()
            case 6:
                world.do(world.batcher.time_passed(world.now))
            case _:
                world.step(rng.choice([*world.held]))
    world.run()
    world.do(world.batcher.time_passed(1e10))
    for call in world.calls:
        *outputs, end = world.got[call]
        steps = [each for each in world.got[call] if type(each) is int]
        assert steps == [*range(1, len(steps) + 1)], "each once and in order"
        assert outputs == steps
        if end == []:
            assert call.is_stream
        elif end == ["all"]:
            assert not call.is_stream
        else:
            assert end == "left" or end[0] == "failed"
    assert Counter(map(len, world.held.values())) == {0: workers}
