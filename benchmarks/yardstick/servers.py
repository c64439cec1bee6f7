"""Services as processes of their own, wrk in front of them, and what both cost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adapters.http_protocols import PROTOCOLS
from adapters.leftovers import alive_with
from adapters.managed import MODELS
from yardstick.environments import BENCHMARKS, environment, python
from yardstick.plan import Settings, System
from yardstick.processes import RunFailed, end_group, json_lines

__all__ = ["PATH", "Load", "Running", "command", "free_port", "running", "started"]

#: Where nearly every service is asked, with ``{"inputs": ...}``; it answers the result, in JSON.
PATH = PROTOCOLS["plain"].path

_STARTS_WITHIN = 90.0
_SETTLES_WITHIN = 30.0
#: So many answers, one after the other, say that nothing is left.
_SETTLED = 8
#: Between two looks whether a service answers, seconds.
_LOOK = 0.05
_TICK = os.sysconf("SC_CLK_TCK")
#: Asked until a service is ready, and by wrk: what the simulated workloads answer is what is asked.
_ITEM = "twinkle twinkle little star"
#: Where workers leave word of themselves.
_PIDS = "YARDSTICK_PIDS"
#: Services whose process that was started is the one that speaks HTTP.
_WEB = ("serve", "flask")


@dataclass(frozen=True)
class Load:
    """How a run of wrk went.

    Attributes:
        rate: requests per second.
        mean: latency, seconds; by Little's law, which knows of no histogram's buckets.
        p50, p99: latency, seconds, as wrk has it.
        web: processor seconds per request of the process that speaks HTTP; None where that is not
            the one that was started.
        all: the same of all processes of the service.
        errors: requests that were not answered with 2xx.
    """

    rate: float
    mean: float
    p50: float
    p99: float
    web: float | None
    all: float
    errors: int


class Running:
    """A service that answers.

    Args:
        process: leader of a session of its own.
        is_web: whether it is that process that speaks HTTP.
        item: what it is asked.

    Attributes:
        pid: of that process.
        pids: an empty file for each worker, named by its process id. All processes of the service
            have its path in their environment.
        answer: to the item; None for any.
        protocol: see ``http_protocols``.
    """

    def __init__(
        self,
        process: subprocess.Popen[str],
        port: int,
        *,
        is_web: bool,
        pids: Path,
        item: str | int = _ITEM,
        answer: str | None = _ITEM,
        protocol: str = "plain",
    ) -> None:
        self.pid = process.pid
        self.port = port
        self.pids = pids
        self.answer = answer
        self.protocol = protocol
        self._body = PROTOCOLS[protocol].body(item)
        self._process = process
        self._is_web = is_web

    def load(self, connections: int, seconds: float) -> Load:
        """Keep so many connections busy, for whole seconds. Raises RunFailed."""
        if seconds < 1 or seconds != int(seconds):
            raise ValueError(f"wrk knows whole seconds only, not {seconds:g}")
        if not shutil.which("wrk"):
            raise RunFailed("there is no wrk, so HTTP is not measured: apt-get install wrk")
        before = self._used()
        command = [
            "wrk", f"-t{min(2, connections)}", f"-c{connections}", f"-d{int(seconds)}s",
            "--timeout=10s", "-s", str(BENCHMARKS / "yardstick" / "http_post.lua"),
            f"http://127.0.0.1:{self.port}{PROTOCOLS[self.protocol].path}", "--", self._body,
        ]  # fmt: skip
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{' '.join(command)} did not end in time") from None
        if run.returncode:
            raise RunFailed(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
        after = self._used()
        told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        requests = told["requests"]
        if not requests:
            raise RunFailed(f"no answer at {connections} connections: {run.stdout}")
        rate = (requests - told["not_2xx"]) / told["seconds"]
        if not rate:
            raise RunFailed(f"nothing but errors at {connections} connections: {run.stdout}")
        return Load(
            rate=rate,
            mean=connections / rate,
            p50=told["p50"],
            p99=told["p99"],
            web=(after.web - before.web) / requests if self._is_web else None,
            all=(after.all - before.all) / requests,
            errors=told["not_2xx"] + told["sockets"] + told["timeouts"],
        )

    def open_loop(self, timeout: float, **options: Any) -> Iterator[Any]:
        """What ``open_client`` prints of its run on this service. Raises RunFailed."""
        told = json.dumps({"port": self.port, "path": PATH, **options})
        yield from json_lines([sys.executable, "-m", "yardstick.open_client", told], timeout)

    def settle(self) -> None:
        """Wait until nothing is left of an earlier load, of which queues may be full yet.

        Several answers, since a service may have several queues.

        Raises:
            RunFailed: it does not answer, or not in time.
        """
        for _ in range(_SETTLED):
            _await_answer(self._process, self, 0, _SETTLES_WITHIN)

    def kill_worker(self) -> int:
        """SIGKILL to one of the workers that have loaded a model; its process id."""
        alive = [int(file.name) for file in self.pids.iterdir()]
        if not alive:
            raise RunFailed("no worker left word of itself, so none can be killed")
        victim = min(alive)
        os.kill(victim, signal.SIGKILL)
        return victim

    def ask(self) -> Any:
        """The answer to one request, read. Raises OSError, HTTPException, ValueError, RunFailed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", PROTOCOLS[self.protocol].path, self._body, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise RunFailed(f"answered {response.status}: {text[:500]!r}")
            return PROTOCOLS[self.protocol].answer(json.loads(text))

    def family(self) -> set[int]:
        """Its processes, those too that are in sessions of their own."""
        return {*_family(self.pid, self.pids)}

    def used(self) -> dict[int, float]:
        """Processor seconds so far of each of its processes."""
        return {pid: _seconds(fields) for pid, fields in _family(self.pid, self.pids).items()}

    def _used(self) -> _Used:
        used = self.used()
        return _Used(used.get(self.pid, 0.0), sum(used.values()))


class _Used(NamedTuple):
    """Processor time so far, seconds."""

    web: float
    all: float


def command(
    system: System, workload: str, port: int, workers: int, settings: Settings
) -> list[str]:
    """What starts a system's service."""
    launch = {
        name: value for name, value in system.launch.items() if name not in ("service", "protocol")
    }
    options = {"port": port, "workers": workers, **launch, **settings}
    given = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    service = system.launch["service"]
    if service == "serve":
        model = f"adapters.managed:{MODELS[workload].__name__}"
        return [python(system.project), "-m", "service_streamer", "serve", model, *given]
    adapter = [python(system.project), "-m", f"adapters.{service}_service"]
    return [*adapter, "--workload", workload, *given]


@contextlib.contextmanager
def running(
    system: System, workload: str, settings: Settings, workers: int = 1
) -> Iterator[Running]:
    """A system's service of a simulated workload, all of its workers ready; ended with all it is.

    Raises:
        RunFailed: it did not start, or answers wrongly; with the end of what it printed.
    """
    port = free_port()
    is_web = system.launch["service"] in _WEB
    words = command(system, workload, port, workers, settings)
    protocol = system.launch.get("protocol", "plain")
    with started(words, port, workers, is_web=is_web, protocol=protocol) as service:
        yield service


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    workers: int = 1,
    *,
    is_web: bool = True,
    item: str | int = _ITEM,
    answer: str | None = _ITEM,
    protocol: str = "plain",
) -> Iterator[Running]:
    """The same of any command; see there. With an answer of None any will do."""
    with (
        tempfile.TemporaryDirectory(prefix="yardstick-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as output,
    ):
        pids = Path(folder, "pids")
        pids.mkdir()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            # Some write files to where they are, or leave them among the temporary ones.
            env=environment(TMPDIR=folder, XDG_RUNTIME_DIR=folder, **{_PIDS: str(pids)}),
            cwd=folder,
            start_new_session=True,
        )
        service = Running(
            process, port, is_web=is_web, pids=pids, item=item, answer=answer, protocol=protocol
        )
        try:
            _await_answer(process, service, workers, _STARTS_WITHIN)
            yield service
        except RunFailed as error:
            output.seek(0)
            printed = "".join(output.readlines()[-15:])
            raise RunFailed(f"{' '.join(command)}: {error}\n{printed}") from None
        finally:
            _end(process, pids)


def _await_answer(
    process: subprocess.Popen[str], service: Running, workers: int, within: float
) -> None:
    ends = time.monotonic() + within
    while True:
        reason: Exception
        try:
            answer = service.ask()
        except (OSError, http.client.HTTPException, ValueError, RunFailed) as error:
            reason = error
        else:
            if service.answer is not None and answer != service.answer:
                raise RunFailed(f"answers {answer!r} and not {service.answer!r}")
            if len(list(service.pids.iterdir())) >= workers:
                return
            reason = RunFailed("not all workers have loaded their model")
        if process.poll() is not None:
            raise RunFailed(f"ended with exit code {process.returncode}")
        if time.monotonic() > ends:
            raise RunFailed(f"did not answer within {within:g} s: {reason}")
        time.sleep(_LOOK)


def _end(process: subprocess.Popen[str], pids: Path) -> None:
    """At once, with what has left its session: there is nothing that a clean end would save."""
    family = _family(process.pid, pids)
    end_group(process)
    for pid, fields in family.items():
        is_same = _fields(pid)[_STARTED:_STARTED_END] == fields[_STARTED:_STARTED_END]
        if pid != process.pid and is_same:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


#: Of the fields of /proc/PID/stat, from the state on.
_PARENT, _SESSION, _USER, _KERNEL, _STARTED, _STARTED_END = 1, 3, 11, 12, 19, 20


def _seconds(fields: Sequence[str]) -> float:
    return (int(fields[_USER]) + int(fields[_KERNEL])) / _TICK


def _family(leader: int, pids: Path) -> dict[int, list[str]]:
    """The processes of a session, all their children, and whoever else has its environment.

    Each with the fields of its stat. A pool that they share is nobody's child.
    """
    everybody = {
        int(folder.name): fields
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and (fields := _fields(int(folder.name)))
    }
    found = {pid: everybody[pid] for pid in alive_with(_PIDS, str(pids)) & everybody.keys()}
    size = -1
    while len(found) > size:
        size = len(found)
        for pid, fields in everybody.items():
            if int(fields[_SESSION]) == leader or int(fields[_PARENT]) in found:
                found[pid] = fields
    return found


def _fields(pid: int) -> list[str]:
    """Empty if there is no such process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
