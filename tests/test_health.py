"""Which worker is replaced for what it fails, and which is not: tables, and walks of a batcher."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from bad_items import Service
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


def duration(batch: BatchRecord) -> float:
    return 0.005 if "bad" in batch.payloads else 0.1


def service_of(good: int, bad: int = 0, **options: Any) -> Service:
    """Four workers for so many callers; those that only send bad items come last."""
    given: dict[str, Any] = {"workers": 4, "seconds": duration, "max_latency": 0.0, **options}
    return Service(lambda caller: "good" if caller < good else "bad", callers=good + bad, **given)


KINDS = pytest.mark.parametrize(
    "options", [{}, {"isolate_errors": False, "max_attempts": 1}], ids=["retry", "no retry"]
)


@KINDS
@pytest.mark.parametrize(("good", "bad"), [(0, 2), (1, 8), (3, 2), (8, 8), (64, 1)])
def test_bad_callers_have_no_worker_replaced(good: int, bad: int, options: dict[str, Any]) -> None:
    service = service_of(good, bad, **options)
    service.run(5.0)
    assert service.condemned == []
    if not good:
        assert service.batcher.health.is_failing(service.now)


@KINDS
@pytest.mark.parametrize("good", [1, 4, 64])
def test_one_that_fails_everything_is_replaced_once(good: int, options: dict[str, Any]) -> None:
    service = service_of(
        good, fails=lambda batch: batch.slot == 2,
        seconds=lambda batch: 0.005 if batch.slot == 2 else 0.1, **options,
    )  # fmt: skip
    service.run(12.0)
    assert [slot for _, slot in service.condemned] == [2]
    assert service.condemned[0][0] < 10.0
    if not options:
        assert service.failed() <= 2
    assert not service.batcher.health.is_failing(service.now)


@KINDS
def test_one_that_fails_everything_is_replaced_beside_a_bad_caller(options: dict[str, Any]) -> None:
    service = service_of(
        8, 1, fails=lambda batch: batch.slot == 2 or "bad" in batch.payloads, **options
    )
    service.run(60.0)
    if options:  # then it is held back for most of the time at least
        assert {slot for _, slot in service.condemned} <= {2}
    else:
        assert [slot for _, slot in service.condemned] == [2]
        assert service.failed() <= 8


@pytest.mark.parametrize("share", [1, 5, 20])
def test_where_bad_items_are_everywhere_workers_are_not_held_back(share: int) -> None:
    rng = random.Random(share)
    bad = sum(rng.random() < share / 100 for _ in range(64))
    service = service_of(64 - bad, bad)
    held_back = batches = 0
    for second in range(200):
        service.run(second / 10)
        held_back += len(service.batcher.health.trials)
        batches += 4
    assert service.condemned == []
    assert held_back <= 0.1 * batches


def test_two_that_fail_everything_are_replaced_a_minute_apart() -> None:
    service = service_of(16, fails=lambda batch: batch.slot in (1, 2))
    service.run(100.0)
    (first, _), (second, _) = service.condemned
    assert {slot for _, slot in service.condemned} == {1, 2}
    assert INTERVAL <= second - first < INTERVAL + 1
    assert service.failed() <= 2 * 64


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
    service = service_of(
        64, workers=worker_num, fails=lambda batch: batch.slot in fails,
        failure=Error(blames_input=blames_input),
    )  # fmt: skip
    service.run(30.0)
    assert service.condemned == []
    assert service.batcher.health.is_failing(service.now) == is_failing


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
