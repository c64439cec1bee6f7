"""``python benchmarks/gpu.py``: measures, prints tables, and writes a record of it.

Exit codes: 0 all was measured; 1 something failed, or time ran out, which is said; 2 a wrong
argument; 3 there is no CUDA device, and nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from on_gpu.goals import goals
from on_gpu.plan import CPU, FULL, PARTS, QUICK, SIMULATED, Run, Scale, runs
from on_gpu.report import goals_table, part_tables
from on_gpu.rivals import INFINITY
from on_gpu.running import Kind, Row, run
from service_streamer import __version__
from yardstick.machine import commit, in_words, machine

__all__ = ["NO_DEVICE", "main"]

NO_DEVICE = 3

#: With less than this left no measurement is begun, seconds.
_LEAST = 20

_NO_FIGURES: dict[Kind, str] = {
    "cpu": "No figures of a GPU: a small model on the CPU, which shows that the program runs.",
    "simulated": "No figures of a GPU: a stage that sleeps, which shows what feeding it costs.",
}

_SCALES: dict[str, Scale] = {"cpu": CPU, "simulated": SIMULATED, "quick": QUICK, "full": FULL}


def main(arguments: list[str] | None = None) -> int:
    asked = _parsed(arguments)
    if asked.infinity:
        os.environ[INFINITY] = asked.infinity
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kind: Kind = "cpu" if asked.cpu else "simulated" if asked.simulate else "cuda"
    name = kind if kind != "cuda" else "quick" if asked.quick else "full"
    scale = _SCALES[name]
    started = time.monotonic()
    seen = run("device", {}, timeout=120)
    found: Row = seen.rows[0] if seen.rows else {"why_not": seen.error, "devices": []}
    if kind == "cuda" and not found["devices"]:
        why = found.get("why_not") or "torch sees none"
        print(
            f"There is no CUDA device here ({why}), so nothing was measured; to see the program "
            "run, say --cpu or --simulate.",
            file=sys.stderr,
        )
        return NO_DEVICE
    record: Row = {
        "machine": {**machine(), **found, "commit": commit()},
        "service_streamer": __version__,
        "is_of_a_gpu": kind == "cuda",
        "kind": kind,
        "scale": name,
        "parts": {},
    }
    names = [device["id"] for device in found["devices"]] if kind == "cuda" else ["cpu"]
    print(_heading(record), flush=True)
    budget = _Budget(started + (asked.budget or scale.budget))
    for part in asked.only or PARTS:
        _measure(part, runs(part, scale, names, kind), record, budget, asked.out)
        print(f"\n{part_tables(part, record['parts'][part])}", flush=True)
    verdicts = goals(record) if kind == "cuda" else []
    record["goals"] = [{**goal._asdict(), "verdict": goal.verdict} for goal in verdicts]
    record["seconds"] = round(time.monotonic() - started, 1)
    _write(record, asked.out)
    print(f"\n{_NO_FIGURES.get(kind) or goals_table(verdicts)}", flush=True)
    return int(any(part["errors"] for part in record["parts"].values()))


class _Budget:
    """How much time is left for the whole."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at

    @property
    def left(self) -> float:
        return self._ends_at - time.monotonic()


def _measure(
    part: str, todo: list[Run] | str, record: Row, budget: _Budget, out: Path | None
) -> None:
    """Run all of one part; what fails is in the record, and the rest goes on."""
    made: Row = {"note": "", "rows": [], "errors": []}
    record["parts"][part] = made
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
    devices = [_in_words(device) for device in about["devices"]]
    lines = [
        f"## BERT-base in half precision: {', '.join(devices)}"
        if record["is_of_a_gpu"]
        else f"## {_NO_FIGURES[record['kind']]}",
        f"{in_words(about)}; driver {about['driver']}, torch {about['torch']}, CUDA "
        f"{about['cuda']}, transformers {about['transformers']}, service_streamer "
        f"{record['service_streamer']} ({about['commit']})",
    ]
    return "\n\n".join(lines)


def _in_words(device: Row) -> str:
    clocks = [
        f"{what} {device[name]:g} {unit}"
        for what, name, unit in (
            ("SM at most", "sm_mhz_most", "MHz"),
            ("memory", "memory_mhz", "MHz"),
            ("limit", "power_limit_w", "W"),
        )
        if device.get(name) is not None
    ]
    memory = f"{device['memory_gb']} GB"
    return f"{device['name']} ({', '.join([memory, *clocks])})"


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu.py",
        description="BERT-base on a GPU: hand-batched against a Streamer. Exit code 3: no GPU.",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--quick", action="store_true", help="less of it, one round each")
    scales.add_argument("--cpu", action="store_true", help="a small model on the CPU, as a trial")
    scales.add_argument(
        "--simulate", action="store_true", help="a stage that sleeps, in place of a device"
    )
    parser.add_argument("--infinity", metavar="PYTHON", help="an interpreter that has infinity")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the record, as JSON")
    return parser.parse_args(arguments)
