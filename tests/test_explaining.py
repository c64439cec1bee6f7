"""What limits, in plain sentences: tables of what was seen and of what is said."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

import models
from batcher_walk import make_batcher
from service_streamer import Reason, RedisStreamer, RedisWorker, StreamerStats, ThreadedStreamer
from service_streamer.observe.explain import explain
from service_streamer.observe.metrics import RECENT, Summary, summarize
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from service_streamer.options.table import StreamerOptions


def stats_with(**now: Any) -> StreamerStats:
    counts = ("pending", "in_flight", "batches_in_flight", "restarts", "accepted", "answered")
    counts += ("failed", "retries", "expired", "cancelled", "rejected", "isolated")
    usual = {"state": "running", "workers": {"idle": 0, "busy": 1, "starting": 0}, "ceilings": {}}
    return StreamerStats(**dict.fromkeys(counts, 0) | usual | now)


STATS = stats_with()

#: One worker that is half busy, with nothing to say but that.
PLAIN: dict[str, Any] = {
    "batches": 100, "items": 3200, "parts": 3200, "answered": 3200, "seconds": 10.0,
    "reasons": {Reason.COMPANY: 100}, "largest": 64, "busy": 0.75, "callers": 32.0,
    "queued": 0.01, "behind": 0.0, "moved": 0.002, "computed": 0.03,
}  # fmt: skip


def said_of(summary: Summary, is_local: bool = False, **bounds: Any) -> dict[str, str]:
    """What is said of it, in order, by the names of the findings."""
    findings = explain(summary, StreamerOptions(**bounds), is_local=is_local)
    return {finding.name: str(finding) for finding in findings}


def about(now: dict[str, Any] | None = None, **seen: Any) -> dict[str, str]:
    """What is said of a summary that differs from a plain one.

    Args:
        now: other values of its stats.
        seen: other values of the summary and of the bounds of batches, and ``is_local``.
    """
    elsewhere = ("is_local", "max_batch_cost", "max_pending")
    given = {name: seen.pop(name) for name in elsewhere if name in seen}
    return said_of(Summary(now=stats_with(**now or {}), **PLAIN | seen), **given)


ALONE: dict[str, Any] = {
    "batches": 100, "items": 100, "parts": 100, "answered": 100, "singles": 93, "largest": 1,
    "callers": 0.97, "busy": 0.9, "reasons": {Reason.ALONE: 100}, "queued": 0.0,
}  # fmt: skip
FEW: dict[str, Any] = {"largest": 9, "callers": 8.2, "items": 800}
FULL: dict[str, Any] = {"reasons": {Reason.FULL: 90, Reason.COMPANY: 10}}
#: What a batch takes where larger ones are better, and where they are not.
LINE: dict[str, Any] = {"line": (0.005, 0.0001)}
FLAT: dict[str, Any] = {"line": (0.0001, 0.001)}
LENGTHS: dict[str, Any] = {"has_lengths": True}
BOUNDED: dict[str, Any] = {"max_batch_cost": 4096.0}
#: What limits throughput: exactly one of these is said.
LIMITS = {
    "saturated", "one caller", "few callers", "overhead", "small batches", "idle", "keeping up",
}  # fmt: skip


def but(**reasons: int) -> dict[str, Any]:
    """So many per cent of the batches were cut for this reason."""
    given = {Reason[name]: share for name, share in reasons.items()}
    return {"reasons": given | {Reason.COMPANY: 100 - sum(reasons.values())}}


def scaled(wanted: int, ready: int, wait: float) -> dict[str, str]:
    """So many workers are wanted, of 1 to 4, and items wait so many seconds."""
    return about({
        "workers": {"idle": 0, "busy": ready}, "worker_range": (1, 4), "wanted": wanted,
        "target_wait": 0.2, "wait": wait,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("said", "name", "words"),
    [
        (about(), "summary", ["100 batches", "32 items", "42 ms"]),
        (about(), "keeping up", ["75 %"]),
        # what limits throughput
        (about(**ALONE), "one caller", ["93 %", "one item", "1.0", "submit"]),
        (about(**ALONE | {"items": 1000}), "one caller", ["the items of one call"]),
        (about(**FEW, **LINE), "few callers", ["8.2", "9 items of 64", "307 %"]),
        (about(**FEW, line=(0.0, 0.001)), "few callers", [" 0 % more"]),
        (about({"workers": {"idle": 1, "busy": 7}}, busy=0.97, pending=86.5, **FULL),
         "saturated", ["the workers compute 97 %", "86.5 items", "worker_num"]),
        (about(is_local=True, busy=0.97, **FULL), "saturated", ["Streamer"]),
        (about(busy=0.97, **but(LONG=50, TURN=45)), "saturated", ["97 %"]),
        (about(busy=0.97, pending=512.4, pending_before=20.5, pending_after=1012.0),
         "saturated", ["ever more", "20.5", "1012"]),
        (about(busy=0.004, callers=27.2, moved=0.5), "overhead", ["27.2", "less than 1 %"]),
        (about(busy=0.2, callers=0.3), "idle", ["20 %"]),
        # batches
        (about(**FULL, **LINE), "batch_size", ["90 %", "5 ms", "28 %", "batch_size"]),
        (about(**LENGTHS, cost=25.0, line=(0.01, 1e-5), **FULL),
         "batch_size", ["unit of length", "24 %"]),
        (about(**FLAT), "flat", ["64", "1 ms"]),
        (about(**FULL), "full", ["90 %", "batch_size"]),
        (about(**but(PAYS=65)), "pays", ["65 %", "hardly faster"]),
        (about(**BOUNDED, **but(COST=40)), "cost", ["40 %", "max_batch_cost", "Raise"]),
        (about(padding=0.371), "padding", ["37 %", "length="]),
        (about(**LENGTHS, padding=0.371), "padding", ["37 %", "callers"]),
        # latency
        (about(queued=0.048), "queue", ["60 %", "48 ms", "busy"]),
        (about(queued=0.048, busy=0.1), "queue", ["expected calls"]),
        (about(moved=0.02), "transport", ["20 ms", "30 ms", "ThreadedStreamer"]),
        (about(is_local=True, moved=0.02), "transport", ["interpreter"]),
        (about(**but(MAX_LATENCY=7)), "max_latency", ["7 %", "100 ms"]),
        (about(**but(LATE=20)), "late", ["20 %"]),
        (about(**but(DEADLINE=5)), "deadline", ["5 %"]),
        # the stages of a worker
        (about(busy=0.9, stages=(0.02, 0.005, 0.001)),
         "preprocess", ["20 ms", "preprocess_workers"]),
        (about(busy=0.9, stages=(0.001, 0.005, 0.02)), "postprocess", ["20 ms", "forward"]),
        # the number of workers that the load needs
        (scaled(1, 1, 0.1), "scaling", ["1 worker"]),
        (scaled(2, 0, 0.1), "scaling", ["2 workers", "None is ready"]),
        (scaled(3, 1, 2.0), "scaling", ["Only 1 of them", "2 s", "target"]),
        (scaled(3, 3, 2.0), "scaling", ["3 workers", "2 s"]),
        (scaled(4, 4, 2.0), "scaled out", ["All 4", "worker_num"]),
    ],
)  # fmt: skip
def test_finding_names_its_numbers_and_the_option_that_helps(
    said: dict[str, str], name: str, words: list[str]
) -> None:
    assert all(word in said[name] for word in words), said[name]
    assert len(LIMITS & {*said}) == 1


@pytest.mark.parametrize(
    ("said", "name", "words"),
    [
        (about(restarts=1), "restarts", ["1 worker"]),
        (about({"workers": {"starting": 1}, "state": "starting"}, restarts=2),
         "no worker", ["starting"]),
        (about(failed=2), "failed", ["2 calls"]),
        (about(max_pending=256, rejected=12), "overloaded", ["12 calls", "max_pending"]),
        (about(rejected=1), "overloaded", ["1 call was", "add workers"]),
        (about(expired=1), "expired", ["1 call", "capacity"]),
        (about(expired=3, rejected=1), "expired", ["3 calls"]),
        (about({"ceilings": {0: 16}}), "ceiling", ["Worker 0", "16", "batch_size"]),
        (about(**but(AGAIN=12)), "again", ["12 %"]),
    ],
)  # fmt: skip
def test_trouble_is_said_first(said: dict[str, str], name: str, words: list[str]) -> None:
    assert all(word in said[name] for word in words), said[name]
    assert [*said].index(name) < 3


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({}, ["computed yet."]),
        ({"workers": {"idle": 0, "busy": 0, "starting": 2, "failed": 0}, "pending": 3},
         ["(2 starting)", "3 items wait"]),
        ({"workers": {"idle": 0, "busy": 0, "failed": 2}}, ["(2 failed)"]),
        ({"workers": {"idle": 0, "busy": 0}}, ["there is none"]),
    ],
)  # fmt: skip
def test_nothing_was_computed_yet(now: dict[str, Any], words: list[str]) -> None:
    [text] = said_of(Summary(now=stats_with(**now), reasons={})).values()
    assert text.startswith("Nothing has been computed yet")
    assert all(word in text for word in words), text


def test_trouble_is_said_before_anything_was_computed() -> None:
    said = said_of(Summary(now=STATS, reasons={}, rejected=1, restarts=1))
    assert [*said] == ["nothing", "restarts", "overloaded"]


@pytest.mark.parametrize(
    ("busy", "largest"), [(0.8, 2), (0.3, 2), (0.8, 16), (0.3, 64), (0.84, 63)]
)
def test_items_that_wait_are_not_put_down_to_missing_callers(busy: float, largest: int) -> None:
    """As beside 134 items that waited: "have more callers at a time"."""
    waiting: dict[str, Any] = {
        "items": 160, "callers": 136.0, "pending": 134.0, "queued": 0.5, "computed": 0.9,
    }  # fmt: skip
    said = about(parts=160, answered=160, largest=largest, busy=busy, **waiting)
    assert not {"few callers", "idle", "keeping up"} & {*said}
    assert "cpu_threads" in said["small batches"]
    assert "1.6 of 64" in said["small batches"]
    bound = about(**BOUNDED, busy=0.8, **waiting, **but(COST=100))
    assert "1.6 of 64" not in bound["small batches"], "larger ones may not be"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (about(**ALONE | {"callers": 0.2, "busy": 0.2}), "one caller"),  # a call now and then
        (about(**ALONE | {"callers": 4.0}), "one caller"),  # several workers, each with one
        (about(**ALONE | {"answered": 10}), "one caller"),  # calls of many batches
        (about(**LINE), "batch_size"),  # they were not full
        (about(**FLAT, **FULL), "batch_size"),  # nothing to gain
        (about(**FLAT, busy=0.1), "flat"),  # nobody cares
        (about(busy=0.1, **FULL), "full"),
        (about(padding=0.1), "padding"),
        (about(), "queue"),
        (about(), "transport"),
        (about(), "late"),
        (about({"ceilings": {0: 64}}), "ceiling"),
        (about(busy=0.2, stages=(0.02, 0.005, 0.001)), "preprocess"),  # nobody is kept waiting
        (about(busy=0.9, stages=(0.004, 0.005, 0.004)), "preprocess"),
        (about(busy=0.9, stages=(0.004, 0.005, 0.004)), "postprocess"),
    ],
)
def test_finding_that_does_not_matter_is_not_said(said: dict[str, str], name: str) -> None:
    assert name not in said


def test_advice_is_left_out_where_it_would_not_help() -> None:
    assert "Raise" not in about(**BOUNDED, **but(COST=40), line=(0.0, 0.001))["cost"]
    assert "add workers" not in about(expired=3, rejected=1)["expired"]


# -- summing up


def back(size: int, duration: float, padding: float | None = None, **fields: Any) -> BatchRecord:
    """A batch that is back."""
    batch = BatchRecord(0, 0, [], [None] * size)
    batch.report = BatchReport(0, duration=duration, padding=padding)
    totals = ("queued", "pending", "answered", "failed", "expired", "rejected")
    for name, value in {**dict.fromkeys(totals, 0), "calls": size, **fields}.items():
        setattr(batch, name, value)
    return batch


def walked(
    *batches: tuple[float, float, int, float], slots: int = 1, **more: Any
) -> list[BatchRecord]:
    """Batches in a row: when each was cut and back, its size and what the model took."""
    return [
        back(size, took, slot=i % slots, cut_at=cut, back_at=at, reason=Reason.COMPANY, **more)
        for i, (cut, at, size, took) in enumerate(batches)
    ]


def test_nothing_sums_up_to_nothing() -> None:
    of = summarize([], stats_with(failed=2), 130.0, restarted_at=[10.0, 100.0])
    assert (of.batches, of.failed, of.restarts) == (0, 2, 1)
    assert (of.gain(1, 2), of.mean_size, of.share(Reason.FULL), of.latency) == (None, 0, 0, 0)


def test_what_a_worker_did_is_parted_into_where_the_time_went() -> None:
    # The second was sent ahead: it waited until the first was back.
    past = walked((0.0, 1.0, 1, 0.5), (0.5, 2.0, 3, 0.75))
    of = summarize(past, STATS, 4.0)
    assert (of.batches, of.items, of.parts, of.singles, of.largest) == (2, 4, 4, 1, 3)
    assert (of.seconds, of.ago, of.busy, of.mean_size) == (2.0, 2.0, 1.25 / 2, 2)
    assert of.behind == 3 * 0.5 / 4
    assert of.moved == (1 * 0.5 + 3 * 0.25) / 4
    assert of.computed == (1 * 0.5 + 3 * 0.75) / 4
    assert of.latency == (1 * 1.0 + 3 * 1.5) / 4
    assert of.callers == (1 * 1.0 + 3 * 1.5) / 2, "Little's law"


def test_workers_are_busy_on_average() -> None:
    past = walked((0.0, 1.0, 1, 1.0), (0.0, 1.0, 1, 0.5), slots=2)
    assert summarize(past, stats_with(workers={"idle": 3, "busy": 1}), 1.0).busy == 1.5 / 4
    gone = summarize(past, stats_with(workers={"idle": 0, "busy": 0}), 1.0)
    assert gone.busy == 1.5 / 2, "those that there were"


def test_of_late_is_the_last_minute_or_the_last_batches() -> None:
    past = walked((0.0, 1.0, 1, 1.0), (100.0, 101.0, 2, 1.0), (101.0, 102.0, 3, 1.0))
    assert summarize(past, STATS, 150.0).items == 5
    assert summarize(past, STATS, 161.5).items == 3
    of = summarize(past, STATS, 500.0)
    assert (of.items, of.ago) == (6, 398.0)
    assert "the last one 398 s ago" in said_of(of)["summary"]


def test_of_many_those_after_the_first_count_and_totals_since_then() -> None:
    past = walked(*[(i / 4, (i + 1) / 4, 2, 0.25) for i in range(RECENT)], queued=8.0, failed=3)
    past[-1].queued = 16.0
    stats = stats_with(failed=5, rejected=1, expired=2, answered=7)
    of = summarize(past, stats, RECENT / 4 - 60.5)  # they are all of the last minute
    assert (of.batches, of.items) == (RECENT - 1, 2 * RECENT - 2)
    assert of.queued == 8.0 / of.parts
    assert (of.failed, of.rejected, of.expired, of.answered) == (2, 1, 2, 7)
    few = summarize(past[:10], stats, 2.5)
    assert (few.batches, few.failed, few.queued) == (10, 5, 8.0 / 20), "since the start"


def test_padding_counts_by_the_time_that_it_took() -> None:
    past = walked((0.0, 1.0, 1, 1.0), padding=0.5) + walked((1.0, 4.0, 1, 3.0), padding=0.25)
    assert summarize(past, STATS, 4.0).padding == 1.25 / 4
    assert summarize(walked((0.0, 1.0, 1, 0.0), padding=0.5), STATS, 1.0).padding is None


def test_what_waits_grows() -> None:
    past = walked(*[(float(i), i + 1.0, 1, 1.0) for i in range(8)])
    for i, batch in enumerate(past):
        batch.pending = 10 * i
    of = summarize(past, STATS, 8.0)
    assert (of.pending, of.pending_before, of.pending_after) == (35, 10, 60)


def test_whatever_happened_there_is_something_to_say_and_no_number_is_odd() -> None:
    for seed in range(24):
        rng = random.Random(seed)
        now, past, queued = 0.0, [], 0.0
        for _ in range([1, 2, 30, RECENT][seed % 4]):
            took = rng.choice([0.0, rng.expovariate(1), rng.expovariate(1e4)])
            size = rng.randint(1, 64)
            queued += rng.expovariate(1)
            now += rng.choice([0.0, took, rng.expovariate(0.1)])
            batch = back(
                size, rng.choice([0.0, took, 2 * took]), rng.choice([None, 0.0, 1.0]),
                slot=rng.randrange(3), cut_at=now - took, back_at=now,
                reason=rng.choice([*Reason]), calls=rng.randint(1, size),
                cost=size * rng.choice([0.0, 1.0, 30.0]), queued=queued,
                pending=rng.randrange(300),
            )  # fmt: skip
            past.append(batch)
        has_lengths, stats = rng.random() < 0.5, stats_with(failed=rng.randrange(3))
        of = summarize(past, stats, now, has_lengths=has_lengths)
        assert 0 <= of.busy <= 1
        assert min(of.queued, of.behind, of.moved, of.computed, of.callers) >= 0
        for finding in explain(of, StreamerOptions(max_batch_cost=100.0), is_local=False):
            assert finding.text.endswith(".")
            assert not finding.advice or finding.advice.endswith(".")
            assert not re.search("nan|inf", str(finding))


def test_the_batcher_keeps_what_there_is_to_sum_up() -> None:
    batcher = make_batcher(batch_size=4, max_latency=0.125)
    now = 0.0
    batcher.worker_ready(0, now)
    for i in range(RECENT + 10):
        [batch] = batcher.call_submitted(Call(["item"], None), now).batches
        now += 0.5
        report = BatchReport(batch.id, ["result"], duration=0.25, padding=0.5, slot=0)
        batcher.batch_returned(report, now)
        assert len(batcher.figures.recent) == min(i + 1, RECENT)
    last = batcher.figures.recent[-1]
    assert (last.cut_at, last.back_at, last.size, last.calls) == (now - 0.5, now, 1, 1)
    assert (last.cost, last.report.duration, last.report.padding) == (1.0, 0.25, 0.5)
    assert (last.pending, last.queued, last.answered) == (0, 0.0, RECENT + 9)
    assert (last.failed, last.expired, last.rejected) == (0, 0, 0)
    assert not any(each.spans or each.report.outputs for each in batcher.figures.recent)


# -- streamers


def test_a_streamer_explains_itself() -> None:
    with ThreadedStreamer(models.echo, batch_size=8) as streamer:
        assert streamer.explain().startswith("Nothing has been computed yet")
        streamer.predict([1, 2, 3])
        lines = streamer.explain().splitlines()
        assert lines[0].startswith("Recently: 1 batch of 3 items on average")
        assert len(lines) >= 2
    assert streamer.explain().startswith("Recently: 1 batch")
    with ThreadedStreamer(models.echo) as streamer:
        for _ in range(20):
            streamer.predict(["alone"])
        assert "20 batches of 1 item" in streamer.explain()
        assert next(finding.name for finding in streamer.findings()) == "summary"


def test_over_redis_the_worker_host_explains(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    assert RedisWorker(models.echo).explain() == "The worker host has not been started."
    assert RedisWorker(models.echo).metrics.sizes.count == 0
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
