"""Tables of a record, and what became of the goals. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from on_gpu.running import Row

__all__ = ["Goal", "goals", "goals_table", "part_tables", "table"]

#: What the original's README gives for its future interface: four workers, each on a GPU, 2019.
ORIGINAL_PER_S = 1400
_ORIGINAL = "four Titan Xp, the original's README of 2019"

_SIZE, _TOKENS = 64, 16
_ONE_WORKER, _SEVERAL = 0.95, 2.0


class Goal(NamedTuple):
    """Attributes: ``figure`` is None where it was not measured, ``bar`` where there is none."""

    name: str
    bar: float | None
    figure: float | None
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
    measured = _medians(record)
    found = [r for r in measured if (r["batch_size"], r["tokens"]) == (_SIZE, _TOKENS)]
    at = f"batches of {_SIZE} x {_TOKENS} tokens"
    result = []
    for items, way in ((1, "single-item futures"), (64, "calls of 64")):
        shares = [r for r in found if r["workers"] == 1 and r["call_items"] == items]
        share = shares[0]["share"] if shares else None
        result.append(Goal(f"one worker / hand-batched, {way}", _ONE_WORKER, share, at))
    several = max((r for r in found if r["workers"] > 1), key=_share, default=None)
    how = at if several is None else f"{at}; {_way(several)}"
    share = None if several is None else several["share"]
    result.append(Goal("several workers on one device / hand-batched", _SEVERAL, share, how))
    most = max(found, key=lambda row: float(row["streamed_per_s"]), default=None)
    how = at if most is None else f"{at}; {_way(most)}"
    rate = None if most is None else most["streamed_per_s"]
    result.append(Goal("sentences per second", None, rate, how))
    times = None if rate is None else rate / ORIGINAL_PER_S
    beside = f"times the original's {ORIGINAL_PER_S:,} on {_ORIGINAL}"
    result.append(Goal("the same beside the original", None, times, beside))
    return result


def goals_table(found: Sequence[Goal]) -> str:
    return "### Goals\n\n" + table(
        ("goal", "bar", "figure", "", "how"),
        [(goal.name, goal.bar, goal.figure, goal.verdict, goal.how) for goal in found],
    )


def part_tables(name: str, part: Row) -> str:
    """All that is to be said of one part, errors too."""
    made = [f"### {_TITLES[name]}"]
    if part.get("note"):
        made.append(f"{part['note']}.")
    rows = part.get("rows", [])
    if rows:
        made += {"hand": _hand, "memory": _exhausted, "images": _images}.get(name, _streamed)(rows)
    for error in part.get("errors", []):
        made.append(f"FAILED: {error['title']}\n\n```\n{error['error'].strip()}\n```")
    return "\n\n".join(made)


_TITLES = {
    "hand": "Batched by hand, in one process",
    "workers": "A Streamer with several workers on one device",
    "memory": "Out of memory",
    "devices": "Several devices",
    "images": "Images of 602 kB",
    "sizes": "Batch sizes",
}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown; what is None or missing is a dash."""
    lines = [head, ["---"] * len(head), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _columns(rows: Iterable[Row], columns: dict[str, str]) -> str:
    return table(tuple(columns), [[row.get(key) for key in columns.values()] for row in rows])


def _hand(rows: list[Row]) -> list[str]:
    return [
        _columns(
            rows,
            {
                "tokens": "tokens",
                "batch": "batch_size",
                "sentences/s": "sentences_per_s",
                "ms per batch": "batch_ms",
                "forward pass, ms": "forward_ms",
                "device alone, ms": "device_ms",
            },
        )
    ]


def _streamed(rows: list[Row]) -> list[str]:
    windows = [row for row in rows if row["kind"] == "window"]
    made = []
    if windows:
        columns = {
            "tokens": "tokens",
            "batch": "batch_size",
            "workers": "workers",
            "calls of": "call_items",
            "by hand/s": "by_hand_per_s",
            "streamed/s": "streamed_per_s",
            "share": "share",
            "rounds": "rounds",
            "mean batch": "mean_batch",
            "device busy, %": "utilisation",
            "time in predict": "in_predict",
            "gap p50, ms": "gap_p50_ms",
            "gap p99, ms": "gap_p99_ms",
        }
        made.append(_columns(_grouped(windows), columns))
    processes = [row for row in rows if row["kind"] == "processes"]
    if processes:
        columns = {
            "workers": "workers",
            "batch": "batch_size",
            "start, s": "start_s",
            "MiB per process, loaded": "loaded_mb",
            "at the end": "used_mb",
            "torch's most, allocated": "allocated_mb",
            "reserved": "reserved_mb",
        }
        made.append(_columns(processes, columns))
        made.append(_placement(processes))
    return made


def _placement(processes: list[Row]) -> str:
    """Which worker was where, once for each device."""
    seen: dict[tuple[str, ...], int] = {}
    for worker in (worker for row in processes for worker in row["told"]):
        named = ("gpu_id", "visible", "device", "uuid", "attention")
        place = tuple(str(worker.get(key)) for key in named)
        seen[place] = seen.get(place, 0) + 1
    head = ("cuda_devices", "CUDA_VISIBLE_DEVICES", "device", "uuid", "attention", "workers")
    return table(head, [(*place, count) for place, count in seen.items()])


def _exhausted(rows: list[Row]) -> list[str]:
    columns = {
        "way": "way",
        "calls": "calls",
        "answered": "answered",
        "right": "right",
        "the same word": "same",
        "seconds": "seconds",
        "runs": "runs",
        "ran out": "ran_out",
        "ceiling learned": "ceiling",
        "afterwards/s": "afterwards_per_s",
        "ran out afterwards": "afterwards_ran_out",
        "restarts": "restarts",
    }
    sizes = [f"Sizes of the first runs, {r['way']}, - ran out: {r['sizes']}." for r in rows]
    errors = [f"{row['way']}: {error}" for row in rows for error in row["errors"]]
    return [_columns(rows, columns), *sizes, *errors]


def _images(rows: list[Row]) -> list[str]:
    columns = {
        "model": "model",
        "images/s": "images_per_s",
        "GB/s": "gb_per_s",
        "checked": "checked",
        "wrong": "wrong",
        "pinned": "pinned",
        "results arrive on": "arrived_on",
        "CUDA in the web process": "web_process_has_cuda",
    }
    return [_columns(rows, columns)]


def _medians(record: Row) -> list[Row]:
    parts = record.get("parts", {})
    rows = [row for name in ("workers", "sizes") for row in parts.get(name, {}).get("rows", [])]
    return _grouped([row for row in rows if row["kind"] == "window"])


_KEYS = ("tokens", "batch_size", "workers", "call_items")


def _grouped(windows: list[Row]) -> list[Row]:
    """One row for all rounds of the same: the median of each figure that was known."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in windows:
        groups.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    return [
        {
            **{
                name: statistics.median(known)
                for name in group[0]
                if name not in ("kind", "round")
                and (known := [row[name] for row in group if row[name] is not None])
            },
            **dict(zip(_KEYS, key, strict=True)),
            "rounds": len(group),
        }
        for key, group in groups.items()
    ]


def _share(row: Row) -> float:
    return float(row["share"])


def _way(row: Row) -> str:
    items, count = row["call_items"], row["workers"]
    calls = "single-item futures" if items == 1 else f"calls of {items}"
    return f"{count} worker{'s' * (count > 1)}, {calls}"
