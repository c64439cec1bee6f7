"""Workers that are killed all the time, while many callers call: each gets what is theirs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_models import double_slowly
from fault_processes import children

from service_streamer import Streamer

THREADS = 64
CALLS = 20_000

# The killer does not look whom it hits. With bad luck it is one item again and again, which by
# default would be given up after the third time, and rightly so. Nor whether they have loaded.
PATIENT = {"max_attempts": 100, "max_restarts": 1000}


@pytest.mark.long
def test_workers_that_are_killed_lose_nothing_and_double_nothing() -> None:
    numbers = itertools.count()
    answers: list[tuple[int, list[int]]] = []
    bystanders = children(os.getpid())
    chance = random.Random(1)
    is_over = threading.Event()

    def call(_: int) -> None:
        while (number := next(numbers)) < CALLS:
            answers.append((number, streamer.predict([number])))

    def kill() -> None:
        """One at once, and one for every so many calls that have ended.

        Not by the clock: where it takes long to load, all would be killed before they have.
        """
        killed = 0
        while not is_over.wait(0.05):  # this is the load; nothing waits for it
            workers = sorted(children(os.getpid()) - bystanders)
            if workers and len(answers) >= 1_000 * killed:
                killed += 1
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(chance.choice(workers), signal.SIGKILL)

    with Streamer(double_slowly, worker_num=4, worker_timeout=None, **PATIENT) as streamer:
        streamer.wait_ready()  # a place that never had a worker is given up soon
        with ThreadPoolExecutor(THREADS + 1) as pool:
            killing = pool.submit(kill)
            try:
                list(pool.map(call, range(THREADS)))
            finally:
                is_over.set()
            killing.result()
        stats = streamer.stats()
    assert sorted(answers) == [(number, [2 * number]) for number in range(CALLS)]
    assert (stats.pending, stats.in_flight) == (0, 0)
    assert stats.restarts >= 1
    assert stats.retries >= 1
