"""Who fails and who waits when some items are bad: tables, and services in simulated time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bad_items import Service, share_of_bad
from batcher_walk import make_batcher
from service_streamer.batching.batcher import Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call, CallOptions, StepReport

#: So often a host may be lost with an item until that counts as an attempt.
MOST_OUTAGES = 3

# -- services with bad items


@pytest.mark.parametrize(
    ("share", "calls_for_each"), [(0.01, 0.18), (0.05, 0.6), (0.1, 0.8), (0.2, 1.05), (0.5, 1.6)]
)
def test_what_it_costs_to_find_the_bad_ones(share: float, calls_for_each: float) -> None:
    """Model calls per item; the entropy is 0.08, 0.29, 0.47, 0.72 and 1, and no search needs less.

    To run all one by one takes 1, but so does each item when none is bad.
    """
    service = Service(share_of_bad(share))
    service.run(2.0)
    ended = service.answered("good") + service.failed("bad")
    assert service.batches / ended < calls_for_each
    assert {end for (item, end), _ in service.ends.items() if item == "good"} == {"done"}
    assert {end for (item, end), _ in service.ends.items() if item == "bad"} == {"raised"}


@pytest.mark.parametrize(
    ("seconds", "share"),
    [(lambda batch: 0.001, 1 / 10), (lambda batch: 0.001 + 0.0001 * batch.size, 1 / 4)],
)
def test_one_who_sends_nothing_good_costs_one_search_for_each_batch(
    seconds: Callable[[BatchRecord], float], share: float
) -> None:
    """Nobody but that caller fails. A search takes log2(n) calls of the model, of fewer items."""
    alone = Service(lambda _: "good", seconds=seconds)
    alone.run(0.5)
    service = Service(lambda caller: "good" if caller else "bad", callers=65, seconds=seconds)
    service.run(0.5)
    assert service.failed("good") == 0
    assert service.answered("good") > share * alone.answered("good")


def test_a_model_that_fails_at_all_is_called_little_more_than_once_for_each_call() -> None:
    service = Service(share_of_bad(1.0))
    service.run(1.0)
    first = service.failed("bad")
    before = service.batches
    service.run(2.0)
    assert service.batches - before <= 1.4 * (service.failed("bad") - first)


def test_batches_grow_again_when_the_model_has_recovered() -> None:
    state = ["bad"]
    service = Service(lambda _: state[0])
    service.run(1.0)
    state[0] = "good"
    service.run(1.2)
    before, answered = service.batches, service.answered("good")
    service.run(2.2)
    assert (service.answered("good") - answered) / (service.batches - before) > 50


def test_now_and_then_a_bad_item_leaves_batches_as_they_are() -> None:
    items = iter(range(10**9))
    service = Service(lambda _: "bad" if next(items) % 1000 == 500 else "good")
    service.run(1.0)
    assert service.failed("good") == 0
    assert service.answered("good") > 50 * service.new_batches


# -- services with items that kill


@pytest.mark.parametrize("callers", [10, 64])
def test_one_that_kills_a_worker_that_loads_for_long_is_found_in_three_deaths(callers: int) -> None:
    """Halves would take 5 or 7, of 4 s each, and others would have waited for 20 s."""
    items = iter(["good"] * 5 + ["kill"] + ["good"] * 10**6)
    service = Service(
        lambda _: next(items), callers=callers, seconds=lambda _: 0.02, restart=4.0, timeout=20.0
    )
    service.run(15.0)
    assert service.ends["kill", "died"] == 1
    assert service.failed("good") == 0
    assert service.deaths == 3
    assert max(service.waits) < 4 + 3 * 4 + 3


def test_those_that_kill_cost_a_bounded_number_of_workers() -> None:
    service = Service(lambda _: "kill", callers=64, seconds=lambda _: 0.02, restart=4.0)
    service.run(10 * 60.0)
    ended = service.failed("kill")
    assert ended >= 64
    # A search takes 18 at most, and those that failed come back in smaller batches.
    assert service.deaths <= ended + 18
    assert {end for _, end in service.ends} == {"died", "shared loss"}


def test_others_are_served_beside_a_search_for_one_that_kills() -> None:
    items = iter(["good"] * 5 + ["kill"] + ["good"] * 10**6)
    service = Service(
        lambda _: next(items), workers=4, seconds=lambda _: 0.02, restart=4.0, timeout=20.0
    )
    service.run(4.0 + 0.5)
    before = service.answered("good")
    service.run(4.0 + 1.5)
    assert service.answered("good") - before > 64 * 1.0 / 0.02 / 8
    service.run(15.0)
    assert service.failed("good") == 0
    assert service.ends["kill", "died"] == 1


@pytest.mark.parametrize(("workers", "seconds", "late"), [(1, 0.3, 5), (4, 1.0, 0)])
def test_good_calls_are_in_time_after_a_death_also_if_batches_take_long(
    workers: int, seconds: float, late: int
) -> None:
    """One by one, 36 and 50 of the 63 beside the one that kills would have been late."""
    items = iter(["good"] * 5 + ["kill"] + ["good"] * 10**6)
    service = Service(
        lambda _: next(items),
        workers=workers,
        seconds=lambda batch: seconds + 1e-6 * batch.size,
        restart=4.0,
        timeout=20.0,
    )
    service.run(60.0)
    assert service.ends["kill", "died"] == 1
    assert service.deaths == 3
    assert service.failed("good") <= late


# -- losses of hosts


def batch_of(items: int) -> tuple[Batcher, list[Call]]:
    """A batch of lone calls, which waits for the first worker; the first item is the culprit."""
    batcher = make_batcher(batch_size=items, max_latency=0.0)
    calls = [Call([number], None) for number in range(items)]
    for call in calls:
        batcher.call_submitted(call, 0.0)
    return batcher, calls


@pytest.mark.parametrize("items", [8, 32])
def test_an_item_that_ends_its_host_fails_alone(items: int) -> None:
    batcher, calls = batch_of(items)
    batches = [*batcher.worker_ready(0, 0.0).batches]
    slot, wholes = 0, 0
    while batches:
        [batch] = batches
        wholes += batch.size == items
        if 0 in batch.payloads:
            batcher.worker_lost(slot, "gone", 1.0, is_outage=True)
            slot += 1
            batches = [*batcher.worker_ready(slot, 1.0).batches]
        else:
            report = BatchReport(batch.id, batch.payloads, duration=0.01, slot=slot)
            batches = [*batcher.batch_returned(report, 1.0).batches]
        batcher.check_invariants()
    assert wholes == MOST_OUTAGES + 1, "hosts come and go, and the batch was not to blame"
    assert [call.failure for call in calls] == ["gone"] + [None] * (items - 1)
    assert slot <= MOST_OUTAGES + 3


def test_a_host_that_is_lost_with_all_parts_counts_once_for_each() -> None:
    batcher, calls = batch_of(32)
    batcher.worker_ready(0, 0.0)
    batcher.worker_lost(0, "died", 1.0)
    slots = range(1, 8)
    for _ in range(MOST_OUTAGES):
        parts = [part for slot in slots for part in batcher.worker_ready(slot, 1.0).batches]
        assert [(part.size, part.losses) for part in parts] == [(5, 1)] * 6 + [(2, 1)]
        for slot in slots:
            batcher.slots.close(slot)
        for slot in slots:
            assert not batcher.worker_lost(slot, "gone", 1.0, is_outage=True).calls
        slots = range(slots.stop, slots.stop + 7)
        batcher.check_invariants()
    assert not any(call.is_over for call in calls)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_waited_at_a_lost_host_behind_another_batch_is_not_charged(is_known: bool) -> None:
    batcher = make_batcher(batch_size=1, max_latency=0.0, max_attempts=2)
    first, behind = Call(["first"], None), Call(["behind"], None)
    for call in (first, behind):
        batcher.call_submitted(call, 0.0)
    slot = 0
    held = [*batcher.worker_ready(slot, 0.0).batches]
    assert [batch.payloads for batch in held] == [["first"], ["behind"]]
    begun = frozenset({held[0].id}) if is_known else None
    batcher.worker_lost(slot, "gone", 0.0, begun=begun, is_outage=True)
    again = [*batcher.worker_ready(1, 0.0).batches, *batcher.worker_ready(2, 0.0).batches]
    assert {batch.spans[0][0]: batch.outages for batch in again} == {first: 1, behind: 0}


def test_all_that_a_lost_host_stepped_at_once_is_charged() -> None:
    batcher = make_batcher(batch_size=2, max_latency=0.0, max_attempts=2)
    batcher.begin_steps(2)
    batcher.call_submitted(Call([*"ab"], None), 0.0)
    assert len(batcher.worker_ready(0, 0.0).batches) == 2
    batcher.worker_lost(0, "gone", 0.0, is_outage=True)
    again = batcher.worker_ready(1, 0.0).batches
    assert [batch.outages for batch in again] == [1, 1]
    batcher.worker_lost(1, "died", 0.0, begun=frozenset({again[0].id}))
    again = batcher.worker_ready(2, 0.0).batches
    batcher.worker_lost(2, "died", 0.0, begun=frozenset({again[0].id}))
    assert batcher.retries.retried_items == 4, "nothing of a call that has just failed"


def test_a_batch_that_is_given_up_since_its_callers_have_gone_says_nothing_of_others() -> None:
    batcher = make_batcher(batch_size=8, max_latency=0.0)
    batcher.worker_ready(0, 0.0)
    for _ in range(9):
        calls = [Call([None], None, more=True) for _ in range(8)]
        told = [batcher.call_submitted(call, 0.0) for call in calls]
        [batch] = [batch for actions in told for batch in actions.batches]
        assert batch.size == 8
        for call in calls:
            assert batcher.withdraw(call)
        assert batcher.take_unwanted() == [(0, batch.id)]
        assert not batcher.take_unwanted()
        batcher.batch_returned(BatchReport(batch.id, failure="given up", slot=0), 0.0)
    shared, alone = (Call([None], None, more=True) for _ in range(2))
    batcher.call_submitted(shared, 0.0)
    batcher.call_submitted(alone, 0.0)
    assert len(batcher.calls_submitted(0.0).batches) == 1
    assert batcher.withdraw(alone)
    assert not batcher.take_unwanted(), "the other one waits"


def test_a_part_that_no_caller_waits_for_any_more_holds_up_no_batch() -> None:
    """Another batch of its call has failed meanwhile. A full one is sent ahead all the same."""
    batcher = make_batcher(batch_size=5, max_latency=0.0)
    for slot in range(3):
        batcher.worker_ready(slot, 0.0)
    first, _, third = batcher.call_submitted(Call([None] * 3, None), 0.0).batches
    batcher.worker_lost(first.slot, "died", 0.0, first.id)
    batcher.worker_retiring(third.slot, 0.0)
    assert not batcher.call_submitted(Call([None] * 5, None), 0.0).batches
    failed = batcher.batch_returned(BatchReport(third.id, failure="raised", slot=third.slot), 0.0)
    assert len(failed.calls) == 1
    assert batcher.slots.vacant() == [third.slot]
    [batch] = [*failed.batches, *batcher.worker_lost(third.slot, "ended", 0.0).batches]
    assert batch.size == 5


def test_a_stream_goes_on_with_its_outputs_once_though_a_handler_raised_while_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batcher = make_batcher(batch_size=2, max_latency=0.0)
    batcher.begin_steps(2, resumes=True)
    batcher.worker_ready(0, 0.0)
    call = Call(["item"], None, options=CallOptions(stream=True))
    [batch] = batcher.call_submitted(call, 0.0).batches
    for is_held in (True, True, False, False):  # the second time a handler had raised
        assert batcher.slots.set_held(is_held, 0.0, call=call) == [batch]
    batcher.scheduler.stepped(StepReport({batch.id: b"output"}, size=1, slot=0), 0.0)
    batcher.worker_lost(0, "died", 0.0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(batcher.slots), "give", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batcher.worker_ready(1, 0.0)
    batcher.rebuild([call], 0.0)
    [again] = batcher.time_passed(0.0).batches
    assert again.payloads == ["item", b"output"]


def test_batches_that_all_take_the_same_time_do_not_end_the_scheduler() -> None:
    """What an item adds becomes so little that dividing by it gives infinity."""
    items = iter(["good"] * 5 + ["kill"] + ["good"] * 10**6)
    service = Service(lambda _: next(items), callers=8, seconds=lambda _: 0.25, restart=4.0)
    service.run(80.0)
    assert service.failed("good") == 0
