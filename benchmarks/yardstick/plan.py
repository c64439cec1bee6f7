"""The terms of a run: systems, sections, settings, and how thorough it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from yardstick.record import Row

__all__ = ["Scale", "Section", "Settings", "System"]

#: The options of an adapter, by name; empty for defaults.
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """How thorough.

    Attributes:
        rounds: how often everything is measured, system after system within a round.
        seconds: of each point's steady window; sections that need more multiply it.
        is_quick: whether with fewer points and systems.
    """

    rounds: int
    seconds: float
    is_quick: bool


FULL = Scale(rounds=3, seconds=2.0, is_quick=False)
QUICK = Scale(rounds=1, seconds=1.0, is_quick=True)


@dataclass(frozen=True)
class System:
    """One row of the tables: a project in one of its modes.

    Attributes:
        key: for the command line and the record.
        title: for tables and plots; the version is put behind it.
        project: "this", "original", "batched", ...: its interpreter, pins and version.
        launch: what its section's driver needs to start it; see ``libraries.py``, ``servers.py``.
        grid: what the sweep tries: the values of each setting.
        rounds: in how many it is measured, at most; fewer for one that takes long to start.
    """

    key: str
    title: str
    project: str
    launch: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rounds: int = 3


@dataclass(frozen=True)
class Section:
    """One question, measured for several systems.

    Attributes:
        key: for the command line and the record.
        title: in words.
        systems: keys of those measured, in the order of the tables.
        measure: measures one system once; what it yields before it raises counts. Raises
            ``processes.RunFailed``.
        quick: the systems of a quick run; None for all of them.
        situation: under which the settings of a system are looked up, and found by the sweep.
        sweeps: measures one system for the sweep, as one number of which the highest is best; None
            where other sections find the settings of its situation.
        rounds: at most so many, where one takes long.
        grid: by system, settings that the sweep tries in this section besides.
        bounds: by system, what it is told besides, such as how many calls may wait.
        beside: keys of others, whose rows (``RowOf``) come with those of the systems.
    """

    key: str
    title: str
    systems: tuple[str, ...]
    measure: Callable[[System, Settings, Scale], Iterator[Row]]
    quick: tuple[str, ...] | None = None
    situation: str = "load"
    sweeps: Callable[[System, Settings], float] | None = None
    rounds: int = 3
    grid: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    bounds: Mapping[str, Settings] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
