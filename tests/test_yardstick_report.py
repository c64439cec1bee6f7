"""What is made of a record: tables, the page, plots, losses, and the check of later runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from yardstick import check, plots, report, runner
from yardstick.bars import BARS, Bar, bars_table
from yardstick.comparing import headline, losses, losses_table
from yardstick.environments import ROOT
from yardstick.figures import FIGURES, by_round, shown
from yardstick.originals import original
from yardstick.plan import QUICK, Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Failure, Record, Result, Row, RowOf
from yardstick.systems import SYSTEMS
from yardstick.tables import LAYOUTS, reason, section, systems

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


def test_of_one_round_there_is_no_spread() -> None:
    table = section(record_of(*rates("streamer", 1234.5), rounds=1), "futures")
    assert row_of(table, "Streamer")[1] == "1,234"
    assert "one round" in table


def test_a_list_leaves_out_who_was_not_to_be_measured_at_a_point() -> None:
    record = record_of(
        result("shared-faults-http", "serve-shared", {"failed": 0}, killed="worker"),
        result("shared-faults-http", "serve-shared", {"failed": 3}, killed="web"),
        result("shared-faults-http", "mosec", {"failed": 9}, killed="worker"),
    )
    rows = [row for row in rows_of(section(record, "shared-faults-http")) if row[0] == "web"]
    assert [row[1] for row in rows] == ["serve --web-workers 2"]


def test_systems_go_down_and_points_across() -> None:
    record = record_of(
        *rates("streamer", 10, section="callers", callers=64),
        *rates("streamer", 5, section="callers", callers=8),
        *rates("batched", 7, section="callers", callers=64),
    )
    rows = rows_of(section(record, "callers"))
    assert rows[0] == ["8", "64"]
    assert rows[2:] == [["Streamer", "5", "10"], ["batched", "-", "7"]]


def test_where_there_are_several_figures_for_each_point_a_row_is_a_point_and_a_system() -> None:
    rows = [
        result("overload", "streamer", {"goodput": 0.9, "served": 0.5, "p99": 0.25}, load=load)
        for load in (1.0, 2)
    ]
    table = section(record_of(*rows), "overload")
    assert rows_of(table)[-2:] == [
        ["1", "Streamer", "0.500", "250"],
        ["2", "Streamer", "0.500", "250"],
    ]


def test_a_failure_is_in_its_cell_and_its_reason_below() -> None:
    record = record_of(*rates("streamer", 10, section="callers", callers=64))
    record.failures.append(
        Failure("callers", "batched", 2, "python x: did not end in time\na\nKeyError: 1")
    )
    table = section(record, "callers")
    assert row_of(table, "batched") == ["batched", "failed"]
    why = "did not end in time; the last that it printed: KeyError: 1"
    assert f"**batched** failed: {why} (round 2 of 3)" in table


def test_a_figure_that_a_system_does_not_have_is_not_a_bad_one() -> None:
    record = record_of(
        result("infilling", "streamer", {"rate": 9.0, "p99": None}, callers=64),
        result("infilling", "threaded", {"rate": 9.0, "p99": 0.04}, callers=64),
        result("infilling", "by-hand", {"rate": 9.0}, callers=64),
    )
    table = section(record, "infilling").partition("p99")[2]
    assert row_of(table, "Streamer")[1] == "not served"
    assert row_of(table, "batches of 64 by hand")[1] == "-"


def test_a_failure_at_one_point_leaves_the_others() -> None:
    record = record_of(
        *rates("streamer", 10, 11, section="callers", callers=8),
        *rates("streamer", 20, section="callers", callers=64),
        *rates("batched", 5, section="callers", callers=8),
    )
    record.failures.append(Failure("callers", "batched", 1, "wrong answers"))
    assert row_of(section(record, "callers"), "batched") == ["batched", "5", "failed"]


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


def test_a_reason_has_no_path_of_this_machine_and_breaks_no_table() -> None:
    error = f"{report.ROOT}/x: ended with exit code 1\nTypeError: a | b <c>"
    text = reason(Failure("callers", "ray", 1, error))
    assert str(report.ROOT) not in text
    assert "a \\| b \\<c>" in text


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


def test_every_section_that_there_is_has_a_table_or_is_one_of_the_originals_own() -> None:
    from yardstick.sections import SECTIONS

    for each in SECTIONS:
        assert each.key in LAYOUTS or each.key.startswith("original-")
        assert f"<!-- yardstick: {each.key} -->" in report.TABLES.read_text("utf-8")


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        ("rate", 1234.5, "1,234"),
        ("rate", 12.345, "12.3"),
        ("p99", 0.0012345, "1.23"),
        ("share", 0.98765, "0.988"),
        ("failed", 12.0, "12"),
        ("failed", 0, "0"),
        ("unheard of", 0.5, "0.500"),
    ],
)
def test_figures_are_shown_in_their_unit(figure: str, value: float, text: str) -> None:
    assert shown(figure, value) == text


# -- the page


def test_only_what_is_between_the_marks_is_replaced() -> None:
    page = "before\n<!-- yardstick: futures -->\nold\n<!-- end -->\nafter <!-- end --> and\n"
    text = report.filled(page, record_of(*rates("streamer", 7.0)), {})
    assert text.startswith("before\n<!-- yardstick: futures -->\n\n| ")
    assert text.endswith("\n\n<!-- end -->\nafter <!-- end --> and\n")
    assert "old" not in text


def test_a_page_is_the_same_however_often_it_is_written() -> None:
    record = record_of(*rates("streamer", 7.0))
    for page in (report.PAGE, report.TABLES):
        once = report.filled(page.read_text("utf-8"), record, {})
        assert report.filled(once, record, {}) == once


def test_the_pages_are_what_the_record_gives() -> None:
    record = Record.load(report.PAGE.with_name("record.json"))
    drawn = {name: words for name, (_, words, _) in plots.PLOTS.items()}
    for page in (report.PAGE, report.TABLES, ROOT / "README.md", ROOT / "README_zh.md"):
        text = page.read_text("utf-8")
        assert report.filled(text, record, drawn) == text, page


def test_short_tables_have_medians_only() -> None:
    record = record_of(
        *rates("streamer", 7.0, 9.0), result("killed", "serve", {"failed": 1, "lost": 2, "sent": 9})
    )
    text = report.filled("<!-- yardstick: brief-futures -->\n<!-- end -->\n", record, {})
    assert row_of(text, "Streamer") == ["Streamer", "8"]
    text = report.filled("<!-- yardstick: in-brief -->\n<!-- end -->\n", record, {})
    assert row_of(text, "service-streamer serve") == ["service-streamer serve", "3", "9"]
    assert "Nowhere" in report.filled(
        "<!-- yardstick: losses-in-brief -->\n<!-- end -->\n", record, {}
    )


def test_a_block_that_nothing_is_made_for_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"block callrs: there are .*callers"):
        report.filled("<!-- yardstick: callrs -->\n<!-- end -->", record_of(), {})


def test_elsewhere_the_page_becomes_a_report(tmp_path: Path) -> None:
    before = report.PAGE.read_text("utf-8")
    report.write(record_of(*rates("streamer", 4321.0)), tmp_path)
    assert "4,321" in (tmp_path / "report.md").read_text("utf-8")
    assert "Not measured in this run." in (tmp_path / "report.md").read_text("utf-8")
    assert report.PAGE.read_text("utf-8") == before


def test_a_folder_with_a_page_keeps_its_words(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("words\n<!-- yardstick: futures -->\n<!-- end -->\n")
    report.write(record_of(*rates("streamer", 4321.0)), tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert text.startswith("words\n")
    assert "4,321" in text
    assert not (tmp_path / "report.md").exists()


def test_failures_are_listed_for_a_terminal() -> None:
    record = record_of()
    assert report.failures(record) == "everything was measured"
    record.failures.append(Failure("echo", "ray", 1, "no room"))
    assert "echo, Ray Serve, handle, round 1: no room" in report.failures(record)


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


def test_what_is_of_several_runs_names_none() -> None:
    record = record_of(*rates("streamer", 1), *rates("original-streamer", 2))
    record.replace(record_of(*rates("streamer", 1, section="echo")))
    assert "several runs" in losses_table(record)


def test_a_share_that_says_the_same_as_a_rate_is_no_second_loss() -> None:
    record = record_of(
        result("callers", "streamer", {"rate": 100.0, "share": 0.5}, callers=8),
        result("callers", "original-streamer", {"rate": 150.0, "share": 0.75}, callers=8),
    )
    assert [each.figure for each in losses(record)] == ["rate"]


def test_work_by_hand_is_no_peer() -> None:
    record = record_of(
        *rates("streamer", 100, section="infilling"), *rates("by-hand", 500, section="infilling")
    )
    assert losses(record) == []
    assert "Nowhere" in losses_table(record)


def test_a_loss_that_nobody_has_explained_says_so() -> None:
    record = record_of(*rates("streamer", 1), *rates("original-streamer", 2))
    assert "futures, original Streamer (per second): not explained yet." in losses_table(record)


def test_a_reason_stands_only_where_it_holds() -> None:
    record = record_of(
        *rates("serve", 1, section="http", workload="echo"),
        *rates("mosec", 2, section="http", workload="echo"),
        *rates("serve", 1, section="http", workload="gpu"),
        *rates("mosec", 2, section="http", workload="gpu"),
    )
    (explained, unexplained) = losses_table(record).partition("Why:")[2].split("- http, mosec ")[1:]
    assert "Rust" in explained
    assert unexplained.startswith("(per second): not explained yet.")


def test_where_this_project_fails_is_among_the_losses() -> None:
    record = record_of(*rates("original-streamer", 2))
    record.failures.append(Failure("futures", "streamer", 1, "no room"))
    assert "futures: **Streamer failed**: no room" in losses_table(record)


def test_the_headline_has_the_four_questions_for_everybody() -> None:
    record = record_of(
        result("alone", "streamer", {"over": 0.0003, "ratio": 1.06}),
        result("overload", "streamer", {"goodput": 0.97}, load=2.0),
        result("overload", "batched", {"goodput": 0.1}, load=2.0),
        result("killed", "serve", {"failed": 1, "lost": 2, "sent": 900}),
    )
    record.failures.append(Failure("alone", "batched", 1, "no room"))
    text = headline(record)
    assert row_of(text, "Streamer") == ["Streamer", "0.300", "0.970"]
    assert row_of(text, "batched") == ["batched", "failed", "0.100"]
    assert row_of(text, "service-streamer serve") == ["service-streamer serve", "3", "900"]


def test_the_originals_tables_stand_beside_what_it_has_published() -> None:
    point = {"workload": "titan-xp", "workers": 2}
    record = record_of(
        *rates("streamer", 800, section="original-futures", **point),
        *rates("original-streamer", 700, section="original-futures", **point),
    )
    text = original(record, "original-futures")
    assert "Titan Xp" in text
    assert "Abacus" in text
    row = row_of(text, "Streamer")
    assert row[:5] == ["Streamer", "2", "742.16", "700", "800"]
    assert [float(share) for share in row[5:]] == pytest.approx([0.877, 0.827, 0.945], abs=0.002)


def test_each_round_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
        asked.append(system.key)
        yield Row({}, {"rate": 1.0})

    monkeypatch.setattr(runner, "install", lambda _: None)
    section = Section("echo", "", ("streamer", "batched"), measure)
    runner.run(record_of(), [section], SYSTEMS, dataclasses.replace(QUICK, rounds=3))
    assert asked == ["streamer", "batched", "batched", "streamer", "streamer", "batched"]


def test_a_row_of_another_system_is_kept_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
        yield Row({}, {"rate": 1.0})
        yield RowOf({}, {"rate": 0.5}, "ray", {"batch_wait_timeout_s": 0.0})

    monkeypatch.setattr(runner, "install", lambda _: None)
    record = record_of()
    section = Section("echo", "", ("streamer",), measure, beside=("ray",))
    runner.run(record, [section], SYSTEMS, QUICK)
    assert by_round(record, "echo", "streamer", "rate", {}) == {1: 1.0}
    assert by_round(record, "echo", "ray", "rate", {}) == {1: 0.5}
    assert record.settings("echo", "ray") == {"batch_wait_timeout_s": 0.0}
    assert record.settings("echo", "streamer") == {}


# -- bars


def test_bars_are_of_sections_systems_and_figures_that_there_are() -> None:
    from yardstick.sections import SECTIONS

    known = {each.key: (*each.systems, *each.beside) for each in SECTIONS}
    for bar in itertools.chain.from_iterable(each.ways for each in BARS):
        assert bar.system in known[bar.section]
        assert bar.under is None or bar.under in known[bar.section]
        assert FIGURES[bar.figure].better in ("lower", "higher")


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


def test_a_bar_names_what_is_enough_instead() -> None:
    record = record_of(result("callers", "streamer", {"share": 0.9}, callers=64))
    row = rows_of(bars_table(record))[-1]
    assert row[3:5] == [
        "share of ideal or per second / bare locks, a worker process",
        "at least 0.960 or at least 0.95",
    ]


@pytest.mark.parametrize(("theirs", "kept"), [(1.5, "yes"), (1.6, "**no**")])
def test_nobody_wins_by_more_than_half_but_where_only_the_server_counts(
    theirs: float, kept: str
) -> None:
    rows = [
        result("http", system, {"rate": rate}, workload=workload, connections=128)
        for workload, factor in (("gpu", 1.0), ("echo", 9.0))
        for system, rate in (("serve", 1000), ("mosec", 1000 * theirs * factor))
    ]
    assert rows_of(bars_table(record_of(*rows)))[-1][-2:] == [f"{theirs:.2f}", kept]


def test_without_others_there_is_no_bar_for_what_they_win() -> None:
    record = record_of(*rates("streamer", 10, section="callers", callers=64))
    assert not any("others win" in cell for row in rows_of(bars_table(record)) for cell in row)


# -- plots


def full_record() -> Record:
    def of(
        section: str, names: str, across: str, values: list[Any], **figures: float
    ) -> list[Result]:
        return [
            result(section, system, figures, number=number, **{across: value})
            for system in names.split()
            for value in values
            for number in (1, 2)
        ]

    series = [30, 30, 10, 30]
    return record_of(
        *of("load", "streamer batched", "load", [0.1, 0.5], p99=0.02),
        *of("load-http", "serve mosec", "load", [0.1, 0.5], p99=0.02),
        *of("callers", "streamer redis original-streamer", "callers", [1, 8], share=0.5),
        *of("overload", "streamer", "load", [1, 2], goodput=0.9),
        *of("workers", "streamer", "workers", [1, 2], share=0.9),
        *of("arrays", "streamer copy", "bytes", [4096, 4194304], gb_per_s=2.0),
        *(
            result("killed", system, {
                "timeline_sent": series, "timeline_answered": series,
                "timeline_failed": [0, 0, 5, 0], "killed_at": 0.2,
            })
            for system in ("serve", "mosec")
        ),
    )  # fmt: skip


def test_every_plot_is_drawn_of_what_the_record_has(tmp_path: Path) -> None:
    drawn = plots.write(full_record(), tmp_path)
    assert set(drawn) == set(plots.PLOTS)
    for name in drawn:
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "mosec" in (tmp_path / "killed.svg").read_text("utf-8")


@pytest.mark.long
def test_the_same_record_gives_the_same_pictures(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        plots.write(full_record(), tmp_path / folder)
    for picture in (tmp_path / "a").iterdir():
        assert picture.read_bytes() == (tmp_path / "b" / picture.name).read_bytes()


def test_nothing_is_drawn_of_sections_that_were_not_measured(tmp_path: Path) -> None:
    assert plots.write(record_of(*rates("streamer", 1)), tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


# -- the check


RATIOS = (
    check.Ratio("rate / copy", "echo", "streamer", "rate", under="copy", tolerance=0.25),
    check.Ratio("added", "echo", "streamer", "p99", tolerance=0.5, is_higher_better=False),
)


def measuring(figures: Mapping[str, Mapping[str, float]]) -> tuple[Section, ...]:
    """A section in which each system has these figures, or fails where it has none."""

    def measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
        if system.key not in figures:
            raise RunFailed("no room")
        yield Row({"callers": 64}, figures[system.key])

    keys = ("streamer", "threaded", "copy")
    other = Section("futures", "", ("streamer",), measure)
    return (Section("echo", "", keys, measure, quick=("threaded",)), other)


def checked(store: Path, is_storing: bool = False, **rate_and_p99: tuple[float, float]) -> int:
    figures = {key: {"rate": rate, "p99": p99} for key, (rate, p99) in rate_and_p99.items()}
    sections = measuring(figures)
    return check.run(
        record_of(), sections, SYSTEMS, is_storing=is_storing, ratios=RATIOS, store=store
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "ratios.json"
    assert checked(path, is_storing=True, streamer=(100, 0.010), copy=(200, 0.0)) == 0
    return path


def test_what_is_stored_is_each_ratio_with_its_spread(store: Path) -> None:
    kept = json.loads(store.read_text())
    assert kept["ratios"]["rate / copy"] == {"median": 0.5, "low": 0.5, "high": 0.5, "rounds": 3}
    assert "Abacus" in kept["machine"]


def test_a_slower_machine_is_no_worse(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(store, streamer=(50, 0.010), copy=(100, 0.0)) == 0
    assert "Nothing is worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rate", "p99", "words"),
    [(70, 0.010, "WORSE by 30%"), (100, 0.016, "WORSE by 60%")],
)
def test_what_is_worse_than_tolerated_fails(
    store: Path, rate: float, p99: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(store, streamer=(rate, p99), copy=(200, 0.0)) == 1
    said = capsys.readouterr().out
    assert words in said
    assert "idle machine" in said


def test_what_is_better_or_a_little_worse_does_not_fail(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(store, streamer=(800, 0.014), copy=(200, 0.0)) == 0
    said = capsys.readouterr().out
    assert "better by 700%" in said
    assert "as before" in said


def test_what_cannot_be_measured_fails(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(store, streamer=(100, 0.010)) == 1
    output = capsys.readouterr()
    assert "NOT MEASURED" in output.out
    assert "echo, copy: no room" in output.err


def test_nothing_is_stored_of_a_run_with_gaps(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    assert checked(path, is_storing=True, streamer=(100, 0.010)) == 1
    assert not path.exists()


def test_without_a_store_it_is_said_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path / "ratios.json", streamer=(1, 1), copy=(1, 1)) == 1
    assert "ARGS=--store" in capsys.readouterr().out


def test_a_ratio_that_is_new_does_not_fail() -> None:
    found = check.measured(record_of(*rates("streamer", 1), *rates("original-streamer", 1)))
    verdicts = check.compare({}, found, [each for each in check.RATIOS if found[each.name]])
    assert [each.is_bad for each in verdicts] == [False]
    assert "never stored" in check.table(verdicts)


def test_the_check_measures_no_more_than_its_ratios_need() -> None:
    (only,) = check.needed(measuring({}), RATIOS)
    assert (only.key, only.systems, only.quick) == ("echo", ("streamer", "copy"), None)


def test_every_ratio_is_of_a_section_and_of_systems_that_there_are() -> None:
    from yardstick.sections import SECTIONS

    known = {each.key: each.systems for each in SECTIONS}
    for ratio in check.RATIOS:
        assert ratio.system in known[ratio.section]
        assert ratio.under is None or ratio.under in known[ratio.section]


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


def test_a_record_of_another_kind_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match=r"record\.json is no record .*measure anew"):
        Record.load(path)


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
