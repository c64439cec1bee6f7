"""Is the scheduler, with no setting touched, as good as the best fixed wait and batch size?

In the simulator, over closed loops, Poisson loads and bursts, on 1 to 8 workers and two models,
every cell is run with the default policy and with each of some sixty fixed settings: waits and
batch sizes. Prints what share of the best fixed one the default reaches, cell by cell, and draws
it. What counts is throughput where callers wait for their answers and where more comes than can be
computed, and mean latency elsewhere.

    python benchmarks/scheduling_grid.py --quick
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service_streamer.simulate import (
    Bursts,
    ClosedLoop,
    CostModel,
    Overheads,
    Poisson,
    Report,
    simulate,
)
from yardstick.machine import in_words, machine

MODELS = {"steep": CostModel(5e-3, 1e-4), "flat": CostModel(1e-3, 1e-3)}
WORKERS = (1, 2, 4, 8)
CALLERS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512)
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
#: Load of the bursts, calls of a burst for each worker, and load of a Poisson process besides.
BURSTS = ((0.3, 16, 0.0), (0.3, 64, 0.0), (0.6, 64, 0.0), (0.3, 24, 0.2))

#: From bad to good. All of them light enough for black figures.
_COLOURS = (
    (0.0, "#e2604d"),
    (0.5, "#f0b64c"),
    (0.75, "#e6d96a"),
    (0.85, "#8fcf7a"),
    (1, "#56b88f"),
)
#: What the ends of the colours stand for.
_LEAST, _MOST = 0.8, 1.0

BATCH_SIZE = 64
#: In durations of a batch of one item.
WAITS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

#: The same for all: what a thread takes to come back, and by how much that varies.
OVERHEADS = Overheads(jitter=50e-6)


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        kind: "closed", "poisson" or "bursts".
        level: callers, share of capacity, or index in ``BURSTS``.
    """

    model: str
    workers: int
    kind: str
    level: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.workers} {self.column}"

    @property
    def column(self) -> str:
        if self.kind == "closed":
            return f"{self.level:g} caller{'s' * (self.level > 1)}"
        if self.kind == "poisson":
            return f"load {self.level:g}"
        load, size, besides = BURSTS[int(self.level)]
        return f"bursts of {size} per worker, load {load:g}" + (
            f" + {besides:g} at random" * bool(besides)
        )

    @property
    def is_by_latency(self) -> bool:
        return self.kind == "bursts" or (self.kind == "poisson" and self.level < 1)

    @property
    def load(self) -> ClosedLoop | Poisson | Bursts:
        capacity = MODELS[self.model].capacity(self.workers, BATCH_SIZE)
        if self.kind == "closed":
            return ClosedLoop(int(self.level))
        if self.kind == "poisson":
            return Poisson(self.level * capacity)
        load, size, besides = BURSTS[int(self.level)]
        size *= self.workers
        every = size / (load * capacity)
        return Bursts(size, every, besides * capacity, gap=OVERHEADS.per_caller)

    def run(
        self, requests: int, seed: int, batch_size: int = BATCH_SIZE, wait: float | None = None
    ) -> Report:
        """One run; without a wait, as the scheduler does it."""
        return simulate(
            self.load,
            MODELS[self.model],
            workers=self.workers,
            batch_size=batch_size,
            fixed_wait=wait,
            overheads=OVERHEADS,
            requests=requests,
            warm_up=0.2,
            seed=seed,
        )

    def settings(self) -> Iterator[tuple[int, float]]:
        """Batch sizes and waits to try."""
        sizes = {*BATCH_SIZES}
        if self.kind == "closed":
            sizes.add(min(BATCH_SIZE, math.ceil(self.level / self.workers)))
        for size in sorted(sizes):
            for wait in WAITS if size > 1 else (0.0,):
                yield size, wait * MODELS[self.model].duration(1, 1)


@dataclass(frozen=True)
class Outcome:
    """What one setting did in one cell."""

    batch_size: int
    wait: float | None
    throughput: float
    mean: float
    p99: float
    mean_batch_size: float

    def value(self, cell: Cell) -> float:
        """The higher the better."""
        return 1 / self.mean if cell.is_by_latency else self.throughput


def measure(cell: Cell, requests: int, seed: int, batch_size: int, wait: float | None) -> Outcome:
    report = cell.run(requests, seed, batch_size, wait)
    return Outcome(
        batch_size, wait, report.throughput, report.mean, report.p99, report.mean_batch_size
    )


@dataclass(frozen=True)
class Effort:
    """Calls of a short run, which each setting has, and of a long one, for the best of these."""

    short: int = 3_000
    long: int = 24_000
    finalists: int = 6

    def requests(self, cell: Cell, requests: int) -> int:
        """More where many are under way at once, so that as many rounds are seen."""
        under_way = cell.level if cell.kind == "closed" else BATCH_SIZE * cell.workers
        return int(max(requests, requests / 200 * under_way))


def best_fixed(cell: Cell, effort: Effort) -> Outcome:
    """The best of all fixed settings: by short runs, then by long ones of other random numbers.

    A single round would prefer those that were lucky.
    """
    short, long = effort.requests(cell, effort.short), effort.requests(cell, effort.long)
    tried = [measure(cell, short, 1, *setting) for setting in cell.settings()]
    tried.sort(key=lambda outcome: outcome.value(cell), reverse=True)
    finalists = [
        measure(cell, long, 2, outcome.batch_size, outcome.wait)
        for outcome in tried[: effort.finalists]
    ]
    return max(finalists, key=lambda outcome: outcome.value(cell))


def compare(task: tuple[Cell, Effort, Outcome | None]) -> tuple[Cell, Outcome, Outcome]:
    cell, effort, known = task
    long = effort.requests(cell, effort.long)
    if known is None:
        fixed = best_fixed(cell, effort)
    else:  # of the same calls as the other
        fixed = measure(cell, long, 2, known.batch_size, known.wait)
    return cell, measure(cell, long, 2, BATCH_SIZE, None), fixed


def all_cells(quick: bool) -> list[Cell]:
    cells = []
    for model in MODELS:
        for workers in (1, 4) if quick else WORKERS:
            callers = (1, 8, 32, 128) if quick else CALLERS
            loads = (0.2, 0.6, 1.1) if quick else LOADS
            bursts = (1,) if quick else range(len(BURSTS))
            for kind, levels in (("closed", callers), ("poisson", loads), ("bursts", bursts)):
                cells += [Cell(model, workers, kind, level) for level in levels]
    return cells


Results = list[tuple[Cell, Outcome, Outcome]]


def run_all(cells: list[Cell], effort: Effort, known: dict[str, Outcome]) -> Results:
    tasks = [(cell, effort, known.get(cell.name)) for cell in cells]
    # The longest first, so that no process has one left when the others are done.
    tasks.sort(key=lambda task: effort.requests(task[0], effort.short), reverse=True)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = {}
        for cell, learned, fixed in pool.imap_unordered(compare, tasks):
            found[cell] = cell, learned, fixed
            done = f"{len(found)} of {len(tasks)}: {cell.name}"
            print(f"{done} {share(cell, learned, fixed):.3f}", file=sys.stderr)
    return [found[cell] for cell in cells]


def share(cell: Cell, learned: Outcome, fixed: Outcome) -> float:
    return learned.value(cell) / fixed.value(cell)


def print_tables(results: Results) -> None:
    shares = {cell: share(cell, learned, fixed) for cell, learned, fixed in results}
    groups = list(dict.fromkeys((cell.model, cell.workers) for cell in shares))
    titles = {
        "closed": "Closed loops: throughput",
        "poisson": "Poisson: mean latency below a load of 1, throughput from there",
        "bursts": "Bursts: mean latency",
    }
    for kind, title in titles.items():
        cells = [cell for cell in shares if cell.kind == kind]
        rows = list(dict.fromkeys((cell.level, cell.column) for cell in cells))
        if not rows:
            continue
        print(f"\n{title}, as a share of the best fixed setting's\n")
        print("| | " + " | ".join(f"{model}, {workers}" for model, workers in groups) + " |")
        print("|---|" + "---:|" * len(groups))
        for level, row in rows:
            values = [shares.get(Cell(*group, kind, level)) for group in groups]
            texts = ["" if value is None else f"{value:.3f}" for value in values]
            print(f"| {row} | " + " | ".join(texts) + " |")
    print_worst(results, shares)


def print_worst(results: Results, shares: dict[Cell, float]) -> None:
    worst = sorted(results, key=lambda result: shares[result[0]])[:20]
    print("\nThe worst cells\n")
    print(
        "| cell | share | default: items/s, mean and p99 ms, items of a batch "
        "| best fixed | its setting |\n|---|---:|---|---|---|"
    )
    for cell, learned, fixed in worst:
        told = [
            f"{each.throughput:.0f}, {1e3 * each.mean:.2f}, {1e3 * each.p99:.2f}, "
            f"{each.mean_batch_size:.1f}"
            for each in (learned, fixed)
        ]
        setting = f"batches of {fixed.batch_size}, {1e3 * (fixed.wait or 0):.2f} ms"
        print(f"| {cell.name} | {shares[cell]:.3f} | {told[0]} | {told[1]} | {setting} |")
    values = sorted(shares.values())
    short = sum(value < 0.95 for value in values)
    slow = [
        cell.name
        for cell, learned, fixed in results
        if cell.is_by_latency and learned.throughput < 0.95 * fixed.throughput
    ]
    print(
        f"\n{len(values)} cells; below 0.95: {short}; least {values[0]:.3f}, "
        f"median {values[len(values) // 2]:.3f}, most {values[-1]:.3f}."
    )
    if slow:
        print(f"Throughput below 0.95 of what was best for latency: {', '.join(slow)}.")


def draw(results: Results, folder: Path) -> None:
    """The pictures of ``docs/scheduling.md``."""
    from service_streamer.simulate.plot import latency_against_load

    shares = {cell: share(cell, learned, fixed) for cell, learned, fixed in results}
    groups = list(dict.fromkeys((cell.model, cell.workers) for cell in shares))
    levels = list(dict.fromkeys((cell.kind, cell.level, cell.column) for cell in shares))
    heat_map(
        folder / "scheduling_grid.svg",
        rows=[column for _, _, column in levels],
        columns=[f"{model}, {workers}" for model, workers in groups],
        values=[
            [shares.get(Cell(*group, kind, level), math.nan) for group in groups]
            for kind, level, _ in levels
        ],
        label="share of the best fixed setting",
    )
    latency_against_load(
        folder / "latency_against_load.svg",
        latency_curves(),
        load="load, as a share of what four workers can compute",
        most=30,
    )


def heat_map(
    path: Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    label: str,
) -> None:
    """Draw a table of shares, green where they are near 1.

    Args:
        path: of the file.
        rows, columns: their names.
        values: by row; a cell without one is not a number.
        label: what the values are.
    """
    from matplotlib.colors import LinearSegmentedColormap

    from service_streamer.simulate.plot import figure

    colours = LinearSegmentedColormap.from_list("shares", _COLOURS)
    with figure(path, 2.6 + 0.62 * len(columns), 0.9 + 0.24 * len(rows)) as drawn:
        axes = drawn.add_subplot()
        axes.imshow(values, cmap=colours, vmin=_LEAST, vmax=_MOST, aspect="auto", alpha=1)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
        axes.set_xlabel(label)
        axes.spines[:].set_visible(False)
        for row, shares in enumerate(values):
            for column, share in enumerate(shares):
                if not math.isnan(share):
                    text = f"{share:.2f}"
                    axes.text(column, row, text, ha="center", va="center", color="#101010", size=8)


def latency_curves() -> dict[str, list[tuple[float, float]]]:
    """Pairs of load and mean latency in milliseconds, of three ways to wait."""
    policies = {
        "no setting: learned": None,
        "batches of 64, wait of 10 ms": 10e-3,
        "batches of 64, no wait": 0.0,
    }
    cells = [Cell("steep", 4, "poisson", number / 20) for number in range(1, 21)]
    tasks = [(cell, 40_000, 2, BATCH_SIZE, wait) for wait in policies.values() for cell in cells]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        outcomes = pool.starmap(measure, tasks, 1)
    points = [
        (task[0].level, 1e3 * outcome.mean) for task, outcome in zip(tasks, outcomes, strict=True)
    ]
    return {
        name: points[number * len(cells) : (number + 1) * len(cells)]
        for number, name in enumerate(policies)
    }


def read_known(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.exists():
        return {}
    return {name: Outcome(**values) for name, values in json.loads(path.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="some of the cells, less exactly")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument(
        "--fixed",
        type=Path,
        metavar="FILE",
        help="keep the best fixed settings here, and find none again that is there already",
    )
    parser.add_argument(
        "--images", type=Path, metavar="FOLDER", help="draw, too; such as docs/images"
    )
    args = parser.parse_args()
    started = time.monotonic()
    effort = Effort(1_000, 8_000, 2) if args.quick else Effort()
    cells = [cell for cell in all_cells(args.quick) if args.only in cell.name]
    if not cells:
        raise SystemExit(f"no cell has {args.only!r} in its name, such as 'steep 1 32 callers'")
    known = read_known(args.fixed)
    results = run_all(cells, effort, known)
    if args.fixed is not None:
        found: dict[str, Any] = {name: asdict(outcome) for name, outcome in known.items()}
        found |= {cell.name: asdict(fixed) for cell, _, fixed in results}
        args.fixed.write_text(json.dumps(found, indent=1))
    print(f"{in_words(machine())}; {time.monotonic() - started:.0f} s.")
    print_tables(results)
    if args.images is not None:
        args.images.mkdir(parents=True, exist_ok=True)
        draw(results, args.images)


if __name__ == "__main__":
    main()
