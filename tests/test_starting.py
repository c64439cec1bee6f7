"""Workers start wherever the application runs: uWSGI, Celery, a pool of multiprocessing's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path

import pytest
from fault_processes import outcome

import models
from cases import long_cases
from service_streamer import Streamer, WorkerStartError

PYTHON = sys.executable

# -- the interpreter


@pytest.fixture
def as_if_embedded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """This process as it would be under a server that embeds Python; returns that program."""
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    before = spawn.get_executable()
    monkeypatch.setattr(sys, "executable", str(program))
    spawn.set_executable(str(program))
    yield program
    spawn.set_executable(before)


def test_workers_are_started_with_python_when_another_program_embeds_it(
    as_if_embedded: Path,
) -> None:
    with Streamer(models.double, worker_timeout=None) as streamer:
        assert streamer.predict([1]) == [2]
    assert os.fsdecode(spawn.get_executable()) == str(as_if_embedded), "it was not put back"


def test_a_fork_server_is_started_with_python_when_another_program_embeds_it(
    tmp_path: Path,
) -> None:
    program = """
        import sys
        sys.executable = "/bin/false"
        import multiprocessing, multiprocessing.spawn
        multiprocessing.set_executable(sys.executable)
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            with Streamer(models.double, mp_start_method="forkserver") as streamer:
                print(streamer.predict([1], timeout=None))
        """
    assert outcome(program, tmp_path) == (0, "[2]\n", "")


@pytest.mark.parametrize("name", ["set by the application", "python3.11d", "pypy3.10"])
def test_workers_are_started_with_the_executable_that_is_set_or_is_named_as_an_interpreter(
    as_if_embedded: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / name
    python.write_text(f'#!/bin/sh\ntouch "$0.used"\nexec {PYTHON} "$@"\n')
    python.chmod(0o755)
    spawn.set_executable(str(python))
    if name != "set by the application":
        monkeypatch.setattr(sys, "executable", str(python))
    with Streamer(models.double, worker_timeout=None) as streamer:
        assert streamer.predict([1]) == [2]
    assert Path(f"{python}.used").exists()


def test_the_error_says_what_to_do_where_there_is_no_interpreter(
    as_if_embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerStartError, match=r"multiprocessing\.set_executable\(") as caught:
        Streamer(models.double)
    assert str(as_if_embedded) in str(caught.value)


# -- processes of multiprocessing


@pytest.mark.parametrize("end", ["close", *long_cases("terminate")])
@pytest.mark.parametrize("method", ["spawn", *long_cases("fork")])
def test_a_pool_of_multiprocessings(tmp_path: Path, method: str, end: str) -> None:
    program = f"""
        import functools
        import multiprocessing, multiprocessing.spawn
        import models
        from service_streamer import Streamer

        @functools.cache
        def streamer():
            return Streamer(models.double, worker_timeout=None)

        def double(number):
            assert multiprocessing.current_process().daemon
            results = streamer().predict([number])
            assert multiprocessing.current_process().daemon, "it was not put back"
            return results

        if __name__ == "__main__":
            pool = multiprocessing.get_context({method!r}).Pool(1)
            print(pool.map(double, [1, 2]))
            pool.{end}()
            pool.join()
        """
    assert outcome(program, tmp_path) == (0, "[[2], [4]]\n", "")


def test_the_workers_of_a_daemonic_process_end_when_that_is_killed(tmp_path: Path) -> None:
    program = """
        import multiprocessing, os, signal
        import models
        from service_streamer import Streamer

        def child(connection):
            streamer = Streamer(models.double, worker_timeout=None)
            connection.send(streamer.predict([1]))
            connection.recv()

        if __name__ == "__main__":
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=child, args=(theirs,), daemon=True)
            process.start()
            print(ours.recv())
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            print(process.exitcode)
        """
    assert outcome(program, tmp_path) == (0, f"[2]\n{-signal.SIGKILL}\n", "")


def test_a_dead_worker_is_replaced_when_the_folder_was_removed(tmp_path: Path) -> None:
    program = """
        import os, signal
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            os.mkdir("release")
            os.chdir("release")
            with Streamer(models.process_ids) as streamer:
                [worker] = streamer.predict([1])
                os.rmdir("../release")
                os.kill(worker, signal.SIGKILL)
                print(streamer.predict([1]) != [worker])
        """
    assert outcome(program, tmp_path)[:2] == (0, "True\n")


def test_a_start_does_not_move_the_program_out_of_a_removed_folder(tmp_path: Path) -> None:
    """Its other threads can still reach what is beside that folder."""
    folder = tmp_path / "release"
    folder.mkdir()
    program = f"""
        import os
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            os.chdir({str(folder)!r})
            os.rmdir({str(folder)!r})
            os.register_at_fork(before=lambda: print(os.path.exists("../program.py"), flush=True))
            with Streamer(models.double, mp_start_method="fork") as streamer:
                print(streamer.predict([1]))
        """
    assert outcome(program, tmp_path)[:2] == (0, "True\n[2]\n")


def test_a_frozen_program_without_freeze_support_starts_no_workers_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, program = tmp_path / "frozen", tmp_path / "program.py"
    frozen.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    frozen.chmod(0o755)
    # What PyInstaller's own start does with what multiprocessing starts, and nothing more.
    text = f"""
        import os, sys
        sys.frozen = True
        sys.executable = {str(frozen)!r}
        import multiprocessing, multiprocessing.spawn
        if sys.argv[1:2] and sys.argv[-2] == "-c":
            exec(sys.argv[-1])
            sys.exit()
        if os.environ.get("SUPPORTED"):
            multiprocessing.spawn.freeze_support()  # as PyInstaller makes of freeze_support()
        import models
        from service_streamer import Streamer
        if __name__ == "__main__":
            depth = int(os.environ.get("DEPTH", 0))
            assert depth < 2, "a worker started workers"
            os.environ["DEPTH"] = str(depth + 1)
            with Streamer(models.double, worker_timeout=None) as streamer:
                print(streamer.predict([1]))
        """
    assert "call multiprocessing.freeze_support()" in outcome(text, tmp_path)[2].splitlines()[-1]
    monkeypatch.setenv("SUPPORTED", "yes")
    assert outcome(text, tmp_path) == (0, "[2]\n", "")


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer"])
def test_a_fork_without_hooks_of_python_is_noticed(kind: str, tmp_path: Path) -> None:
    """As uWSGI forks without --lazy-apps: with one pair of pipes for all, results got mixed up."""
    program = f"""
        import ctypes
        import os

        import models
        from service_streamer import {kind}, StreamerForked

        if __name__ == "__main__":
            with {kind}(models.double) as streamer:
                assert streamer.predict([1]) == [2]
                child = ctypes.PyDLL(None).fork()
                if not child:
                    try:
                        streamer.predict([2], timeout=10)
                    except StreamerForked:
                        os._exit(7)
                    os._exit(1)
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), streamer.predict([3]))
        """
    assert outcome(program, tmp_path) == (0, "7 [6]\n", "")
