"""The engine on a transport without workers and a clock that moves when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service_streamer import (
    StreamerBroken,
    StreamerClosed,
    UnpicklableItem,
    WorkerLost,
    WorkerStartError,
    WorkerStartTimeout,
)
from service_streamer.engine import Engine, EngineState
from service_streamer.futures import Future
from service_streamer.scheduling.batcher import Batcher
from service_streamer.testing import ManualClock, StubTransport
from service_streamer.workers import transport as events
from service_streamer.workers.messages import Failure


class Setup:
    def __init__(self, worker_num: int = 1) -> None:
        self.clock = ManualClock()
        self.transport = StubTransport(self.clock)
        batcher = Batcher(batch_size=4, max_latency=0.1, slots=worker_num)
        self.engine = Engine(self.transport, batcher, worker_num=worker_num, clock=self.clock)
        self.engine.start()

    def submit(self, *items: Any) -> Future:
        future = Future(self.engine)
        self.engine.submit(items, future)
        return future

    def lose(self, slot: int, error: Exception, *, has_started: bool) -> None:
        self.transport.deliver(events.WorkerLost(slot, Failure(error), has_started))


@pytest.fixture
def one() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.engine.close(drain=False, timeout=None)


@pytest.fixture
def two() -> Iterator[Setup]:
    setup = Setup(2)
    yield setup
    setup.engine.close(drain=False, timeout=None)


def test_a_call_waits_for_its_worker_and_is_answered(one: Setup) -> None:
    future = one.submit("a", "b")
    assert not one.transport.sent
    one.transport.ready(0)
    assert one.transport.sent == [(0, 0, ["a", "b"])]
    one.transport.echo()
    assert future.result(0) == ["a", "b"]


def test_an_idle_engine_waits_without_a_timeout(one: Setup) -> None:
    one.transport.ready(0)
    one.submit("a")
    one.transport.echo()
    assert set(one.transport.timeouts) == {None}


def test_a_worker_is_refilled_before_the_callers_are_told(one: Setup) -> None:
    one.transport.ready(0)
    seen: list[int] = []
    one.submit("a").add_done_callback(lambda _: seen.append(len(one.transport.sent)))
    one.submit("b")
    one.transport.echo()
    assert seen == [2]


def test_the_loop_wakes_when_waiting_for_company_ends(one: Setup) -> None:
    # Given four callers who always came back, and who have been answered just now
    one.transport.ready(0)
    company = one.engine._batcher._company
    for _ in range(20):
        company.answered(4, 0.2, one.clock())
        for _ in range(4):
            one.clock.advance(0.001)
            company.arrived(1, one.clock())
    company.answered(4, 0.2, one.clock())
    # When one comes back alone, and no other event happens than that time passes
    future = one.submit("lone")
    assert not one.transport.sent
    one.clock.advance(0.05)
    # Then it is sent all the same
    while not one.transport.sent:
        threading.Event().wait(0.001)
    one.transport.echo()
    assert future.result(0) == ["lone"]


def test_a_refused_item_fails_its_own_call_only(one: Setup) -> None:
    one.transport.refused_items.append(("bad", UnpicklableItem("bad")))
    one.transport.ready(0)
    with pytest.raises(UnpicklableItem):
        one.submit("bad").result(0)
    good = one.submit("good")
    one.transport.echo()
    assert good.result(0) == ["good"]


def test_a_raising_callback_or_reply_hurts_nobody(
    one: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    class BadReply:
        call = None

        def complete(self, outputs: list[Any]) -> None:
            raise RuntimeError("bad reply")

        def fail(self, error: BaseException) -> None:
            raise RuntimeError("bad reply")

    one.transport.ready(0)
    one.submit("busy").add_done_callback(lambda _: 1 / 0)
    one.engine.submit(["x"], BadReply())
    neighbour = one.submit("y")
    one.transport.echo()
    one.transport.echo()
    assert neighbour.result(0) == ["y"]
    assert "bad reply" in caplog.text


def test_results_that_come_back_after_a_withdrawal_are_dropped(one: Setup) -> None:
    one.transport.ready(0)
    future = one.submit("a")
    assert future.call is not None
    one.engine.withdraw(future.call)
    one.transport.echo()
    assert not future.done()
    assert one.engine.statistics().items_in_flight == 0


# -- starting


def test_wait_ready_waits_for_every_worker(two: Setup) -> None:
    two.transport.ready(0)
    with pytest.raises(WorkerStartTimeout, match=r"0 s"):
        two.engine.wait_ready(0)
    assert two.engine.state is EngineState.STARTING
    two.transport.ready(1)
    two.engine.wait_ready(None)
    assert two.engine.state is EngineState.RUNNING


def test_a_failed_start_is_told_though_others_serve(two: Setup) -> None:
    two.transport.ready(0)
    two.lose(1, WorkerStartError("no weights"), has_started=False)
    for _ in range(2):
        with pytest.raises(WorkerStartError, match="no weights"):
            two.engine.wait_ready(None)
    future = two.submit("a")
    two.transport.echo()
    assert future.result(0) == ["a"]


def test_calls_fail_with_the_start_error_when_no_worker_starts(one: Setup) -> None:
    meanwhile = one.submit("a")
    one.lose(0, WorkerStartError("no weights"), has_started=False)
    assert one.engine.state is EngineState.BROKEN
    with pytest.raises(WorkerStartError, match="no weights"):
        meanwhile.result(0)
    with pytest.raises(WorkerStartError, match="no weights"):
        one.submit("b")


def test_after_the_last_worker_died_nobody_waits(one: Setup) -> None:
    one.transport.ready(0)
    held = one.submit("held")
    waiting = one.submit("waiting")
    one.lose(0, WorkerLost("killed"), has_started=True)
    with pytest.raises(WorkerLost, match="killed"):
        held.result(0)
    for refused in (lambda: waiting.result(0), lambda: one.submit("later")):
        with pytest.raises(StreamerBroken, match="no worker is left") as caught:
            refused()
        assert isinstance(caught.value.__cause__, WorkerLost)
    with pytest.raises(StreamerBroken):
        one.engine.wait_ready(None)


# -- the end


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest(one: Setup) -> None:
    one.transport.ready(0)
    running, waiting = one.submit("a"), one.submit("b")
    closing = threading.Thread(target=one.engine.close, kwargs={"drain": True, "timeout": None})
    closing.start()
    while one.engine.state is not EngineState.DRAINING:
        threading.Event().wait(0.001)
    with pytest.raises(StreamerClosed):
        one.submit("c")
    one.transport.echo()
    assert running.result(0) == ["a"]
    one.transport.echo()
    assert waiting.result(0) == ["b"]
    closing.join()
    assert one.transport.is_closed
    assert one.engine.state is EngineState.CLOSED


def test_a_drain_ends_when_the_last_call_is_cancelled(one: Setup) -> None:
    future = one.submit("a")
    closing = threading.Thread(target=one.engine.close, kwargs={"drain": True, "timeout": None})
    closing.start()
    while one.engine.state is not EngineState.DRAINING:
        threading.Event().wait(0.001)
    assert future.cancel()
    closing.join()


def test_a_drain_ends_at_its_deadline(one: Setup) -> None:
    one.transport.ready(0)
    future = one.submit("a")
    closing = threading.Thread(target=one.engine.close, kwargs={"drain": True, "timeout": 5.0})
    closing.start()
    while one.engine.state is not EngineState.DRAINING:
        threading.Event().wait(0.001)
    one.clock.advance(5.0)
    closing.join()
    with pytest.raises(StreamerClosed):
        future.result(0)


def test_a_bug_in_the_loop_fails_every_call_instead_of_hanging(
    one: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    one.transport.ready(0)
    future = one.submit("a")
    one.transport.deliver(events.BatchDone(0, 99, [], {}, 0.0))
    with pytest.raises(StreamerBroken, match="our bug"):
        future.result(0)
    with pytest.raises(StreamerBroken, match="our bug"):
        one.submit("b")
    assert "this is a bug in it" in caplog.text
