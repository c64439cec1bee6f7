"""In which order calls are cut that are not all alike, whatever comes and goes meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service_streamer.batching.call_queue import CallQueue
from service_streamer.batching.overload import UNKNOWN, Finish
from service_streamer.batching.tuning import AGING
from service_streamer.observe.record import ORDINARY, Call, Precedence


def call(
    name: object = None,
    size: int = 1,
    *,
    priority: int = 0,
    tenant: str = "",
    deadline: float = math.inf,
    has_deadline: bool = False,
    at: float = 0.0,
) -> Call:
    made = Call([name] * size, name)
    precedence = Precedence(priority, tenant, has_deadline)
    made.precedence = ORDINARY if precedence == ORDINARY else precedence
    made.deadline = deadline
    made.arrived_at = at
    return made


def queue(*calls: Call, **weights: float) -> CallQueue:
    pending = CallQueue(weights)
    for waiting in calls:
        pending.add(waiting)
    return pending


def take(pending: CallQueue, room: int = 1, now: float = 0.0) -> list[Call]:
    """The call of each item that is cut."""
    taken = pending.take(room, now, UNKNOWN)
    assert not taken.late
    pending.check_invariants()
    return [owner for owner, start, stop in taken.spans for _ in range(start, stop)]


def drop(pending: CallQueue, over: Call) -> None:
    over.is_over = True
    pending.drop(over)


def order(pending: CallQueue, now: float = 0.0) -> list[object]:
    """The names of all that wait, cut one by one."""
    names = []
    while pending.items:
        [cut] = take(pending, now=now)
        names.append(cut.reply)
    return names


# -- tables


def test_ordinary_calls_go_by_arrival_without_a_fair_queue() -> None:
    pending = queue(*(call(i, 2) for i in range(4)))
    assert pending._fair is None
    taken = pending.take(5, 0.0, UNKNOWN)
    assert [span[1:] for span in taken.spans] == [(0, 2), (0, 2), (0, 1)]
    assert order(pending) == [2, 3, 3]


def test_the_queue_is_plain_again_when_all_with_a_precedence_are_gone() -> None:
    pending = queue(call("low"), call("high", priority=1))
    assert order(pending) == ["high", "low"]
    pending.add(call("next"))
    assert pending._fair is None
    assert order(pending) == ["next"]


def test_waiting_calls_share_fairly_with_the_first_that_is_not_ordinary() -> None:
    waiting = [call(i) for i in range(4)]
    pending = queue(*waiting)
    take(pending)
    drop(pending, waiting[1])
    pending.add(call("first", priority=9))
    assert order(pending) == ["first", 2, 3]


def test_a_higher_priority_goes_first_and_equal_ones_by_arrival() -> None:
    calls = [call(f"{priority}{i}", priority=priority) for i in range(2) for priority in (0, 2, -1)]
    assert order(queue(*calls)) == ["20", "21", "00", "01", "-10", "-11"]


def test_a_deadline_goes_before_any_priority_and_the_earlier_before_the_later() -> None:
    pending = queue(
        call("urgent", priority=9),
        call("later", deadline=9.0, has_deadline=True, priority=5),
        call("soon", deadline=3.0, has_deadline=True, priority=-5),
        call("as soon", deadline=3.0, has_deadline=True),
        call("plain"),
    )
    assert order(pending) == ["as soon", "soon", "later", "urgent", "plain"]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (4.9, ["given 8", "given 20", "high", "default"]),
        (5.0, ["given 8", "default", "given 20", "high"]),
    ],
)
def test_a_default_time_counts_from_its_half(now: float, expected: list[str]) -> None:
    pending = queue(
        call("given 20", deadline=20.0, has_deadline=True),
        call("given 8", deadline=8.0, has_deadline=True),
        call("high", priority=1),
        call("default", deadline=10.0),
    )
    assert order(pending, now) == expected


def test_the_longest_wait_is_known_whatever_the_order() -> None:
    first = call("low", priority=-1, at=1.0)
    pending = queue(first, call("high", priority=1, at=2.0), call("b", tenant="b", at=3.0))
    assert pending.oldest_arrival() == 1.0
    take(pending, 2)
    assert pending.oldest_arrival() == 1.0
    drop(pending, first)
    assert not pending.items


def test_late_calls_give_way_whoever_they_are() -> None:
    late = call("late", 2, deadline=1.0, has_deadline=True)
    soon = call("soon", deadline=2.0, has_deadline=True)
    pending = queue(late, soon, call("a"), call("b", tenant="b"))
    taken = pending.take(2, 1.5, Finish(2.5))
    assert taken.late == [late, soon]
    assert sorted(map(str, taken.payloads)) == ["a", "b"]
    assert (late.pending, soon.pending, pending.items) == (0, 0, 0)


def test_late_calls_are_tried_where_there_is_room_for_all() -> None:
    soon = call("soon", deadline=2.0, has_deadline=True)
    taken = queue(soon, call("a")).take(2, 1.5, Finish(2.5))
    assert (taken.late, len(taken.spans)) == ([], 2)


@pytest.mark.parametrize("priority", [0, 1], ids=["in order", "fairly"])
def test_calls_that_are_late_at_the_earliest_are_left_out_but_the_last(priority: int) -> None:
    calls = [call(name, deadline=deadline, priority=priority) for name, deadline in LATE]
    pending = queue(*calls)
    finish = Finish(likely=2.0, earliest=2.0, each=1.0)
    assert pending.take(8, 1.5, finish).payloads == ["c", "d"]
    assert [late.reply for late in calls if not late.is_running] == ["a", "b"]
    alone = queue(call("alone", deadline=2.5, priority=priority))
    assert alone.take(8, 1.5, finish).payloads == ["alone"]


#: With two of them batches are back at 4.
LATE = (("a", 2.5), ("b", 3.5), ("c", 4.0), ("d", 9.0))


def test_the_items_of_a_call_keep_their_order_over_several_batches() -> None:
    pending = queue(call("x", 5, tenant="x"), call("y", 5, tenant="y"))
    spans = [span for _ in range(3) for span in pending.take(4, 0.0, UNKNOWN).spans]
    for name in "xy":
        places = [range(start, stop) for owner, start, stop in spans if owner.reply == name]
        assert [place for part in places for place in part] == [*range(5)]


# -- whatever comes, in whatever order


class Arrival(NamedTuple):
    """A call that comes; ``kind`` is where its deadline is from."""

    priority: int
    tenant: str
    size: int
    seconds: float
    kind: str

    def call(self, name: object, now: float) -> Call:
        return call(
            name,
            self.size,
            priority=self.priority,
            tenant=self.tenant,
            deadline=math.inf if self.kind == "none" else now + self.seconds,
            has_deadline=self.kind == "given",
            at=now,
        )


ARRIVALS = st.builds(
    Arrival,
    st.integers(-2, 2),
    st.sampled_from(["", "a", "b"]),
    st.integers(1, 4),
    st.integers(30, 90).map(float),
    st.sampled_from(["none", "default", "given"]),
)
#: Calls that come, and numbers: room for so many to be cut, or for 0 one of those that wait ends.
EVENTS = st.lists(ARRIVALS | st.integers(0, 6), max_size=60)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_no_deadline_is_missed_for_a_later_one(events: list[Arrival | int]) -> None:
    pending = queue(a=2.0)
    calls: list[Call] = []
    cut: Counter[Call] = Counter()
    now = 0.0
    for event in events:
        now += 0.5
        if isinstance(event, Arrival):
            calls.append(event.call(len(calls), now))
            pending.add(calls[-1])
        elif event:
            taken = take(pending, event, now)
            cut.update(taken)
            for waiting in pending:
                if waiting.precedence.has_deadline:
                    # Then what has gone before it, of its tenant's, is more urgent, or was there
                    # first, and of those one in eight.
                    before = [
                        other
                        for other in taken
                        if other.precedence.tenant == waiting.precedence.tenant
                        and other.deadline > waiting.deadline
                    ]
                    assert len(before) <= -(-event // AGING)
                    assert all(other.arrived_at <= waiting.arrived_at for other in before)
        elif waiting := next(iter(pending), None):
            drop(pending, waiting)
            calls.remove(waiting)
            del cut[waiting]
        pending.check_invariants()
    cut.update(take(pending, 1_000, now))
    assert cut == {made: made.size for made in calls}, "each item exactly once"
    assert not pending.items


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-2, 2) | st.none(), max_size=80))
def test_the_order_is_priority_then_arrival_and_every_eighth_by_arrival(
    events: list[int | None],
) -> None:
    """None cuts one item; a number is the priority of a call that comes."""
    waiting: list[Call] = [call(priority=1)]  # so that they take turns
    pending = queue(*waiting)
    turns = 0
    for number, priority in enumerate([*events, *[None] * len(events)]):
        if priority is not None:
            waiting.append(call(priority=priority, at=float(number)))
            pending.add(waiting[-1])
        elif waiting:
            # None are counted while all that wait are ordinary.
            turns = 0 if pending._fair is None else turns + 1
            expected = waiting[0]
            if turns % AGING:
                expected = max(waiting, key=lambda made: made.precedence.priority)
            assert take(pending) == [expected]
            waiting.remove(expected)
        if not waiting:
            turns = 0


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_low_priority_is_passed_over_a_bounded_number_of_times(place: int) -> None:
    pending = queue(*(call("low", priority=-9) for _ in range(place)))
    low = call("waits", priority=-9, at=1.0)
    pending.add(low)
    turns = 0
    while low.pending:
        pending.add(call("flood", priority=9, at=2.0))
        take(pending)
        turns += 1
    assert turns <= AGING * (place + 1)


#: Those of two tenants, and which of them has calls of how many items.
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 10.0])
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=5)
EPSILON = 1e-9


def assert_fair(served: Counter[str], weights: dict[str, float], *names: str) -> None:
    for a in names:
        for b in names:
            difference = served[a] / weights[a] - served[b] / weights[b]
            assert abs(difference) <= 1 / weights[a] + 1 / weights[b] + EPSILON


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries({"a": WEIGHTS, "b": WEIGHTS, "c": WEIGHTS}),
    st.fixed_dictionaries({"a": SIZES, "b": SIZES, "c": SIZES}),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
    st.integers(0, 60),
)
def test_tenants_that_wait_get_as_much_for_their_weight(
    weights: dict[str, float], sizes: dict[str, list[int]], rooms: list[int], joins_at: int
) -> None:
    pending = queue(**weights)

    def refill(names: str) -> None:
        for name in names:
            while sum(made.pending for made in pending if made.precedence.tenant == name) < 10:
                for size in sizes[name]:
                    pending.add(call(name, size, tenant=name))

    served: Counter[str] = Counter()
    since: Counter[str] = Counter()
    names = "ab"
    for number, room in enumerate(rooms):
        if number == joins_at:  # one that comes late has not saved up turns
            names = "abc"
        refill(names)
        for made in take(pending, room):
            served[made.reply] += 1
            if names == "abc":
                since[made.reply] += 1
        assert_fair(served, weights, "a", "b")
        assert_fair(since, weights, *names)


def test_a_flood_does_not_starve_the_others() -> None:
    flood = [call("flood", 100, tenant="flood") for _ in range(100)]
    pending = queue(*flood)
    for _ in range(100):
        lone = call("lone")
        pending.add(lone)
        take(pending, 2)
        assert not lone.pending
    assert sum(made.pending for made in flood) == 10_000 - 100, "each has had half of the turns"


def test_a_tenant_that_was_away_has_saved_up_nothing_and_lost_nothing() -> None:
    pending = queue(*(call("a", tenant="a") for _ in range(1_000)), call("b", tenant="b"))
    take(pending, 500)
    for _ in range(20):
        pending.add(call("b", tenant="b"))
    assert Counter(made.reply for made in take(pending, 20)) == pytest.approx(
        {"a": 10, "b": 10}, abs=1
    )
    # Nor can one jump the queue by coming with one call at a time
    served: Counter[object] = Counter()
    for _ in range(100):
        if not any(made.reply == "c" for made in pending):
            pending.add(call("c", tenant="c"))
        served.update(made.reply for made in take(pending))
    assert served["c"] <= 50 + 1


@pytest.mark.parametrize("kind", ["priorities", "deadlines", "tenants"])
def test_calls_that_are_over_do_not_pile_up_behind_a_hung_worker(kind: str) -> None:
    pending = queue(call("waits", priority=1))
    for i in range(10_000):
        late = call(
            priority=i % 3,
            tenant=str(i) if kind == "tenants" else "",
            deadline=100.0,
            has_deadline=kind == "deadlines",
        )
        pending.add(late)
        drop(pending, late)
    turns = pending._fair
    assert turns is not None
    lines = turns._lines.values()
    assert len(turns._heap) + len(turns._new) == len(lines) < 100
    kept = sum(
        len(line._deadlined) + len(line._by_priority) + len(line._by_arrival) + len(line._timed)
        for line in lines
    )
    assert kept <= 200
    assert order(pending) == ["waits"]


@pytest.mark.parametrize("kind", ["priorities", "deadlines"])
@pytest.mark.parametrize(
    "ends", [list, lambda calls: calls[::-1], lambda calls: calls[::3] + calls[1::3] + calls[2::3]]
)
def test_few_calls_that_are_over_stay_however_many_end_at_once(
    kind: str, ends: Callable[[list[Call]], list[Call]]
) -> None:
    most = 0
    for count in range(1, 200):
        pending = CallQueue()
        waiting = [
            call(priority=1, deadline=100.0, has_deadline=kind == "deadlines") for _ in range(count)
        ]
        for each in waiting:
            pending.add(each)
        for over in ends(waiting):
            drop(pending, over)
        fair = pending._fair
        assert fair is not None
        assert not pending.items
        lines = fair._lines.values()
        most = max(most, sum(len(line._by_arrival) for line in lines))
    assert most <= 32
