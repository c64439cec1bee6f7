"""Who is answered by whose computation: the decisions of single flight, without threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service_streamer import Overloaded, PredictTimeout, StreamerError, Timing
from service_streamer.observe.record import ORDINARY, Call, Precedence
from service_streamer.share.computations import Caller, Computation, Computations, Ending
from service_streamer.share.single_flight import SingleFlight
from service_streamer.testing import ManualClock
from service_streamer.workers.protocol import Failure

URGENT = Precedence(has_deadline=True)


class AcceptedCall:
    """What a backend has accepted."""

    def __init__(self, items: Sequence[Any], reply: Any, deadline: float) -> None:
        self.items = list(items)
        self.reply = reply
        self.deadline = deadline
        self.is_running = self.is_over = False
        self.timing: Timing | None = None


class Walk:
    """Computations at a time that stands still, with invariants after every step."""

    def __init__(self, **options: Any) -> None:
        self.computations = Computations(**options)
        self.now = 0.0

    def join(
        self, keys: str, timeout: float = math.inf, precedence: Precedence = ORDINARY
    ) -> tuple[Caller, Computation | None]:
        """A call for items whose keys are letters; "-" is one that has none."""
        caller = Caller(len(keys), None, self.now + timeout, precedence)
        known = [None if key == "-" else key.encode() for key in keys]
        computation = self.computations.join(caller, known, keys, self.now).computation
        if computation is not None:
            computation.accepted = AcceptedCall(computation.items, None, computation.until)
        self.computations.check_invariants()
        return caller, computation

    def answer(self, computation: Computation) -> list[Caller]:
        complete = self.computations.answered(
            computation, [item.upper() for item in computation.items]
        )
        self.computations.check_invariants()
        return complete

    def fail(self, computation: Computation, **how: Any) -> tuple[list[Caller], list[Computation]]:
        outcome = self.computations.failed(computation, self.now, **how)
        self.computations.check_invariants()
        return list(outcome.failed), list(outcome.restarted)

    def leave(self, caller: Caller) -> list[Computation]:
        abandoned = self.computations.leave(caller)
        self.computations.check_invariants()
        return abandoned


def lead(walk: Walk, *args: Any) -> tuple[Caller, Computation]:
    caller, computation = walk.join(*args)
    assert computation is not None
    return caller, computation


def test_only_what_is_not_in_flight_is_submitted() -> None:
    walk = Walk()
    first, computation = lead(walk, "aab")
    assert computation.items == ["a", "b"]
    second, rest = lead(walk, "bc")
    assert rest.items == ["c"]
    assert walk.answer(computation) == [first]
    assert first.outputs == ["A", "A", "B"]
    assert walk.answer(rest) == [second]
    assert second.outputs == ["B", "C"]
    assert walk.computations.deduplicated == 2
    assert not len(walk.computations)


def test_items_without_a_key_are_nobodys_but_ones_own() -> None:
    walk = Walk()
    assert lead(walk, "--")[1].items == ["-", "-"]
    assert lead(walk, "-")[1].items == ["-"]


def test_a_flight_goes_on_while_anybody_waits_for_it() -> None:
    walk = Walk()
    first, computation = lead(walk, "ab")
    second, none = walk.join("b")
    assert none is None
    assert walk.leave(first) == []
    assert walk.leave(first) == [], "once only"
    third, none = walk.join("a")
    assert none is None, "what is in flight is, whoever it was for"
    assert walk.leave(second) == []
    assert walk.leave(third) == [computation]
    assert lead(walk, "a")[1] is not computation
    assert walk.answer(computation) == []


def test_a_caller_of_all_items_fails_with_the_computation() -> None:
    walk = Walk()
    first, computation = lead(walk, "aab")
    second, _ = walk.join("ba")
    assert walk.fail(computation) == ([first, second], [])
    assert not len(walk.computations)


def test_who_waits_for_a_part_of_it_has_that_computed_by_itself() -> None:
    walk = Walk()
    first, computation = lead(walk, "abc")
    second, own = walk.join("bcd")
    assert own is not None
    third, _ = walk.join("c")
    failed, restarted = walk.fail(computation)
    assert failed == [first]
    assert [again.items for again in restarted] == [["b"], ["c"]]
    assert walk.fail(restarted[0]) == ([second], [])
    assert own.is_over, "nobody waits for it any more"
    assert walk.answer(restarted[1]) == [third]
    assert third.outputs == ["C"]
    assert not len(walk.computations)


def test_nothing_is_computed_again_for_a_model_that_must_not_run_twice() -> None:
    walk = Walk(may_rerun=False)
    first, computation = lead(walk, "ab")
    second, _ = walk.join("b")
    outcome = walk.computations.failed(computation, walk.now)
    assert outcome == ([first], [second], [], [])
    assert second.is_over, "it fails as well, but not of what may be about the item of another"


def test_what_is_too_late_for_the_first_caller_starts_again_for_the_others() -> None:
    walk = Walk()
    first, computation = lead(walk, "a", 1.0, URGENT)
    second, none = walk.join("a", 3.0, URGENT)
    third, none = walk.join("a", 2.0, URGENT)
    assert none is None
    failed, (again,) = walk.fail(computation, ending=Ending.LATE)
    assert failed == [first]
    assert (again.due, again.until, again.precedence) == (2.0, 2.0, URGENT)
    failed, (last,) = walk.fail(again, ending=Ending.LATE)
    assert failed == [third]
    assert walk.fail(last, ending=Ending.LATE) == ([second], [])


def test_one_flight_for_all_whose_time_is_no_order() -> None:
    walk = Walk()
    _, computation = lead(walk, "a", 1.0)
    walk.join("a", 3.0)
    walk.join("a", 2.0)
    _, (again,) = walk.fail(computation, ending=Ending.LATE)
    assert again.until == 3.0


def test_a_refused_computation_starts_again_for_callers_that_came_meanwhile() -> None:
    walk = Walk()
    walk.join("b")
    first, computation = lead(walk, "ab")
    second, _ = walk.join("a")
    assert walk.computations.refused(computation, first) == []
    assert walk.fail(computation) == ([second], [])
    assert len(walk.computations) == 1


def test_refused_alone_it_leaves_nothing_behind() -> None:
    walk = Walk()
    _, other = lead(walk, "b")
    first, computation = lead(walk, "ab")
    assert walk.computations.refused(computation, first) == []
    assert computation.is_over
    assert other.caller_count == 1
    assert len(walk.computations) == 1


#: What has, what wants, and whether it joins; both have a second, or what is said.
TABLE = [
    (ORDINARY, ORDINARY, True),
    (Precedence(1), ORDINARY, True),
    (ORDINARY, Precedence(1), False),
    (Precedence(1), Precedence(1), True),
    (Precedence(0, "a"), Precedence(0, "a"), True),
    (Precedence(0, "a"), ORDINARY, False),
    (ORDINARY, Precedence(0, "a"), False),
    (URGENT, ORDINARY, True),
    (URGENT, Precedence(5), True),
    (URGENT, URGENT, True),
    (ORDINARY, URGENT, False),
    (Precedence(5), URGENT, False),
]


@pytest.mark.parametrize(("has", "wants", "joins"), TABLE)
def test_a_caller_joins_what_serves_as_well_as_its_own(
    has: Precedence, wants: Precedence, joins: bool
) -> None:
    walk = Walk()
    _, computation = lead(walk, "a", 1.0, has)
    _, own = walk.join("a", 1.0, wants)
    assert (own is None) == joins
    if own is not None:
        assert walk.join("a", 1.0, wants)[1] is None, "which others join then"
    computation.accepted.is_running = True
    assert walk.join("a", 1.0, has)[1] is None
    assert walk.join("a", 1.0, wants)[1] is None


def test_what_is_with_a_worker_serves_everybody() -> None:
    walk = Walk()
    _, computation = lead(walk, "a", 5.0)
    computation.accepted.is_running = True
    assert walk.join("a", 1.0, Precedence(9, "other", has_deadline=True))[1] is None


def test_a_nearer_deadline_does_not_board_a_later_one() -> None:
    walk = Walk()
    lead(walk, "a", 2.0, URGENT)
    assert walk.join("a", 3.0, URGENT)[1] is None
    assert walk.join("a", 1.0, URGENT)[1] is not None


def test_only_a_flight_whose_order_is_not_its_time_is_extended() -> None:
    walk = Walk()
    _, computation = lead(walk, "a", 1.0)
    late = Caller(1, None, 2.0)
    assert walk.computations.join(late, [b"a"], "a", 0.5).outlived == [computation]
    lead(walk, "b", 1.0, URGENT)
    late = Caller(1, None, 2.0, URGENT)
    assert walk.computations.join(late, [b"b"], "b", 0.5).outlived == []


@pytest.mark.parametrize("precedence", [ORDINARY, URGENT])
def test_what_cannot_be_extended_is_kept_for_longer_from_the_start(precedence: Precedence) -> None:
    walk = Walk(can_extend=False, slack=2.0)
    _, computation = lead(walk, "a", 10.0, precedence)
    assert (computation.due, computation.until) == (10.0, 20.0)
    walk.now = 9.0
    assert walk.join("a", 10.0, precedence)[1] is None
    walk.now = 11.0
    assert walk.join("a", 10.0, precedence)[1] is not None
    assert walk.join("b")[1] is not None
    assert walk.join("b", 10.0)[1] is None


def test_the_cache_answers_later_ones_and_keeps_no_failure() -> None:
    cache: dict[bytes, Any] = {}
    walk = Walk(cache=cache)
    _, computation = lead(walk, "ab-")
    walk.answer(computation)
    assert cache == {b"a": "A", b"b": "B"}
    caller = Caller(3, None, math.inf)
    boarding = walk.computations.join(caller, [b"a", b"b", b"a"], "aba", 0.0)
    assert boarding.is_complete
    assert boarding.computation is None
    assert caller.outputs == ["A", "B", "A"]
    assert walk.computations.cached == 3
    caller, computation = lead(walk, "ac")
    assert computation.items == ["c"]
    walk.fail(computation)
    assert lead(walk, "c")[1].items == ["c"]


def test_what_was_in_flight_when_the_cache_was_cleared_does_not_come_into_it() -> None:
    walk = Walk(cache={})
    _, computation = lead(walk, "a")
    walk.computations.forget()
    walk.answer(computation)
    _, again = lead(walk, "a")
    walk.answer(again)
    assert walk.join("a")[1] is None


def test_outputs_that_several_get_are_marked() -> None:
    walk = Walk(shared=lambda output: f"shared {output}")
    first, computation = lead(walk, "aab")
    walk.answer(computation)
    assert first.outputs == ["shared A", "shared A", "B"]


def test_callers_that_try_again_and_again_do_not_fill_up_a_computation() -> None:
    walk = Walk()
    _, computation = lead(walk, "a")
    for _ in range(1000):
        walk.leave(walk.join("a")[0])
    assert len(computation.waiting[0]) < 100


def test_the_timing_of_one_who_came_later_has_no_time_before_that() -> None:
    walk = Walk()
    first, computation = lead(walk, "a")
    walk.now = 1.5
    second, _ = walk.join("a")
    computation.accepted.timing = Timing(1.0, 1.0, 2.0, 0.5, 2.25, 0.5, 1.0)
    walk.computations.answered(computation, ["A"], computation.accepted)
    assert first.timing == Timing(1.0, 1.0, 2.0, 0.5, 2.25, 0.5, 1.0)
    assert second.timing == Timing(0.0, 0.5, 2.0, 0.5, 0.75, 0.5, 1.0)


# -- in any order


class Outcome:
    """A reply that notes how often it was called."""

    def __init__(self) -> None:
        self.call: Any = None
        self.outputs: list[Any] | None = None
        self.failure: Failure | None = None
        self.times = 0

    def complete(self, outputs: list[Any]) -> None:
        self.times += 1
        self.outputs = outputs

    def fail(self, failure: Failure) -> None:
        self.times += 1
        self.failure = failure


def test_who_has_more_time_than_the_next_is_tried_after_it() -> None:
    clock = ManualClock()
    backend = StubBackend(clock)
    single = SingleFlight(backend, extend=backend.extend, clock=clock)
    outcomes = [Outcome() for _ in range(3)]
    single.submit(Call("ax", outcomes[0]))
    backend.open[0].is_running = True
    single.submit(Call("a", outcomes[1], 1, URGENT))
    single.submit(Call("a", outcomes[2]))
    clock.advance(2)
    backend.over(computation := backend.open[0])
    computation.reply.fail(Failure(KeyError("x")))
    errors = [each.failure and type(each.failure.exception()) for each in outcomes]
    assert errors == [KeyError, PredictTimeout, None]
    backend.open[0].reply.complete(["A"])
    assert outcomes[2].outputs == ["A"]


class StubBackend:
    """Accepts or refuses calls, and answers those that the test says."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.open: list[AcceptedCall] = []
        self.refuses = self.fails_at_once = False
        self.unflushed = False

    def submit(self, call: Call) -> None:
        reply, timeout = call.reply, call.timeout
        assert not call.is_watched
        if self.refuses:
            raise Overloaded("no room")
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("no time left")
        if self.fails_at_once:
            reply.fail(Failure(ValueError("unpicklable")))
            return
        deadline = math.inf if timeout is None else self.clock() + timeout
        accepted = reply.call = AcceptedCall(call.payloads, reply, deadline)
        self.open.append(accepted)
        self.unflushed = call.more

    def extend(self, call: AcceptedCall, deadline: float) -> bool:
        call.deadline = max(call.deadline, deadline)
        return not call.is_over

    def flush(self) -> None:
        self.unflushed = False

    def over(self, call: AcceptedCall) -> bool:
        if call.is_over:
            return False
        call.is_over = True
        self.open.remove(call)
        return True

    def cancel(self, call: AcceptedCall) -> bool:
        return not call.is_running and self.over(call)

    def withdraw(self, call: AcceptedCall) -> None:
        self.over(call)

    expire = withdraw

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def late(self, timeout: float | None) -> StreamerError:
        return PredictTimeout(f"no result within {timeout} s")

    def describe(self) -> str:
        return "stub"

    def model_description(self) -> None:
        return None

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        pass

    def check_process(self) -> None:
        pass

    def check_not_in_callback(self) -> None:
        pass

    def wait_ready(self, timeout: float | None) -> None:
        pass

    def close(self, *, drain: bool, timeout: float | None) -> None:
        pass


BAD = {"x"}
PRECEDENCES = st.sampled_from(
    [ORDINARY, ORDINARY, ORDINARY, URGENT, URGENT, Precedence(1), Precedence(0, "tenant")]
)


class AnyOrder(RuleBasedStateMachine):
    """Every call is answered exactly once, with its own results or the failure of an own item."""

    @initialize(can_extend=st.booleans(), has_cache=st.booleans(), copies=st.booleans())
    def build(self, can_extend: bool, has_cache: bool, copies: bool) -> None:
        self.clock = ManualClock()
        self.backend = StubBackend(self.clock)
        self.is_even = can_extend
        self.single = SingleFlight(
            self.backend,
            copies=copies,
            extend=self.backend.extend if can_extend else None,
            slack=1.0 if can_extend else 2.0,
            cache={} if has_cache else None,
            clock=self.clock,
        )
        self.waiting: list[tuple[list[str], Outcome, float]] = []
        self.ended: list[Outcome] = []

    def settle(self) -> None:
        """Look at who has been answered."""
        left = []
        for items, outcome, deadline in self.waiting:
            if not outcome.times:
                left.append((items, outcome, deadline))
                continue
            self.ended.append(outcome)
            if outcome.outputs is not None:
                outputs = self.single.decode(outcome.outputs)
                assert outputs == [f"result of {item}" for item in items]
            else:
                assert outcome.failure is not None
                error = outcome.failure.exception()
                if isinstance(error, KeyError):
                    assert BAD & set(items), "it failed of another's bad item"
                if isinstance(error, PredictTimeout):
                    assert deadline <= self.clock(), "it failed of another's time"
        self.waiting = left

    @rule(
        calls=st.lists(
            st.tuples(
                st.lists(st.sampled_from("abcx"), min_size=1, max_size=3),
                st.sampled_from([None, 1.0, 5.0]),
                PRECEDENCES,
                st.sampled_from(["", "", "", "", "refuses", "fails_at_once"]),
            ),
            min_size=1,
            max_size=5,
        ),
        more=st.booleans(),
    )
    def submit(
        self, calls: list[tuple[list[str], float | None, Precedence, str]], more: bool
    ) -> None:
        for items, timeout, precedence, trouble in calls:
            outcome = Outcome()
            if trouble:
                setattr(self.backend, trouble, True)
            if precedence is not ORDINARY:
                self.is_even = False
            try:
                self.single.submit(Call(items, outcome, timeout, precedence, more=more))
            except Overloaded:
                assert not outcome.times
            else:
                deadline = math.inf if timeout is None else self.clock() + timeout
                self.waiting.append((items, outcome, deadline))
            self.backend.refuses = self.backend.fails_at_once = False
        if more:
            self.single.flush()
        self.settle()

    @precondition(lambda self: self.backend.open)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.backend.open)).is_running = True

    @precondition(lambda self: self.backend.open)
    @rule(
        data=st.data(),
        breaks=st.sampled_from([False, False, False, True]),
        refuses=st.sampled_from([False, False, False, True]),
    )
    def come_back(self, data: st.DataObject, breaks: bool, refuses: bool) -> None:
        call = data.draw(st.sampled_from(self.backend.open))
        self.backend.over(call)
        self.backend.refuses = refuses
        if breaks or BAD & set(call.items):
            error = RuntimeError("the model is away") if breaks else KeyError("bad item")
            call.reply.fail(Failure(error))
        else:
            call.reply.complete([f"result of {item}" for item in call.items])
        self.backend.refuses = False
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]), is_prompt=st.booleans())
    def time_passes(self, seconds: float, is_prompt: bool) -> None:
        """Callers give up, and the backend drops what it was to keep until now only."""
        self.clock.advance(seconds)
        for items, outcome, deadline in [*self.waiting]:
            # Some are slow to: then the backend is first.
            if deadline <= self.clock() and not outcome.times and is_prompt:
                self.single.expire(outcome.call)
                assert not outcome.times
                self.waiting.remove((items, outcome, deadline))
        for call in [*self.backend.open]:
            if call.deadline <= self.clock() and not call.is_running and self.backend.over(call):
                call.reply.fail(Failure(PredictTimeout("too late")))
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["withdraw", "expire", "cancel"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        gone = getattr(self.single, how)(entry[1].call)
        if how != "cancel" or gone:
            self.waiting.remove(entry)
            self.ended.append(entry[1])
            entry[1].times += 1

    @rule()
    def forget(self) -> None:
        self.single.forget()

    @invariant()
    def nothing_is_twice_or_in_vain(self) -> None:
        self.single.computations.check_invariants()
        assert all(outcome.times == 1 for outcome in self.ended)
        assert not self.backend.unflushed
        for call in self.backend.open:
            assert any(set(call.items) & set(items) for items, _, _ in self.waiting), "in vain"
        for items, _, _ in self.waiting:
            assert any(set(call.items) & set(items) for call in self.backend.open), "for nothing"
        if self.is_even:
            computed = [item for call in self.backend.open for item in call.items]
            assert len(computed) == len(set(computed)), "twice"

    def teardown(self) -> None:
        if not hasattr(self, "backend"):
            return
        while self.backend.open:
            call = self.backend.open[0]
            self.backend.over(call)
            call.reply.complete([f"result of {item}" for item in call.items])
        self.settle()
        assert self.waiting == []
        assert not len(self.single.computations)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
