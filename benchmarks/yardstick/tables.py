"""Tables of a record, in Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from yardstick.environments import ROOT
from yardstick.figures import FIGURES, Figure, by_round, shown, spread_of
from yardstick.machine import in_words
from yardstick.record import Failure, Record
from yardstick.systems import SYSTEMS

__all__ = [
    "LAYOUTS",
    "Layout",
    "brief",
    "failed",
    "in_order",
    "made",
    "markdown",
    "point_in_words",
    "reason",
    "section",
    "systems",
    "title",
]


@dataclass(frozen=True)
class Layout:
    """A table of a section.

    Attributes:
        figures: a column of each; with ``across``, a table of each.
        across: the coordinate whose values are the columns.
        where: which points only.
        caption: put before the figure's title.
    """

    figures: tuple[str, ...]
    across: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""


_LOAD = (Layout(("p99", "p50", "served", "lag_p99"), "load"),)
_OVERLOAD = (
    Layout(("goodput",), "load"),
    Layout(
        (
            "offered",
            "served",
            "rejected",
            "expired",
            "failed",
            "p50",
            "p99",
            "rejection_p99",
            "lag_p99",
        )
    ),
)
#: Figures that are made of others.
_MADE = ("by-hand", "sorted", "copy", "gone")
_FAULTS = ("kills", "sent", "failed", "hung", "left", "recovered", "recovered_worst")
_GPU = {"workload": "gpu"}
_ECHO = {"workload": "echo"}

#: Every section's tables.
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "alone": (Layout(("over", "over_loop", "ratio")),),
    "callers": (Layout(("share", "rate", "p50", "p99"), "callers"),),
    "asyncio": (Layout(("share", "rate", "p50", "p99"), "callers"),),
    "futures": (Layout(("rate",)),),
    "echo": (Layout(("rate", "p50", "p99")),),
    "stages": (
        Layout(("batch", "share", "p50", "p99"), where={"workload": "even-stages"}),
        Layout(("batch", "share", "p50", "p99", "over", "ratio"), where={"workload": "gpu-stages"}),
    ),
    "load": _LOAD,
    "overload": _OVERLOAD,
    "workers": (Layout(("share", "rate"), "workers"),),
    "alone-http": (Layout(("over", "p50", "p99")),),
    "http": (
        Layout(
            ("rate", "share", "p50", "p99", "web", "all", "errors"),
            "connections",
            _GPU,
            "Simulated GPU: ",
        ),
        Layout(
            ("rate", "p50", "p99", "web", "all", "errors"),
            "connections",
            _ECHO,
            "A model that takes no time: ",
        ),
    ),
    "load-http": _LOAD,
    "overload-http": _OVERLOAD,
    "killed": (Layout(("sent", "before", "answered", "failed", "lost", "recovery", "worst")),),
    "recovery": (Layout(("noticing", "spawn", "import", "init", "first_batch", "total")),),
    "infilling": (Layout(("by-hand", "rate", "p50", "p99"), "callers"),),
    "minilm": (Layout(("rate", "sorted")),),
    "arrays": (Layout(("gb_per_s", "copy", "rate"), "bytes"),),
    "pipelines": (Layout(("preprocess", "postprocess", "besides", "head", "pipeline")),),
    "streams": (
        Layout(("rate", "share", "to_end", "first_steps"), where={"question": "refilled"}),
        Layout(("per_step",), "streams", where={"question": "overhead"}),
        Layout(("slower",), where={"question": "slow"}),
        Layout(("slower",), where={"question": "neighbours"}),
        Layout(("objects", "growth", "held"), where={"question": "dropped"}),
        Layout(("rate", "latency"), "way", where={"question": "texts"}),
        Layout(("times", "slower"), "beside", where={"question": "beside"}),
    ),
    "streams-http": (
        Layout(
            (
                "rate",
                "share",
                "to_end",
                "first_steps",
                "wait_p50",
                "wait_p99",
                "starved",
                "errors",
            ),
        ),
    ),
    "shared": (
        Layout(("over", "to_streamer", "over_redis"), where={"question": "alone"}),
        Layout(("rate", "rate_redis"), where={"question": "futures"}),
        Layout(("rate", "share", "mean_batch", "batch_to_one"), where={"question": "callers"}),
        Layout(("pool_us", "us", "rate"), where={"question": "costs"}),
        Layout(("copies", "torch", "joined", "grown"), where={"question": "memory"}),
        Layout(("rate", "to_one"), where={"question": "arrays"}),
        Layout(("rate", "web", "pool_us", "worker_us", "all"), where={"question": "http"}),
        Layout(("processes", "paper", "to_single"), where={"question": "on paper"}),
    ),
    "shared-faults": (Layout((*_FAULTS[:4], "twice", *_FAULTS[4:])),),
    "shared-faults-http": (Layout(_FAULTS),),
    "costs": (Layout(("us", "worker_us")),),
    "ray": (
        Layout(("rate", "share", "p50", "p99"), where={"question": "callers"}),
        Layout(("over", "ratio"), where={"question": "alone"}),
        Layout(("rate", "share", "to_one_worker"), where={"question": "workers"}),
        Layout(("rate", "gb_per_s"), where={"question": "arrays"}),
        Layout(
            ("p99", "to_target", "most_workers", "all_ready", "shrunk", "turns", "sent", "failed"),
            where={"question": "autoscaling"},
        ),
        Layout(
            ("p99", "to_target", "most_workers", "last", "turns", "sent"),
            where={"question": "simulated"},
        ),
    ),
    "ray-faults": (
        Layout(
            (
                "rounds",
                "sent",
                "failed",
                "hung",
                "unnamed",
                "twice",
                "left",
                "recovered",
                "recovered_worst",
                "whole",
                "whole_worst",
            )
        ),
    ),
}


def title(system: str) -> str:
    """Of a system; its key where a later version does not know it any more."""
    return SYSTEMS[system].title if system in SYSTEMS else system


def in_order(keys: Iterable[str]) -> list[str]:
    """Systems as in the list of all of them."""
    order = {key: number for number, key in enumerate(SYSTEMS)}
    return sorted(keys, key=lambda key: (order.get(key, len(order)), key))


def section(record: Record, key: str) -> str:
    """All tables of a section, what failed in it, and how it was made."""
    parts = []
    for layout in LAYOUTS.get(key, ()):
        parts += _crossed(record, key, layout) if layout.across else [_listed(record, key, layout)]
    return "\n\n".join(filter(None, [*parts, failed(record, key), made(record, key)]))


def brief(record: Record, key: str) -> str:
    """The first table of a section, with medians only."""
    layout = LAYOUTS[key][0]
    if layout.across:
        (table, *_) = _crossed(record, key, layout)
    else:
        table = _listed(record, key, layout)
    return re.sub(r"<br><sub>[^<]*</sub>", "", table)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table whose first columns are words, and the others numbers."""
    rules = ["---"] * words + ["---:"] * (len(head) - words)
    lines = [head, rules, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def point_in_words(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items()) or "-"


def cell(record: Record, key: str, system: str, figure: str, point: Mapping[str, Any]) -> str:
    """The median, and of several rounds, or turns, the lowest and the highest below it."""
    found = spread_of(record, key, system, figure, point)
    if found is None:
        broken = any(failure.system == system for failure in record.failures_of(key))
        if _was_looked_for(record, key, system, figure, point):
            return FIGURES.get(figure, Figure(figure)).absent
        return "failed" if broken else "-"
    median, low, high = (shown(figure, each) for each in (found.median, found.low, found.high))
    if found.rounds == 1 or low == high:
        return median
    return f"{median}<br><sub>{low} to {high}</sub>"


def failed(record: Record, key: str) -> str:
    """What could not be measured in a section, and why; empty where all could."""
    lines: dict[str, list[int]] = {}
    for failure in record.failures_of(key):
        text = f"**{title(failure.system)}** failed: {reason(failure)}"
        lines.setdefault(text, []).append(failure.round)
    planned = record.run_of(key)["rounds"]
    return "\n".join(
        f"- {text} (round {', '.join(map(str, rounds))} of {planned})"
        for text, rounds in lines.items()
    )


def reason(failure: Failure) -> str:
    """In one line: how it ended, and the last that it printed."""
    lines = [line.strip() for line in failure.error.splitlines() if line.strip()]
    if not lines:
        return "without a word"
    said = lines[0].rpartition(": ")[2] if len(lines) > 1 else lines[0]
    last = f"; the last that it printed: {lines[-1]}" if len(lines) > 1 else ""
    text = f"{said}{last}".replace(str(ROOT), ".")
    for mark in "|<`*_":
        text = text.replace(mark, f"\\{mark}")
    return text if len(text) <= 300 else f"{text[:297]}..."


def made(record: Record, key: str | None = None) -> str:
    """On what, when, and of which commit: of the section, or of everything."""
    if key is None and record.later:
        return "<sub>of several runs: each section of the full tables names its run</sub>"
    run = record.run_of(key) if key else record.run()
    rounds = max((r.round for r in record.results if key in (None, r.section)), default=0)
    kind = "one round" if rounds == 1 else f"medians of {rounds} rounds, lowest to highest below"
    words = [kind, in_words(run["machine"]), f"commit {run['commit']}", run["made"]]
    line = f"<sub>{'; '.join(words)}</sub>"
    return f"{_QUICK}\n\n{line}" if run["is_quick"] else line


_QUICK = "> **A quick run**: one short look at a few points, of which no figure is to be quoted."


def systems(record: Record) -> str:
    """Who was measured, in which version, with which settings."""
    rows = []
    for key in in_order({result.system for result in record.results}):
        system = SYSTEMS.get(key)
        project = system.project if system else "?"
        rows.append(
            (
                title(key),
                f"{'service_streamer' if project in ('this', 'original') else project} "
                f"{record.versions.get(project, '')}".strip(),
                "; ".join(_settings(record, key)),
            )
        )
    return markdown(("", "version", "settings (sections)"), rows, words=3)


def _settings(record: Record, system: str) -> list[str]:
    """Each different choice, with the sections that it was made for."""
    chosen: dict[str, list[str]] = {}
    for key in record.sections():
        if system not in record.systems(key):
            continue
        settings = record.settings(key, system)
        words = ", ".join(f"`{name}={value}`" for name, value in settings.items()) or "defaults"
        chosen.setdefault(words, []).append(key)
    if len(chosen) == 1:
        return list(chosen)
    return [f"{words} ({', '.join(sections)})" for words, sections in chosen.items()]


def _crossed(record: Record, key: str, layout: Layout) -> list[str]:
    """A table of each figure: systems down, the values of one coordinate across."""
    assert layout.across is not None
    points = _points(record, key, layout.where)
    values = sorted({point[layout.across] for point in points})
    tables = []
    for figure in layout.figures:
        if not any(figure in _names(record, key, point) for point in points):
            continue
        rows = [
            [title(system)]
            + [
                cell(record, key, system, figure, {**layout.where, layout.across: value})
                for value in values
            ]
            for system in _systems(record, key)
        ]
        caption = f"**{layout.caption}{FIGURES[figure].title}**, by {layout.across}:"
        tables.append(f"{caption}\n\n{markdown(['', *map(_coordinate, values)], rows)}")
    return tables


def _listed(record: Record, key: str, layout: Layout) -> str:
    """A row for each system at each point, a column for each figure."""
    points = _points(record, key, layout.where)
    there = {name for point in points for name in _names(record, key, point)}
    figures = [figure for figure in layout.figures if figure in there]
    keys = list(dict.fromkeys(name for point in points for name in point))
    head = [*keys, "", *(FIGURES.get(name, Figure(name)).title for name in figures)]
    rows = [
        [*(_coordinate(point.get(name, "")) for name in keys), title(system), *cells]
        for point in points
        for system in _systems(record, key)
        # Without those that were not to be measured at this point.
        if {*(cells := [cell(record, key, system, figure, point) for figure in figures])} != {"-"}
    ]
    return markdown(head, rows, words=len(keys) + 1) if rows and figures else ""


def _points(record: Record, key: str, where: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [point for point in record.points(key) if where.items() <= point.items()]


def _names(record: Record, key: str, point: Mapping[str, Any]) -> set[str]:
    """Of the figures at a point, of whichever system, with those that the report makes."""
    names = {
        name
        for result in record.results
        if result.section == key and point.items() <= result.point.items()
        for name, value in result.figures.items()
        if value is not None
    }
    return names | {
        name
        for name in _MADE
        if any(by_round(record, key, system, name, point) for system in record.systems(key))
    }


def _systems(record: Record, key: str) -> list[str]:
    """Those with a result or a failure, in the order of the systems' table."""
    return in_order({*record.systems(key), *(each.system for each in record.failures_of(key))})


def _was_looked_for(
    record: Record, key: str, system: str, figure: str, point: Mapping[str, Any]
) -> bool:
    """Whether a row has it without a value; or would, of those that are made of others."""
    return any(
        (result.section, result.system) == (key, system)
        and point.items() <= result.point.items()
        and (figure in result.figures or figure in _MADE)
        for result in record.results
    )


def _coordinate(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 2 and 2.0 are one load
    return f"{value:,}" if isinstance(value, int) else str(value)
