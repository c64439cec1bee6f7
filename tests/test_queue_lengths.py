"""Which items go together where items have lengths: calls into a batcher, and batches out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service_streamer import Reason
from service_streamer.observe.record import Call
from test_queue_order import Line

#: A base that no padding is ever worth.
HUGE = 1e9


class Shapes(Line):
    """A line whose items are named by their place, of a model that the scheduler knows.

    Args:
        base: what a batch costs, µs; each unit of length costs one.
    """

    def __init__(
        self, base: float, batch_size: int = 8, max_batch_cost: float | None = None, **options: Any
    ) -> None:
        super().__init__(batch_size, has_lengths=True, max_batch_cost=max_batch_cost, **options)
        for length in [1, 64, 8, 32] * 3:
            self._learn(length / 2, base + length)
        # From now on batches take no time, and nothing more is learned of them but that large ones
        # are no risk, and that an item is cheap: so batches are full.
        self._learn(1e4, 0.0)
        for _ in range(50):
            self._learn(1e-6, 0.0)
        self.lengths: dict[int, float] = {}
        self._places = itertools.count()

    def _learn(self, length: float, took: float) -> None:
        """A batch of two such items, or two if that would cost more than it may."""
        self.now += 1e10
        self.took = lambda _: 1e-6 * took
        self.add(size=2, lengths=[length, length])
        self.order()

    def wait(self, *lengths: float, **how: Any) -> Call:
        """A call with items of these lengths comes."""
        places = [next(self._places) for _ in lengths]
        self.lengths.update(zip(places, lengths, strict=True))
        return self.add(payloads=places, lengths=lengths, **how)

    def places(self) -> list[int]:
        """Those of the next batch, sorted."""
        return sorted(self.take())

    def batches(self) -> list[list[float]]:
        """The lengths of all batches, each sorted."""
        batches = []
        while places := self.places():
            batches.append(sorted(self.lengths[place] for place in places))
        return batches


@pytest.mark.parametrize(
    ("base", "batch_size", "max_batch_cost", "lengths", "expected"),
    [
        (10.0, 8, None, [5, 50, 6, 51, 5, 49], [[5, 5, 6], [49, 50, 51]]),
        # Where the items cost nothing, batches are full.
        (HUGE, 4, None, [1, 1000, 2, 500, 3, 7, 900, 4, 30],
         [[1, 2, 3, 4], [30, 500, 900, 1000], [7]]),
        # The first of 13 is padding for ten others. With five of them it is cheaper for each.
        (20.0, 16, None, [10] * 10 + [13] * 6, [[10] * 10, [13] * 6]),
        # One that is dear is added for those beyond it.
        (20.0, 16, None, [10] * 2 + [16] + [17] * 13, [[10] * 2 + [16] + [17] * 13]),
        # No batch costs more than it may unless one item does.
        (HUGE, 8, 10.0, [2, 10, 2, 2, 2, 2], [[2, 2, 2, 2, 2], [10]]),
        (HUGE, 8, 9.9, [3, 3, 3, 4, 4], [[3, 3, 3], [4, 4]]),
    ],
)  # fmt: skip
def test_neighbours_in_length_go_together_as_far_as_that_pays(
    base: float, batch_size: int, max_batch_cost: float | None, lengths: list[float],
    expected: list[list[float]],
) -> None:  # fmt: skip
    shapes = Shapes(base, batch_size, max_batch_cost)
    for length in lengths:
        shapes.wait(length)
    assert shapes.batches() == expected


def test_batch_is_full_in_spite_of_a_neighbour_too_long() -> None:
    shapes = Shapes(HUGE, 2, 11.0)
    for length in (5, 6, 1, 1):
        shapes.wait(length)
    batch = shapes.cut()
    assert batch is not None
    assert batch.reason is Reason.FULL


def test_short_items_fill_a_batch_that_has_no_room_for_two_usual_ones() -> None:
    line = Line(max_batch_cost=10.0, batch_size=8, has_lengths=True)
    for _ in range(40):
        line.add(lengths=[6])
        line.take()
    line.add("short", 2, lengths=[5, 5])
    assert line.take() == ["short"] * 2


def test_window_of_calls_that_are_over_is_filled_again() -> None:
    shapes = Shapes(HUGE, 2)
    calls = [shapes.wait(5) for _ in range(40)]
    assert shapes.places() == [0, 1]
    for call in calls[3:30]:
        shapes.drop(call)
    assert [shapes.places() for _ in range(2)] == [[2, 30], [31, 32]]


# -- precedence


def test_tenants_share_the_window_by_their_weights() -> None:
    shapes = Shapes(HUGE, 1, weights={"b": 3.0})
    for length in range(1000, 1100):
        shapes.wait(length, tenant="a")
    for length in range(1100, 1200):
        shapes.wait(length, tenant="b")
    places = [place for _ in range(80) for place in shapes.places()]
    assert sum(place >= 100 for place in places) == pytest.approx(60, abs=6)


# -- whatever the lengths

#: Calls, each with the lengths of its items.
CALLS = st.lists(st.lists(st.integers(1, 30).map(float), min_size=1, max_size=6), max_size=30)
BASES = st.sampled_from([1.0, 10.0, 50.0, HUGE])


@settings(max_examples=60, deadline=None)
@given(CALLS, BASES, st.integers(1, 5), st.sampled_from([None, 20.0, 60.0]), st.data())
def test_each_item_is_cut_once_and_soon_and_costs_no_more_than_it_may(
    calls: list[list[float]],
    base: float,
    batch_size: int,
    bound: float | None,
    data: st.DataObject,
) -> None:
    shapes = Shapes(base, batch_size, bound)
    to_come = [*calls]
    order: list[list[int]] = []  # what is left of each call
    large: set[int] = set()  # items of large calls, which take turns with the others
    number = 0  # batches so far
    due: dict[int, int] = {}  # by which batch each item has gone, if no call is large
    while to_come or order:
        if to_come and (not order or data.draw(st.booleans(), label="one comes")):
            order.append([*shapes.wait(*to_come.pop(0)).payloads])
            if len(order[-1]) >= 2 * batch_size:
                large.update(order[-1])
            due.update(dict.fromkeys(order[-1], number + sum(map(len, order))))
            continue
        batch = shapes.cut()
        assert batch is not None
        number += 1
        lengths = [shapes.lengths[place] for place in batch.payloads]
        assert batch.cost == len(lengths) * max(lengths)
        if large.isdisjoint(itertools.chain(*order)):
            assert order[0][0] in batch.payloads, "the first in order goes with every batch"
        assert 1 <= batch.size <= batch_size
        assert bound is None or batch.cost <= bound or batch.size == 1
        for place in batch.payloads:
            next(left for left in order if place in left).remove(place)  # so it did wait
            assert large or number <= due[place]
        order = [left for left in order if left]


def overhead(lengths: Sequence[float], base: float) -> float:
    """What a batch costs beside its items, for each of them."""
    return (base + len(lengths) * max(lengths) - sum(lengths)) / len(lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30).map(float), min_size=1, max_size=40), BASES, st.integers(1, 12))
def test_no_neighbour_more_would_make_a_batch_cheaper_for_each(
    lengths: list[float], base: float, batch_size: int
) -> None:
    shapes = Shapes(base, batch_size)
    for length in lengths[: 8 * batch_size]:  # all in the window
        shapes.wait(length)
    waiting = sorted(lengths[: 8 * batch_size])
    while (record := shapes.cut()) is not None:
        batch = sorted(shapes.lengths[place] for place in record.payloads)
        for length in batch:
            waiting.remove(length)
        assert not any(batch[0] < length < batch[-1] for length in waiting), "without gaps"
        if record.reason is not Reason.PADDING:
            continue
        now = overhead(batch, base)
        shorter = [max((length for length in waiting if length <= batch[0]), default=None)]
        longer = [min((length for length in waiting if length >= batch[-1]), default=None)]
        for neighbour in filter(None, [*shorter, *longer]):
            more = overhead([*batch, neighbour], base)
            assert more >= now or math.isclose(more, now, rel_tol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4).map(float), min_size=1, max_size=40), BASES, st.integers(1, 5))
def test_items_of_one_length_keep_their_order(
    lengths: list[float], base: float, batch_size: int
) -> None:
    shapes = Shapes(base, batch_size)
    for length in lengths:
        shapes.wait(length)
    batch_of: dict[int, int] = {}
    for number in range(len(lengths)):
        batch_of.update(dict.fromkeys(shapes.places(), number))
    for length in set(lengths):
        places = [place for place in sorted(batch_of) if lengths[place] == length]
        assert all(batch_of[a] <= batch_of[b] for a, b in pairwise(places))
