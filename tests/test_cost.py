"""What a batcher learns of what batches cost, and up to which size they gain."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from service_streamer import Reason
from service_streamer.observe.record import BatchRecord
from service_streamer.simulate import ClosedLoop, CostModel, LogNormal, simulate
from test_queue_order import Line

BASE, PER_UNIT = 0.004, 0.0005


def line(cost: float) -> float:
    return BASE + PER_UNIT * cost


class Worker(Line):
    """A line of batches that take what the curve says of their cost.

    Attributes:
        sizes: of the batches since ``run`` began.
    """

    def __init__(self, curve: Callable[[float], float], **options: Any) -> None:
        super().__init__(64, **options)
        self.took = curve
        self.sizes: Counter[int] = Counter()

    def cut(self) -> BatchRecord | None:
        batch = super().cut()
        if batch is not None:
            self.sizes[batch.size] += 1
        return batch

    def run(self, batches: int) -> float:
        """Run so many batches, beyond which more waits; the items per second they came to."""
        self.sizes.clear()
        began = self.now
        call = self.add(size=(batches + 1) * 64)
        for _ in range(batches):
            self.cut()
        self.drop(call)
        items = sum(size * count for size, count in self.sizes.items())
        return items / (self.now - began)

    def compute(self, *sizes: int) -> None:
        """Run batches of these sizes, beyond which nothing waits."""
        for size in sizes:
            self.now += 1.0
            self.add(size=size)
            self.order()

    @property
    def ideal(self) -> float:
        return max(size / self.took(size) for size in range(1, 65))


class Learning(Worker):
    """Gets two items at a time. If the scheduler thinks that better, they are two batches."""

    def __init__(self) -> None:
        super().__init__(line, has_lengths=True)
        self.observe(1e9, lambda _: 0.0)  # so that a large batch is no risk

    def observe(self, cost: float, curve: Callable[[float], float]) -> None:
        self.now += 1e3
        self.took = curve
        self.add(size=2, lengths=[cost / 2, cost / 2])
        self.order()

    @property
    def line(self) -> tuple[float, float] | None:
        return self.batcher.figures.policy.cost.line

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


# -- the batch size that pays


def knee(at: int, base: float = 0.002, factor: float = 3.0) -> Callable[[int], float]:
    """Beyond a size each item costs a multiple."""
    return lambda size: base + 0.001 * (min(size, at) + factor * max(0, size - at))


@pytest.mark.parametrize("at", [3, 6, 11, 32])
def test_size_beyond_which_a_device_slows_down_is_found(at: int) -> None:
    worker = Worker(knee(at))
    worker.compute(*[1, 2, 3, 4, 6, 8] * 3)
    worker.run(500)
    assert worker.run(1000) > 0.92 * worker.ideal, worker.sizes
    [(size, _)] = worker.sizes.most_common(1)
    assert at / 1.5 <= size <= at * 1.5


@pytest.mark.parametrize(
    "curve", [lambda n: 0.01, lambda n: 0.01 + 0.001 * n], ids=["flat", "steep"]
)
def test_where_larger_is_not_slower_batches_are_full(curve: Callable[[int], float]) -> None:
    worker = Worker(curve)
    worker.run(500)
    assert worker.sizes[64] > 0.9 * 500
    rate = worker.run(2000)
    assert rate > 0.98 * worker.ideal, "trials of other sizes cost little"
    assert len(worker.sizes) > 1, "and there are some all the same"


@pytest.mark.parametrize(
    ("curve", "noise", "most_small"),
    [
        (lambda n: 0.01 + 0.001 * n, lambda rng: rng.uniform(0.9, 1.1), 0.1),
        # As of a model that shares its processor: it takes a tenth or a quarter more or less.
        (lambda n: 0.0013 + 0.0001 * n, lambda rng: rng.lognormvariate(0.0, 0.2), 0.15),
    ],
    ids=["little", "much"],
)
def test_noise_is_not_taken_for_a_knee(
    curve: Callable[[int], float], noise: Callable[[random.Random], float], most_small: float
) -> None:
    rng = random.Random(0)
    worker = Worker(lambda size: curve(size) * noise(rng))
    worker.run(2000)
    assert worker.sizes[64] > (1.0 - most_small) * 2000


def test_knee_is_found_in_spite_of_noise() -> None:
    rng, curve = random.Random(0), knee(32)
    worker = Worker(lambda size: curve(size) * rng.lognormvariate(0.0, 0.15))
    worker.run(500)
    worker.run(500)
    assert worker.sizes[64] < 0.2 * 500


@pytest.mark.parametrize("cold", [1, 7])
def test_first_large_batches_of_a_cold_model_are_not_believed_for_long(cold: int) -> None:
    """As of text infilling: the first batches take several times as long, whatever is in them."""
    warm: Callable[[int], float] = lambda size: 0.009 + 0.0001 * size  # noqa: E731
    worker = Worker(lambda size: 4.0 * warm(size))
    worker.run(cold)
    worker.took = warm
    worker.compute(*[16, 23, 32, 45] * 10)  # until more waits again
    worker.run(60)
    worker.run(100)
    assert worker.sizes[64] > 90


def test_quiet_hour_does_not_use_up_what_is_believed() -> None:
    """Cold large batches, then little to do: at the next peak the large ones are tried again."""
    warm: Callable[[int], float] = lambda size: 0.02 + 0.0001 * size  # noqa: E731
    worker = Worker(lambda size: 6.0 * warm(size))
    worker.run(8)
    worker.took = warm
    worker.compute(*[16, 1, 2, 3] * 10, *[2] * 400)
    worker.run(100)
    worker.run(100)
    assert worker.sizes[64] > 90


def test_small_batches_that_vary_more_do_not_win() -> None:
    rng = random.Random(0)
    worker = Worker(lambda n: (0.01 + 0.001 * n) * (rng.choice([0.8, 1.2]) if n < 40 else 1.0))
    worker.compute(*[1, 2, 3, 4, 6, 8] * 3)
    worker.run(1500)
    worker.run(500)
    assert worker.sizes[64] > 0.9 * 500


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (knee(16), knee(6)),
        (knee(8), knee(64)),
        (knee(16), lambda size: 2.0 * knee(16)(size)),  # it is throttled, and keeps its size
    ],
)
def test_device_that_changes_has_another_size(
    before: Callable[[int], float], after: Callable[[int], float]
) -> None:
    worker = Worker(before)
    worker.run(500)
    worker.took = after
    worker.run(2000)
    assert worker.run(500) > 0.92 * worker.ideal, worker.sizes


def test_batch_that_was_held_up_changes_little() -> None:
    worker = Worker(knee(16))
    worker.run(500)
    worker.took = lambda size: 60.0
    worker.run(1)
    worker.took = knee(16)
    assert worker.run(100) > 0.92 * worker.ideal, worker.sizes


def test_max_batch_cost_ends_the_trials_of_sizes_that_it_forbids() -> None:
    """A lone item beyond the bound made such a size known, and it was due again and again."""
    report = simulate(
        ClosedLoop(256), CostModel(0.01, per_unit=1e-3), requests=20_000, max_batch_cost=40.0,
        lengths=lambda rng: rng.choice([1.0] * 49 + [200.0]),
    )  # fmt: skip
    assert report.reasons[Reason.TRIED] < 120
