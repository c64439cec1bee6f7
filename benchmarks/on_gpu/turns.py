"""Ways of doing the same, measured in turn: A B C C B A is one round. Pure but for what it calls.

A machine that becomes slower or faster at a steady pace does so for all ways alike, so ratios
within a round do not depend on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from on_gpu.running import Row

__all__ = ["grouped", "in_turn"]


def in_turn(
    ways: Mapping[str, Callable[[], Row]], rounds: int
) -> Iterator[tuple[int, dict[str, Row]]]:
    """The rounds, each with one row for each way: the means of its two windows."""
    there = list(ways)
    for number in range(rounds):
        windows: dict[str, list[Row]] = {name: [] for name in there}
        for name in [*there, *reversed(there)]:
            windows[name].append(ways[name]())
        yield number, {name: _mean(rows) for name, rows in windows.items()}


def _mean(rows: Sequence[Row]) -> Row:
    """Of each figure that was known; anything else as the last row has it."""
    return {name: _of([row[name] for row in rows if row[name] is not None]) for name in rows[-1]}


def _of(values: Sequence[Any]) -> Any:
    if not values:
        return None
    return statistics.fmean(values) if _are_figures(values) else values[-1]


def _are_figures(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """One row for all rounds of the same: the median of each figure that was known.

    Beside it "spread" has the lowest and the highest of each figure, and "rounds" their number.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [_median(group, keys) for group in groups.values()]


def _median(group: Sequence[Row], keys: Sequence[str]) -> Row:
    made: Row = {"spread": {}, "rounds": len(group)}
    for name in group[0]:
        known = [row[name] for row in group if row[name] is not None]
        if name in keys or not known or not _are_figures(known):
            made[name] = known[-1] if known else None
        else:
            made[name] = statistics.median(known)
            made["spread"][name] = min(known), max(known)
    return made
