"""What is asked of real models, and what is made of a record: tables, the page, losses, bars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from yardstick import plots, report, runner
from yardstick.bars import Bar, bars_table
from yardstick.comparing import losses, losses_table
from yardstick.environments import ROOT
from yardstick.figures import by_round
from yardstick.plan import QUICK, Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Failure, Record, Result, Row
from yardstick.sections import models, original_tables, pipelines, stages
from yardstick.systems import SYSTEMS
from yardstick.tables import section

MACHINE = {"cpu": "Abacus", "cores": 2, "memory_gb": 8, "kernel": "Linux 6", "python": "3.11.7"}


def record_of(*results: Result, is_quick: bool = False) -> Record:
    versions = {"this": "2.0", "original": "0.1.2", "batched": "0.1.6"}
    made = "2026-01-02T03:04+00:00"
    return Record(made, "abc1234", is_quick, 3, MACHINE, versions, results=list(results))


def result(section: str, system: str, number: int = 1, **figures: Any) -> Result:
    return Result({}, figures, section, system, number, {})


def rates(system: str, *values: float, section: str = "futures") -> list[Result]:
    """The rate of each round."""
    return [result(section, system, n, rate=value) for n, value in enumerate(values, 1)]


def rows_of(markdown: str) -> dict[str, list[str]]:
    """The cells of each row, by the name that it begins with."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {name: cells for name, *cells in reversed(rows)}


def test_the_pages_are_what_the_record_gives() -> None:
    record = Record.load(report.PAGE.with_name("record.json"))
    drawn = {name: words for name, (_, words, _) in plots.PLOTS.items()}
    for page in (report.PAGE, report.TABLES, ROOT / "README.md", ROOT / "README_zh.md"):
        text = page.read_text("utf-8")
        assert report.filled(text, record, drawn) == text, page


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "lost"),
    [
        ("killed", {"lost": 3, "failed": 0}, {"lost": 0, "failed": 0}, ["lost"]),
        ("killed", {"recovery": None, "sent": 9}, {"recovery": 0.5, "sent": 9}, ["recovery"]),
        ("overload-http", {"rejection_p99": None, "goodput": 1.0},
         {"rejection_p99": 0.5, "goodput": 1.0}, []),
    ],
    ids=["nothing is lost there", "never back here", "nothing to refuse"],
)  # fmt: skip
def test_a_loss_is_without_bound_when_a_peer_has_what_is_missing_here(
    key: str, ours: dict[str, Any], theirs: dict[str, Any], lost: list[str]
) -> None:
    """The pages have losses of all other kinds."""
    record = record_of(result(key, "serve", **ours), result(key, "mosec", **theirs))
    assert [(each.figure, each.times) for each in losses(record)] == [
        (figure, math.inf) for figure in lost
    ]
    table = losses_table(record)
    assert ("Nowhere" in table) == (not lost)
    assert ("| - |\n" in table) == bool(lost)


def test_a_loss_that_nobody_has_explained_and_a_failure_here_are_told() -> None:
    record = record_of(*rates("threaded", 1), *rates("original-threaded", 2))
    record.failures.append(Failure("futures", "streamer", 1, "no room"))
    table = losses_table(record)
    assert "not explained yet." in table
    assert "futures: **Streamer failed**: no room" in table


def test_each_round_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
        asked.append(system.key)
        yield Row({}, {"rate": 1.0})

    monkeypatch.setattr(runner, "install", lambda _: None)
    echo = Section("echo", "", ("streamer", "batched"), measure)
    runner.run(record_of(), [echo], SYSTEMS, dataclasses.replace(QUICK, rounds=3))
    assert asked == ["streamer", "batched", "batched", "streamer", "streamer", "batched"]


_KEPT = Bar("stages", "streamer", "rate", 1.5, under="batched")
_MISSED = dataclasses.replace(_KEPT, limit=1.6)


@pytest.mark.parametrize(
    ("bar", "shown", "kept"),
    [
        (Bar("stages", "streamer", "batch", 0.022), "21.0", "yes"),
        (Bar("stages", "streamer", "batch", 0.020), "21.0", "**no**"),
        (Bar("stages", "streamer", "rate", 3000), "3,000", "yes"),
        (_KEPT, "1.50", "yes"),
        (_MISSED, "1.50", "**no**"),
        (Bar("stages", "streamer", "p99", 1.0, under="batched"), "-", "not measured"),
        (Bar("stages", "streamer", "rate", 4000, instead=_KEPT), "3,000 or 1.50", "yes"),
        (Bar("stages", "streamer", "rate", 2000, instead=_MISSED), "3,000 or 1.50", "yes"),
        (Bar("stages", "streamer", "rate", 4000, instead=_MISSED), "3,000 or 1.50", "**no**"),
        (Bar("stages", "streamer", "p99", 1.0, instead=_KEPT), "- or 1.50", "yes"),
        (Bar("stages", "streamer", "p99", 1.0, instead=_MISSED), "- or 1.50", "not measured"),
    ],
)
def test_bars_are_judged(bar: Bar, shown: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yardstick.bars.BARS", (bar,))
    record = record_of(
        result("stages", "streamer", 1, batch=0.021, rate=3000),
        result("stages", "streamer", 2, batch=0.02, rate=2000),
        result("stages", "streamer", 3, batch=0.03, rate=4500),
        *rates("batched", 2000, 1000, 3000, section="stages"),
    )
    assert [shown, kept] in [cells[-2:] for cells in rows_of(bars_table(record)).values()]


def test_a_later_run_replaces_its_sections_and_is_named_at_them() -> None:
    record = record_of(*rates("streamer", 1, 2), *rates("streamer", 3, section="echo"))
    record.failures.append(Failure("futures", "redis", 1, "no room"))
    later = record_of(*rates("streamer", 9), is_quick=True)
    later.commit = "def5678"
    record.replace(later)
    assert by_round(record, "futures", "streamer", "rate", {}) == {1: 9}
    assert by_round(record, "echo", "streamer", "rate", {}) == {1: 3}
    assert record.failures == []
    futures, echo = section(record, "futures"), section(record, "echo")
    assert "def5678" in futures
    assert "quick run" in futures
    assert "abc1234" in echo
    assert "quick run" not in echo


# -- real models

SECTIONS = {
    each.key: each
    for module in (models, original_tables, stages, pipelines)
    for each in module.SECTIONS
}


def told(**more: float) -> dict[str, float]:
    return {"requests": 40, "seconds": 4.0, "not_2xx": 0, "sockets": 0, "timeouts": 0, **more}


def test_latency_is_that_of_littles_law() -> None:
    found = original_tables.figures(told(), 128)
    assert found == {"rate": 10.0, "latency": 12.8, "errors": 0}


def test_what_is_not_answered_with_2xx_is_an_error_and_no_answer() -> None:
    found = original_tables.figures(told(not_2xx=10, sockets=2, timeouts=1), 15)
    assert found == {"rate": 7.5, "latency": 2.0, "errors": 13}


@pytest.mark.parametrize("requests", [0, 3])
def test_without_an_answer_it_has_failed(requests: int) -> None:
    with pytest.raises(RunFailed, match="no answer at 128 connections"):
        original_tables.figures(told(requests=requests, not_2xx=requests), 128)


def test_a_window_without_an_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: Any, **__: Any) -> Iterator[Row]:
        yield Row({"bytes": 1}, {"rate": 0.0, "p50": None})

    monkeypatch.setattr(models, "rows", rows)
    with pytest.raises(RunFailed, match=r"nothing was answered in time at \{'bytes': 1\}"):
        list(SECTIONS["arrays"].measure(SYSTEMS["streamer"], {}, QUICK))
