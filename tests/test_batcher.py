"""The state machine: walks of events, and what they make it want done."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service_streamer.scheduling.batcher import Actions, Batcher
from service_streamer.scheduling.records import Batch, Call, SlotState


class Walk:
    """A batcher with ready workers, a clock that stands still, and invariants after every step."""

    def __init__(self, *, batch_size: int = 4, slots: int = 1, ready: bool = True) -> None:
        self.batcher = Batcher(batch_size=batch_size, max_latency=0.1, slots=slots)
        self.now = 0.0
        if ready:
            for slot in range(slots):
                self.batcher.worker_ready(slot, self.now)

    def submit(self, *items: Any) -> tuple[Call, list[Batch]]:
        call = Call(list(items), None)
        return call, self.checked(self.batcher.call_submitted(call, self.now)).batches

    def done(self, batch: Batch, duration: float = 0.01, **failures: Any) -> Actions:
        outputs = [f"result of {payload}" for payload in batch.payloads]
        by_position = {int(position[1:]): failure for position, failure in failures.items()}
        return self.checked(
            self.batcher.batch_done(batch.slot, batch.id, outputs, by_position, duration, self.now)
        )

    def checked(self, actions: Actions) -> Actions:
        self.batcher.check_invariants()
        return actions


def payloads(batches: list[Batch]) -> list[list[Any]]:
    return [batch.payloads for batch in batches]


def test_an_idle_worker_gets_a_lone_item_at_once() -> None:
    _, batches = Walk().submit("a")
    assert payloads(batches) == [["a"]]


def test_nothing_goes_to_a_worker_that_is_still_starting() -> None:
    walk = Walk(ready=False)
    assert not walk.submit("a")[1]
    assert not walk.submit("b")[1]
    assert payloads(walk.batcher.worker_ready(0, 0.0).batches) == [["a", "b"]]


def test_items_gather_while_the_worker_is_busy_and_a_full_batch_goes_ahead() -> None:
    walk = Walk()
    _, [first] = walk.submit("a")
    assert not walk.submit("b")[1]
    assert not walk.submit("c", "d")[1], "three of four: it may still grow"
    _, [ahead] = walk.submit("e", "f")
    assert ahead.payloads == ["b", "c", "d", "e"]
    assert not walk.submit(*"ghijkl")[1], "one running, one ahead: there is no more room"
    assert payloads(walk.done(first).batches) == [["f", "g", "h", "i"]]


def test_a_large_call_is_split_over_the_workers_and_completes_once() -> None:
    walk = Walk(slots=2)
    call, batches = walk.submit(*range(10))
    assert payloads(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [batch.slot for batch in batches] == [0, 1]
    actions = walk.done(batches[1])
    assert payloads(actions.batches) == [[8, 9]]
    assert not actions.calls
    assert not walk.done(batches[0]).calls
    assert walk.done(actions.batches[0]).calls == [call]
    assert call.outputs == [f"result of {item}" for item in range(10)]


def test_work_goes_round_the_workers() -> None:
    walk = Walk(slots=3)
    used = []
    for item in "abcdef":
        _, [batch] = walk.submit(item)
        used.append(batch.slot)
        walk.done(batch)
    assert used == [0, 1, 2, 0, 1, 2]


def test_batches_of_one_worker_may_come_back_in_any_order() -> None:
    walk = Walk(batch_size=1)
    one, [first] = walk.submit("a")
    two, [ahead] = walk.submit("b")
    assert walk.done(ahead).calls == [two]
    assert walk.done(first).calls == [one]


def test_a_failed_batch_ends_exactly_its_calls() -> None:
    walk = Walk(batch_size=2)
    bad, [first] = walk.submit("bad", "item")
    split, [ahead] = walk.submit("c", "d", "e")
    actions = walk.checked(walk.batcher.batch_failed(0, first.id, "why", 0.0))
    assert actions.calls == [bad]
    assert (bad.failure, bad.outputs) == ("why", [])
    assert not split.is_over
    actions = walk.checked(walk.batcher.batch_failed(0, ahead.id, "why too", 0.0))
    assert actions.calls == [split]
    assert walk.batcher.is_empty, "what was left of it is not computed"


def test_an_item_that_could_not_cross_fails_its_call_alone() -> None:
    walk = Walk()
    walk.submit("busy")
    calls = [walk.submit(item)[0] for item in "ab"]
    calls.append(walk.submit("c", "d")[0])
    [batch] = [b for b in walk.batcher._slots[0].batches.values() if b.size == 4]
    actions = walk.done(batch, _1="lost on the way")
    assert actions.calls == calls
    assert [call.failure for call in calls] == [None, "lost on the way", None]
    assert calls[2].outputs == ["result of c", "result of d"]


def test_a_withdrawn_call_is_never_computed() -> None:
    walk = Walk()
    _, [first] = walk.submit("a")
    gone, _ = walk.submit("b", "c")
    walk.submit("d")
    assert walk.batcher.call_withdrawn(gone)
    assert not walk.batcher.call_withdrawn(gone)
    walk.batcher.check_invariants()
    assert gone.payloads == ()
    assert payloads(walk.done(first).batches) == [["d"]]


def test_a_call_that_is_partly_sent_cannot_be_cancelled_but_withdrawn() -> None:
    walk = Walk(batch_size=2)
    call, [first, _] = walk.submit(*"abcde")
    assert not walk.batcher.call_cancelled(call)
    assert walk.batcher.call_withdrawn(call)
    assert walk.done(first).calls == []


def test_withdrawn_calls_do_not_pile_up_behind_a_hung_worker() -> None:
    walk = Walk()
    walk.submit("hangs")
    for _ in range(10_000):
        walk.batcher.call_withdrawn(walk.submit("late")[0])
    assert len(walk.batcher._pending) < 100


def test_a_lost_worker_s_calls_fail_and_the_others_go_on() -> None:
    walk = Walk(slots=2, batch_size=1)
    lost, _ = walk.submit("a")
    _, [other] = walk.submit("b")
    ahead, _ = walk.submit("c")  # at worker 0
    actions = walk.checked(walk.batcher.worker_lost(0, "died", "broken", 0.0))
    assert actions.calls == [lost, ahead]
    assert {call.failure for call in actions.calls} == {"died"}
    assert not walk.batcher.is_broken
    walk.done(other)
    assert walk.submit("d")[1][0].slot == 1


def test_with_the_last_worker_lost_everything_pending_fails() -> None:
    walk = Walk(ready=False)
    waiting = [walk.submit("a")[0], walk.submit("b")[0]]
    actions = walk.checked(walk.batcher.worker_lost(0, "died", "broken", 0.0))
    assert actions.calls == waiting
    assert {call.failure for call in waiting} == {"broken"}
    assert walk.batcher.is_broken
    assert walk.batcher.is_empty


def test_an_unknown_batch_is_our_bug_and_changes_nothing() -> None:
    walk = Walk()
    walk.submit("a")
    with pytest.raises(RuntimeError, match="our bug"):
        walk.batcher.batch_done(0, 17, [], {}, 0.0, 0.0)
    walk.batcher.check_invariants()


def warmed_up() -> Walk:
    """One worker and four callers in a closed loop, who have learned to go together.

    All four have just been answered; before, they came back within 1.2 ms.
    """
    walk = Walk(batch_size=8)
    in_flight = [batch for i in range(4) for batch in walk.submit(i)[1]]
    for _ in range(200):
        walk.now += 0.02
        answered = in_flight.pop()
        in_flight += walk.done(answered, duration=0.02).batches
        for i in range(answered.size):
            walk.now += 0.0003
            in_flight += walk.submit(i)[1]
        if not in_flight:
            assert walk.batcher.deadline is not None
            walk.now = walk.batcher.deadline
            in_flight += walk.checked(walk.batcher.time_passed(walk.now)).batches
    [batch] = in_flight
    assert batch.size == 4
    walk.now += 0.02
    walk.done(batch, duration=0.02)
    return walk


def test_expected_company_is_waited_for_and_sent_as_soon_as_it_is_complete() -> None:
    walk = warmed_up()
    walk.now += 0.0005  # sooner than usual: the others are not late yet
    for i in range(3):
        assert not walk.submit(i)[1]
        assert walk.batcher.deadline is not None
    assert payloads(walk.submit(3)[1]) == [[0, 1, 2, 3]]
    assert walk.batcher.deadline is None


def test_nobody_is_waited_for_longer_than_a_part_of_a_batch_takes() -> None:
    walk = warmed_up()
    answered_at = walk.now
    walk.now += 0.0005
    walk.submit("a")
    assert walk.batcher.deadline == pytest.approx(answered_at + 0.25 * 0.02)
    walk.now = walk.batcher.deadline
    assert payloads(walk.checked(walk.batcher.time_passed(walk.now)).batches) == [["a"]]


def test_max_latency_bounds_the_wait_from_the_oldest_arrival() -> None:
    walk = warmed_up()
    walk.batcher._max_latency = 0.003
    walk.now += 0.0005
    oldest = walk.now
    walk.submit("a")
    walk.now += 0.001
    walk.submit("b")
    assert walk.batcher.deadline == pytest.approx(oldest + 0.003)
    walk.now = walk.batcher.deadline
    assert payloads(walk.checked(walk.batcher.time_passed(walk.now)).batches) == [["a", "b"]]


def test_the_deadline_goes_with_the_last_that_waits() -> None:
    walk = warmed_up()
    call, _ = walk.submit("a")
    walk.batcher.call_withdrawn(call)
    walk.batcher.check_invariants()
    assert walk.batcher.deadline is None


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: every call ends exactly once, with its own results."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)
        self.now = 0.0
        self.batcher = Batcher(batch_size=5, max_latency=0.05, slots=3)
        self.calls: list[Call] = []
        self.ended: dict[Call, str] = {}
        self.in_flight: list[Batch] = []
        self.starting = {0, 1, 2}
        self.lost: set[int] = set()

    def do(self, actions: Actions) -> None:
        self.in_flight += actions.batches
        for call in actions.calls:
            assert call not in self.ended, "answered twice"
            self.ended[call] = "failed" if call.failure else "done"
            if not call.failure:
                assert call.outputs == [("result", *item) for item in call.reply]

    @rule(size=st.integers(1, 12))
    def submit(self, size: int) -> None:
        if self.batcher.is_broken:
            return
        items = [(len(self.calls), i) for i in range(size)]
        call = Call(items, items)
        self.calls.append(call)
        self.do(self.batcher.call_submitted(call, self.now))

    @precondition(lambda self: self.starting)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(slot)
        self.do(self.batcher.worker_ready(slot, self.now))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "failed", "partly"]))
    def come_back(self, data: st.DataObject, outcome: str) -> None:
        batch = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(batch)
        if outcome == "failed":
            self.do(self.batcher.batch_failed(batch.slot, batch.id, "failed", self.now))
            return
        outputs = [("result", *item) for item in batch.payloads]
        failures = {batch.size - 1: "lost on the way"} if outcome == "partly" else {}
        self.do(self.batcher.batch_done(batch.slot, batch.id, outputs, failures, 0.01, self.now))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["call_withdrawn", "call_cancelled"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        call = data.draw(st.sampled_from(self.calls))
        if getattr(self.batcher, how)(call):
            assert call not in self.ended
            self.ended[call] = "withdrawn"

    @precondition(lambda self: len(self.lost) < 3)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted({0, 1, 2} - self.lost)))
        self.lost.add(slot)
        self.starting.discard(slot)
        self.in_flight = [batch for batch in self.in_flight if batch.slot != slot]
        self.do(self.batcher.worker_lost(slot, "died", "broken", self.now))

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.01, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.batcher.deadline is not None and self.batcher.deadline <= self.now:
            self.do(self.batcher.time_passed(self.now))

    @invariant()
    def consistent(self) -> None:
        self.batcher.check_invariants()
        assert {call for call in self.calls if call.is_over} == set(self.ended)

    def teardown(self) -> None:
        self.do(Actions([], self.batcher.fail_all("closed")))
        assert set(self.ended) == set(self.calls), "a call was lost"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_states_are_named_in_the_statistics() -> None:
    walk = Walk(slots=2)
    walk.submit("a")
    counts = walk.batcher.statistics()
    assert counts.workers == {
        SlotState.STARTING: 0, SlotState.IDLE: 1, SlotState.BUSY: 1, SlotState.LOST: 0,
    }  # fmt: skip
    assert (counts.pending_items, counts.batches_in_flight, counts.items_in_flight) == (0, 1, 1)
