"""One open loop on whichever service_streamer this interpreter has; prints its figures as JSON.

Open: calls arrive by the clock, whether or not others have been answered, as those of many users
do. One thread makes them, in the process that serves them, and with them shares the interpreter
lock, as the threads of a web server do. A call that it makes late counts from when it was due.

``python open_loop.py CONTESTANT LOAD SECONDS``; ``overload.py`` runs it.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from array import array
from typing import Any

import service_streamer
from service_streamer import Streamer
from simulated import SimulatedGPU

BATCH_SIZE = 64
CAPACITY = BATCH_SIZE / (5e-3 + 1e-4 * BATCH_SIZE)
DEADLINE = 2.0
#: Until then a queue that only grows still serves calls in time, at twice the capacity.
WARM_UP = 2 * DEADLINE
MAX_PENDING = 512
#: Between two looks at the clock, seconds.
_TICK = 2e-3

#: What became of a call; 0 while nothing has.
SERVED, REJECTED, EXPIRED, FAILED = range(1, 5)


class Log:
    """What became of each call, by its number. Written by any thread, each number by one."""

    def __init__(self, size: int) -> None:
        # Flat, so that the garbage collector has nothing to look through.
        self.ended_at = array("d", bytes(8 * size))
        self.outcomes = bytearray(size)

    def ended(self, number: int, outcome: int) -> None:
        self.ended_at[number] = time.monotonic()
        self.outcomes[number] = outcome


class Ours:
    """Calls with a deadline; the callbacks of their futures write the log."""

    def __init__(self, log: Log, max_pending: int | None) -> None:
        self._log = log
        self._streamer = Streamer(SimulatedGPU, BATCH_SIZE, max_pending=max_pending)
        self._streamer.wait_ready()

    def submit(self, number: int, deadline: float) -> None:
        try:
            future = self._streamer.submit([number], max(0.0, deadline - time.monotonic()))
        except service_streamer.Overloaded:
            self._log.ended(number, REJECTED)
        except service_streamer.PredictTimeout:
            self._log.ended(number, EXPIRED)
        else:
            future.add_done_callback(functools.partial(self._done, number))

    def _done(self, number: int, future: Any) -> None:
        match future.exception():
            case None:
                self._log.ended(number, SERVED)
            case service_streamer.PredictTimeout():
                self._log.ended(number, EXPIRED)
            case _:
                self._log.ended(number, FAILED)

    def close(self) -> None:
        self._streamer.close(drain=False)


class Original:
    """Its futures have no callbacks, but end in order: one thread waits for one after the other.

    Waiting until the call's own deadline is the only use that the original has for one.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._streamer: Any = Streamer(SimulatedGPU, BATCH_SIZE)
        self._streamer._wait_for_worker_ready()
        self._futures: queue.SimpleQueue[tuple[int, float, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, number: int, deadline: float) -> None:
        try:
            self._futures.put((number, deadline, self._streamer.submit([number])))
        except Exception:
            self._log.ended(number, FAILED)

    def _read(self) -> None:
        while True:
            number, deadline, future = self._futures.get()
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._log.ended(number, EXPIRED)
            except Exception:
                self._log.ended(number, FAILED)
            else:
                self._log.ended(number, SERVED)

    def close(self) -> None:
        for worker in multiprocessing.active_children():  # it would first finish all that waits
            worker.kill()


def judged(
    log: Log, made_at: array[float], made: int, start: float, rate: float
) -> dict[str, float | None]:
    """The figures of the window from ``WARM_UP`` to the end of the load.

    Args:
        made_at: when each call was made, of the first ``made``; the others never were.
        start: when the first call was due.
    """
    size = len(made_at)
    first, end = start + WARM_UP, start + size / rate
    span = end - first
    # Shares are of the calls that were due in the window. Goodput is what was delivered in it, to
    # calls in time whenever they were due: no more than the worker can compute in that while.
    offered = range(min(made, int(WARM_UP * rate)), made)
    due = [start + number / rate for number in range(size)]
    is_served = [
        log.outcomes[number] == SERVED and log.ended_at[number] - due[number] <= DEADLINE
        for number in range(size)
    ]
    delivered = sum(
        is_served[number] and first <= log.ended_at[number] < end for number in range(made)
    )
    latency = [log.ended_at[number] - due[number] for number in offered if is_served[number]]
    rejections = [
        log.ended_at[number] - made_at[number]
        for number in offered
        if log.outcomes[number] == REJECTED
    ]
    outcomes = [log.outcomes[number] for number in offered]
    count = max(1, len(outcomes))
    served, rejected = len(latency) / count, len(rejections) / count
    failed = outcomes.count(FAILED) / count
    return {
        "offered": sum(first <= at < end for at in made_at) / span,
        "goodput": delivered / span / CAPACITY,
        "served": served,
        "rejected": rejected,
        # Too late is too late, whether or not something came in the end.
        "expired": max(0.0, 1 - served - rejected - failed),
        "failed": failed,
        "latency_p50": percentile(latency, 0.5),
        "latency_p99": percentile(latency, 0.99),
        "rejection_p99": percentile(rejections, 0.99),
        "lag_p99": percentile([made_at[number] - due[number] for number in offered], 0.99),
    }


def percentile(values: list[float], share: float) -> float | None:
    return sorted(values)[int(share * (len(values) - 1))] if values else None


def main() -> None:
    contestant, load, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    faulthandler.dump_traceback_later(seconds + 20, exit=True)  # whatever wedges
    rate = load * CAPACITY
    size = int(rate * seconds)
    log = Log(size)
    made_at = array("d", bytes(8 * size))
    served: Ours | Original
    if contestant == "original":
        served = Original(log)
    else:
        served = Ours(log, MAX_PENDING if contestant == "bounded" else None)

    start = time.monotonic() + 0.1
    made = 0
    while made < size and (now := time.monotonic()) < start + seconds:
        for number in range(made, min(size, int((now - start) * rate))):
            made_at[number] = time.monotonic()
            served.submit(number, start + number / rate + DEADLINE)
            made = number + 1
        time.sleep(_TICK)
    loaded = time.monotonic()
    while not all(log.outcomes[:made]) and time.monotonic() < loaded + DEADLINE + 1:
        time.sleep(0.05)
    figures = judged(log, made_at, made, start, rate)
    print(json.dumps(figures), flush=True)
    served.close()
    os._exit(0)  # the original would wait until its queue has been written


if __name__ == "__main__":
    main()
