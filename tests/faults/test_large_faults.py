"""Large items and results, when processes are killed: nothing is lost, and no memory is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fault_processes import GONE, Watch, await_line, descendants, running, workers

import large_models
from cases import long_cases
from models import echo
from service_streamer import Streamer
from service_streamer.testing import Gate

LARGE_ENOUGH = 75_000  # float64: more than a pipe holds


def shared_memory() -> set[str]:
    """What there is in the machine's named shared memory."""
    return set(os.listdir("/dev/shm"))


SOURCE = """
    import itertools, threading
    import numpy as np
    from service_streamer import Streamer

    def slowly(batch):
        return [2 * item for item in batch]

    def call():
        for i in itertools.count():
            array = np.full(200_000, i)
            (back,) = streamer.predict([array])
            assert (back == 2 * i).all()
            if i == 5:
                print("under load", flush=True)

    if __name__ == "__main__":
        streamer = Streamer(slowly, 4, worker_num=2, worker_timeout=None)
        for _ in range(4):
            threading.Thread(target=call, daemon=True).start()
        input()
        if END:
            streamer.close()
"""


@pytest.mark.parametrize(
    "who", ["the parent", *long_cases("a worker, then the parent", "all at once")]
)
def test_nothing_is_left_of_processes_that_are_killed(who: str, tmp_path: Path) -> None:
    before = shared_memory()
    with running(SOURCE.replace("END", "False"), tmp_path) as program:
        await_line(program, "under load")
        pids = workers(program.pid)
        with Watch(descendants(program.pid)) as family:
            assert len(pids) == 2
            if who != "the parent":
                for pid in pids if who == "all at once" else [min(pids)]:
                    os.kill(pid, signal.SIGKILL)
            program.kill()
            assert family.alive_after(GONE) == []
        _, said = program.communicate()
    assert not shared_memory() - before
    assert "resource_tracker" not in said
    assert "leaked" not in said


@pytest.mark.parametrize("closes", [True, *long_cases(False)])
def test_nothing_is_said_when_a_program_ends(closes: bool, tmp_path: Path) -> None:
    before = shared_memory()
    with running(SOURCE.replace("END", str(closes)), tmp_path) as program:
        await_line(program, "under load")
        _, said = program.communicate("\n")
        assert program.returncode == 0
    assert "Error" not in said.replace("StreamerClosed", "")
    assert "resource_tracker" not in said
    assert "leaked" not in said
    assert not shared_memory() - before


@pytest.fixture
def echoing() -> Iterator[Streamer]:
    with Streamer(
        echo, 8, worker_num=2, worker_timeout=600, shared_memory_limit=32 << 20, max_attempts=1000
    ) as streamer:
        streamer.wait_ready()
        yield streamer


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, *long_cases(signal.SIGSEGV)])
def test_a_worker_dies_with_large_items(signal_number: int, gate: Gate) -> None:
    """In its midst, and with a batch sent ahead: all is computed again, from the same memory."""
    with Streamer(
        large_models.GatedEcho, 2, model_init_args=[gate], worker_timeout=600
    ) as streamer:
        arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(6)]
        futures = [streamer.submit([array]) for array in arrays]
        gate.await_arrival()
        (worker,) = workers(os.getpid())
        os.kill(worker, signal_number)
        gate.let_through(50)
        for array, future in zip(arrays, futures, strict=True):
            np.testing.assert_array_equal(future.result()[0], array)
        assert streamer.stats().restarts == 1


def test_results_of_a_dead_worker_can_be_looked_at(echoing: Streamer) -> None:
    arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(8)]
    futures = [echoing.submit([array]) for array in arrays]
    for future in futures:
        future.exception()
    looked_at = futures[0].result()[0]
    for worker in workers(os.getpid()):
        os.kill(worker, signal.SIGKILL)
    for number in range(20):  # on new workers
        (back,) = echoing.predict([np.full(LARGE_ENOUGH, float(number + 100))])
        assert (back == number + 100).all()
    np.testing.assert_array_equal(looked_at, arrays[0])
    for array, future in zip(arrays, futures, strict=True):
        np.testing.assert_array_equal(future.result()[0], array)


def test_both_sides_write_much_at_once(gate: Gate) -> None:
    """Through pipes: neither waits for the other, also with a batch sent ahead."""
    with Streamer(
        large_models.GatedEcho, 4, model_init_args=[gate], worker_timeout=600, shared_memory_limit=0
    ) as streamer:
        gate.let_through(100)
        arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(40)]
        for array, back in zip(arrays, streamer.predict(arrays), strict=True):
            np.testing.assert_array_equal(back, array)
