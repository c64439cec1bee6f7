"""Several web processes beside their own worker host: what they know of it, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_failed_hosts import BREAKS

from serve_process import ROOT, Serving, until
from service_streamer.engine.operator_signals import SignalSocket, passed_on_later
from service_streamer.errors import StreamerBroken, WorkerStartError
from service_streamer.serve.fleet import _Host
from service_streamer.serve.running import ServiceFailed

OBEDIENT = ("served_models:Obedient", "--web-workers", "2")


def standing(service: Serving) -> tuple[int, str]:
    response = service.client.get("/health/ready")
    return response.status_code, response.json()["detail"]


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


@pytest.mark.long
def test_a_host_that_fails_ends_the_service_with_an_error(tmp_path: Path) -> None:
    # The first ones tell both web processes what the model is.
    (tmp_path / "sitecustomize.py").write_text(BREAKS.replace("next(count)", "next(count) > 3"))
    path = f"{tmp_path}:{ROOT}:{ROOT / 'tests'}"
    with Serving(
        "models:double", "--web-workers", "2", "--timeout", "10", PYTHONPATH=path
    ) as service:
        with contextlib.suppress(httpx.TransportError):  # as it ends
            for _ in range(5):
                service.post("/predict", {"inputs": 2})
        assert service.process.wait() == 3
        last = service.log().splitlines()[-1]
        assert "the service ends, since its worker host has ended" in last
        assert "could not be loaded" not in service.log()


class Failing:
    """A worker host that has a bug.

    Args:
        at: the call that raises.
    """

    is_closed = False

    def __init__(self, at: str, error: Exception) -> None:
        self._at, self._error = at, error

    def wait_ready(self) -> None:
        self._step("wait_ready")

    def run_forever(self) -> None:
        self._step("run_forever")

    def close(self) -> None:
        self.is_closed = True

    def _step(self, name: str) -> None:
        if name == self._at:
            raise self._error


@pytest.mark.parametrize(
    ("at", "error", "kind"),
    [
        ("wait_ready", WorkerStartError("no weights"), WorkerStartError),
        ("wait_ready", KeyError("a bug"), ServiceFailed),
        ("run_forever", StreamerBroken("it failed"), ServiceFailed),
        ("run_forever", KeyError("a bug"), ServiceFailed),
    ],
)
def test_the_service_never_goes_on_without_its_host(
    at: str, error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = Failing(at, error)
    monkeypatch.setattr(_Host, "__init__", lambda *_: None)
    host: Any = _Host()  # type: ignore[call-arg]
    host._worker, host.failure = worker, None
    host._progress = type("Progress", (), {"close": lambda _: None})()
    with SignalSocket() as wakeup:
        host._wakeup = wakeup
        host._run()
        assert wakeup.answer() == b"\0"
    assert type(host.failure) is kind
    # At once: the place would be tried again, and say so in the log of a service that ends.
    assert worker.is_closed == (kind is WorkerStartError)


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
        assert 'process="0"' in (told := service.client.get("/metrics").text)
        assert 'process="1"' in told
        assert first.isdisjoint(web_processes(service))


def web_processes(service: Serving) -> list[int]:
    pids = service.children()
    named = [pid for pid in pids if f"(pid {pid})" in service.log()]
    lines = [line for line in service.log().splitlines() if "web process" in line]
    return [pid for pid in named if any(f"(pid {pid})" in line for line in lines)]
