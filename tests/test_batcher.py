"""The state machine: walks of events, and what they make it want done."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest

from batcher_walk import Walk, make_batcher
from service_streamer import Reason
from service_streamer.batching.batcher import Actions, CallFailures
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from service_streamer.supervision.health import BatchBound


def payloads(batches: list[BatchRecord]) -> list[list[Any]]:
    return [batch.payloads for batch in batches]


@pytest.mark.parametrize("has_lengths", [False, True], ids=["plain", "lengths"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_lone_call_is_cut_past_the_queue_as_it_would_be_from_it(
    has_lengths: bool, workers: int
) -> None:
    def cut_at(past: bool) -> list[tuple[Any, ...]]:
        """What is said of each batch, in the end; ``calls_submitted`` cuts from the queue."""
        batcher = make_batcher(batch_size=4, max_latency=0.1, has_lengths=has_lengths)
        for slot in range(workers):
            batcher.worker_ready(slot, 0.0)
        said: list[tuple[Any, ...]] = []
        for number in range(100):
            now = 0.1 * number
            call = Call([number], None, is_watched=True, more=not past)
            call.deadline = now + 10.0
            if has_lengths:
                call.lengths = (number % 7,)
            actions = batcher.call_submitted(call, now)
            if not past:
                assert not actions.batches
                actions = batcher.calls_submitted(now)
            [batch] = actions.batches
            assert batch.spans == [(call, 0, 1)]
            assert call.is_running
            report = BatchReport(batch.id, ["done"], duration=0.02, slot=batch.slot)
            batcher.check_invariants()
            assert batcher.batch_returned(report, now + 0.03).calls == [call]
            batcher.check_invariants()
            names = "id slot size cost reason calls arrived cut_at queued answered pending"
            said.append(tuple(getattr(batch, name) for name in names.split()))
            said.append((batcher.deadline, batcher.queue.cost.line))
        metrics = batcher.figures.metrics
        said.append((metrics.reasons, metrics.sizes.counts, metrics.queued.counts))
        said.append(
            (metrics.batch.counts, metrics.inference.counts, batcher.figures.batch_duration)
        )
        return said

    assert cut_at(past=True) == cut_at(past=False)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, ["abcd"]),
        (2, ["abc", "de"]),
        (3, ["ab", "cd", "e"]),
        (4, ["ab", "cd", "e"]),
        (8, ["a", "b", "c", "d", "e"]),
    ],
)
def test_free_workers_share_out_what_is_there(slots: int, expected: list[str]) -> None:
    walk = Walk(slots=slots)
    batches = [batch for item in "abcde" for batch in walk.submit(item, more=True)[1]]
    batches += walk.checked(walk.batcher.calls_submitted(walk.now)).batches
    assert ["".join(batch.payloads) for batch in batches] == expected
    assert len({batch.slot for batch in batches}) == len(expected)


def test_full_batches_for_all_free_workers_do_not_wait_for_the_last_call() -> None:
    walk = Walk(slots=2)
    sent = [walk.submit(item, more=True)[1] for item in "abcdefgh"]
    assert not any(sent[:7])
    assert payloads(sent[7]) == [["a", "b", "c", "d"], ["e", "f", "g", "h"]]


def test_no_batch_is_sent_ahead_while_another_worker_has_less_than_a_full_one() -> None:
    walk = Walk(slots=2)
    assert payloads(walk.submit(*"abcdef")[1]) == [["a", "b", "c"], ["d", "e", "f"]]
    assert not walk.submit(*"ghijk")[1], "who is back first takes its share"
    assert len(walk.submit(*"lmn")[1]) == 2, "now there is enough for both"


def test_where_all_have_a_full_batch_the_next_is_sent_ahead() -> None:
    walk = Walk(slots=2)
    assert len(walk.submit(*"abcdefgh")[1]) == 2
    assert not walk.submit(*"ijk")[1]
    assert payloads(walk.submit("l")[1]) == [["i", "j", "k", "l"]]


def test_a_full_batch_is_sent_ahead_whatever_more_comes() -> None:
    walk = Walk(batch_size=2)
    walk.submit("a")
    assert not walk.submit("b", more=True)[1]
    assert payloads(walk.submit("c", more=True)[1]) == [["b", "c"]]


def test_work_goes_round_the_workers() -> None:
    walk = Walk(slots=3)
    used = []
    for item in "abcdef":
        _, [batch] = walk.submit(item)
        used.append(batch.slot)
        walk.done(batch)
    assert used == [0, 1, 2, 0, 1, 2]


def test_a_call_that_is_partly_sent_can_be_withdrawn() -> None:
    walk = Walk(batch_size=2)
    call, [first, _] = walk.submit(*"abcde")
    assert walk.batcher.withdraw(call)
    assert not walk.done(first).calls


def held_calls() -> list[Call]:
    """Calls that something still holds, those of other tests included."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Call]


# -- whose fault it was


def full_batch(walk: Walk, *names: str) -> tuple[list[Call], BatchRecord]:
    """Single-item calls of these names, in one batch."""
    _, [busy] = walk.submit("busy")
    submitted = [walk.submit(name) for name in names]
    ahead = [batch for _, batches in submitted for batch in batches]
    after = walk.done(busy, duration=0.0).batches  # of which nothing is learned
    return [call for call, _ in submitted], (ahead + list(after))[0]


def run_out(walk: Walk, batches: list[BatchRecord], die_on: str) -> list[Any]:
    """Run batches and all that follow; the payloads of each run. Workers that die come back."""
    runs = []
    while batches:
        batch = batches.pop(0)
        runs.append("".join(batch.payloads))
        if set(batch.payloads) & set(die_on):
            batches += walk.lost(batch.slot).batches
            batches += walk.checked(walk.batcher.worker_ready(batch.slot, walk.now)).batches
        else:
            batches += walk.done(batch).batches
    assert walk.batcher.is_empty
    return runs


def failures(calls: list[Call]) -> list[Any]:
    assert all(call.is_over for call in calls)
    return [call.failure for call in calls]


@pytest.mark.parametrize(
    ("items", "options", "culprit", "runs"),
    [
        ("abcdefgh", {}, "f", "abcdefgh ab cd ef gh e f"),
        ("abcdefgh", {"max_attempts": 2}, "f", "abcdefgh a b c d e f g h"),
        ("a", {"max_attempts": 3}, "a", "a a a"),
        ("abcd", {"max_attempts": 1, "isolate_errors": False}, "c", "abcd"),
    ],
)
def test_item_that_kills_is_found_and_fails_alone_if_it_may_run_again(
    items: str, options: dict[str, Any], culprit: str, runs: str
) -> None:
    walk = Walk(batch_size=8, **options)
    calls, batch = full_batch(walk, *items)
    found = run_out(walk, [batch], die_on=culprit)
    assert found == runs.split()
    is_searched = len(found) > 1
    assert failures(calls) == [
        "died" if item == culprit or not is_searched else None for item in items
    ]
    if len(items) == 8:
        assert walk.batcher.retries.retried_items == 8 + (2 if "ef" in found else 0)


def test_items_of_a_call_are_parted_after_a_death() -> None:
    walk = Walk(batch_size=4)
    call, [batch] = walk.submit(*"abcd")
    assert run_out(walk, [batch], die_on="c") == ["abcd", "ab", "cd", "c"]
    assert failures([call]) == ["died"]


def test_items_that_a_worker_found_to_be_at_fault_fail_and_are_counted() -> None:
    walk = Walk(batch_size=4)
    calls, batch = full_batch(walk, *"abcd")
    walk.done(batch, runs=5, _1="of b", _2="of c")
    assert failures(calls) == [None, "of b", "of c", None]
    assert walk.batcher.retries.isolated_calls == 2
    assert walk.batcher.retries.take_ended() == [(4, 2, "of b", 5)]


def test_a_batch_that_fails_as_a_whole_is_nobodys_fault() -> None:
    not_theirs = CallFailures(shared=lambda failure, _: f"not {failure}")
    walk = Walk(batch_size=4, isolate_errors=False, call_failures=not_theirs)
    calls, batch = full_batch(walk, *"ab")
    walk.failed(batch)
    assert failures(calls) == ["not why", "not why"]
    assert walk.batcher.retries.take_ended() == [(2, 2, "why", 0)]
    call, [batch] = walk.submit("c")
    walk.failed(batch)
    assert not walk.batcher.retries.take_ended()
    assert failures([call]) == ["why"], "it was alone"


def test_neighbour_of_a_call_that_is_over_is_not_blamed_for_it() -> None:
    walk = Walk(batch_size=2, max_attempts=2)
    (bad, good), batch = full_batch(walk, *"ab")
    walk.lost(batch.slot)
    [batch] = walk.checked(walk.batcher.worker_ready(1, 0.0)).batches
    assert batch.payloads == ["a"]
    walk.batcher.withdraw(bad)
    [again] = walk.done(batch).batches
    assert again.payloads == ["b"]
    walk.done(again)
    assert good.failure is None


def test_whoever_looks_much_too_late_gives_everybody_their_time_anew() -> None:
    walk = Walk(batch_size=1, batch_timeout=10.0)
    walk.submit("a")
    walk.now = 16.0
    assert not walk.checked(walk.batcher.time_passed(16.0)).hung
    assert walk.batcher.deadline == 26.0
    assert list(walk.pass_time().hung) == [0]


# -- time that ends


def test_deadlines_do_not_keep_calls_that_are_over() -> None:
    walk, before = Walk(), held_calls()
    for _ in range(1_000):
        [batch] = walk.submit("a", timeout=20.0)[1]
        walk.now += 0.01
        walk.done(batch)
    assert len(held_calls()) - len(before) < 200


# -- bounds


def test_the_time_of_a_batch_begins_when_the_one_before_is_back() -> None:
    walk = Walk(batch_size=1, batch_timeout=10.0)
    _, [first] = walk.submit("a")
    walk.submit("b")
    walk.now = 9.0
    walk.done(first)
    assert not walk.pass_time().hung
    assert list(walk.pass_time().hung) == [0]
    assert walk.now == 19.0
    assert walk.batcher.deadline == math.inf, "it is told once"
    assert not walk.submit("more")[1], "it gets nothing any more"


def test_without_retries_the_loss_of_a_host_is_the_end_of_its_calls() -> None:
    walk = Walk(max_attempts=1)
    call, _ = walk.submit("a")
    actions = walk.checked(walk.batcher.worker_lost(0, "gone", walk.now, is_outage=True))
    assert (list(actions.calls), call.failure) == ([call], "gone")


# -- retiring


@pytest.mark.parametrize(("is_ended", "is_late"), [(True, False), (True, True), (False, False)])
def test_a_worker_that_is_ended_since_it_hangs_is_not_kept(is_ended: bool, is_late: bool) -> None:
    walk = Walk(batch_size=1, batch_timeout=BatchBound(fixed=1.0, ends=is_ended))
    _, [first] = walk.submit("a")
    if is_late:
        walk.submit("ahead")
    walk.batcher.worker_retiring(0, walk.now)
    walk.submit("b")
    assert walk.pass_time().hung
    if is_late:  # it reports something in its last moment
        walk.done(first)
    actions = walk.batcher.worker_kept(0, walk.now)
    assert len(actions.batches) == (not is_ended), "it will be killed in a moment"


# -- workers with stages

#: Seconds of a batch in each stage: two more batches than the one in the middle are on their way.
STAGES = (0.004, 0.01, 0.004)


def staged(walk: Walk, batches: list[BatchRecord]) -> Actions:
    """The first of these batches comes back, with the time of each stage."""
    batch = batches.pop(0)
    report = BatchReport(
        batch.id, [None] * batch.size, duration=0.018, stages=STAGES, slot=batch.slot
    )
    actions = walk.checked(walk.batcher.batch_returned(report, walk.now))
    batches += actions.batches
    return actions


def filled() -> tuple[Walk, list[BatchRecord]]:
    """A worker with stages, and more waiting than it can hold."""
    walk = Walk()
    batches: list[BatchRecord] = []
    for item in range(40):
        batches += walk.submit(item)[1]
    return walk, batches


def test_what_is_no_full_batch_follows_when_the_slowest_stage_is_free() -> None:
    walk = Walk()
    batches = walk.submit("warm")[1]
    staged(walk, batches)
    walk.now += 1.0
    (batch,) = walk.submit("first")[1] or walk.pass_time().batches
    assert not walk.submit("second")[1], "it is no full batch"
    while not (early := walk.pass_time().batches):
        pass
    assert early[0].payloads == ["second"]
    assert early[0].reason is Reason.STAGE
    assert 0.0 < walk.now - batch.cut_at < sum(STAGES), "the first one is not back yet"


def test_a_death_counts_for_what_the_worker_was_at() -> None:
    walk, batches = filled()
    staged(walk, batches)
    at, idle, other = batches
    actions = walk.checked(
        walk.batcher.worker_lost(0, "died", walk.now, None, frozenset((at.id, other.id)))
    )
    assert not actions.batches
    held = [[*batch.payloads] for batch in (at, idle, other)]
    again: dict[Any, int] = {}
    for slot in range(1, 40):
        for part in walk.batcher.worker_ready(slot, walk.now).batches:
            again.update(dict.fromkeys(part.payloads, part.losses))
    assert [{again[item] for item in items} for items in held] == [{1}, {0}, {1}]


def test_a_batch_that_is_full_by_its_cost_is_sent_ahead_before_the_first_one_is_back() -> None:
    walk = Walk(batch_size=16, max_batch_cost=10.0)
    assert payloads(walk.submit("first")[1]) == [["first"]]
    assert payloads(walk.submit(*range(12))[1]) == [[*range(10)]]


# Models that pad batches to a few sizes


def test_a_batch_has_a_size_that_the_model_pads_to() -> None:
    """What does not fit is left to the next batch, if padding would slow it down."""
    walk = Walk(batch_size=16)
    unknown = Walk(batch_size=16)
    unknown.batcher.slots.sizes = (1, 16)
    assert payloads(unknown.submit(*range(9))[1]) == [[*range(9)]], "nothing is known yet"
    walk.batcher.slots.sizes = (1, 2, 4, 8, 16)
    for size in (16, 8, 4, 2, 16, 8, 4, 2):
        _, [batch] = walk.submit(*range(size))
        assert not walk.done(batch, 0.016 + 0.001 * size).batches
    call, batches = walk.submit(*range(9))
    assert (len(batches[0].payloads), batches[0].reason) == (8, Reason.PAYS)
    batches += walk.done(batches[0], 0.024).batches
    assert payloads(batches[1:]) == [[8]]
    walk.done(batches[1], 0.017)
    assert call.outputs == [f"result of {item}" for item in range(9)]
    _, [batch] = walk.submit(*range(15))
    assert len(batch.payloads) == 15, "one row of padding costs less than a batch of 7 more"
