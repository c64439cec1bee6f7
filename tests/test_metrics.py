"""What a streamer counts: histograms, the walks of batches that fill them, and its workers."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

import models
from batcher_walk import Walk
from conftest import await_that
from contract.figures import Figures, told
from service_streamer import (
    BatchMetrics,
    Future,
    Histogram,
    Reason,
    Streamer,
    ThreadedStreamer,
    WorkerStats,
)
from service_streamer.observe.record import BatchRecord, Call
from service_streamer.testing import Gate
from service_streamer.workers.protocol import Failure
from stub_engine import StubEngine

# -- histograms


def histogram(*values: float, bounds: tuple[float, ...] = (1, 2, 4)) -> Histogram:
    made = Histogram(bounds)
    for value in values:
        made.add(value)
    return made


def test_a_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    values = 0, 0.5, 1, 1.001, 2, 3, 4, 4, 4.001, 1e9
    made = histogram(*values)
    assert made.counts == [3, 2, 3, 2]
    assert (made.count, made.total) == (10, sum(values))
    assert histogram().counts == [0, 0, 0, 0]


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1), (1, 3, 2)])
def test_bounds_that_do_not_ascend_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="the bounds of a histogram must ascend"):
        Histogram(bounds)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ((), 0.5, None),
        ((0.7,), 1.0, 1.0),  # all that is known is the bucket
        ((0.1, 0.2, 0.3, 0.4), 0.25, 0.25),
        ((0.1, 0.2, 0.3, 0.4), 0.5, 0.5),
        ((0.5, 3, 3), 1 / 3, 1.0),
        ((0.5, 3, 3), 2 / 3, 3.0),
        ((0.5, 3, 3), 0.0, 0.0),
        ((3, 3), 0.0, 2.0),
        ((3, 3), 1.0, 4.0),
        ((3, 100), 0.99, 4.0),  # above the last bound nothing is known
        ((100,), 0.01, 4.0),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(
    values: tuple[float, ...], q: float, expected: float | None
) -> None:
    assert histogram(*values).quantile(q) == pytest.approx(expected)


def test_a_bound_of_nothing_and_bounds_below_it() -> None:
    assert histogram(0, 0, 0.5, bounds=(0, 1)).counts == [2, 1, 0]
    assert histogram(0, 0, bounds=(0, 1)).quantile(0.5) == 0
    assert histogram(-3, bounds=(-2, 1)).quantile(0.5) == -2


def test_what_was_added_since_a_copy() -> None:
    made = histogram(1, 3)
    before = made.copy()
    made.add(3)
    made.add(9, 2)
    assert (before.counts, before.total, before.mean) == ([1, 0, 1, 0], 4, 2)
    since = made - before
    assert (since.counts, since.total, since.count) == ([0, 0, 1, 2], 21, 3)
    assert repr(since) == "<Histogram of 3, total 21>"
    assert (made - made).mean is None
    with pytest.raises(ValueError, match="same bounds"):
        made - Histogram((1.0,))


def test_the_buckets_are_those_that_the_documentation_names() -> None:
    with ThreadedStreamer(models.echo) as streamer:
        metrics = streamer.metrics
    assert [*metrics.sizes.bounds] == [2.0**n for n in range(10)]
    assert (metrics.inference.bounds[0], metrics.inference.bounds[-1]) == (0.0005, 60)
    assert (metrics.padding.bounds[0], metrics.padding.bounds[-1]) == (0, 0.9)


# -- walks of batches; all times are sums of powers of two, and so exact


def ended(walk: Walk) -> tuple[int, int, int, int, int]:
    of = walk.batcher.figures
    return (
        of.accepted_calls, of.answered_calls, of.failed_calls, of.expired_calls, of.cancelled_calls,
    )  # fmt: skip


def test_those_that_gather_have_waited_each_for_itself() -> None:
    walk = Walk()
    _, [first] = walk.submit("a")
    for at, items in ((1.0, "b"), (1.5, "cd"), (2.0, "")):
        walk.now = at
        if items:
            walk.submit(*items)
    [second] = walk.done(first, 0.25).batches
    walk.now = 2.25
    walk.done(second, 0.125, padding=0.5)
    metrics = walk.batcher.figures.metrics
    assert told(metrics.sizes) == {1: 1, 4: 1}
    assert metrics.sizes.total == 4
    assert told(metrics.queued) == {0.0005: 1, 1.0: 1, 0.5: 1}
    assert metrics.queued.total == 0 + 1.0 + 0.5, "each call once, not each item"
    assert metrics.batch.total == 2.0 + 0.25
    assert metrics.inference.total == 0.25 + 0.125
    assert told(metrics.padding) == {0.5: 1}


def test_a_call_of_several_batches_has_waited_for_each() -> None:
    walk = Walk(batch_size=2)
    _, [first, ahead] = walk.submit(*"abcde")
    walk.now = 0.5
    assert not walk.done(first, 0.25).batches
    walk.now = 1.0
    [last] = walk.done(ahead, 0.25).batches
    walk.done(last, 0.25)
    metrics = walk.batcher.figures.metrics
    assert told(metrics.sizes) == {1: 1, 2: 2}
    assert (metrics.queued.count, metrics.queued.total) == (3, 0 + 0 + 1.0)
    assert metrics.batch.total == 0.5 + 1.0 + 0, "what was sent ahead waits as a batch"
    assert ended(walk) == (1, 1, 0, 0, 0)


def test_a_batch_that_is_run_again_in_parts_counts_as_batches_but_not_as_waiting() -> None:
    walk = Walk()
    _, [first] = walk.submit("good")
    walk.submit("bad")
    walk.submit("fine")
    walk.now = 1.0
    [both] = walk.done(first, 0.25).batches
    walk.now = 2.0
    walk.lost(both.slot)
    [half] = walk.checked(walk.batcher.worker_ready(1, 2.0)).batches
    walk.now = 2.5
    [other] = walk.done(half, 0.25).batches
    walk.now = 3.0
    walk.done(other, 0.25)
    metrics = walk.batcher.figures.metrics
    assert told(metrics.sizes) == {1: 3}, "those that came back"
    assert (metrics.queued.count, metrics.queued.total) == (3, 0 + 1.0 + 1.0)
    assert (metrics.inference.count, metrics.inference.total) == (3, 0.75)
    assert (metrics.batch.count, metrics.batch.total) == (3, 1.0 + 0.5 + 0.5)
    assert ended(walk) == (3, 3, 0, 0, 0)


def test_a_batch_that_is_lost_is_none_but_its_items_have_waited() -> None:
    walk = Walk(slots=2)
    _, [first] = walk.submit("busy")
    _, [second] = walk.submit("too")
    walk.submit("waits")
    walk.now = 1.0
    [lost] = walk.done(first, 0.25).batches
    walk.now = 2.0
    actions = walk.batcher.worker_lost(lost.slot, "died", walk.now)
    assert not actions.batches, "it is run again by itself, when a worker is free"
    metrics = walk.batcher.figures.metrics
    assert (metrics.sizes.count, metrics.queued.count, metrics.queued.total) == (1, 2, 1.0)
    [again] = walk.done(second, 0.25).batches
    walk.now = 2.25
    walk.done(again, 0.25)
    metrics = walk.batcher.figures.metrics
    assert (metrics.sizes.count, metrics.queued.count, metrics.queued.total) == (3, 3, 1.0)
    assert metrics.batch.total == 1.0 + 2.0 + 0.25
    assert ended(walk) == (3, 3, 0, 0, 0)


def test_every_call_is_counted_once_by_how_it_ended() -> None:
    walk = Walk(batch_size=2)
    _, [first] = walk.submit("busy")
    walk.submit("bad")
    _, [both] = walk.submit("good")
    walk.submit("late", timeout=0.5)
    gone = Call(["gone"], None)
    walk.batcher.call_submitted(gone, walk.now)
    walk.batcher.withdraw(gone)
    walk.batcher.withdraw(gone)
    walk.now = 1.0
    walk.batcher.time_passed(walk.now)
    assert ended(walk) == (5, 0, 0, 1, 1)
    walk.done(first, 0.25)
    walk.done(both, _0="cannot be sent")
    assert ended(walk) == (5, 2, 1, 1, 1)
    walk.submit("cut off")
    walk.batcher.fail_all("closed")
    assert ended(walk) == (6, 2, 2, 1, 1)


def test_a_copy_stays_as_it_was_and_can_be_taken_away() -> None:
    walk = Walk()
    _, [first] = walk.submit("a")
    walk.done(first, 0.25, padding=0.25)
    walk.batcher.figures.metrics.stages[0] = 1.0
    before = walk.batcher.figures.metrics.copy()
    walk.batcher.figures.metrics.stages[0] = 3.0
    _, [second] = walk.submit("b")
    walk.now = 2.0
    walk.done(second, 0.25)
    assert before.sizes.count == before.queued.count == before.padding.count == 1
    since = walk.batcher.figures.metrics - before
    assert isinstance(since, BatchMetrics)
    assert (since.sizes.count, since.batch.total, since.padding.count) == (1, 2.0, 0)
    assert (before.stages, since.stages) == ([1.0, 0, 0], [2.0, 0, 0])
    assert before.reasons == since.reasons == {Reason.ALONE: 1}
    assert since.reasons[Reason.LATE] == 0


# -- what watches


@pytest.fixture
def ready(one: StubEngine) -> StubEngine:
    one.transport.ready(0)
    return one


def test_a_watcher_is_told_of_every_batch_after_the_callers(ready: StubEngine) -> None:
    calls: list[Future] = []
    records: list[BatchRecord] = []
    seen: list[Any] = []  # the failure, the calls with when they came, and who was answered

    def name(call: Call) -> None:
        call.context = f"call of {call.payloads}"

    def watch(record: BatchRecord) -> None:
        records.append(record)
        called = [(call.context, call.arrived_at) for call in record.each_call()]
        seen.append((record.report.failure, called, [future.done() for future in calls]))
        if record.size == 2:
            raise RuntimeError("a watcher's bug")

    calls.append(ready.submit("before"))
    ready.engine.watch(watch, name)
    ready.clock.advance(0.5)
    calls.append(ready.submit("a", "b"))
    ready.clock.advance(0.5)
    ready.transport.echo(0, duration=0.25)
    ready.transport.echo(1, duration=0.125)
    calls.append(ready.submit("c"))
    failure = Failure(ValueError("bad"))
    ready.transport.report(0, 2, failure=failure, duration=2.0)
    assert [
        (each.worker, each.size, each.cut_at, each.back_at, each.report.duration, each.is_rerun)
        for each in records
    ] == [
        (0, 1, 0.0, 1.0, 0.25, False),
        (0, 2, 1.0, 1.0, 0.125, False),
        (0, 1, 1.0, 1.0, 2.0, False),
    ]
    assert seen == [
        (None, [(None, 0.0)], [True, False]),
        (None, [("call of ['a', 'b']", 0.5)], [True, True]),
        (failure, [("call of ['c']", 1.0)], [True, True, True]),
    ]
    assert not any(each.spans or each.report.outputs or each.report.failure for each in records)


def test_a_batch_that_is_run_again_is_told_to_be(ready: StubEngine) -> None:
    records: list[BatchRecord] = []
    ready.engine.watch(records.append)
    for item in ("first", "a", "b"):
        ready.submit(item)
    ready.transport.echo()
    ready.transport.lose(0)
    ready.transport.ready(1)
    ready.transport.echo()
    ready.transport.echo()
    assert [(record.size, record.is_rerun) for record in records] == [
        (1, False), (1, True), (1, True),
    ]  # fmt: skip
    assert [record.reason for record in records if record.is_rerun] == [Reason.AGAIN] * 2


def test_the_log_says_of_every_batch_why_it_was_cut(
    ready: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "service_streamer")
    ready.submit("a", "b")
    ready.transport.echo()
    [text] = [record.getMessage() for record in caplog.records if "batch 0" in record.getMessage()]
    assert text.partition(": ")[0] == "batch 0 has 2 items"
    assert text.partition(": ")[2] in {reason.value for reason in Reason}


# -- streamers


class TestFigures(Figures):
    """Not over Redis, where batches belong to the worker host."""

    @pytest.fixture(params=["thread", "process"])
    def kind(self, request: pytest.FixtureRequest) -> Any:
        return request.param


class Treacherous(models.NothingToLoad, models.Echoing):
    """Its padding cannot be looked at."""

    @property  # type: ignore[override]
    def padding(self) -> float:
        raise RuntimeError("do not look")


def test_an_attribute_that_cannot_be_looked_at_ends_no_worker() -> None:
    with ThreadedStreamer(Treacherous) as streamer:
        assert streamer.predict([1]) == [1]
        assert streamer.metrics.padding.count == 0


def states(streamer: Streamer | ThreadedStreamer) -> list[tuple[int, str]]:
    return [(worker.number, worker.state) for worker in streamer.workers()]


def test_a_thread_is_a_worker_too(gate: Gate) -> None:
    with ThreadedStreamer(models.gated(gate)) as streamer:
        streamer.wait_ready()
        assert streamer.workers() == [WorkerStats(0, None, "idle", 0)]
        call = streamer.submit([1])
        gate.await_arrival()
        assert streamer.workers() == [WorkerStats(0, None, "busy", 0)]
        gate.let_through()
        assert call.result() == [1]
        assert states(streamer) == [(0, "idle")]
    assert streamer.workers() == []


@pytest.mark.usefixtures("eight_gpus")
def test_workers_of_several_devices_of_which_one_is_killed() -> None:
    options = {"worker_num": 3, "cuda_devices": ["cpu", 1], "wait_for_worker_ready": True}
    with Streamer(models.WhereAndWho, 1, **options) as streamer:  # type: ignore[arg-type]
        assert streamer.workers() == [
            WorkerStats(0, "cpu", "idle", 0),
            WorkerStats(1, 1, "idle", 0),
            WorkerStats(2, "cpu", "idle", 0),
        ]
        process = next(
            pid for device, pid in (streamer.predict([0])[0] for _ in range(3)) if device == 1
        )
        os.kill(process, signal.SIGKILL)
        await_that(lambda: streamer.workers()[1].restarts)
        streamer.wait_ready()
        assert [worker.restarts for worker in streamer.workers()] == [0, 1, 0]
        assert states(streamer) == [(0, "idle"), (1, "idle"), (2, "idle")]
        assert streamer.stats().restarts == 1
        streamer.scale(1)
        await_that(lambda: len(streamer.workers()) == 1)
        streamer.scale(2)
        streamer.wait_ready()
        assert [worker.restarts for worker in streamer.workers()] == [0, 1], "that is kept"


def test_a_worker_that_starts_and_one_that_failed() -> None:
    with Streamer(models.BrokenInit) as streamer:
        await_that(lambda: states(streamer) == [(0, "failed")])
        assert sum(streamer.stats().workers.values()) == 1
        streamer.close(drain=False)
        assert streamer.workers() == []
