"""Models with stages: whether preprocess, forward and postprocess of consecutive batches overlap.

All stages sleep, so they hold no processor. What is missing to the ideal is what the worker and the
scheduler lose between batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from adapters.workloads import BATCH_SIZE
from yardstick.libraries import rows
from yardstick.plan import Scale, Section, Settings, System
from yardstick.record import Row

__all__ = ["SECTIONS"]

#: Callers of each workload in a closed loop: more than a pipeline holds, so that batches follow
#: each other without a gap; and two batches, of which one computes while the other is under way.
_CALLERS = {"even-stages": 8 * BATCH_SIZE, "gpu-stages": 2 * BATCH_SIZE}
#: Seconds for one start of a system and its window.
_TIMEOUT = 90.0


def _measure(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    for workload, callers in _CALLERS.items():
        points = [{"callers": callers}]
        for row in rows(
            system,
            settings,
            _TIMEOUT,
            workload=workload,
            driver="threads",
            points=points,
            seconds=scale.seconds,
        ):
            rate = row.figures["rate"]
            batch = BATCH_SIZE / rate if rate else None
            yield Row({"workload": workload, **row.point}, {"batch": batch, **row.figures})
    for row in rows(system, settings, _TIMEOUT, workload="gpu-stages", driver="alone"):
        yield Row({"workload": "gpu-stages", "callers": 1}, row.figures)


SECTIONS = (
    Section(
        "stages",
        "A model with three stages",
        (
            "threaded", "streamer", "threaded-serial", "streamer-serial",
            "original-threaded", "original-streamer", "batched",
        ),
        _measure,
        quick=("streamer", "streamer-serial"),
        situation="callers",
        rounds=2,
    ),
)  # fmt: skip
