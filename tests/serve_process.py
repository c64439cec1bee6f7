"""The command line as users run it: ``service-streamer serve`` in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import pytest

from leavings import children
from service_streamer.testing import Gate

ROOT = Path(__file__).parent.parent

T = TypeVar("T")


def until(holds: Callable[[], T], seconds: float = 240) -> T:
    """Block until something holds that nobody is told of."""
    over = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < over, f"it did not come to hold within {seconds} s"
        time.sleep(0.02)
    return value


def environment(**more: str) -> dict[str, str]:
    """Of a user's, who has set none of our variables."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ours = {name for name in os.environ if name.startswith("SERVICE_STREAMER_")}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONPATH": path, "PYTHONWARNINGS": "default", **more}


#: ``serve`` for which a second signal need not come a second later.
IMPATIENT = (sys.executable, "-m", "impatient_serve", "serve", "--port", "0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "service_streamer", *arguments]


def python(
    *arguments: str, cwd: Path | None = None, given: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; ``given`` is its standard input."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env=environment(**env), input=given,
    )  # fmt: skip


def run(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return python("-m", "service_streamer", *arguments, cwd=cwd, **env)


def table(name: str, model: str = "served_models:Obedient", more: str = "") -> str:
    """A model in the file of ``--config``; ``more`` has further lines."""
    return f'\n[[model]]\nname = "{name}"\nmodel = "{model}"\ndevices = "cpu"\n{more}'


def key_table(name: str, key: str, more: str = "", scopes: Sequence[str] = ("compute",)) -> str:
    """A key in the file of ``--api-key-file``; ``more`` has further lines."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[{name}]\nhash = "sha256:{digest}"\nscopes = {json.dumps([*scopes])}\n{more}\n'


def figures_in(metrics: str) -> dict[str, float]:
    """The series of ``/metrics`` without our prefix and without the label of the only model."""
    lines = [line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#")]
    found = {}
    for name, _, value in lines:
        bare = re.sub(r',?\bmodel="[^"]*"', "", name.removeprefix("service_streamer_"))
        found[bare.replace("{,", "{").replace("{}", "")] = float(value)
    return found


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """What a refusal says, which has the one form that all have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= told.keys()
    assert (status == 503) == ("retry-after" in response.headers)
    return told


def workers(pid: int) -> list[int]:
    """Those of them that are worker processes."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):  # it has just ended
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


class Client:
    """What asks a service.

    Attributes:
        url: where it answers.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._clients = threading.local()

    @property
    def client(self) -> httpx.Client:
        """Of each thread its own: with one for several, connections were closed twice at times."""
        client = getattr(self._clients, "client", None)
        if client is None or client.base_url != httpx.URL(self.url):
            # No connection outlives its request: the guard of the suite would take it for a leak.
            alone = httpx.Limits(max_keepalive_connections=0)
            client = self._clients.client = httpx.Client(
                base_url=self.url, timeout=240, limits=alone, verify=False
            )
        return client

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def connect(self) -> socket.socket:
        """A connection, for a client that sends and reads bytes itself."""
        return socket.create_connection(self.address)

    def of(self, model: str) -> Self:
        """The same service, as clients see it at the paths of one of its models."""
        view = copy.copy(self)
        view._clients, view.url = threading.local(), f"{self.url}/models/{model}/"
        return view

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(
            path, content=content, headers={"content-type": "application/json", **named}
        )

    def answer(self, inputs: Any) -> Any:
        """What is predicted, as soon as all of several web processes can be asked."""
        until(lambda: all(self.predict(inputs).status_code == 200 for _ in range(10)))
        return self.predict(inputs).json()

    def predict(self, inputs: Any, **headers: str) -> httpx.Response:
        return self.post("/predict", {"inputs": inputs}, **headers)

    def stats(self) -> dict[str, Any]:
        told: dict[str, Any] = self.client.get("/stats").json()
        return told

    def ready(self) -> int:
        """The status of /health/ready."""
        return self.client.get("/health/ready").status_code

    def close(self) -> None:
        """End the service."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Serving(Client):
    """A service in a process group of its own.

    Args:
        program: what to start in place of this package, if anything.
    """

    def __init__(
        self,
        *arguments: str,
        role: str = "serve",
        program: Sequence[str] = (),
        ready: bool = True,
        cwd: Path | None = None,
        **env: str,
    ) -> None:
        if role == "serve" and "--port" not in arguments and not program:
            arguments += ("--port", "0")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        self.process = subprocess.Popen(
            [*program, *arguments] if program else command(role, *arguments),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True,
            process_group=0, env=environment(**env), cwd=cwd,
        )  # fmt: skip
        super().__init__(self.await_line() if ready and role == "serve" else "")

    def await_line(self) -> str:
        """Block until it says where it serves; returns that."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r" on (https?://\S+)", line):
                self.line = line
                return found[1]
        self.process.wait()
        raise AssertionError(f"the service did not come up:\n{self.log()}")

    def log(self) -> str:
        """What it has logged so far."""
        self._log.flush()
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def await_web_processes(self, number: int) -> None:
        """Block until each of so many serves; the first one is enough for an answer."""
        for each in range(number):
            until(lambda each=each: f"web process {each} is ready" in self.log())  # type: ignore[misc]

    def children(self) -> list[int]:
        """The processes that it has started and that are there."""
        return children(self.process.pid)

    def workers(self) -> list[int]:
        """Those of them that are worker processes."""
        return workers(self.process.pid)

    def resident(self) -> int:
        """How many bytes of memory its process has."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def pool(self) -> list[int]:
        """The process of the pool that its web processes share; there are two while one follows."""
        names = {f"service-streamer pool {name}".encode() for name in self.pool_names()}
        found = []
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has just ended, or is no process
                if (each / "cmdline").read_bytes().rstrip(b"\0 ") in names:
                    found.append(int(each.name))
        return found

    def pool_names(self) -> set[str]:
        """As its log has them, once a worker was ready."""
        return set(re.findall(r" pool (serve-\w+)", self.log()))

    def terminate(self) -> int:
        """End it as an operator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


class GatedServing(Serving):
    """A service whose models wait at a gate, and record what they compute.

    Tests may share one if each begins with ``reset()``.

    Attributes:
        folder: has the gate and the record.
    """

    def __init__(self, folder: Path, *arguments: str, **options: Any) -> None:
        self.gate = Gate(folder / "gate")
        self.folder = folder
        env = {"TEST_GATE": str(folder / "gate"), "TEST_RECORD": str(folder / "record")}
        super().__init__(*arguments, **env, **options)

    def computed(self) -> list[Any]:
        """The record: all batches, or the number of items of each step."""
        record = self.folder / "record"
        return [*map(json.loads, record.read_text().splitlines())] if record.exists() else []

    def reset(self) -> None:
        """Let the models finish, and empty the gate and the record."""
        self.gate.let_through(100)
        models = [self.of(name) for name in self.client.get("/info").json()["models"]]
        until(lambda: not any(count for each in models for count in each.queue().values()))
        self.empty_gate()
        (self.folder / "record").unlink(missing_ok=True)

    def empty_gate(self) -> None:
        """Forget arrivals and permits; no model may be waiting."""
        for pipe in ("arrivals", "permits"):
            with open(self.folder / "gate" / pipe, "rb", opener=_without_waiting) as unread:
                unread.read()

    def queue(self) -> dict[str, int]:
        """How many inputs are pending, and how many in flight."""
        found = self.stats()["queue"]
        return {name: found[name] for name in ("pending", "in_flight")}

    def close(self) -> None:
        super().close()
        self.gate.close()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def started(*arguments: str, **env: str) -> Any:
    """A fixture of the module: the service with these arguments."""

    @pytest.fixture(scope="module")
    def fixture() -> Iterator[Serving]:
        with Serving(*arguments, **env) as service:
            yield service

    return fixture
