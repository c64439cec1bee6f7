"""A streamer in service: time that ends, room that ends, new weights, more and fewer workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import models
from cases import long_cases
from conftest import AnyStreamer, pool_only
from service_streamer import (
    Overloaded,
    PredictTimeout,
    Streamer,
    StreamerClosed,
    StreamerStats,
    WorkerStartError,
    WorkerStartTimeout,
)
from service_streamer.testing import Gate
from test_supervision import Walk

Build = Callable[..., AnyStreamer]

# -- deadlines and room


@pytest.fixture
def held(build: Build, gate: Gate) -> Iterator[AnyStreamer]:
    """A streamer whose worker is at the gate with one batch, and takes no more before."""
    streamer = build(models.gated(gate), 4, max_pending=3)
    streamer.submit(["held"])
    gate.await_arrival()
    yield streamer
    gate.let_through(9)
    streamer.close()  # a thread is not waited for long that still computes


@pool_only("what is being computed is pending too: to the client it is all the same")
def test_predict_has_a_timeout_of_its_own(held: Streamer) -> None:
    with pytest.raises(PredictTimeout, match=r"no result within 0\.01 s \(running \| pending 0"):
        held.predict(["late"], timeout=0.01)
    with pytest.raises(PredictTimeout, match=r"no result within 0\.01 s"):
        asyncio.run(held.apredict(["late"], timeout=0.01))
    assert held.stats().expired == 2
    assert held.stats().pending == 0


def test_without_time_nothing_is_enqueued(held: Streamer) -> None:
    pending = held.stats().pending
    for call in (
        lambda: held.predict(["late"], 0),
        lambda: held.submit(["late"], -1.5),
        lambda: asyncio.run(held.apredict(["late"], -1.5)),
    ):
        with pytest.raises(PredictTimeout, match="no time left when it was made"):
            call()
    bad: list[tuple[Any, type[Exception]]] = [
        ("1", TypeError), (True, TypeError), (float("nan"), ValueError),
    ]  # fmt: skip
    for timeout, error in bad:
        for method in (held.predict, held.submit):
            with pytest.raises(error, match="timeout must be a number of seconds"):
                method(["late"], timeout)
    assert held.stats().pending == pending


@pool_only("max_pending is of calls, not of items, and counts those that are computed")
def test_beyond_max_pending_every_kind_of_call_is_refused(held: Streamer) -> None:
    waiting = held.submit(["a", "b", "c"])
    calls = (
        lambda: held.predict(["d"]),
        lambda: held.submit(["d"]),
        lambda: asyncio.run(held.apredict(["d"])),
    )
    for call in calls:
        with pytest.raises(Overloaded, match="3 items wait, and 1 more would be beyond max_pend"):
            call()
    assert held.stats().rejected == 3
    assert waiting.cancel()
    assert held.stats().cancelled == 1
    assert held.submit(["d"]).cancel()


# -- being seen


@pool_only("they are RedisStreamerStats")
def test_stats_are_a_frozen_record_and_repr_shows_the_gist(held: Streamer) -> None:
    held.submit(["a", "b"])
    stats = held.stats()
    assert stats == StreamerStats(
        state="running", pending=2, in_flight=1, batches_in_flight=1,
        workers={
            "idle": 0, "busy": 1, "starting": 0, "retiring": 0, "stopping": 0, "backing off": 0,
            "failed": 0,
        },
        restarts=0, accepted=2, answered=0, failed=0, retries=0, expired=0, cancelled=0,
        rejected=0, isolated=0, ceilings={},
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pending = 0  # type: ignore[misc]
    kind = type(held).__name__
    assert repr(held) == (
        f"<{kind} running | pending 2 | in flight 1 batches/1 items | workers 1 busy>"
    )


def test_lifecycle_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "service_streamer")
    with Streamer(models.process_ids) as streamer:
        [pid] = streamer.predict([None])
        os.kill(pid, signal.SIGKILL)
        while streamer.stats().restarts < 1:
            time.sleep(0)
        streamer.predict([None])
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told[0] == ("INFO", "worker 0 is ready")
    assert told[1][0] == "WARNING"
    assert f"worker 0 (pid {pid}) died: " in told[1][1]
    assert told[1][1].endswith("; it is started again")
    assert told[2] == ("INFO", "worker 0 is ready")
    assert told[-1] == ("INFO", "the workers have ended")


# -- new weights, more workers


class Versioned(models.ManagedModel):
    """Tells the version of the weights that it has loaded."""

    def init_model(self, weights: Path) -> None:
        self.version = weights.read_text()
        if self.version == "bad":
            raise ValueError("these weights are bad")

    def predict(self, batch: list[Any]) -> list[str]:
        return [self.version] * len(batch)


@pytest.mark.parametrize(
    "method", [pytest.param("fork", marks=pytest.mark.no_gevent), *long_cases("spawn")]
)
def test_new_weights_and_more_workers_are_deployed_without_a_failed_call(
    tmp_path: Path, method: str
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("old")
    with Streamer(
        Versioned, worker_num=2, model_init_args=(weights,), mp_start_method=method,
        wait_for_worker_ready=True,
    ) as streamer:  # fmt: skip
        is_over = threading.Event()

        def call() -> set[str]:
            seen: set[str] = set()
            while not is_over.is_set():
                seen.update(streamer.predict([None], timeout=None))
            return seen

        with ThreadPoolExecutor(8) as threads:
            callers = [threads.submit(call) for _ in range(8)]
            try:
                weights.write_text("new")
                streamer.restart_workers()
                assert set(streamer.predict([None] * 200)) == {"new"}
                streamer.scale(3)
                streamer.wait_ready()
                streamer.scale(1)
                while sum(streamer.stats().workers.values()) > 1:
                    time.sleep(0.001)
            finally:
                is_over.set()
        assert set().union(*(caller.result() for caller in callers)) <= {"old", "new"}
        assert streamer.stats().restarts == 0
        # When the next weights are bad, the old workers stay
        weights.write_text("bad")
        with pytest.raises(WorkerStartError, match="these weights are bad"):
            streamer.restart_workers()
        assert set(streamer.predict([None] * 200)) == {"new"}
        streamer.wait_ready()


@pytest.mark.no_gevent  # which does not fork
def test_a_new_worker_gets_the_arguments_of_the_first_one() -> None:
    arguments = {"factor": 3}
    with Streamer(
        models.Multiplier, model_init_kwargs=arguments, mp_start_method="fork"
    ) as streamer:
        assert streamer.predict([1]) == [3]
        arguments["factor"] = 5  # the program uses its dict for something else
        streamer.restart_workers()
        assert streamer.predict([1]) == [3]


def test_a_rolling_restart_may_outlast_its_caller_s_patience(tmp_path: Path, gate: Gate) -> None:
    with Streamer(models.GatedInit, model_init_args=(gate,)) as streamer:
        gate.let_through()
        streamer.wait_ready()
        gate.await_arrival()
        with pytest.raises(WorkerStartTimeout, match="the restart goes on"):
            streamer.restart_workers(timeout=0.001)
        gate.await_arrival()
        assert streamer.predict([1]) == [1]
        gate.let_through()
        while streamer.stats().workers["idle"] != 1 or streamer.stats().workers["starting"]:
            time.sleep(0)


def test_workers_are_replaced_without_overlap_when_one_of_two_restarts_asks_for_that() -> None:
    """Else the other one would take memory that is not there."""
    walk = Walk(2)
    for overlap in (False, True):
        walk.do("renew", overlap)
    assert walk.told() == ["retire 0"]
    walk.retires(0)
    walk.ready(2)
    assert walk.told() == ["start 2 at 0", "retire 1"]


def test_scale_wants_a_number_and_a_streamer_that_is_open() -> None:
    with Streamer(models.echo) as streamer:
        for bad in (0, 1.5, "2", True):
            with pytest.raises((TypeError, ValueError), match="worker_num must be a whole number"):
                streamer.scale(bad)  # type: ignore[arg-type]
    with pytest.raises(StreamerClosed):
        streamer.scale(2)
    with pytest.raises(StreamerClosed):
        streamer.restart_workers()


def test_a_drain_outlives_the_death_of_the_worker(gate: Gate) -> None:
    streamer = Streamer(models.Gated, model_init_args=(gate,))
    future = streamer.submit(["a"])
    gate.await_arrival()
    closing = threading.Thread(target=streamer.close)
    closing.start()
    while streamer.stats().state != "draining":
        time.sleep(0)
    [pid] = [int(pid) for pid in models.children()]
    os.kill(pid, signal.SIGKILL)
    gate.await_arrival()
    gate.let_through()
    closing.join()
    assert future.result() == [1]
