"""Measures how fast arrays get to a worker and back; ``make bench-payload`` runs it.

An echo model, one worker, callers in a closed loop, each with an array of its own. Every figure is
of a process of its own, one after the other, ``--rounds`` times; the tables have the medians. What
counts is the ratio within one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from harness import (
    OURS,
    THEIRS,
    RunFailed,
    install_original,
    machine,
    output_of,
    terminate_cleanly,
)
from service_streamer.simulate.plot import speed_against_size

#: Of an image of 224 x 224 pixels in three colours, float32.
IMAGE = 602_112
CALLERS = 16
SIZES = (
    1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, IMAGE,
    1 << 20, 4 << 20, 16 << 20, 64 << 20,
)  # fmt: skip
#: Bars: of images, GB/s each way, times the original; of any size, times the pipe.
BARS = (4.0, 8.0, 0.95)
#: What the original is tried with, of which the best counts: batch_size and max_latency.
SETTINGS = ((64, 0.1), (64, 0.01), (64, 0.001), (16, 0.1), (16, 0.01), (16, 0.001), (4, 0.001))

Measure = Callable[[int, float], float]


def ours(limit: int | None) -> Measure:
    """Calls per second of an array of this size."""

    def measure(size: int, seconds: float) -> float:
        tail = [] if limit is None else [str(limit)]
        return run(OURS, size, callers_of(size), seconds, "64", "0.1", *tail)

    return measure


def original(batch_size: int, max_latency: float) -> Measure:
    def measure(size: int, seconds: float) -> float:
        return run(THEIRS, size, callers_of(size), seconds, str(batch_size), str(max_latency))

    return measure


def copy(size: int, seconds: float) -> float:
    return run(OURS, size, 0, min(1.0, seconds))


def callers_of(size: int) -> int:
    """Fewer where the arrays of all would be more than the machine may have memory."""
    return CALLERS if size <= 4 << 20 else 4


def run(python: str, *arguments: object) -> float:
    try:
        return float(output_of(python, "payload_driver.py", *map(str, arguments)).split()[-1])
    except RunFailed as error:
        if python == OURS:
            raise
        print(error, file=sys.stderr)
        return 0.0


def best_setting(seconds: float) -> tuple[int, float]:
    """Of the original, for images."""
    rates = {}
    for setting in SETTINGS:
        rates[setting] = original(*setting)(IMAGE, seconds)
        print(f"original, batch_size {setting[0]}, max_latency {setting[1]} s: "
              f"{rates[setting]:.0f} calls/s", file=sys.stderr)  # fmt: skip
    return max(rates, key=lambda setting: rates[setting])


def medians(
    contestants: dict[str, Measure], size: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Of each one's bytes per second each way, in GB/s, measured in turn."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, measure in contestants.items():
            rates[name].append(measure(size, seconds) * size / 1e9)
    found = {name: statistics.median(taken) for name, taken in rates.items()}
    shown = ", ".join(f"{name} {speed:.3f}" for name, speed in found.items())
    print(f"{in_words(size)}: {shown} GB/s", file=sys.stderr)
    return found


def in_words(size: int) -> str:
    if size == IMAGE:
        return "602 kB"
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Arrays to a worker and back.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of load, for each figure")
    parser.add_argument("--image", type=Path, default=None, help="where to draw the plot to, SVG")
    args = parser.parse_args()
    terminate_cleanly()
    install_original()
    setting = best_setting(args.seconds)
    contestants = {
        "memory copy": copy,
        "shared memory": ours(None),
        "pipes": ours(0),
        "original": original(*setting),
    }
    speeds = {size: medians(contestants, size, args.seconds, args.rounds) for size in SIZES}
    print(
        f"\nGB/s each way, {CALLERS} callers (4 beyond 4 MB); medians of {args.rounds} rounds of "
        f"{args.seconds:g} s; original 0.1.2 with batch_size {setting[0]}, max_latency "
        f"{setting[1]:g} s; {machine()}.\n"
    )
    print("| array | plain memory copy | this | this, through pipes | original | this / pipes | "
          "this / original |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|")
    for size, found in speeds.items():
        plain, shared, pipes, theirs = found.values()
        times = f"{shared / theirs:.1f}x" if theirs else "did not end"
        print(
            f"| {in_words(size)} | {plain:.1f} | {shared:.3f} | {pipes:.3f} | {theirs:.3f} | "
            f"{shared / pipes:.2f}x | {times} |"
        )
    print(f"\nBars: 602 kB at least {BARS[0]:g} GB/s where a memory copy does 17, and at least "
          f"{BARS[1]:g}x the original; no size below {BARS[2]:g}x the pipes.")  # fmt: skip
    if args.image is not None:
        curves = {
            name: [(size, found[name]) for size, found in speeds.items() if found[name]]
            for name in contestants
        }
        speed_against_size(args.image, curves)


if __name__ == "__main__":
    main()
