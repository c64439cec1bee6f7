"""What limits, in plain sentences: tables of what was seen and of what is said."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

import models
from service_streamer import RedisStreamer, RedisWorker, Streamer, ThreadedStreamer
from service_streamer.batching.batcher import Batcher
from service_streamer.observe.explain import explain
from service_streamer.observe.metrics import BatchMetrics
from service_streamer.observe.recent import RECENT, Snapshot, Summary, summarize
from service_streamer.observe.record import BatchRecord, BatchReport, Call, Reason
from service_streamer.testing import Gate

SNAPSHOT = Snapshot(
    state="running",
    workers={"idle": 0, "busy": 1, "starting": 0},
    pending=0,
    answered=0,
    failed=0,
    expired=0,
    rejected=0,
    restarted_at=(),
    ceilings={},
    batch_size=64,
    max_latency=0.1,
    max_batch_cost=None,
    max_pending=None,
    has_lengths=False,
    is_local=False,
)

#: One worker that is half busy, with nothing to say but that.
PLAIN: dict[str, Any] = {
    "batches": 100, "items": 3200, "parts": 3200, "answered": 3200, "seconds": 10.0,
    "reasons": {Reason.COMPANY: 100}, "largest": 64, "busy": 0.75, "callers": 32.0,
    "queued": 0.01, "behind": 0.0, "moved": 0.002, "computed": 0.03,
}  # fmt: skip


def about(now: dict[str, Any] | None = None, **seen: Any) -> Summary:
    return Summary(now=SNAPSHOT._replace(**(now or {})), **PLAIN | seen)


def names(of: Summary) -> list[str]:
    return [finding.name for finding in explain(of)]


def said(of: Summary, name: str) -> str:
    [text] = [str(finding) for finding in explain(of) if finding.name == name]
    return text


def test_what_is_well_is_said_in_two_sentences() -> None:
    assert [str(finding) for finding in explain(about())] == [
        "Recently: 100 batches of 32 items on average, 320 items/s. A call took 42 ms: 10 ms in "
        "the queue, 2 ms on the way, 30 ms in the model.",
        "The workers keep up with the callers: the worker computes 75 % of the time.",
    ]


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        ({}, "Nothing has been computed yet."),
        (
            {"workers": {"idle": 0, "busy": 0, "starting": 2, "failed": 0}, "pending": 3},
            "Nothing has been computed yet, and no worker is ready (2 starting); 3 items wait. "
            "Calls are accepted meanwhile, and computed when a worker has loaded its model.",
        ),
        (
            {"workers": {"idle": 0, "busy": 0, "failed": 2}},
            "Nothing has been computed yet, and no worker is ready (2 failed).",
        ),
        (
            {"workers": {"idle": 0, "busy": 0}},
            "Nothing has been computed yet, and no worker is ready (there is none).",
        ),
    ],
)
def test_nothing_was_computed_yet(snapshot: dict[str, Any], text: str) -> None:
    nothing = Summary(now=SNAPSHOT._replace(**snapshot), reasons={})
    assert [str(finding) for finding in explain(nothing)] == [text]


# -- throughput: the first that fits

ALONE: dict[str, Any] = {
    "batches": 100, "items": 100, "parts": 100, "answered": 100, "singles": 93, "largest": 1,
    "callers": 0.97, "busy": 0.9, "reasons": {Reason.ALONE: 100}, "queued": 0.0,
}  # fmt: skip
FULL: dict[str, Any] = {"reasons": {Reason.FULL: 90, Reason.COMPANY: 10}}
LINE: dict[str, Any] = {"base": 0.005, "per_unit": 0.0001}


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        (
            about(**ALONE),
            "one caller",
            "93 % of the batches had one item, because calls come one at a time (1.0 open calls "
            "on average). Raise the web server's threads or workers, or make calls before "
            "the last one is answered (submit, apredict, more items in each call).",
        ),
        (
            about(**ALONE | {"items": 1000}),
            "one caller",
            "93 % of the batches had the items of one call, because calls come one at a time "
            "(1.0 open calls on average). Raise the web server's threads or workers, or make "
            "calls before the last one is answered (submit, apredict, more items in each call).",
        ),
        (
            about(largest=9, callers=8.2, items=800, **LINE),
            "few callers",
            "Too few calls are under way to fill batches: 8.2 at a time. The largest batch had "
            "9 items of 64, and the worker computes 75 % of the time. Full ones would compute 307 "
            "% more items/s. For more throughput have more callers at a time: raise the web "
            "server's threads or workers.",
        ),
        (
            about(largest=9, callers=8.2, items=800, base=0.0, per_unit=0.001),
            "few callers",
            "Too few calls are under way to fill batches: 8.2 at a time. The largest batch had "
            "9 items of 64, and the worker computes 75 % of the time. Full ones would compute 0 % "
            "more items/s.",
        ),
        (
            about({"workers": {"idle": 1, "busy": 7}}, busy=0.97, pending=86.5, **FULL),
            "saturated",
            "The workers limit throughput: the workers compute 97 % of the time, and 86.5 items "
            "wait on average. Add workers (worker_num), each with a device of its own, or make the "
            "model faster.",
        ),
        (
            about({"is_local": True}, busy=0.97, **FULL),
            "saturated",
            "The workers limit throughput: the worker computes 97 % of the time, and a batch is as "
            "large as it may be. Make the model faster, or use a Streamer with several workers.",
        ),
        (
            about(busy=0.97, pending=512.4, pending_before=20.5, pending_after=1012.0),
            "saturated",
            "The workers limit throughput: the worker computes 97 % of the time, and 512 items "
            "wait on average, ever more: 20.5 in the first quarter of the time, 1012 in the last. "
            "Add workers (worker_num), each with a device of its own, or make the model faster.",
        ),
        (
            about(busy=0.004, callers=27.2, moved=0.5),
            "overhead",
            "The program around the model limits throughput: 27.2 calls are under way at a time, "
            "and the worker computes less than 1 % of the time only. Have fewer threads in this "
            "process, or more items in each call.",
        ),
        (
            about(busy=0.2, callers=0.3),
            "idle",
            "The callers limit throughput: the worker computes 20 % of the time.",
        ),
    ],
)
def test_what_limits_throughput(of: Summary, name: str, text: str) -> None:
    assert said(of, name) == text
    limits = {
        "saturated", "one caller", "few callers", "overhead", "small batches", "idle", "keeping up",
    }  # fmt: skip
    assert [found for found in names(of) if found in limits] == [name], "one of them is said"


@pytest.mark.parametrize(
    ("busy", "largest"), [(0.8, 2), (0.3, 2), (0.8, 16), (0.3, 64), (0.84, 63)]
)
def test_nobody_who_is_waited_for_is_called_missing(busy: float, largest: int) -> None:
    """As beside 134 items that waited: "have more callers at a time"."""
    of = about(
        items=160, parts=160, answered=160, largest=largest, callers=136.0, pending=134.0,
        busy=busy, queued=0.5, computed=0.9,
    )  # fmt: skip
    assert "small batches" in names(of)
    assert not {"few callers", "idle", "keeping up"} & {*names(of)}
    assert said(of, "small batches") == (
        f"134 items wait on average, though batches had 1.6 of 64 and the worker computes "
        f"{100 * busy:.0f} % of the time: the model, or the process that makes the batches, does "
        "not get enough processor time. If other programs use its cores: set cpu_threads to 1, "
        "or have them run elsewhere."
    )
    bound = about(
        {"max_batch_cost": 256.0}, items=160, callers=136.0, pending=134.0, busy=0.8, queued=0.5,
        computed=0.9, reasons={Reason.COST: 100},
    )  # fmt: skip
    assert "on average, though the worker" in said(bound, "small batches"), "larger ones may not be"


@pytest.mark.parametrize(
    "of",
    [
        about(**ALONE | {"callers": 0.2, "busy": 0.2}),  # a call now and then
        about(**ALONE | {"callers": 4.0}),  # several workers, each with one
        about(**ALONE | {"answered": 10}),  # calls of many batches
    ],
)
def test_batches_of_one_call_are_not_always_for_want_of_callers(of: Summary) -> None:
    assert "one caller" not in names(of)


# -- batches


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        (
            about(**FULL, **LINE),
            "batch_size",
            "90 % of the batches were full: a batch takes 5 ms, and 100 µs more for each item, so "
            "that twice the items at once would give 28 % more throughput. Raise batch_size from "
            "64, if the device has the memory.",
        ),
        (
            about({"has_lengths": True}, cost=25.0, base=0.01, per_unit=1e-5, **FULL),
            "batch_size",
            "90 % of the batches were full: a batch takes 10 ms, and 10 µs more for each unit of "
            "length, so that twice the items at once would give 24 % more throughput. Raise "
            "batch_size from 64, if the device has the memory.",
        ),
        (
            about(base=0.0001, per_unit=0.001),
            "flat",
            "Larger batches than 64 would gain little: a batch takes 100 µs, and 1 ms more for "
            "each item.",
        ),
        (
            about(**FULL),
            "full",
            "90 % of the batches had batch_size of 64 items. Whether larger ones would be faster "
            "is unknown: they were all alike. Try twice the batch_size.",
        ),
        (
            about(reasons={Reason.PAYS: 65, Reason.COMPANY: 35}),
            "pays",
            "65 % of the batches had fewer items than waited, because the model computes more of "
            "them at once slower than one batch after the other. If the model is on the CPU, and "
            "other programs use its cores: set cpu_threads to 1.",
        ),
        (
            about({"max_batch_cost": 4096.0}, reasons={Reason.COST: 40}),
            "cost",
            "40 % of the batches were as large as max_batch_cost of 4096 allows. Raise it, if the "
            "device has the memory.",
        ),
        (
            about({"max_batch_cost": 4096.0}, reasons={Reason.COST: 40}, base=0.0, per_unit=0.001),
            "cost",
            "40 % of the batches were as large as max_batch_cost of 4096 allows.",
        ),
        (
            about(padding=0.371),
            "padding",
            "37 % of what the model computes is padding. Say how long an item is (length=), and "
            "those of like length are put together.",
        ),
        (
            about({"has_lengths": True}, padding=0.371),
            "padding",
            "37 % of what the model computes is padding. More callers at a time would leave more "
            "items of like length to choose from.",
        ),
    ],
)
def test_what_other_batches_would_be_better(of: Summary, name: str, text: str) -> None:
    assert said(of, name) == text


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (about(**LINE), "batch_size"),  # they were not full
        (about(base=0.0001, per_unit=0.001, **FULL), "batch_size"),  # nothing to gain
        (about(base=0.0001, per_unit=0.001, busy=0.1), "flat"),  # nobody cares
        (about(busy=0.1, **FULL), "full"),
        (about(padding=0.1), "padding"),
    ],
)
def test_what_does_not_matter_is_not_said(of: Summary, name: str) -> None:
    assert name not in names(of)


# -- latency


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        (
            about(queued=0.048),
            "queue",
            "Calls wait for 60 % of their time before they are sent (48 ms of 80 ms): the workers "
            "are busy with those before.",
        ),
        (
            about(queued=0.048, busy=0.1),
            "queue",
            "Calls wait for 60 % of their time before they are sent (48 ms of 80 ms): for "
            "expected calls.",
        ),
        (
            about(moved=0.02),
            "transport",
            "Items and results are on the way for 20 ms, and in the model for 30 ms: they are "
            "large, or the model is tiny. Use a ThreadedStreamer, send less for each item, or more "
            "items in each call.",
        ),
        (
            about({"is_local": True}, moved=0.02),
            "transport",
            "Items and results are on the way for 20 ms, and in the model for 30 ms: they are "
            "large, or the model is tiny. The model's thread shares the interpreter with others "
            "that are busy.",
        ),
        (
            about(reasons={Reason.MAX_LATENCY: 7, Reason.COMPANY: 93}),
            "max_latency",
            "7 % of the batches were sent because an item had waited for max_latency of 100 ms. If "
            "latency matters more than throughput, lower it.",
        ),
        (
            about(reasons={Reason.LATE: 20, Reason.COMPANY: 80}),
            "late",
            "Before 20 % of the batches, a free worker waited for callers that came back later "
            "than usual. Callers that do long work between two calls are better in threads of "
            "their own.",
        ),
        (
            about(reasons={Reason.DEADLINE: 5, Reason.COMPANY: 95}),
            "deadline",
            "5 % of the batches were sent because the deadline of an item was near. Give calls "
            "more time, or there is none to put them together.",
        ),
    ],
)
def test_what_latency_is_made_of(of: Summary, name: str, text: str) -> None:
    assert said(of, name) == text
    assert name not in names(about())


# -- troubles


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        (
            about(restarts=1),
            "restarts",
            "1 worker was started again in place of a lost one recently. The log says what they "
            "died of.",
        ),
        (
            about({"workers": {"starting": 1}, "state": "starting"}, restarts=2),
            "no worker",
            "No worker is ready: the streamer is starting.",
        ),
        (about(failed=2), "failed", "2 calls failed recently."),
        (
            about({"max_pending": 256}, rejected=12),
            "overloaded",
            "12 calls were rejected recently, since max_pending of 256 items waited. The load "
            "exceeds the workers' capacity: add workers, or have callers slow down.",
        ),
        (
            about(expired=1),
            "expired",
            "1 call timed out recently. Either timeouts are too short for the model, or the load "
            "exceeds its capacity.",
        ),
        (
            about(expired=3, rejected=1),
            "expired",
            "3 calls timed out recently.",
        ),
        (
            about({"ceilings": {0: 16}}),
            "ceiling",
            "Worker 0 ran out of device memory and computes at most 16 items at once, though "
            "batch_size is 64. Set batch_size to 16, or give the model more memory.",
        ),
        (
            about(reasons={Reason.AGAIN: 12, Reason.COMPANY: 88}),
            "again",
            "12 % of the batches were run again after a failure, each with a part of the items. "
            "The log says what the model raised, or what the workers died of.",
        ),
    ],
)
def test_what_went_wrong_comes_first(of: Summary, name: str, text: str) -> None:
    assert said(of, name) == text
    assert names(of).index(name) < 3


def test_what_went_wrong_is_said_before_anything_was_computed() -> None:
    of = Summary(now=SNAPSHOT, reasons={}, rejected=1, restarts=1)
    assert names(of) == ["nothing", "restarts", "overloaded"]


def test_a_ceiling_that_nobody_reaches_is_not_said() -> None:
    assert "ceiling" not in names(about({"ceilings": {0: 64}}))


@pytest.mark.parametrize(
    ("stages", "name", "text"),
    [
        (
            (0.02, 0.005, 0.001),
            "preprocess",
            "Preprocessing limits throughput: a batch takes preprocess 20 ms, forward 5 ms, "
            "postprocess 1 ms (with its way there and back). Make preprocess faster, or raise "
            "preprocess_workers.",
        ),
        (
            (0.001, 0.005, 0.02),
            "postprocess",
            "Postprocessing limits throughput: a batch takes preprocess 1 ms, forward 5 ms, "
            "postprocess 20 ms (with its way there and back). Do more of it in forward on the "
            "device, return less for each item, or add workers.",
        ),
    ],
)
def test_a_device_that_waits_for_the_work_around_it(
    stages: tuple[float, ...], name: str, text: str
) -> None:
    assert said(about(busy=0.9, stages=stages), name) == text
    assert name not in names(about(busy=0.2, stages=stages)), "nobody is kept waiting"
    assert name not in names(about(busy=0.9, stages=(0.004, 0.005, 0.004)))


# -- summing up


def back(size: int, duration: float, padding: float | None = None, **fields: Any) -> BatchRecord:
    """A batch that is back."""
    batch = BatchRecord(0, 0, [], [None] * size)
    batch.report = BatchReport(0, duration=duration, padding=padding)
    totals = ("queued", "pending", "answered", "failed", "expired", "rejected")
    fields = {"has_failed": False, **dict.fromkeys(totals, 0), **fields}
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch


def walked(
    *batches: tuple[float, float, int, float], slots: int = 1, **more: Any
) -> list[BatchRecord]:
    """Batches in a row: when each was cut and back, its size and what the model took."""
    return [
        back(
            size, inference, slot=i % slots, cut_at=cut_at, back_at=back_at,
            reason=Reason.COMPANY, calls=size, **more,
        )
        for i, (cut_at, back_at, size, inference) in enumerate(batches)
    ]  # fmt: skip


def test_nothing_sums_up_to_nothing() -> None:
    of = summarize([], SNAPSHOT._replace(failed=2, restarted_at=[10.0, 100.0]), 130.0)
    assert (of.batches, of.failed, of.restarts) == (0, 2, 1)
    assert (of.gain(1, 2), of.mean_size, of.share(Reason.FULL), of.latency) == (None, 0, 0, 0)


def test_what_a_worker_did_is_parted_into_where_the_time_went() -> None:
    # The second was sent ahead: it waited until the first was back.
    past = walked((0.0, 1.0, 1, 0.5), (0.5, 2.0, 3, 0.75))
    of = summarize(past, SNAPSHOT, 4.0)
    assert (of.batches, of.items, of.parts, of.singles, of.largest) == (2, 4, 4, 1, 3)
    assert (of.seconds, of.ago, of.busy, of.mean_size) == (2.0, 2.0, 1.25 / 2, 2)
    assert of.behind == 3 * 0.5 / 4
    assert of.moved == (1 * 0.5 + 3 * 0.25) / 4
    assert of.computed == (1 * 0.5 + 3 * 0.75) / 4
    assert of.latency == (1 * 1.0 + 3 * 1.5) / 4
    assert of.callers == (1 * 1.0 + 3 * 1.5) / 2, "Little's law"


def test_workers_are_busy_on_average() -> None:
    past = walked((0.0, 1.0, 1, 1.0), (0.0, 1.0, 1, 0.5), slots=2)
    of = summarize(past, SNAPSHOT._replace(workers={"idle": 3, "busy": 1}), 1.0)
    assert of.busy == 1.5 / 4
    gone = summarize(past, SNAPSHOT._replace(workers={"idle": 0, "busy": 0}), 1.0)
    assert gone.busy == 1.5 / 2, "those that there were"


def test_of_late_is_the_last_minute_or_the_last_batches() -> None:
    past = walked((0.0, 1.0, 1, 1.0), (100.0, 101.0, 2, 1.0), (101.0, 102.0, 3, 1.0))
    assert summarize(past, SNAPSHOT, 150.0).items == 5
    assert summarize(past, SNAPSHOT, 161.5).items == 3
    of = summarize(past, SNAPSHOT, 500.0)
    assert (of.items, of.ago) == (6, 398.0)
    assert "the last one 398 s ago" in said(of, "summary")


def test_of_many_those_after_the_first_count_and_totals_since_then() -> None:
    past = walked(*[(i / 4, (i + 1) / 4, 2, 0.25) for i in range(RECENT)], queued=8.0, failed=3)
    past[-1].queued = 16.0
    snapshot = SNAPSHOT._replace(failed=5, rejected=1, expired=2, answered=7)
    of = summarize(past, snapshot, RECENT / 4 - 60.5)  # they are all of the last minute
    assert (of.batches, of.items) == (RECENT - 1, 2 * RECENT - 2)
    assert of.queued == 8.0 / of.parts
    assert (of.failed, of.rejected, of.expired, of.answered) == (2, 1, 2, 7)
    few = summarize(past[:10], snapshot, 2.5)
    assert (few.batches, few.failed, few.queued) == (10, 5, 8.0 / 20), "since the start"


def test_padding_counts_by_the_time_that_it_took() -> None:
    past = walked((0.0, 1.0, 1, 1.0), padding=0.5) + walked((1.0, 4.0, 1, 3.0), padding=0.25)
    assert summarize(past, SNAPSHOT, 4.0).padding == 1.25 / 4
    assert summarize(walked((0.0, 1.0, 1, 0.0), padding=0.5), SNAPSHOT, 1.0).padding is None


def test_what_waits_grows() -> None:
    past = walked(*[(float(i), i + 1.0, 1, 1.0) for i in range(8)])
    for i, batch in enumerate(past):
        batch.pending = 10 * i
    of = summarize(past, SNAPSHOT, 8.0)
    assert (of.pending, of.pending_before, of.pending_after) == (35, 10, 60)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happened_there_is_something_to_say_and_no_number_is_odd(seed: int) -> None:
    rng = random.Random(seed)
    now, past, queued = 0.0, [], 0.0
    for _ in range(rng.choice([1, 2, 30, RECENT])):
        took = rng.choice([0.0, rng.expovariate(1), rng.expovariate(1e4)])
        size = rng.randint(1, 64)
        queued += rng.expovariate(1)
        now += rng.choice([0.0, took, rng.expovariate(0.1)])
        past.append(
            back(
                size, rng.choice([0.0, took, 2 * took]), rng.choice([None, 0.0, 1.0]),
                slot=rng.randrange(3), cut_at=now - took, back_at=now,
                reason=rng.choice([*Reason]), calls=rng.randint(1, size),
                cost=size * rng.choice([0.0, 1.0, 30.0]), has_failed=rng.random() < 0.1,
                queued=queued, pending=rng.randrange(300),
            )
        )  # fmt: skip
    snapshot = SNAPSHOT._replace(
        max_batch_cost=100.0, has_lengths=rng.random() < 0.5, failed=rng.randrange(3)
    )
    of = summarize(past, snapshot, now)
    assert 0 <= of.busy <= 1
    assert min(of.queued, of.behind, of.moved, of.computed, of.callers) >= 0
    for finding in explain(of):
        assert finding.text.endswith(".")
        assert not finding.advice or finding.advice.endswith(".")
        assert "nan" not in str(finding)
        assert "inf" not in str(finding)


def test_the_batcher_keeps_what_there_is_to_sum_up() -> None:
    batcher = Batcher(batch_size=4, max_latency=0.125)
    now = 0.0
    batcher.worker_ready(0, now)
    for i in range(RECENT + 10):
        [batch] = batcher.call_submitted(Call(["item"], None), now).batches
        now += 0.5
        report = BatchReport(batch.id, ["result"], duration=0.25, padding=0.5, slot=0)
        batcher.batch_returned(report, now)
        assert len(batcher.figures.recent) == min(i + 1, RECENT)
    [batch] = batcher.call_submitted(Call(["item"], None), now).batches
    batcher.batch_returned(BatchReport(batch.id, failure="why", duration=0.25, slot=0), now)
    last, failed = [*batcher.figures.recent][-2:]
    assert (last.cut_at, last.back_at, last.size, last.calls) == (now - 0.5, now, 1, 1)
    assert (last.cost, last.report.duration, last.report.padding) == (1.0, 0.25, 0.5)
    assert (last.pending, last.queued, last.answered) == (0, 0.0, RECENT + 9)
    assert (last.failed, last.expired, last.rejected, last.has_failed) == (0, 0, 0, False)
    assert failed.has_failed
    assert failed.report.padding is None
    assert not any(each.spans or each.report.outputs for each in batcher.figures.recent)
    assert not any(each.report.failure for each in batcher.figures.recent)


# -- streamers


@pytest.mark.parametrize("kind", [Streamer, ThreadedStreamer])
def test_a_streamer_explains_itself(kind: type[Streamer] | type[ThreadedStreamer]) -> None:
    with kind(models.echo, batch_size=8) as streamer:
        assert streamer.explain().startswith("Nothing has been computed yet")
        streamer.predict([1, 2, 3])
        lines = streamer.explain().splitlines()
        assert lines[0].startswith("Recently: 1 batch of 3 items on average")
        assert len(lines) >= 2
    assert streamer.explain().startswith("Recently: 1 batch")


def test_one_caller_is_told_to_be_one(gate: Gate) -> None:
    # With its time at the gate, which is of the model, a lone caller keeps the worker busy.
    with ThreadedStreamer(models.gated(gate)) as streamer:
        gate.let_through(20)
        for _ in range(20):
            streamer.predict(["alone"])
        summary = streamer._engine.summary(streamer._options, is_local=True)
        assert (summary.batches, summary.singles, summary.largest) == (20, 20, 1)
        assert summary.callers < 1.5
        assert math.isclose(summary.mean_size, 1)


def test_a_worker_host_that_has_not_started_says_so() -> None:
    worker = RedisWorker(models.echo)
    assert worker.explain() == "The worker host has not been started."
    assert isinstance(worker.metrics, BatchMetrics)
    assert worker.metrics.sizes.count == 0


def test_over_redis_the_worker_host_explains(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    worker = host(models.echo)
    streamer = client()
    text = streamer.explain()
    assert text.startswith("Batches are put together by the worker hosts: RedisWorker.explain()")
    assert text.endswith(f"From here: {streamer.stats().gist}.")
    future = streamer.submit([1, 2, 3])
    assert future.result() == [1, 2, 3]
    assert future.timing is None, "what there is to tell is not told over Redis"
    assert worker.explain().startswith("Recently: 1 batch of 3 items on average")
    assert worker.metrics.sizes.total == 3
