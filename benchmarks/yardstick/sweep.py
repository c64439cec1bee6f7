"""Looks for the settings at which each of the others is best, and keeps what it found.

``settings.json`` has every setting that was tried, with what came of it. This project is measured
at its defaults, so it has no grid, and is not swept.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from yardstick import machine
from yardstick.environments import InstallFailed, install, version
from yardstick.plan import Section, Settings, System
from yardstick.runner import SETTINGS

__all__ = ["best", "grid", "run"]


def grid(system: System, more: Mapping[str, tuple[Any, ...]] | None = None) -> list[Settings]:
    """Every combination of its settings, and of those that a section tries besides."""
    tried = {**system.grid, **(more or {})}
    return [dict(zip(tried, each, strict=True)) for each in itertools.product(*tried.values())]


def best(found: Sequence[tuple[Settings, Sequence[float]]]) -> Settings:
    """The settings with the highest median; the first of them where several have it."""
    return max(found, key=lambda each: statistics.median(each[1]))[0]


def run(sections: Sequence[Section], systems: Mapping[str, System], rounds: int) -> None:
    """Sweep each system that has a grid in each section that can, setting after setting.

    What is found is written at once, so that an interruption loses one system's sweep at most.
    """
    for section in sections:
        if section.sweeps is None:
            continue
        for key in section.systems:
            system = systems[key]
            if not system.grid:
                continue
            try:
                install(system.project)
            except InstallFailed as error:
                print(error, file=sys.stderr)
                continue
            found = _swept(section, system, rounds)
            if found:
                _keep(section, system, found)
            else:
                print(f"{key} failed at every setting of {section.key}", file=sys.stderr)


def _swept(section: Section, system: System, rounds: int) -> list[tuple[Settings, list[float]]]:
    assert section.sweeps is not None
    scores: dict[int, list[float]] = {}
    settings = grid(system, section.grid.get(system.key))
    for _ in range(rounds):
        for number, each in enumerate(settings):
            print(
                f"{section.key}: {system.title}: {each}", end=" ... ", file=sys.stderr, flush=True
            )
            try:
                score = section.sweeps(system, each)
            except Exception as error:  # of whatever kind: the others are tried all the same
                print(f"FAILED: {error}", file=sys.stderr)
                continue
            print(f"{score:.5g}", file=sys.stderr, flush=True)
            scores.setdefault(number, []).append(score)
    return [(settings[number], values) for number, values in scores.items()]


def _keep(
    section: Section, system: System, found: Sequence[tuple[Settings, Sequence[float]]]
) -> None:
    """Into the file, with everything that was tried: the best of it can be read off."""
    kept: dict[str, Any] = json.loads(SETTINGS.read_text()) if SETTINGS.exists() else {}
    kept.setdefault(system.key, {})[section.situation] = {
        "best": best(found),
        "by": section.key,
        "version": version(system.project),
        "machine": machine.in_words(machine.machine()),
        "tried": [[settings, [round(value, 6) for value in scores]] for settings, scores in found],
    }
    text = json.dumps(dict(sorted(kept.items())), indent=1)
    SETTINGS.write_text(text + "\n")
