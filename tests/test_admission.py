"""Which calls are refused when they come, since they could not be in time: in simulated time."""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from batcher_walk import make_batcher
from service_streamer.batching.batcher import Actions
from service_streamer.observe.record import BatchRecord, BatchReport, Call

#: What a batch costs beside its items, and what each unit of length costs, seconds.
BASE, UNIT = 0.005, 5e-5

Lengths = Sequence[float]


class World:
    """A scheduler with workers whose batches take as long as they are said to.

    Args:
        noise: a batch takes longer or less long by at most this share.

    Attributes:
        took: how long each call took that was answered, in their order.
        late: how many were given up when their time had ended.
    """

    def __init__(
        self, *, workers: int = 1, has_lengths: bool = True, batch_size: int = 32, noise: float = 0
    ) -> None:
        self.now = 0.0
        self.took: list[float] = []
        self.late = 0
        self._has_lengths, self._noise, self._random = has_lengths, noise, Random(1)
        self._batcher = make_batcher(
            batch_size=batch_size, max_latency=0.01, has_lengths=has_lengths
        )
        self._back: list[tuple[float, int, float, BatchRecord]] = []
        self._ends: list[tuple[float, int, Call]] = []
        self._free_at = dict.fromkeys(range(workers), 0.0)
        for slot in range(workers):
            self._do(self._batcher.worker_ready(slot, 0.0))

    def offer(self, lengths: Lengths, timeout: float) -> bool:
        """A call comes; whether it is accepted."""
        call = self._call(lengths, timeout)
        if self._batcher.hopeless_for(call, self.now):
            return False
        heapq.heappush(self._ends, (call.deadline, id(call), call))
        self._do(self._batcher.call_submitted(call, self.now))
        return True

    def lose_worker(self, slot: int) -> None:
        """The worker is lost with what it computes."""
        self._back = [event for event in self._back if event[3].slot != slot]
        heapq.heapify(self._back)
        self._do(self._batcher.worker_lost(slot, "died", self.now))

    @property
    def refused_items(self) -> int:
        return self._batcher.figures.refused_items

    def would_take(self, lengths: Lengths, timeout: float) -> float:
        """How long a call takes that comes now, if no other comes after it and none is given up."""
        return copy.deepcopy(self).take_last(lengths, timeout)

    def take_last(self, lengths: Lengths, timeout: float) -> float:
        call = self._call(lengths, timeout)
        for each in [call, *(other for _, _, other in self._ends)]:
            each.deadline = math.inf
        self._ends.clear()
        self._do(self._batcher.call_submitted(call, self.now))
        while not call.is_over:
            self.run(self._next())
        return self.now - call.arrived_at

    def run(self, until: float = math.inf) -> None:
        """All that happens until then; without that, until nothing is left to be done."""
        while (due := self._next()) < math.inf and due <= until:
            self.now = due
            if self._back and self._back[0][0] <= due:
                _, _, took, batch = heapq.heappop(self._back)
                outputs = [None] * batch.size
                report = BatchReport(batch.id, outputs, duration=took, slot=batch.slot)
                self._do(self._batcher.batch_returned(report, due))
            elif self._ends and self._ends[0][0] <= due:
                call = heapq.heappop(self._ends)[2]
                self.late += self._batcher.withdraw(call, has_expired=True)
            else:
                self._do(self._batcher.time_passed(due))
        if until < math.inf:
            self.now = until

    def _next(self) -> float:
        firsts = [events[0][0] for events in (self._back, self._ends) if events]
        return max(self.now, min([*firsts, self._batcher.deadline]))

    def _call(self, lengths: Lengths, timeout: float) -> Call:
        call = Call([None] * len(lengths), None)
        call.lengths = lengths if self._has_lengths else None
        call.arrived_at, call.deadline = self.now, self.now + timeout
        return call

    def _do(self, actions: Actions) -> None:
        for call in actions.calls:
            if call.unanswered:
                self.late += 1
            else:
                self.took.append(self.now - call.arrived_at)
        for batch in actions.batches:
            lengths = [max(call.lengths[a:b]) for call, a, b in batch.spans if call.lengths]
            took = BASE + UNIT * batch.size * (max(lengths, default=100.0))
            took *= 1.0 + self._random.uniform(-self._noise, self._noise)
            begins = max(self.now, self._free_at[batch.slot])
            self._free_at[batch.slot] = begins + took
            heapq.heappush(self._back, (begins + took, batch.id, took, batch))


def learned(**options: int) -> World:
    """It is known what batches cost, of items of up to 1,000 units, and nothing waits."""
    world = World(**options)
    lengths = (50.0, 1000.0) if options.get("has_lengths", True) else (1.0,)
    for size in (1, 2, 4, 8, 16, 32, 4, 20, 8, 32, 16, 3, 9, 25):
        for length in lengths:
            assert world.offer([length] * size, 60.0)
            world.run()
    return world


#: The lengths of the items of a call, by the kind of load.
LOADS: dict[str, Callable[[Random], Lengths]] = {
    "alike": lambda _: [100.0],
    "short and long": lambda random: [random.choice((10.0, 1000.0))],
    "small and large": lambda random: [100.0] * random.choice((1, 1, 1, 1, 100)),
    "all sizes": lambda random: [
        random.choice((10, 50, 200, 2000)) * random.uniform(0.5, 1.5)
        for _ in range(random.choice((1, 1, 1, 4)))
    ],
}


@pytest.mark.long
def test_of_the_refused_calls_nearly_all_would_have_been_late() -> None:
    """Even if no other came after them; what is spared by giving others up is not reckoned with."""
    random, timeout = Random(3), 2.0
    would_take = []
    for lengths_of in LOADS.values():
        world, refused = World(noise=0.125), 0
        for _ in range(1500):
            lengths = lengths_of(random)
            if not world.offer(lengths, timeout):
                refused += 1
                if refused % 10 == 1:
                    would_take.append(world.would_take(lengths, timeout))
            world.run(world.now + random.expovariate(3.0) * UNIT * sum(lengths))
        assert refused >= 50
    late = sum(took > timeout for took in would_take)
    assert late >= 0.98 * len(would_take)


@pytest.mark.parametrize("has_lengths", [True, False])
def test_nothing_is_refused_before_it_is_known_what_batches_cost(has_lengths: bool) -> None:
    world = World(has_lengths=has_lengths)
    assert all(world.offer([100.0], 0.1) for _ in range(1000))
    assert world.offer([100.0] * 1000, 0.1)


def test_call_is_refused_that_takes_longer_than_its_time_by_itself() -> None:
    world = learned()
    assert not world.offer([1000.0], 0.03)
    assert not world.refused_items, "more workers would not help"
    assert world.offer([1000.0], 0.07)
    world.run()
    assert not world.offer([900.0] * 20, 0.5), "many items, each of which is in time"
    assert world.offer([900.0] * 20, 2.0)
    assert world.late == 0


def test_large_call_is_refused_also_where_items_have_no_lengths() -> None:
    world = learned(has_lengths=False)
    assert not world.offer([1.0] * 400, 1.0)
    assert world.offer([1.0] * 400, 3.0)
    world.run()
    assert world.late == 0


@pytest.mark.parametrize("has_lengths", [True, False])
def test_large_call_is_not_refused_before_there_were_large_batches(has_lengths: bool) -> None:
    """A device that computes one item as slowly as ten would make it look hopeless for ever."""
    world = World(has_lengths=has_lengths)
    for number in range(40):
        assert world.offer([100.0] * (1 + number % 2), 60.0)
        world.run()
    assert world.offer([100.0] * 640, 0.1)


def test_text_that_is_longer_than_any_so_far_is_not_taken_for_slower() -> None:
    world = learned()
    assert world.offer([5000.0], 0.07)


@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_calls_may_wait_as_before_while_all_workers_restart(workers: int) -> None:
    world = learned(workers=workers)
    accepted = []
    for _ in range(2):
        accepted.append(0)
        while accepted[-1] < 10_000 and world.offer([100.0], 1.0):
            accepted[-1] += 1
        for slot in range(workers):
            world.lose_worker(slot)
        world.run(world.now + 2.0)
    assert accepted[0] < 10_000
    assert accepted[1] == pytest.approx(accepted[0], rel=0.2)


def test_refused_call_is_tried_if_nothing_was_computed_since() -> None:
    """Else a model that became faster would be taken for a slow one for ever."""
    world = learned()
    tries = []
    for _ in range(4):
        tries.append(world.offer([1000.0], 0.03))
        world.run()
    assert tries == [False, True, False, True]


def test_short_text_is_accepted_behind_long_ones_of_which_one_more_is_not() -> None:
    world = learned()
    for _ in range(60):
        assert world.offer([9000.0], 60.0)
    assert not world.offer([9000.0], 10.0)
    assert world.offer([10.0], 5.0)
    world.run()
    assert world.late == 0


def test_large_call_counts_as_two_batches_of_those_that_may_wait() -> None:
    """Others overtake the rest of it."""
    batcher = make_batcher(batch_size=8, max_latency=0.01, max_pending=100)
    large = Call([None] * 100, None)
    batcher.call_submitted(large, 0.0)
    assert batcher.queue.counted == 16
    assert batcher.has_room_for(84)
    assert not batcher.has_room_for(101), "more than ever may wait"
    for _ in range(84):
        batcher.call_submitted(Call([None], None), 0.0)
    assert not batcher.has_room_for(1)
    batcher.withdraw(large)
    assert batcher.has_room_for(16)
    batcher.check_invariants()


def test_rounding_of_very_different_lengths_refuses_no_call_with_an_error() -> None:
    """Of items without a length nothing but an error of rounding may be left, as in this order."""
    random, held, now = Random(7), [], 0.0
    batcher = make_batcher(batch_size=2, max_latency=0.01, has_lengths=True)
    batcher.begin_steps(1)
    batcher.worker_ready(0, 0.0)
    for _ in range(400):
        now += 0.01
        size = random.choice((1, 1, 3))
        call = Call([None] * size, None)
        call.lengths = [random.choice((0.0, 0.0, 0.1, 0.7, 1e16)) for _ in range(size)]
        call.arrived_at, call.deadline = now, now + 20.0
        assert batcher.hopeless_for(call, now) >= 0.0
        held += batcher.call_submitted(call, now).batches
        while held and random.random() < 0.55:
            batch = held.pop(0)
            report = BatchReport(batch.id, [None], duration=0.02, slot=0)
            held += batcher.batch_returned(report, now).batches
