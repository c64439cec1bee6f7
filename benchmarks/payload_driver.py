"""Arrays of one size through an echo model; prints how many calls per second were answered.

Uses nothing but what the original's interface has too; ``payload.py`` runs it in both virtual
environments. ``python payload_driver.py BYTES CALLERS SECONDS BATCH_SIZE MAX_LATENCY [LIMIT]``, of
which the last is this project's ``shared_memory_limit``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from service_streamer import Streamer


def echo(batch: list[Any]) -> list[Any]:
    return batch


def rate(streamer: Any, size: int, callers: int, seconds: float) -> float:
    """Closed loop: each thread sends an array of its own, again and again."""
    counts = [0] * callers

    def call(number: int) -> None:
        array = np.full(max(1, size // 4), number, np.float32)
        while True:
            (back,) = streamer.predict([array])
            assert back.nbytes == array.nbytes
            assert back[-1] == number
            counts[number] += 1

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(callers)]
    for thread in threads:
        thread.start()
    while min(counts) < 2:  # until each has been answered, and the load is steady
        time.sleep(0.01)
    time.sleep(min(1.0, seconds))
    before, started = sum(counts), time.perf_counter()
    time.sleep(seconds)
    # The threads end with the process: some of the original's wait for 20 s for what got lost.
    return (sum(counts) - before) / (time.perf_counter() - started)


def copies(size: int, seconds: float) -> float:
    """The same of plain copies, from each of 16 arrays into another."""
    count = min(16, max(1, (512 << 20) // max(size, 1)))
    pairs = [
        (np.full(max(1, size // 4), i, np.float32), np.zeros(max(1, size // 4), np.float32))
        for i in range(count)
    ]
    for source, target in pairs:
        np.copyto(target, source)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for source, target in pairs:
            np.copyto(target, source)
        done += count
    return done / (time.perf_counter() - started)


def main() -> None:
    size, callers = int(sys.argv[1]), int(sys.argv[2])
    seconds = float(sys.argv[3])
    if not callers:
        print(copies(size, seconds))
        return
    batch_size, max_latency, *limit = sys.argv[4:]
    options: dict[str, Any] = {"shared_memory_limit": int(limit[0])} if limit else {}
    # Not the GPU's stand-in, which sleeps: this is about what it takes to get there and back.
    streamer = Streamer(echo, int(batch_size), float(max_latency), **options)
    streamer._wait_for_worker_ready()
    print(rate(streamer, size, callers, seconds), flush=True)
    # The original's workers would go on for a while, and keep who reads this waiting.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
