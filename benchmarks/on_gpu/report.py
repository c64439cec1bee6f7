"""Tables of a record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from on_gpu.goals import SERVED, WINDOWS, Goal
from on_gpu.running import Row
from on_gpu.turns import grouped

__all__ = ["goals_table", "part_tables", "table"]


def goals_table(found: Sequence[Goal]) -> str:
    return "### Goals\n\n" + table(
        ("goal", "bar", "figure", "", "how"),
        [
            (goal.name, goal.bar, _spread(goal.figure, goal.spread), goal.verdict, goal.how)
            for goal in found
        ],
    )


def part_tables(name: str, part: Row) -> str:
    """All that is to be said of one part, errors too."""
    made = [f"### {_TITLES[name]}"]
    if part.get("note"):
        made.append(f"{part['note']}.")
    rows = part.get("rows", [])
    if rows:
        tables = {"hand": _hand, "memory": _exhausted, "images": _images, "served": _served}
        made += tables.get(name, _streamed)(rows)
    for error in part.get("errors", []):
        made.append(f"FAILED: {error['title']}\n\n```\n{error['error'].strip()}\n```")
    return "\n\n".join(made)


_TITLES = {
    "hand": "Batched by hand, in one process",
    "workers": "A Streamer with several workers on one device",
    "served": "A service over HTTP, and others on the same device",
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


def _columns(rows: Iterable[Row], columns: dict[str, str], spread: Sequence[str] = ()) -> str:
    """Args: columns: where each comes from; spread: of which of those the spread is shown."""

    def cell(row: Row, key: str) -> Any:
        if key in spread and row["rounds"] > 1:
            return _spread(row.get(key), row["spread"].get(key))
        return row.get(key)

    return table(tuple(columns), [[cell(row, key) for key in columns.values()] for row in rows])


def _spread(value: float | None, ends: tuple[float, float] | None) -> str:
    """A median, with the lowest and the highest round."""
    if value is None or ends is None:
        return _text(value)
    return f"{_text(float(value))} ({_text(float(ends[0]))} to {_text(float(ends[1]))})"


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


#: What NVML says.
_DEVICE = {
    "NVML load, %": "utilisation",
    "SM clock, MHz": "sm_mhz",
    "W": "watts",
    "slowed by": "slowed_by",
}


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
            "share of device time": "device_share",
            "in forward": "in_forward",
            "gap p50, ms": "gap_p50_ms",
            "gap p99, ms": "gap_p99_ms",
            **_DEVICE,
        }
        shown = ("streamed_per_s", "share", "device_share")
        made.append(_columns(grouped(windows, WINDOWS), columns, shown))
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


def _served(rows: list[Row]) -> list[str]:
    columns = {
        "workload": "workload",
        "tokens": "tokens",
        "way": "way",
        "items/s": "per_s",
        "share of device time": "device_share",
        "of pipeline": "of_pipeline",
        "mean batch": "mean_batch",
        "processor, ms per 64": "processor_ms",
        "p50, ms": "p50_ms",
        "p99, ms": "p99_ms",
        "failed": "failed",
        "rounds": "rounds",
        **_DEVICE,
    }
    notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    measured = grouped([row for row in rows if not row.get("note")], SERVED)
    return [_columns(measured, columns, ("per_s", "device_share", "of_pipeline")), *notes]


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
        "results arrive on": "arrived_on",
        "CUDA in the web process": "web_process_has_cuda",
    }
    return [_columns(rows, columns)]
