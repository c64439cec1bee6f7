"""Large items and results of a shared pool whose processes are killed, and what is left of them."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fault_processes import await_line, running
from pool_models import echo_or_pid

import large_models
from conftest import await_that
from pools import ask_pool
from service_streamer import Streamer

Shared = Callable[..., Streamer]

MB = 1 << 20


def filled(value: int, size: int = 100_000) -> Any:
    return np.full(size, value, "u1")


def pool_pid(name: str = "a") -> int:
    pid: int = ask_pool(name, "status")["pid"]
    return pid


def memories(pid: int) -> int:
    """How many memories of ours a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:service_streamer")


def touched(pid: int) -> int:
    """How much of them it has ever looked at, kB."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.findall(r"memfd:service_streamer.*?\nRss: +(\d+) kB", text, re.DOTALL)
    assert found
    return sum(map(int, found))


def worker_pids(streamer: Streamer) -> list[int]:
    return [pid for pid in streamer.predict([None]) if pid is not None]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_the_pool_does_not_touch_the_data(shared: Shared) -> None:
    streamers = [shared(echo_or_pid, shared="a") for _ in range(2)]
    for n in range(20):
        for streamer in streamers:
            item = filled(n, MB)
            assert (streamer.predict([item])[0] == item).all()
    assert touched(pool_pid()) == 0


CLIENT = """
    import os, sys
    import numpy as np
    from service_streamer import Streamer
    from pool_models import echo_or_pid

    if __name__ == "__main__":
        streamer = Streamer(echo_or_pid, shared="a", linger=0)
        kept = streamer.predict([np.full(1 << 20, n, "u1") for n in range(4)])
        print("ready", flush=True)
        sys.stdin.readline()
"""


def test_nothing_of_a_client_that_was_killed_is_left(shared: Shared, tmp_path: Path) -> None:
    streamer = shared(echo_or_pid, shared="a")
    (worker,) = worker_pids(streamer)
    pid = pool_pid()
    streamer.predict([filled(1)])  # after the question, whose connection is closed by now

    def state() -> tuple[int, ...]:
        return memories(worker), open_files(worker), memories(pid), open_files(pid)

    before = state()
    for _ in range(3):
        with running(CLIENT, tmp_path) as client:
            await_line(client, "ready")
            assert memories(worker) == before[0] + 1
            client.kill()
        await_that(lambda: state() == before)
    assert (streamer.predict([filled(2)])[0] == 2).all()


def test_the_memory_of_a_dead_worker_is_unmapped(shared: Shared) -> None:
    streamer = shared(echo_or_pid, shared="a")
    gc.collect()  # what earlier tests have left is unmapped now, and not in the midst
    before = memories(os.getpid())
    for n in range(3):
        (kept,) = streamer.predict([filled(n)])
        assert memories(os.getpid()) == before + 1
        (worker,) = worker_pids(streamer)
        os.kill(worker, signal.SIGKILL)
        await_that(functools.partial(has_another_worker, streamer, worker))
        assert (kept == n).all()
        del kept
        streamer.predict([n])  # tells the pool what was read
        streamer.predict([n])
        await_that(lambda: memories(os.getpid()) == before)


def has_another_worker(streamer: Streamer, than: int) -> bool:
    return worker_pids(streamer) != [than]


def test_another_worker_gets_the_items_as_they_were(shared: Shared, tmp_path: Path) -> None:
    streamer = shared(large_models.WritesAndDies, model_init_args=[str(tmp_path / "died")])
    items = [filled(n) for n in range(4)]
    assert streamer.predict(items) == [float(item.sum()) for item in items]
