"""What all kinds of streamers do for their callers: threads, processes, and those beyond Redis."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import models
from conftest import AnyStreamer, await_that
from contract.calls import Calls, Forms
from service_streamer import Future, PredictTimeout, Streamer, StreamerClosed, ThreadedStreamer
from service_streamer.testing import Gate

Build = Callable[..., AnyStreamer]


class TestCalls(Calls):
    @pytest.fixture(params=["thread", "process", "shared", "redis"])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        """Here, tests on a shared pool are not long; elsewhere they are."""
        return request.param


class TestForms(Forms):
    @pytest.fixture
    def kind(self) -> str:
        return "thread"


# -- time


def test_a_future_goes_on_after_a_timeout(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        future = streamer.submit(["x"])
        with pytest.raises(PredictTimeout):
            future.result(timeout=0.001)
        with pytest.raises(PredictTimeout):
            future.exception(timeout=0)
        assert not future.done()
        gate.let_through()
        assert future.result() == future.result() == [1]
        assert future.done()


# -- futures


def test_future_sets_what_a_standard_one_sets() -> None:
    standard = vars(concurrent.futures.Future())
    ours = Future(None)  # type: ignore[arg-type]
    concurrent.futures.wait([ours], 0)  # it takes the lock first
    for name, value in standard.items():
        assert name.endswith("condition") or getattr(ours, name) == value


def test_what_executors_do_to_a_standard_one_can_be_done_to_ours() -> None:
    done, failed, over = (Future(None) for _ in range(3))  # type: ignore[arg-type]
    heard: list[object] = []
    done.add_done_callback(heard.append)
    assert done.set_running_or_notify_cancel()
    done.set_result([1])
    failed.set_exception(ValueError("bad"))
    over.set_result([2])
    with pytest.raises(concurrent.futures.InvalidStateError, match="FINISHED"):
        over.set_result([3])
    assert done.result() == [1]
    assert heard == [done]
    assert isinstance(failed.exception(), ValueError)
    assert concurrent.futures.wait([done, failed, over]).not_done == set()


def test_who_begins_to_wait_while_a_future_is_answered_goes_on() -> None:
    with (
        ThreadedStreamer(models.echo) as streamer,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        for number in range(500):
            future = streamer.submit([number])
            waits = [threads.submit(future.result) for _ in range(2)]
            others = [threads.submit(concurrent.futures.wait, [future]) for _ in range(2)]
            heard: concurrent.futures.Future[object] = concurrent.futures.Future()
            future.add_done_callback(heard.set_result)
            assert [each.result() for each in waits] == [[number]] * 2
            assert all(each.result().done == {future} for each in others)
            assert heard.result() is future


def test_cancel_works_until_the_batch_is_sent(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        sent = streamer.submit(["sent"])
        gate.await_arrival()
        waiting = streamer.submit(["waiting"])
        assert sent.running()
        assert not sent.cancel()
        assert not waiting.running()
        assert waiting.cancel()
        assert waiting.cancel(), "and again"
        assert waiting.cancelled()
        assert "pending 0" in repr(streamer)
        assert concurrent.futures.wait([waiting]).done == {waiting}
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result()
        gate.let_through()
        assert sent.result() == [1]
        assert not sent.cancel()


def test_who_waits_hears_of_a_cancelled_call_whatever_its_callbacks_do(gate: Gate) -> None:
    class Rude(BaseException):
        pass

    def be_rude(_: object) -> None:
        raise Rude

    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        sent = streamer.submit(["sent"])
        gate.await_arrival()
        waiting = streamer.submit(["waiting"])
        waiting.add_done_callback(be_rude)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            waits = threads.submit(waiting.exception)
            others = threads.submit(concurrent.futures.wait, [waiting])
            await_that(lambda: waiting._condition.waiting and waiting._waiters)
            with pytest.raises(Rude):
                waiting.cancel()
            assert isinstance(waits.exception(), concurrent.futures.CancelledError)
            assert others.result().done == {waiting}
        gate.let_through()
        assert sent.result() == [1]


# -- memory


class Payload:
    """Weakly referable."""


def test_the_memory_of_a_finished_call_is_freed() -> None:
    gc.disable()  # it must not take the cycle collector
    try:
        with ThreadedStreamer(models.echo) as streamer:
            item = Payload()
            reference = weakref.ref(item)
            future = streamer.submit([item])
            assert future.result() == [item]
            future_reference = weakref.ref(future)
            del item, future
            streamer.predict([1])  # the threads have let go of the former batch by now
            assert reference() is None
            assert future_reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("form", ["predict", "apredict", "submit"])
def test_the_memory_of_a_failed_call_is_freed(form: str) -> None:
    """Also if all callers get the same exception, since it cannot be copied."""
    item = Payload()
    reference = weakref.ref(item)

    def fail(batch: list[Any]) -> Any:
        raise models.OddError("first", "second")

    async def call(streamer: ThreadedStreamer, items: list[Any]) -> None:
        with contextlib.suppress(models.OddError):
            if form == "apredict":
                await streamer.apredict(items)
            elif form == "predict":
                streamer.predict(items)
            else:
                streamer.submit(items).result()

    gc.disable()  # it must not take the cycle collector
    try:
        with ThreadedStreamer(fail) as streamer:
            for each in (item, 1, 1):  # the threads let go of a batch with those after it
                asyncio.run(call(streamer, [each]))
            del item, each
            assert reference() is None
    finally:
        gc.enable()


def test_a_model_that_was_sent_to_workers_is_freed() -> None:
    """It may be large, or refer to its streamer, which then would not end when it is dropped."""
    model = models.Doubler(3)
    reference = weakref.ref(model)
    gc.disable()  # it must not take the cycle collector
    try:
        with Streamer(model.predict) as streamer:
            del model
            assert reference() is None
            assert streamer.predict([1]) == [3]
    finally:
        gc.enable()


def test_the_results_of_callers_that_are_woken_one_by_one_are_freed(gate: Gate) -> None:
    """Large ones would fill the shared memory until the collector runs."""
    references: list[weakref.ref[Payload]] = []

    def make(batch: list[int]) -> list[Payload]:
        gate.go_through()
        made = [Payload() for _ in batch]
        references.extend(map(weakref.ref, made))
        return made

    gc.disable()  # it must not take the cycle collector
    try:
        with (
            ThreadedStreamer(make) as streamer,
            concurrent.futures.ThreadPoolExecutor(8) as callers,
        ):
            busy = streamer.submit([0])
            gate.await_arrival()
            calls = [callers.submit(lambda n: len(streamer.predict([n])), n) for n in range(8)]
            await_that(lambda: streamer.stats().pending == 8)
            gate.let_through(20)
            assert [call.result() for call in calls] == [1] * 8
            assert len(busy.result()) == 1
            streamer.predict([1])  # the threads have let go of the former batch by now
            del busy
            await_that(lambda: len([each for each in references if each()]) <= 1)
    finally:
        gc.enable()


def test_the_memory_of_a_withdrawn_call_is_freed(gate: Gate) -> None:
    with ThreadedStreamer(lambda batch: gate.go_through() or batch) as streamer:
        busy = streamer.submit(["busy"])
        gate.await_arrival()
        references = []
        for _ in range(100):
            item = Payload()
            references.append(weakref.ref(item))
            assert streamer.submit([item]).cancel()
        del item
        gc.collect()
        assert not any(reference() for reference in references)
        gate.let_through()
        busy.result()


# -- the end


def test_a_drain_ends_with_its_time(gate: Gate) -> None:
    streamer = Streamer(models.Gated, model_init_args=(gate,))
    future = streamer.submit([1])
    gate.await_arrival()
    streamer.close(timeout=0.01)
    with pytest.raises(StreamerClosed):
        future.result()


# -- arguments


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("batch_size", 0, ValueError),
        ("batch_size", 1.5, TypeError),
        ("batch_size", True, TypeError),
        ("max_latency", -0.1, ValueError),
        ("max_latency", "1", TypeError),
        ("worker_timeout", 0, ValueError),
        ("cuda_devices", (), ValueError),
        ("cuda_devices", "0", TypeError),
        ("cuda_devices", (0, -1), ValueError),
        ("cuda_devices", (0, 1.0), TypeError),
        ("cuda_devices", (0, True), TypeError),
        ("cuda_devices", (0, "gpu"), ValueError),
        ("mp_start_method", "thread", ValueError),
        ("model_init_args", "weights", TypeError),
        ("model_init_kwargs", [1], TypeError),
        ("cpu_threads", 0, ValueError),
        ("cpu_threads", "all", TypeError),
    ],
)
def test_streamer_refuses_an_option_with_a_bad_value(
    option: str, value: Any, error: type[Exception]
) -> None:
    entry = repr(value[-1]) if option == "cuda_devices" and len(value) > 1 else ""
    with pytest.raises(error, match=f"{option} .*{entry}[,;]"):
        Streamer(models.echo, **{option: value})


@pytest.mark.parametrize("option", ["preprocess_workers", "worker_num", "cuda_devices"])
def test_threaded_streamer_refuses_an_option_for_worker_processes(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        ThreadedStreamer(models.echo, **{option: 2})


@pytest.mark.parametrize(
    ("model", "error", "word"),
    [
        pytest.param(dict, TypeError, "ManagedModel", id="a class"),
        pytest.param(models.Echoing, TypeError, "init_model", id="no init_model"),
        pytest.param(models.Multiplier(), TypeError, "Multiplier", id="an instance"),
        pytest.param(5, TypeError, "5", id="a number"),
        pytest.param("models", ValueError, "'models'", id="no colon"),
        pytest.param("models:", ValueError, "'models:'", id="no name"),
        pytest.param("os.system('x'):y", ValueError, "system", id="code"),
        pytest.param(lambda batch: batch, TypeError, "PicklingError", id="a lambda"),
    ],
)
def test_streamer_refuses_a_model_of_the_wrong_kind(
    model: Any, error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        Streamer(model)
