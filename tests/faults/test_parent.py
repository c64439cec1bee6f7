"""The web process ends although a worker hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_processes import GONE, Watch, await_line, descendants, running

from cases import long_cases


@pytest.mark.parametrize(
    "how",
    ["hangs", *long_cases("hangs, forgotten", "stopped", "hangs, deaf", "hangs, being killed")],
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


# A call that is over, and empty, may stay in the queue until there are so many of them.
