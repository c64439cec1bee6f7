"""Measures ``service-streamer serve`` beside mosec, LitServe and the original, with wrk in front.

``make bench-http`` runs it: every measurement starts a service anew and loads it for ``--seconds``,
one system after the other, ``--rounds`` times; the tables have the medians. ``--sweep`` looks for
the settings at which each of the others is best, by the median of the rounds; what it found is in
``http_systems.py``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from harness import RunFailed, machine, terminate_cleanly
from http_load import Load
from http_systems import CASES, SYSTEMS, Case, Settings, System

#: What is held to what. Of the servers, "uvicorn" is what ``serve`` takes by default.
GPU, ONE, ECHO = CASES

_WARM_UP = 2


class Results:
    """All loads, and what went wrong."""

    def __init__(self) -> None:
        self.loads: dict[tuple[str, str], list[Load]] = {}
        self.failures: list[str] = []

    def measure(self, system: System, case: Case, settings: Settings, seconds: int) -> Load | None:
        """One load of a service that is started for it; None if there is none."""
        try:
            with system.running(case, settings) as service:
                service.load(case.connections, min(_WARM_UP, seconds))
                load = service.load(case.connections, seconds)
        except (RunFailed, subprocess.TimeoutExpired) as error:
            self.failures.append(f"{system.title}, {case.name}: {error}")
            return None
        if load.errors:
            self.failures.append(f"{system.title}, {case.name}: not all answers are: {load.errors}")
        return load

    def add(self, system: System, case: Case, load: Load) -> None:
        self.loads.setdefault((system.key, case.name), []).append(load)

    def values(self, key: str, case: Case, value: Callable[[Load], float]) -> list[float]:
        return [value(load) for load in self.loads.get((key, case.name), [])]

    def median(self, key: str, case: Case, value: Callable[[Load], float]) -> float | None:
        values = self.values(key, case, value)
        return statistics.median(values) if values else None


def compare(systems: Sequence[System], cases: Sequence[Case], rounds: int, seconds: int) -> Results:
    """Measure everything, system by system within a round."""
    results = Results()
    for number in range(rounds):
        for case in cases:
            for system in systems:
                print(f"round {number + 1}: {case.name}: {system.title}", end=" ... ",
                      file=sys.stderr, flush=True)  # fmt: skip
                load = results.measure(system, case, system.best.get(case.name, {}), seconds)
                if load is None:
                    print("FAILED", file=sys.stderr)
                    continue
                results.add(system, case, load)
                print(f"{gist(case, load)} {load.errors}", file=sys.stderr)
    return results


def gist(case: Case, load: Load) -> str:
    if case.own:
        return f"{1000 * (load.mean - case.own):.2f} ms over the model"
    return f"{load.rate:,.0f}/s"


# -- tables


def versions() -> str:
    """Of what serves us."""
    names = ("service_streamer", "uvicorn", "uvloop", "httptools", "granian", "msgspec")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def report(
    results: Results, systems: Sequence[System], cases: Sequence[Case], rounds: int, seconds: int
) -> None:
    """Print the tables."""
    print(f"\nMedians of {rounds} rounds of {seconds} s, with the lowest and the highest; wrk with")
    print(f"2 threads on the same machine: {machine()}.")
    print(f"This: {versions()}.")
    for system in systems:
        told = {case.name: _told(system.best[case.name]) for case in cases if system.best}
        if len(set(told.values())) == 1:
            print(f"{system.title}: {next(iter(told.values()))}.")
        elif told:
            print(
                f"{system.title}: {'; '.join(f'{what} ({case})' for case, what in told.items())}."
            )
    columns = " | ".join(system.title for system in systems)
    print(f"\n| | {columns} |\n|---|{'---:|' * len(systems)}")

    def row(name: str, case: Case, value: Callable[[Load], float], digits: int) -> None:
        cells = [_cell(results.values(system.key, case, value), digits) for system in systems]
        print(f"| {name} | {' | '.join(cells)} |")

    for case in cases:
        if case.own:
            own = case.own
            row(f"{case.name}, ms over the model's {1000 * own:g}", case,
                lambda load, own=own: 1000 * (load.mean - own), 2)  # type: ignore[misc]  # fmt: skip
        else:
            row(f"{case.name}, requests/s", case, lambda load: load.rate, 0)
            row(f"{case.name}, p99 ms", case, lambda load: 1000 * load.p99, 1)
    for case in cases:
        name = f"{case.name}, processor time, µs/request, web process"
        cells = [
            _cell(results.values(system.key, case, lambda load: 1e6 * load.web), 0)
            if system.key in ("uvicorn", "granian")
            else ""
            for system in systems
        ]
        print(f"| {name} | {' | '.join(cells)} |")
        row(f"{case.name}, processor time, µs/request, all processes", case,
            lambda load: 1e6 * load.all, 0)  # fmt: skip
    _bars(results)


def _told(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _cell(values: list[float], digits: int) -> str:
    if not values:
        return "failed"
    low, high = min(values), max(values)
    spread = f" ({low:,.{digits}f} to {high:,.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.median(values):,.{digits}f}{spread}"


def _bars(results: Results) -> None:
    """What is promised, and whether it holds."""

    def rate(load: Load) -> float:
        return load.rate

    print("\n| | this | other | ratio | bar | |\n|---|---:|---:|---:|---|---|")
    for name, case, ours, theirs, least in (
        ("simulated GPU, beside mosec", GPU, "uvicorn", "mosec", 1.12),
        ("simulated GPU, beside LitServe", GPU, "uvicorn", "litserve", 4.0),
        ("echo, beside mosec", ECHO, "uvicorn", "mosec", 0.9),
        ("echo, granian, beside mosec", ECHO, "granian", "mosec", 1.0),
    ):
        this, other = results.median(ours, case, rate), results.median(theirs, case, rate)
        if this is None or other is None:
            continue
        ratio = this / other
        print(f"| {name}, requests/s | {this:,.0f} | {other:,.0f} | {ratio:.3f} "
              f"| at least {least:g} | {_verdict(ratio >= least)} |")  # fmt: skip
    for key, title in (("uvicorn", "serve"), ("granian", "serve --server granian")):
        over = results.median(key, ONE, lambda load: 1000 * (load.mean - ONE.own))
        if over is not None:
            print(f"| one connection, {title}, ms over the model | {over:.2f} | | "
                  f"| at most 1 | {_verdict(over <= 1)} |")  # fmt: skip
    for case in (GPU, ECHO):
        web = results.median("uvicorn", case, lambda load: 1e6 * load.web)
        if web is not None:
            print(f"| {case.name}, web process, µs of processor time per request | {web:.0f} | | "
                  f"| below 150 | {_verdict(web < 150)} |")  # fmt: skip


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**missed**"


# -- the best settings of the others


def sweep(systems: Sequence[System], cases: Sequence[Case], rounds: int, seconds: int) -> Results:
    """Measure each at every setting, setting by setting within a round; print which was best."""
    results = Results()
    for case in cases:
        for system in systems:
            found: dict[str, list[Load]] = {}
            for number in range(rounds):
                for settings in system.grid():
                    name = _told(settings)
                    print(f"round {number + 1}: {case.name}: {system.title}: {name}", end=" ... ",
                          file=sys.stderr, flush=True)  # fmt: skip
                    load = results.measure(system, case, settings, seconds)
                    print("FAILED" if load is None else f"{gist(case, load)} {load.errors}",
                          file=sys.stderr)  # fmt: skip
                    if load is not None and not load.errors:
                        found.setdefault(name, []).append(load)
            print(f"\n{case.name}: {system.title}, best first\n")
            medians = {
                name: statistics.median(load.rate for load in loads)
                for name, loads in found.items()
            }
            for name in sorted(medians, key=lambda name: -medians[name]):
                print(f"- {name}: {', '.join(gist(case, load) for load in found[name])}")
            print(flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="serve beside mosec, LitServe and the original.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--systems",
        default=",".join(system.key for system in SYSTEMS),
        help="which, with commas between (default: %(default)s)",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="look for the best settings of the others"
    )
    args = parser.parse_args()
    terminate_cleanly()
    if not shutil.which("wrk"):
        parser.error("this needs wrk: apt-get install wrk")
    wanted = args.systems.split(",")
    unknown = set(wanted) - {system.key for system in SYSTEMS}
    if unknown:
        parser.error(f"there is no system {', '.join(sorted(unknown))}")
    systems = [system for system in SYSTEMS if system.key in wanted]
    if args.sweep:
        systems = [system for system in systems if system.sweep]
    cases = [case for case in CASES if args.only in case.name]
    for system in systems:
        system.install()
    busy = os.getloadavg()[0]
    if busy > 1:
        print(f"this machine is busy (load {busy:.1f}): ratios may be off", file=sys.stderr)
    if args.sweep:
        results = sweep(systems, cases, args.rounds, args.seconds)
    else:
        results = compare(systems, cases, args.rounds, args.seconds)
        report(results, systems, cases, args.rounds, args.seconds)
    if results.failures:
        print("\nNot valid, since not all went well:\n")
        for failure in results.failures:
            print(f"- {failure}")
        sys.exit(1)


if __name__ == "__main__":
    main()
