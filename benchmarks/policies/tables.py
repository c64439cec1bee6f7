"""The tables of figures, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["render", "share"]

_OURS = ("ours", "bound")


def share(result: dict[str, Any]) -> tuple[float, str]:
    """Ours as a share of the best published policy, and which that is; above 1 ours is better.

    Not a number where no published policy reaches anything.
    """
    found = {name: each["value"] for name, each in result["policies"].items()}
    ours = found["ours"]
    others = {name: value for name, value in found.items() if name not in _OURS}
    if result["measure"] == "goodput":
        best = max(others, key=lambda name: others[name])
        return (ours / others[best] if others[best] else math.nan), best
    best = min(others, key=lambda name: others[name])
    return others[best] / ours, best


def render(results: Sequence[dict[str, Any]]) -> str:
    """All of them."""
    lines: list[str] = []
    for measure, title, level in (
        ("goodput", "Goodput: the highest rate of which 99 % are in time", "deadline {:g} ×"),
        ("latency", "Mean latency", "load {:g}"),
    ):
        chosen = [result for result in results if result["measure"] == measure]
        if chosen:
            lines += ["", f"**{title}**, ours as a share of the best published policy", ""]
            lines += _grid(chosen, level, lambda result: _cell(*share(result)))
    bounded = [result for result in results if "bound" in result["policies"]]
    if bounded:
        lines += ["", "**Mean latency**: the least that is possible, as a share of ours", ""]
        lines += _grid(bounded, "load {:g}", _bound)
    return "\n".join([*lines, "", *_summary(results)]).strip()


def _grid(results: Sequence[dict[str, Any]], level: str, cell: Any) -> list[str]:
    columns = list(dict.fromkeys(result["level"] for result in results))
    rows = list(
        dict.fromkeys((each["arrivals"], each["model"], each["workers"]) for each in results)
    )
    found = {
        (each["arrivals"], each["model"], each["workers"], each["level"]): cell(each)
        for each in results
    }
    lines = [
        "| arrivals | model | workers | " + " | ".join(map(level.format, columns)) + " |",
        "|---|---|---:|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [found.get((*row, column), "") for column in columns]
        lines.append(f"| {row[0]} | {row[1]} | {row[2]} | " + " | ".join(cells) + " |")
    return lines


def _cell(value: float, best: str) -> str:
    return "none" if math.isnan(value) else f"{value:.3f} <sub>{best}</sub>"


def _bound(result: dict[str, Any]) -> str:
    found = result["policies"]
    return f"{found['bound']['value'] / found['ours']['value']:.3f}"


def _summary(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for measure in ("goodput", "latency"):
        values = [share(result)[0] for result in results if result["measure"] == measure]
        values = sorted(value for value in values if not math.isnan(value))
        if values:
            reached = sum(value >= 0.97 for value in values)
            lines.append(
                f"{measure}: {reached} of {len(values)} cells at 0.97 or more; least "
                f"{values[0]:.3f}, median {values[len(values) // 2]:.3f}, most {values[-1]:.3f}."
            )
    return lines
