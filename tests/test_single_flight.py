"""Single flight with real streamers of every kind; test_computations.py has the decisions."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import models
from conftest import AnyStreamer, await_that, pool_only
from service_streamer import (
    Future,
    ManagedModel,
    ModelError,
    Overloaded,
    PredictTimeout,
    Streamer,
    StreamerClosed,
    StreamerError,
    ThreadedStreamer,
)
from service_streamer.batching.batcher import Batcher
from service_streamer.engine.engine import Engine
from service_streamer.observe.record import Call, Precedence
from service_streamer.share.cache import key_of, make_cache
from service_streamer.share.single_flight import SingleFlight
from service_streamer.supervision.supervisor import RestartPolicy, Supervisor
from service_streamer.testing import Gate, ManualClock, StubTransport
from service_streamer.workers.protocol import Failure

Build = Callable[..., AnyStreamer]


class Counting(ManagedModel):
    """Waits at a gate, and tells each item how many of its kind were computed in this worker."""

    def init_model(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.counts: dict[str, int] = {}

    def predict(self, batch: list[Any]) -> list[Any]:
        if self.gate is not None:
            self.gate.go_through()
        if "bad" in batch:
            raise ValueError("bad item")
        outputs = []
        for item in batch:
            self.counts[item] = self.counts.get(item, 0) + 1
            outputs.append([item, self.counts[item]])
        return outputs


@pytest.fixture
def counting(kind: str, build: Build) -> Callable[..., AnyStreamer]:
    """A streamer of the kind for the model above."""

    def make(gate: Gate | None = None, **options: Any) -> AnyStreamer:
        if kind == "thread":
            model = Counting()
            model.init_model(gate)
            return build(model.predict, **options)
        return build(Counting, model_init_args=(gate,), **options)

    return make


def results(futures: list[Future]) -> list[Any]:
    return [future.result() for future in futures]


# -- all kinds


def test_what_is_in_flight_is_computed_once(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    first = streamer.submit(["a", "b", "a"])
    gate.await_arrival()
    others = [streamer.submit(["b", "a"]) for _ in range(3)]
    gate.let_through()
    assert first.result() == [["a", 1], ["b", 1], ["a", 1]]
    assert results(others) == [[["b", 1], ["a", 1]]] * 3
    assert streamer.stats().deduplicated == 7
    assert "deduplicated 7" in repr(streamer)
    assert "deduplicated 7" in streamer.stats().gist
    gate.let_through()
    assert streamer.predict(["a"]) == [["a", 2]], "it is not in flight any more"


def test_without_it_everything_is_computed(counting: Build, gate: Gate) -> None:
    streamer = counting(gate)
    futures = [streamer.submit(["a", "a"])]
    gate.await_arrival()
    futures.append(streamer.submit(["a"]))
    gate.let_through(2)
    assert results(futures) == [[["a", 1], ["a", 2]], [["a", 3]]]
    assert streamer.stats().deduplicated == 0


def test_results_are_kept_in_a_cache(counting: Build) -> None:
    streamer = counting(cache_size=2)
    assert streamer.predict(["a"]) == [["a", 1]]
    assert streamer.predict(["a", "b"]) == [["a", 1], ["b", 1]]
    assert streamer.submit(["a"]).done(), "it is answered at once"
    assert streamer.stats().cached == 2
    assert streamer.predict(["c", "b"]) == [["c", 1], ["b", 1]]
    assert streamer.predict(["a"]) == [["a", 2]], "it was the oldest of three"
    streamer.clear_cache()
    assert streamer.predict(["b"]) == [["b", 2]]


def test_a_failure_is_that_of_all_who_wait_and_is_not_kept(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, cache_size=9)
    first = streamer.submit(["bad"])
    gate.await_arrival()
    second = streamer.submit(["bad"])
    gate.let_through(9)
    errors = [first.exception(), second.exception()]
    assert [type(error) for error in errors] == [ValueError, ValueError]
    assert errors[0] is not errors[1], "or the tracebacks of callers would mix"
    with pytest.raises(ValueError, match="bad item"):
        streamer.predict(["bad"])
    assert streamer.stats().cached == 0


def test_another_s_bad_item_is_none_of_mine(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    first = streamer.submit(["good", "bad"])
    gate.await_arrival()
    second = streamer.submit(["good"])
    gate.let_through(9)
    assert second.result() == [["good", 1]]
    with pytest.raises(ValueError, match="bad item"):
        first.result()


def test_the_first_may_go(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    blocker = streamer.submit(["blocker"])
    gate.await_arrival()
    first, second = streamer.submit(["a"]), streamer.submit(["a"])
    assert not second.running()
    assert first.cancel()
    third = streamer.submit(["a"])
    gate.let_through(9)
    assert results([blocker, second, third]) == [[["blocker", 1]], [["a", 1]], [["a", 1]]]
    with pytest.raises(CancelledError):
        first.result()


def test_the_time_of_the_first_is_not_that_of_the_others(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    blocker = streamer.submit(["blocker"])
    gate.await_arrival()
    first = streamer.submit(["a"], timeout=0.05)
    second = streamer.submit(["a"])
    third = streamer.submit(["a"], timeout=0.01)
    with pytest.raises(PredictTimeout):
        first.result()
    with pytest.raises(PredictTimeout):
        third.result()
    gate.let_through(9)
    assert second.result()[0][0] == "a"  # over Redis it is a call of its own
    assert blocker.result() == [["blocker", 1]]


@pool_only("a host may have claimed it by then")
def test_what_nobody_waits_for_is_not_computed(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    blocker = streamer.submit(["blocker"])
    gate.await_arrival()
    futures = [streamer.submit(["a"]), streamer.submit(["a"])]
    assert [future.cancel() for future in futures] == [True, True]
    gate.let_through(9)
    assert blocker.result() == [["blocker", 1]]
    assert streamer.predict(["a"]) == [["a", 1]]


def test_in_an_asyncio_loop(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)

    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(streamer.apredict(["a"])) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        gate.let_through()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(main())
    assert isinstance(first, asyncio.CancelledError)
    assert others == [[["a", 1]]] * 3


def test_who_blocks_the_loop_does_not_wait_for_what_it_is_to_flush(build: Build) -> None:
    """The first call is made in this pass of the loop, and the second one shares it."""
    streamer = build(models.double, deduplicate=True)

    async def main() -> None:
        call = asyncio.ensure_future(streamer.apredict([1], timeout=None))
        await asyncio.sleep(0)
        assert streamer.predict([1], timeout=None) == [2]
        assert await call == [2]

    asyncio.run(main())


def test_nor_does_who_boards_before_there_is_anything_to_flush(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = build(models.double, deduplicate=True)
    inner = streamer.backend._inner
    submit, others = inner.submit, []

    def boarded_meanwhile(*args: Any, **kwargs: Any) -> None:
        if not others:
            others.append(streamer.submit([1]))  # another thread's, as it were
        submit(*args, **kwargs)

    monkeypatch.setattr(inner, "submit", boarded_meanwhile)

    async def main() -> None:
        call = asyncio.ensure_future(streamer.apredict([1], timeout=None))
        await asyncio.sleep(0)
        assert others[0].result(timeout=240) == [2]
        assert await call == [2]

    asyncio.run(main())


def test_close_ends_all_who_wait(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, cache_size=5)
    futures = [streamer.submit(["a", item], timeout=1e6) for item in "abc"]
    gate.await_arrival()
    streamer.close(drain=False)
    for future in futures:
        with pytest.raises(StreamerClosed):
            future.result()
    with pytest.raises(StreamerClosed):
        streamer.predict(["a"])
    gate.let_through(9)


def test_a_drain_answers_all_who_wait(counting: Build, gate: Gate) -> None:
    streamer = counting(gate, deduplicate=True)
    futures = [streamer.submit(["a"], timeout=1e6) for _ in range(3)]
    gate.let_through(9)
    streamer.close()
    assert results(futures) == [[["a", 1]]] * 3
    with pytest.raises(StreamerClosed):
        streamer.predict(["a"])


def test_many_threads_at_once_get_their_own(build: Build) -> None:
    streamer = build(models.double, deduplicate=True, cache_size=20)
    wrong: list[Any] = []

    def call(seed: int) -> None:
        for i in range(100):
            items = [(seed * i + k) % 37 for k in range(3)]
            if streamer.predict(items) != [2 * item for item in items]:
                wrong.append(items)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not len(streamer._single_flight._computations)  # type: ignore[union-attr]


# -- pools


def test_the_death_of_a_worker_is_noticed_by_none_of_them(gate: Gate) -> None:
    with Streamer(Counting, model_init_args=(gate,), deduplicate=True) as streamer:
        first = streamer.submit(["a"])
        gate.await_arrival()
        second = streamer.submit(["a"])
        (pid,) = {int(line.split()[0]) for line in models.children()}
        os.kill(pid, signal.SIGKILL)
        gate.await_arrival()
        gate.let_through(9)
        assert results([first, second]) == [[["a", 1]]] * 2
        assert streamer.stats().restarts == 1


def test_an_item_that_kills_is_given_up_for_all(gate: Gate) -> None:
    with Streamer(models.misbehave, deduplicate=True, retry=False) as streamer:
        streamer.wait_ready()
        first, second = streamer.submit(["kill"]), streamer.submit(["kill"])
        errors = [type(future.exception()).__name__ for future in (first, second)]
        assert errors == ["WorkerLost"] * 2
        gate.let_through()


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


def test_what_cannot_be_copied_is_said_to_those_who_share_it(gate: Gate) -> None:
    with ThreadedStreamer(lambda _: [threading.Lock()], deduplicate=True) as streamer:
        assert streamer.predict(["a"])[0].acquire()
        with pytest.raises(ModelError, match=r"type lock cannot be copied.* deduplicate=True"):
            streamer.predict(["a", "a"])
    gate.let_through()


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
    assert (key_of(items[0]) == key_of(items[1])) == same


def test_a_long_item_has_a_short_key_that_no_item_can_have() -> None:
    key = key_of(bytes(10**6))
    assert key is not None
    assert len(key) == 33
    assert key[:1] != key_of(1)[:1]  # type: ignore[index]
    assert key_of(threading.Lock()) is None


# -- options


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"deduplicate": 1}, TypeError, "deduplicate must be True or False"),
        ({"cache_size": -1}, ValueError, "cache_size must be a whole number of at least 0"),
        ({"cache_size": 1.5}, TypeError, "cache_size must be a whole number"),
        ({"cache_size": 1, "cache_ttl": 0}, ValueError, "cache_ttl must be a number of seconds"),
        ({"cache_ttl": 1}, ValueError, "cache_ttl is of no use without a cache"),
    ],
)
def test_options_are_checked(
    build: Build, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        build(models.echo, **options)


def test_a_missing_package_is_told_with_its_extra() -> None:
    program = """
import sys
sys.modules["cachetools"] = None
from service_streamer import ThreadedStreamer
with ThreadedStreamer(len, deduplicate=True): pass
try:
    ThreadedStreamer(len, cache_size=1)
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.stdout == "cache_size needs cachetools: pip install cachetools\n"


def test_the_cache_forgets_the_eldest_and_the_oldest() -> None:
    clock = ManualClock()
    cache = make_cache(2, 10.0, clock)
    cache[b"a"] = cache[b"b"] = cache[b"c"] = 1
    assert list(cache) == [b"b", b"c"]
    clock.advance(11)
    assert list(cache) == []


# -- an engine without workers, and a clock that moves when told to


class Setup:
    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.transport = StubTransport(self.clock)
        self.engine = Engine(
            self.transport,
            Batcher(
                batch_size=4,
                max_latency=0.1,
                expired=Failure(PredictTimeout("expired")),
                **options,
            ),
            Supervisor(1, RestartPolicy(max_restarts=1)),
            max_pending=options.get("max_pending"),
            clock=self.clock,
            jitter=lambda: 0.0,
        )
        self.single = SingleFlight(self.engine, extend=self.engine.extend, clock=self.clock)
        self.clock.listen(self.single._timer.look)
        self.engine.start()

    def submit(self, *items: Any, timeout: float | None = None, **options: Any) -> Future:
        future = Future(self.single)
        self.single.submit(Call(items, future, timeout, is_watched=True, **options))
        return future

    def payloads(self) -> list[list[Any]]:
        return [payloads for _, _, payloads in self.transport.sent]


@pytest.fixture
def one() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.single.close(drain=False, timeout=None)


def test_a_follower_keeps_the_place_of_the_first(one: Setup) -> None:
    first = one.submit("a", timeout=1)
    second = one.submit("a", timeout=5)
    one.submit("z")
    one.clock.advance(2)
    assert isinstance(first.exception(), PredictTimeout)
    one.transport.ready(0)
    assert one.payloads() == [["a", "z"]]
    one.transport.echo()
    assert second.result() == ["a"]


def test_a_follower_s_time_ends_by_itself(one: Setup) -> None:
    first = one.submit("a")
    second = one.submit("a", timeout=1)
    one.clock.advance(1)
    assert isinstance(second.exception(), PredictTimeout)
    one.transport.ready(0)
    one.transport.echo()
    assert first.result() == ["a"]


def test_what_comes_too_late_for_the_first_is_sent_for_the_next(one: Setup) -> None:
    urgent = Precedence(has_deadline=True)
    first = one.submit("a", timeout=1, precedence=urgent)
    second = one.submit("a", timeout=5, precedence=urgent)
    one.clock.advance(2)
    assert isinstance(first.exception(), PredictTimeout)
    one.transport.ready(0)
    one.transport.await_that(lambda: len(one.transport.sent) > 0)
    assert one.payloads() == [["a"]]
    one.transport.echo()
    assert second.result() == ["a"]


def test_a_refusal_leaves_nothing_behind() -> None:
    setup = Setup(max_pending=2)
    first = setup.submit("a", "b")
    with pytest.raises(Overloaded):
        setup.submit("a", "c")
    assert len(setup.single._computations) == 1
    assert first.cancel(), "nobody else waits for it"
    assert setup.submit("a", "c").cancel()
    assert not len(setup.single._computations)
    setup.single.close(drain=False, timeout=None)


def test_calls_of_which_nothing_is_new_need_no_room() -> None:
    setup = Setup(max_pending=1)
    futures = [setup.submit("a") for _ in range(3)]
    setup.transport.ready(0)
    setup.transport.echo()
    assert results(futures) == [["a"]] * 3
    setup.single.close(drain=False, timeout=None)


def test_a_callback_may_submit_and_not_wait(one: Setup) -> None:
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


def test_close_in_a_callback_lets_the_rest_be_answered(one: Setup) -> None:
    one.submit("a").add_done_callback(lambda _: one.single.close(drain=True, timeout=None))
    last = one.submit("b", timeout=9)
    one.transport.ready(0)
    one.transport.echo()
    if len(one.transport.sent) > 1:
        one.transport.echo()
    assert last.result() == ["b"]
    await_that(lambda: one.single._timer.thread is None or not one.single._timer.thread.is_alive())


@pytest.mark.parametrize("lock", ["_lock", "_timer"])
def test_a_finalizer_may_close_in_the_middle_of_a_call(lock: str) -> None:
    setup = Setup()
    future = setup.submit("a", timeout=9)
    held = setup.single._lock if lock == "_lock" else setup.single._timer._lock
    with held:  # as where the garbage collector interrupts a call
        setup.single.close(drain=False, timeout=None)
    with pytest.raises(StreamerClosed):
        future.result()
    setup.single.close(drain=False, timeout=None)
