"""The original's own tables: as it has published them, and measured anew. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from adapters.workloads import capacity
from yardstick.figures import FIGURES, by_round
from yardstick.machine import in_words
from yardstick.published import PUBLISHED, PUBLISHED_HARDWARE, PUBLISHED_LATENCY
from yardstick.record import Record
from yardstick.tables import cell, failed, made, markdown

__all__ = ["original"]

#: The rows, by the name of this project's system; the original's is put behind a prefix.
_MODES = {
    "by-hand": "batches of 64 by hand",
    "naive": "Naive",
    "threaded": "ThreadedStreamer",
    "streamer": "Streamer",
    "redis": "RedisStreamer",
}
_SIMULATED = "titan-xp"
_WORKLOADS = {
    _SIMULATED: "A device that sleeps for as long as a Titan Xp computed, going by those figures",
    "infilling": "The shipped text infilling model, computed on these cores",
}


def original(record: Record, section: str) -> str:
    """A table for each workload; beside the simulated device stands what was published."""
    workloads = dict.fromkeys(point["workload"] for point in record.points(section))
    tables = [_table(record, section, workload) for workload in workloads]
    return "\n\n".join(filter(None, [*tables, failed(record, section), made(record, section)]))


def _table(record: Record, section: str, workload: str) -> str:
    points = [each for each in record.points(section) if each["workload"] == workload]
    points.sort(key=lambda point: point.get("workers", 1))
    is_published = workload == _SIMULATED
    figures = ["rate"]
    if any(_rounds(record, section, key, "latency", {}) for key in record.systems(section)):
        figures.append("latency")
    head = ["", "workers"]
    for figure in figures:
        head += _columns(FIGURES[figure].title, is_published=is_published)
    if is_published:
        head += _columns("share of ideal", is_published=True)
    rows = [
        _row(record, section, mode, point, figures, is_published=is_published)
        for point in points
        for mode in _MODES
        if _is_asked(record, section, mode, point)
    ]
    caption = f"**{_WORKLOADS.get(workload, workload)}.**"
    if is_published:
        caption += f" Published: {PUBLISHED_HARDWARE}."
    return f"{caption} Here: {in_words(record.run_of(section)['machine'])}.\n\n" + markdown(
        head, rows
    )


def _columns(name: str, *, is_published: bool) -> list[str]:
    first, *others = [*(["published"] if is_published else []), "original, here", "this, here"]
    return [f"{name}: {first}", *others]


def _row(
    record: Record,
    section: str,
    mode: str,
    point: Mapping[str, Any],
    figures: list[str],
    *,
    is_published: bool,
) -> list[str]:
    workers = point.get("workers", 1)
    both = ["" if mode == "by-hand" else f"original-{mode}", mode]
    cells = [_MODES[mode], str(workers)]
    published = PUBLISHED.get(section, {}).get(workers, {}).get(mode)
    for figure in figures:
        if is_published:
            cells.append(_published(section, workers, mode, figure))
        cells += [cell(record, section, key, figure, point) if key else "" for key in both]
    if is_published:
        # Of batches of one where nobody batches; of full ones on each worker otherwise.
        ideal = capacity(_SIMULATED, 1) if mode == "naive" else workers * capacity(_SIMULATED)
        cells.append(f"{published / ideal:.3f}" if published else "-")
        for key in both:
            rates = _rounds(record, section, key, "rate", point)
            cells.append(f"{statistics.median(rates) / ideal:.3f}" if rates else "-")
    return cells


def _is_asked(record: Record, section: str, mode: str, point: Mapping[str, Any]) -> bool:
    """Whether it was measured at a point, or at least was to be."""
    keys = {mode, f"original-{mode}"}
    broken = {failure.system for failure in record.failures_of(section)}
    if mode in ("by-hand", "naive", "threaded") and point.get("workers", 1) > 1:
        broken = set()  # of one worker only
    return bool(keys & broken) or any(point in record.points(section, key) for key in keys)


def _rounds(
    record: Record, section: str, system: str, figure: str, point: Mapping[str, Any]
) -> list[float]:
    return list(by_round(record, section, system, figure, point).values())


def _published(section: str, workers: int, mode: str, figure: str) -> str:
    table = {"rate": PUBLISHED, "latency": PUBLISHED_LATENCY}[figure]
    value = table.get(section, {}).get(workers, {}).get(mode)
    if value is None:
        return "-"
    return f"{value * FIGURES[figure].scale:,.0f}" if figure == "latency" else f"{value:,.2f}"
