"""HTTP services as processes of their own, wrk in front of them, and what both cost."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import ENVIRONMENT, ROOT, RunFailed, end_group

__all__ = ["Load", "Running", "free_port", "running"]

_STARTS_WITHIN = 90.0
_ENDS_WITHIN = 15.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Load:
    """How a run of wrk went.

    Attributes:
        rate: requests per second.
        mean: latency, seconds; by Little's law, which knows of no histogram's buckets.
        p50, p99: latency, seconds, as wrk has it.
        web: processor time per request of the process that was started, seconds.
        kernel: what of that the kernel took.
        all: the same of all processes of the service.
        errors: what was not answered with 2xx, in words; empty if all was.
    """

    rate: float
    mean: float
    p50: float
    p99: float
    web: float
    kernel: float
    all: float
    errors: str


class Running:
    """A service that answers.

    Args:
        process: leader of a session of its own.
        path: where it is asked.
        body: what it is asked.
    """

    def __init__(self, process: subprocess.Popen[str], port: int, path: str, body: bytes) -> None:
        self._process = process
        self._port = port
        self._path = path
        self._body = body

    def load(self, connections: int, seconds: float) -> Load:
        """Keep so many connections busy for so long. Raises RunFailed."""
        if seconds < 1 or seconds != int(seconds):
            raise ValueError("wrk knows whole seconds only")
        before = self._used()
        command = [
            "wrk", f"-t{min(2, connections)}", f"-c{connections}", f"-d{int(seconds)}s",
            "--timeout=10s", "-s", str(ROOT / "benchmarks" / "http_post.lua"),
            f"http://127.0.0.1:{self._port}{self._path}", "--", self._body.decode(),
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
        after = self._used()
        if run.returncode:
            raise RunFailed(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
        told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        requests = told["requests"]
        if not requests:
            raise RunFailed(f"{' '.join(command)} got no answer:\n{run.stdout}")
        rate = requests / told["seconds"]
        errors = [f"{told[key]} {key}" for key in ("not_2xx", "sockets", "timeouts") if told[key]]
        return Load(
            rate=rate,
            mean=connections / rate,
            p50=told["p50"],
            p99=told["p99"],
            web=(after.web - before.web) / requests,
            kernel=(after.kernel - before.kernel) / requests,
            all=(after.all - before.all) / requests,
            errors=", ".join(errors),
        )

    def ask(self) -> Any:
        """The answer to one request, read. Raises OSError, HTTPException, ValueError, RunFailed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._path, self._body, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise RunFailed(f"answered {response.status}: {text[:500]!r}")
            return json.loads(text)

    def get(self, path: str) -> Any:
        """What the service says there, in JSON. Raises OSError, HTTPException, ValueError."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def _used(self) -> _Used:
        web = kernel = everything = 0.0
        for pid, fields in _session(self._process.pid):
            in_user, in_kernel = int(fields[11]) / _TICK, int(fields[12]) / _TICK
            everything += in_user + in_kernel
            if pid == self._process.pid:
                web, kernel = in_user + in_kernel, in_kernel
        return _Used(web, kernel, everything)


class _Used(NamedTuple):
    """Processor time so far, seconds."""

    web: float
    kernel: float
    all: float


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    path: str,
    body: bytes,
    expected: Any,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Iterator[Running]:
    """Start a service, and end it with all that it started.

    Args:
        expected: what it answers as soon as it is ready.

    Raises:
        RunFailed: it did not start, or answers something else; with the end of what it printed.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            cwd=tempfile.gettempdir(),  # some write files to where they are
        )
        service = Running(process, port, path, body)
        try:
            _await_answer(process, service, expected)
            yield service
        except RunFailed as error:
            output.seek(0)
            printed = "".join(output.readlines()[-15:])
            raise RunFailed(f"{' '.join(command)}: {error}\n{printed}") from None
        finally:
            _end(process)


def _await_answer(process: subprocess.Popen[str], service: Running, expected: Any) -> None:
    ends = time.monotonic() + _STARTS_WITHIN
    while True:
        reason: Exception
        try:
            answer = service.ask()
        except (OSError, http.client.HTTPException, ValueError, RunFailed) as error:
            reason = error
        else:
            if answer != expected:
                raise RunFailed(f"answers {answer!r} and not {expected!r}")
            return
        if process.poll() is not None:
            raise RunFailed(f"ended with exit code {process.returncode}")
        if time.monotonic() > ends:
            raise RunFailed(f"did not answer within {_STARTS_WITHIN:g} s: {reason}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_WITHIN)
    end_group(process)


def _session(leader: int) -> Iterator[tuple[int, list[str]]]:
    """The processes of a session, each with the fields of its stat from the state on."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                yield int(folder.name), fields


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
