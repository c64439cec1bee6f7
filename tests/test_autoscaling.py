"""How many workers there are by the load: the decisions, the engine, and real workers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
import service_streamer.supervision.autoscaling as autoscaling
from adapters.simulated_step import MODELS, Stepped, stepped
from cases import long_cases
from conftest import await_that
from service_streamer import Overloaded, PredictTimeout, Streamer
from service_streamer.engine.engine import EngineState
from service_streamer.options.table import RedisWorkerOptions, StreamerOptions
from service_streamer.serve.cli.main import main
from service_streamer.simulate import ClosedLoop, CostModel, Phases, Poisson, count_turns, simulate
from service_streamer.supervision.autoscaling import Autoscaling, Load
from service_streamer.testing import Gate
from stub_engine import StubEngine

# -- decisions


class Fluid:
    """Workers that compute without batches or chance, and calls that flow.

    Args:
        start: what a worker takes to start, seconds.
        speed: items that one computes in a second.
        rate: items that arrive in a second, at a time.
        startable: how many workers can be started; those beyond fail.
        room: how many items may wait; those beyond are refused.
        patience: how long an item may wait, seconds; those that would longer are refused.
    """

    def __init__(
        self,
        least: int,
        most: int,
        rate: Callable[[float], float],
        *,
        start: float = 5.0,
        speed: float = 100.0,
        full: float = 10.0,
        startable: int = 1000,
        room: float = math.inf,
        patience: float = math.inf,
    ) -> None:
        self.scaling = Autoscaling(least, most)
        self.rate, self.start, self.speed, self.full = rate, start, speed, full
        self.startable, self.room, self.patience = startable, room, patience
        self.now = 0.0
        self.overrated = 1.0  # how much faster a worker seems to be than it is
        self.workers = [0.0] * least  # when each is ready
        self.waiting = self.arrived = self.served = self.refused = 0.0
        self.history = [(0.0, least)]

    def load(self) -> Load:
        here = self.workers[: self.startable]
        ready = sum(at <= self.now for at in here)
        return Load(
            waiting=int(self.waiting),
            in_flight=int(min(ready * self.full, self.rate(self.now) * self.full / self.speed)),
            arrived=int(self.arrived),
            served=int(self.served),
            batches=int(self.served / self.full),
            ready=ready,
            failed=len(self.workers) - len(here),
            full=self.full,
            speed=self.overrated * self.speed,
            turn=self.full / self.speed,
            start_duration=self.start,
            refused=int(self.refused),
        )

    def until(self, end: float, step: float = 0.01) -> Sequence[int]:
        """Let time pass; the numbers of workers that were wanted in turn."""
        before = len(self.history)
        while self.now < end:
            load = self.load()
            if self.scaling.is_due(load.waiting, self.now):
                self._decide(load)
            self.now += step
            comes = self.rate(self.now) * step
            done = min(self.waiting + comes, load.ready * self.speed * step)
            self.arrived += comes
            self.served += done
            self.waiting += comes - done
            room = min(self.room, self.patience * load.ready * self.speed)
            self.refused += max(0.0, self.waiting - room)
            self.waiting = min(self.waiting, room)
        return [number for _, number in self.history[before:]]

    def _decide(self, load: Load) -> None:
        scaling = self.scaling
        wanted = scaling.decide(load, self.now)
        assert scaling.least <= wanted <= scaling.most
        assert scaling.due > self.now
        if wanted < len(self.workers):
            assert wanted >= math.ceil(load.in_flight / load.full)
        if wanted != len(self.workers):
            self.history.append((self.now, wanted))
        del self.workers[wanted:]
        self.workers += [self.now + self.start] * (wanted - len(self.workers))


def steady(rate: float) -> Callable[[float], float]:
    return lambda _: rate


@pytest.mark.parametrize(
    ("rate", "start", "wanted"),
    [
        (0, 5, []),
        (20, 5, []),
        (95, 5, []),
        # One for what arrives, at 0.7 of its time, and one for what gathers while they start.
        (120, 5, [2]),
        (200, 5, [4]),
        (300, 5, [7]),
        # Nothing gathers to speak of if they start at once.
        (300, 0.1, [6]),
        (10_000, 5, [16]),
    ],
)
def test_a_step_has_as_many_workers_started_as_it_needs(
    rate: float, start: float, wanted: list[int]
) -> None:
    assert Fluid(1, 16, steady(rate), start=start).until(60) == wanted


@pytest.mark.parametrize("bound", [{"room": 10}, {"patience": 0.1}])
@pytest.mark.parametrize(
    ("rate", "start", "wanted"), [(90, 5, []), (120, 5, [2]), (120, 0.5, [2]), (300, 5, [7])]
)
def test_what_is_refused_has_workers_started_though_little_waits(
    bound: dict[str, float], rate: float, start: float, wanted: list[int]
) -> None:
    walk = Fluid(1, 16, steady(rate), start=start, **bound)  # type: ignore[arg-type]
    assert walk.until(60)[-1:] == wanted
    refused = walk.refused
    walk.until(100)
    assert walk.refused == refused


def test_a_burst_of_refusals_is_no_reason() -> None:
    walk = Fluid(1, 16, lambda now: 2_000 if 10 <= now < 10.1 else 20, room=10)
    assert walk.until(60) == []
    assert walk.refused > 100


def test_workers_are_ended_long_after_they_were_needed() -> None:
    walk = Fluid(1, 16, lambda now: 300 if now < 100 else 20)
    assert walk.until(100) == [7, 5]  # two of them worked off what had gathered
    assert walk.history[1][0] < 2  # seconds after the step
    assert walk.until(100 + autoscaling.LEAST_DELAY - 1) == []
    assert walk.until(100 + 2 * autoscaling.LEAST_DELAY) == [1]
    assert count_turns(walk.history) == 1
    assert walk.until(10_000, step=1.0) == []


def test_without_a_load_nothing_is_looked_at() -> None:
    walk = Fluid(1, 16, steady(0))
    walk.until(1)
    assert walk.scaling.due == math.inf
    assert not walk.scaling.is_due(0, 1e9)
    assert walk.scaling.is_due(1, walk.now)


def test_without_any_call_there_are_as_few_workers_as_there_may_be() -> None:
    walk = Fluid(8, 8, steady(0))
    walk.scaling.set_bounds(2, 8, walk.now)
    assert walk.until(autoscaling.LEAST_DELAY + 10) == [2]
    assert walk.scaling.due == math.inf


def test_with_as_many_workers_as_there_may_be_only_the_time_to_end_some_is_due() -> None:
    walk = Fluid(1, 2, steady(1_000))
    assert walk.until(30) == [2]
    walk.until(walk.scaling.due + 0.02)
    part = autoscaling.LEAST_DELAY / autoscaling.PARTS
    assert walk.scaling.due == pytest.approx(walk.now + part, abs=0.1)


def test_while_no_worker_is_ready_there_is_no_haste() -> None:
    scaling = Autoscaling(1, 4)
    load = Load(5, 0, 5, 0, 0, 0, 0, 64, 0.0, 0.0, 0.0)
    assert scaling.is_due(5, 10.0)
    assert scaling.decide(load, 10.0) == 1
    assert (scaling.is_due(5, 10.5), scaling.due) == (False, 10.0 + autoscaling.SELDOM)


def test_workers_that_start_late_are_not_asked_for_again() -> None:
    walk = Fluid(1, 16, steady(200))
    assert walk.until(2) == [4]
    walk.workers[1:] = [math.inf] * 3  # as if the machines for them were not there yet
    assert walk.until(500, step=0.1) == []


def test_where_one_worker_is_late_others_are_tried_one_by_one() -> None:
    walk = Fluid(1, 6, lambda now: 200 if now < 60 else 1_000)
    assert walk.until(2) == [4]
    walk.workers[3] = math.inf  # its machine is not there yet
    assert walk.until(300)[-2:] == [5, 6]


def test_an_outage_ends_no_workers() -> None:
    walk = Fluid(1, 16, lambda now: 300 if now < 80 else 0)
    walk.until(79)
    there = walk.scaling.wanted
    assert there > 1
    walk.workers = [math.inf] * there
    walk.until(80 + 10 * autoscaling.LEAST_DELAY, step=0.1)
    assert (walk.waiting > 0, walk.scaling.wanted) == (True, there)
    walk.workers = [walk.now] * there
    walk.until(walk.now + 2 * autoscaling.LEAST_DELAY, step=0.1)
    assert walk.scaling.wanted == 1


def test_workers_that_new_bounds_have_started_count_as_if_they_were_there() -> None:
    walk = Fluid(1, 16, steady(200))
    walk.scaling.set_bounds(8, 16, walk.now)
    walk.workers += [walk.start] * 7
    assert walk.until(60) == []


def test_what_was_measured_does_not_count_for_ever() -> None:
    walk = Fluid(1, 16, lambda now: 300 if now < 30 else 110)
    walk.overrated = 2.0
    walk.until(5)
    measured = walk.scaling.share
    assert measured == pytest.approx(0.5, abs=0.05)
    walk.until(30 + autoscaling.LEAST_DELAY / 2)
    assert measured + 0.1 < walk.scaling.share < 1
    walk.scaling.set_bounds(1, 8, walk.now)
    assert walk.scaling.share == 1


@pytest.mark.parametrize(("startable", "wanted"), [(4, [7, 5]), (1, [7]), (6, [7, 8])])
def test_workers_that_cannot_be_started_are_not_asked_for_again(
    startable: int, wanted: list[int]
) -> None:
    walk = Fluid(1, 16, steady(300 if startable < 6 else 1_000), startable=1000)
    if startable == 6:
        walk.rate = lambda now: 300 if now < 30 else 1_000
    walk.until(3)
    walk.startable = startable
    walk.until(120, step=0.1)
    assert [number for _, number in walk.history[1:]] == wanted


def test_workers_that_were_ended_too_soon_stay_longer_the_next_time() -> None:
    walk = Fluid(1, 4, lambda now: 250 if now % 120 < 30 else 10)
    walk.until(3_000, step=0.05)
    ups = [at for (at, number), (_, before) in zip(walk.history[1:], walk.history, strict=False)
           if number > before]  # fmt: skip
    assert 1 <= len(ups) <= 4
    assert max(ups) < 1_000


@pytest.mark.parametrize(("turn", "target"), [(1e-3, 0.05), (0.1, 0.2)])
def test_the_target_is_derived(turn: float, target: float) -> None:
    scaling = Autoscaling(1, 2)
    scaling.decide(Load(0, 0, 0, 0, 0, 1, 0, 10, 10 / turn, turn, 1.0), 0.0)
    assert scaling.target == pytest.approx(target)


def test_new_bounds_change_the_number_only_as_far_as_they_have_to() -> None:
    scaling = Autoscaling(2, 8)
    for bounds, wanted in [((1, 16), 2), ((4, 8), 4), ((1, 3), 3), ((6, 6), 6), ((1, 8), 6)]:
        scaling.set_bounds(*bounds, 0.0)
        assert scaling.wanted == wanted
        assert scaling.is_fixed == (bounds[0] == bounds[1])
        # Whether there may be too many is to be looked at; whether too few when items wait.
        assert (scaling.due == -math.inf) == (bounds[0] < wanted and not scaling.is_fixed)


@settings(max_examples=10, deadline=None)
@given(
    share=st.floats(0, 30),
    start=st.floats(0.05, 60),
    full=st.sampled_from([1, 8, 64]),
    turn=st.floats(2e-3, 2),
    least=st.integers(1, 3),
    more=st.integers(1, 20),
)
def test_a_constant_load_has_the_number_rise_once_and_fall_once(
    share: float, start: float, full: int, turn: float, least: int, more: int
) -> None:
    """Within the bounds, and never below what computes: ``Fluid`` asserts that."""
    speed = full / turn
    rate = share * speed
    walk = Fluid(least, least + more, steady(rate), start=start, speed=speed, full=full)
    delay = max(autoscaling.LEAST_DELAY, autoscaling.DELAY_OF_START * start)  # or less
    step = max(0.02, start / 200)
    walk.until(10 * delay, step)
    assert count_turns(walk.history) <= 1
    assert walk.until(20 * delay, 10 * step) == []
    if share < least + more - 0.5:  # what it can keep up with
        assert walk.waiting <= walk.rate(0) * max(walk.scaling.target, 20 * step)


@pytest.mark.parametrize(
    ("written", "means"),
    [("4", 4), ("1:16", (1, 16)), (" 2 : 3 ", (2, 3)), ("5:5", (5, 5)), *dict.fromkeys(
        ["0", "0:2", "3:2", "1:", ":2", "1:2:3", "a", "1.5"]
    ).items()],
)  # fmt: skip
def test_range_is_written_with_a_colon(written: str, means: Any) -> None:
    """None where it is refused."""
    [option] = [each for each in main.commands["serve"].params if "--workers" in each.opts]
    if means is not None:
        assert option.type.convert(written, option, None) == means
        return
    with pytest.raises(click.BadParameter, match="1:16"):
        option.type.convert(written, option, None)


@pytest.mark.parametrize("value", [(0, 2), (3, 2), (1,), (1, 2, 3), (1, 2.5), "1:2", None, {1: 2}])
def test_a_bad_range_is_refused_by_name(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="worker_num must be a whole number"):
        StreamerOptions(worker_num=value)


def test_a_worker_host_does_not_scale() -> None:
    with pytest.raises(TypeError, match=r"a worker host does not scale: start more hosts"):
        RedisWorkerOptions(worker_num=(1, 2))
    assert RedisWorkerOptions(worker_num=2).worker_range == (2, 2)


# -- the simulator


@pytest.mark.parametrize("seed", [0, *long_cases(1, 2)])
@pytest.mark.parametrize(
    "model", [MODELS[0], *long_cases(*MODELS[1:])], ids=lambda model: f"{model.start:g}s"
)
def test_after_a_step_the_latency_is_within_twice_the_target(model: Stepped, seed: int) -> None:
    found = stepped(model, seed)
    assert found["to_target"] <= 2
    assert found["turns"] == 1
    assert found["last"] == 1
    assert 4 <= found["most_workers"] <= 10


def test_a_simulation_of_a_fixed_number_is_as_it_was() -> None:
    model = CostModel(5e-3, 1e-4)
    fixed = simulate(Poisson(10_000), model, workers=2, requests=5_000)
    assert fixed.workers == [(0.0, 2)]
    assert fixed.mean_workers == pytest.approx(2)
    assert simulate(Poisson(10_000), model, workers=(2, 2), requests=5_000) == fixed


def test_callers_who_come_back_at_once_do_not_keep_a_worker_each() -> None:
    """Each worker has a batch of one of them all the time, and one has room for all."""
    load = Phases(((20.0, Poisson(600)), (math.inf, ClosedLoop(8))))
    model = CostModel(base=0.2, per_item=0.005)
    report = simulate(load, model, workers=(1, 16), start_duration=1.0, seconds=200.0)
    assert max(number for _, number in report.workers) > 8
    assert report.workers[-1][1] == 1


# -- the engine


class Setup(StubEngine):
    """Has so many workers as the load needs, of batches of one item."""

    def __init__(self, least: int, most: int, **options: Any) -> None:
        super().__init__(least, 1, most, **options)

    def pass_time(self, seconds: float) -> None:
        """Let the loop look at the load whenever it is due, until so many seconds have passed."""
        end = self.clock() + seconds
        while True:
            due = min(self.scaling.due, self.supervisor.due, self.batcher.deadline)
            if due > end:
                break
            left = due - self.clock()
            self.transport.await_that(lambda left=left: self.transport.timeouts[-1:] == [left])
            waits = self.transport.waits
            self.clock.advance(left)
            self.transport.await_that(lambda waits=waits: self.transport.waits > waits)
        self.clock.advance(end - self.clock())

    def overload(self) -> None:
        """A thousand items of a tenth of a second wait, and no more come."""
        self.transport.ready(0)
        self.submit(0)
        self.transport.echo(duration=0.1)
        self.submit(*range(1_000))
        self.transport.echo(duration=0.1)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with Setup(1, 3) as setup:
        yield setup


def test_an_idle_engine_does_not_look_at_the_load(setup: Setup) -> None:
    setup.transport.ready(0)
    setup.submit("a")
    setup.transport.echo()
    assert set(setup.transport.timeouts) == {None}


def test_more_workers_are_started_for_what_waits(setup: Setup) -> None:
    setup.overload()
    setup.pass_time(3.0)
    setup.transport.await_that(lambda: len(setup.transport.started) == 3)
    # The second number is the place, and the third decides about its share of the machine.
    assert setup.transport.started == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    stats = setup.engine.stats()
    assert (stats.wanted, stats.worker_range, stats.target_wait) == (3, (1, 3), pytest.approx(0.2))
    assert stats.wait == pytest.approx(99.8, rel=0.01)
    assert "(3 wanted, 1 to 3)" in stats.gist


@pytest.mark.parametrize(("size", "timeout"), [(10, None), (9, 0.8)])
def test_refused_items_are_counted_for_the_scaling(size: int, timeout: float | None) -> None:
    setup = Setup(1, 3, max_pending=None if timeout else 1_000)
    setup.overload()
    if not timeout:  # the items of a large call do not fill the queue
        for _ in range(1_000 - setup.batcher.queue.counted):
            setup.submit(0)
    for _ in range(50 if timeout else 1):  # and it is known how fast batches come back
        setup.clock.advance(0.1)
        setup.transport.echo(duration=0.1)
    before = setup.batcher.scheduler.load(0, 0, 1.0)
    with pytest.raises((Overloaded, PredictTimeout)):
        setup.submit(*range(size), timeout=timeout)
    after = setup.batcher.scheduler.load(0, 0, 1.0)
    assert after.arrived - before.arrived == size
    assert after.refused - before.refused >= size
    setup.engine.close(drain=False, timeout=None)


def test_a_number_by_hand_is_kept_and_bounds_let_the_load_decide_again(setup: Setup) -> None:
    setup.overload()
    setup.engine.scale(2)
    setup.transport.await_that(lambda: len(setup.transport.started) == 2)
    assert setup.engine.stats().worker_range is None
    setup.transport.ready(1)
    setup.pass_time(60.0)
    assert len(setup.transport.started) == 2
    setup.engine.scale((1, 4))
    setup.transport.echo(duration=0.1)
    setup.pass_time(3.0)
    setup.transport.await_that(lambda: len(setup.transport.started) == 4)


def test_closing_engine_is_not_scaled(setup: Setup) -> None:
    setup.overload()
    setup.pass_time(0.3)
    closing = threading.Thread(target=setup.engine.close, kwargs={"drain": True, "timeout": None})
    closing.start()
    await_that(lambda: setup.engine.state is EngineState.DRAINING)
    setup.clock.advance(100.0)
    for _ in range(10):
        setup.transport.echo(duration=0.1)
    assert len(setup.transport.started) == 1
    setup.engine.close(drain=False, timeout=None)
    closing.join()


# -- real workers


def test_workers_are_started_by_the_load_and_ended_without_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "LEAST_DELAY", 0.2)
    monkeypatch.setattr(autoscaling, "DELAY_OF_START", 0.1)
    monkeypatch.setattr(autoscaling, "TARGET_BATCHES", 1.0)
    gate = Gate(tmp_path / "gate")
    with Streamer(
        models.Gated, 1, worker_num=(1, 3), model_init_args=(gate,),
        worker_timeout=600,
    ) as streamer:  # fmt: skip
        first = streamer.submit([0])
        gate.await_arrival()
        gate.let_through()
        assert len(first.result()) == 1
        rest = streamer.submit(range(2_000))
        for _ in range(3):  # each is at its first batch of these: there are three workers
            gate.await_arrival()
        assert (streamer.stats().wanted, streamer.stats().worker_range) == (3, (1, 3))
        gate.let_through(2_000)
        assert len(rest.result()) == 2_000
        while len(streamer.workers()) > 1:
            time.sleep(0.001)
        gate.let_through()
        assert len(streamer.predict([0])) == 1
        assert streamer.stats().restarts == 0
    gate.close()


def test_a_shared_pool_scales_for_all_its_processes(shared: Callable[..., Streamer]) -> None:
    streamer = shared(models.echo, worker_num=[1, 2])
    assert streamer.predict([1]) == [1]
    assert streamer.stats().worker_range == (1, 2)
    streamer.scale(1)
    assert streamer.stats().worker_range is None
    streamer.scale((1, 3))
    assert (streamer.stats().worker_range, streamer.stats().wanted) == ((1, 3), 1)
