"""Measures all systems of all sections in turn, round after round, and keeps what failed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yardstick.environments import BENCHMARKS, InstallFailed, install, version
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Failure, Record, Result, RowOf

__all__ = ["SETTINGS", "best_settings", "chosen", "run"]

SETTINGS = BENCHMARKS / "settings.json"


def best_settings(path: Path = SETTINGS) -> dict[str, dict[str, Settings]]:
    """What the sweep found, by system and situation."""
    found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {
        system: {situation: entry["best"] for situation, entry in by_situation.items()}
        for system, by_situation in found.items()
    }


def run(
    record: Record, sections: Sequence[Section], systems: Mapping[str, System], scale: Scale
) -> None:
    """Measure everything; the record grows as it goes."""
    missing = _installed(record, sections, systems, scale)
    best = best_settings()
    for number in range(1, scale.rounds + 1):
        for section in sections:
            # There and back, so that a machine that becomes slower does so for all alike.
            for key in [*chosen(section, scale)][:: 1 if number % 2 else -1]:
                system = systems[key]
                if system.project in missing or number > min(section.rounds, system.rounds):
                    continue
                found = best.get(key, {}).get(section.situation, {})
                settings = {**found, **section.bounds.get(key, {})}
                _measure(record, section, system, settings, scale, number)


def chosen(section: Section, scale: Scale) -> Iterable[str]:
    """The systems that a run of this thoroughness measures."""
    return section.quick if scale.is_quick and section.quick is not None else section.systems


def _installed(
    record: Record, sections: Sequence[Section], systems: Mapping[str, System], scale: Scale
) -> set[str]:
    """Make what is missing; the projects that could not be, which is in the record."""
    missing = set()
    users: dict[str, list[tuple[str, str]]] = {}
    for section in sections:
        for key in chosen(section, scale):
            users.setdefault(systems[key].project, []).append((section.key, key))
    for project, uses in users.items():
        try:
            install(project)
        except InstallFailed as error:
            missing.add(project)
            print(error, file=sys.stderr)
            record.failures += [Failure(section, key, 1, str(error)) for section, key in uses]
        else:
            record.versions[project] = version(project)
    return missing


def _measure(
    record: Record, section: Section, system: System, settings: Settings, scale: Scale, number: int
) -> None:
    title = f"round {number}: {section.key}: {system.title}"
    print(title, end=" ... ", file=sys.stderr, flush=True)
    began, shown = time.monotonic(), []
    try:
        for row in section.measure(system, settings, scale):
            of, used = system.key, settings
            if isinstance(row, RowOf):
                of, used = row.system, row.settings
            record.results.append(Result(row.point, row.figures, section.key, of, number, used))
            shown.append(_gist(row.figures))
    except Exception as error:  # of whatever kind: the others are measured all the same
        text = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        record.failures.append(Failure(section.key, system.key, number, text))
        shown.append(f"FAILED: {text}")
    print(f"{', '.join(shown)} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)


def _gist(figures: Mapping[str, Any]) -> str:
    """The first number of them."""
    number = next((each for each in figures.values() if isinstance(each, int | float)), None)
    return "-" if number is None else f"{number:.4g}"
