"""``python -m yardstick``, in ``benchmarks``; ``make yardstick`` runs it.

measure     everything, or what --only names, into a record
sweep       look for the settings at which each of the others is best, into settings.json
report      write the tables and plots of docs/benchmarks/ from its record
check       compare a quick run with the stored ratios; exit code 1 beyond the tolerance
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shutil
import sys
from collections.abc import Sequence

from yardstick import check, machine, report, sweep
from yardstick.bars import bars_table
from yardstick.environments import ROOT
from yardstick.plan import FULL, QUICK, Scale, Section
from yardstick.processes import terminate_cleanly
from yardstick.record import Record
from yardstick.runner import run
from yardstick.sections import SECTIONS
from yardstick.systems import SYSTEMS

DOCS = ROOT / "docs" / "benchmarks"
RECORD = DOCS / "record.json"
#: Of quick runs, and of those of some sections only: not to be committed.
SCRATCH = ROOT / ".yardstick"
#: How often a sweep tries each setting.
SWEEP_ROUNDS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="yardstick", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", default="measure", choices=["measure", "sweep", "report", "check"]
    )
    parser.add_argument("--quick", action="store_true", help="under five minutes, for no figures")
    parser.add_argument("--only", default="", help="sections, with commas between")
    parser.add_argument("--systems", default="", help="systems, with commas between")
    parser.add_argument("--rounds", type=int, help="instead of 3, or of 1 if quick")
    parser.add_argument(
        "--publish", action="store_true", help="write what was measured into docs/benchmarks/"
    )
    parser.add_argument("--store", action="store_true", help="check: store the ratios instead")
    parser.add_argument("--list", action="store_true", help="the sections and their systems")
    args = parser.parse_args(arguments)
    if args.publish and (args.quick or args.systems):
        parser.error("--publish takes whole sections, at full length")
    sections = _chosen(parser, args.only, args.systems)
    if args.list:
        for section in sections:
            print(f"{section.key}: {section.title}\n    {', '.join(section.systems)}")
        return 0
    terminate_cleanly()
    if args.command == "report":
        report.write(Record.load(RECORD), DOCS)
        return 0
    _warn()
    if args.command == "sweep":
        sweep.run(sections, SYSTEMS, args.rounds or SWEEP_ROUNDS)
        return 0
    if args.command == "check":
        return check.run(new_record(QUICK), SECTIONS, SYSTEMS, is_storing=args.store)
    scale = QUICK if args.quick else FULL
    if args.rounds:
        scale = Scale(args.rounds, scale.seconds, scale.is_quick)
    record = new_record(scale)
    # Read before anything is measured: if it cannot be, that is known now.
    older = Record.load(RECORD) if args.publish and args.only and RECORD.exists() else None
    folder = SCRATCH
    try:
        run(record, sections, SYSTEMS, scale)
        if older is not None:
            older.replace(record)
            record = older
        if args.publish:
            folder = DOCS
    finally:  # what was measured before an interruption can be looked at
        record.save(folder / "record.json")
        report.write(record, folder)
    print(bars_table(record))
    print(report.failures(record))
    print(f"tables and plots are in {folder.relative_to(ROOT)}")
    return 0


def new_record(scale: Scale) -> Record:
    """An empty one of this machine, now."""
    return Record(
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        commit=machine.commit(),
        is_quick=scale.is_quick,
        rounds=scale.rounds,
        machine=machine.machine(),
    )


def _chosen(parser: argparse.ArgumentParser, only: str, systems: str) -> list[Section]:
    wanted = _named(parser, only, {section.key for section in SECTIONS})
    kept = _named(parser, systems, set(SYSTEMS))

    def narrowed(section: Section) -> Section:
        measured = tuple(key for key in section.systems if key in kept)
        quick = section.quick and tuple(key for key in section.quick if key in kept)
        return dataclasses.replace(section, systems=measured, quick=quick)

    chosen = [narrowed(section) for section in SECTIONS if section.key in wanted]
    if not any(section.systems for section in chosen):
        parser.error("none of these systems is measured in these sections: see --list")
    return chosen


def _named(parser: argparse.ArgumentParser, names: str, known: set[str]) -> set[str]:
    """Those between the commas; all where there are none."""
    wanted = set(filter(None, names.split(",")))
    if unknown := wanted - known:
        parser.error(f"there is no {', '.join(sorted(unknown))}: see --list")
    return wanted or known


def _warn() -> None:
    if not shutil.which("wrk"):
        print("there is no wrk, so most of HTTP will fail: apt-get install wrk", file=sys.stderr)
    if (busy := os.getloadavg()[0]) > 1:
        print(f"this machine is busy (load {busy:.1f}): ratios may be off", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
