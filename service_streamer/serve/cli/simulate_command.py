"""``service-streamer simulate``: what batching makes of a load, without a model or a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import click

from ...simulate import Report, simulate
from ...simulate.workload import (
    Arrival,
    Bursts,
    ClosedLoop,
    CostModel,
    LogNormal,
    OpenLoad,
    Phases,
    Poisson,
    Replay,
    read_trace,
)
from ..command_options import SimulateOptions
from .cli_options import SIMULATE, with_options

#: Of a sweep, as shares of the capacity.
_LOADS = [number / 10 for number in range(1, 13)]


@click.command("simulate")
@with_options(SIMULATE)
def simulate_command(options: SimulateOptions) -> None:
    """Simulate a load: the scheduler of this package, without a model, workers or time.

    Give one of --closed-loop, --rate, --bursts, --load and --trace, or --sweep; and what a batch of
    the model takes, which is --base + --per-item for each item. Durations are in seconds, or such
    as 5ms and 100us.
    """
    try:
        if options.sweep or options.plot:
            _sweep(options)
        else:
            _single(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the table has closed it
            raise
        raise click.UsageError(str(error)) from None


def _single(options: SimulateOptions) -> None:
    load = _load(options)
    reports = {"": _run(options, load)}
    if options.fixed_wait is not None:
        reports = {
            "learned": reports[""],
            f"fixed, {1e3 * options.fixed_wait:g} ms": _run(
                options, load, fixed_wait=options.fixed_wait
            ),
        }
    rows = [["", *reports]] if len(reports) > 1 else []
    is_scaled = options.worker_range[0] < options.most_workers
    for title, tell in [*_ROWS, *(_SCALED_ROWS if is_scaled else ())]:
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


#: What is shown of a simulation.
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

#: The same where the load decides on the number of workers.
_SCALED_ROWS: list[tuple[str, Callable[[Report], str]]] = [
    ("workers, on average", lambda report: f"{report.mean_workers:.2f}"),
    ("at the most", lambda report: f"{max(number for _, number in report.workers)}"),
    ("at the end", lambda report: f"{report.workers[-1][1]}"),
    ("changes of direction", lambda report: f"{report.changes}"),
]


def _sweep(options: SimulateOptions) -> None:
    if any(
        getattr(options, name) is not None for name in ("closed_loop", "rate", "bursts", "load")
    ):
        raise click.UsageError("--sweep chooses the loads; of them it takes --trace only")
    if options.plot:
        from ...simulate.plot import latency_against_load
    trace = read_trace(options.trace) if options.trace else []
    if options.trace:
        Replay(trace)  # for its checks
    capacity = _capacity(options, trace, options.most_workers)
    rows = [["load", "items/s", "mean ms", "median ms", "p99 ms", "items of a batch", "busy"]]
    curves: dict[str, list[tuple[float, float]]] = {"mean": [], "99 of 100 within": []}
    for share in _LOADS:
        load: OpenLoad
        if trace:
            load = Replay(trace, share * capacity / _rate(trace))
        else:
            load = Poisson(share * capacity / options.items, options.items)
        report = _run(options, load)
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
    if options.plot:
        stable = [value for share, value in curves["99 of 100 within"] if share < 1]
        latency_against_load(
            options.plot,
            curves,
            load=f"load, as a share of {capacity:.0f} items/s",
            most=2 * max(stable),
        )


def _run(options: SimulateOptions, load: Any, **changes: Any) -> Report:
    given = options.arguments(simulate) | {
        "load": load,
        "workers": options.worker_num,
        "lengths": _lengths(options),
        "fixed_wait": None,
    }
    return simulate(model=_model(options), **given | changes)


def _lengths(options: SimulateOptions) -> LogNormal | None:
    return None if options.lengths is None else LogNormal(*options.lengths)


def _model(options: SimulateOptions) -> CostModel:
    return CostModel(options.base, options.per_item, options.per_unit, options.quadratic)


def _load(options: SimulateOptions) -> ClosedLoop | OpenLoad | Phases:
    """The load that is asked for."""
    chosen = [
        name
        for name in ("closed_loop", "bursts", "load", "trace", "rate")
        if getattr(options, name) is not None and not (name == "rate" and options.bursts)
    ]
    if len(chosen) != 1:
        raise click.UsageError(
            "give one load: --closed-loop N, --rate R, --bursts N/T (also with --rate), "
            "--load 0.2:60s,3:120s, --trace FILE; or --sweep"
        )
    if options.closed_loop:
        return ClosedLoop(options.closed_loop, options.think_time, options.items)
    if options.bursts:
        size, every = options.bursts
        return Bursts(size, every, options.rate or 0.0, items=options.items)
    if options.load:
        one = _capacity(options, [], 1) / options.items
        ends = itertools.accumulate(seconds for _, seconds in options.load)
        loads = [Poisson(share * one, options.items) for share, _ in options.load]
        return Phases([*zip(ends, loads, strict=True)])
    if options.trace:
        return Replay(read_trace(options.trace), options.speed)
    return Poisson(options.rate or 0.0, options.items)


def _capacity(options: SimulateOptions, trace: Sequence[Arrival], workers: int) -> float:
    """Items per second of so many workers when there is always more than enough to compute."""
    seen = [length for arrival in trace for length in arrival.lengths or ()]
    lengths: Callable[[Random], float] | None = (
        (lambda random: random.choice(seen)) if seen else _lengths(options)
    )
    if lengths is None:
        return _model(options).capacity(workers, options.batch_size)
    # Depends on how those of like length are put together: so it is tried.
    callers = 4 * workers * options.batch_size
    report = _run(
        options,
        ClosedLoop(callers),
        workers=workers,
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
