"""Compares a short run with stored ratios, to notice that something has become slow.

Ratios and not rates, since those depend on the machine; each is made within one round. They are in
``benchmarks/ratios.json``; ``make bench-check ARGS=--store`` measures and writes them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yardstick import runner
from yardstick.environments import BENCHMARKS
from yardstick.figures import by_round, quotients, spread
from yardstick.machine import in_words
from yardstick.plan import QUICK, Section, System
from yardstick.record import Record, Spread
from yardstick.tables import reason

__all__ = ["RATIOS", "STORE", "Ratio", "Verdict", "compare", "measured", "run", "table"]

STORE = BENCHMARKS / "ratios.json"
_STORED_ROUNDS = 3

#: By how much a ratio may be worse. Arbitrary, but for this: the virtual machine that they were
#: first stored on is up to a fifth slower in one hour than in another, which does not slow both
#: sides of a ratio alike. Shares of ideal have less to vary with, and a lone caller's time hangs on
#: how fast a kernel wakes threads up, which varies most.
_TOLERANCE = 0.25
_OF_SHARES = 0.15
_OF_WAKING = 0.5


@dataclass(frozen=True)
class Ratio:
    """One that is watched.

    Attributes:
        name: in words; the key in the store, too.
        section, system, figure, point: what is measured.
        under: the system whose figure at the same point it is divided by; None where the figure is
            a ratio already.
        tolerance: by which share it may be worse.
    """

    name: str
    section: str
    system: str
    figure: str
    point: Mapping[str, Any] = field(default_factory=dict)
    under: str | None = None
    tolerance: float = _TOLERANCE
    is_higher_better: bool = True


_THEIRS = "original-streamer"
_GPU_128: Mapping[str, Any] = {"workload": "gpu", "connections": 128}
RATIOS = (
    Ratio(
        "a lone caller's wait beside the model / the original's",
        "alone",
        "streamer",
        "over",
        under=_THEIRS,
        tolerance=_OF_WAKING,
        is_higher_better=False,
    ),
    Ratio(
        "256 callers, share of ideal",
        "callers",
        "streamer",
        "share",
        {"callers": 256},
        tolerance=_OF_SHARES,
    ),
    Ratio("256 callers / the original", "callers", "streamer", "rate", {"callers": 256}, _THEIRS),
    Ratio(
        "stages of 20 ms, share of ideal",
        "stages",
        "streamer",
        "share",
        {"workload": "even-stages"},
        tolerance=_OF_SHARES,
    ),
    Ratio(
        "stages around a GPU, 128 callers, share of ideal",
        "stages",
        "streamer",
        "share",
        {"workload": "gpu-stages", "callers": 128},
        tolerance=_OF_SHARES,
    ),
    Ratio("futures / the original", "futures", "streamer", "rate", under=_THEIRS),
    Ratio("64 callers, echo / the original", "echo", "streamer", "rate", under=_THEIRS),
    Ratio(
        "twice the capacity, goodput",
        "overload",
        "streamer",
        "goodput",
        {"load": 2},
        tolerance=_OF_SHARES,
    ),
    Ratio("602 kB arrays / a plain copy", "arrays", "streamer", "rate", {"bytes": 602112}, "copy"),
    Ratio("602 kB arrays / the original", "arrays", "streamer", "rate", {"bytes": 602112}, _THEIRS),
    Ratio(
        "HTTP, 128 connections, share of ideal",
        "http",
        "serve",
        "share",
        _GPU_128,
        tolerance=_OF_SHARES,
    ),
    Ratio(
        "HTTP, 128 connections / the original", "http", "serve", "rate", _GPU_128, "original-gevent"
    ),
)


@dataclass(frozen=True)
class Verdict:
    """On one ratio; what is None could not be measured, or was never stored."""

    ratio: Ratio
    stored: float | None
    now: float | None

    @property
    def is_bad(self) -> bool:
        """Whether it is worse than tolerated, or could not be measured."""
        if self.now is None:
            return True
        return self.stored is not None and self._worse_by() > self.ratio.tolerance

    def in_words(self) -> str:
        if self.now is None:
            return "NOT MEASURED: see above"
        if self.stored is None:
            return "never stored: ARGS=--store"
        worse = self._worse_by()
        if self.is_bad:
            return f"WORSE by {worse:.0%}"
        return f"better by {-worse:.0%}" if worse < -self.ratio.tolerance else "as before"

    def _worse_by(self) -> float:
        assert self.stored is not None
        assert self.now is not None
        change = self.now / self.stored - 1
        return -change if self.ratio.is_higher_better else change


def run(
    record: Record,
    sections: Sequence[Section],
    systems: Mapping[str, System],
    *,
    is_storing: bool = False,
    ratios: Sequence[Ratio] = RATIOS,
    store: Path = STORE,
) -> int:
    """Measure what the ratios need, and compare or store them; the exit code.

    Args:
        record: an empty one.
    """
    if not is_storing and not store.exists():
        print(f"there is no {store.name}: write one with `make bench-check ARGS=--store`")
        return 1
    rounds = _STORED_ROUNDS if is_storing else 1
    record.rounds = rounds
    scale = dataclasses.replace(QUICK, rounds=rounds)
    runner.run(record, needed(sections, ratios), systems, scale)
    for failure in record.failures:
        text = f"{failure.section}, {failure.system}: {reason(failure)}"
        print(text, file=sys.stderr)
    now = measured(record, ratios)
    if is_storing:
        return _stored(record, now, store)
    known = json.loads(store.read_text("utf-8"))
    verdicts = compare(
        {name: each["median"] for name, each in known["ratios"].items()}, now, ratios
    )
    print(f"stored: {known['made']}, commit {known['commit']}, {known['machine']}")
    print(f"now:    {record.made}, commit {record.commit}, {in_words(record.machine)}\n")
    print(table(verdicts))
    if not any(verdict.is_bad for verdict in verdicts):
        print("\nNothing is worse than tolerated.")
        return 0
    print(
        "\nRun it again on an idle machine. If it stays, look for the change with `git bisect`;\n"
        "if it is meant to be so, store the new ratios: `make bench-check ARGS=--store`."
    )
    return 1


def needed(sections: Sequence[Section], ratios: Sequence[Ratio]) -> list[Section]:
    """The sections that the ratios are of, with no more systems than they need."""
    wanted: dict[str, list[str]] = {}
    for ratio in ratios:
        keys = wanted.setdefault(ratio.section, [])
        keys += [key for key in (ratio.system, ratio.under) if key and key not in keys]
    return [
        dataclasses.replace(section, systems=tuple(wanted[section.key]), quick=None)
        for section in sections
        if section.key in wanted
    ]


def measured(record: Record, ratios: Sequence[Ratio] = RATIOS) -> dict[str, Spread | None]:
    """Each ratio by name; None where something is missing for it."""
    found = {}
    for ratio in ratios:
        values = by_round(record, ratio.section, ratio.system, ratio.figure, ratio.point)
        if ratio.under:
            under = by_round(record, ratio.section, ratio.under, ratio.figure, ratio.point)
            values = quotients(values, under)
        found[ratio.name] = spread(values)
    return found


def compare(
    stored: Mapping[str, float],
    now: Mapping[str, Spread | None],
    ratios: Sequence[Ratio] = RATIOS,
) -> list[Verdict]:
    """A verdict on each ratio."""
    verdicts = []
    for ratio in ratios:
        found = now.get(ratio.name)
        median = None if found is None else found.median
        verdicts.append(Verdict(ratio, stored.get(ratio.name), median))
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """For a terminal."""
    width = max(len(verdict.ratio.name) for verdict in verdicts)
    lines = [f"{'':{width}}  {'stored':>8}  {'now':>8}  {'tolerated':>9}  verdict"]
    for each in verdicts:
        stored, now = (_number(value) for value in (each.stored, each.now))
        tolerated = f"{'-' if each.ratio.is_higher_better else '+'}{each.ratio.tolerance:.0%}"
        lines.append(
            f"{each.ratio.name:{width}}  {stored:>8}  {now:>8}  {tolerated:>9}  {each.in_words()}"
        )
    return "\n".join(lines)


def _stored(record: Record, now: Mapping[str, Spread | None], store: Path) -> int:
    """Write them, if all could be measured."""
    missing = [name for name, found in now.items() if found is None]
    if missing:
        print(f"nothing is stored, since this could not be measured: {'; '.join(missing)}")
        return 1
    whole = {
        "made": record.made,
        "commit": record.commit,
        "machine": in_words(record.machine),
        "rounds": record.rounds,
        "ratios": {name: dataclasses.asdict(found) for name, found in now.items() if found},
    }
    store.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    print(f"{len(now)} ratios are in {store.name}: commit it")
    return 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
