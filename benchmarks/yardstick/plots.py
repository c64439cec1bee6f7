"""Pictures of a record, as SVG for light and dark pages."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from service_streamer.simulate.plot import GREY, STYLE
from yardstick.figures import by_round
from yardstick.record import Record, Result
from yardstick.systems import SYSTEMS
from yardstick.tables import in_order, title

__all__ = ["PLOTS", "write"]

#: Seen as well on white as on black, as the grey of all plots.
_BLUE = "#2a8fdc"

#: Of a project, in every plot.
_COLOURS = {
    "this": _BLUE,
    "original": "#e8703a",
    "batched": "#a070d8",
    "ray": "#b09020",
    "litserve": "#d8559a",
    "mosec": "#3fa060",
    "infinity": "#20a0a0",
}
#: Of a mode, in every plot; solid for the others.
_STYLES = {
    "threaded": "--",
    "original-threaded": "--",
    "redis": ":",
    "original-redis": ":",
    "flask-gevent": ":",
    "copy": "-.",
}
_THICK, _THIN = 2.6, 1.4

_STYLE: Any = {**STYLE, "axes.titlesize": 9}


def write(record: Record, folder: Path) -> dict[str, str]:
    """Draw what the record has figures for; of each plot by name, what it shows in words."""
    drawn = {}
    for name, (needed, words, draw) in PLOTS.items():
        there = [section for section in needed if record.systems(section)]
        if there:
            with _figure(folder / f"{name}.svg") as figure:
                draw(figure, record, there)
            drawn[name] = words
    return drawn


# -- the plots


def _latency(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    for axes, section in _panels(figure, sections):
        _curves(axes, record, section, "load", "p99", scale=1e3)
        axes.set_xlabel("load, share of capacity")
        _logarithmic(axes)
    figure.axes[0].set_ylabel("p99, ms")


def _callers(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    for axes, section in _panels(figure, sections):
        _curves(axes, record, section, "callers", "share")
        _doubling(axes, record, section, "callers")
        axes.set_xlabel("callers")
        _from_nothing(axes)
    figure.axes[0].set_ylabel("throughput, share of ideal")


def _overload(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    for axes, section in _panels(figure, sections):
        _curves(axes, record, section, "load", "goodput")
        axes.set_xlabel("offered load, multiples of capacity")
        _from_nothing(axes)
    figure.axes[0].set_ylabel("goodput, share of capacity")


def _workers(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    for axes, section in _panels(figure, sections):
        _curves(axes, record, section, "workers", "share")
        _doubling(axes, record, section, "workers")
        axes.set_xlabel("workers")
        _from_nothing(axes)
    figure.axes[0].set_ylabel("throughput, share of ideal")


def _arrays(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    for axes, section in _panels(figure, sections):
        _curves(axes, record, section, "bytes", "gb_per_s")
        _doubling(axes, record, section, "bytes")
        axes.set_xlabel("size of an array")
        _logarithmic(axes)
    figure.axes[0].set_ylabel("GB/s each way")


def _killed(figure: Figure, record: Record, sections: Sequence[str]) -> None:
    """One small plot for each system, of its first round."""
    (section,) = sections
    systems = in_order(record.systems(section))
    figure.set_size_inches(7.2, 0.5 + 1.15 * len(systems))
    rows = figure.subplots(len(systems), 1, sharex=True, sharey=True, squeeze=False)
    for axes, system in zip(rows[:, 0], systems, strict=True):
        _timeline(axes, _first(record, section, system))
        axes.set_title(title(system), loc="left", color=_colour(system))
    rows[-1, 0].set_xlabel("seconds")
    rows[len(systems) // 2, 0].set_ylabel("per 0.1 s")
    handles = [
        Line2D([], [], color=GREY, linewidth=_THICK, label="answered"),
        Line2D([], [], color=GREY, linewidth=0.8, label="sent"),
        Line2D([], [], color=_FAILED, linewidth=_THICK, label="failed"),
        Line2D([], [], color=GREY, linewidth=1, linestyle=":", label="a worker is killed"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


_FAILED = "#e03535"

#: By name: the sections of which those are drawn that there are, what it shows, and who draws it.
PLOTS: Mapping[
    str, tuple[tuple[str, ...], str, Callable[[Figure, Record, Sequence[str]], None]]
] = {
    "latency": (
        ("load", "load-http"),
        "p99 latency against load, logarithmic, within a program and over HTTP",
        _latency,
    ),
    "callers": (("callers",), "Share of ideal throughput against the number of callers", _callers),
    "overload": (
        ("overload", "overload-http"),
        "Goodput against offered load, within a program and over HTTP",
        _overload,
    ),
    "killed": (("killed",), "What is answered before and after a worker is killed", _killed),
    "workers": (("workers",), "Share of ideal throughput against the number of workers", _workers),
    "arrays": (("arrays",), "Gigabytes per second against the size of an array", _arrays),
}


# -- their parts

_PANEL_TITLES = {
    "load": "within a program",
    "load-http": "over HTTP",
    "overload": "within a program",
    "overload-http": "over HTTP",
}


@contextlib.contextmanager
def _figure(path: Path) -> Iterator[Figure]:
    """A figure that is written at the end."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        yield figure
        metadata = {"Date": None, "Creator": None}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def _panels(figure: Figure, sections: Sequence[str]) -> Iterator[tuple[Axes, str]]:
    """Axes for each section, side by side, with a legend below each, where no line is."""
    row = figure.subplots(1, len(sections), squeeze=False)[0]
    for axes, section in zip(row, sections, strict=True):
        axes.grid()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(_PANEL_TITLES.get(section, ""))
        yield axes, section
    for axes in row:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=3 if len(sections) == 1 else 2,
            fontsize=8,
        )


def _curves(
    axes: Axes, record: Record, section: str, across: str, figure: str, scale: float = 1.0
) -> None:
    """A line for each system, through the medians; a shade from the lowest to the highest."""
    for system in in_order(record.systems(section)):
        is_ours = _project(system) == "this" and system != "copy"
        found = []
        for value in sorted({point[across] for point in record.points(section, system)}):
            rounds = by_round(record, section, system, figure, {across: value}).values()
            if rounds:
                found.append((value, statistics.median(rounds), min(rounds), max(rounds)))
        if not found:
            continue
        values, middle, low, high = zip(*found, strict=True)
        colour = _colour(system)
        axes.plot(
            values,
            [scale * each for each in middle],
            linestyle=_STYLES.get(system, "-"),
            color=colour,
            linewidth=_THICK if is_ours else _THIN,
            marker="o",
            markersize=4 if is_ours else 3,
            label=title(system),
            zorder=3 if is_ours else 2,
        )
        axes.fill_between(
            values,
            [scale * each for each in low],
            [scale * each for each in high],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )


def _timeline(axes: Axes, result: Result) -> None:
    figures = result.figures

    def seconds(counts: Sequence[float]) -> list[float]:
        return [number / 10 for number in range(len(counts))]

    sent, answered = figures.get("timeline_sent") or [], figures.get("timeline_answered") or []
    broken = figures.get("timeline_failed") or []
    axes.step(seconds(sent), sent, color=GREY, linewidth=0.8, where="post", alpha=0.8)
    is_ours = _project(result.system) == "this"
    axes.step(
        seconds(answered),
        answered,
        color=_colour(result.system),
        linewidth=_THICK if is_ours else 1.8,
        where="post",
    )
    if any(broken):
        axes.fill_between(
            seconds(broken), broken, step="post", color=_FAILED, linewidth=0, zorder=3
        )
    if (killed_at := figures.get("killed_at")) is not None:
        axes.axvline(killed_at, color=GREY, linewidth=1, linestyle=":")
    axes.grid(axis="y")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def _first(record: Record, section: str, system: str) -> Result:
    return next(r for r in record.results if (r.section, r.system) == (section, system))


def _doubling(axes: Axes, record: Record, section: str, across: str) -> None:
    """An axis whose ticks are where something was measured."""
    values = sorted({point[across] for point in record.points(section)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [_size(value) if across == "bytes" else str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _from_nothing(axes: Axes) -> None:
    """Shares, of which 1 is always to be seen."""
    axes.set_ylim(0, max(1.02, axes.get_ylim()[1]))


def _size(size_bytes: int) -> str:
    if size_bytes >= 2**20:
        return f"{size_bytes / 2**20:.3g} MiB"
    return f"{size_bytes / 2**10:.3g} KiB"


def _project(system: str) -> str:
    return SYSTEMS[system].project if system in SYSTEMS else ""


def _colour(system: str) -> str:
    return GREY if system == "copy" else _COLOURS.get(_project(system), GREY)
