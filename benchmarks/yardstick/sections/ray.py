"""RayStreamer beside Ray Serve's handle, on one Ray cluster of this machine; and its faults.

One program measures both in turn, so each quotient is of one cluster and of the same moments.
Another one has something fail of a cluster of three nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from yardstick.environments import BENCHMARKS, ROOT, environment, python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row, RowOf

__all__ = ["FOLDERS", "SECTIONS"]

_TIMEOUT, _FAULTS_TIMEOUT = 900.0, 2400.0
_FAULTS, _FAULTS_QUICK = 20, 2
#: On its path: it has Ray, and not this package, which needs nothing else.
FOLDERS = (BENCHMARKS, ROOT / "example", ROOT)


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    for line in _lines(system, "ray_cluster", {"seconds": scale.seconds}, _TIMEOUT):
        if line["system"] == system.key:
            yield Row(line["point"], line["figures"])
        else:
            yield RowOf(line["point"], line["figures"], line["system"], line["settings"])


def _ray_faults(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    rounds = _FAULTS_QUICK if scale.is_quick else _FAULTS
    for line in _lines(system, "ray_faults", {"rounds": rounds}, _FAULTS_TIMEOUT):
        yield Row(line["point"], line["figures"])


def _lines(
    system: System, module: str, options: dict[str, Any], timeout: float
) -> Iterator[dict[str, Any]]:
    env = environment(PYTHONPATH=os.pathsep.join(map(str, FOLDERS)))
    command = [python(system.project), "-m", f"adapters.{module}", json.dumps(options)]
    yield from json_lines(command, timeout, env)


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
    Section(
        "ray-faults",
        "A Ray cluster of three nodes, of which something fails",
        ("ray-streamer",),
        _ray_faults,
        quick=(),
        rounds=1,
    ),
)
