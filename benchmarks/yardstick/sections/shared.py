"""Several processes that share one pool, beside one process, a pool for each, and Redis.

Everything of a row is measured by one program, in turn where moments of the machine count.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from yardstick import on_paper
from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed, json_lines
from yardstick.record import Row
from yardstick.servers import running
from yardstick.service_faults import faults, processor_by_role
from yardstick.systems import SYSTEMS

__all__ = ["SECTIONS"]

_FAULTS, _FAULTS_QUICK = 20, 2
_TIMEOUT = 500.0
_CONNECTIONS = 128
#: Seconds over HTTP, so that counts of a hundredth of a second are no part of the figures.
_HTTP_SECONDS = 4
_SERVICES = {"1 web": "serve", "2 web": "serve-shared"}
_CORES = (8, 32)


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    options: dict[str, Any] = {"seconds": 2 * scale.seconds}
    if scale.is_quick:
        options["only"] = ["alone", "futures", "costs", "memory"]
    yield from _rows_of(system, "sharing", options)
    if not scale.is_quick:
        yield from _over_http()


def _over_http() -> Iterator[Row]:
    """An echo by one web process and by two; on paper, by as many as there are cores for."""
    found: dict[str, dict[str, Any]] = {}
    loads: dict[str, list[dict[str, float]]] = {way: [] for way in _SERVICES}
    for way in (*_SERVICES, *reversed(_SERVICES)):
        with running(SYSTEMS[_SERVICES[way]], "echo", {}) as service:
            service.load(_CONNECTIONS, 1)
            before = processor_by_role(service)
            load = service.load(_CONNECTIONS, _HTTP_SECONDS)
            after = processor_by_role(service)
        if load.errors:
            raise RunFailed(f"{load.errors} requests to {way} processes failed")
        requests = load.rate * _HTTP_SECONDS
        spent = {role: (after[role] - before[role]) / requests for role in after}
        loads[way].append({"rate": load.rate, "all": sum(spent.values()), **spent})
    for way, each in loads.items():
        mean = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
        found[way] = {"rate": mean["rate"], "web": mean["web"], "all": mean["all"]}
        if "pool" in mean:
            found[way]["pool_us"] = 1e6 * mean["pool"]
        found[way]["worker_us"] = 1e6 * mean["worker"]
        yield Row({"question": "http", "way": way}, found[way])
    many = found["2 web"]
    for cores in _CORES:
        figures = on_paper.rates(
            cores,
            web=many["web"],
            pool=many["pool_us"] / 1e6,
            worker=many["worker_us"] / 1e6,
            one=found["1 web"]["web"],
        )
        yield Row({"question": "on paper", "cores": cores}, figures)


def _pool_faults(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    """What is killed of a pool that four processes call."""
    yield from _rows_of(system, "pool_faults", {"faults": _times(scale)})


def _service_faults(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """The same of services over HTTP, as far as they have such processes."""
    for killed in _kinds(system):
        yield faults(system, settings, killed, _times(scale))


def _kinds(system: System) -> Sequence[str]:
    # A service with one web process has nobody who could serve when that is dead.
    return ("worker", "pool", "web") if "web_workers" in system.launch else ("worker", "pool")


def _times(scale: Scale) -> int:
    return _FAULTS_QUICK if scale.is_quick else _FAULTS


def _rows_of(system: System, module: str, options: dict[str, Any]) -> Iterator[Row]:
    command = [python(system.project), "-m", f"adapters.{module}", json.dumps(options)]
    for line in json_lines(command, _TIMEOUT):
        yield Row(line["point"], line["figures"])


SECTIONS = (
    Section("shared", "One pool for several processes", ("streamer",), _measure, rounds=2),
    Section(
        "shared-faults",
        "One pool for several processes, of which something is killed",
        ("streamer",),
        _pool_faults,
        rounds=1,
    ),
    Section(
        "shared-faults-http",
        "Services of several processes, of which one is killed",
        ("serve-shared", "litserve", "mosec", "mlserver"),
        _service_faults,
        quick=("serve-shared", "mosec"),
        situation="load-http",
        rounds=1,
    ),
)
