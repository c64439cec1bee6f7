"""How many items start before a step: how long those that run may wait for them."""

from __future__ import annotations

import math

import pytest

from service_streamer.workers.step_admission import STALL_STARTS, STALL_STEPS, StepAdmission
from service_streamer.workers.step_batch import ENDS_PER_PROBE, StepBatch, StepRequest


def learned(base: float, per_item: float, step: float) -> StepAdmission:
    """An admission that has seen starts of some sizes, which take base + per_item * size."""
    admission = StepAdmission()
    for turn in range(40):
        size = 1 + turn % 4
        admission.started(size, base + per_item * size)
        admission.stepped(step)
    return admission


@pytest.mark.parametrize(
    ("base", "per_item", "step", "most"),
    [
        (0.0, 0.010, 0.105, 10),
        (0.050, 0.010, 0.105, 5),
        (0.0, 0.030, 0.105, 3),
        (0.0, 0.100, 0.020, 1),  # each takes longer than a step, and they take turns
        (0.0, 5.0, 0.020, 1),
        (0.100, 0.001, 0.020, 51),  # one starts anyway, and the others add little
        (0.100, 0.0, 0.020, math.inf),
    ],
)
def test_as_many_start_as_take_a_step(
    base: float, per_item: float, step: float, most: float
) -> None:
    found = learned(base, per_item, step).most(running=3)
    assert found == most or abs(found - most) <= 0.1 * most


def test_all_start_at_once_if_none_waits_for_them() -> None:
    assert learned(0.0, 1.0, 0.001).most(running=0) == math.inf
    assert StepAdmission().most(running=3) == math.inf, "nothing is known"


def test_a_step_that_was_held_up_does_not_count_for_long() -> None:
    admission = learned(0.0, 0.010, 0.020)
    admission.stepped(60.0)
    assert admission.step < 0.020 * (1 + 1)
    assert admission.most(1) <= 2


def test_steps_that_take_longer_let_more_start() -> None:
    admission = learned(0.0, 0.010, 0.0105)
    assert admission.most(1) == 1
    for _ in range(20):
        admission.stepped(0.045)
    assert admission.most(1) == 4


def test_a_first_start_that_compiles_is_forgotten() -> None:
    admission = StepAdmission()
    admission.started(4, 30.0)
    admission.stepped(0.020)
    for _ in range(3):
        admission.started(1, 0.001)
    assert admission.most(1) >= 4


def test_pauses_of_those_that_run_are_bounded_and_places_fill_up() -> None:
    """Items of 30 steps arrive as fast as they start: 32 places, starts of 4 ms, 20 ms steps."""
    admission, batch = StepAdmission(1.0), StepBatch(32)
    now = 0.0
    pauses: list[float] = []
    sizes: list[int] = []
    for turn in range(400):
        while len(batch.deck) < 8:
            batch.deck.append(StepRequest(turn, None))
        chosen = batch.next(admission.most(len(batch.running)), admission.cost)
        seconds = 0.002 + 0.004 * len(chosen) if chosen else 0.0
        if chosen and batch.running:
            pauses.append(seconds)
        if chosen:
            admission.started(len(chosen), seconds)
        batch.begin(chosen, now)
        step = 0.018 + 0.0001 * len(batch.running)
        admission.stepped(step)
        now += seconds + step
        sizes.append(len(batch.running))
        for request in list(batch.running):
            request.stepped(0, request.steps == 29)
            if request.is_done:
                batch.end(request)
    bound = max(STALL_STEPS * 0.0215, STALL_STARTS * 0.006)
    assert max(pauses[3:]) <= bound, "while nothing is known of starts they are longer"
    assert sum(sizes[50:]) / len(sizes[50:]) >= 0.95 * 32


# -- which of those on deck have a place


def batch(running: int, deck: int, places: int = 4, max_cost: float = math.inf) -> StepBatch:
    """Those that run cost 10 each."""
    found = StepBatch(places, max_cost)
    requests = [StepRequest(number, None) for number in range(running + deck)]
    found.begin(requests[:running], 0.0)
    for request in found.running:
        request.cost = 10.0
    found.deck.extend(requests[running:])
    return found


@pytest.mark.parametrize(
    ("running", "deck", "max_cost", "mean", "growth", "most", "start"),
    [
        (0, 9, math.inf, 1.0, 5.0, math.inf, 4),
        (3, 9, math.inf, 1.0, 0.0, math.inf, 1),
        (4, 9, math.inf, 1.0, 0.0, math.inf, 0),
        (1, 9, math.inf, 1.0, 0.0, 2, 2),
        (1, 9, 35.0, 12.0, 0.0, math.inf, 2),
        (1, 9, 35.0, 12.0, 14.0, math.inf, 1),  # two would grow to 52
        (1, 9, 52.0, 12.0, 14.0, math.inf, 2),
        (1, 9, 21.0, 12.0, 0.0, math.inf, 0),
        (0, 9, 5.0, 12.0, 0.0, math.inf, 1),  # one alone may cost more
        (0, 9, 50.0, None, 0.0, math.inf, 1),  # the first one tells
        (0, 9, math.inf, None, 0.0, math.inf, 4),
    ],
)
def test_those_start_that_have_a_place_and_memory(
    running: int,
    deck: int,
    max_cost: float,
    mean: float | None,
    growth: float,
    most: float,
    start: int,
) -> None:
    found = batch(running, deck, max_cost=max_cost)
    chosen = found.next(most, mean, growth)
    assert [each.batch_id for each in chosen] == list(range(running, running + start))


@pytest.mark.parametrize(("max_cost", "start"), [(16.9, 0), (17.0, 1)])
def test_those_that_are_nearly_done_leave_room_to_grow(max_cost: float, start: int) -> None:
    found = batch(1, 9, max_cost=max_cost)
    (old,) = found.running
    old.first_cost = 5.0  # it has 2 left to grow: 12 beside 3 + 2, and then the other is alone
    assert len(found.next(1, 3.0, 7.0)) == start


def test_what_cost_too_much_is_given_up_and_waits_for_an_end() -> None:
    found = batch(3, 0, max_cost=25.0)
    youngest = found.excess()
    assert youngest is found.running[-1]
    found.put_back([youngest])
    assert found.excess() is None
    assert found.next(math.inf, 1.0) == [], "it would grow too large again"
    found.end(found.running[0])
    assert found.next(math.inf, 1.0) == [youngest]


def test_what_lack_of_memory_has_bounded_recovers() -> None:
    found = batch(4, 0)
    found.ran_out(2)
    found.start_ran_out(4)
    assert (found.room, found.at_once) == (2, 2)
    rooms: list[int] = []
    for number in range(3 * ENDS_PER_PROBE):
        (request,) = requests = [StepRequest(number, None)]
        found.begin(requests, 0.0)
        found.end(request)
        assert found.room == found.at_once
        rooms.append(found.room)
    assert [rooms.count(size) for size in (2, 3, 4)] == [
        ENDS_PER_PROBE - 1, ENDS_PER_PROBE, ENDS_PER_PROBE + 1
    ]  # fmt: skip
    found.end(StepRequest(99, None))
    assert found.room == 4


def test_suspects_start_in_halves_until_they_have_come_further() -> None:
    found = batch(8, 4, places=8)
    suspects = list(found.running)
    for request in suspects:
        request.steps = 5
    found.suspect(suspects)
    found.put_back(suspects)
    chosen = found.next(math.inf, 1.0)
    assert chosen == suspects[:4]
    found.begin(chosen, 0.0)
    for step in range(6):
        assert found.next(math.inf, 1.0) == []
        for request in chosen:
            request.stepped(step, False)
    # Those that run are cleared, those on deck are not.
    assert [request.limit for request in suspects] == [math.inf] * 4 + [4] * 4
    found.end(chosen[0])
    assert found.next(math.inf, 1.0) == suspects[4:5]
