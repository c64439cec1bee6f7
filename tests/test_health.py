"""Which worker is replaced for what it fails, and which is not: tables, and walks of a batcher."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from bad_items import Service
from batcher_walk import make_batcher
from service_streamer import BadMessage, InvalidInput, UnpicklableItem
from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from service_streamer.supervision.health import INTERVAL, ROW, Health
from service_streamer.workers.protocol import Failure

# -- rows


@pytest.mark.parametrize(
    ("others", "row", "is_suspect"),
    [
        ("", ROW, False),  # of a lone worker nothing else is known
        ("c", ROW - 1, False),
        ("c", ROW, True),
        ("f", ROW, False),
        ("cf", ROW, False),
        ("ccf", ROW, True),
    ],
)
def test_worker_is_suspected_by_its_row_and_what_the_others_did_last(
    others: str, row: int, is_suspect: bool
) -> None:
    health = Health()
    for _ in range(row):
        health.failed(0, 0.0)
    for slot, outcome in enumerate(others, 1):
        if outcome == "c":
            health.computed(slot)
        else:
            health.failed(slot, 0.0)
    assert health.is_suspect(0) is is_suspect


def test_a_lost_worker_is_forgotten() -> None:
    health = Health()
    health.computed(2)
    for _ in range(ROW):
        health.failed(1, 0.0)
    health.lost(1, 0.0, had_new_items=False)
    assert not health.is_suspect(1), "of a new worker nothing is known"


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


LONG = [pytest.param(*numbers, marks=pytest.mark.long) for numbers in ((0, 2), (1, 8), (8, 8))]
KINDS = pytest.mark.parametrize(
    "options", [{}, {"isolate_errors": False, "max_attempts": 1}], ids=["retry", "no retry"]
)


@KINDS
@pytest.mark.parametrize(("good", "bad"), [(3, 2), (64, 1), *LONG])
def test_bad_callers_have_few_workers_replaced(
    good: int, bad: int, options: dict[str, Any]
) -> None:
    service = service_of(good, bad, **options)
    service.run(5.0)
    assert len(service.condemned) <= (1 if good else 0)
    if not good:
        assert service.batcher.slots.health.is_failing(service.now)


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
    assert service.failed() <= 20 * good  # until another one has computed its first batch
    assert not service.batcher.slots.health.is_failing(service.now)


@KINDS
def test_one_that_fails_everything_is_replaced_beside_a_bad_caller(options: dict[str, Any]) -> None:
    service = service_of(
        8, 1, fails=lambda batch: batch.slot == 2 or "bad" in batch.payloads, **options
    )
    service.run(60.0)
    assert [slot for _, slot in service.condemned][:1] == [2]
    if not options:
        assert service.failed() <= 8 * ROW


@pytest.mark.parametrize("share", [1, 5, 20])
def test_where_bad_items_are_everywhere_workers_are_not_held_back(share: int) -> None:
    rng = random.Random(share)
    bad = sum(rng.random() < share / 100 for _ in range(64))
    service = service_of(64 - bad, bad)
    held_back = batches = 0
    for second in range(200):
        service.run(second / 10)
        held_back += len(service.batcher.slots.held_back)
        batches += 4
    assert service.condemned == []
    assert held_back <= 0.1 * batches


def test_two_that_fail_everything_are_replaced_a_minute_apart() -> None:
    service = service_of(16, fails=lambda batch: batch.slot in (1, 2))
    service.run(100.0)
    (first, _), (second, _) = service.condemned
    assert {slot for _, slot in service.condemned} == {1, 2}
    assert INTERVAL - 0.001 <= second - first < INTERVAL + 1
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
    service.run(100.0)
    assert service.condemned == []
    assert service.batcher.slots.health.is_failing(service.now) == is_failing


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


# -- one that is held back


def submit(batcher: Batcher) -> Actions:
    return batcher.call_submitted(Call(["x"], None), 0.0)


def batcher_that_holds_back() -> Batcher:
    """Of five workers two fail everything: 1 was replaced just now, so 0 is held back."""
    batcher = make_batcher(max_latency=0.0, batch_size=2)
    for slot in range(5):
        batcher.worker_ready(slot, 0.0)
    condemned: list[int] = []
    while not (condemned and batcher.slots.held_back):
        batches = [batch for _ in range(5) for batch in submit(batcher).batches]
        for batch in sorted(batches, key=lambda batch: -batch.slot):
            failure = Error() if batch.slot < 2 else None
            report = BatchReport(batch.id, ["y"], failure=failure, slot=batch.slot)
            for slot in batcher.batch_returned(report, 0.0).condemned:
                condemned.append(slot)
                batcher.worker_lost(slot, None, 0.0)
    assert (condemned, batcher.slots.held_back) == ([1], [0])
    return batcher


@pytest.mark.parametrize("others", ["retire", "are lost"])
def test_worker_that_is_held_back_goes_on_when_no_other_takes_batches(others: str) -> None:
    batcher = batcher_that_holds_back()
    for _ in range(9):
        submit(batcher)
    for slot in (2, 3, 4):
        if others == "retire":
            actions = batcher.worker_retiring(slot, 0.0)
        else:
            actions = batcher.worker_lost(slot, None, 0.0)
    assert [batch.slot for batch in actions.batches][:1] == [0]
    batcher.check_invariants()


def test_worker_that_is_held_back_stays_so_if_it_is_kept() -> None:
    batcher = batcher_that_holds_back()
    batcher.worker_retiring(0, 0.0)
    batcher.worker_kept(0, 0.0)
    for _ in range(9):
        assert 0 not in [batch.slot for batch in submit(batcher).batches]
    batcher.check_invariants()


def test_worker_that_is_held_back_goes_on_when_most_of_the_others_fail_too() -> None:
    batcher = batcher_that_holds_back()
    for batch in [batch for _ in range(3) for batch in submit(batcher).batches]:
        batcher.batch_returned(BatchReport(batch.id, failure=Error(), slot=batch.slot), 0.0)
    assert not batcher.slots.held_back


def test_worker_that_is_held_back_is_replaced_in_its_time_though_nothing_happens() -> None:
    batcher = batcher_that_holds_back()
    for _ in range(9):  # the others are at them, for long
        submit(batcher)
    assert batcher.deadline == INTERVAL
    assert batcher.time_passed(INTERVAL).condemned == [0]


def test_failing_worker_goes_on_if_the_only_other_one_is_about_to_end() -> None:
    batcher = make_batcher(max_latency=0.0, batch_size=1)
    for slot in (0, 1):
        batcher.worker_ready(slot, 0.0)
    batches = [batch for _ in range(3) for batch in submit(batcher).batches]
    for batch in batches:
        if batch.slot:
            batcher.batch_returned(BatchReport(batch.id, ["y"], slot=1), 0.0)
    batcher.worker_retiring(1, 0.0)
    for _ in range(2 * ROW):
        submit(batcher)
    for _ in range(2 * ROW):
        [batch, *_] = [batch for batch in batcher.in_flight() if batch.slot == 0]
        report = BatchReport(batch.id, failure=Error(), slot=0)
        assert not batcher.batch_returned(report, 0.0).condemned
    batcher.check_invariants()
