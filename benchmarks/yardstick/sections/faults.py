"""What a killed worker costs: those who are waiting, and how long until all is as before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from adapters.workloads import capacity
from yardstick import judging
from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row
from yardstick.sections.servers import MODEL, checked_calls
from yardstick.servers import running

__all__ = ["SECTIONS"]

_WORKERS = 2
#: Of what both workers can compute: the one that is left can compute it all, and a backlog too.
#: Ray Serve, which serves a few hundred calls per second here, is asked for fewer.
_LOAD = 0.4
_LOADS = {"ray-http": 0.08}
#: Seconds for answers after the load.
_WAIT = 3.0


def killed(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """SIGKILL to one of two workers, under a load that the other can serve too."""
    first, kill, end = (0.5, 1.5, 4.0) if scale.is_quick else (1.0, 3.0, 9.0)
    told: dict[str, Any] = {}
    killed_at = 0.0
    with running(system, MODEL, settings, _WORKERS) as service:
        rate = _LOADS.get(system.key, _LOAD) * _WORKERS * capacity(MODEL)
        timeout = end + _WAIT + 30
        for line in service.open_loop(timeout, rate=rate, seconds=end, wait=_WAIT):
            told |= line
            if "started" in line:
                started: float = line["started"]
                time.sleep(max(0.0, started + kill - time.monotonic()))
                killed_at = time.monotonic() - started
                service.kill_worker()
        calls = checked_calls(told)
    yield Row({}, judging.killed(calls, first, killed_at, end))


def recovery(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:  # noqa: ARG001
    """By whom the seconds are spent from SIGKILL of the only worker until the next result.

    *noticing*, until a new process is started; *spawn*, until that has Python running and asks for
    the model's module; *import* of that and of what it needs; *init*, the model's ``init_model``;
    *first_batch*, until the caller has its result.
    """
    kills = {"gpu": 2} if scale.is_quick else {"gpu": 5, "infilling": 3}
    for workload, count in kills.items():
        command = [python(system.project), "-m", "adapters.killing", workload, str(count)]
        found = list(json_lines(command, timeout=60 + 10 * count))
        figures = {phase: statistics.median(each[phase] for each in found) for phase in found[0]}
        yield Row({"workload": workload}, figures)


SECTIONS = (
    Section(
        "killed",
        "One of two workers is killed (Ray Serve: a fifth of the load)",
        ("serve", "original-gevent", "litserve", "mosec", "ray-http"),
        killed,
        quick=("serve", "mosec"),
        situation="load-http",
        rounds=2,
    ),
    Section(
        "recovery",
        "From a worker's death to the next result",
        ("streamer",),
        recovery,
        rounds=2,
    ),
)
