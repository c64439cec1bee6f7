"""When a batch is cut and of how many items: tables, no clocks."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batcher_walk import make_batcher
from service_streamer import Reason
from service_streamer.batching.batch_scheduler import least_in_time, size_in_time
from service_streamer.batching.batcher import Batcher
from service_streamer.observe.record import ORDINARY, BatchRecord, BatchReport, Call, CallOptions


def teach(batcher: Batcher, size: int, duration: float, now: float) -> None:
    """Have it learn from a batch that it has not cut."""
    batch = BatchRecord(0, 0, [], [None] * size)
    batch.report, batch.back_at = BatchReport(0, duration=duration), now
    batcher.scheduler.answered(batch, 0)


class Workers:
    """A batcher whose workers take ``base + per_unit * cost`` seconds, and callers who return."""

    def __init__(
        self,
        slots: int = 1,
        *,
        batch_size: int = 8,
        max_latency: float = 1.0,
        base: float = 0.01,
        per_unit: float = 0.001,
        is_known: bool = True,
        **options: Any,
    ) -> None:
        self.base, self.per_unit = base, per_unit
        self.batcher = make_batcher(batch_size=batch_size, max_latency=max_latency, **options)
        if is_known:
            for cost in [1, 64, 8, 32] * 10:
                teach(self.batcher, cost, self.duration(cost), 0.0)
        self.now = 0.0
        self.cut: list[BatchRecord] = []  # so far
        self.running: list[tuple[float, BatchRecord]] = []
        self._free_at = [0.0] * slots
        for slot in range(slots):
            self.batcher.worker_ready(slot, 0.0)

    def duration(self, cost: float) -> float:
        return self.base + self.per_unit * cost

    def submit(self, *lengths: float, calls: int = 1, timeout: float = math.inf) -> None:
        """So many calls arrive together, each of one item, or of one for each length."""
        for _ in range(calls):
            call = Call([None] * max(1, len(lengths)), None, more=True)
            call.lengths = lengths or None
            call.deadline = self.now + timeout
            self.begin(self.batcher.call_submitted(call, self.now).batches)
        self.begin(self.batcher.calls_submitted(self.now).batches)
        self.batcher.check_invariants()

    def pass_time(self) -> None:
        self.now = self.batcher.deadline
        self.begin(self.batcher.time_passed(self.now).batches)

    def answer(self) -> int:
        """The next batch comes back; how many calls that answers."""
        self.running.sort(key=lambda entry: entry[0])
        back_at, batch = self.running.pop(0)
        self.now = back_at
        outputs, took = [None] * batch.size, self.duration(batch.cost)
        report = BatchReport(batch.id, outputs, duration=took, slot=batch.slot)
        actions = self.batcher.batch_returned(report, self.now)
        self.begin(actions.batches)
        return len(actions.calls)

    def closed_loop(self, callers: int, rounds: int = 60, gap: float = 0.0002) -> None:
        """Callers return one after the other; at the end all have been answered just now."""
        self.submit(calls=callers)
        for _ in range(rounds):
            for _ in range(self.answer()):
                self.now += gap
                while self.batcher.deadline <= self.now:
                    self.begin(self.batcher.time_passed(self.now).batches)
                self.submit()
            if not self.running:
                self.pass_time()

    def begin(self, batches: Sequence[BatchRecord]) -> None:
        for batch in batches:
            self.cut.append(batch)
            began = max(self.now, self._free_at[batch.slot])
            self._free_at[batch.slot] = began + self.duration(batch.cost)
            self.running.append((self._free_at[batch.slot], batch))

    def sizes(self, last: int = 10) -> Counter[int]:
        return Counter(batch.size for batch in self.cut[-last:])

    @property
    def reason(self) -> Reason:
        return self.cut[-1].reason


def four_callers(**options: float) -> Workers:
    """One worker and four callers, who have learned to go together, and were answered just now."""
    workers = Workers(**options)
    workers.closed_loop(4)
    assert workers.sizes() == {4: 10}
    assert workers.answer() == 4
    return workers


def shared() -> Workers:
    workers = Workers(slots=2, is_known=False)
    workers.submit(calls=3)
    workers.cut.pop()  # the last has what is left
    return workers


def of_four(count: int) -> Workers:
    """So many of the four callers have come back."""
    workers = four_callers()
    for _ in range(count):
        workers.now += 0.0002
        workers.submit()
    return workers


def late() -> Workers:
    workers = of_four(3)
    workers.pass_time()
    return workers


def too_long() -> Workers:
    workers = four_callers(max_latency=0.017)
    workers.submit(calls=4)
    workers.submit()  # and this one waits since the batch began
    workers.answer()
    workers.pass_time()
    return workers


def urgent() -> Workers:
    workers = four_callers()
    workers.submit(timeout=0.9 * workers.duration(1))
    return workers


def again() -> Workers:
    workers = Workers()
    workers.submit(calls=2)
    [batch] = workers.cut
    workers.batcher.worker_lost(batch.slot, "died", 0.1)
    workers.cut += workers.batcher.worker_ready(1, 0.2).batches
    return workers


@pytest.mark.parametrize(
    ("situation", "size", "reason"),
    [
        (shared, 2, Reason.SHARE),
        (lambda: of_four(4), 4, Reason.COMPANY),
        (late, 3, Reason.LATE),
        (too_long, 1, Reason.MAX_LATENCY),
        (urgent, 1, Reason.DEADLINE),
        (again, 1, Reason.AGAIN),
    ],
)
def test_each_reason_is_given_where_it_holds(
    situation: Callable[[], Workers], size: int, reason: Reason
) -> None:
    workers = situation()
    assert (workers.cut[-1].size, workers.reason) == (size, reason)


@pytest.mark.parametrize("what", ["an urgent call", "all have left", "time"])
def test_what_is_not_as_expected_is_decided_on(what: str) -> None:
    """While the others of 32 callers are waited for."""
    workers = Workers(batch_size=64)
    workers.closed_loop(32)
    workers.answer()
    batcher = workers.batcher

    def come(deadline: float = math.inf) -> Call:
        workers.now += 0.0001
        call = Call([None], None)
        call.options = CallOptions(has_deadline=True) if deadline < math.inf else ORDINARY
        call.deadline = deadline
        workers.begin(batcher.call_submitted(call, workers.now).batches)
        return call

    calls = [come() for _ in range(3)]
    due = batcher.deadline
    assert due < math.inf
    if what == "an urgent call":
        come(deadline=due + workers.duration(1))  # four take longer
        assert batcher.deadline < due
    elif what == "all have left":
        for call in calls:
            batcher.withdraw(call)
        come()
        assert batcher.deadline <= due
    else:
        workers.now = due
        come()
        workers.pass_time()
        assert workers.cut[-1].size == 4


@pytest.mark.parametrize(
    ("options", "before", "items", "size", "reason"),
    [
        ({}, 0, 9, 8, Reason.FULL),
        ({}, 1, 8, 8, Reason.FULL),  # sent ahead
        ({}, 0, 1, 1, Reason.ALONE),
        ({"per_unit": 0.1}, 0, 7, 1, Reason.PAYS),
        ({"max_batch_cost": 3.0}, 0, 5, 3, Reason.COST),  # an item without a length counts one
        ({"max_batch_cost": 10.0}, 0, [4.0, 4.0, 4.0], 2, Reason.COST),
        ({}, 0, [4.0, 40.0], 1, Reason.PADDING),
        ({}, 0, [4.0, 4.0], 2, Reason.ALONE),
        ({"batch_size": 64, "base": 0.00601}, 0, [3.0] * 600, 32, Reason.LONG),  # 17 times the base
    ],
)
def test_items_that_come_together_are_cut_as_it_pays(
    options: dict[str, float], before: int, items: int | list[float], size: int, reason: Reason
) -> None:
    workers = Workers(has_lengths=isinstance(items, list), **options)  # type: ignore[arg-type]
    workers.submit(calls=before)
    if isinstance(items, list):
        workers.submit(*items)
    else:
        workers.submit(calls=items)
    first = workers.cut[min(before, 1)]
    assert (first.size, first.reason) == (size, reason)


def learned(base: float, per_unit: float, noise: float = 0.0) -> Batcher:
    """A batcher that has seen many batches; of the later half each other one took longer."""
    batcher = make_batcher(batch_size=8, max_latency=1.0)
    for number in range(600):
        size = (1, 8, 4)[number % 3]
        duration = (base + per_unit * size) * (1.0 + (number >= 300) * noise * (-1) ** number)
        teach(batcher, size, duration, duration)
    return batcher


def submit(batcher: Batcher, timeouts: Sequence[float]) -> Sequence[BatchRecord]:
    """Calls of one item each arrive together at 0, and with these timeouts."""
    batches: list[BatchRecord] = []
    for timeout in timeouts:
        call = Call([None], None, more=True)
        call.deadline = timeout
        batches += batcher.call_submitted(call, 0.0).batches
    return [*batches, *batcher.calls_submitted(0.0).batches]


@pytest.mark.parametrize(("noise", "waits_until"), [(0.0, 0.0048), (0.05, 0.0036)])
def test_waiting_ends_as_long_before_a_deadline_as_batches_differ(
    noise: float, waits_until: float
) -> None:
    batcher = learned(0.01, 0.001, noise)
    batcher.worker_ready(0, 0.0)
    submit(batcher, [math.inf] * 8)
    submit(batcher, [0.018] * 2)
    # Two of 12 ms wait for the next turn of two workers, which is 7.5 ms after the first one.
    assert not batcher.worker_ready(1, 0.0).batches
    assert batcher.deadline == pytest.approx(waits_until, abs=4e-4)


@pytest.mark.parametrize(("noise", "size"), [(0.0, 4), (0.9, 8)])
def test_batches_are_not_smaller_by_what_explains_no_durations(noise: float, size: int) -> None:
    batcher = learned(0.0035, 0.0027, noise)
    submit(batcher, [math.inf] * 8)
    assert [batch.size for batch in batcher.worker_ready(0, 0.0).batches] == [size]


@pytest.mark.parametrize(("base", "size"), [(0.01, 7), (0.001, 2)])
def test_a_batch_that_is_mostly_base_is_not_cut_smaller_for_a_deadline(
    base: float, size: int
) -> None:
    batcher = learned(base, 0.001)
    submit(batcher, [0.0065, *[math.inf] * 7])
    # The first call gives way, or the others wait.
    assert [batch.size for batch in batcher.worker_ready(0, 0.001).batches] == [size]


@pytest.mark.parametrize(
    ("size", "left", "expected"),
    [
        (4, 100.0, 4),  # there is time
        (64, 100.0, 29),  # 60 of 100 seconds, of which the base takes one
        (20, 17.0, 8),  # more would make the first one late
        (20, 3.5, 20),  # to save it would cost a third of the throughput
        (20, 1.5, 20),  # it is late in any case
    ],
)
def test_a_batch_is_bounded_by_deadlines(size: int, left: float, expected: int) -> None:
    assert size_in_time(size, 1.0, 2.0, 100.0, left) == expected


@pytest.mark.parametrize(("deadline", "size"), [(math.inf, 8), (0.2, 8), (0.1, 0)])
def test_nothing_is_sent_ahead_with_a_near_deadline(deadline: float, size: int) -> None:
    batcher = learned(0.01, 0.001)  # eight items take 18 ms
    batcher.worker_ready(0, 0.0)
    submit(batcher, [math.inf] * 8)
    assert sum(batch.size for batch in submit(batcher, [deadline] * 8)) == size


@pytest.mark.parametrize(
    ("deadline", "size"),
    [
        (30.0, 8),  # all are back in time
        (16.5, 6),
        (13.01, 3),
        (12.9, 7),  # two are too few, so the first call gives way
    ],
)
def test_a_batch_shrinks_for_its_first_call_if_that_is_worth_it(deadline: float, size: int) -> None:
    least = least_in_time(8, 10.0, 1.0)
    assert least == 3, "three compute more than 0.4 times as much a second as eight"
    assert least_in_time(8, 2.0, 1.0) == 1, "where items are most of it any size is worth it"
    batcher = learned(10.0, 1.0)
    batcher.worker_ready(0, 0.0)
    submit(batcher, [math.inf] * 8)
    submit(batcher, [deadline, *[math.inf] * 7])
    assert [batch.size for batch in batcher.worker_ready(1, 0.0).batches] == [size]


def test_an_idle_worker_learns_from_a_call_that_seems_to_be_late() -> None:
    """The model was slow, and is not any more: without a batch that would never be known."""
    workers = Workers(base=1.0, per_unit=0.1)
    for _ in range(20):
        workers.submit(timeout=0.5)
        workers.answer()
    assert len(workers.cut) == 20


def test_a_lone_caller_is_never_kept_waiting() -> None:
    workers = Workers()
    workers.closed_loop(1)
    assert {(batch.size, batch.reason) for batch in workers.cut} == {(1, Reason.ALONE)}
    assert workers.now == pytest.approx(60 * (workers.duration(1) + 0.0002), rel=0.03)


@pytest.mark.parametrize("callers", [2, 3, 5, 8])
def test_callers_in_a_closed_loop_go_together(callers: int) -> None:
    workers = Workers()
    workers.closed_loop(callers)
    assert workers.sizes() == {callers: 10}


@pytest.mark.parametrize(("round_trip", "go_together"), [(0.0, False), (0.5, True)])
def test_callers_that_are_far_away_are_waited_for_by_their_round_trip(
    round_trip: float, go_together: bool
) -> None:
    workers = Workers(base=1.0, round_trip=round_trip, max_latency=10.0)
    workers.submit(calls=8)
    for _ in range(40):
        for number in range(workers.answer()):
            workers.now += 0.0 if number else 0.6
            workers.submit()
        while not workers.running:
            workers.pass_time()
    assert (workers.sizes() == {8: 10}) is go_together


def test_burst_is_learned_and_waited_for() -> None:
    workers = Workers(base=1.0, batch_size=16)
    for burst in range(20):
        workers.now = 10.0 * burst
        for _ in range(8):
            workers.submit()
            workers.now += 0.001
        while workers.running or workers.batcher.pending_items:
            workers.answer() if workers.running else workers.pass_time()
    assert workers.cut[0].size == 1
    assert workers.cut[-1].size == 8


@pytest.mark.parametrize("callers", [8, 12, 16])
def test_several_workers_share_the_callers(callers: int) -> None:
    workers = Workers(slots=4, base=0.01, per_unit=0.0001)
    workers.closed_loop(callers, rounds=200)
    used = Counter(batch.slot for batch in workers.cut[-40:])
    assert len(used) == 4
    assert max(used.values()) <= 2 * min(used.values()), "none is idle while others have it all"
    mean = sum(batch.size for batch in workers.cut[-40:]) / 40
    assert mean >= 0.6 * callers / 4


def test_callers_that_are_gone_are_not_waited_for_any_more() -> None:
    workers = four_callers()
    waited = 0.0
    for _ in range(20):
        began = workers.now = workers.now + 0.0002
        workers.submit()
        if not workers.running:
            workers.pass_time()
        waited += workers.now - began
        workers.answer()
    assert waited <= workers.duration(4), "no more than a batch's time, in all"
    assert workers.reason is Reason.ALONE


@pytest.mark.parametrize("load", [0.5, 1.0, 4.0])
def test_calls_by_chance_are_hardly_kept_waiting(load: float) -> None:
    """So many arrive in the time that one takes."""
    rng = random.Random(0)
    workers = Workers(batch_size=64)
    kept = 0.0
    arrives_at = 0.0
    for _ in range(1_000):
        arrives_at += rng.expovariate(load / workers.duration(1))
        while workers.running and min(entry[0] for entry in workers.running) <= arrives_at:
            workers.answer()
        while workers.batcher.deadline <= arrives_at:
            workers.pass_time()
        workers.now = arrives_at
        workers.submit()
        if not workers.running:
            kept += workers.batcher.deadline - workers.now
    assert kept <= 0.1 * 1_000 * workers.duration(1)


def test_where_nothing_is_known_a_batch_of_lengths_has_few_items() -> None:
    workers = Workers(batch_size=64, has_lengths=True, is_known=False)
    workers.submit(*[5.0] * 100)
    assert (workers.cut[0].size, workers.cut[0].reason) == (8, Reason.TRIED)


def test_items_of_no_length_are_computed_together() -> None:
    workers = Workers(batch_size=64, has_lengths=True, is_known=False)
    workers.submit(*[0.0] * 200)
    while workers.running:
        workers.answer()
    sizes = [batch.size for batch in workers.cut]
    assert sizes[:3] == [8, 8, 64]  # the second was sent ahead
    assert sum(sizes) == 200


# -- one decision


def test_what_a_call_with_a_deadline_costs_does_not_grow_with_the_tenants() -> None:
    calls = [0, 0]  # of functions, with 10 tenants and with 1,000
    for is_many, tenants in enumerate((10, 1_000)):
        batcher = learned(0.01, 0.001)
        for number in range(2_000):
            options = CallOptions(tenant=str(number % tenants))
            batcher.call_submitted(Call([None], None, options=options), 0.0)

        def count(_frame: object, event: str, _arg: object, at: int = is_many) -> None:
            calls[at] += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for number in range(2_000):
                call = Call([None], None, options=CallOptions(tenant=str(number % tenants)))
                call.deadline = 4.0
                batcher.hopeless_for(call, 0.0)
        finally:
            sys.setprofile(before)
    assert calls[1] < 2 * calls[0], "though all tenants were looked at now and then"
