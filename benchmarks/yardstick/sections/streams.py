"""Models of steps: what is lost to batches that are refilled at every step, and by whom.

The first table's model sleeps, so it holds no processor. The second one's is a small Llama on the
CPU. Everything of a row is measured in one process after the other, so its ratios are of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row

__all__ = ["SECTIONS"]

_SECONDS, _SECONDS_QUICK = 12.0, 4.0
_TIMEOUT = 400.0


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    options = {"seconds": _SECONDS_QUICK if scale.is_quick else _SECONDS}
    for module in ("streaming", "generating"):
        command = [python(system.project), "-m", f"adapters.{module}", json.dumps(options)]
        for line in json_lines(command, _TIMEOUT):
            yield Row(line["point"], line["figures"])


SECTIONS = (Section("streams", "Models of steps", ("streamer",), _measure, rounds=2),)
