"""Several web processes and the pool that they share: what dies, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_processes import children

from serve_process import Serving, environment, until
from service_streamer.engine.operator_signals import SignalSocket, passed_on_later
from service_streamer.errors import PredictTimeout, StreamerBroken, WorkerStartError
from service_streamer.options.table import StreamerOptions
from service_streamer.pool.directory import paths_of
from service_streamer.serve.pool_owner import PoolOwner, owned
from service_streamer.serve.running import ServiceFailed
from service_streamer.testing import Gate

OBEDIENT = ("served_models:Obedient", "--web-workers", "2")


def metrics(service: Serving) -> str:
    return service.client.get("/metrics").text


def standing(service: Serving) -> tuple[int, str]:
    response = service.client.get("/health/ready")
    return response.status_code, response.json()["detail"]


@pytest.mark.long
def test_readiness_is_red_while_every_batch_fails() -> None:
    """The web processes counted hosts, and were ready all the time."""
    with Serving(*OBEDIENT) as service:
        assert service.answer(1) == 1  # both web processes are ready
        for _ in range(12):
            assert service.predict("raise").status_code == 500
        until(lambda: "batches failed, and none was computed since" in standing(service)[1])
        assert standing(service)[0] == 503
        assert service.predict(1).status_code == 200
        until(lambda: standing(service) == (200, "the model answers"))
        assert service.terminate() == 0


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
        assert service.answer(1) == 1
        gate.await_arrival()
        # One that has never been ready tells its callers to come again.
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
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


def test_calls_that_a_dead_pool_held_are_answered(runtime: Path, gate: Gate) -> None:
    env = folders(runtime) | {"TEST_GATE": str(gate.__getstate__())}
    with Serving(*OBEDIENT, **env) as service, ThreadPoolExecutor(2) as threads:
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        computing = threads.submit(service.predict, 1)
        gate.await_arrival()
        [pid] = service.pool()
        os.kill(pid, signal.SIGKILL)
        gate.let_through(4)  # the worker of the dead pool may take one
        assert computing.result().json() == 1
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


def test_streams_come_through_the_pool_and_a_client_that_leaves_frees_its_place(
    runtime: Path, gate: Gate, tmp_path: Path
) -> None:
    env = folders(runtime) | {"TEST_GATE": str(gate.__getstate__())}
    arguments = ("served_models:Counting", "--web-workers", "2", "--batch-size", "1")
    record = tmp_path / "steps"
    with Serving(*arguments, TEST_RECORD=str(record), **env) as service:
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        body = {"inputs": {"n": 30_000}, "stream": True}
        gate.let_through(2)
        with service.client.stream("POST", "/predict", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"output":1}'
        until(lambda: service.stats()["totals"]["disconnected"] == 1)
        until(lambda: service.stats()["totals"]["cancelled"] == 1)  # the pool knows it, too
        gate.let_through(40_000)
        done = service.post("/predict", {"inputs": {"n": 2}, "stream": True})
        assert done.text == 'data: {"output":1}\n\ndata: {"output":2}\n\ndata: [DONE]\n\n'
        assert len(record.read_text().split()) < 30_000
        until(lambda: service.stats()["streams"] == {"open": 0, "total": 2})
        assert service.terminate() == 0


@pytest.mark.short_cases("kill")
@pytest.mark.parametrize(
    "how", ["kill", "terminate", "interrupt", "terminate all", "interrupt all"]
)
def test_nothing_is_left(how: str, runtime: Path) -> None:
    with Serving(*OBEDIENT, **folders(runtime)) as service:
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
def test_web_processes_that_the_pool_refuses_are_not_restarted(
    runtime: Path, tmp_path: Path
) -> None:
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
def test_a_pool_that_cannot_be_started_again_ends_the_service_with_an_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        sockets = Path(name) / "runtime"
        sockets.mkdir(0o700)
        with Serving(*OBEDIENT, XDG_RUNTIME_DIR=str(sockets)) as service:
            assert service.answer(1) == 1
            [pid] = service.pool()
            # The next pool makes its own directory again, but not the one that it was in.
            sockets.rename(Path(name) / "moved")
            os.kill(pid, signal.SIGKILL)
            assert service.process.wait() == 3
            last = service.log().splitlines()[-1]
            assert "the service ends, since its workers have no process any more" in last


def test_a_service_whose_web_processes_have_a_cache_has_an_owner_of_its_pool() -> None:
    options = StreamerOptions(cache_size=10, cache_ttl=60.0, deduplicate=True)
    with SignalSocket() as wakeup:
        owner: Any = PoolOwner("a:b", owned(options), "a model", wakeup, model="a")
    assert (owner._options.cache_size, owner._options.deduplicate) == (0, False)


@pytest.mark.long
def test_a_web_process_starts_no_second_pool_after_the_directory_was_removed() -> None:
    """As systemd removes it when the user logs out."""
    with tempfile.TemporaryDirectory() as name:
        sockets = Path(name) / "runtime"
        sockets.mkdir(0o700)
        with Serving(*OBEDIENT, XDG_RUNTIME_DIR=str(sockets)) as service:
            until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
            sockets.rename(Path(name) / "moved")
            one, other = web_processes(service)
            os.kill(one, signal.SIGKILL)
            until(lambda: "is not restarted, since it would fail again" in service.log())
            assert "cannot serve: the directory" in service.log()
            assert len(service.pool()) == 1
            assert service.predict(1).json() == 1  # of the other
            os.kill(other, signal.SIGKILL)
            assert service.process.wait() == 3
            assert not service.pool()


class Failing:
    """A streamer of a pool that fails.

    Args:
        at: the call that raises.
        errors: what it raises, one after the other.
    """

    pool_pid = None

    def __init__(self, at: str, *errors: Exception) -> None:
        self._at, self._errors = at, iter(errors)
        self.backend = self.engine = self

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        callback()

    def try_start_once(self) -> None:
        self._step("try_start_once")

    def wait_ready(self) -> None:
        self._step("wait_ready")

    def stats(self) -> None:
        self._step("stats")

    def _step(self, name: str) -> None:
        if name == self._at:
            raise next(self._errors)


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
    at: str, errors: list[Exception], kind: type[Exception]
) -> None:
    with SignalSocket() as wakeup:
        owner: Any = PoolOwner("a:b", owned(StreamerOptions()), "a model", wakeup, model="a")
        owner._streamer = Failing(at, *errors)
        owner._run()
        assert wakeup.answer() == b"\0"
    assert type(owner.failure) is kind


def test_a_service_s_pool_leaves_signals_to_its_clients_and_keeps_its_log() -> None:
    program = (
        "import logging, os, signal, subprocess, sys\n"
        "from service_streamer.pool import pool_process\n"
        "from service_streamer.pool.pool_log import PoolLog\n"
        "from service_streamer.serve.pool_preparation import prepare_pools\n"
        "log = PoolLog(2, 'other: %(message)s')\n"
        "logging.basicConfig(handlers=[log])\n"
        "prepare_pools('json')\n"
        "pool_process.preparation()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert logging.getLogger().handlers == [log]\n"
        "logging.getLogger('service_streamer').info('it goes on')\n"
        "log.end(60)\n"
        "child = 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)'\n"
        "print(subprocess.run([sys.executable, '-S', '-c', child]).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"-15\n"), done.stderr
    assert json.loads(done.stderr)["message"] == "it goes on"


def test_a_signal_hurries_the_end_of_a_pool_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolOwner, "_is_pool", lambda *_: True)
    with subprocess.Popen(["sleep", "1000"]) as hung, SignalSocket() as wakeup:
        owner: Any = PoolOwner("a:b", owned(StreamerOptions()), "a model", wakeup, model="a")
        owner._paths = paths_of(owner._name, "/nowhere")
        wakeup.ring()  # no wish of an operator
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr("service_streamer.serve.pool_owner._GRACE", 1e6)
        owner._end_pool(hung.pid)
        assert hung.wait() == -signal.SIGKILL


@pytest.mark.long
def test_the_longest_timeout_is_no_trouble_at_the_end() -> None:
    """To wait so long is more than the system takes."""
    with Serving(*OBEDIENT, "--timeout", "1e9") as service:
        assert service.terminate() == 0
        assert "Traceback" not in service.log()


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
        until(lambda: {*re.findall(r'process="(\d)"', metrics(service))} == {"0", "1"})
        assert first.isdisjoint(web_processes(service))


def web_processes(service: Serving) -> list[int]:
    pids = service.children()
    named = [pid for pid in pids if f"(pid {pid})" in service.log()]
    lines = [line for line in service.log().splitlines() if "web process" in line]
    return [pid for pid in named if any(f"(pid {pid})" in line for line in lines)]
