"""The benchmark of GPUs where there is none: what it says, that it runs, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from on_gpu.notes import Batch, activity
from on_gpu.plan import CPU, NEEDS_GPU, PARTS
from on_gpu.served import agree

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / "gpu.py")]
#: What has a GPU hides it, and tests the same.
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

MS = 1_000_000  # ns


@pytest.mark.long
@pytest.mark.timeout(600)  # a dozen processes import torch: two minutes, and more beside others
def test_on_a_cpu_it_runs_to_its_end_and_every_part_is_in_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    ran = subprocess.run(
        [*COMMAND, "--cpu", "--out", str(out)], env=HIDDEN, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    parts = record["parts"]
    assert tuple(parts) == PARTS
    assert not any(part["errors"] for part in parts.values())
    assert parts["memory"]["note"] == parts["devices"]["note"] == NEEDS_GPU
    *windows, processes = parts["workers"]["rows"]
    assert len(windows) == len(CPU.tokens) * len(CPU.calls)
    assert all(row["streamed_per_s"] > 0 and row["batches"] for row in windows)
    assert not processes["torch_in_web_process"]
    assert [image["wrong"] for image in parts["images"]["rows"]] == [0]
    notes = [row["note"] for row in parts["served"]["rows"] if "note" in row]
    # Of each task, and of images with processes that decode them.
    assert sum("8 of 8 answers of serve" in note for note in notes) == len(CPU.tasks) + 1
    assert not any(row["failed"] for row in parts["served"]["rows"] if "note" not in row)
    assert record["goals"] == []
    assert "No figures of a GPU" in ran.stdout


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ({"label": "a", "score": 0.6}, [{"label": "a", "score": 0.61}], True),
        ({"label": "a", "score": 0.6}, [{"label": "b", "score": 0.6}], False),
        ([{"token_str": "a", "score": 0.5}, {}], {"token_str": "a", "score": 0.6}, False),
        ([0.5, -0.1], [0.501, -0.1], True),
        ([0.5, -0.1], [0.5, 0.1], False),
        ([0.5], [0.5, 0.1], False),
    ],
)
def test_answers_are_compared_but_for_rounding(answer: Any, right: Any, expected: bool) -> None:
    assert agree(answer, right) == expected


def batch(entered: int, left: int, size: int = 1) -> Batch:
    return Batch(entered * MS, left * MS, size, 0, 0, 0)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], (0, None, None, None, None)),
        ([[]], (0, None, None, None, 0.0)),
        ([[batch(0, 100)]], (1, 1, None, None, 1.0)),
        ([[batch(-50, 50, 4), batch(60, 90, 2)]], (2, 3, 10, 10, 0.8)),
        ([[batch(0, 50), batch(51, 150)]], (1, 1, None, None, 0.99)),  # the second ended later
        ([[batch(0, 100)], [batch(-9, 0)]], (1, 1, None, None, 0.5)),  # and this one before
        ([[batch(0, 10), batch(11, 20), batch(25, 30)]], (3, 1, 1, 5, 0.24)),
    ],
)
def test_activity_within_a_window(workers: list[list[Batch]], expected: tuple[Any, ...]) -> None:
    names = ("batches", "mean_batch", "gap_p50_ms", "gap_p99_ms", "in_forward")
    assert activity(workers, 0, 100 * MS) == dict(zip(names, expected, strict=True))
