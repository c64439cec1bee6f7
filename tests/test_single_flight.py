"""Single flight with real streamers of every kind; test_computations.py has the decisions."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import models
from conftest import AnyStreamer, await_that
from contract.single_flight import CallsThatShare, SharedComputations, results
from service_streamer import (
    Future,
    ManagedModel,
    ModelError,
    PredictTimeout,
    SharedBatchError,
    Streamer,
    StreamerClosed,
    StreamerError,
    ThreadedStreamer,
    TooLate,
    WorkerStartError,
)
from service_streamer.observe.record import Call
from service_streamer.single_flight import SingleFlight
from service_streamer.testing import Gate
from service_streamer.workers.protocol import Failure
from stub_engine import StubEngine

Build = Callable[..., AnyStreamer]


# -- all kinds


class TestSingleFlight(SharedComputations):
    pass


class TestCallsThatShare(CallsThatShare):
    @pytest.fixture(params=["thread", "redis"])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        return request.param


# -- failures


def test_a_model_that_raises_our_errors_is_not_run_again(gate: Gate) -> None:
    runs: list[list[str]] = []

    def predict(batch: list[str]) -> list[str]:
        runs.append(batch)
        gate.go_through()
        raise PredictTimeout("a secret")

    with ThreadedStreamer(predict, deduplicate=True, retry=False) as streamer:
        first = streamer.submit(["x", "z"])
        gate.await_arrival()
        second = streamer.submit(["x"])
        gate.let_through(9)
        assert isinstance(first.exception(), PredictTimeout)
        assert isinstance(second.exception(), SharedBatchError)
        assert "secret" not in str(second.exception())
    assert runs == [["x", "z"]]


def test_over_a_shared_pool_nothing_is_computed_twice_either(
    gate: Gate, shared: Callable[..., Streamer]
) -> None:
    streamer = shared(FailingOnce, model_init_args=(gate,), deduplicate=True, retry=False)
    first = streamer.submit(["x", "z"])
    gate.await_arrival()
    second = streamer.submit(["x"])
    gate.let_through(9)
    assert isinstance(first.exception(), ValueError)
    assert isinstance(second.exception(), SharedBatchError)


class FailingOnce(ManagedModel):
    def init_model(self, gate: Gate) -> None:
        self.gate = gate
        self.has_failed = False

    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("once")
        return batch


# -- pools


def test_an_item_that_kills_is_given_up_for_all() -> None:
    with Streamer(models.misbehave, deduplicate=True, retry=False) as streamer:
        streamer.wait_ready()
        first, second = streamer.submit(["kill"]), streamer.submit(["kill"])
        errors = [type(future.exception()).__name__ for future in (first, second)]
        assert errors == ["WorkerLost"] * 2


def test_a_restart_forgets_the_results_of_the_old_weights() -> None:
    with Streamer(models.process_ids, cache_size=5) as streamer:
        (pid,) = streamer.predict(["a"])
        assert streamer.predict(["a"]) == [pid]
        streamer.restart_workers()
        assert streamer.predict(["a"]) != [pid]


def test_several_get_copies_of_an_object() -> None:
    with ThreadedStreamer(lambda batch: [[item] for item in batch], cache_size=3) as streamer:
        first = streamer.predict(["a", "a"])
        first[0].append("changed")
        assert first[1] == ["a"]
        assert streamer.predict(["a"]) == [["a"]]


def test_what_cannot_be_copied_is_said_to_those_who_share_it() -> None:
    with ThreadedStreamer(lambda _: [threading.Lock()], deduplicate=True) as streamer:
        assert streamer.predict(["a"])[0].acquire()
        with pytest.raises(ModelError, match=r"cannot be copied.* deduplicate=True"):
            streamer.predict(["a", "a"])


def test_items_that_do_not_pickle_are_computed_each() -> None:
    lock = threading.Lock()
    with ThreadedStreamer(lambda batch: [len(batch)] * len(batch), deduplicate=True) as streamer:
        assert streamer.predict([lock, lock]) == [2, 2]
        assert streamer.predict([lock, 1, 1]) == [2, 2, 2]


def test_a_forgotten_streamer_ends() -> None:
    streamer = ThreadedStreamer(models.echo, deduplicate=True)
    assert streamer.submit([1], timeout=0.5).result() == [1]
    forgotten = weakref.ref(streamer)
    del streamer
    gc.collect()
    assert forgotten() is None
    models.await_worker_threads()


@pytest.mark.parametrize(
    ("items", "same"),
    [
        ((1, 1), True), ((1, 1.0), False), ((1, True), False), ((0.0, -0.0), False),
        (("a", b"a"), False), (("x" * 999, "x" * 999), True), (("x" * 999, "x" * 998), False),
        (([1, 2], (1, 2)), False), (({"a": 1}, {"a": 1}), True), ((None, 0), False),
    ],
)  # fmt: skip
def test_the_same_are_those_that_pickle_to_the_same(items: tuple[Any, Any], same: bool) -> None:
    with ThreadedStreamer(lambda batch: [len(batch)] * len(batch), deduplicate=True) as streamer:
        assert streamer.predict([*items]) == [1 if same else 2] * 2


# -- options


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachetools", None)
    with ThreadedStreamer(models.echo, deduplicate=True):
        """Needs no package."""
    with pytest.raises(ImportError, match=r"cache_size needs cachetools: pip install cachetools$"):
        ThreadedStreamer(models.echo, cache_size=1)


def test_cache_forgets_results_that_are_too_old() -> None:
    runs: list[Any] = []
    with ThreadedStreamer(
        lambda batch: [runs.append(item) for item in batch], cache_size=2, cache_ttl=1e-9
    ) as streamer:
        for _ in range(2):
            streamer.predict(["a"])
    assert runs == ["a", "a"]


# -- an engine without workers, and a clock that moves when told to


class Shared(StubEngine):
    """What its engine computes is shared."""

    def __init__(self, *, may_rerun: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.single = SingleFlight(self.engine, may_rerun=may_rerun, clock=self.clock)
        self.clock.listen(self.single.timer.look)

    def __exit__(self, *_: object) -> None:
        self.single.close(drain=False, timeout=None)

    def submit(self, *items: Any, timeout: float | None = None, **options: Any) -> Future:
        future = Future(self.single)
        self.single.submit(Call(items, future, timeout, is_watched=True, **options))
        return future


@pytest.fixture
def one() -> Iterator[Shared]:
    with Shared() as made:
        yield made


def test_calls_of_which_nothing_is_new_need_no_room() -> None:
    with Shared(max_pending=1) as one:
        futures = [one.submit("a") for _ in range(3)]
        one.transport.ready(0)
        one.transport.echo()
        assert results(futures) == [["a"]] * 3


@pytest.mark.parametrize("error", [StreamerClosed, WorkerStartError])
def test_a_call_that_shares_with_one_that_no_worker_had_gets_its_error(
    error: type[StreamerError],
) -> None:
    with Shared(may_rerun=False) as one:
        futures = [one.submit("x", "z"), one.submit("x")]
        if error is StreamerClosed:
            one.single.close(drain=False, timeout=None)
        else:
            one.cannot_start(0)
        first, second = (future.exception() for future in futures)
        assert type(first) is type(second) is error
        assert first is not second


def test_call_that_shares_one_item_of_a_hopeless_one_is_computed(one: Shared) -> None:
    """It is refused by a pool, after it was accepted here: it has more items, and no more time."""
    large, small = one.submit("x", "z", timeout=5), one.submit("x", timeout=5)
    [call] = one.engine.open_calls
    reply = call.reply
    one.engine.withdraw(call)
    reply.end(Failure(TooLate("it takes longer by itself")))
    one.transport.ready(0)
    one.transport.echo()
    assert isinstance(large.exception(), TooLate)
    assert small.result() == ["x"]


def test_a_callback_may_submit_and_not_wait(one: Shared) -> None:
    told: list[Any] = []

    def callback(_: Any) -> None:
        told.append(one.submit("b", timeout=9))
        try:
            one.single.check_not_in_callback()
        except StreamerError as error:
            told.append(str(error))

    one.submit("a").add_done_callback(callback)
    follower = one.submit("a")
    follower.add_done_callback(lambda _: sys.exit(3))
    last = one.submit("a")
    one.transport.ready(0)
    one.transport.echo()
    assert last.result() == ["a"]
    assert "callback runs in this streamer's thread" in told[1]
    one.transport.echo()
    assert told[0].result() == ["b"]


def test_close_in_a_callback_lets_the_rest_be_answered(one: Shared) -> None:
    one.submit("a").add_done_callback(lambda _: one.single.close(drain=True, timeout=None))
    last = one.submit("b", timeout=9)
    one.transport.ready(0)
    one.transport.echo()
    if len(one.transport.sent) > 1:
        one.transport.echo()
    assert last.result() == ["b"]
    await_that(lambda: one.single.timer.thread is None or not one.single.timer.thread.is_alive())


def test_close_ends_the_thread_that_looks_at_the_time(one: Shared) -> None:
    withdrawn = one.submit("a", timeout=999)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        closing = threads.submit(one.single.close, drain=True, timeout=None)
        await_that(lambda: one.engine.is_over)
        time.sleep(0.05)  # the thread waits for the end of this call, if it has looked just now
        assert withdrawn.cancel()
        closing.result()
    thread = one.single.timer.thread
    await_that(lambda: thread is not None and not thread.is_alive())


def test_a_finalizer_may_close_in_the_middle_of_a_call(one: Shared) -> None:
    future = one.submit("a", timeout=9)
    # As where the garbage collector interrupts a call
    with one.single.lock:
        one.single.close(drain=False, timeout=None)
    with pytest.raises(StreamerClosed):
        future.result()
