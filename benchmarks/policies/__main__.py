"""Compare the scheduler with published policies, in simulation.

PYTHONPATH=benchmarks python -m policies --out figures.json
PYTHONPATH=benchmarks python -m policies --only goodput --noise 0.1

The figures are those of decisions alone, and the same on each machine. ``--render`` writes the
tables of a page from a file of figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from policies.figures import Cell, Found, Task, measured
from policies.tables import render
from policies.work import ARRIVALS, MODELS, read_times

__all__ = ["cells", "main"]

WORKERS = (1, 4)
DEADLINES = (2.0, 5.0, 10.0)
LOADS = (0.1, 0.5, 0.9)


def cells() -> Iterator[tuple[str, Cell]]:
    """All that is measured, with its measure."""
    for measure, levels in (("goodput", DEADLINES), ("latency", LOADS)):
        for arrivals in ARRIVALS:
            for model in MODELS:
                for workers in WORKERS:
                    for level in levels:
                        yield measure, Cell(arrivals, model, workers, level)


def _tasks(args: argparse.Namespace) -> list[Task]:
    wanted = [
        (measure, cell)
        for measure, cell in cells()
        if all(word in f"{measure}, {', '.join(map(str, cell))}" for word in args.only)
    ]
    if args.trace is None:
        known = _known(args.keep)
        return [
            (measure, cell, None, known.get((measure, cell)), args.noise)
            for measure, cell in wanted
        ]
    times = read_times(args.trace, args.jobs)
    return [
        (measure, cell._replace(arrivals=args.trace.name), times, None, args.noise)
        for measure, cell in wanted
        if cell.arrivals == next(iter(ARRIVALS))
    ]


def _known(path: Path | None) -> dict[tuple[str, Cell], dict[str, Found]]:
    """What a file of figures has of the published policies."""
    if path is None:
        return {}
    return {
        (result["measure"], Cell(*(result[name] for name in Cell._fields))): {
            policy: Found(**found) for policy, found in result["policies"].items()
        }
        for result in json.loads(path.read_text())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the figures here")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="cells whose names have all of these"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="arrivals of this file; see policies.fetch"
    )
    parser.add_argument(
        "--jobs", type=int, default=20_000, metavar="N", help="so many arrivals of the trace"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="figures whose published policies still hold"
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="standard deviation of what batches take; no policy knows it",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="measure nothing: print these figures"
    )
    args = parser.parse_args()
    if args.render is not None:
        print(render(json.loads(args.render.read_text())))
        return
    tasks = _tasks(args)
    if not tasks:
        parser.error(
            f"no cell has {args.only} in its name, such as 'goodput, Poisson, gpu, 1, 2.0'"
        )
    results = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for result in pool.imap(measured, tasks):
            results.append(result)
            print(f"{len(results)} of {len(tasks)}", end="\r", file=sys.stderr, flush=True)
            if args.out is not None:  # what there is, if it is interrupted
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
