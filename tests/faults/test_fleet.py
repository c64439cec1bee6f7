"""Several web processes and the pool that they share: what dies, and how they end."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cases import long_cases
from leavings import children
from serve_process import Serving, environment, until, workers
from service_streamer import PredictTimeout, StreamerBroken, WorkerStartError
from service_streamer.engine.operator_signals import SignalSocket, passed_on_later
from service_streamer.options.table import StreamerOptions
from service_streamer.serve.fleet_models import ProcessLink
from service_streamer.serve.hosted_model import ServiceFailed
from service_streamer.serve.pool_owner import PoolOwner, owned
from service_streamer.testing import Gate

OBEDIENT = ("served_models:Obedient", "--web-workers", "2")

OwnerOf = Callable[..., PoolOwner]


def standing(service: Serving) -> tuple[int, str]:
    response = service.client.get("/health/ready")
    return response.status_code, response.json()["detail"]


LATE = ("served_models:Late", "--web-workers", "2")


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory for the sockets of services: empty at the end. Its path must be short."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield folder
        until(lambda: not any(each.is_file() or each.is_socket() for each in folder.rglob("*")))


def folders(runtime: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime)}


def all_of(service: Serving) -> list[int]:
    """Its processes, and those of its pool."""
    pools = service.pool()
    workers = [child for pid in pools for child in children(pid)]
    return [service.process.pid, *service.children(), *pools, *workers]


def is_there(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # of nobody's child that init has not reaped


def test_readiness_is_red_until_a_dead_pool_is_replaced(runtime: Path, gate: Gate) -> None:
    gate.let_through(1)
    env = folders(runtime) | {"TEST_GATE": str(gate.__getstate__())}
    with Serving(*LATE, **env) as service:
        # One that has never been ready tells its callers to come again.
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        assert service.answer(1) == 1
        gate.await_arrival()
        [pid] = service.pool()
        os.kill(pid, signal.SIGKILL)
        gate.await_arrival()  # the next pool's worker, which loads
        assert standing(service)[0] == 503
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(service.predict, n) for n in range(4)]
            gate.let_through(1)
            assert [each.result().json() for each in waiting] == [*range(4)]
        until(lambda: standing(service) == (200, "the model answers"))
        assert service.process.poll() is None
        assert len(set(service.pool()) - {pid}) == 1
        assert service.terminate() == 0


@pytest.mark.long
def test_a_pool_that_hangs_makes_it_not_ready_and_no_web_process_hang(runtime: Path) -> None:
    with Serving(*OBEDIENT, **folders(runtime)) as service:
        assert service.answer(1) == 1
        [pid] = service.pool()
        os.kill(pid, signal.SIGSTOP)
        try:
            status, detail = standing(service)
            assert (status, "does not answer" in detail) == (503, True)
            assert service.stats()["queue"]["pending"] is None
            assert service.client.get("/health/live").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: standing(service) == (200, "the model answers"))
        assert service.pool() == [pid]
        assert service.terminate() == 0


@pytest.mark.long
def test_a_stopped_web_process_holds_up_nobody(runtime: Path, tmp_path: Path) -> None:
    """Plans that it does not read fill its connection, and this one is too large for it at once."""
    keys = json.dumps([f"{number:064}" for number in range(10_000)])
    config = tmp_path / "service.toml"
    config.write_text(
        f'[serve]\nmodel = "served_models:Obedient"\nweb-workers = 2\napi-key = {keys}'
    )
    with Serving("--config", str(config), **folders(runtime)) as service:
        service.await_web_processes(2)
        runs = r"web process \d+ runs \(pid (\d+)\)"
        until(lambda: len(re.findall(runs, service.log())) == 2)
        stopped, killed = map(int, re.findall(runs, service.log()))
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "every worker has been replaced" in service.log())
        assert "has not followed" not in service.log()
        os.kill(stopped, signal.SIGSTOP)
        try:
            service.process.send_signal(signal.SIGHUP)
            until(lambda: service.log().count("SIGHUP: replacing") == 2)
            os.kill(killed, signal.SIGKILL)
            until(lambda: f"(pid {killed}) died" in service.log(), seconds=30)
            until(lambda: len(re.findall(runs, service.log())) == 3, seconds=30)
            until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 3)
            figures = service.client.get("/metrics", headers={"x-api-key": f"{0:064}"}).text
            assert len({*re.findall(r'process="(\d)"', figures)}) == 1, "the other is left out"
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert service.terminate() == 0


@pytest.mark.parametrize(
    "how", ["kill", *long_cases("terminate", "interrupt", "terminate all", "interrupt all")]
)
def test_nothing_is_left(how: str, runtime: Path) -> None:
    # To wait so long at the end is more than the system takes.
    with Serving(*OBEDIENT, "--timeout", "1e9", **folders(runtime)) as service:
        assert service.answer(1) == 1
        pids = all_of(service)
        assert len(pids) >= 5
        if how == "kill":
            service.process.kill()
            service.process.wait()
        elif how == "interrupt":  # Ctrl-C: all but the pool are in the terminal's group
            os.killpg(service.process.pid, signal.SIGINT)
            assert service.process.wait() == 0
        else:
            if how.endswith("all"):  # as systemd does
                for pid in pids:
                    os.kill(pid, signal.SIGTERM if how == "terminate all" else signal.SIGINT)
            assert service.terminate() == 0
            assert not service.pool()
            assert service.log().count("worker 0 is ready") == 1
        until(lambda: not any(map(is_there, pids)))
        assert "Traceback" not in service.log()


@pytest.mark.long
def test_web_processes_that_a_pool_refuses_do_not_restart(runtime: Path, tmp_path: Path) -> None:
    """As after an upgrade in place. They asked again and again, and the log had no word of it."""
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    with Serving(*OBEDIENT, PYTHONPATH=path, **folders(runtime)) as service:
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        upgrade = "import service_streamer\nservice_streamer.__version__ = '99'\n"
        (tmp_path / "sitecustomize.py").write_text(upgrade)
        one, other = web_processes(service)
        os.kill(one, signal.SIGKILL)
        until(lambda: "is not restarted, since it would fail again" in service.log())
        assert "cannot serve: pool 'serve-" in service.log()
        assert service.predict(1).json() == 1  # of the other
        os.kill(other, signal.SIGKILL)
        assert service.process.wait() == 3
        last = service.log().splitlines()[-1]
        assert "the service ends, since its web processes cannot be started" in last


@pytest.mark.long
@pytest.mark.parametrize("number", ["1", "2"])
def test_all_that_dies_is_replaced_when_the_folder_of_the_service_was_removed(
    tmp_path: Path, number: str
) -> None:
    (tmp_path / "release").mkdir()
    with Serving(*OBEDIENT[:2], number, cwd=tmp_path / "release") as service:
        (tmp_path / "release").rmdir()
        for kind in (workers, lambda pool: [pool], lambda _: workers(service.process.pid)):
            for pid in kind(*(service.pool() or [service.process.pid])):
                os.kill(pid, signal.SIGKILL)
            assert service.answer(1) == 1
            if number == "1":
                break
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "every worker has been replaced" in service.log())


@pytest.mark.long
def test_two_services_have_two_pools(runtime: Path) -> None:
    with (
        Serving(*OBEDIENT, **folders(runtime)) as one,
        Serving(*OBEDIENT, **folders(runtime)) as two,
    ):
        assert one.answer(1) == two.answer(1) == 1
        assert one.pool() != two.pool()
        assert one.terminate() == 0
        assert two.answer(2) == 2
        assert len(two.pool()) == 1
        assert two.terminate() == 0


@pytest.mark.long
@pytest.mark.parametrize("dies", ["the pool", "web processes"])
def test_nothing_is_started_again_without_the_directory_of_the_sockets(dies: str) -> None:
    """As systemd removes it when the user logs out. The service ends, and says why."""
    with tempfile.TemporaryDirectory() as name:
        sockets = Path(name) / "runtime"
        sockets.mkdir(0o700)
        with Serving(*OBEDIENT, XDG_RUNTIME_DIR=str(sockets)) as service:
            service.await_web_processes(2)
            [pool] = service.pool()
            sockets.rename(Path(name) / "moved")
            if dies == "the pool":  # the next one would make another directory, for nobody
                os.kill(pool, signal.SIGKILL)
                says = "the service ends, since its workers have no process any more"
            else:
                one, other = web_processes(service)
                os.kill(one, signal.SIGKILL)
                until(lambda: "is not restarted, since it would fail again" in service.log())
                assert service.pool() == [pool]
                assert service.predict(1).json() == 1  # of the other
                os.kill(other, signal.SIGKILL)
                says = "cannot serve: the directory"
            assert service.process.wait() == 3
            assert says in service.log()
            assert not service.pool()


class Watched(Connection):
    """A connection that says when something is sent."""

    def __init__(self, handle: int, sends: threading.Semaphore) -> None:
        super().__init__(handle)
        self._sends = sends

    def send(self, message: Any) -> None:
        self._sends.release()
        super().send(message)


def test_the_connection_to_a_dead_web_process_stays_open_until_its_parent_notices() -> None:
    """The parent's main thread waits for it, and a closed one made that fail: the service ended."""
    ours, theirs = multiprocessing.Pipe()
    sends = threading.Semaphore(0)
    with ours:
        connection = Watched(os.dup(ours.fileno()), sends)
    link = ProcessLink(connection)
    theirs.close()
    for plan in range(2):
        link.send(plan)
        assert sends.acquire(timeout=30)
    assert wait([connection]) == [connection]
    link.close()
    until(lambda: connection.closed)


def pool_streamer(at: str = "", *errors: Exception, pid: int | None = None) -> Any:
    """A streamer of a pool, the process of which is ``pid``; its call ``at`` raises the errors."""
    pool = Mock(spec=["backend", "close", "stats", "try_start_once", "wait_ready"], pool_pid=pid)
    pool.backend = pool.pool_client = pool
    pool.when_workers_change = lambda callback: callback()
    if at:
        getattr(pool, at).side_effect = errors
    return pool


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> OwnerOf:
    """Makes owners of pools whose streamers the test has."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))

    def owner(pool: Any, wakeup: SignalSocket, **options: Any) -> PoolOwner:
        def streamer_of(_: str, given: StreamerOptions, __: str) -> Any:
            assert (given.cache_size, given.deduplicate) == (0, False), "the owner makes no calls"
            return pool

        monkeypatch.setattr("service_streamer.serve.pool_owner.streamer_of", streamer_of)
        given = owned(StreamerOptions(cache_size=10, cache_ttl=60.0, deduplicate=True))
        given = dataclasses.replace(given, shared="serve-of-a-test")
        return PoolOwner("a:b", given, "a model", wakeup, model="a", **options)

    return owner


@pytest.mark.parametrize(
    ("at", "errors", "kind"),
    [
        ("try_start_once", [PredictTimeout("slow"), WorkerStartError("none")], WorkerStartError),
        ("wait_ready", [WorkerStartError("no weights")], WorkerStartError),
        ("wait_ready", [KeyError("a bug")], ServiceFailed),
        ("stats", [StreamerBroken("it failed")], ServiceFailed),
        ("stats", [PredictTimeout("none yet"), StreamerBroken("it failed")], ServiceFailed),
        ("stats", [KeyError("a bug")], ServiceFailed),
    ],
)
def test_the_service_never_goes_on_without_its_pool(
    owner: OwnerOf, at: str, errors: list[Exception], kind: type[Exception]
) -> None:
    with SignalSocket() as wakeup:
        with owner(pool_streamer(at, *errors), wakeup) as owning:
            assert wakeup.ours.recv(1) == b"\0"
        assert type(owning.failure) is kind


def test_a_service_s_pool_leaves_signals_to_its_clients_and_keeps_its_log() -> None:
    program = (
        "import logging, os, signal, subprocess, sys\n"
        "from service_streamer.pool import pool_protocol\n"
        "from service_streamer.serve.pool_preparation import prepare_pools\n"
        "logging.basicConfig(format='other: %(message)s')\n"
        "[log] = logging.getLogger().handlers\n"
        "prepare_pools('json')\n"
        "pool_protocol.preparation()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert logging.getLogger().handlers == [log]\n"
        "logging.getLogger('service_streamer').info('it goes on')\n"
        "child = 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)'\n"
        "print(subprocess.run([sys.executable, '-S', '-c', child]).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"-15\n"), done.stderr
    assert json.loads(done.stderr)["message"] == "it goes on"


def test_a_signal_hurries_the_end_of_a_pool_that_hangs(owner: OwnerOf) -> None:
    title = "service-streamer pool serve-of-a-test"
    with (
        subprocess.Popen([title, "1000"], executable=shutil.which("sleep")) as hung,
        SignalSocket() as wakeup,
    ):
        with owner(pool_streamer(pid=hung.pid), wakeup, grace=1e6):
            wakeup.ring()  # no wish of an operator
            os.kill(os.getpid(), signal.SIGTERM)
        assert hung.wait() == -signal.SIGKILL


def test_a_signal_before_a_process_handles_it_does_not_kill_it() -> None:
    program = (
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "from service_streamer.engine.operator_signals import hold_signals, take_signals\n"
        "hold_signals()\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "take_signals()\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
    )
    with passed_on_later():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"set()\n"), done.stderr
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_stacks_do_not_kill_a_busy_process() -> None:
    """They were read while the threads changed them; a signal in some hundred was fatal."""
    program = (
        "import json, os, subprocess, sys, threading\n"
        "from service_streamer.engine.operator_signals import hold_signals\n"
        "def work():\n"
        "    while True:\n"
        "        json.dumps({'a': sorted([3, 2, 1], key=lambda n: -n)}, indent=1)\n"
        "hold_signals()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "kill = (f'import os, signal, time\\nfor _ in range(500):\\n'\n"
        "        f' os.kill({os.getpid()}, signal.SIGUSR2); time.sleep(0.001)')\n"
        "subprocess.run([sys.executable, '-S', '-c', kill])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"most recent call first" in done.stderr


@pytest.mark.long
def test_all_metrics_are_there_after_all_web_processes_were_ended() -> None:
    """The last one that ended deleted the folder in which they meet."""
    with tempfile.TemporaryDirectory() as short, Serving(*OBEDIENT, TMPDIR=short) as service:
        # One that is ended before it is ready never says that it is.
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        first = set(web_processes(service))
        for pid in first:
            os.kill(pid, signal.SIGTERM)
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 4)
        until(
            lambda: (
                set("01") == {*re.findall(r'process="(\d)"', service.client.get("/metrics").text)}
            )
        )
        assert first.isdisjoint(web_processes(service))


def web_processes(service: Serving) -> list[int]:
    runs = re.findall(r"web process \d+ runs \(pid (\d+)\)", service.log())
    return [pid for pid in service.children() if str(pid) in runs]
