"""Pictures of what was simulated, as SVG for light and dark pages. Needs ``matplotlib``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reporting import explain_missing

with explain_missing(__name__, "plot", "matplotlib"):
    import matplotlib
    from matplotlib.figure import Figure

#: Seen as well on white as on black; so are the lines.
GREY = "#808080"
_LINES = (("#2a9fd6", "-"), ("#e8703a", "--"), ("#8f8f8f", ":"), ("#9a6fd0", "-."))

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
    with figure(path, 6.4, 3.6) as drawn:
        axes = drawn.add_subplot()
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


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure, in inches, that is written at the end."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        metadata = {"Date": None, "Creator": None}
        drawn.savefig(path, format="svg", transparent=True, metadata=metadata)
