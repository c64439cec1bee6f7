"""What became of the goals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from on_gpu.running import Row
from on_gpu.turns import grouped

__all__ = ["SERVED", "WINDOWS", "Goal", "goals"]

#: What the original's README gives for its future interface: four workers, each on a GPU, 2019.
ORIGINAL_PER_S = 1400
_ORIGINAL = "four Titan Xp, the original's README of 2019"

_SIZE, _TOKENS = 64, 16
_ONE_WORKER, _SEVERAL, _DEVICE = 0.95, 2.0, 0.85

#: By which rows of several rounds are of the same thing.
WINDOWS = ("tokens", "batch_size", "workers", "call_items")
SERVED = ("workload", "tokens", "way")


class Goal(NamedTuple):
    """Attributes: ``figure`` is None where it was not measured, ``bar`` where there is none;
    ``spread`` has the lowest and the highest round, if there are several."""

    name: str
    bar: float | None
    figure: float | None
    spread: tuple[float, float] | None
    how: str

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        if self.bar is None:
            return "-"
        return "met" if self.figure >= self.bar else "missed"


def goals(record: Row) -> list[Goal]:
    """From the figures of a record; medians of rounds."""
    return [*_streamed(record), *_served(record)]


def _streamed(record: Row) -> list[Goal]:
    rows = [row for row in _rows(record, "workers", "sizes") if row["kind"] == "window"]
    found = [
        row
        for row in grouped(rows, WINDOWS)
        if (row["batch_size"], row["tokens"]) == (_SIZE, _TOKENS)
    ]
    at = f"batches of {_SIZE} x {_TOKENS} tokens"
    made = []
    for items, way in ((1, "single-item futures"), (64, "calls of 64")):
        ones = [row for row in found if row["workers"] == 1 and row["call_items"] == items]
        made.append(
            _goal(f"one worker / hand-batched, {way}", _ONE_WORKER, _first(ones), "share", at)
        )
    several = max((row for row in found if row["workers"] > 1), key=_share, default=None)
    how = at if several is None else f"{at}; {_way(several)}"
    name = "several workers on one device / hand-batched"
    made.append(_goal(name, _SEVERAL, several, "share", how))
    most = max(found, key=lambda row: float(row["streamed_per_s"]), default=None)
    how = at if most is None else f"{at}; {_way(most)}"
    fastest = _goal("sentences per second", None, most, "streamed_per_s", how)
    times = None if fastest.figure is None else fastest.figure / ORIGINAL_PER_S
    beside = f"times the original's {ORIGINAL_PER_S:,} on {_ORIGINAL}"
    return [*made, fastest, Goal("the same beside the original", None, times, None, beside)]


def _served(record: Row) -> list[Goal]:
    rows = [row for row in _rows(record, "served") if not row.get("note")]
    found = grouped(rows, SERVED)

    def row_of(workload: str, tokens: int | None, way: str) -> Row | None:
        wanted = workload, tokens, way
        return _first([row for row in found if tuple(row[key] for key in SERVED) == wanted])

    made = []
    for tokens in (16, 128):
        for items in (1, 64):
            row = row_of("text-classification", tokens, f"serve, requests of {items}")
            name = f"share of device time, serve, {tokens} tokens"
            how = f"text classification; requests of {items}"
            made.append(_goal(name, _DEVICE, row, "device_share", how))
    images = [row for row in found if row["workload"] == "image-classification"]
    services = [row for row in images if row["way"].startswith("serve")]
    fastest = max(services, key=lambda row: float(row["per_s"]), default=None)
    how = "ResNet-50, from JPEG" + ("" if fastest is None else f"; {fastest['way']}")
    made.append(_goal("images per second", None, fastest, "per_s", how))
    return made


def _rows(record: Row, *parts: str) -> list[Row]:
    there: dict[str, Any] = record.get("parts", {})
    return [row for name in parts for row in there.get(name, {}).get("rows", [])]


def _goal(name: str, bar: float | None, row: Row | None, figure: str, how: str) -> Goal:
    if row is None:
        return Goal(name, bar, None, None, how)
    spread = row["spread"].get(figure) if row["rounds"] > 1 else None
    return Goal(name, bar, row[figure], spread, how)


def _first(rows: Sequence[Row]) -> Row | None:
    return rows[0] if rows else None


def _share(row: Row) -> float:
    return float(row["share"])


def _way(row: Row) -> str:
    items, count = row["call_items"], row["workers"]
    calls = "single-item futures" if items == 1 else f"calls of {items}"
    return f"{count} worker{'s' * (count > 1)}, {calls}"
