"""What is made of a record: tables, the page, losses, and bars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
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
from yardstick.tables import section, systems

MACHINE = {"cpu": "Abacus", "cores": 2, "memory_gb": 8, "kernel": "Linux 6", "python": "3.11.7"}


def record_of(*results: Result, is_quick: bool = False, rounds: int = 3) -> Record:
    versions = {"this": "2.0", "original": "0.1.2", "batched": "0.1.6"}
    made = "2026-01-02T03:04+00:00"
    return Record(made, "abc1234", is_quick, rounds, MACHINE, versions, results=list(results))


def result(
    section: str,
    system: str,
    figures: Mapping[str, Any],
    *,
    number: int = 1,
    settings: Mapping[str, Any] | None = None,
    **point: Any,
) -> Result:
    return Result(point, figures, section, system, number, settings or {})


def rates(system: str, *values: float, section: str = "futures", **point: Any) -> list[Result]:
    """The rate of each round."""
    return [
        result(section, system, {"rate": value}, number=number, **point)
        for number, value in enumerate(values, 1)
    ]


def rows_of(markdown: str) -> list[list[str]]:
    """The cells of all tables' rows."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def row_of(markdown: str, name: str) -> list[str]:
    return next(row for row in rows_of(markdown) if name in row)


# -- tables


def test_a_cell_is_the_median_with_the_lowest_and_the_highest() -> None:
    table = section(record_of(*rates("streamer", 1000, 3000, 2000)), "futures")
    assert row_of(table, "Streamer")[1] == "2,000<br><sub>1,000 to 3,000</sub>"


def test_a_failure_is_in_its_cell_and_its_reason_below() -> None:
    record = record_of(*rates("streamer", 10, section="callers", callers=64))
    record.failures.append(
        Failure("callers", "batched", 2, "python x: did not end in time\na\nKeyError: 1")
    )
    table = section(record, "callers")
    assert row_of(table, "batched") == ["batched", "failed"]
    why = "did not end in time; the last that it printed: KeyError: 1"
    assert f"**batched** failed: {why} (round 2 of 3)" in table


def test_a_worker_that_is_never_replaced_is_not_a_dash() -> None:
    figures = {"sent": 10, "answered": 4, "failed": 0, "lost": 6, "recovery": None, "worst": 1.5}
    other = {**figures, "recovery": 0.25, "lost": 0, "answered": 10}
    record = record_of(result("killed", "serve", other), result("killed", "mosec", figures))
    assert row_of(section(record, "killed"), "mosec") == [
        "mosec",
        "10",
        "4",
        "0",
        "6",
        "not back",
        "1.50",
    ]


def test_a_quick_record_says_so_in_every_table() -> None:
    record = record_of(*rates("streamer", 1.0), is_quick=True)
    assert "quick run" in section(record, "futures")
    assert "quick run" in headline(record)


def test_shares_are_made_of_the_rates_of_one_round() -> None:
    record = record_of(
        *rates("by-hand", 100, 50, 200, section="infilling", callers=64),
        *rates("streamer", 90, 50, 120, section="infilling", callers=64),
    )
    assert by_round(record, "infilling", "streamer", "by-hand", {}) == {1: 0.9, 2: 1.0, 3: 0.6}
    assert (
        row_of(section(record, "infilling"), "Streamer")[1] == "0.900<br><sub>0.600 to 1.000</sub>"
    )


def test_a_share_that_a_row_has_measured_is_not_made_of_rates_and_has_the_spread_of_turns() -> None:
    rows = [
        result("infilling", "streamer", {"rate": 90, "by-hand": share, "by-hand_turns": turns},
               number=number, callers=64)
        for number, (share, turns) in enumerate([(0.95, [0.91, 0.95, 0.99]), (0.97, [0.97])], 1)
    ]  # fmt: skip
    record = record_of(*rows, *rates("by-hand", 200, 100, section="infilling", callers=64))
    assert by_round(record, "infilling", "streamer", "by-hand", {}) == {1: 0.95, 2: 0.97}
    share = section(record, "infilling").partition("**per second")[0]
    assert row_of(share, "Streamer")[1] == "0.960<br><sub>0.910 to 0.990</sub>"


def test_settings_and_versions_are_named() -> None:
    record = record_of(
        result("futures", "batched", {"rate": 1.0}, settings={"timeout_ms": 0.1}),
        result("echo", "batched", {"rate": 1.0}),
        result("futures", "streamer", {"rate": 1.0}),
    )
    table = systems(record)
    assert row_of(table, "batched") == [
        "batched",
        "batched 0.1.6",
        "`timeout_ms=0.1` (futures); defaults (echo)",
    ]
    assert row_of(table, "Streamer") == ["Streamer", "service_streamer 2.0", "defaults"]


# -- the page


def test_the_pages_are_what_the_record_gives() -> None:
    record = Record.load(report.PAGE.with_name("record.json"))
    drawn = {name: words for name, (_, words, _) in plots.PLOTS.items()}
    for page in (report.PAGE, report.TABLES, ROOT / "README.md", ROOT / "README_zh.md"):
        text = page.read_text("utf-8")
        assert report.filled(text, record, drawn) == text, page


# -- beside the others


def test_a_loss_is_found_where_more_is_better_and_where_less_is() -> None:
    record = record_of(
        result("http", "serve", {"rate": 100.0, "p99": 0.010}, workload="echo", connections=1),
        result("http", "mosec", {"rate": 150.0, "p99": 0.004}, workload="echo", connections=1),
    )
    found = losses(record)
    assert [(each.figure, each.peer, each.mode) for each in found] == [
        ("p99", "mosec", "serve"),
        ("rate", "mosec", "serve"),
    ]
    assert [each.times for each in found] == [pytest.approx(2.5), pytest.approx(1.5)]
    assert row_of(losses_table(record), "workload echo, connections 1")[-1] == "2.50"


@pytest.mark.parametrize(("theirs", "is_loss"), [(102.9, False), (103.1, True), (50.0, False)])
def test_three_percent_are_noise(theirs: float, is_loss: bool) -> None:
    record = record_of(*rates("streamer", 100), *rates("original-streamer", theirs))
    assert bool(losses(record)) == is_loss


def test_a_ratio_is_of_one_round_and_its_median_counts() -> None:
    # The second round was on a machine that was twice as slow: both sides of it.
    record = record_of(*rates("streamer", 100, 50, 100), *rates("original-streamer", 110, 55, 110))
    assert losses(record)[0].times == pytest.approx(1.1)


def test_a_peer_is_compared_with_the_best_of_the_modes_that_are_like_it() -> None:
    record = record_of(
        *rates("threaded", 100, section="echo", callers=64),
        *rates("streamer", 300, section="echo", callers=64),
        *rates("batched", 200, section="echo", callers=64),
        *rates("original-threaded", 200, section="echo", callers=64),
    )
    assert [(each.peer, each.mode) for each in losses(record)] == [
        ("original-threaded", "threaded")
    ]


def test_where_nothing_is_lost_here_and_something_there_no_ratio_is_made_up() -> None:
    record = record_of(
        result("killed", "serve", {"lost": 3, "failed": 0}),
        result("killed", "mosec", {"lost": 0, "failed": 0}),
    )
    (loss,) = losses(record)
    assert math.isinf(loss.times)
    assert row_of(losses_table(record), "lost")[-1] == "-"


def test_what_never_comes_back_here_and_does_there_is_a_loss() -> None:
    record = record_of(
        result("killed", "serve", {"recovery": None, "sent": 9}),
        result("killed", "mosec", {"recovery": 0.5, "sent": 9}),
    )
    (loss,) = losses(record)
    assert loss.figure == "recovery"
    assert row_of(losses_table(record), "recovery to 0.9 of the rate, s")[-2:] == [
        "not back",
        "-",
    ]
    nothing_to_refuse = record_of(
        result("overload-http", "serve", {"rejection_p99": None, "goodput": 1.0}, load=1),
        result("overload-http", "mosec", {"rejection_p99": 0.5, "goodput": 1.0}, load=1),
    )
    assert losses(nothing_to_refuse) == []


def test_what_was_overloaded_before_says_nothing_of_a_kill() -> None:
    figures = {"failed": 1, "lost": 2, "sent": 9}
    record = record_of(
        result("killed", "serve", {**figures, "before": 0.99}),
        result("killed", "mosec", {**figures, "before": 0.3}),
    )
    assert by_round(record, "killed", "serve", "gone", {}) == {1: 3}
    assert by_round(record, "killed", "mosec", "gone", {}) == {}


def test_work_by_hand_is_no_peer() -> None:
    record = record_of(
        *rates("streamer", 100, section="infilling"), *rates("by-hand", 500, section="infilling")
    )
    assert losses(record) == []
    assert "Nowhere" in losses_table(record)


def test_a_loss_that_nobody_has_explained_says_so() -> None:
    record = record_of(*rates("streamer", 1), *rates("original-streamer", 2))
    assert "futures, original Streamer (per second): not explained yet." in losses_table(record)


def test_where_this_project_fails_is_among_the_losses() -> None:
    record = record_of(*rates("original-streamer", 2))
    record.failures.append(Failure("futures", "streamer", 1, "no room"))
    assert "futures: **Streamer failed**: no room" in losses_table(record)


def test_each_round_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
        asked.append(system.key)
        yield Row({}, {"rate": 1.0})

    monkeypatch.setattr(runner, "install", lambda _: None)
    section = Section("echo", "", ("streamer", "batched"), measure)
    runner.run(record_of(), [section], SYSTEMS, dataclasses.replace(QUICK, rounds=3))
    assert asked == ["streamer", "batched", "batched", "streamer", "streamer", "batched"]


# -- bars


_TO_BATCHED = Bar("stages", "streamer", "rate", 1.5, under="batched")
_TO_MORE = Bar("stages", "streamer", "rate", 1.6, under="batched")


@pytest.mark.parametrize(
    ("bar", "shown", "kept"),
    [
        (Bar("stages", "streamer", "batch", 0.022), "21.0", "yes"),
        (Bar("stages", "streamer", "batch", 0.020), "21.0", "**no**"),
        (Bar("stages", "streamer", "rate", 3000), "3,000", "yes"),
        (Bar("stages", "streamer", "rate", 1.5, under="batched"), "1.50", "yes"),
        (Bar("stages", "streamer", "rate", 1.6, under="batched"), "1.50", "**no**"),
        (Bar("stages", "streamer", "p99", 1.0, under="batched"), "-", "not measured"),
        (Bar("stages", "streamer", "rate", 4000, instead=_TO_BATCHED), "3,000 or 1.50", "yes"),
        (Bar("stages", "streamer", "rate", 2000, instead=_TO_MORE), "3,000 or 1.50", "yes"),
        (Bar("stages", "streamer", "rate", 4000, instead=_TO_MORE), "3,000 or 1.50", "**no**"),
        (Bar("stages", "streamer", "p99", 1.0, instead=_TO_BATCHED), "- or 1.50", "yes"),
        (Bar("stages", "streamer", "p99", 1.0, instead=_TO_MORE), "- or 1.50", "not measured"),
    ],
)
def test_a_bar_is_judged_by_its_median(
    bar: Bar, shown: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yardstick.bars.BARS", (bar, Bar("echo", "streamer", "rate", 1)))
    record = record_of(
        *(
            result("stages", "streamer", {"batch": batch, "rate": rate}, number=number)
            for number, (batch, rate) in enumerate([(0.021, 3000), (0.02, 2000), (0.03, 4500)], 1)
        ),
        *rates("batched", 2000, 1000, 3000, section="stages"),
    )
    row, _ = rows_of(bars_table(record))[2:]
    assert row[-2:] == [shown, kept]


# -- the record


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    record = record_of(
        *rates("streamer", 1.5, callers=8), result("echo", "ray", {"series": [1, 2]})
    )
    record.failures.append(Failure("echo", "batched", 1, "no\nroom"))
    path = tmp_path / "deep" / "record.json"
    record.save(path)
    assert Record.load(path) == record
    record_of().save(path)
    assert Record.load(path) == record_of()


def test_a_later_run_replaces_its_sections_and_is_named_at_them() -> None:
    record = record_of(*rates("streamer", 1, 2), *rates("streamer", 3, section="echo"))
    record.failures.append(Failure("futures", "redis", 1, "no room"))
    later = record_of(*rates("streamer", 9), is_quick=True)
    later.commit = "def5678"
    record.replace(later)
    assert [*by_round(record, "futures", "streamer", "rate", {}).values()] == [9]
    assert [*by_round(record, "echo", "streamer", "rate", {}).values()] == [3]
    assert record.failures == []
    futures, echo = section(record, "futures"), section(record, "echo")
    assert "def5678" in futures
    assert "quick run" in futures
    assert "abc1234" in echo
    assert "quick run" not in echo
