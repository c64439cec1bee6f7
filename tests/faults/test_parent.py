"""The web process: killed, ended, or called by people who do not wait for their results."""

from __future__ import annotations

import concurrent.futures
import gc
from collections import Counter
from pathlib import Path

import pytest
from fault_processes import GONE, Watch, await_line, descendants, running

import models
from cases import long_cases
from serve_process import until
from service_streamer import PredictTimeout, Streamer, ThreadedStreamer
from service_streamer.testing import Gate

AnyStreamer = Streamer | ThreadedStreamer

# -- killed


@pytest.mark.parametrize("method", ["spawn", *long_cases("fork", "forkserver")])
def test_no_child_outlives_a_parent_that_is_killed_under_load(method: str, tmp_path: Path) -> None:
    source = f"""
        import itertools, threading
        import fault_models
        from service_streamer import Streamer

        def call():
            for i in itertools.count():
                assert streamer.predict([i]) == [2 * i]
                if i == 10:
                    print("under load", flush=True)

        if __name__ == "__main__":
            streamer = Streamer(
                fault_models.double_slowly, 4, worker_num=4, worker_timeout=None,
                mp_start_method={method!r},
            )
            streamer.wait_ready()
            for _ in range(16):
                threading.Thread(target=call).start()
    """
    with running(source, tmp_path) as program:
        await_line(program, "under load")
        with Watch(descendants(program.pid)) as family:
            assert len(family) >= 4
            program.kill()
            assert family.alive_after(GONE) == []


# -- ended


@pytest.mark.parametrize(
    "how",
    ["hangs", "hangs, forgotten", "stopped", *long_cases("hangs, deaf", "hangs, being killed")],
)
def test_the_interpreter_ends_with_a_worker_that_hangs(how: str, tmp_path: Path) -> None:
    source = f"""
        import os, signal, threading
        from service_streamer import Streamer

        def hang(batch):
            match {how!r}:
                case "hangs, deaf":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                case "stopped":
                    print("hangs", flush=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
            print("hangs", flush=True)
            threading.Event().wait()

        if __name__ == "__main__":
            streamer = Streamer(
                hang, 4, batch_timeout=0.01 if {how!r} == "hangs, being killed" else None
            )
            futures = [streamer.submit([i]) for i in range(20)]
            input()
            if {how!r} == "hangs, forgotten":
                streamer = None
    """
    with running(source, tmp_path) as program:
        await_line(program, "hangs")
        with Watch(descendants(program.pid)) as family:
            program.communicate("end\n")
            assert program.returncode == 0
            assert family.alive_after(GONE) == []


# -- called by people who do not wait


class Payload:
    """An item that can be counted."""


# A call that is over, and empty, may stay in the queue until there are so many of them.
SWEPT_BEYOND = 32


def kept() -> Counter[str]:
    """How many calls there are, in any state, and of what they hold."""
    gc.collect()
    # By type: isinstance() asks an object for its __class__, and torch has some that warn then.
    names = (type(each).__qualname__ for each in gc.get_objects())
    return Counter(
        name for name in names if name in ("Call", "Future", "Payload", "PredictTimeout")
    )


def test_hundreds_of_calls_that_end_too_late_leave_nothing(gate: Gate) -> None:
    # Room for all that is to wait, or a full batch would be sent ahead of the one at the gate.
    with Streamer(models.Gated, 2_000, model_init_args=(gate,)) as streamer:
        first = streamer.submit([0])
        gate.await_arrival()
        before = kept()
        for _ in range(300):
            with pytest.raises(PredictTimeout):
                streamer.predict([Payload()], timeout=0.0005)
        futures = [streamer.submit([Payload()], timeout=0.05) for _ in range(300)]
        concurrent.futures.wait(futures)
        assert {type(future.exception()) for future in futures} == {PredictTimeout}
        stats = streamer.stats()
        assert (stats.pending, stats.expired) == (0, 600)
        del futures
        # Who waits is told first: the thread that tells lets go of it all a moment later.
        until(lambda: kept() - before <= Counter(Call=SWEPT_BEYOND))
        gate.let_through()
        first.result()
