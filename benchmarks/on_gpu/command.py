"""``python benchmarks/gpu.py``: measures, prints tables, and writes a record of it.

Exit codes: 0 all was measured; 1 something failed, or time ran out, which is said; 2 a wrong
argument; 3 there is no CUDA device, and nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from on_gpu.device import driver
from on_gpu.plan import CPU, FULL, PARTS, QUICK, Scale, runs
from on_gpu.report import goals, goals_table, part_tables
from on_gpu.running import Row, run
from service_streamer import __version__
from yardstick.machine import commit, in_words, machine

__all__ = ["NO_DEVICE", "main"]

NO_DEVICE = 3

#: With less than this left no measurement is begun, seconds.
_LEAST = 20

_NO_GPU = "No figures of a GPU: a small model on the CPU, which shows that the program runs."


def main(arguments: list[str] | None = None) -> int:
    asked = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scale = CPU if asked.cpu else QUICK if asked.quick else FULL
    started = time.monotonic()
    seen = run("device", {}, timeout=120)
    found: Row = seen.rows[0] if seen.rows else {"why_not": seen.error, "devices": []}
    if not asked.cpu and not found["devices"]:
        why = found.get("why_not") or "torch sees none"
        print(
            f"There is no CUDA device here ({why}), so nothing was measured; to see the program "
            "run on a CPU, say --cpu.",
            file=sys.stderr,
        )
        return NO_DEVICE
    record: Row = {
        "machine": {**machine(), **found, "driver": driver(), "commit": commit()},
        "service_streamer": __version__,
        "is_of_a_gpu": not asked.cpu,
        "scale": "cpu" if asked.cpu else "quick" if asked.quick else "full",
        "parts": {},
    }
    names = [] if asked.cpu else [device["id"] for device in found["devices"]]
    print(_heading(record), flush=True)
    budget = _Budget(started + (asked.budget or scale.budget))
    for part in asked.only or PARTS:
        _measure(part, scale, names, record, budget, asked.out)
        print(f"\n{part_tables(part, record['parts'][part])}", flush=True)
    verdicts = goals(record)
    record["goals"] = [{**goal._asdict(), "verdict": goal.verdict} for goal in verdicts]
    record["seconds"] = round(time.monotonic() - started, 1)
    _write(record, asked.out)
    print(f"\n{_NO_GPU if asked.cpu else goals_table(verdicts)}", flush=True)
    return int(any(part["errors"] for part in record["parts"].values()))


class _Budget:
    """How much time is left for the whole."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at

    @property
    def left(self) -> float:
        return self._ends_at - time.monotonic()


def _measure(
    part: str, scale: Scale, devices: list[str], record: Row, budget: _Budget, out: Path | None
) -> None:
    """Run all of one part; what fails is in the record, and the rest goes on."""
    made: Row = {"note": "", "rows": [], "errors": []}
    record["parts"][part] = made
    todo = runs(part, scale, devices)
    if isinstance(todo, str):
        made["note"] = todo
        todo = []
    for each in todo:
        if budget.left < _LEAST:
            made["errors"].append({"title": each.title, "error": "no time was left for it"})
            continue
        began = time.monotonic()
        print(f"{part}: {each.title} ...", file=sys.stderr, flush=True)
        ended = run(each.module, each.settings, timeout=min(each.timeout, budget.left))
        made["rows"] += ended.rows
        if ended.error:
            made["errors"].append({"title": each.title, "error": ended.error})
        said = f"FAILED: {ended.error.strip().splitlines()[-1]}" if ended.error else "done"
        took = time.monotonic() - began
        print(f"{part}: {each.title}: {said} ({took:.0f} s)", file=sys.stderr, flush=True)
        _write(record, out)
    _write(record, out)


def _write(record: Row, out: Path | None) -> None:
    """Whole or not at all."""
    if out is not None:
        whole = out.with_name(f"{out.name}.part")
        whole.write_text(json.dumps(record, indent=1) + "\n")
        whole.replace(out)


def _heading(record: Row) -> str:
    about: dict[str, Any] = record["machine"]
    devices = [f"{device['name']} ({device['memory_gb']} GB)" for device in about["devices"]]
    lines = [
        f"## BERT-base in half precision: {', '.join(devices)}"
        if record["is_of_a_gpu"]
        else f"## {_NO_GPU}",
        f"{in_words(about)}; driver {about['driver']}, torch {about['torch']}, CUDA "
        f"{about['cuda']}, transformers {about['transformers']}, service_streamer "
        f"{record['service_streamer']} ({about['commit']})",
    ]
    return "\n\n".join(lines)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu.py",
        description="BERT-base on a GPU: hand-batched against a Streamer. Exit code 3: no GPU.",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="less of it, in three minutes")
    scales.add_argument("--cpu", action="store_true", help="a small model on the CPU, as a trial")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the record, as JSON")
    return parser.parse_args(arguments)
