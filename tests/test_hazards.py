"""What could lose a call, hang a program or leave something behind: one test for each hazard."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import multiprocessing
import os
import queue
import selectors
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import models
from conftest import AnyStreamer
from contract.hazards import Hazards
from service_streamer import (
    Future,
    PredictTimeout,
    Streamer,
    StreamerClosed,
    ThreadedStreamer,
    WorkerLost,
)
from service_streamer.observe.record import Call
from service_streamer.testing import Gate
from service_streamer.workers.memory_link import Window
from service_streamer.workers.protocol import FrameWriter
from stub_engine import StubEngine

Build = Callable[..., AnyStreamer]


def test_close_does_not_wait_for_a_batch_that_nobody_waits_for(gate: Gate) -> None:
    with Streamer(models.Gated, worker_timeout=0.01, model_init_args=(gate,)) as streamer:
        streamer.wait_ready()  # or it could be found to be late before it is with the worker
        with pytest.raises(PredictTimeout, match=r"no result within 0.01 s \(\w+ \| pending"):
            streamer.predict([1])
        streamer.submit([2]).cancel()


class Interrupted(collections.deque[Any]):
    """Its first ``remove`` is interrupted, before or after it takes something out."""

    def __init__(
        self,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._first = [before, after]

    def remove(self, message: Any) -> None:
        before, after = self._first
        self._first = [lambda: None] * 2
        before()
        super().remove(message)
        after()


@pytest.fixture
def sending() -> Iterator[StubEngine]:
    """With a worker that takes batches of one item, two at a time."""
    with StubEngine(batch_size=1) as made:
        made.transport.ready(0)
        yield made


def test_a_thread_that_is_stopped_before_it_sends_is_not_overtaken(sending: StubEngine) -> None:
    engine = sending.engine
    other = threading.Thread(target=lambda: engine.submit(Call(["second"], Future(engine))))

    def run_other() -> None:  # while this thread has a batch to send
        other.start()
        other.join()

    engine.unsent = Interrupted(after=run_other)
    engine.submit(Call(["first"], Future(engine)))
    assert sending.sent == [["first"], ["second"]]


def test_a_thread_that_is_stopped_while_it_sends_is_not_overtaken(
    sending: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, transport = sending.engine, sending.transport
    other = threading.Thread(target=lambda: engine.submit(Call(["second"], Future(engine))))
    send = transport.send

    def stopped(slot: int, batch_id: int, payloads: list[Any], **how: Any) -> None:
        if payloads == ["first"]:
            other.start()
            other.join()  # it does not wait for this thread, which sends its batch as well
        send(slot, batch_id, payloads, **how)

    monkeypatch.setattr(transport, "send", stopped)
    engine.submit(Call(["first"], Future(engine)))
    assert sending.sent == [["first"], ["second"]]


def test_close_returns_in_time_in_a_signal_handler_that_interrupts_a_message(
    sending: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has something for that worker, too, and must not wait for the thread it needs."""
    engine, transport = sending.engine, sending.transport
    send = transport.send

    def interrupted(slot: int, batch_id: int, payloads: list[Any], **how: Any) -> None:
        send(slot, batch_id, payloads, **how)
        if payloads == ["first"]:
            monkeypatch.undo()
            engine.unsent.append((0, 0, batch_id))
            engine.close(drain=False, timeout=None)

    monkeypatch.setattr(transport, "send", interrupted)
    first = Future(engine)
    engine.submit(Call(["first"], first))
    assert isinstance(first.exception(), StreamerClosed)


@pytest.mark.parametrize(("where", "name"), [(Window, "end"), (FrameWriter, "flush")])
def test_close_returns_in_a_signal_handler_that_interrupts_a_large_message(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop lets go of the worker's memory and pipes, under locks that the thread may hold."""
    item, sends = bytearray(100_000), False
    interrupted = getattr(where, name)

    def closing(*arguments: Any) -> Any:
        nonlocal sends
        if sends and threading.current_thread() is threading.main_thread():
            sends = False
            streamer.close(drain=False)
        return interrupted(*arguments)

    monkeypatch.setattr(where, name, closing)
    with contextlib.suppress(StreamerClosed), Streamer(models.echo, 1) as streamer:
        while True:  # until the memory of one before is to be let go of, too
            sends = True
            future = streamer.submit([item])
            sends = False
            future.result()


def test_a_signal_handler_may_submit_while_its_thread_sends(sending: StubEngine) -> None:
    engine = sending.engine
    handlers = Call(["second"], Future(engine))
    engine.unsent = Interrupted(before=lambda: engine.submit(handlers))
    engine.submit(Call(["first"], Future(engine)))
    assert sending.sent == [["first"], ["second"]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_finalizer_may_submit_while_a_message_is_written(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FrameWriter.write
    seconds: list[Future] = []

    def interrupted(writer: FrameWriter, frame: bytes) -> bool:
        is_first = not seconds
        if is_first and when == "before":  # as the garbage collector may do, in this thread
            seconds.append(Future(None))  # type: ignore[arg-type]  # one only
            seconds[0] = streamer.submit(["second"])
        has_written = write(writer, frame)
        if is_first and when == "after":
            seconds.append(Future(None))  # type: ignore[arg-type]
            seconds[0] = streamer.submit(["second"])
        return has_written

    with Streamer(models.echo, 1) as streamer:
        streamer.wait_ready()
        monkeypatch.setattr(FrameWriter, "write", interrupted)
        assert streamer.submit(["first"]).result() == ["first"]
        monkeypatch.undo()
        assert seconds[0].result() == ["second"]


# -- starting


@pytest.mark.parametrize(
    ("where", "kind", "error", "text"),
    [
        (("os.pidfd_open", "os.dup"), Streamer, OSError, "Too many open files"),
        # The first that it watches is the end by which its thread is woken.
        (("selectors.DefaultSelector.register",), Streamer, OSError, "Too many open files"),
        (("threading.Thread.start",), Streamer, RuntimeError, "can't start new thread"),
        (("threading.Thread.start",), ThreadedStreamer, RuntimeError, "can't start new thread"),
    ],
)
def test_a_start_that_fails_half_way_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
    where: Sequence[str],
    kind: Any,
    error: type[Exception],
    text: str,
) -> None:
    watched: list[object] = []
    register = selectors.DefaultSelector.register

    def fail(*arguments: Any) -> Any:
        watched.append(arguments)
        if "register" in where[0] and len(watched) != 2:
            return register(*arguments)
        raise error(text)

    for name in where:
        monkeypatch.setattr(name, fail)
    with pytest.raises(error, match=text):
        kind(models.echo)


def test_two_streamers_built_at_once_do_not_take_each_other_s_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen: list[str | None] = []

    def build(threads: int) -> None:
        with Streamer(models.environment, cpu_threads=threads, worker_timeout=None) as streamer:
            seen.extend(streamer.predict(["OMP_NUM_THREADS"]))

    threads = [threading.Thread(target=build, args=(i,)) for i in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(number) for number in seen) == [str(i) for i in range(1, 4)]


def test_init_arguments_for_a_function_are_refused() -> None:
    with pytest.raises(TypeError, match="for a ManagedModel class"):
        Streamer(models.echo, model_init_args=[1])


class TestHazards(Hazards):
    """With workers of every kind."""


# -- leaving


def test_an_item_that_was_refused_is_not_kept() -> None:
    class Unpicklable(threading.local):
        """Weakly referable, and not to be pickled."""

    with Streamer(models.echo) as streamer:
        item = Unpicklable()
        reference = weakref.ref(item)
        gc.disable()
        try:
            assert streamer.submit([item]).exception() is not None
            del item
            assert reference() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("seconds", [1e10, float("inf"), float("nan")])
def test_times_that_no_system_can_wait_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"worker_timeout .*(at most 1e\+09|number of seconds)"):
        ThreadedStreamer(models.echo, worker_timeout=seconds)


# -- code of users in the web process


@pytest.mark.parametrize("how", ["predict", "submit", "callback"])
def test_results_and_errors_are_unpickled_by_who_asks(how: str) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(item: str) -> None:
        with Streamer(models.misbehave) as streamer:
            if how == "predict":
                answer: Any = _caught(lambda: streamer.predict([item]))
            else:
                future = streamer.submit([item])
                if how == "callback":
                    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
                    future.add_done_callback(lambda done: seen.put(done))
                    future = seen.get()
                answer = _caught(future.result)
            told.put(answer.where)

    for item in ("raise and tell where", "result that tells where"):
        caller = threading.Thread(target=ask, args=(item,), name="the caller's")
        caller.start()
        caller.join()
        assert told.get() == "the caller's"


def _caught(ask: Callable[[], list[Any]]) -> Any:
    try:
        return ask()[0]
    except models.TellsWhere as error:
        return error


def test_a_log_handler_that_raises_costs_nobody_an_answer(gate: Gate) -> None:
    class Raises(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            raise RuntimeError("the handler's own")

    def leave(_: Any) -> None:
        raise SystemExit

    handler = Raises()
    logger = logging.getLogger("service_streamer")
    logger.addHandler(handler)
    try:
        with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
            streamer.submit([0])
            gate.await_arrival()
            futures = [streamer.submit([i]) for i in range(4)]
            for future in futures:
                future.add_done_callback(leave)
            gate.let_through(2)
            assert [future.result() for future in futures] == [[4]] * 4
    finally:
        logger.removeHandler(handler)


# -- what must not run twice


def test_without_retries_no_batch_waits_behind_another(gate: Gate) -> None:
    with Streamer(models.Gated, 1, model_init_args=(gate,), retry=False) as streamer:
        computed = streamer.submit(["computed"])
        gate.await_arrival()
        waits = streamer.submit(["waits"])
        assert not waits.running()
        [worker] = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        assert isinstance(computed.exception(), WorkerLost)
        gate.let_through()
        assert waits.result() == [1]
