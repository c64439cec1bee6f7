"""Measures the pool beside the original service_streamer 0.1.2; ``make bench`` runs it.

Every case runs in processes of its own, ours and the original's in turn, ``--rounds`` times; the
table has the medians. Machines differ and are noisy: what counts is the ratio within one run. Then
come tables of their own: ``overload``, ``recovery``, ``policy_cost`` and ``lengths``.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lengths
import overload
import policy_cost
import recovery
from harness import (
    ENVIRONMENT,
    OURS,
    ROOT,
    THEIRS,
    end_group,
    install_original,
    machine,
    output_of,
    terminate_cleanly,
)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        measure: returns the figure for an interpreter: that of this project or of the original.
        bar: in words, what issue or promise it is held to.
        unit: printed behind the figures.
        has_original: whether the original can be measured too.
    """

    name: str
    measure: Callable[[str], float]
    bar: str
    unit: str = ""
    digits: int = 2
    has_original: bool = True


def in_process(case: str, script: str = "driver.py") -> Callable[[str], float]:
    return lambda python: float(output_of(python, script, case).split()[-1])


@contextlib.contextmanager
def service(python: str) -> Iterator[str]:
    """The Flask service on gevent with one simulated GPU; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if python == OURS:
        example = str(ROOT / "example" / "flask_multigpu_example.py")
        options = ["--model", "simulated:SimulatedGPU", "--workers", "1", "--port", port]
        command = [python, example, *options]
    else:
        command = [python, str(ROOT / "benchmarks" / "original_service.py"), port]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if not any(line.startswith("serving") for line in process.stdout):
            raise SystemExit(f"{' '.join(command)} did not start")
        yield f"http://127.0.0.1:{port}/stream"
    finally:
        process.terminate()
        process.wait()
        end_group(process)


def wrk(connections: int) -> Callable[[str], tuple[float, float]]:
    """Requests per second and mean latency in milliseconds, after a warm-up."""

    def measure(python: str) -> tuple[float, float]:
        with service(python) as url:
            for seconds in ("1s", "4s"):
                options = ["-t1", f"-c{connections}", f"-d{seconds}", "--timeout=10s"]
                script = str(ROOT / "scripts" / "streamer.lua")
                run = subprocess.run(
                    ["wrk", *options, "-s", script, url], capture_output=True, text=True, check=True
                )
        if "not 2xx: 0, socket errors: 0, timeouts: 0" not in run.stdout:
            raise SystemExit(f"wrk saw errors:\n{run.stdout}")
        rate = float(re.search(r"Requests/sec:\s+([\d.]+)", run.stdout)[1])  # type: ignore[index]
        return rate, 1000 * connections / rate  # by Little's law

    return measure


#: Threads, and what share of ideal they are to reach.
CLOSED_LOOPS = {
    1: 0.94, 2: 0.92, 8: 0.90, 32: 0.88, 64: 0.88, 128: 0.95, 256: 0.95, 512: 0.95,
}  # fmt: skip


def cases() -> list[Case]:
    http = [
        Case(
            "HTTP, 128 connections, requests/s",
            lambda python: wrk(128)(python)[0],
            "at least 1.8x the original",
            digits=0,
        ),
        Case(
            "HTTP, 1 connection, ms over the model's 5.1",
            lambda python: wrk(1)(python)[1] - 5.1,
            "at most 3 ms",
        ),
    ]
    return [
        Case("text infilling, 1 worker, share of direct batches of 64",
             in_process("", "infilling.py"), "at least 0.95", digits=3, has_original=False),
        Case("one caller, calls in turn with direct ones, time / model's own",
             in_process("alone"), "at most 1.06"),
        Case("one caller, calls back to back, time / model's own",
             in_process("back_to_back"), "at most 1.06"),
        *(Case(f"{threads} thread{'s' * (threads > 1)}, share of ideal",
               in_process(f"closed_loop_{threads}"), f"at least {bar}", digits=3)
          for threads, bar in CLOSED_LOOPS.items()),
        Case("8 workers, 512 threads, share of ideal", in_process("eight_workers"),
             "at least 0.92", digits=3),
        Case("20 000 single-item futures, echo, per second", in_process("futures"),
             "at least 150 000", digits=0),
        Case("64 threads, echo, calls/s", in_process("echo"), "at least 2x the original",
             digits=0),
        *(http if shutil.which("wrk") else []),
    ]  # fmt: skip


def compare(chosen: list[Case], rounds: int) -> None:
    """Measure the cases and print their table."""
    figures: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for case in chosen:
            for python in [OURS, THEIRS] if case.has_original else [OURS]:
                print(f"round {number + 1}: {case.name}", end=" ... ", file=sys.stderr, flush=True)
                figure = case.measure(python)
                figures.setdefault((case.name, python), []).append(figure)
                print(f"{figure:,.{case.digits}f}", file=sys.stderr)
    print(f"\nMedians of {rounds} rounds; {machine()}.\n")
    print("| | this | original 0.1.2 | ratio | bar |\n|---|---:|---:|---:|---|")
    for case in chosen:
        ours = statistics.median(figures[case.name, OURS])
        cells = [case.name, f"{ours:,.{case.digits}f}"]
        if case.has_original:
            theirs = statistics.median(figures[case.name, THEIRS])
            cells += [f"{theirs:,.{case.digits}f}", f"{ours / theirs:.2f}"]
        else:
            cells += ["", ""]
        print("| " + " | ".join([*cells, case.bar]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="The pool beside the original.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        default="",
        help="cases whose name contains this; overload, recovery, lengths and policy are four",
    )
    args = parser.parse_args()
    terminate_cleanly()
    install_original()
    if not shutil.which("wrk"):
        print("no wrk here, so no HTTP: apt-get install wrk", file=sys.stderr)
    chosen = [case for case in cases() if args.only in case.name]
    if chosen:
        compare(chosen, args.rounds)
    if args.only in "overload":
        overload.report()
    if args.only in "recovery":
        recovery.report()
    if args.only in "policy":
        policy_cost.report()
    if args.only in "lengths":
        lengths.report()


if __name__ == "__main__":
    main()
