"""What a batch costs: lines that are found, and sizes beyond which nothing is gained."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from service_streamer.batching.cost import BestCost, LearnedCost

BASE, PER_UNIT = 0.004, 0.0005


def line(cost: float) -> float:
    return BASE + PER_UNIT * cost


def learned(costs: Iterable[float], curve: Callable[[float], float] = line) -> LearnedCost:
    model = LearnedCost()
    for cost in costs:
        model.observe(cost, curve(cost))
    return model


def test_without_experience_a_batch_costs_nothing_that_is_known() -> None:
    model = LearnedCost()
    assert not model.is_known
    assert (model.base, model.per_unit, model.mean, model.duration(8)) == (0.0, 0.0, 0.0, 0.0)


def test_of_one_batch_half_is_put_down_to_its_items() -> None:
    model = learned([8], lambda cost: 0.008)
    assert (model.base, model.per_unit) == pytest.approx((0.004, 0.0005))
    assert model.duration(8) == model.mean == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("base", "per_unit"),
    [(0.004, 0.0005), (0.01, 0.0), (0.0, 0.002), (1e-5, 1e-7), (30.0, 2.0)],
)
def test_an_exact_line_is_found_after_a_few_batches(base: float, per_unit: float) -> None:
    model = learned([1, 64, 8, 32] * 5, lambda cost: base + per_unit * cost)
    assert model.base == pytest.approx(base, rel=1e-2, abs=1e-2 * per_unit)
    assert model.per_unit == pytest.approx(per_unit, rel=1e-2, abs=1e-3 * base)
    assert model.duration(100) == pytest.approx(base + per_unit * 100, rel=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_line_is_found_about(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.randint(1, 64) for _ in range(300)]
    model = learned(costs, lambda cost: line(cost) * rng.lognormvariate(0.0, 0.2))
    for cost in (1, 16, 64):
        assert model.duration(cost) == pytest.approx(line(cost), rel=0.15)


def test_costs_of_any_scale_are_as_good_as_any() -> None:
    small, large = learned([1, 64, 8, 32]), LearnedCost()
    for cost in [1, 64, 8, 32]:
        large.observe(cost * 1e6, line(cost))
    assert large.base == pytest.approx(small.base)
    assert large.per_unit * 1e6 == pytest.approx(small.per_unit)


@pytest.mark.parametrize(("factor", "batches"), [(0.1, 80), (0.5, 120), (2.0, 200), (4.0, 300)])
def test_a_device_that_changes_is_followed(factor: float, batches: int) -> None:
    costs = [1, 64, 8, 32] * 20
    model = learned(costs)
    for index in range(batches):
        cost = costs[index % 4]
        model.observe(cost, factor * line(cost))
    assert model.duration(32) == pytest.approx(factor * line(32), rel=0.15)


def test_batches_of_one_size_say_nothing_about_the_slope_that_is_known() -> None:
    model = learned([1, 64, 8, 32] * 5)
    before = model.per_unit
    for _ in range(10_000):
        model.observe(16, line(16))
    assert model.per_unit == pytest.approx(before, rel=0.01)
    assert model.duration(16) == pytest.approx(line(16))


def test_a_first_batch_that_compiles_for_a_minute_is_soon_forgotten() -> None:
    model = LearnedCost()
    model.observe(4, 60.0)
    for cost in [1, 64, 8, 32] * 2:
        model.observe(cost, line(cost))
    assert model.duration(32) == pytest.approx(line(32), rel=0.01)


@pytest.mark.parametrize("nothing", [1, 3])
def test_first_batches_that_had_nothing_to_do_are_forgotten_at_once(nothing: int) -> None:
    """What ``serve`` asks a model about itself is answered without computing anything."""
    model = LearnedCost()
    for _ in range(nothing):
        model.observe(1, 4e-5)
    for cost in [1, 9, 8, 15, 8, 9, 12, 6] * 2:
        model.observe(cost, line(cost))
    assert model.duration(32) == pytest.approx(line(32), rel=0.05)


def test_one_batch_that_takes_a_minute_changes_nothing() -> None:
    model = learned([1, 64, 8, 32] * 20)
    model.observe(32, 60.0)
    assert model.base == pytest.approx(BASE, rel=0.01)
    assert model.per_unit == pytest.approx(PER_UNIT, rel=0.01)


def test_one_batch_that_had_nothing_to_do_is_forgotten_like_others() -> None:
    model = learned([1, 64, 8, 32] * 20)
    model.observe(32, 1e-6)
    for cost in [1, 64, 8, 32] * 25:
        model.observe(cost, line(cost))
    assert model.duration(32) == pytest.approx(line(32), rel=0.15)


def test_items_that_cost_nothing_have_a_price_all_the_same() -> None:
    model = learned([0.0] * 3, lambda cost: 0.008)
    assert (model.base, model.per_unit) == (pytest.approx(0.008), 0.0)
    for cost in [1, 64, 8, 32] * 20:
        model.observe(cost, line(cost))
    assert model.duration(32) == pytest.approx(line(32), rel=0.1)


@pytest.mark.parametrize("duration", [0.0, -1.0])
def test_a_clock_that_stands_still_teaches_nothing(duration: float) -> None:
    model = learned([8])
    model.observe(8, duration)
    assert model.duration(8) == pytest.approx(line(8))


def test_nothing_is_ever_negative() -> None:
    rng = random.Random(0)
    for _ in range(50):
        model = LearnedCost()
        for _ in range(50):
            # No line at all, with a slope below zero, and of all sizes
            model.observe(rng.choice([0.0, 1.0, 7.0, 1e4]), rng.choice([1e-6, 1e-3, 0.1, 60.0]))
            assert 0.0 <= model.base < math.inf
            assert 0.0 <= model.per_unit < math.inf
    falling = learned([1, 64, 8, 32] * 5, lambda cost: 0.1 / cost)
    assert falling.per_unit == 0.0


@pytest.mark.parametrize(
    ("base", "per_unit", "costs", "is_known"),
    [
        (5, 0.5, [], False),
        (5, 0.5, [1, 2, 4, 8, 16, 32, 64], False),  # too few
        (5, 0.5, [64] * 50, False),  # all alike
        (5, 0.5, [*[64] * 99, 60], False),
        (0, 0, range(1, 50), False),  # a clock that stands still
        (5, 0.5, [1, 2, 4, 8, 16, 32, 64, 128], True),
        (0, 0.5, [1, 2, 4, 8, 16, 32, 64, 128], True),
        (5, 0, [1, 2, 4, 8, 16, 32, 64, 128], True),
    ],
)
def test_the_line_is_known_once_the_batches_differ(
    base: float, per_unit: float, costs: Iterable[float], is_known: bool
) -> None:
    model = learned(costs, lambda cost: base + per_unit * cost)
    if not is_known:
        assert model.line is None
    else:
        assert model.line == pytest.approx((base, per_unit), rel=0.05, abs=0.05)


# -- the batch size that pays


class Full:
    """A worker for which there is always more than fits into a batch."""

    def __init__(self, curve: Callable[[int], float], batch_size: int = 64) -> None:
        self.curve = curve
        self.model = LearnedCost()
        self.best = BestCost()
        self.batch_size = batch_size
        self.sizes: Counter[int] = Counter()

    def warm_up(self) -> None:
        """At first less waits than fits."""
        for size in [1, 2, 3, 4, 6, 8] * 3:
            self.best.observe(size, self.curve(size), is_full=False)

    def run(self, batches: int) -> float:
        """Run so many batches; the items per second that they came to."""
        items, busy = 0, 0.0
        self.sizes.clear()
        for _ in range(batches):
            trial = self.best.trial(self.model)
            limit = self.best.limit
            if trial is not None:
                self.best.begin(trial)
                limit = trial.cost if trial.is_run else limit
            size = max(1, int(min(limit, self.batch_size)))
            duration = self.curve(size)
            self.model.observe(size, duration)
            self.best.observe(size, duration, is_full=True, model=self.model)
            self.sizes[size] += 1
            items += size
            busy += duration
        return items / busy

    @property
    def ideal(self) -> float:
        return max(size / self.curve(size) for size in range(1, self.batch_size + 1))


def knee(at: int, base: float = 0.002, factor: float = 3.0) -> Callable[[int], float]:
    """Beyond a size each item costs a multiple."""
    return lambda size: base + 0.001 * (min(size, at) + factor * max(0, size - at))


def test_nothing_is_limited_without_experience() -> None:
    best = BestCost()
    assert best.limit == math.inf
    assert best.trial(LearnedCost()) is None


@pytest.mark.parametrize("at", [3, 4, 6, 8, 11, 16, 32])
def test_the_size_beyond_which_a_device_slows_down_is_found(at: int) -> None:
    worker = Full(knee(at))
    worker.warm_up()
    worker.run(500)
    assert worker.run(1000) > 0.92 * worker.ideal, worker.sizes
    [(size, _)] = worker.sizes.most_common(1)
    assert at / 1.5 <= size <= at * 1.5


@pytest.mark.parametrize(
    "curve",
    [lambda n: 0.01, lambda n: 0.01 + 0.001 * n, lambda n: 0.001 + 0.001 * n, lambda n: 0.001 * n],
    ids=["flat", "steep", "shallow", "none"],
)
def test_where_larger_is_not_slower_nothing_is_limited(curve: Callable[[int], float]) -> None:
    worker = Full(curve)
    worker.run(500)
    assert worker.best.limit == math.inf
    assert worker.sizes[64] > 0.9 * 500


@pytest.mark.parametrize("curve", [lambda n: 0.01, lambda n: 0.01 + 0.0001 * n, knee(16)])
def test_trials_cost_little(curve: Callable[[int], float]) -> None:
    worker = Full(curve)
    worker.run(500)
    [(usual, _)] = worker.sizes.most_common(1)
    rate = worker.run(2000)
    assert rate > 0.98 * usual / curve(usual)
    assert len(worker.sizes) > 1, "there are some all the same"


def test_noise_is_not_taken_for_a_knee() -> None:
    rng = random.Random(0)
    worker = Full(lambda size: (0.01 + 0.001 * size) * rng.uniform(0.9, 1.1))
    worker.run(2000)
    assert worker.sizes[64] > 0.9 * 2000


@pytest.mark.parametrize("seed", range(3))
def test_a_size_that_was_lucky_is_not_taken_for_the_best(seed: int) -> None:
    """As of a model that shares its processor: it takes a tenth or a quarter more or less."""
    rng = random.Random(seed)
    worker = Full(lambda size: (0.0013 + 0.0003 * size) * rng.lognormvariate(0.0, 0.2))
    worker.run(2000)
    assert worker.sizes[64] > 0.85 * 2000


@pytest.mark.parametrize("seed", range(3))
def test_a_knee_is_found_in_spite_of_noise(seed: int) -> None:
    rng, curve = random.Random(seed), knee(32)
    worker = Full(lambda size: curve(size) * rng.lognormvariate(0.0, 0.15))
    worker.run(500)
    worker.sizes.clear()
    worker.run(500)
    assert worker.sizes[64] < 0.2 * 500


@pytest.mark.parametrize("cold", [1, 3, 7])
def test_the_first_large_batches_of_a_cold_model_are_not_believed_for_long(cold: int) -> None:
    """As of text infilling: the first batches take several times as long, whatever is in them."""
    warm: Callable[[int], float] = lambda size: 0.009 + 0.0001 * size  # noqa: E731
    worker = Full(lambda size: 4.0 * warm(size))
    worker.run(cold)
    worker.curve = warm
    for size in [16, 23, 32, 45] * 10:  # until more waits again
        worker.model.observe(size, warm(size))
        worker.best.observe(size, warm(size), is_full=True, model=worker.model)
    worker.run(60)
    assert worker.best.limit == math.inf
    worker.run(100)
    assert worker.sizes[64] > 90


def test_a_quiet_hour_does_not_use_up_what_is_believed() -> None:
    """Cold large batches, then little to do: at the next peak the large ones are tried again."""
    warm: Callable[[int], float] = lambda size: 0.02 + 0.0001 * size  # noqa: E731
    worker = Full(lambda size: 6.0 * warm(size))
    for size in [23, 32, 45, 64] * 2:
        worker.best.observe(size, worker.curve(size), is_full=True, model=worker.model)
    worker.curve = warm
    for size, is_full in [(16, True), (1, False), (2, False), (3, False)] * 10 + [(2, False)] * 400:
        worker.model.observe(size, warm(size))
        worker.best.observe(size, warm(size), is_full=is_full, model=worker.model)
    worker.run(100)
    assert worker.best.limit == math.inf


def test_a_first_item_that_took_no_time_is_soon_forgotten() -> None:
    """What ``serve`` asks a model about itself is computed at once."""
    best = BestCost()
    best.observe(1, 5e-5, is_full=False)
    for size in [1, 1, 8, 12, 6, 9]:
        best.observe(size, 0.02 + 0.0005 * size, is_full=True)
    assert best.limit == math.inf


def test_what_is_believed_and_never_waits_is_given_up() -> None:
    """A burst left a few large batches; since then a closed loop of 20 callers fills none."""
    worker = Full(knee(16))
    worker.run(3)
    for size in [12, 14, 16, 16] * 10:
        worker.model.observe(size, worker.curve(size))
        worker.best.observe(size, worker.curve(size), is_full=True, model=worker.model)
    for _ in range(300):
        size = int(min(20, worker.best.limit))
        worker.model.observe(size, worker.curve(size))
        worker.best.observe(size, worker.curve(size), is_full=size < 20, model=worker.model)
    assert worker.best.limit <= 23
    assert worker.best._believed is None


def test_small_batches_that_vary_more_do_not_win() -> None:
    rng = random.Random(0)
    worker = Full(lambda n: (0.01 + 0.001 * n) * (rng.choice([0.8, 1.2]) if n < 40 else 1.0))
    worker.warm_up()
    worker.run(1500)
    assert worker.run(500) > 0.95 * worker.ideal / 1.2
    assert worker.sizes[64] > 0.9 * 500


def test_one_batch_that_was_held_up_changes_little() -> None:
    worker = Full(knee(16))
    worker.run(500)
    worker.best.observe(worker.best.limit, 60.0, is_full=True)
    assert worker.run(100) > 0.92 * worker.ideal, worker.sizes


@pytest.mark.parametrize(("before", "after"), [(16, 6), (4, 16), (32, 8), (8, 64)])
def test_a_knee_that_moves_is_followed(before: int, after: int) -> None:
    worker = Full(knee(before))
    worker.run(500)
    worker.curve = knee(after)
    worker.run(2000)
    assert worker.run(500) > 0.92 * worker.ideal, worker.sizes


def test_a_device_that_is_throttled_keeps_its_size() -> None:
    worker = Full(knee(16))
    worker.run(500)
    worker.curve = lambda size: 2.0 * knee(16)(size)
    worker.run(500)
    assert worker.run(500) > 0.92 * worker.ideal, worker.sizes


def test_batches_that_were_not_full_are_known_but_decide_nothing() -> None:
    best = BestCost()
    for size in (1, 8, 64) * 3:
        best.observe(size, knee(8)(size), is_full=False)
    assert best.limit == math.inf
    best.observe(64, knee(8)(64), is_full=True)
    assert best.limit == 8.0


@pytest.mark.parametrize(("cost", "duration"), [(0.0, 1.0), (0.5, 1.0), (8.0, 0.0)])
def test_what_says_nothing_is_ignored(cost: float, duration: float) -> None:
    best = BestCost()
    best.observe(cost, duration, is_full=True)
    assert best.limit == math.inf
