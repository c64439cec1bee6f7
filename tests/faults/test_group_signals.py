"""Signals to a whole process group, as systemd and terminals send them: the parent decides."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from fault_processes import await_line, outcome, running
from signal_models import HandlesSigterm, exit_codes_of_children

import models
from serve_process import until
from service_streamer import Streamer
from service_streamer.testing import Gate

NUMBERS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
COMPUTE, START, LOAD = "while they compute", "while they start", "while they load"


def program_that_drains(method: str, gate: Path) -> str:
    return f"""
        import os, signal, threading
        import signal_models
        from service_streamer import Streamer
        from service_streamer.testing import Gate

        if __name__ == "__main__":
            os.setpgid(0, 0)
            told = threading.Event()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, lambda *_: told.set())
            with Streamer(
                signal_models.Gated, 1, worker_num=2, mp_start_method={method!r},
                model_init_args=(Gate({str(gate)!r}),), worker_timeout=None,
            ) as streamer:
                futures = [streamer.submit([i]) for i in range(2)]
                print("begun", flush=True)
                told.wait()
                print("told", flush=True)
                streamer.close()
                stats = streamer.stats()
                print(len([future.result() for future in futures]), stats.restarts, flush=True)
    """


@pytest.mark.parametrize(
    ("method", "when", "number"),
    [
        *(("spawn", COMPUTE, number) for number in NUMBERS),
        ("fork", LOAD, signal.SIGTERM),
        *(
            pytest.param(*case, signal.SIGTERM, marks=pytest.mark.long)
            for case in (("spawn", START), ("spawn", LOAD), ("forkserver", LOAD))
        ),
    ],
)
def test_workers_outlive_a_signal_to_the_group_and_finish_their_work(
    method: str, when: str, number: signal.Signals, gate: Gate, tmp_path: Path
) -> None:
    with running(program_that_drains(method, tmp_path / "gate"), tmp_path) as program:
        await_line(program, "begun")
        if when != START:
            for _ in range(2):
                gate.await_arrival()
        if when == COMPUTE:
            gate.let_through(2)
            gate.await_arrival()
        os.killpg(program.pid, number)
        await_line(program, "told")
        gate.let_through(4)
        out, err = program.communicate()
    if when == START:  # one worker may compute both while the other still starts
        err = re.sub(r"worker \d \(pid \d+\) did not end within 0.5 s: it is killed\n", "", err)
    assert (program.returncode, out, err) == (0, "2 0\n", "")


def test_workers_are_replaced_after_a_signal_to_the_group_as_before(tmp_path: Path) -> None:
    """multiprocessing's own helper process is of the group, too."""
    source = """
        import os, signal, threading
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            os.setpgid(0, 0)
            told = threading.Event()
            signal.signal(signal.SIGHUP, lambda *_: told.set())
            with Streamer(models.process_ids) as streamer:
                before = streamer.predict([None])
                os.killpg(0, signal.SIGHUP)
                told.wait()
                streamer.restart_workers()
                print(streamer.predict([None]) != before, flush=True)
    """
    assert outcome(source, tmp_path) == (0, "True\n", "")


def test_a_handler_of_the_model_s_own_stays(tmp_path: Path) -> None:
    path = tmp_path / "handled"
    with Streamer(HandlesSigterm, model_init_args=(path,)) as streamer:
        [worker] = streamer.predict([None])
        os.kill(worker, signal.SIGTERM)
        assert streamer.predict([None]) == [worker]
        until(path.exists)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_the_model_s_own_can_be_ended(method: str) -> None:
    kinds = ["program", "fork", "spawn"]
    with Streamer(exit_codes_of_children, mp_start_method=method, worker_timeout=None) as streamer:
        assert streamer.predict(kinds) == [-signal.SIGTERM] * 3


def test_the_parent_gets_its_signals_after_a_worker_was_started() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Streamer(models.echo) as streamer:
        streamer.wait_ready()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
