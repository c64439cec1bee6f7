"""One measurement of whichever service_streamer this interpreter has; prints a number.

Uses nothing but what the original's interface has too, with default settings (``batch_size`` is no
default there). ``python driver.py CASE``; ``bench.py`` runs it in both virtual environments.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from service_streamer import ManagedModel, Streamer
from simulated import Echo, SimulatedGPU

BATCH_SIZE = 64


def ready(model: type[ManagedModel], workers: int = 1, *args: Any) -> Streamer:
    streamer = Streamer(model, BATCH_SIZE, worker_num=workers, model_init_args=list(args))
    streamer._wait_for_worker_ready()
    return streamer


def calls_per_second(streamer: Any, callers: int, seconds: float) -> float:
    """Closed loop: each thread calls with one item, again and again."""
    counts = [0] * callers
    stop = False

    def call(number: int) -> None:
        while not stop:
            assert streamer.predict([number]) == [number]
            counts[number] += 1

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(callers)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # until the load is steady
    before, started = sum(counts), time.perf_counter()
    time.sleep(seconds)
    rate = (sum(counts) - before) / (time.perf_counter() - started)
    stop = True
    for thread in threads:
        thread.join()
    return rate


def alone() -> float:
    """Median time of a lone caller's call, over that of calling the model directly in between."""
    model = SimulatedGPU()
    model.init_model()
    streamer = ready(SimulatedGPU)
    times: dict[Any, list[float]] = {model.predict: [], streamer.predict: []}
    for _ in range(60):
        for predict, taken in times.items():
            started = time.perf_counter()
            predict([1])
            taken.append(time.perf_counter() - started)
    streamer.destroy_workers()
    own, through = (statistics.median(taken[10:]) for taken in times.values())
    return through / own


def back_to_back() -> float:
    """The same with all direct calls first: a thread that submits again at once wakes others."""
    model = SimulatedGPU()
    model.init_model()
    streamer = ready(SimulatedGPU)
    medians = []
    for predict in (model.predict, streamer.predict):
        times = []
        for _ in range(60):
            started = time.perf_counter()
            predict([1])
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times[10:]))
    streamer.destroy_workers()
    return medians[1] / medians[0]


def closed_loop(callers: int) -> Callable[[], float]:
    """Share of what perfect batches would reach, one worker."""

    def run() -> float:
        streamer = ready(SimulatedGPU)
        rate = calls_per_second(streamer, callers, 4.0)
        streamer.destroy_workers()
        size = min(callers, BATCH_SIZE)
        return rate / (size / (5e-3 + 1e-4 * size))

    return run


def eight_workers() -> float:
    """Share of ideal of 512 callers on 8 workers, 20 ms + 0.5 ms · n."""
    streamer = ready(SimulatedGPU, 8, 20e-3, 5e-4)
    rate = calls_per_second(streamer, 512, 5.0)
    streamer.destroy_workers()
    return rate / (8 * 64 / (20e-3 + 64 * 5e-4))


def futures() -> float:
    """Single-item futures per second: 20 000 submitted, then all awaited."""
    streamer = ready(Echo)
    streamer.predict(list(range(200)))
    started = time.perf_counter()
    pending = [streamer.submit([i]) for i in range(20_000)]
    for i, future in enumerate(pending):
        assert future.result(60) == [i]
    rate = 20_000 / (time.perf_counter() - started)
    streamer.destroy_workers()
    return rate


def echo() -> float:
    """Calls per second of 64 threads on the echo model."""
    streamer = ready(Echo)
    rate = calls_per_second(streamer, 64, 4.0)
    streamer.destroy_workers()
    return rate


CASES: dict[str, Callable[[], float]] = {
    "alone": alone,
    "back_to_back": back_to_back,
    "eight_workers": eight_workers,
    "futures": futures,
    "echo": echo,
    **{f"closed_loop_{n}": closed_loop(n) for n in (1, 2, 8, 32, 64, 128, 256, 512)},
}

if __name__ == "__main__":
    print(CASES[sys.argv[1]]())
