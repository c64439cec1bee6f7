"""Who is answered by whose computation: single flight over a stub of a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service_streamer import Overloaded, PredictTimeout, StreamerError, Timing, UnpicklableItem
from service_streamer.observe.record import ORDINARY, Call, CallOptions
from service_streamer.single_flight import SingleFlight
from service_streamer.testing import ManualClock
from service_streamer.workers.protocol import Failure

URGENT = CallOptions(has_deadline=True)


class AcceptedCall:
    """What a backend has accepted."""

    def __init__(self, items: Sequence[Any], reply: Any, deadline: float) -> None:
        self.items = list(items)
        self.reply = reply
        self.deadline = deadline
        self.is_running = self.is_over = False
        self.timing: Timing | None = None


class Outcome:
    """A reply that notes how often it was called."""

    def __init__(self) -> None:
        self.call: Any = None
        self.outputs: list[Any] | None = None
        self.failure: Failure | None = None
        self.times = 0

    def end(self, outcome: list[Any] | Failure) -> None:
        self.times += 1
        if isinstance(outcome, Failure):
            self.failure = outcome
        else:
            self.outputs = outcome


class StubBackend:
    """Accepts or refuses calls, and answers those that the test says."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.open: list[AcceptedCall] = []
        self.refuses = self.fails_at_once = False
        #: Called in the middle of the next call, as if by another thread.
        self.before_next: Callable[[], object] | None = None
        self.raises: list[BaseException] = []  # by the next calls
        self.unflushed = False

    def submit(self, call: Call) -> None:
        reply, timeout = call.reply, call.timeout
        assert not call.is_watched
        before, self.before_next = self.before_next, None
        if before is not None:
            before()
        if self.raises:
            error = self.raises.pop(0)
            if isinstance(error, KeyboardInterrupt):  # halfway, and cannot be withdrawn
                reply.call = AcceptedCall(call.payloads, reply, math.inf)
            raise error
        if self.refuses:
            raise Overloaded("no room")
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("no time left")
        if self.fails_at_once:
            reply.end(Failure(ValueError("unpicklable")))
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

    def withdraw(self, call: AcceptedCall, *, has_expired: bool = False) -> None:
        self.over(call)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def late(self, timeout: float | None) -> StreamerError:
        return PredictTimeout(f"no result within {timeout} s")

    def check_process(self) -> None:
        pass


class Flights:
    """Single flight over that backend, at a time that stands still.

    Attributes:
        open: what the backend is at.
    """

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.backend: Any = StubBackend(self.clock)
        self.open = self.backend.open
        if "extend" in options:
            self.backend.extend = options.pop("extend")
        self.single = SingleFlight(self.backend, clock=self.clock, **options)

    def submit(
        self, items: str, timeout: float | None = None, options: CallOptions = ORDINARY
    ) -> Outcome:
        """A call for items that are letters."""
        outcome = Outcome()
        self.single.submit(Call(items, outcome, timeout, options))
        return outcome

    def end(self, what: list[Any] | Exception) -> None:
        """The first call comes back."""
        call = self.open[0]
        self.backend.over(call)
        call.reply.end(Failure(what) if isinstance(what, Exception) else what)


#: What has, what wants, and whether it joins; both have a second, or what is said.
TABLE = [
    (ORDINARY, ORDINARY, True),
    (CallOptions(1), ORDINARY, True),
    (ORDINARY, CallOptions(1), False),
    (CallOptions(1), CallOptions(1), True),
    (CallOptions(0, "a"), CallOptions(0, "a"), True),
    (CallOptions(0, "a"), ORDINARY, False),
    (ORDINARY, CallOptions(0, "a"), False),
    (URGENT, ORDINARY, True),
    (URGENT, CallOptions(5), True),
    (URGENT, URGENT, True),
    (ORDINARY, URGENT, False),
    (CallOptions(5), URGENT, False),
]


@pytest.mark.parametrize(("has", "wants", "joins"), TABLE)
def test_a_caller_joins_what_serves_as_well_as_its_own(
    has: CallOptions, wants: CallOptions, joins: bool
) -> None:
    flights = Flights()
    flights.submit("a", 1.0, has)
    flights.submit("a", 1.0, wants)
    assert len(flights.open) == 2 - joins
    flights.submit("a", 1.0, wants)
    assert len(flights.open) == 2 - joins, "it joins what came before for such a one"
    flights.open[0].is_running = True
    for options in (has, wants, CallOptions(9, "other", has_deadline=True)):
        flights.submit("a", 1.0, options)
    assert len(flights.open) == 2 - joins, "what is with a worker serves everybody"


def test_a_nearer_deadline_does_not_board_a_later_one() -> None:
    flights = Flights()
    flights.submit("a", 2.0, URGENT)
    flights.submit("a", 3.0, URGENT)
    assert len(flights.open) == 1
    flights.submit("a", 1.0, URGENT)
    assert len(flights.open) == 2


@pytest.mark.parametrize(("options", "until"), [(ORDINARY, 2.0), (URGENT, 1.0)])
def test_only_a_flight_whose_order_is_not_its_time_is_extended(
    options: CallOptions, until: float
) -> None:
    flights = Flights()
    flights.submit("a", 1.0, options)
    flights.submit("a", 2.0, options)
    assert [call.deadline for call in flights.open] == [until]


def test_what_could_not_be_extended_in_time_starts_again_for_all_whose_time_is_no_order() -> None:
    flights = Flights(extend=lambda *_: False)
    outcomes = [flights.submit("a", seconds) for seconds in (1.0, 3.0, 2.0)]
    flights.clock.advance(1.0)
    flights.end(PredictTimeout("too late"))
    assert [outcome.times for outcome in outcomes] == [1, 0, 0]
    assert [call.deadline for call in flights.open] == [3.0]


@pytest.mark.parametrize("options", [ORDINARY, URGENT])
def test_what_cannot_be_extended_is_kept_for_longer_from_the_start(options: CallOptions) -> None:
    flights = Flights(extend=None)
    flights.submit("a", 10.0, options)
    assert [call.deadline for call in flights.open] == [20.0]
    for now, keys, calls in ((9.0, "a", 1), (11.0, "a", 2)):
        flights.clock.advance(now - flights.clock())
        flights.submit(keys, 10.0, options)
        assert len(flights.open) == calls
    flights.submit("b")
    flights.submit("b", 10.0)
    assert len(flights.open) == 3


def test_what_starts_again_serves_no_call_with_a_nearer_deadline() -> None:
    flights = Flights(extend=None)
    for items, timeout in (("ab", 10.0), ("a", 15.0)):
        flights.submit(items, timeout, URGENT)
    flights.end(ValueError("of one of them"))
    assert [call.items for call in flights.open] == [["a"]]
    for timeout, calls in ((15.0, 1), (9.0, 2)):
        flights.submit("a", timeout, URGENT)
        assert len(flights.open) == calls


def test_what_would_start_again_too_late_fails() -> None:
    flights = Flights(extend=None)
    flights.submit("ab", 10.0)
    late = flights.submit("a", 11.0)
    flights.clock.advance(12.0)
    flights.end(ValueError("of one of them"))
    assert flights.open == []
    assert late.failure is not None
    assert late.failure.text == "PredictTimeout: no time left"


def test_many_items_of_a_failed_computation_start_again_at_once() -> None:
    flights = Flights()
    items = "".join(map(chr, range(2000)))
    for batch in (items + "\u2000", items):
        flights.submit(batch)
    begun = time.thread_time()
    flights.end(ValueError("of one of them"))
    assert time.thread_time() - begun < 0.5
    assert len(flights.open) == len(items)


def test_what_was_in_flight_when_the_cache_was_cleared_does_not_come_into_it() -> None:
    flights = Flights(cache={})
    for is_cleared in (True, False):
        flights.submit("a")
        if is_cleared:
            flights.single.forget()
        flights.end(["A"])
    assert flights.submit("a").outputs == ["A"]
    assert flights.open == []


def test_callers_that_try_again_and_again_do_not_fill_up_a_computation() -> None:
    flights = Flights()
    flights.submit("a")
    for _ in range(1000):
        flights.single.withdraw(flights.submit("a").call)
    [call] = flights.open
    assert len(call.reply.callers) == 1


def test_the_timing_of_one_who_came_later_has_no_time_before_that() -> None:
    flights = Flights()
    first = flights.submit("a")
    flights.clock.advance(1.5)
    second = flights.submit("a")
    flights.open[0].timing = Timing(1.0, 1.0, 2.0, 0.5, 2.25, 0.5, 1.0)
    flights.end(["A"])
    assert first.call.timing == Timing(1.0, 1.0, 2.0, 0.5, 2.25, 0.5, 1.0)
    assert second.call.timing == Timing(0.0, 0.5, 2.0, 0.5, 0.75, 0.5, 1.0)


@pytest.mark.parametrize("may_rerun", [True, False])
@pytest.mark.parametrize("items", ["x", "xz"])
@pytest.mark.parametrize(
    "error", [Overloaded("no room"), ValueError("a secret"), KeyboardInterrupt("a secret")]
)
def test_what_a_call_is_refused_for_is_no_failure_of_one_that_joined_it(
    error: BaseException, items: str, may_rerun: bool
) -> None:
    flights = Flights(may_rerun=may_rerun)
    joined: list[Outcome] = []
    flights.backend.before_next = lambda: joined.append(flights.submit("x"))
    flights.backend.raises = [error]
    with pytest.raises(type(error)):
        flights.submit(items)
    assert [call.items for call in flights.open] == [["x"]]
    flights.end(["X"])
    assert joined[0].outputs == ["X"]


def test_a_call_that_is_interrupted_is_neither_withdrawn_nor_lost() -> None:
    flights = Flights(cache={})
    flights.backend.raises = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        flights.submit("x")
    assert not flights.single.computations
    flights.submit("x")
    assert [call.items for call in flights.open] == [["x"]]
    flights.end(["X"])
    interrupted = Mock(end=Mock(side_effect=StreamerError("of a signal handler")))
    with pytest.raises(StreamerError):
        flights.single.submit(Call("x", interrupted))


def test_a_call_that_joined_a_refused_one_may_be_refused_itself() -> None:
    flights = Flights()
    joined: list[Outcome] = []
    flights.backend.before_next = lambda: joined.append(flights.submit("x"))
    flights.backend.raises = [Overloaded("no room"), Overloaded("none either")]
    with pytest.raises(Overloaded, match="no room"):
        flights.submit("xz")
    assert flights.open == []
    assert joined[0].failure is not None
    assert joined[0].failure.text == "Overloaded: none either"


def test_an_item_that_cannot_be_sent_is_no_failure_of_a_call_without_it() -> None:
    flights = Flights(may_rerun=False)
    first, second = flights.submit("xz"), flights.submit("x")
    flights.end(UnpicklableItem("item 1 of the batch"))
    assert first.failure is not None
    flights.end(["X"])
    assert second.outputs == ["X"]


# -- in any order

BAD = {"x"}
OPTIONS = st.sampled_from(
    [ORDINARY, ORDINARY, ORDINARY, URGENT, URGENT, CallOptions(1), CallOptions(0, "tenant")]
)


class AnyOrder(RuleBasedStateMachine):
    """Every call is answered exactly once, with its own results or the failure of an own item."""

    @initialize(can_extend=st.booleans(), has_cache=st.booleans(), copies=st.booleans())
    def build(self, can_extend: bool, has_cache: bool, copies: bool) -> None:
        options = {} if can_extend else {"extend": None}
        flights = Flights(copies=copies, cache={} if has_cache else None, **options)
        self.clock, self.backend, self.single = flights.clock, flights.backend, flights.single
        self.is_even = can_extend
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
                OPTIONS,
                st.sampled_from(["", "", "", "", "refuses", "fails_at_once"]),
            ),
            min_size=1,
            max_size=5,
        ),
        more=st.booleans(),
    )
    def submit(
        self, calls: list[tuple[list[str], float | None, CallOptions, str]], more: bool
    ) -> None:
        for items, timeout, options, trouble in calls:
            outcome = Outcome()
            if trouble:
                setattr(self.backend, trouble, True)
            if options is not ORDINARY:
                self.is_even = False
            try:
                self.single.submit(Call(items, outcome, timeout, options, more=more))
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
            call.reply.end(Failure(error))
        else:
            call.reply.end([f"result of {item}" for item in call.items])
        self.backend.refuses = False
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]), is_prompt=st.booleans())
    def time_passes(self, seconds: float, is_prompt: bool) -> None:
        """Callers give up, and the backend drops what it was to keep until now only."""
        self.clock.advance(seconds)
        for items, outcome, deadline in [*self.waiting]:
            # Some are slow to: then the backend is first.
            if deadline <= self.clock() and not outcome.times and is_prompt:
                self.single.withdraw(outcome.call, has_expired=True)
                assert not outcome.times
                self.waiting.remove((items, outcome, deadline))
        for call in [*self.backend.open]:
            if call.deadline <= self.clock() and not call.is_running and self.backend.over(call):
                call.reply.end(Failure(PredictTimeout("too late")))
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["withdraw", "cancel"]))
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
            call.reply.end([f"result of {item}" for item in call.items])
        self.settle()
        assert self.waiting == []
        assert not self.single.computations


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
