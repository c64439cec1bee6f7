"""Callers who ask again as soon as they have been answered: threads, or tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from adapters.adapter import Adapter
from adapters.workloads import is_answer
from yardstick.stats import percentile

__all__ = [
    "Latencies",
    "latencies",
    "rate_in_part",
    "tasks",
    "threads",
    "until_empty",
    "window",
]

#: How long callers may go on when they have been told to stop, seconds.
_PATIENCE = 30.0


class WrongAnswer(Exception):
    """An answer is not that of its question."""


class Latencies:
    """When calls ended, and after how long: of one caller."""

    def __init__(self) -> None:
        self.ended = array("d")
        self.took = array("d")

    def add(self, started: float, ended: float) -> None:
        self.ended.append(ended)
        self.took.append(ended - started)


def figures(callers: Sequence[Latencies], begin: float, end: float) -> dict[str, float | None]:
    """Of the calls that ended from ``begin`` to ``end``, of all callers together."""
    took = latencies(callers, begin, end)
    return {
        "rate": len(took) / (end - begin),
        "p50": percentile(took, 0.5),
        "p99": percentile(took, 0.99),
    }


def latencies(callers: Sequence[Latencies], begin: float, end: float) -> list[float]:
    """Of the calls that ended from ``begin`` to ``end``, of all callers together."""
    return [
        took
        for caller in callers
        # A copy: callers go on.
        for ended, took in list(zip(caller.ended, caller.took, strict=False))
        if begin <= ended < end
    ]


def threads(
    system: Adapter, workload: str, work: Sequence[Any], warm_up: float, seconds: float
) -> dict[str, float | None]:
    """One thread for each of the items, which asks that again and again.

    Raises:
        Exception: what a call raised; WrongAnswer.
    """
    callers, begin, end = window(system, workload, work, warm_up, seconds)
    return figures(callers, begin, end)


def window(
    system: Adapter, workload: str, work: Sequence[Any], warm_up: float, seconds: float
) -> tuple[list[Latencies], float, float]:
    """The calls of the same threads, and when the window began and ended.

    When it returns, all calls have ended and the system has nothing to do.
    """
    stop = threading.Event()
    failures: list[BaseException] = []
    callers = [Latencies() for _ in work]

    def call(item: Any, latencies: Latencies) -> None:
        try:
            while not stop.is_set():
                started = time.perf_counter()
                answer = system.predict(item)
                latencies.add(started, time.perf_counter())
                _check(workload, item, answer)
        except BaseException as error:
            failures.append(error)

    running = [
        threading.Thread(target=call, args=each, daemon=True)
        for each in zip(work, callers, strict=True)
    ]
    for thread in running:
        thread.start()
    time.sleep(warm_up)
    begin = time.perf_counter()
    time.sleep(seconds)
    end = time.perf_counter()
    stop.set()
    _join(running, failures)
    return callers, begin, end


def rate_in_part(callers: Sequence[Latencies], begin: float, end: float) -> float:
    """Calls per second, where a call counts by the share of its time that is in the window.

    In a short window few batches end. Counted whole, the batch at an edge is an error of some
    percent. All calls must have ended, those too that began before ``end``.
    """
    done = sum(
        max(0.0, min(ended, end) - max(ended - took, begin)) / took
        for caller in callers
        for ended, took in zip(caller.ended, caller.took, strict=True)
    )
    return done / (end - begin)


def tasks(
    system: Adapter, workload: str, work: Sequence[Any], warm_up: float, seconds: float
) -> dict[str, float | None]:
    """The same with a task for each of the items, all on one event loop."""
    return asyncio.run(_tasks(system, workload, work, warm_up, seconds))


async def _tasks(
    system: Adapter, workload: str, work: Sequence[Any], warm_up: float, seconds: float
) -> dict[str, float | None]:
    callers = [Latencies() for _ in work]
    is_over = False

    async def call(item: Any, latencies: Latencies) -> None:
        while not is_over:
            started = time.perf_counter()
            answer = await system.apredict(item)
            latencies.add(started, time.perf_counter())
            _check(workload, item, answer)

    running = [asyncio.create_task(call(*each)) for each in zip(work, callers, strict=True)]
    await asyncio.sleep(warm_up)
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    end = time.perf_counter()
    is_over = True
    async with asyncio.timeout(_PATIENCE):
        await asyncio.gather(*running)
    return figures(callers, begin, end)


def until_empty(system: Adapter, workload: str, work: Sequence[Any], callers: int) -> float:
    """Seconds that so many threads take, each of which takes one item after the other.

    Raises:
        Exception: what a call raised; WrongAnswer.
    """
    waiting = iter(work)  # a list's, of which threads can take
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for item in waiting:
                _check(workload, item, system.predict(item))
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=call, daemon=True) for _ in range(callers)]
    started = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    took = time.perf_counter() - started
    if failures:
        raise failures[0]
    return took


def _check(workload: str, item: Any, answer: Any) -> None:
    if not is_answer(workload, item, answer):
        raise WrongAnswer(f"{item!r:.80} was answered with {answer!r:.80}")


def _join(running: Sequence[threading.Thread], failures: Sequence[BaseException]) -> None:
    ends = time.monotonic() + _PATIENCE
    for thread in running:
        thread.join(max(0.0, ends - time.monotonic()))
    if failures:
        raise failures[0]
    if waiting := sum(thread.is_alive() for thread in running):
        raise TimeoutError(f"{waiting} callers had no answer within {_PATIENCE:g} s")
