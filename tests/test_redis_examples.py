"""The examples over Redis, and ``make demo-redis``: real processes, and a real Redis."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import demo_redis
import flask_example
from cases import long_cases
from conftest import await_that
from service_streamer import BrokerUnavailable, ModelError
from service_streamer.redis.local import LocalRedis
from test_examples import BIRTHDAY, ROOT, TIMEOUT, TWINKLE, alarm, ask, client
from test_examples import environment as common_environment

pytestmark = pytest.mark.xdist_group("redis-examples")

DEMO = ("scripts/demo_redis.py", "--port", "0")
HOST = ("example/redis_worker_example.py", "--workers", "1", "--devices", "cpu")
WEB = ("-m", "gunicorn", "-c", "example/redis_streamer_gunicorn.py", "flask_example:app")


def environment(url: str, **variables: str) -> dict[str, str]:
    return common_environment(CUDA_VISIBLE_DEVICES="", REDIS_URL=url, PORT="0", **variables)


class Program:
    """An example in a process of its own, which has said that it is there."""

    def __init__(self, command: tuple[str, ...], ready: str, url: str, **variables: str) -> None:
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(url, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        try:
            with alarm():
                while not re.search(ready, self.output, re.MULTILINE):
                    line = self.stdout.readline()
                    self.output += line
                    assert line, f"it ended: {self.output}"
        except BaseException:
            self.kill()
            raise
        match = re.search(r"^serving on http://127\.0\.0\.1:(\d+) ", self.output, re.MULTILINE)
        self.port = int(match[1]) if match else 0

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and checks that it ended well."""
        self.process.send_signal(number)
        try:
            with alarm():
                # Its children have this pipe too: its end means that all of them are gone.
                self.output += self.stdout.read()
                assert self.process.wait() == 0, self.output
            assert "Traceback" not in self.output
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdout.close()

    def connect(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        )

    def ask(self, method: str, **fields: Any) -> tuple[int, Any]:
        with self.connect() as connection:
            return ask(connection, method, "/stream", **fields)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found += map(int, (thread / "children").read_text().split())
    return found


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def is_worker_host(pid: int) -> bool:
    """Whether it is one that handles SIGTERM by now; it goes on loading its models for long."""
    if b"redis_worker_example" not in command_line(pid):  # it is one in a moment
        return False
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def start_web(url: str, *options: str, **variables: str) -> Program:
    return Program((*WEB, *options), "^curl ", url, **variables)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Of a Redis in which all tests of this file together leave nothing."""
    with LocalRedis() as server:
        yield server.url
        with redis.Redis.from_url(server.url) as connection:
            assert connection.keys() == []


@pytest.fixture(scope="module")
def web(redis_url: str) -> Iterator[Program]:
    """The whole demo. It ends with code 0 only if its worker host and gunicorn have done so."""
    demo = Program(DEMO, "^Ctrl-C", redis_url, REDIS_PREFIX="the demo")
    yield demo
    demo.stop()


@pytest.mark.long
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_stream_answers(web: Program, method: str) -> None:
    assert web.ask(method, s=BIRTHDAY) == (200, ["you"])
    assert web.ask(method, s=[TWINKLE, BIRTHDAY]) == (200, ["little", "you"])


@pytest.mark.long
def test_four_workers_import_the_application_and_none_loads_torch(web: Program) -> None:
    assert web.ask("POST", s=BIRTHDAY) == (200, ["you"])
    (master,) = (pid for pid in children(web.process.pid) if b"gunicorn" in command_line(pid))
    await_that(lambda: len(children(master)) == 4)  # the last of them may not have been forked yet
    for pid in children(master):
        while "hiredis" not in (loaded := Path(f"/proc/{pid}/maps").read_text()):
            time.sleep(0.01)  # it may have not booted yet
        assert "libtorch" not in loaded
    # What the master imports would be there before gevent patches in the workers.
    assert "hiredis" not in Path(f"/proc/{master}/maps").read_text()


@pytest.mark.parametrize("is_redis_there", [True, *long_cases(False)])
def test_service_says_in_time_that_there_are_no_models(
    redis_url: str, is_redis_there: bool
) -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = redis_url if is_redis_there else f"redis://127.0.0.1:{nobody.getsockname()[1]}"
        variables = {"REDIS_PREFIX": "nobody", "PREDICT_TIMEOUT": "0.5"}
        web = start_web(url, "--workers", "1", **variables)
        with contextlib.ExitStack() as stack:
            stack.callback(web.stop)
            status, answer = web.ask("POST", s=BIRTHDAY)
            while status == 504 and not is_redis_there:  # so slow that it does not know that yet
                status, answer = web.ask("POST", s=BIRTHDAY)
            text = "took too long" if is_redis_there else "cannot be reached"
            assert (status, list(answer)) == (504 if is_redis_there else 503, ["error"])
            assert text in answer["error"]
    said = "PredictTimeout: no result within 0.5 s" if is_redis_there else "BrokerUnavailable: "
    assert said in web.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_can_be_ended_while_models_are_loaded(
    redis_url: str, number: signal.Signals
) -> None:
    demo = Program(DEMO, r"^\$ .*redis_worker_example", redis_url, REDIS_PREFIX="early")
    with contextlib.ExitStack() as stack:
        stack.callback(demo.kill)
        await_that(lambda: any(map(is_worker_host, children(demo.process.pid))))
        demo.stop(number)
    assert "serving on" not in demo.output


def test_the_demo_says_at_once_that_the_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = subprocess.run(
            [sys.executable, DEMO[0], "--port", str(taken.getsockname()[1])],
            cwd=ROOT,
            env=environment(""),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    assert run.returncode == 1
    assert run.stdout == ""
    assert "in use" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("variable", "answering", "url"),
    [
        ("redis://here:1/2", ["redis://here:1/2", "redis://localhost:6379"], "redis://here:1/2"),
        ("here:1", ["redis://here:1"], "redis://here:1"),
        ("here:1", ["redis://localhost:6379"], "redis://localhost:6379"),
        ("", ["redis://localhost:6379"], "redis://localhost:6379"),
        ("", [], r"redis://127\.0\.0\.1:\d+/0"),
    ],
)
def test_the_demo_finds_a_redis(
    monkeypatch: pytest.MonkeyPatch, variable: str, answering: list[str], url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", variable)
    monkeypatch.setattr(demo_redis, "answers", lambda url: url in answering)
    with contextlib.ExitStack() as stack:
        assert re.fullmatch(url, demo_redis.find_redis(stack))


def test_a_bad_option_of_the_worker_host_is_said_in_a_line() -> None:
    run = subprocess.run(
        [sys.executable, *HOST, "--redis", "nonsense"],
        cwd=ROOT,
        env=environment(""),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "redis_broker" in run.stderr


def test_the_application_needs_a_streamer(caplog: pytest.LogCaptureFixture) -> None:
    response = flask_example.app.test_client().post("/stream", data={"s": BIRTHDAY})
    assert response.status_code == 500
    assert "-c redis_streamer_gunicorn.py" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"), [(BrokerUnavailable("secret"), 503), (ModelError("secret"), 500)]
)
def test_errors_over_redis_have_a_status(error: Exception, status: int) -> None:
    response = client(error).post("/stream", data={"s": "any"})
    assert response.status_code == status
    assert "secret" not in response.text
    assert ("Retry-After" in response.headers) == (status == 503)
