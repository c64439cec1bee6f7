"""What padding costs: told apart from what each item costs by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from service_streamer.batching.cost import LearnedCost
from service_streamer.batching.padded_cost import PaddedCost
from service_streamer.simulate import ClosedLoop, CostModel, LogNormal, simulate

#: Seconds of a batch, of each item, and of each unit of length.
BASE, PER_ITEM, PER_UNIT = 0.0036, 145e-6, 7.8e-6


def plane(size: int, longest: float) -> float:
    return BASE + PER_ITEM * size + PER_UNIT * size * longest


def learned(
    batches: Iterable[tuple[int, float]], took: Callable[[int, float], float] = plane
) -> PaddedCost:
    cost = PaddedCost()
    for size, longest in batches:
        cost.observe(size * longest, took(size, longest), size)
    return cost


SMALL_AND_SHORT = [(24, 10.0), (64, 14.0), (20, 9.0), (64, 16.0), (64, 13.0), (30, 10.0)] * 8


def test_without_experience_padding_costs_nothing_that_is_known() -> None:
    assert PaddedCost().padding == (0.0, 0.0)


def test_what_items_cost_is_not_taken_for_padding() -> None:
    cost = learned(SMALL_AND_SHORT)
    assert cost.padding == pytest.approx((BASE, PER_UNIT), rel=0.15)
    assert cost.per_unit > 1.7 * PER_UNIT  # what the line says


def test_that_is_so_of_a_device_that_is_noisy() -> None:
    rng = random.Random(0)
    cost = learned(
        SMALL_AND_SHORT * 4, lambda size, longest: plane(size, longest) * rng.gauss(1.0, 0.05)
    )
    base, per_unit = cost.padding
    assert base == pytest.approx(BASE, rel=0.6)
    assert per_unit == pytest.approx(PER_UNIT, rel=0.5)


@pytest.mark.parametrize(
    ("batches", "took"),
    [
        pytest.param([(64, 10.0), (64, 20.0), (64, 12.0)] * 8, plane, id="of one size"),
        pytest.param([(8, 10.0), (64, 10.0), (24, 10.0)] * 8, plane, id="of one length"),
        pytest.param([(64, 10.0)] * 24, plane, id="all alike"),
        pytest.param([(8, 0.0), (64, 0.0)] * 8, plane, id="of no length"),
        pytest.param(
            SMALL_AND_SHORT, lambda size, longest: BASE + PER_UNIT * size * longest, id="exact line"
        ),
        pytest.param(
            SMALL_AND_SHORT,
            lambda size, longest: 0.04 + 1e-4 * size * longest - 4e-4 * size,
            id="items that save time",
        ),
    ],
)
def test_where_batches_do_not_show_what_items_cost_the_line_holds(
    batches: list[tuple[int, float]], took: Callable[[int, float], float]
) -> None:
    cost, line = learned(batches, took), LearnedCost()
    for size, longest in batches:
        line.observe(size * longest, took(size, longest))
    assert (cost.base, cost.per_unit) == (line.base, line.per_unit)
    assert cost.padding == pytest.approx((line.base, line.per_unit), rel=0.02, abs=1e-5)


def test_where_only_items_cost_padding_is_free() -> None:
    cost = learned(SMALL_AND_SHORT, lambda size, longest: BASE + PER_ITEM * size - 1e-6 * longest)
    assert cost.padding == pytest.approx((BASE, 0.0), abs=1e-4)


def test_a_plane_is_forgotten_with_its_line() -> None:
    cost = learned([(1, 1.0), (2, 4.0)], lambda *_: 1e-6)  # a server that asks about the model
    cost.observe(640.0, plane(64, 10.0), 64)
    assert cost.padding == (cost.base, cost.per_unit)


@pytest.mark.parametrize("callers", [128, 256])
def test_batches_are_not_cut_small_for_what_items_cost(callers: int) -> None:
    """A line alone takes 1,483 and 1,827 items a second through."""
    model = CostModel(BASE, PER_ITEM, PER_UNIT)
    report = simulate(ClosedLoop(callers), model, lengths=LogNormal(25, 0.6), requests=8_000)
    assert report.throughput > {128: 1_600, 256: 1_900}[callers]
