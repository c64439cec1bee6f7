"""When a batch takes too long: tables of the bound, walks of the slots, and the engine's word."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

import models
import service_streamer.supervision.health as health
from batcher_walk import Walk
from cases import long_cases
from conftest import await_that
from service_streamer import Streamer
from service_streamer.observe.record import BatchRecord
from service_streamer.options.table import HangOptions
from service_streamer.serve.cli.main import main
from service_streamer.supervision.health import WARM, BatchBound
from service_streamer.testing import Gate


def warmed(bound: BatchBound, *durations: float) -> BatchBound:
    """After ten batches of these durations, in turn."""
    for number in range(WARM):
        bound.observe(durations[number % len(durations)], number)
    return bound


def test_the_first_batches_have_an_hour_without_a_timeout_of_callers() -> None:
    assert BatchBound(None).limit(0, math.inf) == 3600.0
    assert BatchBound(None).limit(0, 30.0) == 600.0
    bound = BatchBound(20.0)
    assert bound.limit(0, math.inf) == 600.0
    assert bound.normal == 60.0, "it is known from the start"
    assert warmed(bound, 30.0).normal == 300.0


def test_a_slow_first_batch_counts_for_the_first_ones_of_others_only() -> None:
    bound = BatchBound(20.0)
    bound.observe(300.0, 0)
    for number in range(1, WARM + 1):
        bound.observe(0.01, number)
    assert bound.limit(WARM) == 60.0
    assert bound.limit(0) == bound.limit(WARM - 1) == 3000.0


def test_a_given_bound_stays() -> None:
    bound = warmed(BatchBound(fixed=2.0), 50.0)
    assert (bound.limit(0), bound.limit(WARM), bound.normal) == (2.0, 2.0, 2.0)


# -- workers


class Bounded(Walk):
    """Workers that compute batches of one item, one after the other."""

    def __init__(self, count: int = 1, bound: BatchBound | None = None) -> None:
        timeout = bound or BatchBound(20.0)
        super().__init__(
            batch_size=1, max_latency=0.0, slots=count, max_attempts=1, batch_timeout=timeout
        )
        self.patience = 20.0

    def give(self, now: float) -> BatchRecord:
        self.now = now
        [batch] = self.submit(None, timeout=self.patience)[1]
        return batch

    def back(self, batch: BatchRecord, now: float) -> None:
        self.now = now
        self.done(batch)

    def warm(self, took: float = 0.1) -> float:
        """Compute ten batches; when they are over."""
        for number in range(WARM):
            batch = self.give(number * took)
            assert all(not hung for _, hung in self.looks_until((number + 1) * took))
            self.back(batch, (number + 1) * took)
        return WARM * took

    def looks_until(self, end: float) -> list[tuple[float, list[int]]]:
        """What hangs, at each look until then."""
        told = []
        while (now := self.batcher.deadline) <= end:
            told.append((now, [*self.batcher.time_passed(now).hung]))
        return told


@pytest.mark.parametrize(
    ("patience", "limit"), [(1.0, 60.0), (300.0, 600.0), (1e4, 2e4), (math.inf, 600.0)]
)
def test_callers_that_wait_for_long_may_have_sent_long_work(patience: float, limit: float) -> None:
    walk = Bounded()
    now = walk.warm()
    walk.patience = patience
    walk.give(now)
    assert walk.looks_until(1e6)[-1] == (now + limit, [0])


def test_one_that_is_not_ended_is_told_once_for_each_batch_and_goes_on() -> None:
    walk = Bounded(bound=BatchBound(20.0, ends=False))
    now = walk.warm()
    batch = walk.give(now)
    assert walk.looks_until(1e6)[-1] == (now + 60.0, [0])
    walk.back(batch, now + 70.0)
    walk.give(now + 80.0)
    assert walk.looks_until(1e6)[-1] == (now + 80.0 + 700.0, [0]), "it takes longer now, it seems"


@pytest.mark.parametrize(
    ("busy_since", "now", "expected"),
    [
        ([0.0, 0.0], 61.0, 61.0),
        ([0.0, 5.0], 66.0, 61.0),
        ([0.0, 5.0], 65.0, None),
        ([0.0, None], 1000.0, None),
        ([], 1000.0, None),
    ],
)
def test_a_streamer_is_stuck_when_no_worker_may_soon_be_free(
    busy_since: list[float | None], now: float, expected: float | None
) -> None:
    walk = Bounded(len(busy_since))
    for since in busy_since:
        if since is not None:
            walk.give(since)
    assert walk.batcher.slots.stuck(now) == expected


def test_a_batch_that_failed_is_no_measure() -> None:
    walk = Bounded()
    for number in range(2 * WARM):
        batch = walk.give(number)
        walk.now += 0.5
        walk.failed(batch)
    assert walk.batcher.slots.limit(0) == 600.0


# -- the engine, and streamers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" takes seconds for minutes."""
    monkeypatch.setattr(health, "_LEAST", 0.5)
    monkeypatch.setattr(health, "_PATIENCE_FACTOR", 0.0)
    monkeypatch.setattr(health, "_UNKNOWN", 1.0)


def hang_on_one(batch: list[int]) -> list[int]:
    if 1 in batch:
        threading.Event().wait()
    return batch


@pytest.mark.usefixtures("impatient")
def test_a_hang_is_healed_without_any_option() -> None:
    with Streamer(hang_on_one, worker_timeout=None, max_attempts=2) as streamer:
        for _ in range(WARM):
            assert streamer.predict([0]) == [0]
        hangs_ = streamer.submit([1], timeout=1000)
        assert streamer.predict([2]) == [2]
        error = hangs_.exception()
    assert 'at one batch for more than batch_timeout of 0.5 s ("auto")' in str(error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["process", *long_cases("thread")])
def test_a_hung_worker_that_is_not_ended_is_reported_and_goes_on(
    kind: str,
    build: Callable[..., Any],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(health, "_FACTOR", 2.0)  # of the bound for a worker that is not warm
    if kind == "thread":
        streamer = build(models.gated(gate))
    else:
        streamer = build(models.Gated, model_init_args=(gate,), batch_timeout=None)
    future = streamer.submit([1], timeout=1000)
    gate.await_arrival()
    await_that(lambda: "is not ended" in caplog.text)
    assert "every worker has been at one batch" in streamer.stats().trouble
    gate.let_through()
    assert future.result() == [1]
    assert streamer.stats().trouble is None
    reason = "a thread cannot be ended" if kind == "thread" else "batch_timeout is None"
    assert f"and is not ended: {reason}" in caplog.text
    assert ("go_through" in caplog.text) == (kind == "thread"), "where it is"


@pytest.mark.parametrize("name", ["batch_timeout", "start_timeout"])
def test_bad_timeouts_are_refused(name: str) -> None:
    for bad in (0, -1, "soon", True):
        with pytest.raises((TypeError, ValueError), match=name):
            HangOptions(**{name: bad})  # type: ignore[arg-type]
    for good in (1, 0.5, None, "auto"):
        HangOptions(**{name: good})  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_the_command_line_has_both(command: str) -> None:
    options = {each.name: each for each in main.commands[command].params}
    for name in ("batch_timeout", "start_timeout"):
        kind = options[name].type
        assert [kind.convert(each, None, None) for each in ("auto", "none", "2.5")] == [
            "auto", None, 2.5,
        ]  # fmt: skip
        assert options[name].default == "auto"
