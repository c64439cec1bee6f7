"""An exception from a signal handler, at any point of a caller's thread, loses no accepted call.

Python runs signal handlers in the main thread, when a function begins or a call of C code returns.
So a profile function that raises at the n-th of these events stands in for a signal, and every
point can be tried.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any

import pytest

from service_streamer import PredictTimeout, Streamer, ThreadedStreamer
from stream_models import Summed

#: Seconds until a call counts as lost.
ALARM = 60.0


class Interrupted(BaseException):
    """What the signal handler raises, as KeyboardInterrupt or SystemExit."""


class OutOfTime(PredictTimeout):
    """The same of a program that has its own deadlines, and raises our errors."""


def interrupt(
    function: Callable[[], Any], at: int, raised: type[BaseException] = Interrupted
) -> bool:
    """Call the function and raise at the n-th event in it; whether it had so many."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event in ("call", "c_return"):
            count += 1
            if count == at:
                sys.setprofile(None)
                raise raised

    gc.disable()  # Python would drop what is raised in a finalizer, or in a callback of hypothesis
    try:
        sys.setprofile(profile)
        function()
    except raised:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return count >= at


def every_point(
    function: Callable[[], Any], raised: type[BaseException] = Interrupted
) -> Iterator[int]:
    """Interrupt the function at its first event, then at its second, and so on to its last."""
    at = 1
    while interrupt(function, at, raised):
        yield at
        at += 1
    assert at > 20, "the profile function did not see what was called"


def settle(
    futures: list[Future[Any]], streamer: ThreadedStreamer | Streamer, fresh: Any = "fresh"
) -> None:
    """All calls end, the streamer is idle then, and a fresh call is answered."""
    assert not wait(futures, ALARM).not_done
    is_idle = False
    while not is_idle:  # the call that was interrupted may have been accepted, and still run
        assert streamer.submit([fresh]).result(ALARM) == [fresh]
        stats = streamer.stats()
        is_idle = not (stats.pending or stats.in_flight)
    ended = stats.answered + stats.failed + stats.expired + stats.cancelled
    assert stats.accepted == ended


class HeldByFirst:
    """A model that an item "first" keeps busy until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, batch: list[str]) -> list[str]:
        if "first" in batch:
            self.entered.release()
            self.go_on.acquire()
        return batch


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"length": lambda item: len(item)},
    "bounded": {"max_pending": 100},
    "tenants": {"tenant_weights": {"a": 2.0}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_while_the_worker_is_idle(name: str) -> None:
    with ThreadedStreamer(lambda batch: batch, batch_size=4, **OPTIONS[name]) as streamer:
        futures: list[Future[Any]] = []
        for _ in every_point(lambda: futures.append(streamer.submit(["item"], timeout=ALARM))):
            settle(futures, streamer)
            futures.clear()


def test_a_handler_that_raises_one_of_our_errors_is_no_refusal() -> None:
    model = HeldByFirst()
    with ThreadedStreamer(model, batch_size=2, length=len) as streamer:

        def submit() -> None:
            futures.extend(streamer.submit(["item"], timeout=ALARM) for _ in range(3))

        futures: list[Future[Any]] = []
        first = streamer.submit(["first"])
        model.entered.acquire()
        for _ in every_point(submit, OutOfTime):
            model.go_on.release()
            assert first.result(ALARM) == ["first"]
            settle(futures, streamer)
            futures.clear()
            first = streamer.submit(["first"])
            model.entered.acquire()
        model.go_on.release()
        settle([first, *futures], streamer)


# Within a finalizer Python itself drops the exception, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_streams_and_calls_that_are_given_up() -> None:
    with ThreadedStreamer(Summed, batch_size=2) as streamer:

        def call() -> None:
            futures.append(streamer.submit([3, 3, 3]))
            stream = streamer.stream(3)
            next(stream)
            stream.close()
            futures.append(streamer.submit([3]))
            futures[-1].cancel()
            streamer.predict([3])

        futures: list[Future[Any]] = []
        for _ in every_point(call):
            settle(futures, streamer, 1)
            futures.clear()


def test_messages_to_a_worker_process() -> None:
    with Streamer("tests.test_interrupts:echo", batch_size=4) as streamer:
        streamer.wait_ready()
        futures: list[Future[Any]] = []
        at = 1
        while interrupt(lambda: futures.append(streamer.submit(["item"])), at):
            settle(futures, streamer)
            futures.clear()
            at += 13  # an interrupt within a message costs the start of a worker


def echo(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize("name", OPTIONS)
def test_while_calls_wait_behind_a_busy_worker(name: str) -> None:
    model = HeldByFirst()
    with ThreadedStreamer(model, batch_size=2, **OPTIONS[name]) as streamer:

        def submit() -> None:
            for number in range(4):  # the second batch is sent ahead, and then calls wait
                items = ["item"] * (1 + number % 3)
                futures.append(streamer.submit(items, timeout=ALARM, priority=number % 2))

        futures: list[Future[Any]] = []
        at, is_interrupted = 1, True
        while is_interrupted:
            first = streamer.submit(["first"])
            model.entered.acquire()
            is_interrupted = interrupt(submit, at)
            model.go_on.release()
            assert first.result(ALARM) == ["first"]
            settle(futures, streamer)
            futures.clear()
            at += 1
