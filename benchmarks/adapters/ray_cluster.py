"""RayStreamer and Ray Serve's handle, in turn, on one Ray cluster of this machine.

``python -m adapters.ray_cluster '{"seconds": 3}'``, with an interpreter that has ``ray[serve]`` and
finds this package, prints one row for each system and question:

- ``alone``: what a lone caller waits beside the model, which is called directly in turn with both.
- ``callers``: 128 callers in a closed loop, threads and tasks of one event loop.
- ``workers``: two workers beside one, each with 128 callers of its own.
- ``arrays``: 602 kB, 16 callers.
- ``autoscaling``: RayStreamer with as many workers as are needed, when the load rises and falls.
- ``simulated``: the same in simulated time, with workers that take longer to start.

RayStreamer runs at its defaults. Ray Serve's settings are looked for in the same run, before each
question: its rows are of the best, and name it. "only" names questions, and "trials" is how many of
the settings are tried.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adapters import closed_loop, open_loop
from adapters.adapter import Adapter
from adapters.ray_adapter import Handle, cluster
from adapters.service_streamer_adapter import Ours
from adapters.simulated_step import MODELS, stepped
from adapters.workloads import (
    WORKLOADS,
    capacity,
    ideal,
    is_answer,
    items,
)
from yardstick import judging

OURS, HANDLE = "ray-streamer", "ray"
#: Ray starts on so many; the workers of both ask for none, or the second one would have no room.
CORES = 2
CALLERS, ARRAY_CALLERS = 128, 16
#: Of a lone caller: runs of each system, the calls of a run, and how many of them come too early.
RUNS, CALLS, EARLY = 6, 40, 5
#: Before a window, seconds.
WARM_UP = 0.5
#: Of each of Ray Serve's settings, when the best is looked for.
TRIAL_SECONDS, TRIAL_CALLS = 1.0, 40

#: Of autoscaling: multiples of what one worker computes, each for so many seconds. The last is
#: longer than the least time after which workers are ended.
STEP_MODEL, MOST_WORKERS = "titan-xp", 6
STEP = ((0.2, 5.0), (3.0, 30.0), (0.2, 90.0))
#: After the rise, until workers were started, had loaded, and had computed what had gathered.
SETTLED = 15.0
#: How often the number of workers is looked at, seconds.
LOOK = 0.1

#: What Ray Serve is tried with: batches that wait and such that do not, replicas that compute in
#: their event loop or beside it, calls that wait at the replica or at the caller.
SETTINGS = tuple(
    {"batch_wait_timeout_s": wait, "in_thread": in_thread, "max_ongoing_requests": ongoing}
    for wait, in_thread, ongoing in (
        (0.0, False, 10_000),
        (0.0, False, 256),
        (0.001, False, 10_000),
        (0.01, False, 256),
        (0.01, True, 10_000),
    )
)

Settings = Mapping[str, Any]
Rows = Iterator[dict[str, Any]]


def row(
    system: str, figures: Mapping[str, Any], settings: Settings | None = None, **point: Any
) -> dict[str, Any]:
    return {"system": system, "point": point, "figures": figures, "settings": settings or {}}


def ours(workload: str, workers: int = 1, **options: Any) -> Ours:
    return Ours(workload, workers, {"mode": "ray", **options})


def best(
    workload: str, score: Callable[[Adapter], float], settings: Sequence[Settings], workers: int = 1
) -> Settings:
    """The settings with the highest score."""
    if len(settings) == 1:
        return settings[0]

    # Each is deployed in place of the last one.
    return max(settings, key=lambda each: score(Handle(workload, workers, each)))


def in_turn(
    systems: Mapping[str, Adapter], measure: Callable[[Adapter], dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """The means of all figures; there and back, so that a slower machine is so for all alike."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for name in (*systems, *reversed(systems)):
        found[name].append(measure(systems[name]))
    return {
        name: {figure: statistics.fmean(one[figure] for one in each) for figure in each[0]}
        for name, each in found.items()
    }


# -- questions


def alone(settings: Sequence[Settings]) -> Rows:
    def took(predict: Callable[[Any], Any], number: int) -> float:
        began = time.perf_counter()
        answer = predict(number)
        ended = time.perf_counter()
        assert is_answer("gpu", number, answer)
        return ended - began

    def score(system: Adapter) -> float:
        return -statistics.median(took(system.predict, number) for number in range(TRIAL_CALLS))

    chosen = best("gpu", score, settings)
    model, streamer, handle = WORKLOADS["gpu"](), ours("gpu"), Handle("gpu", 1, chosen)
    systems = {OURS: streamer.predict, HANDLE: handle.predict}
    own: dict[str, list[float]] = {name: [] for name in systems}
    through: dict[str, list[float]] = {name: [] for name in systems}
    # In runs of one system, or what one leaves to be done after a call would be the other's.
    for _ in range(RUNS):
        for name, predict in systems.items():
            for number in range(CALLS):
                direct = took(lambda number: model.predict([number])[0], number)
                called = took(predict, number)
                if number >= EARLY:
                    own[name].append(direct)
                    through[name].append(called)
    for name, used in ((OURS, {}), (HANDLE, chosen)):
        alike, each = statistics.median(own[name]), statistics.median(through[name])
        yield row(name, {"over": each - alike, "ratio": each / alike}, used, question="alone")
    streamer.close()
    handle.close()


def callers(seconds: float, settings: Sequence[Settings]) -> Rows:
    work = items("gpu", CALLERS)
    for by, drive in (("threads", closed_loop.threads), ("tasks", closed_loop.tasks)):

        def measure(system: Adapter, drive: Any = drive, each: float = seconds) -> dict[str, Any]:
            figures = drive(system, "gpu", work, WARM_UP, each)
            return {**figures, "share": figures["rate"] / ideal("gpu", CALLERS)}

        chosen = best("gpu", lambda system: measure(system, each=TRIAL_SECONDS)["rate"], settings)
        systems = {OURS: ours("gpu"), HANDLE: Handle("gpu", 1, chosen)}
        for name, figures in in_turn(systems, measure).items():
            used = chosen if name == HANDLE else {}
            yield row(name, figures, used, question="callers", callers=CALLERS, by=by)
        for system in systems.values():
            system.close()


def workers(seconds: float) -> Rows:
    def measure(system: Adapter, count: int) -> float:
        work = items("large-gpu", count * CALLERS)
        return float(closed_loop.threads(system, "large-gpu", work, WARM_UP, seconds)["rate"])

    counts = (1, 2)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    systems = {count: ours("large-gpu", count) for count in counts}
    for count in (*counts, *reversed(counts)):
        rates[count].append(measure(systems[count], count))
    for system in systems.values():
        system.close()
    one = statistics.fmean(rates[1])
    for count, each in rates.items():
        rate = statistics.fmean(each)
        figures = {"rate": rate, "share": rate / count / ideal("large-gpu", CALLERS)}
        if count > 1:
            figures["to_one_worker"] = rate / one
        yield row(OURS, figures, question="workers", workers=count)


def arrays(seconds: float, settings: Sequence[Settings]) -> Rows:
    work = items("arrays", ARRAY_CALLERS)

    def measure(system: Adapter, each: float = seconds) -> dict[str, Any]:
        rate = closed_loop.threads(system, "arrays", work, WARM_UP, each)["rate"]
        return {"rate": rate, "gb_per_s": rate * work[0].nbytes / 1e9}

    chosen = best("arrays", lambda system: measure(system, TRIAL_SECONDS)["rate"], settings)
    systems = {OURS: ours("arrays"), HANDLE: Handle("arrays", 1, chosen)}
    for name, figures in in_turn(systems, measure).items():
        used = chosen if name == HANDLE else {}
        yield row(name, figures, used, question="arrays", bytes=work[0].nbytes)
    for system in systems.values():
        system.close()


def autoscaling() -> Rows:
    """RayStreamer only: Ray Serve scales by the number of running calls, and has no such target."""
    streamer = ours(STEP_MODEL, most_workers=MOST_WORKERS)
    seen: list[tuple[float, int, int]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK):
            stats = streamer.streamer.stats()
            ready = stats.workers["idle"] + stats.workers["busy"]
            seen.append((time.monotonic(), ready, stats.wanted))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        phases = [(share * capacity(STEP_MODEL), seconds) for share, seconds in STEP]
        log, (_, rise, fall) = open_loop.stepped(streamer, int, phases, patience=5.0)
        target = streamer.streamer.stats().target_wait
    finally:
        is_over.set()
        looking.join()
    streamer.close()
    settled = open_loop.judged(log, rise + SETTLED, fall, None, capacity(STEP_MODEL))
    p99 = settled["p99"]
    figures = {
        "p99": p99,
        "to_target": None if p99 is None else p99 / target,
        **judging.scaled(seen, rise, fall),
        "sent": len(log.due),
        "failed": sum(outcome != judging.SERVED for outcome in log.outcomes),
    }
    yield row(OURS, figures, question="autoscaling")


def simulated() -> Rows:
    for model in MODELS:
        yield row(OURS, stepped(model), question="simulated", start=f"{model.start:g} s")


QUESTIONS = ("alone", "callers", "workers", "arrays", "autoscaling", "simulated")


def rows(only: Sequence[str], seconds: float, settings: Sequence[Settings]) -> Rows:
    if "alone" in only:
        yield from alone(settings)
    if "callers" in only:
        yield from callers(seconds, settings)
    if "workers" in only:
        yield from workers(seconds)
    if "arrays" in only:
        yield from arrays(seconds, settings)
    if "autoscaling" in only:
        yield from autoscaling()
    if "simulated" in only:
        yield from simulated()


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    settings = SETTINGS[: options.get("trials")]
    with cluster(CORES):
        for each in rows(options.get("only", QUESTIONS), options.get("seconds", 3.0), settings):
            print(json.dumps(each), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
