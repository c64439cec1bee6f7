"""Workers start wherever the application runs: uWSGI, Celery, a pool of multiprocessing's."""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import IO

import pytest

import models
from service_streamer import Streamer, WorkerStartError
from service_streamer.workers import starting

TESTS = Path(__file__).parent
UWSGI = shutil.which("uwsgi", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
IN_CI = bool(os.environ.get("CI"))


def environment(folder: Path) -> dict[str, str]:
    places = [str(folder), str(TESTS), str(TESTS.parent), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


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
    starting._search.cache_clear()
    yield program
    spawn.set_executable(before)
    starting._search.cache_clear()


def test_workers_are_started_with_python_when_another_program_embeds_it(
    as_if_embedded: Path,
) -> None:
    with Streamer(models.double, worker_timeout=None) as streamer:
        assert streamer.predict([1]) == [2]
    assert os.fsdecode(spawn.get_executable()) == str(as_if_embedded), "it was not put back"


def test_so_is_a_fork_server(tmp_path: Path) -> None:
    program = write(
        tmp_path / "program.py",
        """
        import sys
        sys.executable = "/bin/false"
        import multiprocessing, multiprocessing.spawn
        multiprocessing.set_executable(sys.executable)
        import models
        from service_streamer import Streamer

        if __name__ == "__main__":
            with Streamer(models.double, mp_start_method="forkserver") as streamer:
                print(streamer.predict([1], timeout=None))
        """,
    )
    run = subprocess.run(
        [sys.executable, str(program)], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == ("[2]\n", "")


def test_an_executable_that_the_application_has_set_is_left_alone(
    as_if_embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn.set_executable("/somewhere/python-of-ours")
    assert starting.find_interpreter() is None


@pytest.mark.parametrize(
    "name", ["/usr/bin/python3", "/usr/bin/python3.11d", "/x/Python", "/opt/pypy3.10"]
)
def test_an_interpreter_is_known_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = spawn.get_executable()
    monkeypatch.setattr(sys, "executable", name)
    spawn.set_executable(name)
    assert starting.find_interpreter() is None
    spawn.set_executable(before)


def test_without_an_interpreter_the_error_says_what_to_do(
    as_if_embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_candidates", lambda prefix: iter([str(as_if_embedded)]))
    with pytest.raises(WorkerStartError, match=r"multiprocessing\.set_executable\(") as caught:
        Streamer(models.double)
    assert str(as_if_embedded) in str(caught.value)


# -- real hosts


def ended(stream: IO[str]) -> str:
    """All that is said from now on. Every descendant has the stream, so its end is theirs."""
    return stream.read()


@pytest.mark.short_cases("--module=app")
@pytest.mark.skipif(not (UWSGI or IN_CI), reason="uWSGI is not installed: pip install uwsgi")
@pytest.mark.parametrize("loaded_as", ["--module=app", "--wsgi-file=app.py"])
def test_uwsgi(tmp_path: Path, loaded_as: str) -> None:
    assert UWSGI is not None, "CI has to have uWSGI: it is in the extra `test`"
    write(
        tmp_path / "app.py",
        """
        from service_streamer import ManagedModel, Streamer

        class Doubler(ManagedModel):
            def init_model(self):
                pass

            def predict(self, batch):
                return [2 * item for item in batch]

        streamer = Streamer(Doubler, worker_timeout=None)

        def application(environ, start_response):
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [repr(streamer.predict([1, 2])).encode()]
        """,
    )
    server = subprocess.Popen(
        [
            *(UWSGI, "--http-socket=127.0.0.1:0", loaded_as, "--master", "--lazy-apps"),
            *("--enable-threads", "--die-on-term", "--need-app", f"--home={sys.prefix}"),
        ],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if "port auto-assigned" in line:
                break
        port = said[-1].partition("127.0.0.1:")[2].split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert answer.read() == b"[2, 4]"
    finally:
        server.terminate()
        rest = ended(server.stderr)
        server.stderr.close()
    server.wait()
    assert "Traceback" not in rest


@pytest.mark.long
@pytest.mark.skipif(
    not (importlib.util.find_spec("celery") or IN_CI), reason="Celery is not installed"
)
def test_celerys_prefork_pool(tmp_path: Path) -> None:
    write(
        tmp_path / "tasks.py",
        """
        import functools
        import models
        from celery import Celery
        from service_streamer import Streamer

        folder = __file__.rpartition("/")[0]
        app = Celery(
            "tasks",
            broker="filesystem://",
            backend=f"file://{folder}",
            broker_transport_options={
                "data_folder_in": folder, "data_folder_out": folder, "control_folder": folder
            },
        )

        @functools.cache
        def streamer():
            return Streamer(models.double, worker_timeout=None)

        @app.task
        def double(number):
            return streamer().predict([number])
        """,
    )
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency=1"),
            *("--pool=prefork", "--without-gossip", "--without-mingle"),
        ],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert worker.stdout is not None
    try:
        client = subprocess.run(
            [sys.executable, "-c", "import tasks; print(tasks.double.delay(21).get(timeout=240))"],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
        )
    finally:
        worker.terminate()
        said = ended(worker.stdout)
        worker.stdout.close()
    worker.wait()
    assert client.stdout == "[42]\n", client.stderr + said


@pytest.mark.short_cases("spawn-close")
@pytest.mark.parametrize("end", ["close", "terminate"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_pool_of_multiprocessings(tmp_path: Path, method: str, end: str) -> None:
    program = write(
        tmp_path / "program.py",
        f"""
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
        """,
    )
    run = subprocess.run(
        [sys.executable, str(program)], env=environment(tmp_path), capture_output=True, text=True
    )  # which returns when every descendant has ended
    assert (run.stdout, run.stderr) == ("[[2], [4]]\n", "")


def test_the_workers_of_a_daemonic_process_end_when_that_is_killed(tmp_path: Path) -> None:
    program = write(
        tmp_path / "program.py",
        """
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
        """,
    )
    run = subprocess.run(
        [sys.executable, str(program)], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == (f"[2]\n{-signal.SIGKILL}\n", "")


def test_a_process_that_is_no_daemon_is_left_as_it_is() -> None:
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = dict(config)
    with starting.startable():
        assert config == before
    assert config == before


def test_a_frozen_program_without_freeze_support_starts_no_workers_without_end(
    tmp_path: Path,
) -> None:
    # What PyInstaller's own start does with what multiprocessing starts, and nothing more.
    program = write(
        tmp_path / "program.py",
        """
        import os, sys
        sys.frozen = True
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
        """,
    )
    frozen = write(tmp_path / "frozen", f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    frozen.chmod(0o755)
    text = program.read_text().replace(
        "sys.frozen = True", f"sys.frozen = True\nsys.executable = {str(frozen)!r}", 1
    )
    program.write_text(text)
    variables = environment(tmp_path)
    run = subprocess.run([str(frozen)], env=variables, capture_output=True, text=True)
    assert "call multiprocessing.freeze_support()" in run.stderr.splitlines()[-1]
    variables["SUPPORTED"] = "yes"
    run = subprocess.run([str(frozen)], env=variables, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[2]\n", "")


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer"])
def test_a_fork_without_hooks_of_python_is_noticed(kind: str, tmp_path: Path) -> None:
    """As uWSGI forks without --lazy-apps: with one pair of pipes for all, results got mixed up."""
    program = write(
        tmp_path / "program.py",
        f"""
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
        """,
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("7 [6]\n", "")
