"""Which items go together where items have lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service_streamer.batching.batcher import Batcher
from service_streamer.batching.call_queue import Taken
from service_streamer.batching.cost import LearnedCost
from service_streamer.batching.length_queue import LengthQueue
from service_streamer.batching.overload import Finish
from service_streamer.observe.record import (
    ORDINARY,
    BatchRecord,
    BatchReport,
    Call,
    Precedence,
    Reason,
)

#: A base that no padding is ever worth, and one that is worth none.
HUGE, NONE = 1e9, 0.0


class Shapes:
    """A queue whose items are named by their place, and know their lengths."""

    def __init__(
        self,
        base: float,
        *,
        batch_size: int = 8,
        max_batch_cost: float = math.inf,
        **weights: float,
    ) -> None:
        model = LearnedCost()
        model.base, model.per_unit = base, 1.0
        model.is_fitted = True
        self.base = base
        self.batch_size = batch_size
        self.queue = LengthQueue(
            model, batch_size=batch_size, max_batch_cost=max_batch_cost, weights=weights
        )
        self.lengths: dict[int, float] = {}
        self._places = count()

    def add(
        self,
        *lengths: float,
        deadline: float = math.inf,
        at: float = 0.0,
        precedence: Precedence = ORDINARY,
    ) -> Call:
        places = [next(self._places) for _ in lengths]
        self.lengths.update(zip(places, lengths, strict=True))
        call = Call(places, places)
        call.lengths, call.deadline, call.arrived_at = lengths, deadline, at
        call.precedence = precedence
        self.queue.add(call)
        self.queue.check_invariants()
        return call

    def drop(self, call: Call) -> None:
        call.is_over = True
        self.queue.drop(call)
        self.queue.check_invariants()

    def take(self, room: int = 0, now: float = 0.0, finish: float = 0.0, **bound: float) -> Taken:
        taken = self.queue.take(room or self.batch_size, now, Finish(finish), **bound)
        self.queue.check_invariants()
        lengths = [self.lengths[place] for place in taken.payloads]
        assert taken.cost == len(lengths) * max(lengths, default=0.0)
        places = [place for call, start, stop in taken.spans for place in call.reply[start:stop]]
        assert places == taken.payloads
        calls = [call for call, _, _ in taken.spans]
        assert taken.calls == len(set(calls))
        assert [*dict.fromkeys(calls)] == [next(group) for _, group in itertools.groupby(calls)]
        return taken

    def cut(self, room: int = 0, now: float = 0.0) -> list[int]:
        """The places of the next batch, sorted."""
        return sorted(self.take(room, now, now).payloads)

    def batches(self) -> list[list[float]]:
        """The lengths of all batches, each sorted."""
        batches = []
        while self.queue.items:
            batches.append(sorted(self.lengths[place] for place in self.cut()))
        return batches


# -- tables


def test_neighbours_in_length_go_together() -> None:
    shapes = Shapes(base=10.0)
    for length in (5, 50, 6, 51, 5, 49):
        shapes.add(length)
    assert shapes.batches() == [[5, 5, 6], [49, 50, 51]]


def test_where_a_batch_costs_nothing_by_itself_none_is_padded() -> None:
    shapes = Shapes(NONE)
    for length in (3, 1, 2, 3, 1, 3):
        shapes.add(length)
    assert shapes.batches() == [[3, 3, 3], [1, 1], [2]]


def test_where_the_items_cost_nothing_batches_are_full() -> None:
    shapes = Shapes(HUGE, batch_size=4)
    for length in (1, 1000, 2, 500, 3, 7, 900, 4, 30):
        shapes.add(length)
    assert shapes.batches() == [[1, 2, 3, 4], [30, 500, 900, 1000], [7]]


def test_one_that_is_dear_is_added_for_those_beyond_it() -> None:
    """The first of 13 is padding for ten others. With five of them it is cheaper for each."""
    shapes = Shapes(base=20.0, batch_size=16)
    for length in [10] * 10 + [13] * 6:
        shapes.add(length)
    assert overhead([10] * 10 + [13], 20.0) > overhead([10] * 10, 20.0)
    assert shapes.batches() == [[10] * 10, [13] * 6]
    for length in [10] * 2 + [16] + [17] * 13:
        shapes.add(length)
    assert overhead([10] * 2 + [16], 20.0) > overhead([10] * 2, 20.0)
    assert shapes.batches() == [[10] * 2 + [16] + [17] * 13]


def test_without_a_measurement_no_batch_is_of_one_only_for_that() -> None:
    shapes = Shapes(NONE)
    model = shapes.queue._cost
    for _ in range(10):
        model.observe(100.0, 100.0)  # batches of 10 items of 10: 2 for a batch by itself
    model.base, model.per_unit = 0.0, 1.0
    model.is_fitted = True
    for length in (10, 11, 30):
        shapes.add(length)
    assert shapes.batches() == [[10, 11], [30]]


@pytest.mark.parametrize(
    ("lengths", "bound", "expected"),
    [
        ((4, 4, 4, 4, 4), 12.0, [[4, 4, 4], [4, 4]]),
        ((2, 10, 2, 2, 2, 2), 10.0, [[2, 2, 2, 2, 2], [10]]),
        ((100, 1, 2), 10.0, [[100], [1, 2]]),
        ((3, 3, 3, 4, 4), 9.9, [[3, 3, 3], [4, 4]]),
    ],
)
def test_no_batch_costs_more_than_it_may_unless_one_item_does(
    lengths: Sequence[float], bound: float, expected: list[list[float]]
) -> None:
    shapes = Shapes(HUGE, max_batch_cost=bound)
    for length in lengths:
        shapes.add(length)
    assert shapes.batches() == expected


def test_the_tighter_bound_holds() -> None:
    shapes = Shapes(HUGE, max_batch_cost=6.0)
    shapes.add(*[1.0] * 12)
    assert [len(shapes.take(max_cost=bound).payloads) for bound in (3.0, 9.0)] == [3, 6]


@pytest.mark.parametrize(
    ("lengths", "base", "options", "reason"),
    [
        ((5, 50), 10.0, {}, Reason.PADDING),
        ((5, 5, 5), HUGE, {"max_batch_cost": 10.0}, Reason.COST),
        ((5, 6, 1, 1), HUGE, {"max_batch_cost": 11.0, "batch_size": 2}, None),
        ((5, 5, 5), HUGE, {"batch_size": 2}, None),
        ((5, 5), HUGE, {}, None),
    ],
    ids=["padding", "cost", "full in spite of one too long", "full", "all"],
)
def test_why_there_are_no_more(
    lengths: Sequence[float], base: float, options: dict[str, int], reason: Reason | None
) -> None:
    shapes = Shapes(base, **options)
    for length in lengths:
        shapes.add(length)
    assert shapes.take().reason is reason


def test_those_that_are_alike_go_by_arrival_also_when_others_fetch_them() -> None:
    shapes = Shapes(HUGE, batch_size=3)
    for length in (9, 4, 4, 4, 4, 4, 8):
        shapes.add(length)
    assert [shapes.cut() for _ in range(3)] == [[0, 1, 6], [2, 3, 4], [5]]


def test_late_calls_are_left_out_wherever_they_stand() -> None:
    shapes = Shapes(HUGE, batch_size=3)
    ended = shapes.add(5, 6, deadline=1.0)
    shapes.add(5)
    soon = shapes.add(4, deadline=2.5)
    shapes.add(6, 7, 3)
    taken = shapes.take(now=2.0, finish=3.0)
    assert taken.late == [ended, soon]
    assert sorted(taken.payloads) == [2, 4, 5]
    assert (ended.pending, soon.pending, shapes.queue.items) == (0, 0, 1)


def test_calls_that_would_be_late_are_tried_where_there_is_room_for_all() -> None:
    shapes = Shapes(HUGE)
    shapes.add(4, deadline=2.5)
    shapes.add(6)
    taken = shapes.take(now=2.0, finish=3.0)
    assert (taken.late, len(taken.payloads)) == ([], 2)


def test_calls_that_are_over_are_left_out() -> None:
    shapes = Shapes(HUGE, batch_size=2)
    calls = [shapes.add(length) for length in range(40)]
    assert shapes.cut() == [0, 1]
    for call in calls[3:38]:  # some in the window, others in line
        shapes.drop(call)
    assert [shapes.cut() for _ in range(2)] == [[2, 38], [39]]


def test_a_window_of_calls_that_are_over_is_filled_again() -> None:
    shapes = Shapes(HUGE, batch_size=2)
    calls = [shapes.add(5) for _ in range(40)]
    assert shapes.cut() == [0, 1]
    for call in calls[3:30]:
        shapes.drop(call)
    assert [shapes.cut() for _ in range(2)] == [[2, 30], [31, 32]]
    for call in calls[33:39]:
        shapes.drop(call)
    assert shapes.cut() == [39]
    assert shapes.cut() == []


def test_calls_that_are_over_do_not_pile_up() -> None:
    shapes = Shapes(HUGE, batch_size=4)
    first = shapes.add(1, precedence=Precedence(priority=-1))
    for _ in range(1_000):
        # Some go by, others end; the first is passed over as long as there are deadlines.
        calls = [
            shapes.add(5, deadline=9.0, precedence=Precedence(has_deadline=True)) for _ in range(20)
        ]
        shapes.cut(2)
        for call in calls:
            if call.pending:
                shapes.drop(call)
        if not first.pending:
            first = shapes.add(1, precedence=Precedence(priority=-1))
    assert len(shapes.queue._in_order) < 200
    assert len(shapes.queue._sorted) < 200


# -- precedence


def test_within_the_window_deadlines_go_first_then_priorities() -> None:
    shapes = Shapes(NONE)
    shapes.add(1)
    shapes.add(2, precedence=Precedence(priority=1))
    shapes.add(3, precedence=Precedence(has_deadline=True), deadline=9.0)
    shapes.add(4, precedence=Precedence(has_deadline=True), deadline=5.0)
    shapes.add(5, deadline=2.0)  # by default, of which half has gone
    assert [shapes.cut(now=1.0) for _ in range(5)] == [[4], [3], [2], [1], [0]]


def test_one_that_comes_later_with_a_precedence_is_next() -> None:
    shapes = Shapes(NONE, batch_size=2)
    for length in range(100):
        shapes.add(length)
    shapes.cut()
    shapes.add(200, precedence=Precedence(priority=1))
    shapes.add(201, deadline=5.0, precedence=Precedence(has_deadline=True))
    assert [shapes.cut() for _ in range(3)] == [[101], [100], [1]]


def test_a_low_priority_is_passed_over_a_bounded_number_of_times() -> None:
    shapes = Shapes(NONE, batch_size=1)
    shapes.add(1, precedence=Precedence(priority=-1))
    cut: list[int] = []
    while 0 not in cut:
        shapes.add(2, precedence=Precedence(priority=1))
        cut += shapes.cut()
    assert len(cut) <= 16


def test_tenants_share_the_window() -> None:
    shapes = Shapes(NONE, batch_size=2, b=3.0)
    for length in range(1000, 1100):
        shapes.add(length, precedence=Precedence(tenant="a"))
    for length in range(1100, 1200):
        shapes.add(length, precedence=Precedence(tenant="b"))
    cut = [place for _ in range(80) for place in shapes.cut()]
    assert sum(place >= 100 for place in cut) == pytest.approx(60, abs=6)


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_a_flood_of_short_ones_does_not_starve_other_tenants(length: float) -> None:
    shapes = Shapes(HUGE, batch_size=2)
    for _ in range(200):
        shapes.add(length, precedence=Precedence(tenant="a"))
    for _ in range(5):
        shapes.add(1.0, precedence=Precedence(tenant="b"))
    cut = [place for _ in range(10) for place in shapes.cut()]
    assert sum(place >= 200 for place in cut) >= 4


def test_the_longest_wait_is_known_whatever_the_order() -> None:
    shapes = Shapes(NONE, batch_size=1)
    low = shapes.add(1, at=1.0, precedence=Precedence(priority=-1))
    shapes.add(2, at=2.0, precedence=Precedence(priority=1))
    shapes.add(3, at=3.0, precedence=Precedence(priority=1))
    assert shapes.queue.oldest_arrival() == 1.0
    assert shapes.cut() == [1]
    assert shapes.queue.oldest_arrival() == 1.0
    shapes.drop(low)
    assert shapes.queue.oldest_arrival() == 3.0


# -- whatever the lengths

LENGTHS = st.lists(st.integers(1, 30).map(float), min_size=1, max_size=60)
#: Calls, each with the lengths of its items.
CALLS = st.lists(st.lists(st.integers(1, 30).map(float), min_size=1, max_size=6), max_size=40)
BASES = st.sampled_from([NONE, 1.0, 10.0, 50.0, HUGE])


@settings(max_examples=150, deadline=None)
@given(CALLS, BASES, st.integers(1, 5), st.sampled_from([math.inf, 20.0, 60.0]), st.data())
def test_each_item_is_cut_once_and_soon_and_costs_no_more_than_it_may(
    calls: list[list[float]], base: float, batch_size: int, bound: float, data: st.DataObject
) -> None:
    shapes = Shapes(base, batch_size=batch_size, max_batch_cost=bound)
    to_come = [*calls]
    order: list[int] = []  # that wait, in order
    number = 0  # batches so far
    due: dict[int, int] = {}  # by which batch each has gone
    while to_come or order:
        if to_come and (not order or data.draw(st.booleans(), label="one comes")):
            for place in shapes.add(*to_come.pop(0)).reply:
                order.append(place)
                due[place] = number + len(order)
            continue
        taken = shapes.take()
        number += 1
        assert order[0] in taken.payloads, "the first in order goes with every batch"
        assert 1 <= len(taken.payloads) <= batch_size
        assert taken.cost <= bound or len(taken.payloads) == 1
        for place in taken.payloads:
            order.remove(place)  # and so it did wait, and goes once
            assert number <= due[place]


def overhead(lengths: Sequence[float], base: float) -> float:
    """What a batch costs beside its items, for each of them."""
    return (base + len(lengths) * max(lengths) - sum(lengths)) / len(lengths)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, BASES, st.integers(1, 12), st.sampled_from([math.inf, 40.0]))
def test_no_neighbour_more_and_none_less_would_make_it_cheaper_for_each(
    lengths: list[float], base: float, batch_size: int, bound: float
) -> None:
    shapes = Shapes(base, batch_size=batch_size)
    for length in lengths[: 8 * batch_size]:  # all in the window
        shapes.add(length)
    waiting = [*range(min(len(lengths), 8 * batch_size))]
    while waiting:
        first = waiting[0]
        taken = shapes.take(max_cost=bound)
        batch = sorted(shapes.lengths[place] for place in taken.payloads)
        waiting = [place for place in waiting if place not in taken.payloads]
        rest = [shapes.lengths[place] for place in waiting]
        assert not any(batch[0] < length < batch[-1] for length in rest), "without gaps"
        now = overhead(batch, base)
        shorter = [max((length for length in rest if length <= batch[0]), default=None)]
        longer = [min((length for length in rest if length >= batch[-1]), default=None)]
        for neighbour in filter(None, [*shorter, *longer]):
            more = [*batch, neighbour]
            if len(more) <= batch_size and len(more) * max(more) <= bound:
                assert overhead(more, base) >= now or math.isclose(overhead(more, base), now)
        if len(batch) > 1:
            own = shapes.lengths[first]
            without = [batch[1:]] * (batch[0] != own) + [batch[:-1]] * (batch[-1] != own)
            if without:  # the one that was added last was worth it
                assert any(overhead(less, base) >= now - 1e-9 * base for less in without)


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_without_a_base_all_of_a_batch_are_alike(lengths: list[float]) -> None:
    shapes = Shapes(NONE)
    for length in lengths:
        shapes.add(length)
    assert all(len(set(batch)) == 1 for batch in shapes.batches())


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_with_a_huge_base_all_batches_are_full(lengths: list[float], batch_size: int) -> None:
    shapes = Shapes(HUGE, batch_size=batch_size)
    for length in lengths:
        shapes.add(length)
    *full, last = shapes.batches()
    assert all(len(batch) == batch_size for batch in full)
    assert len(last) <= batch_size


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4).map(float), min_size=1, max_size=60), BASES, st.integers(1, 5))
def test_those_of_one_length_keep_their_order(
    lengths: list[float], base: float, batch_size: int
) -> None:
    shapes = Shapes(base, batch_size=batch_size)
    for length in lengths:
        shapes.add(length)
    batch_of: dict[int, int] = {}
    for number in range(len(lengths)):
        batch_of.update(dict.fromkeys(shapes.cut(), number))
    for length in set(lengths):
        places = [place for place in sorted(batch_of) if lengths[place] == length]
        assert all(batch_of[a] <= batch_of[b] for a, b in pairwise(places))


# -- through the batcher


def done(batcher: Batcher, batch: BatchRecord) -> tuple[Sequence[Call], list[BatchRecord]]:
    outputs = [f"result of {payload}" for payload in batch.payloads]
    report = BatchReport(batch.id, outputs, duration=0.01, slot=batch.slot)
    actions = batcher.batch_returned(report, 0.0)
    batcher.check_invariants()
    return actions.calls, list(actions.batches)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(1, 30).map(float), min_size=1, max_size=12), min_size=1, max_size=12
    ),
    st.integers(1, 3),
)
def test_results_of_calls_in_several_batches_come_back_in_order(
    calls: list[list[float]], slots: int
) -> None:
    batcher = Batcher(batch_size=4, max_latency=0.0, has_lengths=True, max_batch_cost=60.0)
    for slot in range(slots):
        batcher.worker_ready(slot, 0.0)
    made: list[Call] = []
    answered: list[Call] = []
    in_flight: list[BatchRecord] = []
    for number, lengths in enumerate(calls):
        call = Call([(number, place) for place in range(len(lengths))], None)
        call.lengths = lengths
        made.append(call)
        in_flight += batcher.call_submitted(call, 0.0).batches
        batcher.check_invariants()
    while in_flight:
        batch = in_flight.pop()  # the last first, so that they come back in any order
        assert batch.cost <= 60.0 or batch.size == 1
        over, more = done(batcher, batch)
        answered += over
        in_flight += more
    assert sorted(map(id, answered)) == sorted(map(id, made))
    for number, call in enumerate(made):
        assert call.outputs == [f"result of {(number, place)}" for place in range(call.size)]
