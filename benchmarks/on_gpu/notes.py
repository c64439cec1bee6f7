"""What workers write down of their batches, and what it says of the gaps between them."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from yardstick.stats import percentile

__all__ = ["Batch", "Notes", "activity", "batches_in", "workers_in"]

_ENTRY = struct.Struct("<qqqqqq")


class Batch(NamedTuple):
    """One forward pass.

    Attributes:
        entered, left: when it began and ended on the device, nanoseconds of the monotonic clock,
            which all processes share. If it failed: when it was called, and when it failed.
        size: its items.
        has_run_out: 1 if the device's memory did not suffice.
        allocated, reserved: the most memory that torch has had so far, bytes; 0 without a GPU.
            Asked for when a batch is larger than all before, since it takes longer than the rest.
    """

    entered: int
    left: int
    size: int
    has_run_out: int
    allocated: int
    reserved: int


class Notes:
    """A worker's notes, in two files of its own. A batch costs one small write.

    Args:
        folder: where workers put them.
        about: what the worker says of itself.
    """

    def __init__(self, folder: str, about: Mapping[str, Any]) -> None:
        name = Path(folder) / str(os.getpid())
        name.with_suffix(".json").write_text(json.dumps(dict(about)))
        self._file = os.open(name.with_suffix(".batches"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, batch: Batch) -> None:
        os.write(self._file, _ENTRY.pack(*batch))


def workers_in(folder: Path) -> list[dict[str, Any]]:
    """What the workers say of themselves."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def batches_in(folder: Path) -> list[list[Batch]]:
    """Of each worker, in their order."""
    found = []
    for path in sorted(folder.glob("*.batches")):
        data = path.read_bytes()
        whole = len(data) // _ENTRY.size * _ENTRY.size
        found.append([Batch(*entry) for entry in _ENTRY.iter_unpack(data[:whole])])
    return found


def activity(workers: Sequence[Sequence[Batch]], start: int, stop: int) -> dict[str, Any]:
    """What the workers did between two times: gaps, the share of time in forward passes, sizes.

    A gap is from the end of one forward pass to the beginning of the next one. Of those batches
    that ended within the time.
    """
    gaps: list[float] = []
    sizes: list[int] = []
    inside = 0
    for batches in workers:
        ended = [batch for batch in batches if start < batch.left <= stop]
        sizes += [batch.size for batch in ended]
        gaps += [(b.entered - a.left) / 1e6 for a, b in itertools.pairwise(ended)]
        inside += sum(max(0, min(b.left, stop) - max(b.entered, start)) for b in batches)
    whole = len(workers) * (stop - start)
    return {
        "batches": len(sizes),
        "mean_batch": round(statistics.fmean(sizes), 1) if sizes else None,
        "gap_p50_ms": percentile(gaps, 0.5),
        "gap_p99_ms": percentile(gaps, 0.99),
        "in_forward": round(inside / whole, 4) if whole else None,
    }
