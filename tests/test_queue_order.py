"""The order of calls that are not all alike, whatever comes and goes meanwhile.

Calls go into a batcher, and batches come out. test_queue_lengths.py has items with lengths.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher_walk import make_batcher
from cases import long_cases
from service_streamer.batching.batcher import CallFailures
from service_streamer.observe.record import (
    ORDINARY,
    BatchRecord,
    BatchReport,
    Call,
    CallOptions,
    Reason,
)

#: Each turn of a tenant whose number this divides goes to the call that has waited longest.
AGING = 8
#: A call is hopeless if it takes so many times its time.
SURELY_LATE = 1.2


class Line:
    """Calls that wait for workers, of which each takes one batch and goes.

    Batches take no time, unless a test says so. So nothing is learned, and a batch has as many
    items as fit.

    Attributes:
        late: calls whose time has ended, in order.
        took: what a batch of such a cost takes, seconds; an item without a length costs one.
    """

    def __init__(
        self, batch_size: int = 1, *, weights: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        options = {"max_attempts": 1, "max_latency": 0.0, **options}  # nothing is sent ahead
        failures = CallFailures("too late")
        self.batcher = make_batcher(
            batch_size=batch_size, tenant_weights=weights, call_failures=failures, **options
        )
        self._has_lengths = bool(options.get("has_lengths"))
        self.now = 0.0
        self.took: Callable[[float], float] = lambda _: 0.0
        self.late: list[Call] = []
        self._slots = itertools.count()

    def add(
        self,
        name: object = None,
        size: int = 1,
        *,
        priority: int = 0,
        tenant: str = "",
        seconds: float = math.inf,
        has_deadline: bool = False,
        lengths: Iterable[float] = (),
        payloads: Sequence[object] = (),
    ) -> Call:
        """A call comes; ``seconds`` are what it has, given with it or by a default."""
        call = Call([*payloads] or [name] * size, name)
        options = CallOptions(priority, tenant, has_deadline)
        call.options = ORDINARY if options == ORDINARY else options
        call.deadline = self.now + seconds
        if self._has_lengths:
            call.lengths = [*lengths] or [1.0] * call.size
        assert not self.batcher.call_submitted(call, self.now).batches
        return call

    def drop(self, call: Call) -> None:
        assert self.batcher.withdraw(call)

    def cut(self) -> BatchRecord | None:
        """The next batch, if anything waits; it has been computed."""
        batcher, slot = self.batcher, next(self._slots)
        actions = batcher.worker_ready(slot, self.now)
        self.late += actions.calls
        batch = next(iter(actions.batches), None)
        assert len(actions.batches) <= 1
        batcher.check_invariants()
        batcher.worker_retiring(slot, self.now)
        if batch is not None:
            record = copy.copy(batch)  # which is not released
            took = self.took(batch.cost)
            self.now += took
            report = BatchReport(batch.id, batch.payloads, duration=took, slot=slot)
            batcher.batch_returned(report, self.now)
            batch = record
        batcher.worker_lost(slot, "gone", self.now)
        return batch

    def take(self) -> list[Any]:
        """The names of the items of the next batch."""
        batch = self.cut()
        return [] if batch is None else batch.payloads

    def order(self) -> list[Any]:
        """The names of all that wait."""
        return [name for batch in iter(self.take, []) for name in batch]


@pytest.fixture(params=[False, True], ids=["plain", "lengths"])
def has_lengths(request: pytest.FixtureRequest) -> bool:
    """Runs the test on items without lengths, and on items with them."""
    has: bool = request.param
    return has


# -- tables


def test_calls_that_wait_share_fairly_with_the_first_that_is_not_ordinary(
    has_lengths: bool,
) -> None:
    line = Line(has_lengths=has_lengths)
    waiting = [line.add(number) for number in range(12)]
    assert [line.take() for _ in range(9)] == [[number] for number in range(9)]
    line.drop(waiting[9])
    line.add("first", priority=9)
    assert line.order() == ["first", 10, 11]
    line.add("next")
    line.add("and next")
    assert line.order() == ["next", "and next"]


def test_deadline_goes_before_any_priority_and_the_earlier_before_the_later(
    has_lengths: bool,
) -> None:
    line = Line(has_lengths=has_lengths)
    line.add("urgent", priority=9)
    line.add("later", seconds=9.0, has_deadline=True, priority=5)
    line.add("soon", seconds=3.0, has_deadline=True, priority=-5)
    line.add("as soon", seconds=3.0, has_deadline=True)
    line.add("plain")
    assert line.order() == ["as soon", "soon", "later", "urgent", "plain"]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (4.9, ["given 8", "given 20", "high", "default"]),
        (5.0, ["given 8", "default", "given 20", "high"]),
    ],
)
def test_default_time_counts_from_its_half(
    now: float, expected: list[str], has_lengths: bool
) -> None:
    line = Line(has_lengths=has_lengths)
    line.add("given 20", seconds=20.0, has_deadline=True)
    line.add("given 8", seconds=8.0, has_deadline=True)
    line.add("high", priority=1)
    line.add("default", seconds=10.0, lengths=[0])
    line.now = now
    assert line.order() == expected


def test_default_time_counts_from_its_half_behind_calls_without_any(has_lengths: bool) -> None:
    line = Line(has_lengths=has_lengths)
    line.add("without")
    line.add("default", seconds=10.0)
    line.add("high", priority=1)
    line.now = 5.0
    assert line.order() == ["default", "high", "without"]


@pytest.mark.parametrize("priority", [0, 1], ids=["in order", "fairly"])
def test_late_calls_give_way_while_others_fill_the_batch(priority: int, has_lengths: bool) -> None:
    line = Line(2, has_lengths=has_lengths)
    line.took = lambda _: 1.0
    for _ in range(6):
        line.add("before", 2)
    for _ in range(4):
        line.take()
    late = [line.add(f"late {n}", seconds=0.9, priority=priority) for n in range(2)]
    in_time = [line.add(n, seconds=9.0, priority=priority) for n in range(3)]
    taken = {name for _ in range(4) for name in line.take()}
    assert line.late == late
    assert taken - {"before"} == {*range(3)}
    assert not any(call.failure for call in in_time)


def test_late_calls_are_computed_where_there_is_room_for_all(has_lengths: bool) -> None:
    line = Line(2, has_lengths=has_lengths)
    line.took = lambda _: 1.0
    for _ in range(6):
        line.add("before", 2)
    for _ in range(6):
        line.take()
    line.add("late", seconds=0.5)
    line.add("other")
    assert sorted(line.take()) == ["late", "other"]
    assert line.late == []


def test_no_more_late_calls_give_way_than_the_batch_has_no_room_for(has_lengths: bool) -> None:
    line = Line(2, has_lengths=has_lengths)
    line.took = lambda _: 1.0
    before = [line.add("before", 2) for _ in range(6)]
    for _ in range(5):
        line.take()
    line.drop(before[-1])
    calls = [line.add(n, seconds=0.9) for n in range(3)]
    assert line.take() == [1, 2]
    assert line.late == calls[:1]


@pytest.mark.parametrize("priority", [0, 1], ids=["in order", "fairly"])
def test_calls_that_may_be_in_time_are_computed_where_there_is_room_for_all(priority: int) -> None:
    line = Line(8)
    for number, size in enumerate([1, 8, 2, 4] * 30):
        noise = 1.0 + 0.2 * (-1) ** (number // 4)
        line.took = lambda size, noise=noise: noise * (2.0 + size)
        line.now += 1e3
        line.add("before", size)
        line.order()
    line.now += 1e3
    for name in "abc":
        line.add(name, seconds=4.5, priority=priority)  # a batch of three takes 4 to 6
    assert line.take() == ["a", "b", "c"]
    assert line.late == []


def test_calls_whose_time_has_ended_are_never_computed(has_lengths: bool) -> None:
    line = Line(3, has_lengths=has_lengths)
    ended = line.add("ended", 2, seconds=1.0, has_deadline=True)
    line.add("a")
    line.add("b", tenant="b")
    line.now = 1.0
    assert sorted(line.take()) == ["a", "b"]
    assert line.late == [ended]
    assert line.batcher.is_empty
    for number in range(30):  # more than the window has
        line.add("a", priority=number % 2)
    ended_behind = line.add("ended", seconds=1.0)
    line.now = 2.0
    assert line.order() == ["a"] * 30
    assert line.late == [ended, ended_behind]
    assert line.batcher.is_empty


@pytest.mark.parametrize("priority", [0, 1], ids=["in order", "fairly"])
def test_calls_that_are_late_at_the_earliest_are_left_out_but_the_last(priority: int) -> None:
    line = Line(8, max_attempts=2)
    line.took = lambda size: 2.0 + size  # as is soon known exactly
    for size in [1, 8, 2, 4] * 15:
        line.now += 1e3
        line.add("before", size)
        line.order()
    line.now += 1e3
    for name, seconds in (("a", 2.4), ("b", 3.4), ("c", 4.1), ("d", 9.0)):
        line.add(name, seconds=seconds, priority=priority)
    assert line.take() == ["c", "d"]
    assert [call.reply for call in line.late] == ["a", "b"]
    line.now += 1e3
    line.add("alone", seconds=2.4, priority=priority)
    assert line.take() == ["alone"], "or it would never be known that it is not late"


# -- whatever comes, in whatever order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 2) | st.none(), max_size=80))
def test_order_is_priority_then_arrival_and_every_eighth_by_arrival(
    events: list[int | None],
) -> None:
    """None cuts one item; a number is the priority of a call that comes."""
    line = Line()
    waiting = [line.add(priority=1)]
    passed_over = 0  # turns in a row that were not of the call that has waited longest
    in_order = AGING  # turns in a row that were of the first in order
    for number, priority in enumerate([*events, None, *[None] * len(events)]):
        line.now = 1.0 + number
        if priority is not None:
            waiting.append(line.add(priority=priority))
        elif waiting:
            batch = line.cut()
            assert batch is not None
            [(call, _, _)] = batch.spans
            passed_over = 0 if call is waiting[0] else passed_over + 1
            assert passed_over < AGING
            if call is max(waiting, key=lambda made: made.options.priority):
                in_order += 1
            else:
                assert call is waiting[0]
                assert in_order >= AGING - 1
                in_order = 0
            waiting.remove(call)
    assert line.batcher.is_empty


#: Those of two tenants, and which of them has calls of how many items.
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 10.0])
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=5)
EPSILON = 1e-9


def assert_fair(served: Counter[str], weights: dict[str, float], *names: str) -> None:
    for a in names:
        for b in names:
            difference = served[a] / weights[a] - served[b] / weights[b]
            assert abs(difference) <= 1 / weights[a] + 1 / weights[b] + EPSILON


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries({"a": WEIGHTS, "b": WEIGHTS, "c": WEIGHTS}),
    st.fixed_dictionaries({"a": SIZES, "b": SIZES, "c": SIZES}),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(0, 60),
)
def test_tenants_that_wait_get_as_much_for_their_weight(
    weights: dict[str, float],
    sizes: dict[str, list[int]],
    batch_size: int,
    batches: int,
    joins_at: int,
) -> None:
    line = Line(batch_size, weights=weights)
    waiting: Counter[str] = Counter()
    served: Counter[str] = Counter()
    since: Counter[str] = Counter()
    names = "ab"
    for number in range(batches):
        if number == joins_at:  # one that comes late has not saved up turns
            names = "abc"
        for name in names:
            while waiting[name] < 10:
                for size in sizes[name]:
                    line.add(name, size, tenant=name)
                    waiting[name] += size
        taken = Counter(line.take())
        waiting -= taken
        served += taken
        if names == "abc":
            since += taken
        assert_fair(served, weights, "a", "b")
        assert_fair(since, weights, *names)


def test_tenant_that_was_away_has_saved_up_nothing_and_lost_nothing() -> None:
    line = Line()

    def served(count: int) -> Counter[Any]:
        return Counter(name for _ in range(count) for name in line.take())

    for _ in range(300):
        line.add("a", tenant="a")
    line.add("b", tenant="b")
    served(100)
    for _ in range(20):
        line.add("b", tenant="b")
    assert served(20) == pytest.approx({"a": 10, "b": 10}, abs=1)
    # Nor can one jump the queue by coming with one call at a time
    came, has_call = 0, False
    for _ in range(100):
        if not has_call:
            line.add("c", tenant="c")
        has_call = line.take() != ["c"]
        came += not has_call
    assert came <= 50 + 1


@pytest.mark.parametrize("length", [None, 10, *long_cases(100)])
@pytest.mark.parametrize("others", ["bc", *long_cases("b")])
def test_tenant_of_one_call_at_a_time_gets_its_share_and_no_more(
    length: int | None, others: str
) -> None:
    """It is away while its call is computed, and comes back one batch later."""
    line = Line(has_lengths=length is not None)
    work: Counter[str] = Counter()
    ours = [length or 1]

    def come() -> None:
        line.add("ours", tenant="ours", lengths=ours)

    for _ in range(600):
        for other in others:
            line.add(other, tenant=other, lengths=[1])
    come()
    was_ours = False
    for _ in range(600):
        [name] = line.take()
        work[name] += ours[0] if name == "ours" else 1
        if was_ours:
            come()
        was_ours = name == "ours"
    assert work["ours"] == pytest.approx(work["b"], rel=0.05)


@pytest.mark.parametrize("length", [10, 100])
def test_large_calls_one_at_a_time_get_the_share_of_their_class_and_no_more(length: int) -> None:
    line = Line(has_lengths=True)
    for _ in range(700):
        line.add("small", lengths=[1])
    line.add("other", priority=-5)  # so that they take turns
    work: Counter[str] = Counter()
    waiting = 0
    for _ in range(600):
        if not waiting:
            line.add("large", 2, lengths=[length] * 2)
            waiting = 2
        [name] = line.take()
        work[name] += length if name == "large" else 1
        waiting -= name == "large"
    assert work["large"] == pytest.approx(work["small"], abs=length + 10)


def test_what_tenants_had_does_not_count_after_none_waited() -> None:
    line = Line(has_lengths=True)
    line.add("b", tenant="b", lengths=[99])
    line.add("a", tenant="a", lengths=[1])
    line.add("a", tenant="a", lengths=[1])
    assert line.order() == ["b", "a", "a"]
    for _ in range(5):
        line.add("a", tenant="a", lengths=[1])
        line.add("b", tenant="b", lengths=[1])
    assert {*line.order()[:2]} == {"a", "b"}


@pytest.mark.parametrize("length", [None, 1.0, 0.0], ids=["plain", "lengths", "no length"])
def test_flood_of_one_tenant_does_not_starve_the_others(length: float | None) -> None:
    has_lengths = length is not None
    line = Line(2, has_lengths=has_lengths)
    for _ in range(100):
        line.add("flood", 10, tenant="flood", lengths=[length or 0.0] * 10)
    line.take()
    lone = []
    for _ in range(100):
        line.add("lone")
        lone += [name for name in line.take() if name == "lone"]
    # Where items have lengths, those that are in the window go first.
    assert len(lone) >= (80 if has_lengths else 100)


# -- calls of many items


@pytest.mark.parametrize("tenants", [False, True], ids=["one tenant", "a tenant for each"])
def test_call_of_many_items_takes_turns_with_small_calls_that_come_later(
    tenants: bool, has_lengths: bool
) -> None:
    line = Line(4, has_lengths=has_lengths)
    line.add("large", 400, tenant="large" if tenants else "")
    batches = [line.take()]
    for number in range(40):
        line.add(number, tenant=str(number) if tenants else "")
        batches.append(line.take())
    assert batches[0] == ["large"] * 4
    small = [name for batch in batches for name in batch if name != "large"]
    assert small == [*range(len(small))], "each when its turn comes"
    assert len(small) >= 39
    assert sum(batch.count("large") for batch in batches) >= 120, "they fill up what is left"


def test_small_calls_that_keep_coming_leave_half_of_the_places_to_a_large_one(
    has_lengths: bool,
) -> None:
    line = Line(64, has_lengths=has_lengths)
    line.add("large", 12_800)
    for _ in range(7):
        line.take()  # so that its next turn may be that of the call which has waited longest
    left, served = line.batcher.pending_items, []
    for _ in range(100):
        while line.batcher.pending_items < left - served.count("large") + 128:
            line.add("small", 4)
        served += line.take()
    assert 2_800 <= served.count("large") <= 3_600
    assert 0 < served[:640].count("large") < 640


def test_large_call_whose_time_is_near_its_end_leaves_small_ones_their_turns(
    has_lengths: bool,
) -> None:
    line = Line(4, has_lengths=has_lengths)
    line.add("large", 400, seconds=20.0, has_deadline=True)
    line.take()
    line.now = 11.0
    line.add("small")
    assert "small" in line.take() + line.take()


def test_large_call_is_not_behind_a_call_of_its_class_that_was_withdrawn(has_lengths: bool) -> None:
    line = Line(4, has_lengths=has_lengths)
    line.add("huge", 40_000)
    line.add("small", 4)
    line.take()
    line.drop(line.add("gone", 4_000))
    line.add("large", 400)
    served = [name for _ in range(40) for name in line.take()]
    assert served.count("large") >= 40


def test_batches_of_a_large_call_alone_are_full_after_none_waited() -> None:
    line = Line(64)
    line.took = lambda size: 0.01 + 0.01 * size  # as is soon known
    for size in range(40):
        line.now += 10.0
        line.add("before", 1 + size % 5)
        line.order()
    line.add("large", 130)
    while line.batcher.pending_items > 9:
        line.add("small")
        beside = len(line.take())
    line.order()
    line.add("large", 200)
    assert len(line.take()) > 1.5 * beside


def test_small_neighbours_go_before_those_of_a_large_call() -> None:
    line = Line(4, has_lengths=True)
    line.add("first", lengths=[10])
    for name in "ab":
        line.add(name, lengths=[5])
    line.add("large", 8, lengths=[5] * 8)
    assert sorted(line.take()) == ["a", "b", "first", "large"]


def test_large_call_that_is_put_back_leaves_the_window_to_small_ones() -> None:
    line = Line(4, has_lengths=True)
    large = line.add("large", 400)
    for _ in range(3):
        line.take()
    line.batcher.rebuild([large], line.now)
    for name in "abc":
        line.add(name)
    served = [name for _ in range(6) for name in line.take()]
    assert {*"abc"} <= {*served}


def test_large_calls_of_equal_size_go_one_after_the_other_and_a_smaller_one_before(
    has_lengths: bool,
) -> None:
    line = Line(4, has_lengths=has_lengths)
    for name in "ab":
        line.add(name, 16)
    assert line.order() == ["a"] * 16 + ["b"] * 16
    for name in "ab":
        line.add(name, 40)
    line.take()
    line.add("c", 9)
    order = line.order()
    assert len(order) == 40 - 4 + 40 + 9
    assert order.index("c") < 20
    assert order[-1] != "c"


def test_items_of_a_large_call_do_not_count_as_before_a_new_call(has_lengths: bool) -> None:
    line = Line(4, has_lengths=has_lengths)
    line.took = lambda size: size / 100
    line.add("large", 400, seconds=100.0)
    for _ in range(60):
        line.take()
    assert line.batcher.worker_ready(1000, line.now).batches, "one that computes meanwhile"
    assert line.batcher.is_behind
    call = Call(["new"], None)
    call.arrived_at, call.deadline = line.now, line.now + 0.2
    assert not line.batcher.hopeless_for(call, line.now)
    for _ in range(40):
        line.add("small", seconds=100.0)
    assert line.batcher.hopeless_for(call, line.now) > 0.0


# -- items that take long


def timed_line(base: float, per_unit: float, **options: Any) -> Line:
    """A line of a model whose batches took this, seconds, and take no time from now on."""
    line = Line(16, **options)
    line.took = lambda size: base + per_unit * size
    for size in [1, 16, 2] * 5:
        line.add("before", size)
        line.order()
    line.took = lambda _: 0.0
    return line


@pytest.mark.parametrize(
    ("base", "per_unit", "least", "most"),
    [
        # as many as take a second; at least one
        (0.02, 0.24, 4, 5), (0.05, 0.19, 4, 6), (0.1, 5.0, 1, 1),
        # as many as take nine times what a batch costs beside them, if that is longer
        (0.5, 0.4, 8, 10),
        # all that fit
        (1.0, 0.1, 16, 16),
    ],
)  # fmt: skip
def test_batch_takes_no_longer_than_a_second_if_a_longer_one_is_hardly_faster(
    base: float, per_unit: float, least: int, most: int
) -> None:
    line = timed_line(base, per_unit)
    for _ in range(16):
        line.add("next")
    batch = line.cut()
    assert batch is not None
    assert least <= batch.size <= most
    assert batch.reason in ((Reason.LONG, Reason.PAYS) if most < 16 else (Reason.FULL,))


def test_short_item_overtakes_long_ones_which_have_as_much_of_the_time() -> None:
    line = timed_line(0.01, 0.01, has_lengths=True)
    for name in "abcd":
        line.add(name, lengths=[500])
    line.add("short")
    assert line.take() == ["short"]
    served: list[str] = []
    while not {*"abcd"} <= {*served}:
        line.add("short", 16)
        served += line.take()
    assert [name for name in served if name != "short"] == [*"abcd"]
    assert served.count("short") <= 2_500


@pytest.mark.parametrize("tenants", [False, True], ids=["one tenant", "two tenants"])
def test_long_items_of_a_large_call_have_their_share_of_the_work_and_no_more(tenants: bool) -> None:
    line = timed_line(0.005, 1e-5, has_lengths=True)
    line.add("long", 500, lengths=[2000] * 500, tenant="a" if tenants else "")
    left, served = line.batcher.pending_items, []
    for _ in range(300):
        while line.batcher.pending_items < left - served.count("long") + 64:
            line.add("short", lengths=[10], tenant="b" if tenants else "")
        served += line.take()
    short, long = 10 * served.count("short"), 2000 * served.count("long")
    assert 0.3 <= long / (short + long) <= 0.7


def test_call_of_low_priority_is_not_held_up_by_a_large_one_before_it(has_lengths: bool) -> None:
    line = timed_line(0.005, 1e-5, has_lengths=has_lengths)
    line.add("large", 500, lengths=[2000] * 500, priority=-1)
    line.add("low", lengths=[10], priority=-1)
    served: list[str] = []
    for _ in range(17):
        for _ in range(16):
            line.add("high", lengths=[10], priority=1)
        served += line.take()
    assert "low" in served


def test_batch_has_fifty_milliseconds_of_a_large_call_while_small_ones_come(
    has_lengths: bool,
) -> None:
    line = timed_line(0.005, 0.009, has_lengths=has_lengths)
    line.add("large", 100)
    taken = []
    for _ in range(10):
        line.add("small")
        taken.append(line.take())
    assert {batch.count("large") for batch in taken[1:]} == {5}
    assert {batch.count("small") for batch in taken[1:]} == {1}


def test_call_of_few_items_is_large_if_they_take_long() -> None:
    line = timed_line(0.01, 0.1)
    line.add("large", 12)
    line.add("small")
    assert line.take() == ["small", "large"]


# -- what goes before a new call


def saturated() -> Line:
    """A line whose workers compute 100 items a second, one by one, as is known by now."""
    line = Line(weights={"heavy": 3.0})
    line.took = lambda _: 0.01
    line.add("before", 41)
    for _ in range(39):
        line.take()
    assert line.batcher.worker_ready(1000, line.now).batches, "one that computes meanwhile"
    assert line.batcher.is_behind
    return line


def ahead(line: Line, tenant: str) -> int:
    """How many items go before a new call: the time in which it is not hopeless says so."""

    def is_hopeless(items: int) -> bool:
        call = Call(["new"], None)
        call.options = CallOptions(tenant=tenant)
        call.arrived_at, call.deadline = line.now, line.now + (items / 100 + 0.015) / SURELY_LATE
        return line.batcher.hopeless_for(call, line.now) > 0.0

    return next(items for items in itertools.count() if not is_hopeless(items))


def test_call_of_a_tenant_is_hopeless_by_what_its_share_takes() -> None:
    line = saturated()
    for name, count in (("heavy", 90), ("long", 500), ("short", 10), ("ours", 20)):
        for _ in range(count):
            line.add(name, tenant=name, seconds=100.0)
    left = Counter({"heavy": 90, "long": 500, "short": 10, "ours": 20})
    left -= Counter(name for _ in range(9) for name in line.take())

    def share(tenant: str, weight: float) -> float:
        shares = {"heavy": 3.0, "long": 1.0, "short": 1.0, "ours": 1.0}
        each = left[tenant] / weight
        return sum(min(left[name], each * other) for name, other in shares.items())

    assert ahead(line, "ours") == pytest.approx(share("ours", 1.0), abs=2)
    assert ahead(line, "heavy") == pytest.approx(share("heavy", 3.0), abs=2)
    assert ahead(line, "long") == pytest.approx(left.total(), abs=2)
    assert ahead(line, "new") <= 6, "a turn of each, which are three of the heavy one"
    for number in range(50):
        line.add(tenant=str(number), seconds=100.0)
    assert ahead(line, "new") == pytest.approx(56, abs=2), "and one of each of these"
    assert ahead(line, "ours") == pytest.approx(share("ours", 1.0) + 50, abs=2)


@pytest.mark.parametrize(
    ("waits", "new", "seconds", "expected"),
    [
        ({}, {}, 0.8, True),
        ({}, {}, 0.9, False),
        ({"priority": 1}, {"priority": 1}, 0.8, True),
        ({}, {"priority": 1}, 0.9, False),
        ({"seconds": 0.5, "has_deadline": True}, {"has_deadline": True}, 0.8, True),
        ({"seconds": 9.0, "has_deadline": True}, {"has_deadline": True}, 0.9, False),
        ({}, {"has_deadline": True}, 0.9, False),
        ({"tenant": "one"}, {"tenant": "one"}, 0.8, True),
        ({"tenant": "one"}, {"tenant": "another"}, 0.9, False),
    ],
)
@pytest.mark.parametrize("is_fair", [False, True], ids=["alike", "beside an urgent one"])
def test_call_is_hopeless_if_what_goes_before_it_takes_too_long(
    waits: dict[str, Any], new: dict[str, Any], seconds: float, expected: bool, is_fair: bool
) -> None:
    line = saturated()
    for _ in range(99):  # and one that is left of those
        line.add(**{"seconds": 100.0, **waits})
    if is_fair:
        line.add(priority=9)
    call = Call(["new"], None)
    call.options = CallOptions(**new)
    call.arrived_at, call.deadline = line.now, line.now + seconds
    assert (line.batcher.hopeless_for(call, line.now) > 0.0) == expected
    assert line.batcher.figures.rejected_calls == expected


def test_no_call_is_hopeless_before_there_is_a_measure_or_when_nothing_waited() -> None:
    line = Line()
    line.add("large", 1000)
    assert ahead(line, "") == 0
    line = saturated()
    line.order()
    line.add("large", 1000)
    assert ahead(line, "") == 0


def test_one_slow_batch_does_not_take_the_hope() -> None:
    line = saturated()
    for _ in range(100):
        line.add(seconds=1e3)
    line.took = lambda _: 60.0
    line.take()
    line.took = lambda _: 0.01
    for _ in range(16):
        line.take()
    assert ahead(line, "") <= 100


# -- nobody waits for ever

#: Calls that wait when the one comes that must not wait for ever.
BEFORE = 5
BATCH_SIZE = 4

#: What a call is like, by name: priority, tenant, seconds that it has, and whether they were given
#: with it. A tenant of ``None`` is a new one for each call.
KINDS: dict[str, tuple[int, str | None, float, bool]] = {
    "plain": (0, "", math.inf, False),
    "timed": (0, "", 20.0, False),  # by a default that all have
    "deadline": (0, "", 30.0, True),
    "short deadline": (0, "", 2.0, True),
    "long deadline": (0, "", 3600.0, True),
    "high": (9, "", math.inf, False),
    "low": (-9, "", math.inf, False),
    "high, with a deadline": (9, "", 30.0, True),
    "of another tenant": (0, "b", math.inf, False),
    "of another tenant, with a deadline": (0, "b", 2.0, True),
    "of tenants that come once": (0, None, math.inf, False),
}
FLOODS = [kind for kind in KINDS if kind != "low"]


def come(line: Line, kind: str, name: str, length: float = 1.0) -> Call:
    priority, tenant, seconds, has_deadline = KINDS[kind]
    if tenant is None:
        tenant = f"tenant {line.batcher.figures.accepted_calls}"
    return line.add(
        name, priority=priority, tenant=tenant, seconds=seconds, has_deadline=has_deadline,
        lengths=[length],
    )  # fmt: skip


def turns_until_cut(line: Line, floods: Iterable[str], kind: str, batch_size: int) -> int:
    """Items that are cut before the call of a kind is, while as many come as are cut."""
    flood = itertools.cycle(floods)
    for _ in range(BEFORE):
        come(line, next(flood), "flood")
        line.now += 1e-4
    come(line, kind, "waits", length=50.0)
    for turn in itertools.count(batch_size, batch_size):
        for _ in range(batch_size):
            line.now += 1e-4
            come(line, next(flood), "flood")
        if "waits" in line.take():
            return turn
        if turn > 4_000:
            pytest.fail(f"{kind} waits for ever")
    raise AssertionError


@pytest.mark.parametrize("waits", KINDS)
def test_each_kind_is_passed_over_a_bounded_number_of_times(waits: str, has_lengths: bool) -> None:
    """By each other kind, and by all of them together."""
    # Where items have lengths, in the line, and again in the window.
    most = AGING * (BEFORE + 2) + (AGING * 8 if has_lengths else 0)
    for flood in FLOODS:
        line = Line(has_lengths=has_lengths)
        assert turns_until_cut(line, [flood], waits, 1) <= most, flood
    line = Line(BATCH_SIZE, has_lengths=has_lengths)
    assert turns_until_cut(line, FLOODS, waits, BATCH_SIZE) <= 2 * AGING * 8 * BATCH_SIZE


def test_tenants_that_come_once_do_not_starve_one_that_has_several_calls() -> None:
    line = Line()
    for _ in range(20):
        come(line, "of another tenant", "ours")
    ours = 20
    for _ in range(20 * (AGING + 1)):
        while line.batcher.pending_items < ours + BEFORE:
            come(line, "of tenants that come once", "flood")
        ours -= line.take() == ["ours"]
    assert not ours, "one turn in eight"


@pytest.mark.parametrize(("flood", "waits"), [("plain", "deadline"), ("low", "high")])
def test_urgent_call_goes_before_the_others_whichever_turn_it_is(flood: str, waits: str) -> None:
    for before in range(AGING):
        line = Line()
        for _ in range(20):
            come(line, flood, "flood")
        come(line, "high", "first")  # so that they take turns
        for _ in range(1 + before):
            line.take()
        line.now = 1.0
        come(line, waits, "waits")
        assert "waits" in [*line.take(), *line.take()]


@pytest.mark.parametrize("kind", ["plain", "high", "deadline", "of tenants that come once"])
def test_calls_that_are_over_are_not_kept_behind_a_hung_worker(
    kind: str, has_lengths: bool
) -> None:
    line = Line(has_lengths=has_lengths)
    come(line, "low", "waits")
    for _ in range(1_000):
        line.drop(come(line, kind, "over"))
    gc.collect()  # what earlier tests have left
    kept = sum(type(each) is Call and each.reply == "over" for each in gc.get_objects())
    assert kept < 200
    assert line.order() == ["waits"]
