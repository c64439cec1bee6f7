"""What all kinds of streamers do for their callers: threads, processes, and those beyond Redis."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import gc
import io
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import models
from conftest import AnyStreamer, await_that
from service_streamer import (
    BadModelOutput,
    Future,
    ModelError,
    PredictTimeout,
    SharedBatchError,
    Streamer,
    StreamerClosed,
    ThreadedStreamer,
    UnpicklableItem,
)
from service_streamer.testing import Gate

Build = Callable[..., AnyStreamer]


def test_results_come_in_the_order_of_the_items(build: Build) -> None:
    assert build(models.double).predict([3, 1, 2]) == [6, 2, 4]


def test_an_empty_batch_returns_at_once_without_a_worker(build: Build) -> None:
    streamer = build(models.echo)
    assert streamer.predict([]) == []
    assert streamer.submit([]).done()
    streamer.close()
    models.await_worker_threads()


def test_a_call_larger_than_batch_size_is_split_and_comes_back_whole(build: Build) -> None:
    streamer = build(models.batch_sizes, 4)
    sizes = streamer.predict(list(range(11)))
    assert len(sizes) == 11
    assert max(sizes) <= 4
    assert build(models.double, 4).predict(list(range(1000))) == list(range(0, 2000, 2))


@pytest.mark.long_cases("shared")
def test_tuples_and_arrays_are_batches_too(build: Build) -> None:
    numpy = pytest.importorskip("numpy")
    streamer = build(models.double)
    assert streamer.predict((1, 2)) == [2, 4]
    assert streamer.predict(numpy.array([1, 2])) == [2, 4]


@pytest.mark.long_cases("shared")
def test_whatever_yields_items_is_a_batch_too(build: Build) -> None:
    streamer = build(models.double)
    assert streamer.predict(iter([1, 2])) == [2, 4]
    assert streamer.predict(i for i in (1, 2)) == [2, 4]
    assert streamer.predict({1: "a", 2: "b"}.keys()) == [2, 4]
    assert streamer.predict(collections.deque([1, 2])) == [2, 4]
    assert sorted(streamer.predict({1, 2})) == [2, 4]
    items = {5, 7, 11}
    assert streamer.submit(items).result() == [2 * item for item in items]
    assert streamer.predict(map(int, [])) == []


@pytest.mark.long_cases("shared")
def test_what_an_iterator_raises_its_caller_gets(build: Build) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        build(models.double).predict(items())


@pytest.mark.long_cases("shared")
def test_a_string_is_no_batch_of_its_characters(build: Build) -> None:
    with pytest.raises(TypeError, match=r"\[item\], or pass list\(\.\.\.\) of it, whose items"):
        build(models.echo).predict("text")


class Record:
    """Iterates over its fields, as a model of pydantic does."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter([("a", 1)])


@pytest.mark.parametrize(
    "batch",
    ["text", b"bytes", {"a": 1}, 5, None, memoryview(b"ab"), list, io.BytesIO(b"a\nb"), Record()],
)
def test_a_single_item_in_the_place_of_a_batch_is_refused(build: Build, batch: Any) -> None:
    streamer = build(models.echo)
    with pytest.raises(TypeError, match="a batch must be a list of items"):
        streamer.predict(batch)
    streamer.close()
    models.await_worker_threads()


def test_ten_thousand_items_from_fifty_threads_keep_their_order() -> None:
    with Streamer(models.double, worker_num=4, worker_timeout=None) as streamer:

        def call(thread: int) -> None:
            for i in range(0, 200, 8):
                items = list(range(thread * 1000 + i, thread * 1000 + i + 8))
                assert streamer.predict(items) == [2 * item for item in items]

        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            for done in [pool.submit(call, thread) for thread in range(50)]:
                done.result()


def test_callers_share_batches(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        first = streamer.submit(["first"])
        gate.await_arrival()
        others = [streamer.submit([i]) for i in range(5)]
        gate.let_through(2)
        assert first.result() == [1]
        assert [future.result() for future in others] == [[5]] * 5


# -- errors


def test_an_exception_of_the_model_reaches_its_callers_as_itself(build: Build) -> None:
    streamer = build(models.misbehave)
    with pytest.raises(models.DetailedError, match="bad luck") as caught:
        streamer.predict(["raise"])
    assert caught.value.code == 7
    assert caught.value.detail == {"why": "bad luck"}
    cause = str(caught.value.__cause__)
    assert "in misbehave" in cause
    assert 'raise DetailedError("bad luck", 7)' in cause
    assert streamer.predict(["fine"]) == ["fine"], "the worker goes on"


def test_an_error_reaches_the_call_that_earned_it(gate: Gate) -> None:
    with Streamer(FailsOnBad, 2, model_init_args=(gate,)) as streamer:
        futures = [streamer.submit(["good"])]
        gate.await_arrival()
        futures += [streamer.submit([item]) for item in ("bad", "neighbour", "good", "good")]
        gate.let_through(9)
        errors = [future.exception() for future in futures]
        assert [type(error) for error in errors] == [
            type(None), ValueError, type(None), type(None), type(None),
        ]  # fmt: skip
        assert streamer.stats().isolated == 1


def test_without_isolation_a_batch_fails_and_nobody_gets_the_error_of_another(gate: Gate) -> None:
    with Streamer(FailsOnBad, 2, model_init_args=(gate,), isolate_errors=False) as streamer:
        futures = [streamer.submit(["good"])]
        gate.await_arrival()
        futures += [streamer.submit([item]) for item in ("bad", "neighbour", "good", "good")]
        gate.let_through(9)
        errors = [future.exception() for future in futures]
        assert [type(error) for error in errors] == [
            type(None), SharedBatchError, SharedBatchError, type(None), type(None),
        ]  # fmt: skip
        assert errors[1] is not errors[2], "or the tracebacks of callers would mix"
        assert not any("bad item" in str(error) or error.__cause__ for error in errors if error)


class FailsOnBad(models.Gated):
    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        if "bad" in batch:
            raise ValueError("bad item")
        return batch


def test_an_exception_that_cannot_travel_is_stood_in_for() -> None:
    with Streamer(models.misbehave) as streamer:
        for how in ("raise odd", "raise unpicklable"):
            with pytest.raises(ModelError, match="stands in for") as caught:
                streamer.predict([how])
            assert "in misbehave" in str(caught.value.__cause__)
        assert streamer.predict(["fine"]) == ["fine"]


def test_a_timeout_error_of_the_model_is_not_mistaken_for_ours(build: Build) -> None:
    future = build(models.misbehave).submit(["raise timeout"])
    for read in (future.result, future.exception):
        try:
            error = read(60)
        except TimeoutError as raised:
            error = raised
        assert type(error) is TimeoutError
        assert str(error) == "the model's own"


@pytest.mark.long_cases(
    "shared-short", "shared-none", "shared-generator", "shared-dict", "shared-text"
)
@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("short", "list of 1"),
        ("long", "list of 3"),
        ("none", "NoneType"),
        ("generator", "generator"),
        ("dict", "dict"),
        ("text", "str"),
    ],
)
def test_unusable_output_names_the_model_and_what_it_returned(
    build: Build, how: str, got: str
) -> None:
    streamer = build(models.misbehave)
    with pytest.raises(BadModelOutput, match=f"misbehave must return .* 2 .* returned {got}"):
        streamer.predict([how, "x"])
    assert streamer.predict(["tuple", "x"]) == ["tuple", "x"]


def test_an_unpicklable_item_fails_its_own_call_only(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        streamer.submit(["busy"])
        gate.await_arrival()
        neighbour = streamer.submit([1])
        with pytest.raises(UnpicklableItem, match=r"item 1 of the batch, of type function"):
            streamer.predict([1, lambda: None])
        gate.let_through(2)
        assert neighbour.result() == [1]


def test_an_item_that_does_not_unpickle_fails_its_own_call_only(gate: Gate) -> None:
    with Streamer(models.Gated, model_init_args=(gate,)) as streamer:
        streamer.submit(["busy"])
        gate.await_arrival()
        futures = [streamer.submit([item]) for item in (1, models.Unloadable(), 2)]
        gate.let_through(2)
        assert futures[0].result() == futures[2].result() == [2]
        with pytest.raises(UnpicklableItem, match="does not load here"):
            futures[1].result()


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("unpicklable result", "cannot be sent from the worker"),
        ("result that does not unpickle", "cannot be unpickled in the web process"),
    ],
)
def test_a_result_that_cannot_travel_fails_its_own_call_only(how: str, match: str) -> None:
    with Streamer(models.misbehave) as streamer:
        with pytest.raises(ModelError, match=match):
            streamer.predict([how, "neighbour"])
        assert streamer.predict(["fine"]) == ["fine"]


# -- time


def test_predict_times_out_and_leaves_nothing_behind(gate: Gate) -> None:
    with Streamer(models.Gated, worker_timeout=0.01, model_init_args=(gate,)) as streamer:
        running = streamer.submit(["busy"])
        gate.await_arrival()
        for _ in range(100):
            with pytest.raises(PredictTimeout, match=r"0\.01 s"):
                streamer.predict(["late"])
        assert "pending 0 | in flight 1 batches/1 items" in repr(streamer)
        gate.let_through()
        assert running.result() == [1]
        assert issubclass(PredictTimeout, TimeoutError)


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


def test_a_future_is_a_standard_one(build: Build) -> None:
    streamer = build(models.double)
    futures = [streamer.submit([i]) for i in range(20)]
    assert all(isinstance(future, Future) for future in futures)
    done, not_done = concurrent.futures.wait(futures)
    assert not not_done
    assert {future.result()[0] for future in concurrent.futures.as_completed(done)} == set(
        range(0, 40, 2)
    )


def test_it_sets_what_a_standard_one_sets() -> None:
    standard = vars(concurrent.futures.Future())
    ours = Future(None)  # type: ignore[arg-type]
    for name in set(standard) - {"_condition"}:
        assert getattr(ours, name) == standard[name]


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


def test_nothing_is_made_for_those_who_do_not_wait(build: Build) -> None:
    """Each object of a future is one that the garbage collector goes through again and again."""
    future = build(models.double).submit([1])
    assert future.result() == [2]
    lists = [each for each in vars(future).values() if isinstance(each, list)]
    assert lists == [[2]]
    assert future._awaited is None


def test_a_callback_runs_and_may_submit_again(build: Build) -> None:
    streamer = build(models.double)
    second: concurrent.futures.Future[list[int]] = concurrent.futures.Future()

    def go_on(first: concurrent.futures.Future[list[int]]) -> None:
        streamer.submit(first.result()).add_done_callback(
            lambda future: second.set_result(future.result())
        )

    streamer.submit([1]).add_done_callback(go_on)
    assert second.result() == [4]


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
            await_that(lambda: waiting._awaited is not None and waiting._own_waiters)
            with pytest.raises(Rude):
                waiting.cancel()
            assert isinstance(waits.exception(), concurrent.futures.CancelledError)
            assert others.result().done == {waiting}
        gate.let_through()
        assert sent.result() == [1]


def test_who_closes_before_the_loop_goes_on_waits_for_nobody(build: Build) -> None:
    """A call was made, and what flushes it comes in the next pass: closing does that, too."""
    streamer = build(models.double)

    async def run() -> None:
        call = asyncio.ensure_future(streamer.apredict([1]))
        await asyncio.sleep(0)
        streamer.close(timeout=60)
        assert await call == [2]

    streamer.wait_ready()
    asyncio.run(run())


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


def test_close_finishes_what_was_accepted(gate: Gate) -> None:
    streamer = Streamer(models.Gated, 1, model_init_args=(gate,))
    futures = [streamer.submit([i]) for i in range(5)]
    gate.let_through(5)
    streamer.close()
    assert [future.result() for future in futures] == [[1]] * 5


def test_close_without_drain_fails_what_is_left() -> None:
    entered: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    leave = threading.Event()

    def block(batch: list[Any]) -> list[Any]:
        entered.put(threading.current_thread())
        leave.wait()
        return batch

    streamer = ThreadedStreamer(block, 1)
    futures = [streamer.submit([i]) for i in range(3)]
    worker = entered.get()
    closing = threading.Thread(target=streamer.close, kwargs={"drain": False})
    closing.start()
    for future in futures:
        with pytest.raises(StreamerClosed):
            future.result()
    leave.set()
    closing.join()
    worker.join()  # which it waits for only for a while


def test_close_may_be_called_again_and_by_several_threads(build: Build) -> None:
    streamer = build(models.echo)
    assert streamer.predict([1]) == [1]
    threads = [threading.Thread(target=streamer.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streamer.close()
    streamer.destroy_workers()
    for use in (streamer.predict, streamer.submit):
        with pytest.raises(StreamerClosed):
            use([1])
    with pytest.raises(StreamerClosed):
        streamer.wait_ready()
    assert "closed" in repr(streamer)


def test_close_in_a_callback_does_not_wait_for_itself(build: Build) -> None:
    streamer = build(models.echo)
    closed: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def close(_: Any) -> None:
        streamer.close()
        closed.put(threading.current_thread())

    streamer.submit([1]).add_done_callback(close)
    thread = closed.get()
    streamer.close()
    if thread is not threading.current_thread():  # in which it is called if it is done by then
        thread.join()


def test_a_drain_ends_with_its_time(gate: Gate) -> None:
    streamer = Streamer(models.Gated, model_init_args=(gate,))
    future = streamer.submit([1])
    gate.await_arrival()
    streamer.close(timeout=0.01)
    with pytest.raises(StreamerClosed):
        future.result()


def test_a_forgotten_streamer_finishes_its_calls_and_ends() -> None:
    streamer = ThreadedStreamer(models.echo)
    threads = {thread for thread in threading.enumerate() if "service_streamer" in thread.name}
    future = streamer.submit([1])
    del streamer
    gc.collect()
    assert future.result() == [1]
    for thread in threads:
        thread.join()


# -- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"max_latency": -0.1},
        {"max_latency": float("nan")},
        {"max_latency": "1"},
        {"worker_timeout": 0},
        {"worker_num": -1},
        {"worker_num": 0},
        {"cuda_devices": ()},
        {"cuda_devices": 0},
        {"cuda_devices": "0"},
        {"cuda_devices": (-1,)},
        {"cuda_devices": (1.0,)},
        {"cuda_devices": (True,)},
        {"cuda_devices": ("gpu",)},
        {"mp_start_method": "thread"},
        {"model_init_args": 5},
        {"model_init_args": "weights"},
        {"model_init_kwargs": [1]},
        {"cpu_threads": 0},
        {"cpu_threads": "all"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(
    arguments: dict[str, Any], wording: Callable[..., None]
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Streamer(models.echo, **arguments)
    wording(caught.value)


@pytest.mark.parametrize("option", ["preprocess_workers", "worker_num", "cuda_devices"])
def test_an_option_for_worker_processes_is_refused_by_a_streamer_without(
    option: str, wording: Callable[..., None]
) -> None:
    with pytest.raises(TypeError) as caught:
        ThreadedStreamer(models.echo, **{option: 2})
    wording(caught.value)


MODELS = {
    "a class": dict,
    "no init_model": models.Incomplete,
    "an instance": models.Multiplier(),
    "a number": 5,
    "no colon": "models",
    "no name": "models:",
    "code": "os.system('x'):y",
    "a lambda": lambda batch: batch,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_bad_models_are_refused_at_once(model: Any, wording: Callable[..., None]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Streamer(model)
    wording(caught.value, hide={r"PicklingError: .*?\);": "PicklingError: ...);"})


def test_the_first_four_arguments_are_positional_and_new_ones_are_not() -> None:
    with Streamer(models.echo, 8, 0.01, 2) as streamer:
        streamer.wait_ready()
        assert repr(streamer) == (
            "<Streamer running | pending 0 | in flight 0 batches/0 items | workers 2 idle>"
        )
    with pytest.raises(TypeError, match="positional"):
        Streamer(models.echo, 8, 0.01, 1, None, None, None, False, "spawn", 20, 1)  # type: ignore[misc]
