"""The engine on a transport without workers and a clock that moves when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import service_streamer.workers.transport as events
from conftest import await_that
from service_streamer import (
    Future,
    InternalError,
    ModelError,
    Overloaded,
    PredictTimeout,
    StreamerBroken,
    StreamerForked,
    TooLate,
    WorkerLost,
    WorkerStartError,
    WorkerStartTimeout,
)
from service_streamer.engine.backend import PassThrough, predict_blocking
from service_streamer.engine.engine import Engine, EngineState
from service_streamer.observe.record import BatchReport, Call, StepReport
from service_streamer.supervision.supervisor import Loss
from service_streamer.workers.protocol import Failure, WorkerReady
from stub_engine import StubEngine


@pytest.fixture
def two() -> Iterator[StubEngine]:
    with StubEngine(2) as made:
        yield made


def test_a_worker_is_refilled_before_the_callers_are_told(one: StubEngine) -> None:
    one.transport.ready(0)
    seen: list[int] = []
    one.submit("a").add_done_callback(lambda _: seen.append(len(one.transport.sent)))
    one.submit("b")
    one.transport.echo()
    assert seen == [2]


def callers_who_come_back(setup: StubEngine, count: int) -> None:
    """So many always come back, as is known, and have been answered just now."""
    setup.transport.ready(0)
    for _ in range(20):
        for _ in range(count):
            setup.clock.advance(0.001)
            setup.engine.submit(Call([None], Future(setup.engine), more=True))
        setup.engine.flush()
        setup.clock.advance(0.2)
        setup.transport.echo(duration=0.2)
    assert len(setup.transport.sent) == 20
    setup.transport.sent.clear()


def test_the_loop_wakes_when_the_wait_for_expected_arrivals_ends() -> None:
    with StubEngine(batch_size=8, max_latency=10.0) as one:
        callers_who_come_back(one, 4)
        one.clock.advance(0.055)
        # When one comes back alone, and no other event happens than that time passes
        future = one.submit("lone")
        assert not one.transport.sent
        one.advance(0.1)
        # Then it is sent all the same
        assert one.transport.sent
        one.transport.echo()
        assert future.result(0) == ["lone"]


@pytest.mark.parametrize(("timeout", "refusal"), [(None, Overloaded), (0.001, TooLate)])
def test_a_call_that_is_refused_is_not_kept(
    timeout: float | None, refusal: type[Exception]
) -> None:
    with StubEngine(batch_size=1, max_pending=3) as one:
        one.transport.ready(0)
        for _ in range(20):  # how long a batch takes is learned
            one.submit("computed")
            one.clock.advance(1.0)
            one.transport.echo(duration=1.0)
        for _ in range(4 if timeout is None else 0):  # one is computed, one is sent ahead
            one.submit("waits")
        gc.disable()
        try:
            call = Call(["refused"] * 2, Future(one.engine), timeout)
            reference = weakref.ref(call.reply)
            with contextlib.suppress(refusal):
                one.engine.submit(call)
                pytest.fail("it was accepted")
            del call
            assert reference() is None
        finally:
            gc.enable()


def test_a_refusal_does_not_keep_the_loop_from_a_call_that_waits() -> None:
    # Given four callers who always come back, and room for four items
    with StubEngine(batch_size=64, max_pending=4, max_latency=10.0) as setup:
        engine, transport = setup.engine, setup.transport
        callers_who_come_back(setup, 4)
        setup.clock.advance(0.055)
        first, second = (Call([n] * 4, Future(engine), more=True) for n in range(2))
        reply, woken, wakeup = first.reply, [], transport.wakeup
        transport.wakeup = lambda: (woken.append(True), wakeup())  # type: ignore
        # When the second one is refused, after it was decided until when the first one waits
        engine.submit(first)
        with pytest.raises(Overloaded):
            engine.submit(second)
        assert not transport.sent
        assert setup.batcher.deadline < math.inf
        # Then the loop is woken, and looks when that is
        assert woken
        setup.advance(0.1)
        transport.echo()
        assert reply.result(0) == [0] * 4


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_a_raising_callback_or_reply_hurts_nobody(
    one: StubEngine, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def raise_it(_: Any) -> None:
        raise error

    class BadReply:
        call = None

        def end(self, outcome: object) -> None:
            raise RuntimeError("bad reply")

    one.transport.ready(0)
    one.submit("busy").add_done_callback(raise_it)
    one.engine.submit(Call(["x"], BadReply()))
    neighbour = one.submit("y")
    one.transport.echo()
    one.transport.echo()
    assert neighbour.result(0) == ["y"]
    assert "bad reply" in caplog.text


def test_a_call_within_a_send_of_the_same_thread_is_sent_to_another_worker() -> None:
    with StubEngine(worker_num=2, batch_size=1) as one:
        one.transport.ready(0)
        one.transport.ready(1)
        send, handlers = one.transport.send, [["d"], ["b", "c"]]

        def interrupted(*message: Any, **options: Any) -> None:
            for item in handlers.pop() if handlers else []:
                one.submit(item)
            send(*message, **options)

        one.transport.send = interrupted  # type: ignore[method-assign]
        one.submit("a")
        one.transport.await_that(lambda: len(one.sent) == 4)
        assert one.sent[0] == ["b"]
        for slot in (0, 1):
            ids = [id_ for each, id_, _ in one.transport.sent if each == slot]
            assert ids == sorted(ids)


# -- starting


def test_batch_sizes_that_a_model_pads_to_are_those_of_its_description_if_they_are_right() -> None:
    for said, sizes in [
        ([1, 2, 4], (1, 2, 4)), (None, ()), ([2, 1], ()), ([0, 1], ()), ([1, 1], ()), ("12", ()),
        ([1.0], ()), ([True], ()), ([], ()),
    ]:  # fmt: skip
        with StubEngine() as one:
            one.transport.deliver(events.WorkerReady(0, {"batch_sizes": said}))
            assert one.batcher.slots.sizes == sizes, said


def test_wait_ready_waits_for_every_worker(two: StubEngine) -> None:
    two.transport.ready(0)
    with pytest.raises(WorkerStartTimeout, match=r"0 s"):
        two.engine.wait_ready(0)
    assert two.engine.state is EngineState.STARTING
    two.transport.ready(1)
    two.engine.wait_ready(None)
    assert two.engine.state is EngineState.RUNNING


@pytest.mark.parametrize(("loss", "sizes"), [(Loss.OUTAGE, [2]), (Loss.CRASHED, [1])])
def test_what_was_lost_with_its_host_is_no_suspect_and_goes_again_as_it_was(
    one: StubEngine, loss: Loss, sizes: list[int]
) -> None:
    one.transport.ready(0)
    one.submit("a", "b")
    one.transport.lose(0, loss=loss)
    one.transport.ready(1)
    assert [len(payloads) for _, _, payloads in one.transport.sent[1:]] == sizes
    is_told = "a worker died, and the search" in str(one.engine.late(1.0))
    assert is_told == (loss is Loss.CRASHED), "to callers whose time ends meanwhile"


def test_when_no_worker_can_be_started_any_more_nobody_waits(one: StubEngine) -> None:
    one.transport.ready(0)
    held = one.submit("held")
    waiting = one.submit("waiting")
    one.transport.lose(0, text="killed")
    one.transport.lose(1, text="killed again")
    one.advance(0.1)
    one.transport.lose(2, text="killed once more")
    assert one.engine.state is EngineState.BROKEN
    for refused in (lambda: held.result(0), lambda: waiting.result(0), lambda: one.submit("later")):
        with pytest.raises(StreamerBroken, match="no worker is left") as caught:
            refused()
        assert "killed once more" in str(caught.value.__cause__)
    with pytest.raises(WorkerLost, match="killed once more"):
        one.engine.wait_ready(None)


# -- supervision


def test_items_run_again_in_parts_after_a_death() -> None:
    with StubEngine(batch_size=8) as setup:
        transport = setup.transport
        futures = [setup.submit(number) for number in range(8)]
        transport.ready(0)
        assert transport.sent == [(0, 0, [*range(8)])]
        transport.lose(0)
        transport.ready(1)
        while not all(future.done() for future in futures):
            transport.echo()
        assert [payloads for _, _, payloads in transport.sent[1:]] == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
        ]


def test_a_start_that_fails_is_a_loss(one: StubEngine, caplog: pytest.LogCaptureFixture) -> None:
    one.transport.ready(0)
    one.transport.refused_starts.append(OSError("no memory for a process"))
    one.transport.lose(0)
    one.transport.await_that(lambda: one.engine.state is EngineState.BROKEN)
    with pytest.raises(WorkerStartError, match="no memory for a process"):
        one.engine.wait_ready(None)


def test_a_worker_that_retires_goes_on_if_more_are_wanted_again(two: StubEngine) -> None:
    def await_retiring(count: int) -> None:
        await_that(lambda: two.engine.stats().workers["retiring"] == count)

    two.transport.ready(0, 1)
    two.submit("a")
    long = two.submit("b")
    two.engine.scale(1)
    await_retiring(1)
    two.engine.scale(2)
    await_retiring(0)
    two.transport.echo(1)
    assert long.result(0) == ["b"]
    two.submit("c")
    assert [slot for slot, _, _ in two.transport.sent] == [0, 1, 1]
    assert (len(two.transport.started), two.transport.stopped) == (2, [])


# -- time, and room


@pytest.mark.parametrize("ask", [Engine.model_description, Engine.check_room])
def test_a_forked_child_is_refused_what_needs_the_lock(ask: Callable[[Engine], object]) -> None:
    with StubEngine(max_pending=1) as one:
        one.submit("a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.engine, "_pid", -1)  # as if this were a child
            with pytest.raises(StreamerForked):
                ask(one.engine)


def test_a_worker_that_says_that_it_has_not_hung_gets_its_time_anew() -> None:
    """Between two model calls of a search for bad items, which may take many times as long."""
    with StubEngine(batch_timeout=10.0) as setup:
        setup.transport.ready(0)
        future = setup.submit("a")
        for _ in range(4):
            setup.clock.advance(4.0)
            setup.transport.deliver(StepReport(slot=0))
        assert not setup.transport.killed
        setup.transport.echo()
        assert future.result() == ["a"]
        setup.submit("b")
        setup.advance(10.0)
        setup.transport.await_that(lambda: setup.transport.killed == [0])


def test_an_idle_engine_is_not_woken_by_every_call_that_has_a_timeout() -> None:
    with StubEngine(batch_timeout=10.0) as setup:
        setup.transport.ready(0)
        for _ in range(20):
            setup.submit("a")
            setup.transport.echo()
        assert setup.transport.waits <= 25


def test_a_call_that_is_sent_in_part_is_not_cancelled(one: StubEngine) -> None:
    one.transport.ready(0)
    future = one.submit(*range(10))
    assert one.batcher.queue.items, "some of it waits"
    assert not future.cancel()
    for position in range(3):
        one.transport.echo(position)
    assert future.result(0) == [*range(10)]


def test_a_call_that_is_answered_while_it_is_being_withdrawn_is_late(one: StubEngine) -> None:
    class Answering(PassThrough):
        def __getattr__(self, name: str) -> Any:
            if name == "withdraw":
                one.transport.echo()
            return super().__getattr__(name)

    one.transport.ready(0)
    with pytest.raises(PredictTimeout):
        predict_blocking(Answering(one.engine), Call(["a"], None, 0.001))


# -- the end


def test_a_drain_ends_when_the_last_call_is_cancelled(one: StubEngine) -> None:
    future = one.submit("a")
    closing = threading.Thread(target=one.engine.close, kwargs={"drain": True, "timeout": None})
    closing.start()
    await_that(lambda: one.engine.state is EngineState.DRAINING)
    assert future.cancel()
    closing.join()


def test_a_call_that_was_to_be_flushed_is_computed_when_the_owner_has_gone(one: StubEngine) -> None:
    one.transport.ready(0)
    one.engine.submit(Call(["a"], Future(one.engine), more=True))
    one.engine.abandon()
    one.transport.await_that(lambda: one.sent == [["a"]])
    one.transport.echo()
    one.engine.join()


def test_a_bug_in_the_loop_fails_the_open_calls_and_the_streamer_goes_on(
    one: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one.transport.ready(0)
    future, waiting = one.submit("a"), one.submit("b")
    one.transport.report(0, 99)
    for each in (future, waiting):
        with pytest.raises(InternalError, match=r"this is a bug in it: .*our bug"):
            each.result(0)
    assert "2 calls failed" in caplog.text
    assert [record.levelname for record in caplog.records if record.exc_info] == ["CRITICAL"]
    # The worker is at its batch still, which has no caller any more; then it takes the next
    later = one.submit("c")
    assert len(one.transport.sent) == 1
    one.transport.echo()
    one.transport.echo()
    assert later.result(0) == ["c"]
    stats = one.engine.stats()
    assert (stats.accepted, stats.answered, stats.failed) == (3, 1, 2)
    assert (stats.pending, stats.in_flight) == (0, 0)


# -- events that come together, or too late


def test_a_restart_does_not_wait_for_a_worker_that_has_no_place(two: StubEngine) -> None:
    two.transport.ready(0)
    two.transport.deliver(events.WorkerWaits(1))
    restart = threading.Thread(target=two.engine.restart_workers, args=(None,))
    restart.start()
    two.transport.await_that(lambda: len(two.transport.started) == 3)
    two.transport.ready(2)
    two.transport.await_that(lambda: two.transport.stopped == [0])
    two.transport.lose(0)
    restart.join()
    assert two.engine.stats().workers["starting"] == 1


def test_the_end_is_told_also_to_who_asks_too_late(one: StubEngine) -> None:
    told: list[str] = []
    one.engine.when_ended(lambda: told.append("in time"))
    one.engine.close(drain=False, timeout=None)
    assert told == ["in time"]
    one.engine.when_ended(lambda: told.append("late"))
    assert told == ["in time", "late"]


def test_a_finalizer_may_close_the_streamer_within_the_last_lines_of_its_thread() -> None:
    def close(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is threading.Event.set.__code__:
            sys.setprofile(None)
            made[0].engine.close(drain=True, timeout=None)

    threading.setprofile(close)
    made = [StubEngine()]
    threading.setprofile(None)
    made[0].engine.close(drain=False, timeout=None)


# -- calls that come together


def test_a_place_fails_whose_workers_step_but_end_no_item_before_they_die_idle() -> None:
    with StubEngine() as setup:
        for slot in range(2):
            setup.transport.deliver(WorkerReady(slot, places=2))
            future = setup.submit("a")
            _, batch_id, _ = setup.transport.sent[-1]
            failed = BatchReport(batch_id, [None], {0: Failure(ModelError("no memory"))})
            setup.transport.deliver(StepReport(done=[failed], size=1, slot=slot))
            assert isinstance(future.exception(), ModelError)
            setup.transport.lose(slot)
        assert setup.engine.state is EngineState.BROKEN
