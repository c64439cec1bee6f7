"""RayStreamer beside Ray Serve's handle, on one Ray cluster of this machine.

One program measures both in turn, so each quotient is of one cluster and of the same moments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from yardstick.environments import BENCHMARKS, ROOT, environment, python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row, RowOf

__all__ = ["FOLDERS", "SECTIONS"]

_TIMEOUT = 900.0
#: On its path: it has Ray, and not this package, which needs nothing else.
FOLDERS = (BENCHMARKS, ROOT / "example", ROOT)


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    env = environment(PYTHONPATH=os.pathsep.join(map(str, FOLDERS)))
    options = json.dumps({"seconds": scale.seconds})
    command = [python(system.project), "-m", "adapters.ray_cluster", options]
    for line in json_lines(command, _TIMEOUT, env):
        if line["system"] == system.key:
            yield Row(line["point"], line["figures"])
        else:
            yield RowOf(line["point"], line["figures"], line["system"], line["settings"])


SECTIONS = (
    Section(
        "ray",
        "RayStreamer and Ray Serve's handle, on one cluster",
        ("ray-streamer",),
        _measure,
        beside=("ray",),
        quick=(),  # an interpreter with Ray takes a minute to install
        rounds=2,
    ),
)
