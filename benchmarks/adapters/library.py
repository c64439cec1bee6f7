"""Measures one system within this process: ``python -m adapters.library JSON``; a row a line.

The JSON has "adapter" and "settings" (see ``adapter.load``), "workload", "workers" (1), "driver"
(of ``drivers.DRIVERS``), and what that takes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from typing import Any, cast

from adapters.adapter import Adapter, load
from adapters.drivers import DRIVERS

__all__ = ["main"]


def main(spec: dict[str, Any]) -> None:
    """Print rows as they are measured, and say so at the end."""
    start = functools.partial(_start, spec)
    for point, figures in DRIVERS[spec["driver"]](start, spec):
        _say({"point": point, "figures": figures})
    _say({"ended": True})


def _start(spec: dict[str, Any]) -> Adapter:
    system = load(
        spec["adapter"], spec["workload"], spec.get("workers", 1), spec.get("settings", {})
    )
    if spec["driver"] not in system.drivers:
        raise ValueError(f"{spec['adapter']} cannot be measured with {spec['driver']}")
    return cast("Adapter", system)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for threads that wait for answers
    os._exit(0)
