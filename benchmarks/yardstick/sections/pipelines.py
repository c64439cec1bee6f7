"""What a worker spends of the processor around the forward pass of a pipeline on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator

from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row

__all__ = ["SECTIONS"]

#: Batches of each task.
_ROUNDS, _ROUNDS_QUICK = 50, 10
_TIMEOUT = 180.0


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    options = {"rounds": _ROUNDS_QUICK if scale.is_quick else _ROUNDS, "pipeline": True}
    command = [python(system.project), "-m", "adapters.pipeline_cost", json.dumps(options)]
    for line in json_lines(command, _TIMEOUT):
        figures = {name.removesuffix("_ms"): ms / 1e3 for name, ms in line["figures"].items()}
        yield Row(line["point"], figures)


SECTIONS = (
    Section(
        "pipelines",
        "Processor time of text pipelines besides the forward pass",
        ("streamer",),
        _measure,
        rounds=2,
    ),
)
