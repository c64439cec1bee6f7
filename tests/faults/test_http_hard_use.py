"""Hard use over HTTP: signals, clients who do not read, viewers by the hundred."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from cases import long_cases
from http_in_process import HTTPServer, post
from serve_process import Client, Serving, command, environment, until
from service_streamer.engine.operator_signals import SAME_SIGNAL, RollingRestart
from service_streamer.testing import Gate

OBEDIENT = "served_models:Obedient"

#: Answers with what the file "weights" said when it was loaded.
WEIGHTS = """
from service_streamer import ManagedModel

class Weights(ManagedModel):
    def init_model(self):
        self.model = open("weights").read()
        if self.model == "broken":
            raise OSError("the weights are broken")

    def predict(self, batch):
        return [self.model for _ in batch]
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "weighing.py").write_text(WEIGHTS)
    path = tmp_path / "weights"
    path.write_text("old")
    return path


@pytest.mark.parametrize("more", [(), *long_cases(("--web-workers", "2", "--cache-size", "10"))])
def test_sighup_loads_new_weights_and_keeps_the_old_ones_when_these_are_broken(
    weights: Path, more: tuple[str, ...]
) -> None:
    with Serving("weighing:Weights", *more, cwd=weights.parent) as service:
        assert service.answer(1) == "old"
        weights.write_text("broken")
        os.kill(service.process.pid, signal.SIGHUP)
        until(lambda: "the restart failed; the remaining workers go on" in service.log())
        assert service.answer(1) == "old"
        weights.write_text("new")
        os.kill(service.process.pid, signal.SIGHUP)
        until(lambda: service.predict(1).json() == "new")
        until(lambda: all(service.predict(1).json() == "new" for _ in range(10)))
        assert service.terminate() == 0


@pytest.mark.parametrize("more", [(), *long_cases(("--web-workers", "2"))])
def test_end_does_not_wait_for_a_restart(gate: Gate, more: tuple[str, ...]) -> None:
    env = {"TEST_GATE": str(gate.__getstate__())}
    gate.let_through(1)
    with Serving("served_models:Late", *more, **env) as service:
        gate.await_arrival()
        os.kill(service.process.pid, signal.SIGHUP)
        gate.await_arrival()  # the new worker loads
        os.kill(service.process.pid, signal.SIGHUP)
        gate.let_through(1)
        gate.await_arrival()  # asked for once more, the next one never comes to an end of it
        assert service.answer(1) == 1, "by the old one"
        assert service.terminate() == 0
        assert "Traceback" not in service.log()


def test_worker_host_loads_new_weights_on_sighup_and_answers_other_signals(
    weights: Path, redis_server: str, prefix: str
) -> None:
    redis = ("--redis", redis_server, "--prefix", prefix)
    folder = weights.parent
    with (
        Serving("weighing:Weights", *redis, role="worker", cwd=folder) as host,
        Serving(*redis) as service,
    ):
        assert service.predict(1).json() == "old"
        weights.write_text("new")
        os.kill(host.process.pid, signal.SIGHUP)
        until(lambda: service.predict(1).json() == "new")
        os.kill(host.process.pid, signal.SIGUSR1)
        until(lambda: "SIGUSR1: running | pending 0" in host.log())
        os.kill(host.process.pid, signal.SIGUSR2)
        until(lambda: "most recent call first" in host.log())
        os.kill(service.process.pid, signal.SIGHUP)  # has no workers
        until(lambda: "only the cache is emptied" in service.log())
        assert service.terminate() == 0
        assert host.terminate() == 0


@pytest.mark.parametrize("role", ["serve", *long_cases("worker")])
def test_signal_does_not_kill_while_the_model_is_loading(
    gate: Gate, role: str, redis_server: str, prefix: str
) -> None:
    env = {"TEST_GATE": str(gate.__getstate__())}
    options = ("--redis", redis_server, "--prefix", prefix) if role == "worker" else ()
    with Serving("served_models:Late", *options, role=role, ready=False, **env) as service:
        gate.await_arrival()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(service.process.pid, number)
        until(lambda: "SIGUSR1: " in service.log())
        until(lambda: "SIGHUP: replacing" in service.log())
        assert service.terminate() == 0


def test_service_ends_with_its_terminal() -> None:
    """It sends SIGHUP, too; a service that went on would hold the port and nobody would know."""
    leader, follower = pty.openpty()
    serve = command("serve", "served_models:double", "--port", "0")
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *serve], stdin=follower, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment(),
    )  # fmt: skip
    try:
        os.close(follower)
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        os.close(leader)
        assert process.wait() == 0
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


def test_a_terminal_that_is_closed_while_web_processes_end_cuts_off_no_request(
    tmp_path: Path,
) -> None:
    gate = Gate(tmp_path / "gate")
    leader, follower = pty.openpty()
    serve = command("serve", OBEDIENT, "--port", "0", "--web-workers", "2")
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *serve], stdin=follower, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment(TEST_GATE=str(tmp_path / "gate")),
    )  # fmt: skip
    try:
        os.close(follower)
        assert process.stdout is not None
        found = re.search(r" on (https?://\S+)", process.stdout.readline())
        assert found is not None
        with ThreadPoolExecutor(1) as threads:
            open_ = threads.submit(Client(found[1]).predict, 1)
            gate.await_arrival()
            process.terminate()
            time.sleep(SAME_SIGNAL + 0.1)  # SIGTERM would be a second one now
            os.close(leader)
            time.sleep(0.2)
            gate.let_through()
            assert open_.result().json() == 1
        assert process.wait() == 0
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


def test_idle_service_ignores_sighup_under_nohup_and_answers_other_signals() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        service = Serving("served_models:double")
    finally:
        signal.signal(signal.SIGHUP, before)
    with service:
        os.kill(service.process.pid, signal.SIGHUP)
        os.kill(service.process.pid, signal.SIGUSR1)
        until(lambda: "SIGUSR1: ready: the model answers" in service.log())
        os.kill(service.process.pid, signal.SIGUSR2)
        until(lambda: "most recent call first" in service.log())
        assert "SIGHUP" not in service.log()


def test_usr1_writes_the_standing_and_usr2_the_stacks() -> None:
    with Serving("served_models:double", "--web-workers", "2") as service:
        service.answer(1)
        until(lambda: len(re.findall(r"web process \d+ is ready", service.log())) == 2)
        until(lambda: all(service.ready() == 200 for _ in range(10)))  # hosts are looked for
        os.kill(service.process.pid, signal.SIGUSR1)
        until(lambda: "SIGUSR1: running | pending 0" in service.log())
        until(lambda: "SIGUSR1: ready: the model answers" in service.log())
        until(lambda: "SIGUSR1: Recently: " in service.log())
        os.kill(service.process.pid, signal.SIGUSR2)
        until(lambda: "most recent call first" in service.log())
        assert service.answer(2) == 4
        assert service.terminate() == 0


def test_restart_works_again_after_one_that_failed() -> None:
    tried: list[int] = []

    def restart() -> None:
        tried.append(len(tried))
        raise RuntimeError("a bug")

    rolling = RollingRestart(restart)
    for number in (1, 2):
        rolling.begin()
        until(lambda number=number: len(tried) == number)
        until(
            lambda: not [each for each in threading.enumerate() if each.name == "rolling restart"]
        )


ANSWER = 15 << 20


class Answering:
    """An HTTP server on a socket, in a thread: all answers are large.

    Args:
        options: of ``HTTPServer``.

    Attributes:
        cut: how many connections it has closed since their clients did not read.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = self._sock.getsockname()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._clients: list[socket.socket] = []

    async def _serve(self) -> None:
        async def application(exchange: Any) -> None:
            exchange.answer(200, (), bytes(ANSWER))

        self._server = HTTPServer(application, self._sock, **self._options)
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        await self._server.serve()

    @property
    def cut(self) -> int:
        return self._server.listeners.readers.cut

    def ask(self) -> socket.socket:
        """The connection of a client that has sent a request, and reads nothing."""
        sock = socket.socket()
        self._clients.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self.address)
        sock.sendall(post(b"{}"))
        return sock

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._clients:
            sock.close()
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()


def size_read(sock: socket.socket) -> int:
    """Bytes that a client gets until its answer is there, or its connection ends."""
    got = 0
    with contextlib.suppress(ConnectionError):
        while got < ANSWER and (part := sock.recv(1 << 20)):
            got += len(part)
    return got


def test_clients_that_do_not_read_are_cut() -> None:
    with Answering(write_timeout=0.5) as service:
        silent = [service.ask() for _ in range(2)]
        until(lambda: service.cut == 2)
        assert all(size_read(sock) < ANSWER for sock in silent)
        assert size_read(service.ask()) >= ANSWER


def test_unread_answers_have_a_bound() -> None:
    """Ten of them held 270 MB, for as long as their clients liked."""
    with Answering(write_timeout=1000.0, max_unread=40 << 20) as service:
        for _ in range(20):
            service.ask()
        # The system takes some of each: three of them may be below the bound.
        until(lambda: service.cut >= 16)
        assert size_read(service.ask()) >= ANSWER


@pytest.mark.long
def test_limits_of_a_request_are_options_and_are_told() -> None:
    limits = ("--max-characters", "100", "--max-tokens", "50", "--max-pixels", "7")
    model = str(Path(__file__).parent.parent.parent / "example" / "models" / "text_generation")
    with Serving(model, *limits, "--max-audio-seconds", "3") as service:
        info = service.client.get("/info").json()
        assert (info["max_characters"], info["max_generated_tokens"]) == (100, 50)
        assert (info["max_pixels"], info["max_audio_seconds"]) == (7, 3)
        body = {"prompt": ["Happy", "birthday"], "max_tokens": 26}
        response = service.post("/v1/completions", body)
        assert response.status_code == 413
        assert "52 tokens in total, but the service's limit is 50 (--max-tokens)" in response.text
        assert service.post("/v1/completions", body | {"max_tokens": 2}).status_code == 200
        assert service.post("/v1/completions", {"prompt": "x" * 101}).status_code == 413
