"""What a request costs of the processor, path by path; ``python -m adapters.costs JSON``.

Not how long it takes: processor time hardly depends on what else the machine does. Of the process
that serves (``us``) and of its worker (``worker_us``), each with its share of what the kernel does
for it; the echo model, which costs nothing. The scheduler alone is measured without any of that.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from adapters.managed import Echo
from adapters.policy_cost import CASES, cost
from service_streamer import Streamer, ThreadedStreamer

_TICK = os.sysconf("SC_CLK_TCK")
_FUTURES = 20_000
_CALLERS = 64

#: What drives a streamer for so many seconds; returns how many requests it made.
Drive = Callable[[Any, float], int]


def futures(streamer: Any, seconds: float) -> int:
    """One thread submits single items, then awaits them all; again and again."""
    made, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        pending = [streamer.submit([number]) for number in range(_FUTURES)]
        assert all(future.result(60) == [number] for number, future in enumerate(pending))
        made += _FUTURES
    return made


def threads(callers: int, item: Any = 1) -> Drive:
    """A closed loop of threads."""

    def drive(streamer: Any, seconds: float) -> int:
        counts, ends = [0] * callers, time.monotonic() + seconds

        def call(number: int) -> None:
            while time.monotonic() < ends:
                assert len(streamer.predict([item])) == 1
                counts[number] += 1

        running = [threading.Thread(target=call, args=(each,)) for each in range(callers)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sum(counts)

    return drive


def tasks(streamer: Any, seconds: float) -> int:
    """A closed loop of asyncio's tasks."""

    async def call(ends: float) -> int:
        count = 0
        while time.monotonic() < ends:
            assert await streamer.apredict([1]) == [1]
            count += 1
        return count

    async def drive() -> int:
        ends = time.monotonic() + seconds
        return sum(await asyncio.gather(*(call(ends) for _ in range(_CALLERS))))

    return asyncio.run(drive())


def calls_of_64(streamer: Any, seconds: float) -> int:
    """One thread submits calls of 64 items each; counts items."""
    made, ends = 0, time.monotonic() + seconds
    items = list(range(64))
    while time.monotonic() < ends:
        pending = [streamer.submit(items) for _ in range(300)]
        assert all(future.result(60) == items for future in pending)
        made += 300 * 64
    return made


PATHS: dict[str, Drive] = {
    "one thread, futures of one item": futures,
    "one thread, calls of 64 items, per item": calls_of_64,
    f"{_CALLERS} threads": threads(_CALLERS),
    f"{_CALLERS} asyncio tasks": tasks,
    "a lone thread": threads(1),
    "16 threads, arrays of 602 kB": threads(16, np.zeros(150_528, np.float32)),
}


def echoed(batch: list[Any]) -> list[Any]:
    return batch


def rows(seconds: float, count: int) -> Iterator[dict[str, Any]]:
    for case in CASES:
        least = min(cost(case, count) for _ in range(3))
        yield row(f"scheduler: {case.name}", us=1e6 * least)
    for name, drive in PATHS.items():
        with Streamer(Echo) as streamer:
            streamer.wait_ready()
            (worker,) = multiprocessing.active_children()
            drive(streamer, seconds / 4)
            before, own = used(worker), time.process_time()
            made = drive(streamer, seconds)
            spent, worker_spent = time.process_time() - own, used(worker) - before
        yield row(name, us=1e6 * spent / made, worker_us=1e6 * worker_spent / made)
    with ThreadedStreamer(echoed) as threaded:
        futures(threaded, seconds / 4)
        own = time.process_time()
        made = futures(threaded, seconds)
        yield row(
            "one thread, futures of one item, ThreadedStreamer",
            us=1e6 * (time.process_time() - own) / made,
        )


def used(process: BaseProcess) -> float:
    """Its processor time so far, seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def row(path: str, **figures: float) -> dict[str, Any]:
    return {"point": {"path": path}, "figures": figures}


def main() -> None:
    options = json.loads(sys.argv[1])
    for each in rows(options["seconds"], options["count"]):
        print(json.dumps(each), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
