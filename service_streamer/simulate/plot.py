"""Pictures of what was simulated, as SVG for light and dark pages. Needs ``matplotlib``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..extras import missing

try:
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
except ImportError as error:
    if not (error.name or "").startswith("matplotlib"):
        raise
    text = missing(__name__, error.name, "plot")
    raise ImportError(text, name=error.name) from error

__all__ = ["GREY", "STYLE", "heat_map", "latency_against_load"]

#: Seen as well on white as on black; so are the lines.
GREY = "#808080"
_LINES = (("#2a9fd6", "-"), ("#e8703a", "--"), ("#8f8f8f", ":"), ("#9a6fd0", "-."))

#: From bad to good. All of them light enough for black figures.
_COLOURS = (
    (0.0, "#e2604d"),
    (0.5, "#f0b64c"),
    (0.75, "#e6d96a"),
    (0.85, "#8fcf7a"),
    (1, "#56b88f"),
)
#: What the ends of the colours stand for.
_LEAST, _MOST = 0.8, 1.0

#: For matplotlib's ``rc_context``.
STYLE: Any = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.35,
    "grid.color": GREY,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "service_streamer",  # the same picture, byte for byte, from the same figures
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def latency_against_load(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    load: str,
    most: float | None = None,
) -> None:
    """Draw latency, in milliseconds, against load.

    Args:
        path: of the file.
        curves: by name: pairs of a load and a latency.
        load: what the loads are.
        most: the highest latency that is shown; None shows all.
    """
    with _figure(path, 6.4, 3.6) as figure:
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(curves.items()):
            colour, style = _LINES[number % len(_LINES)]
            axes.plot(*zip(*points, strict=True), style, color=colour, label=name, linewidth=1.8)
        axes.set_xlabel(load)
        axes.set_ylabel("latency, ms")
        axes.set_xlim(left=0)
        axes.set_ylim(0, most)
        axes.grid()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left")


def heat_map(
    path: Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    label: str,
) -> None:
    """Draw a table of shares, green where they are near 1.

    Args:
        path: of the file.
        rows, columns: their names.
        values: by row; a cell without one is not a number.
        label: what the values are.
    """
    colours = LinearSegmentedColormap.from_list("shares", _COLOURS)
    with _figure(path, 2.6 + 0.62 * len(columns), 0.9 + 0.24 * len(rows)) as figure:
        axes = figure.add_subplot()
        axes.imshow(values, cmap=colours, vmin=_LEAST, vmax=_MOST, aspect="auto", alpha=1)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
        axes.set_xlabel(label)
        axes.spines[:].set_visible(False)
        for row, shares in enumerate(values):
            for column, share in enumerate(shares):
                if not math.isnan(share):
                    text = f"{share:.2f}"
                    axes.text(column, row, text, ha="center", va="center", color="#101010", size=8)


@contextlib.contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure, in inches, that is written at the end."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        metadata = {"Date": None, "Creator": None}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)
