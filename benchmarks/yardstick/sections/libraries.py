"""What is asked within one's own process: threads, tasks and futures, without HTTP.

Ray Serve is called through a handle, which is far from a function call: it is asked less, and not
at the points where it takes long; which ones, the sections say in their titles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from yardstick.libraries import rows
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row

__all__ = ["SECTIONS"]

#: To start a system and end it, seconds, beside its windows; Ray's takes the longest.
_START = 90.0
_CALLERS = (1, 2, 8, 32, 64, 128, 256, 512)
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
_OVERLOADS = (0.5, 1.0, 1.5, 2.0, 4.0)
_WORKERS = (1, 2, 4, 8)
_CALLERS_OF_A_WORKER = 128
_DEADLINE = 1.0
#: By system, its bound on what waits, about a tenth of a second's worth of calls. The others have
#: none.
_BOUNDS: Mapping[str, Settings] = {
    "streamer": {"max_pending": 512},
    "ray": {"max_ongoing_requests": 128, "max_queued_requests": 384},
}
#: Futures of systems that need longer for each: so many are enough to know.
_FEWER = {"ray": 2_000, "original-redis": 5_000}

_BOTH = ("threaded", "streamer")
#: With the model in a thread, and in a process.
_BARE = ("bare-locks", "bare-locks-process")
_OURS = (*_BOTH, "redis")
_ORIGINAL = ("original-threaded", "original-streamer", "original-redis")


def _alone(system: System, settings: Settings, _: Scale) -> Iterator[Row]:
    return rows(system, settings, _START, workload="gpu", driver="alone")


def _callers(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    counts: Sequence[int] = (1, 64, 256) if scale.is_quick else _CALLERS
    if system.project == "ray":
        counts = tuple(count for count in counts if count <= 128)
    return _closed(system, settings, scale.seconds / 2, "gpu", counts)


def _asyncio(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    counts = (64,) if scale.is_quick else (8, 64, 256)
    return _closed(system, settings, scale.seconds / 2, "gpu", counts, driver="asyncio")


def _echo(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    return _closed(system, settings, scale.seconds, "echo", (64,))


def _closed(
    system: System,
    settings: Settings,
    seconds: float,
    workload: str,
    counts: Sequence[int],
    driver: str = "threads",
) -> Iterator[Row]:
    return rows(
        system,
        settings,
        _START + len(counts) * (seconds + 5),
        workload=workload,
        driver=driver,
        points=[{"callers": count} for count in counts],
        seconds=seconds,
    )


def _futures(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    count = 5_000 if scale.is_quick else 20_000
    count = min(count, _FEWER.get(system.key, count))
    return rows(system, settings, _START, workload="echo", driver="futures", count=count)


def _load(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    loads: Sequence[float] = (0.5, 0.9) if scale.is_quick else _LOADS
    if system.project == "ray":
        loads = loads[:2]  # from there on all that it shows is that it cannot
    return _open(system, settings, scale.seconds, loads, warm_up=0.5, deadline=None)


def _overload(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    loads: Sequence[float] = (2.0,) if scale.is_quick else _OVERLOADS
    if system.project == "ray":
        loads = (0.5, 1.0)
    # A queue that only grows still serves calls in time until then, at twice the capacity.
    return _open(system, settings, scale.seconds, loads, 2 * _DEADLINE, _DEADLINE)


def _open(
    system: System,
    settings: Settings,
    seconds: float,
    loads: Sequence[float],
    warm_up: float,
    deadline: float | None,
) -> Iterator[Row]:
    return rows(
        system,
        settings,
        _START + len(loads) * (warm_up + seconds + 20),
        workload="gpu",
        driver="open-loop",
        points=[{"load": load} for load in loads],
        seconds=seconds,
        warm_up=warm_up,
        deadline=deadline,
    )


def _workers(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    counts: Sequence[int] = (2,) if scale.is_quick else _WORKERS
    if system.project == "ray":
        counts = counts[:2]
    failures = []
    for count in counts:
        try:
            yield from rows(
                system,
                settings,
                _START + scale.seconds,
                workload="large-gpu",
                workers=count,
                driver="threads",
                points=[{"workers": count}],
                callers=count * _CALLERS_OF_A_WORKER,
                seconds=scale.seconds,
            )
        except RunFailed as error:  # each count is a start of its own
            failures.append(f"{count} workers: {error}")
    if failures:
        raise RunFailed("\n".join(failures))


def _least_over(system: System, settings: Settings) -> float:
    """For the sweep: the higher, the sooner a lone caller has its answer."""
    (row,) = rows(system, settings, _START, workload="gpu", driver="alone")
    return -float(row.figures["over"])


def _mean_rate(system: System, settings: Settings) -> float:
    """For the sweep: few callers and many count alike."""
    measured = _closed(system, settings, 1.0, "gpu", (8, 32, 128))
    rates: list[Any] = [row.figures["rate"] for row in measured]
    if not all(rates):
        raise RunFailed("nothing was answered")
    return math.exp(sum(map(math.log, rates)) / len(rates))


_QUICK = ("streamer", "original-streamer")

SECTIONS = (
    Section(
        "alone",
        "What a lone caller waits beside the model",
        (*_OURS, *_ORIGINAL, "batched", "ray", "bare-pipe"),
        _alone,
        quick=("threaded", "streamer", "original-streamer", "batched", "bare-pipe"),
        situation="alone",
        sweeps=_least_over,
    ),
    Section(
        "callers",
        "Threads that call again and again (Ray Serve: up to 128)",
        (*_OURS, *_ORIGINAL, "batched", "ray", *_BARE),
        _callers,
        quick=("threaded", "streamer", "original-streamer", "batched", *_BARE),
        situation="callers",
        rounds=2,
        sweeps=_mean_rate,
    ),
    Section(
        "asyncio",
        "Tasks of one event loop that call again and again",
        ("streamer", "batched", "ray"),
        _asyncio,
        quick=("streamer", "batched"),
        situation="callers",
    ),
    Section(
        "futures",
        "One thread submits 20 000 calls (Ray Serve 2 000, original over Redis 5 000), then waits",
        (*_OURS, *_ORIGINAL, "ray"),
        _futures,
        quick=_QUICK,
        situation="callers",
    ),
    Section(
        "echo",
        "A model that costs nothing: what the middleware can do at most",
        (*_BOTH, *_ORIGINAL[:2], "batched", "ray", *_BARE),
        _echo,
        quick=(*_QUICK, *_BARE),
        situation="callers",
        rounds=2,
    ),
    Section(
        "load",
        "Latency against load (Ray Serve: up to 0.3)",
        ("threaded", "streamer", "original-streamer", "batched", "ray"),
        _load,
        quick=_QUICK,
        situation="callers",
        rounds=2,
    ),
    Section(
        "overload",
        "Goodput against load, answers within a second (Ray Serve: two loads)",
        ("streamer", "original-streamer", "batched", "ray"),
        _overload,
        quick=_QUICK,
        situation="callers",
        rounds=2,
        bounds=_BOUNDS,
    ),
    Section(
        "workers",
        "Worker processes of one streamer (Ray Serve: 1 and 2)",
        ("streamer", "redis", "original-streamer", "original-redis", "ray"),
        _workers,
        quick=_QUICK,
        situation="callers",
        rounds=2,
    ),
)
