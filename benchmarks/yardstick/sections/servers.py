"""Over HTTP: what a service costs one user, what it gives many, and more than it can serve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapters.workloads import capacity, cost, ideal
from yardstick import judging
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row
from yardstick.servers import Load, Running, running

__all__ = ["DEADLINE", "MODEL", "OVERLOAD", "SECTIONS", "calls_of", "checked_calls"]

#: Of each call under overload, seconds from when it was due.
DEADLINE = 1.0
#: What services under an open loop compute.
MODEL = "large-gpu"
#: How each service is told of the deadline, and of how many requests may wait: the same for all
#: that can be told (of Ray Serve 256 more are with the replica). LitServe bounds no queue, the
#: original neither that nor a request's time.
OVERLOAD: Mapping[str, Settings] = {
    "serve": {"max_pending": 512, "timeout": DEADLINE},
    "mosec": {"capacity": 512, "timeout": round(1000 * DEADLINE)},
    "litserve": {"timeout": DEADLINE},
    "ray-http": {"max_queued_requests": 256, "timeout": DEADLINE},
}

_ALL = (
    "serve", "flask-gevent", "original-gevent", "litserve", "mosec", "ray-http",
)  # fmt: skip
_OPEN = ("serve", "original-gevent", "litserve", "mosec", "ray-http")
_QUICK = ("serve", "original-gevent", "mosec")
#: Seconds until what is measured begins: connections are open, and batches have their usual size.
_WARM_UP = 0.5
#: Before all that, for as many seconds so much of the capacity: in their first seconds some start
#: threads and processes, or learn what batches cost. Every system can serve as much.
_START_LOAD, _START_SECONDS = 0.2, 2.0
#: At which load the settings for an open loop are looked for; Ray Serve can do little more.
_SWEPT_LOAD = 0.9
_SWEPT_LOADS = {"ray-http": 0.2}


# -- a closed loop: wrk


def alone(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """One connection: what the service adds to the model's own time."""
    with running(system, "gpu", settings) as service:
        service.load(1, 1)
        load = service.load(1, _whole(scale))
        yield Row({}, {"over": load.mean - cost("gpu", 1), "p50": load.p50, "p99": load.p99})
        _check([load])


def http(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """Throughput against connections."""
    counts = {"gpu": (128,)} if scale.is_quick else {"gpu": (1, 32, 128, 256), "echo": (1, 128)}
    loads = []
    for workload, connections in counts.items():
        with running(system, workload, settings) as service:
            service.load(32, 1)
            for count in connections:
                load = service.load(count, _whole(scale))
                loads.append(load)
                figures: dict[str, Any] = {"rate": load.rate}
                if workload == "gpu":
                    figures["share"] = load.rate / ideal("gpu", count)
                for name in ("p50", "p99", "web", "all", "errors"):
                    figures[name] = getattr(load, name)
                yield Row({"workload": workload, "connections": count}, figures)
    _check(loads)


def _rate_alone(system: System, settings: Settings) -> float:
    with running(system, "gpu", settings) as service:
        service.load(1, 1)
        return _checked(service.load(1, 2)).rate


def _rate_of_many(system: System, settings: Settings) -> float:
    """The geometric mean of two, so that neither few nor many users alone decide."""
    with running(system, "gpu", settings) as service:
        service.load(32, 1)
        return math.sqrt(math.prod(_checked(service.load(n, 2)).rate for n in (32, 128)))


def _whole(scale: Scale) -> int:
    return max(1, round(scale.seconds))


def _checked(load: Load) -> Load:
    _check([load])
    return load


def _check(loads: Sequence[Load]) -> None:
    if errors := sum(load.errors for load in loads):
        raise RunFailed(f"{errors} requests were not answered with 2xx")


# -- an open loop: calls come by the clock


def load(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """Latency against load."""
    loads = (0.5,) if scale.is_quick else (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
    end = _WARM_UP + scale.seconds
    with running(system, MODEL, settings) as service:
        _start(service)
        for share in loads:
            service.settle()
            calls = calls_of(service, rate=share * capacity(MODEL), seconds=end, wait=3.0)
            yield Row({"load": share}, judging.load(calls, _WARM_UP, end))


def overload(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """What is served of more than can be."""
    loads = (2,) if scale.is_quick else (0.5, 1, 1.5, 2)
    # Until then a queue that only grows still serves in time, at twice the capacity.
    first = 2 * DEADLINE
    end = first + 1.5 * scale.seconds
    with running(system, MODEL, settings) as service:
        _start(service)
        for times in loads:
            service.settle()
            rate = times * capacity(MODEL)
            calls = calls_of(service, rate=rate, seconds=end, wait=DEADLINE)
            figures = judging.overload(calls, first, end, DEADLINE, capacity(MODEL))
            yield Row({"load": times}, figures)


def _least_latency(system: System, settings: Settings) -> float:
    """For the sweep: the higher, the sooner most are answered whose calls come by the clock."""
    rate = _SWEPT_LOADS.get(system.key, _SWEPT_LOAD) * capacity(MODEL)
    end = DEADLINE + 2.0
    with running(system, MODEL, settings) as service:
        _start(service)
        service.settle()
        calls = calls_of(service, rate=rate, seconds=end, wait=DEADLINE)
        return -judging.mean_latency(calls, _WARM_UP, end, DEADLINE)


def _start(service: Running) -> None:
    rate = _START_LOAD * capacity(MODEL)
    calls_of(service, rate=rate, seconds=_START_SECONDS, wait=1.0)


def calls_of(service: Running, **options: Any) -> judging.Calls:
    """What became of the calls of one run of the open client; its options are ``Plan``'s.

    Raises:
        RunFailed: an answer did not belong to its call.
    """
    told: dict[str, Any] = {}
    for line in service.open_loop(options["seconds"] + options["wait"] + 30, **options):
        told |= line
    return checked_calls(told)


def checked_calls(told: Mapping[str, Any]) -> judging.Calls:
    """Those of what the open client has printed, all lines in one."""
    if told["wrong"]:
        raise RunFailed(f"{told['wrong']} answers do not belong to their calls")
    return judging.Calls(**told["calls"])


SECTIONS = (
    Section(
        "alone-http",
        "One user over HTTP: time over the model's own",
        _ALL,
        alone,
        quick=_QUICK,
        situation="alone-http",
        sweeps=_rate_alone,
    ),
    Section(
        "http",
        "Throughput over HTTP against connections",
        _ALL,
        http,
        quick=_QUICK,
        situation="http",
        sweeps=_rate_of_many,
        rounds=2,
    ),
    Section(
        "load-http",
        "Latency over HTTP against load",
        _OPEN,
        load,
        quick=_QUICK,
        situation="load-http",
        sweeps=_least_latency,
        rounds=2,
    ),
    Section(
        "overload-http",
        "Goodput over HTTP under overload",
        _OPEN,
        overload,
        quick=("serve", "original-gevent"),
        situation="load-http",
        rounds=2,
        bounds=OVERLOAD,
    ),
)
