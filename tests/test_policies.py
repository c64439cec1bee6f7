"""The figures of published policies repeat, and the page has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from policies.__main__ import cells
from policies.published import FixedWait
from policies.service import Job, serve
from policies.tables import render

DEADLINE = 10.0


def seconds(size: int, longest: float) -> float:
    """A batch of n takes 2 + n, whatever its lengths."""
    del longest
    return 2.0 + size


def jobs(times: Sequence[float], lengths: Sequence[float] = ()) -> list[Job]:
    return [
        Job(number, at, at + DEADLINE, lengths[number] if lengths else 1.0)
        for number, at in enumerate(times)
    ]


def test_what_is_dropped_or_late_is_missed() -> None:
    outcome = serve(FixedWait(1, seconds, 1, 0.0), jobs([0.0] * 5), seconds)
    assert (outcome.jobs, outcome.missed, outcome.mean) == (5, 2, 6.0)  # at 3, 6, 9, and too late
    outcome = serve(FixedWait(1, seconds, 1, 0.0), jobs([0.0] * 5), seconds, warm_up=2)
    assert (outcome.jobs, outcome.missed) == (3, 2)
    many = jobs([0.1 * number for number in range(1000)])
    outcome = serve(FixedWait(1, seconds, 1, 0.0), many, seconds, most_missed=5)
    assert not outcome.is_complete
    assert outcome.missed < 20  # it was given up


def test_the_page_has_the_tables_of_its_figures() -> None:
    folder = Path(__file__).parent.parent / "docs" / "benchmarks"
    results = json.loads((folder / "policies.json").read_text())
    assert render(results) in (folder / "policies.md").read_text()
    assert len(results) == len(list(cells()))
