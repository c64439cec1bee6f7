"""An exception from a signal handler, at any point of a caller's thread, loses no accepted call.

test_walks.py interrupts more kinds of calls, over an engine without threads.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest

import service_streamer
from service_streamer import PredictTimeout, Streamer, ThreadedStreamer
from service_streamer.engine.engine import Engine
from service_streamer.observe.record import Call
from stub_engine import StubEngine
from walk.interrupts import Interrupted, interrupted_everywhere

#: Seconds until a call counts as lost.
ALARM = 60.0


class OutOfTime(PredictTimeout):
    """What a signal handler raises of a program that has its own deadlines, and our errors."""


def settle(futures: list[Future[Any]], streamer: ThreadedStreamer | Streamer) -> None:
    """All calls end, the streamer is idle then, and a fresh call is answered."""
    assert not wait(futures, ALARM).not_done
    is_idle = False
    while not is_idle:  # the call that was interrupted may have been accepted, and still run
        assert streamer.submit(["fresh"]).result(ALARM) == ["fresh"]
        stats = streamer.stats()
        is_idle = not (stats.pending or stats.in_flight)
    ended = stats.answered + stats.failed + stats.expired + stats.cancelled
    assert stats.accepted == ended
    futures.clear()


class HeldByFirst:
    """A model that an item "first" keeps busy until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, batch: list[str]) -> list[str]:
        if "first" in batch:
            self.entered.release()
            self.go_on.acquire()
        return batch


@pytest.mark.parametrize(
    ("is_busy", "raised", "options"),
    [
        (False, Interrupted, {}),
        (True, Interrupted, {"length": len, "max_pending": 100, "tenant_weights": {"a": 2.0}}),
        (True, OutOfTime, {"length": len}),
    ],
    ids=["idle worker", "busy worker and options", "an error of ours"],
)
def test_accepted_calls_end_when_a_handler_raises_at_any_point(
    is_busy: bool, raised: type[BaseException], options: dict[str, Any]
) -> None:
    model = HeldByFirst()
    futures: list[Future[Any]] = []

    def submit() -> None:
        for number in range(4 if is_busy else 1):  # one is sent ahead, and then calls wait
            items = ["item"] * (1 + number % 3)
            futures.append(streamer.submit(items, timeout=ALARM, priority=number % 2))

    def hold_up() -> None:
        if is_busy:
            futures.append(streamer.submit(["first"]))
            model.entered.acquire()

    with ThreadedStreamer(model, batch_size=2, **options) as streamer:
        hold_up()
        for _ in interrupted_everywhere(submit, raised, step=3 if is_busy else 1):
            if is_busy:
                model.go_on.release()
            settle(futures, streamer)
            hold_up()
        model.go_on.release()


def test_accepted_calls_end_when_a_handler_raises_in_a_message_to_a_worker_process() -> None:
    with Streamer("tests.test_interrupts:echo", batch_size=4) as streamer:
        streamer.wait_ready()
        futures: list[Future[Any]] = []
        # An interrupt within a message costs the start of a worker.
        for _ in interrupted_everywhere(lambda: futures.append(streamer.submit(["item"])), step=26):
            settle(futures, streamer)


def echo(batch: list[Any]) -> list[Any]:
    return batch


def test_future_is_answered_though_a_handler_has_raised_in_a_look_at_it() -> None:
    with ThreadedStreamer(HeldByFirst(), batch_size=1) as streamer:
        for _ in interrupted_everywhere(lambda: look(streamer)):
            assert streamer.submit(["fresh"]).result(ALARM) == ["fresh"]


def look(streamer: ThreadedStreamer) -> None:
    """All that a program may ask of a future, before and after it is answered."""
    future = streamer.submit(["looked at"])
    future.add_done_callback(lambda _: None)
    future.done()
    future.running()
    repr(future)
    with contextlib.suppress(RuntimeError):  # of Condition.wait, which has released the lock
        future.exception(ALARM)
    future.done()


@pytest.mark.parametrize("is_torn", [False, True], ids=["callers leave", "a change was cut off"])
def test_a_signal_handler_may_ask_for_the_stats_within_any_line_of_them(is_torn: bool) -> None:
    with StubEngine(batch_size=1) as one:
        engine, transport = one.engine, one.transport
        transport.ready(0)

        def look() -> None:
            # Given calls whose callers leave, or a change that was left halfway, within the lock
            with engine.lock:
                calls = [Call([n], service_streamer.Future(engine)) for n in range(6)]
                for call in calls:
                    engine.submit(call)
                engine.is_torn = is_torn
                futures.extend(call.reply for call in calls[: 6 if is_torn else 3])
                for call in calls[len(futures) :]:
                    engine.withdraw(call)
                engine.stats()

        futures: list[Any] = []
        # When a handler asks for the stats while this thread makes them
        for _ in interrupted_everywhere(look, handler=engine.stats, step=3):
            # Then each call is computed once, but for those whose callers have gone
            for number, future in enumerate(futures):
                transport.await_that(lambda n=number: len(transport.sent) > n)  # type: ignore
                transport.echo(number)
                assert future.result(0) == [number]
            assert engine.stats().pending == engine.stats().in_flight == 0
            futures.clear()
            transport.sent.clear()


class WatchedLock:
    """The lock of an engine; notes whether a change that was cut off is known when it is free."""

    def __init__(self, engine: Engine) -> None:
        self.are_known: list[bool] = []
        self._engine, self._lock = engine, engine.lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.are_known.append(self._engine.is_torn)
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_no_thread_finds_a_change_that_was_cut_off_and_not_mended() -> None:
    with StubEngine() as one:
        engine, transport = one.engine, one.transport
        transport.ready(0)
        wakeup, transport.wakeup = transport.wakeup, lambda: None  # type: ignore[method-assign]
        engine.lock = lock = WatchedLock(engine)  # type: ignore[assignment]
        for _ in interrupted_everywhere(
            lambda: engine.submit(Call([1], service_streamer.Future(engine)))
        ):
            with lock:
                engine.settle()
        transport.wakeup = wakeup  # type: ignore[method-assign]
        assert lock.are_known
        assert all(lock.are_known)
