"""What a run has measured, as JSON: everything that tables, plots and the check are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Failure", "Point", "Record", "Result", "Row", "RowOf", "Spread"]

#: Where something was measured, such as ``{"callers": 64}``.
Point = Mapping[str, Any]

_SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """What a section has measured at one point, in one round.

    Attributes:
        point: where; empty where there is one point only.
        figures: numbers by name, with the unit in the name where it is not seconds; a list is a
            series, such as one number for each tenth of a second.
    """

    point: Point
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class RowOf(Row):
    """A row of another system than the one that was to be measured, in whose run it was, too.

    Attributes:
        settings: with which that system ran; they were looked for in the same run.
    """

    system: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Result(Row):
    """A row, and where it comes from."""

    section: str
    system: str
    round: int
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """What could not be measured, and why."""

    section: str
    system: str
    round: int
    error: str


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds: its median, the lowest and the highest."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass
class Record:
    """One run.

    Attributes:
        made: when it began, in UTC.
        commit: of this project.
        is_quick: whether with few points and short times, so that no figure of it is to be quoted.
        machine: on which, see ``machine.py``.
        versions: of each project measured.
        later: how the sections were made that a later run has replaced: see ``run_of``.
    """

    made: str
    commit: str
    is_quick: bool
    rounds: int
    machine: Mapping[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    later: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    # -- asking

    def sections(self) -> list[str]:
        """In the order in which they were measured."""
        keys = [result.section for result in self.results]
        keys += [failure.section for failure in self.failures]
        return list(dict.fromkeys(keys))

    def systems(self, section: str) -> list[str]:
        """Those with a result in it."""
        return list(dict.fromkeys(r.system for r in self.results if r.section == section))

    def points(self, section: str, system: str | None = None) -> list[Point]:
        """Each once, in the order in which they were measured."""
        found: list[Point] = []
        for result in self._of(section, system):
            if result.point not in found:
                found.append(result.point)
        return found

    def settings(self, section: str, system: str) -> Mapping[str, Any]:
        """With which a system ran there, in the last round."""
        found: Mapping[str, Any] = {}
        for result in self._of(section, system):
            found = result.settings
        return found

    def run(self) -> Mapping[str, Any]:
        """How it was made: ``made``, ``commit``, ``is_quick``, ``rounds`` and ``machine``."""
        names = ("made", "commit", "is_quick", "rounds", "machine")
        return {name: getattr(self, name) for name in names}

    def run_of(self, section: str) -> Mapping[str, Any]:
        """How a section of it was made, maybe later than the rest."""
        return self.later.get(section) or self.run()

    def failures_of(self, section: str) -> list[Failure]:
        return [failure for failure in self.failures if failure.section == section]

    def _of(self, section: str, system: str | None) -> Iterator[Result]:
        for result in self.results:
            if result.section == section and system in (None, result.system):
                yield result

    # -- changing and keeping

    def replace(self, other: Record) -> None:
        """Take over the sections of a later run of some of them."""
        new = set(other.sections())
        self.results = [r for r in self.results if r.section not in new] + other.results
        self.failures = [f for f in self.failures if f.section not in new] + other.failures
        self.versions.update(other.versions)
        self.later.update({section: other.run_of(section) for section in new})

    def save(self, path: Path) -> None:
        """Write it, one line for each result, so that changes can be read."""
        whole = asdict(self)
        lists = {name: whole.pop(name) for name in ("results", "failures")}
        head = json.dumps({"schema": _SCHEMA, **whole}, indent=1)[:-2]
        bodies = [f' "{name}": {_lines(rows)}' for name, rows in lists.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",\n".join([head, *bodies]) + "\n}\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read it. Raises OSError, and ValueError with a hint where it is none of this kind."""
        whole = json.loads(path.read_text("utf-8"))
        if whole.pop("schema", None) != _SCHEMA:
            raise ValueError(f"{path} is no record of this version of the yardstick: measure anew")
        results = [Result(**each) for each in whole.pop("results")]
        failures = [Failure(**each) for each in whole.pop("failures")]
        return cls(**whole, results=results, failures=failures)


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "[]"
    return "[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]"
