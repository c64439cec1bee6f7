"""What is made of a record: tables, the page, losses, and bars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from yardstick import plots, report, runner
from yardstick.bars import Bar, bars_table
from yardstick.comparing import headline, losses, losses_table
from yardstick.environments import ROOT
from yardstick.figures import by_round
from yardstick.plan import QUICK, Scale, Section, Settings, System
from yardstick.record import Failure, Record, Result, Row
from yardstick.systems import SYSTEMS
from yardstick.tables import section

MACHINE = {"cpu": "Abacus", "cores": 2, "memory_gb": 8, "kernel": "Linux 6", "python": "3.11.7"}


def record_of(*results: Result, is_quick: bool = False) -> Record:
    versions = {"this": "2.0", "original": "0.1.2", "batched": "0.1.6"}
    made = "2026-01-02T03:04+00:00"
    return Record(made, "abc1234", is_quick, 3, MACHINE, versions, results=list(results))


def result(section: str, system: str, number: int = 1, **figures: Any) -> Result:
    return Result({}, figures, section, system, number, {})


def rates(system: str, *values: float, section: str = "futures", **point: Any) -> list[Result]:
    """The rate of each round."""
    return [
        Result(point, {"rate": value}, section, system, number, {})
        for number, value in enumerate(values, 1)
    ]


def rows_of(markdown: str) -> dict[str, list[str]]:
    """The cells of each row, by the name that it begins with."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {name: cells for name, *cells in reversed(rows)}


def test_a_table_has_medians_with_their_spread_and_what_failed() -> None:
    record = record_of(*rates("streamer", 1000, 3000, 2000))
    said = "python x: did not end in time\na\nKeyError: 1"
    record.failures.append(Failure("futures", "batched", 2, said))
    table = section(record, "futures")
    rows = rows_of(table)
    assert rows["Streamer"] == ["2,000<br><sub>1,000 to 3,000</sub>"]
    assert rows["batched"] == ["failed"]
    why = "did not end in time; the last that it printed: KeyError: 1"
    assert f"**batched** failed: {why} (round 2 of 3)" in table
    record.is_quick = True
    assert "quick run" not in table
    assert "quick run" in section(record, "futures")
    assert "quick run" in headline(record)


def test_a_worker_that_is_never_replaced_is_not_a_dash() -> None:
    figures = {"sent": 10, "answered": 4, "failed": 0, "lost": 6, "recovery": None, "worst": 1.5}
    other = {**figures, "recovery": 0.25}
    record = record_of(result("killed", "serve", **other), result("killed", "mosec", **figures))
    rows = rows_of(section(record, "killed"))
    assert rows["mosec"] == ["10", "4", "0", "6", "not back", "1.50"]


def test_shares_are_made_of_the_rates_of_one_round_unless_they_were_measured() -> None:
    there: dict[str, Any] = {"section": "infilling", "callers": 64}
    by_hand = rates("by-hand", 100, 50, 200, **there)
    record = record_of(*by_hand, *rates("streamer", 90, 50, 120, **there))
    assert by_round(record, "infilling", "streamer", "by-hand", {}) == {1: 0.9, 2: 1.0, 3: 0.6}
    assert "<br><sub>0.600 to 1.000</sub>" in section(record, "infilling")
    rows = [
        dataclasses.replace(row, figures={"by-hand": share, "by-hand_turns": turns})
        for row, share, turns in zip(
            rates("streamer", 0, 0, **there), (0.95, 0.97), ([0.91, 0.99], [0.97]), strict=True
        )
    ]
    measured = record_of(*by_hand, *rows)
    assert by_round(measured, "infilling", "streamer", "by-hand", {}) == {1: 0.95, 2: 0.97}
    assert "0.960<br><sub>0.910 to 0.990</sub>" in section(measured, "infilling"), "of turns"


def test_the_pages_are_what_the_record_gives() -> None:
    record = Record.load(report.PAGE.with_name("record.json"))
    drawn = {name: words for name, (_, words, _) in plots.PLOTS.items()}
    for page in (report.PAGE, report.TABLES, ROOT / "README.md", ROOT / "README_zh.md"):
        text = page.read_text("utf-8")
        assert report.filled(text, record, drawn) == text, page


def served(**figures: Any) -> Result:
    return result("killed", "serve", **figures)


def peer(**figures: Any) -> Result:
    return result("killed", "mosec", **figures)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        pytest.param(
            [result("http", "serve", rate=100.0, p99=0.010),
             result("http", "mosec", rate=150.0, p99=0.004)],
            [("p99", "mosec", "serve", 2.5), ("rate", "mosec", "serve", 1.5)],
            id="less latency and a higher rate",
        ),
        pytest.param([*rates("streamer", 100), *rates("original-streamer", 50)], [], id="a win"),
        pytest.param([*rates("streamer", 100), *rates("original-streamer", 102.9)], [], id="noise"),
        pytest.param(
            [*rates("streamer", 100), *rates("original-streamer", 103.1)],
            [("rate", "original-streamer", "streamer", 1.031)],
            id="more than noise",
        ),
        pytest.param(
            [*rates("streamer", 100, 50, 100), *rates("original-streamer", 110, 55, 110)],
            [("rate", "original-streamer", "streamer", 1.1)],
            id="a round on a slower machine",
        ),
        pytest.param(
            [*rates("threaded", 100), *rates("streamer", 300), *rates("batched", 200),
             *rates("original-threaded", 200)],
            [("rate", "original-threaded", "threaded", 2.0)],
            id="the best of the modes that are like it",
        ),
        pytest.param(
            [served(lost=3, failed=0), peer(lost=0, failed=0)],
            [("lost", "mosec", "serve", math.inf)],
            id="nothing is lost there",
        ),
        pytest.param(
            [served(recovery=None, sent=9), peer(recovery=0.5, sent=9)],
            [("recovery", "mosec", "serve", math.inf)],
            id="never back here",
        ),
        pytest.param(
            [result("overload-http", "serve", rejection_p99=None, goodput=1.0),
             result("overload-http", "mosec", rejection_p99=0.5, goodput=1.0)],
            [],
            id="nothing to refuse",
        ),
        pytest.param([*rates("streamer", 100), *rates("by-hand", 500)], [], id="no peer"),
    ],
)  # fmt: skip
def test_losses_are_where_a_peer_is_better(
    results: list[Result], expected: list[tuple[str, str, str, float]]
) -> None:
    record = record_of(*results)
    found = losses(record)
    assert [(each.figure, each.peer, each.mode) for each in found] == [
        each[:3] for each in expected
    ]
    assert [each.times for each in found] == pytest.approx([each[3] for each in expected])
    table = losses_table(record)
    assert ("Nowhere" in table) == (not expected)
    for each in expected:
        times = "-" if math.isinf(each[3]) else f"{each[3]:.2f}"
        assert f"| {times} |\n" in table


def test_a_loss_that_nobody_has_explained_and_a_failure_here_are_told() -> None:
    record = record_of(*rates("threaded", 1), *rates("original-threaded", 2))
    record.failures.append(Failure("futures", "streamer", 1, "no room"))
    table = losses_table(record)
    assert "not explained yet." in table
    assert "futures: **Streamer failed**: no room" in table


def test_what_was_overloaded_before_says_nothing_of_a_kill() -> None:
    record = record_of(served(failed=1, lost=2, before=0.99), peer(failed=1, lost=2, before=0.3))
    assert by_round(record, "killed", "serve", "gone", {}) == {1: 3}
    assert by_round(record, "killed", "mosec", "gone", {}) == {}


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
