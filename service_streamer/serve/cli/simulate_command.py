"""``service-streamer simulate``: what batching makes of a load, without a model or a GPU."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click

from ...simulate.loads import Arrival, Bursts, ClosedLoop, OpenLoad, Poisson, Replay
from ...simulate.model_cost import CostModel, LogNormal, Observed
from ...simulate.report import Report
from ...simulate.simulator import simulate
from ...simulate.traces import read_trace
from .cli_options import SecondsType, config, option

__all__ = ["simulate_command"]

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"\s*([^a-z\s]+(?:e[+-]?\d+)?)\s*(s|ms|us|)\s*")
_BURSTS = re.compile(r"(\d+)/(.+)")
_LENGTHS = re.compile(r"([\d.]+)(?::([\d.]+))?")

#: Of a sweep, as shares of the capacity.
_LOADS = [number / 10 for number in range(1, 13)]


class _Duration(SecondsType):
    """A number of seconds, or such as 5ms, 100us."""

    def convert(self, value: Any, param: Any, context: Any) -> float:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            with contextlib.suppress(ValueError):  # it is said below what is wrong
                value = float(match[1]) * _UNITS[match[2]]
        return super().convert(value, param, context)


class _Bursts(click.ParamType[tuple[int, float]]):
    """So many calls every so many seconds: 40/0.5, 40/500ms."""

    name = "n/seconds"

    def convert(self, value: Any, param: Any, context: Any) -> tuple[int, float]:
        match = _BURSTS.fullmatch(str(value))
        if match is None or not int(match[1]):
            self.fail(f"{value!r} are no bursts; write such as 40/500ms", param, context)
        return int(match[1]), _Duration().convert(match[2], param, context)


class _Lengths(click.ParamType[LogNormal]):
    """The mean length of items, and how far lengths spread: 25, 25:0.6."""

    name = "mean[:sigma]"

    def convert(self, value: Any, param: Any, context: Any) -> LogNormal:
        match = _LENGTHS.fullmatch(str(value))
        try:
            if match is None:
                raise ValueError
            return LogNormal(float(match[1]), float(match[2] or 0.6))
        except ValueError:
            self.fail(f"{value!r} are no lengths; write such as 25 or 25:0.6", param, context)


@click.command("simulate")
@config
@option("--base", default="5ms", type=_Duration(least=0), help="What any batch takes.")
@option("--per-item", default="100us", type=_Duration(least=0), help="What each item adds.")
@option(
    "--per-unit",
    default="0",
    type=_Duration(least=0),
    help="What each unit of length adds, of each item as if it were the longest of its batch.",
)
@option(
    "--quadratic",
    default="0",
    type=_Duration(least=0),
    help="What the square of the longest length adds for each item.",
)
@option("--workers", default=1, type=click.IntRange(1), help="How many compute.")
@option("--batch-size", default=64, type=click.IntRange(1), help="The most items of a batch.")
@option(
    "--max-latency",
    default="0.1",
    type=_Duration(least=0),
    help="The longest that an item waits while a worker is free.",
)
@option(
    "--max-batch-cost",
    type=click.FloatRange(0, min_open=True),
    help="The most that items times the longest of them may be.",
)
@option("--closed-loop", type=click.IntRange(1), help="So many callers, who wait for answers.")
@option("--think-time", default="0", type=_Duration(least=0), help="Of those, before each call.")
@option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="So many calls a second, at random; also beside --bursts.",
)
@option("--bursts", type=_Bursts(), help="So many calls at once, again and again: 40/500ms.")
@option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Calls as a streamer with trace= has recorded them.",
)
@option("--speed", default=1.0, type=click.FloatRange(0, min_open=True), help="Of the trace.")
@option("--items", default=1, type=click.IntRange(1), help="Of each call, unless it is of a trace.")
@option("--lengths", type=_Lengths(), help="Of items: their mean, or such as 25:0.6.")
@option("--requests", type=click.IntRange(1), help="End after so many calls.  [default: 20000]")
@option("--seconds", type=_Duration(), help="End after so long.")
@option("--seed", default=0, type=int, help="Of what is random.")
@option(
    "--fixed-wait",
    type=_Duration(least=0),
    help="Show beside it what a fixed wait would do, for batches of --batch-size.",
)
@option("--sweep", is_flag=True, help="Try loads from 0.1 to 1.2 of what can be computed.")
@option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.svg",
    help="Draw the latencies of a sweep.",
)
def simulate_command(**given: Any) -> None:
    """Simulate a load: the scheduler of this package, without a model, workers or time.

    Give one of --closed-loop, --rate, --bursts and --trace, or --sweep; and what a batch of the
    model takes, which is --base + --per-item for each item. Durations are in seconds, or such as
    5ms and 100us.
    """
    try:
        if given["sweep"] or given["plot"]:
            _sweep(given)
        else:
            _single(given)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # who reads the table has seen enough
            raise
        raise click.UsageError(str(error)) from None


def _single(given: dict[str, Any]) -> None:
    load = _load(given)
    reports = {"": _run(given, load)}
    if given["fixed_wait"] is not None:
        reports = {
            "learned": reports[""],
            f"fixed, {1e3 * given['fixed_wait']:g} ms": _run(
                given, load, fixed_wait=given["fixed_wait"]
            ),
        }
    rows = [["", *reports]] if len(reports) > 1 else []
    for title, tell in _ROWS:
        rows.append([title, *map(tell, reports.values())])
    _print(rows)
    click.echo("\nwhy batches were cut then, and with no more items:")
    reasons = dict.fromkeys(reason for each in reports.values() for reason in each.reasons)
    rows = []
    for reason in reasons:
        shares = [
            report.reasons.get(reason, 0) / sum(report.reasons.values())
            for report in reports.values()
        ]
        rows.append([reason.value, *(f"{100 * share:.1f} %" for share in shares)])
    _print(rows)


#: What is told of a simulation.
_ROWS: list[tuple[str, Callable[[Report], str]]] = [
    ("calls", lambda report: f"{report.calls}"),
    ("throughput, items/s", lambda report: f"{report.throughput:.1f}"),
    ("mean latency, ms", lambda report: f"{1e3 * report.mean:.2f}"),
    ("median, ms", lambda report: f"{1e3 * report.p50:.2f}"),
    ("95 of 100 within, ms", lambda report: f"{1e3 * report.p95:.2f}"),
    ("99 of 100 within, ms", lambda report: f"{1e3 * report.p99:.2f}"),
    ("items of a batch", lambda report: f"{report.mean_batch_size:.1f}"),
    ("workers busy", lambda report: f"{100 * report.busy:.1f} %"),
    ("items waiting at the end", lambda report: f"{report.pending}"),
]


def _sweep(given: dict[str, Any]) -> None:
    if any(given[name] is not None for name in ("closed_loop", "rate", "bursts")):
        raise click.UsageError("--sweep chooses the loads; of them it takes --trace only")
    if given["plot"]:
        from ...simulate.plot import (
            latency_against_load,  # at once, so that nobody waits for this error
        )
    trace = read_trace(given["trace"]) if given["trace"] else []
    if given["trace"]:
        Replay(trace)  # for its checks
    capacity = _capacity(given, trace)
    rows = [["load", "items/s", "mean ms", "median ms", "p99 ms", "items of a batch", "busy"]]
    curves: dict[str, list[tuple[float, float]]] = {"mean": [], "99 of 100 within": []}
    for share in _LOADS:
        load: OpenLoad
        if trace:
            load = Replay(trace, share * capacity / _rate(trace))
        else:
            load = Poisson(share * capacity / given["items"], given["items"])
        report = _run(given, load)
        rows.append(
            [
                f"{share:.1f}",
                f"{report.throughput:.1f}",
                f"{1e3 * report.mean:.2f}",
                f"{1e3 * report.p50:.2f}",
                f"{1e3 * report.p99:.2f}",
                f"{report.mean_batch_size:.1f}",
                f"{100 * report.busy:.1f} %",
            ]
        )
        for curve, value in zip(curves.values(), (report.mean, report.p99), strict=True):
            curve.append((share, 1e3 * value))
    click.echo(f"capacity: {capacity:.1f} items/s\n")
    _print(rows)
    if given["plot"]:
        stable = [value for share, value in curves["99 of 100 within"] if share < 1]
        latency_against_load(
            given["plot"],
            curves,
            load=f"load, as a share of {capacity:.0f} items/s",
            most=2 * max(stable),
        )


def _run(given: dict[str, Any], load: Any, **options: Any) -> Report:
    return simulate(
        load,
        _model(given),
        workers=given["workers"],
        batch_size=given["batch_size"],
        max_latency=given["max_latency"],
        max_batch_cost=given["max_batch_cost"],
        **{
            "lengths": given["lengths"],
            "requests": given["requests"],
            "seconds": given["seconds"],
            "seed": given["seed"],
            **options,
        },
    )


def _model(given: dict[str, Any]) -> CostModel:
    return CostModel(given["base"], given["per_item"], given["per_unit"], given["quadratic"])


def _load(given: dict[str, Any]) -> ClosedLoop | OpenLoad:
    """The load that is asked for."""
    chosen = [
        name
        for name in ("closed_loop", "bursts", "trace", "rate")
        if given[name] is not None and not (name == "rate" and given["bursts"])
    ]
    if len(chosen) != 1:
        raise click.UsageError(
            "give one load: --closed-loop N, --rate R, --bursts N/T (also with --rate), "
            "--trace FILE; or --sweep"
        )
    if given["closed_loop"]:
        return ClosedLoop(given["closed_loop"], given["think_time"], given["items"])
    if given["bursts"]:
        size, every = given["bursts"]
        return Bursts(size, every, given["rate"] or 0.0, items=given["items"])
    if given["trace"]:
        return Replay(read_trace(given["trace"]), given["speed"])
    return Poisson(given["rate"], given["items"])


def _capacity(given: dict[str, Any], trace: Sequence[Arrival]) -> float:
    """Items per second when there is always more than enough to compute."""
    lengths: Callable[[Random], float] | None = given["lengths"]
    seen = [length for arrival in trace for length in arrival.lengths or ()]
    if seen:
        lengths = Observed(seen)
    if lengths is None:
        return _model(given).capacity(given["workers"], given["batch_size"])
    # Depends on how those of like length are put together: so it is tried.
    callers = 4 * given["workers"] * given["batch_size"]
    report = _run(
        given,
        ClosedLoop(callers),
        lengths=lengths,
        requests=max(20_000, 20 * callers),
        seconds=None,
    )
    return report.throughput


def _rate(trace: Sequence[Arrival]) -> float:
    """Items per second of a trace."""
    times = [arrival.at for arrival in trace]
    lasted = max(times) - min(times)
    if not lasted:
        raise ValueError("the calls of the trace came all at once: it has no load to change")
    return sum(arrival.items for arrival in trace) / lasted


def _print(rows: list[list[str]]) -> None:
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join(cells).rstrip())
