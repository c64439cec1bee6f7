"""Large items and results, when processes are killed: nothing is lost, and no memory is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from fault_processes import GONE, Watch, await_line, descendants, running

import large_models
from cases import long_cases
from models import echo
from serve_process import workers
from service_streamer import Streamer
from service_streamer.testing import Gate

LARGE_ENOUGH = 75_000  # float64: more than a pipe holds


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
        streamer = Streamer(
            slowly, 4, worker_num=2, worker_timeout=None, mp_start_method=METHOD
        )
        for _ in range(4):
            threading.Thread(target=call, daemon=True).start()
        input()
        if END:
            streamer.close()
"""


@pytest.mark.parametrize(
    "who",
    ["the parent", "nobody: it closes",
     *long_cases("the parent with fork", "the parent with forkserver", "a worker, then the parent",
                 "all at once", "nobody")],
)  # fmt: skip
def test_nothing_is_left_of_processes_that_are_killed_or_end(who: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    who, _, method = who.partition(" with ")
    source = SOURCE.replace("END", str("closes" in who)).replace("METHOD", repr(method or "spawn"))
    with running(source, tmp_path) as program:
        await_line(program, "under load")
        pids = workers(program.pid)
        with Watch(descendants(program.pid)) as family:
            assert len(family if method else pids) >= 2
            if "nobody" not in who:
                for pid in {"all at once": pids, "the parent": []}.get(who, pids[:1]):
                    os.kill(pid, signal.SIGKILL)
                program.kill()
            _, said = program.communicate("\n" if "nobody" in who else None)
            assert family.alive_after(GONE) == []
    if "nobody" in who:
        assert program.returncode == 0
        assert "Error" not in said.replace("StreamerClosed", "")
    assert not {*os.listdir("/dev/shm")} - before
    assert "resource_tracker" not in said
    assert "leaked" not in said


def test_a_worker_dies_with_large_items(gate: Gate) -> None:
    """In its midst, and with a batch sent ahead: all is computed again, from the same memory."""
    with Streamer(
        large_models.GatedEcho, 2, model_init_args=[gate], worker_timeout=600
    ) as streamer:
        arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(6)]
        futures = [streamer.submit([array]) for array in arrays]
        gate.await_arrival()
        (worker,) = workers(os.getpid())
        os.kill(worker, signal.SIGKILL)
        gate.let_through(50)
        for array, future in zip(arrays, futures, strict=True):
            np.testing.assert_array_equal(future.result()[0], array)
        assert streamer.stats().restarts == 1


def test_results_of_a_dead_worker_can_be_looked_at() -> None:
    arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(8)]
    with Streamer(echo, worker_timeout=600, worker_num=2, max_attempts=1000) as streamer:
        futures = [streamer.submit([array]) for array in arrays]
        for future in futures:
            future.exception()
        looked_at = futures[0].result()[0]
        for worker in workers(os.getpid()):
            os.kill(worker, signal.SIGKILL)
        for number in range(20):  # on new workers
            (back,) = streamer.predict([np.full(LARGE_ENOUGH, float(number + 100))])
            assert (back == number + 100).all()
        np.testing.assert_array_equal(looked_at, arrays[0])
        for array, future in zip(arrays, futures, strict=True):
            np.testing.assert_array_equal(future.result()[0], array)


def test_both_sides_write_much_at_once() -> None:
    """Through pipes: neither waits for the other, also with a batch sent ahead."""
    with Streamer(echo, 4, worker_timeout=600, shared_memory_limit=0) as streamer:
        arrays = [np.full(LARGE_ENOUGH, float(i)) for i in range(40)]
        for array, back in zip(arrays, streamer.predict(arrays), strict=True):
            np.testing.assert_array_equal(back, array)
