"""One measurement over Redis of whichever service_streamer this interpreter has; prints a number.

Worker processes run in a program of their own, as on another host; this one is the web server. Uses
nothing but what the original's interface has too, with default settings.

``python redis_driver.py CASE HOST:PORT``; ``bench_redis.py`` runs it in both virtual environments.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from driver import BATCH_SIZE, calls_per_second
from service_streamer import RedisStreamer
from simulated import SimulatedGPU

BROKER = sys.argv[2] if len(sys.argv) > 2 else "localhost:6379"

#: Time for the original's worker processes to subscribe: what comes before they do is lost.
_SETTLE = 1.0


@contextlib.contextmanager
def ready(model: str, workers: int = 1) -> Iterator[RedisStreamer]:
    """A streamer whose worker processes have all loaded their model."""
    prefix = uuid.uuid4().hex
    script = str(Path(__file__).with_name("redis_hosts.py"))
    # Without our output, which the original's worker processes, that outlive it, would keep open.
    hosts = subprocess.Popen(
        [sys.executable, script, model, str(workers), BROKER, prefix],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        streamer = RedisStreamer(BROKER, prefix)
        streamer.predict([0])
        time.sleep(_SETTLE * workers)
        streamer.predict(list(range(BATCH_SIZE * workers)))
        yield streamer
        if hasattr(streamer, "close"):  # the original cannot be closed over Redis
            streamer.close()
    finally:
        hosts.terminate()
        hosts.wait()


def alone() -> float:
    """A lone caller's time over calling the model directly, in milliseconds: the median."""
    model = SimulatedGPU()
    model.init_model()
    times: tuple[list[float], list[float]] = [], []
    with ready("SimulatedGPU") as streamer:
        for _ in range(60):
            for predict, taken in zip((model.predict, streamer.predict), times, strict=True):
                started = time.perf_counter()
                predict([1])
                taken.append(time.perf_counter() - started)
    own, through = (statistics.median(taken[10:]) for taken in times)
    return 1000 * (through - own)


def closed_loop() -> float:
    """Share of what perfect batches would reach: 128 threads, one worker."""
    with ready("SimulatedGPU") as streamer:
        return calls_per_second(streamer, 128, 4.0) / (64 / (5e-3 + 64e-4))


def workers(count: int) -> Callable[[], float]:
    """The same with so many worker processes, 128 threads for each, and the larger model."""

    def run() -> float:
        with ready("LargeSimulatedGPU", count) as streamer:
            rate = calls_per_second(streamer, 128 * count, 5.0)
        return rate / (count * 64 / (20e-3 + 64 * 5e-4))

    return run


def futures() -> float:
    """Single-item futures per second: 20 000 submitted, then all awaited; echo."""
    with ready("Echo") as streamer:
        started = time.perf_counter()
        pending = [streamer.submit([i]) for i in range(20_000)]
        for i, future in enumerate(pending):
            assert future.result(60) == [i]
        return 20_000 / (time.perf_counter() - started)


def idle() -> float:
    """Messages that Redis gets from a worker host that has nothing to do, per second."""
    from redis import Redis

    host, _, port = BROKER.partition(":")
    redis = Redis(host, int(port))
    with ready("Echo") as streamer:
        if hasattr(streamer, "close"):
            streamer.close()
        time.sleep(2.0)
        counts: list[int] = []
        for _ in range(2):
            counts.append(int(redis.info("stats")["total_reads_processed"]))
            time.sleep(15.0)
        return (counts[1] - counts[0] - 1) / 15.0


CASES: dict[str, Callable[[], float]] = {
    "alone": alone,
    "closed_loop": closed_loop,
    "futures": futures,
    "idle": idle,
    "workers_1": workers(1),
    "workers_2": workers(2),
    "workers_4": workers(4),
}

if __name__ == "__main__":
    print(CASES[sys.argv[1]](), flush=True)
    os._exit(0)  # the original's threads go on for ever
