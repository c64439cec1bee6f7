"""Workers that are killed all the time, while many callers call: each gets what is theirs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest
from fault_models import double_slowly

from leavings import children
from serve_process import until
from service_streamer import Future, PredictTimeout, Streamer

THREADS = 64

# The killer does not look whom it hits. With bad luck it is one item again and again, which by
# default would be given up after the third time, and rightly so.
ATTEMPTS = 100


class Killer:
    """Kills workers, chosen by chance among the children that this process gets from now on."""

    def __init__(self, seed: int) -> None:
        self._bystanders = {*children(os.getpid())}
        self._chance = random.Random(seed)

    def kill_one(self) -> None:
        workers = {*children(os.getpid())} - self._bystanders
        if workers:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self._chance.choice(sorted(workers)), signal.SIGKILL)

    @contextlib.contextmanager
    def at_work(self, every: int, ended: Sequence[object]) -> Iterator[None]:
        """Within the block, kill one at once, and one for every so many calls that have ended.

        Not by the clock: where it takes long to load, all would be killed before they have.
        """
        is_over = threading.Event()
        self.kill_one()

        def run() -> None:
            seen = 0
            while not is_over.wait(0.05):  # this is the load; nothing waits for it
                if len(ended) >= seen + every:
                    seen = len(ended)
                    self.kill_one()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def in_threads(function: Callable[[int], object]) -> None:
    """Run it in all threads at once, with the thread's number; raises what one of them raises."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(function, range(THREADS)))


@pytest.mark.long
def test_each_future_ends_once_whatever_happens_to_it() -> None:
    killer = Killer(seed=3)
    ended: list[int] = []
    futures: dict[int, Future] = {}
    cancelled: set[int] = set()
    limited: set[int] = set()
    refused: set[int] = set()

    def call(thread: int) -> None:
        chance = random.Random(thread)
        for number in range(thread, 64 * THREADS, THREADS):
            timeout = chance.choice([None, chance.uniform(0.001, 0.5)])
            try:
                futures[number] = streamer.submit([number], timeout)
            except PredictTimeout:  # so much waits that it could not be in time: told at once
                refused.add(number)
                continue
            futures[number].add_done_callback(lambda _, number=number: ended.append(number))
            if timeout is not None:
                limited.add(number)
            other = chance.choice(range(thread, number + 1, THREADS))
            if chance.random() < 0.3 and other in futures and futures[other].cancel():
                cancelled.add(other)

    streamer = Streamer(double_slowly, 4, worker_num=4, max_attempts=ATTEMPTS)
    with streamer:
        streamer.wait_ready()
        with killer.at_work(every=200, ended=ended):
            in_threads(call)
            wait(futures.values())
        until(lambda: len(ended) == len(futures))  # who waits is told before who is called back
        stats = until(lambda: (found := streamer.stats()).restarts and found)
    late = {number for number, future in futures.items() if was_late(future)}
    assert sorted([*ended, *refused]) == list(range(64 * THREADS))
    assert late <= limited
    assert {number for number, future in futures.items() if future.cancelled()} == cancelled
    served = futures.keys() - late - cancelled
    assert all(futures[number].result() == [2 * number] for number in served)
    assert min(len(late), len(cancelled), len(served)) > 0
    assert (stats.expired, stats.cancelled, stats.rejected) == (
        len(late), len(cancelled), len(refused),
    )  # fmt: skip
    assert stats.restarts >= 1


def was_late(future: Future) -> bool:
    with contextlib.suppress(CancelledError):
        return type(future.exception()) is PredictTimeout
    return False
