"""Which worker is replaced for what it fails, and which is not: tables, and walks of a batcher."""

from __future__ import annotations

import functools
import heapq
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from service_streamer import BadMessage, InvalidInput, UnpicklableItem
from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from service_streamer.supervision.health import INTERVAL, LONGEST_TRIAL, TRIALS, Health, Quarantine
from service_streamer.workers.protocol import Failure

# -- rows and trials


class Over:
    """A trial that has ended."""

    def __init__(self, *, failed: int = 0, runs: int = 1) -> None:
        self.parts, self.runs, self.failed, self.is_void = 0, runs, failed, False


AGAINST, FOR, VOID = {"failed": 0}, {"failed": 1}, {"runs": 0}


def try_worker(health: Health, outcome: dict[str, int], slot: int = 1, now: float = 0.0) -> Any:
    """Fail batches until there is a trial; how many it took, and what came of the trial."""
    failures = 1
    while not health.failed(slot, now):
        failures += 1
    health.begin_trial(slot, Over(**outcome), now)
    return failures, *health.judge(now)


@pytest.mark.parametrize("outcome", [FOR, VOID])
def test_three_trials_against_it_condemn_a_worker_in_any_case(outcome: dict[str, int]) -> None:
    health = Health()
    assert try_worker(health, AGAINST) == (2, [1], [])
    assert try_worker(health, outcome)[1:] == ([1], [])
    assert try_worker(health, AGAINST)[1:] == ([1], [])
    assert try_worker(health, AGAINST) == (1, [], [1])


def test_what_fails_elsewhere_too_is_looked_at_less_and_less_often() -> None:
    health = Health()
    told = [try_worker(health, FOR) for _ in range(9)]
    assert told == [(n, [1], []) for n in (2, 2, 4, 8, 16, 32, 64, 64, 64)]


def test_a_lost_worker_is_forgotten() -> None:
    health = Health()
    for _ in range(2):
        try_worker(health, AGAINST)
    health.failed(1, 0.0)
    health.begin_trial(1, Over(), 0.0)
    health.lost(1, 0.0, had_new_items=False)
    assert health.judge(0.0) == ([], [])
    assert not health.failed(1, 0.0), "of a new worker nothing is known"


@pytest.mark.parametrize(
    ("others", "runs", "failed", "is_over"),
    [
        ("oooooooo", 8, 0, True),  # eight computed
        ("ooooooo", 7, 0, False),
        ("ooof", 3, 1, True),
        ("f", 0, 1, True),
    ],
)
def test_a_quarantine_counts_what_the_others_do(
    others: str, runs: int, failed: int, is_over: bool
) -> None:
    health = Health()
    trial = Quarantine()
    health.begin_trial(1, trial, 0.0)
    for outcome in others:
        if outcome == "o":
            health.computed(2)
        else:
            health.failed(2, 0.0)
    assert (trial.runs, trial.failed, trial.parts == 0) == (runs, failed, is_over)


def test_no_worker_answers_when_ten_batches_in_a_row_failed_lately() -> None:
    health = Health()
    for slot in range(10):
        assert not health.is_failing(5.0)
        if slot % 2:
            health.failed(slot, 5.0)
        else:
            health.lost(slot, 5.0, had_new_items=True)
    assert health.is_failing(64.9)
    assert not health.is_failing(65.0), "or a service without calls would never be ready again"
    health.failed(1, 100.0)
    assert health.is_failing(100.0)
    health.computed(7)
    assert not health.is_failing(100.0)


# -- a batcher: what is found out with real traffic


class Error:
    """A failure, opaque to a batcher."""

    def __init__(self, *, blames_input: bool = False) -> None:
        self.blames_input = blames_input


class World:
    """Callers that make their next call when the last is answered, over workers of any kind.

    Args:
        fails: whether a worker fails a batch, by its slot and items.
        takes: seconds for a batch, likewise.

    Attributes:
        told: how many calls of each caller were answered and failed.
        condemned: when which worker was to be replaced.
    """

    def __init__(
        self,
        worker_num: int,
        fails: Callable[[int, list[str]], bool],
        takes: Callable[[int, list[str]], float],
        error: Callable[[], Any] = Error,
        **options: Any,
    ) -> None:
        self.batcher = Batcher(batch_size=64, max_latency=0.0, **options)
        self.now = 0.0
        self.told: Counter[tuple[str, str]] = Counter()
        self.condemned: list[tuple[float, int]] = []
        self._fails, self._takes, self._error = fails, takes, error
        self._events: list[tuple[float, int, BatchRecord, list[str]]] = []
        self._ids = itertools.count()
        self._next_slot = worker_num
        self._replaced: set[int] = set()
        for slot in range(worker_num):
            self._obey(self.batcher.worker_ready(slot, 0.0))

    def call(self, *callers: str) -> None:
        for caller in callers:
            self._obey(self.batcher.call_submitted(Call([caller], caller), self.now))

    def _obey(self, actions: Any) -> None:
        for batch in actions.batches:
            items, batch.payloads = batch.payloads, []
            back_at = self.now + self._takes(batch.slot, items)
            heapq.heappush(self._events, (back_at, next(self._ids), batch, items))
        for slot in actions.condemned:
            self.condemned.append((self.now, slot))
            self._replaced.add(slot)
            self._obey(self.batcher.worker_retiring(slot, self.now))
            self._obey(self.batcher.worker_lost(slot, None, self.now))
            self._obey(self.batcher.worker_ready(self._next_slot, self.now))
            self._next_slot += 1
        for call in actions.calls:
            self.told[call.reply, "failed" if call.failure else "answered"] += 1
        for call in actions.calls:
            self.call(call.reply)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            if next(self._ids) % 64 == 0:
                self.batcher.check_invariants()
            self.now, _, batch, items = heapq.heappop(self._events)
            if batch.slot in self._replaced:
                continue
            told: dict[str, Any] = {"outputs": items, "duration": 0.1}
            if self._fails(batch.slot, items):
                told = {"failure": self._error()}
            report = BatchReport(batch.id, slot=batch.slot, **told)
            self._obey(self.batcher.batch_returned(report, self.now))


def is_bad(items: list[str]) -> bool:
    return any(item.startswith("bad") for item in items)


def duration(slot: int, items: list[str]) -> float:
    return 0.005 if is_bad(items) else 0.1


GOOD = [f"good {i}" for i in range(64)]
KINDS = pytest.mark.parametrize(
    "options", [{}, {"isolate_errors": False, "max_attempts": 1}], ids=["retry", "no retry"]
)


@KINDS
@pytest.mark.parametrize(("good", "bad"), [(0, 2), (1, 8), (3, 2), (8, 8), (64, 1)])
def test_bad_callers_have_no_worker_replaced(good: int, bad: int, options: dict[str, Any]) -> None:
    world = World(4, lambda _, items: is_bad(items), duration, **options)
    world.call(*GOOD[:good], *(f"bad {i}" for i in range(bad)))
    world.run(5.0)
    assert world.condemned == []
    if not good:
        assert world.batcher.health.is_failing(world.now)


@KINDS
@pytest.mark.parametrize("good", [1, 4, 64])
def test_one_that_fails_everything_is_replaced_once(good: int, options: dict[str, Any]) -> None:
    world = World(
        4, lambda slot, items: slot == 2, lambda slot, _: 0.005 if slot == 2 else 0.1, **options
    )
    world.call(*GOOD[:good])
    world.run(12.0)
    assert [slot for _, slot in world.condemned] == [2]
    assert world.condemned[0][0] < 10.0
    failed = sum(count for (_, how), count in world.told.items() if how == "failed")
    if not options:
        assert failed <= 2
    assert not world.batcher.health.is_failing(world.now)


@KINDS
def test_one_that_fails_everything_is_replaced_beside_a_bad_caller(options: dict[str, Any]) -> None:
    world = World(4, lambda slot, items: slot == 2 or is_bad(items), duration, **options)
    world.call(*GOOD[:8], "bad 1")
    world.run(60.0)
    if options:  # then it is held back for most of the time at least
        assert {slot for _, slot in world.condemned} <= {2}
    else:
        assert [slot for _, slot in world.condemned] == [2]
        good = [(how, n) for (who, how), n in world.told.items() if who.startswith("good")]
        assert sum(n for how, n in good if how == "failed") <= 8


@pytest.mark.parametrize("share", [1, 5, 20])
def test_where_bad_items_are_everywhere_workers_are_not_held_back(share: int) -> None:
    rng = random.Random(share)
    world = World(4, lambda _, items: is_bad(items), duration)
    held_back = batches = 0
    for i in range(64):
        world.call(f"{'bad' if rng.random() < share / 100 else 'good'} {i}")
    for second in range(200):
        world.run(second / 10)
        held_back += len(world.batcher.health.trials)
        batches += 4
    assert world.condemned == []
    assert held_back <= 0.1 * batches


def test_two_that_fail_everything_are_replaced_a_minute_apart() -> None:
    world = World(4, lambda slot, _: slot in (1, 2), duration)
    world.call(*GOOD[:16])
    world.run(100.0)
    (first, _), (second, _) = world.condemned
    assert {slot for _, slot in world.condemned} == {1, 2}
    assert INTERVAL <= second - first < INTERVAL + 1
    assert sum(n for (_, how), n in world.told.items() if how == "failed") <= 2 * 64


@pytest.mark.parametrize(
    ("worker_num", "fails", "blames_input", "is_failing"),
    [
        pytest.param(4, {0, 1, 2, 3}, False, True, id="all fail"),
        pytest.param(1, {0}, False, True, id="a lone one"),
        pytest.param(2, {1}, True, False, id="inputs are to blame"),
    ],
)
def test_workers_are_left_alone_when_no_other_one_does_better(
    worker_num: int, fails: set[int], blames_input: bool, is_failing: bool
) -> None:
    error = functools.partial(Error, blames_input=blames_input)
    world = World(worker_num, lambda slot, _: slot in fails, duration, error)
    world.call(*GOOD)
    world.run(30.0)
    assert world.condemned == []
    assert world.batcher.health.is_failing(world.now) == is_failing


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (InvalidInput("x"), True),
        (UnpicklableItem("x"), True),
        (BadMessage("x"), True),
        (ValueError("x"), False),
        (type("Ours", (InvalidInput,), {})("x"), True),
    ],
)
def test_which_errors_blame_an_input(error: Exception, blames: bool) -> None:
    assert Failure.caught(error).blames_input is blames
    assert pickle.loads(pickle.dumps(Failure.caught(error))).blames_input is blames


def failed(batcher: Batcher, batch: BatchRecord) -> Actions:
    return batcher.batch_returned(BatchReport(batch.id, failure=Error(), slot=batch.slot), 0.0)


def submit(batcher: Batcher) -> list[BatchRecord]:
    """The batches that a call of one item has begin."""
    return batcher.call_submitted(Call(["x"], None), 0.0).batches


def batcher_of_two(**options: Any) -> Batcher:
    batcher = Batcher(max_latency=0.0, **options)
    for slot in (0, 1):
        batcher.worker_ready(slot, 0.0)
    return batcher


def holding_back(**options: Any) -> tuple[Batcher, int]:
    """A batcher that holds back one of its two workers, and the slot of that."""
    batcher = batcher_of_two(**options)
    for _ in range(3):
        [batch] = submit(batcher)
        failed(batcher, batch)
    [held_back] = batcher.health.trials
    return batcher, held_back


# -- one that is held back


@pytest.mark.parametrize("other", ["retires", "is lost"])
def test_one_that_is_held_back_goes_on_at_once_when_no_other_takes_batches(other: str) -> None:
    batcher, held_back = holding_back(batch_size=2)
    for _ in range(6):
        submit(batcher)
    if other == "retires":
        actions = batcher.worker_retiring(1 - held_back, 0.0)
    else:
        actions = batcher.worker_lost(1 - held_back, None, 0.0)
        assert not batcher.health.trials
    assert [batch.slot for batch in actions.batches][:1] == [held_back]
    batcher.check_invariants()


def test_one_that_is_held_back_stays_so_if_it_is_kept() -> None:
    batcher, held_back = holding_back(batch_size=2)
    batcher.worker_retiring(held_back, 0.0)
    batcher.worker_kept(held_back, 0.0)
    for _ in range(9):
        assert held_back not in [batch.slot for batch in submit(batcher)]
    batcher.check_invariants()


def test_what_fails_after_its_callers_have_gone_is_not_held_against_the_worker_before() -> None:
    batcher = batcher_of_two(batch_size=1)
    for _ in range(2 * TRIALS):
        while not batcher.health.trials:
            call = Call(["x"], None)
            [batch] = batcher.call_submitted(call, 0.0).batches
            again = failed(batcher, batch).batches
        [tried] = batcher.health.trials
        assert again[0].slot != tried
        batcher.call_expired(call)
        assert not failed(batcher, again[0]).condemned
        assert not batcher.health.trials


@KINDS
def test_one_is_not_held_back_for_ever_while_the_others_hang(options: dict[str, Any]) -> None:
    batcher, tried = holding_back(batch_size=1, **options)
    for _ in range(8):  # the other worker begins with one of them, and hangs
        submit(batcher)
    assert batcher.deadline == LONGEST_TRIAL
    assert not batcher.time_passed(LONGEST_TRIAL - 0.1).batches
    batches = batcher.time_passed(LONGEST_TRIAL).batches
    assert [batch.slot for batch in batches][:1] == [tried]
    assert batcher.deadline > LONGEST_TRIAL
