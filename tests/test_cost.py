"""What a batcher learns of what batches cost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from service_streamer.simulate import ClosedLoop, CostModel, LogNormal, simulate
from test_queue_order import Line

BASE, PER_UNIT = 0.004, 0.0005


def line(cost: float) -> float:
    return BASE + PER_UNIT * cost


class Learning(Line):
    """Gets two items at a time. If the scheduler thinks that better, they are two batches."""

    def __init__(self) -> None:
        super().__init__(64, has_lengths=True)
        self.observe(1e9, lambda _: 0.0)  # so that a large batch is no risk

    def observe(self, cost: float, curve: Callable[[float], float]) -> None:
        self.now += 1e3
        self.took = curve
        self.add(size=2, lengths=[cost / 2, cost / 2])
        self.order()

    @property
    def line(self) -> tuple[float, float] | None:
        return self.batcher.queue.cost.line

    def duration(self, cost: float) -> float:
        assert self.line is not None
        base, per_unit = self.line
        return base + per_unit * cost


def learned(costs: Iterable[float], curve: Callable[[float], float] = line) -> Learning:
    model = Learning()
    for cost in costs:
        model.observe(cost, curve)
    return model


@pytest.mark.parametrize(
    ("base", "per_unit"), [(0.004, 0.0005), (0.01, 0.0), (0.0, 0.002), (1e-5, 1e-7), (30.0, 2.0)]
)
def test_exact_line_is_found_after_a_few_batches(base: float, per_unit: float) -> None:
    model = learned([2, 64, 8, 32] * 5, lambda cost: base + per_unit * cost)
    assert model.duration(100) == pytest.approx(base + per_unit * 100, rel=1e-2)
    assert model.duration(1) == pytest.approx(base + per_unit, rel=5e-2, abs=1e-2 * per_unit)


def test_noisy_line_is_found_about() -> None:
    rng = random.Random(0)
    costs = [rng.randint(1, 64) for _ in range(300)]
    model = learned(costs, lambda cost: line(cost) * rng.lognormvariate(0.0, 0.2))
    for cost in (1, 16, 64):
        assert model.duration(cost) == pytest.approx(line(cost), rel=0.15)


@pytest.mark.parametrize(("factor", "batches"), [(0.1, 80), (0.5, 120), (2.0, 200), (4.0, 300)])
def test_device_that_changes_is_followed(factor: float, batches: int) -> None:
    costs = [1, 64, 8, 32] * 20
    model = learned(costs)
    for index in range(batches):
        cost = costs[index % 4]
        model.observe(cost, lambda cost: factor * line(cost))
    assert model.duration(32) == pytest.approx(factor * line(32), rel=0.15)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        # A first batch that compiles for a minute.
        ([(4, 60.0)], [1, 64, 8, 32] * 2),
        # What a server asks a model about itself is answered without computing anything.
        ([(1, 4e-5)], [1, 9, 8, 15, 8, 9, 12, 6] * 2),
        ([(1, 4e-5)] * 3, [1, 9, 8, 15, 8, 9, 12, 6] * 2),
        # Items that cost nothing.
        ([(0.0, 0.008)] * 3, [1, 64, 8, 32] * 20),
    ],
)
def test_first_batches_that_are_odd_are_soon_forgotten(
    first: list[tuple[float, float]], then: list[float]
) -> None:
    model = Learning()
    for cost, duration in first:
        model.observe(cost, lambda _, duration=duration: duration)
    for cost in then:
        model.observe(cost, line)
    assert model.duration(32) == pytest.approx(line(32), rel=0.1)


def test_odd_batch_among_many_changes_little() -> None:
    model = learned([1, 64, 8, 32] * 20)
    model.observe(32, lambda _: 60.0)
    assert model.line == pytest.approx((BASE, PER_UNIT), rel=0.02)
    model.observe(32, lambda _: 1e-6)
    for cost in [1, 64, 8, 32] * 25:
        model.observe(cost, line)
    assert model.duration(32) == pytest.approx(line(32), rel=0.15)


def test_nothing_is_ever_negative() -> None:
    rng = random.Random(0)
    for _ in range(20):
        model = Learning()
        for _ in range(50):
            # No line at all, with a slope below zero, and of all sizes
            model.observe(
                rng.choice([0.0, 1.0, 7.0, 1e4]), lambda _: rng.choice([1e-6, 1e-3, 0.1, 60.0])
            )
            if model.line is not None:
                assert all(0.0 <= number < math.inf for number in model.line)


@pytest.mark.parametrize(
    ("base", "per_unit", "costs", "is_known"),
    [
        (5, 0.5, [], False),
        (5, 0.5, [1, 2, 4, 8, 16, 32, 64], False),  # too few
        (5, 0.5, [64] * 50, False),  # all alike
        (5, 0.5, [*[64] * 99, 60], False),
        (0, 0, range(1, 50), False),  # a clock that stands still
        (5, 0.5, [1, 2, 4, 8, 16, 32, 64, 128], True),
    ],
)
def test_line_is_known_once_the_batches_differ(
    base: float, per_unit: float, costs: Iterable[float], is_known: bool
) -> None:
    model = learned(costs, lambda cost: base + per_unit * cost)
    if not is_known:
        assert model.line is None
    else:
        assert model.line == pytest.approx((base, per_unit), rel=0.05, abs=0.05)


@pytest.mark.parametrize(
    ("callers", "per_item", "least"),
    [(128, 145e-6, 1_600), (256, 145e-6, 1_900), (256, 0.0, 2_100)],
)
def test_batches_are_not_cut_small_for_what_items_cost(
    callers: int, per_item: float, least: float
) -> None:
    """A line alone, without a price for each item, takes 1,483 and 1,827 items a second through."""
    model = CostModel(0.0036, per_item, 7.8e-6)
    report = simulate(ClosedLoop(callers), model, lengths=LogNormal(25, 0.6), requests=8_000)
    assert report.throughput > least
