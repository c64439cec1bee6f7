"""Worker hosts and clients as processes of their own, to be killed; and what they run.

The programs get their options in JSON, tell what they have to tell in lines of JSON, and end when
their standard input does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from service_streamer import ManagedModel
from service_streamer.testing import Gate
from stream_models import Resumed

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


# -- what the workers run


class Recording(ManagedModel):
    """Doubles what it gets. Writes it to a file first, and waits at the gate if there is one.

    The item "kill" kills the worker, and "kill host" the process that the worker belongs to.
    """

    def init_model(self, path: str, gate: str | None = None) -> None:
        self.record = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.gate = None if gate is None else Gate(gate)

    def predict(self, batch: list[Any]) -> list[Any]:
        os.write(self.record, f"{json.dumps(batch)}\n".encode())
        if self.gate is not None:
            self.gate.go_through()
        if "kill host" in batch:
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait()  # for the end that comes with that of the host
        if "kill" in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * item for item in batch]


class Resuming(Resumed):
    """Outputs who counted, and what; waits at the gate before each step."""

    def init_model(self, gate: str | None = None) -> None:  # type: ignore[override]
        super().init_model(None if gate is None else Gate(gate))

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        return [([os.getpid(), made], is_last) for made, is_last in super().step(states)]

    def resume(self, item: dict[str, Any], outputs: list[Any]) -> dict[str, Any]:
        return super().resume(item, made(outputs))


def made(outputs: Iterable[list[int]]) -> list[int]:
    """What was counted, of the outputs of this model."""
    return [number for _, number in outputs]


def recorded(path: Path) -> list[Any]:
    """What the models with this record began to compute, in order."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [item for line in lines for item in json.loads(line)]


# -- this side

#: Not this file itself, which workers would import twice then.
START = "import redis_processes; redis_processes.main()"


class Program:
    """One of the programs below, in a process group with its children."""

    def __init__(self, role: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, role, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER.parent}:{FOLDER}"},
        )  # fmt: skip

    def await_ready(self) -> None:
        """Block until a host has loaded its model, or a client has submitted its calls."""
        self._told("ready")

    def stats(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._told("stats")

    def _told(self, what: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if what in told:
                return told[what]
        raise AssertionError(f"the program has ended without telling {what}")

    def kill(self) -> None:
        """With all its children; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self.close()

    def signal(self, number: signal.Signals, *, alone: bool = False) -> None:
        """To it and its children, or to it alone; frozen, it has stopped when this returns."""
        (os.kill if alone else os.killpg)(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def left(self) -> tuple[int, dict[str, Any]]:
        """Block until a host has ended in order; its exit status, and its last stats."""
        stats = self._told("left")
        code = self._process.wait()
        self.close()
        return code, stats

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def await_exit(self, seconds: float) -> int:
        """Block until it has ended, which takes no longer than that; its exit status."""
        return self._process.wait(seconds)

    def close(self) -> None:
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def stream_hosts(
    ask: Any, prefix: str, *arguments: str, **common: Any
) -> Iterator[Callable[..., Program]]:
    """Starts worker hosts as programs; what they leave in Redis expires before the end.

    Args:
        arguments: of their model, before the gate.
    """
    programs: list[Program] = []

    def program(gate: Gate | None = None, **options: Any) -> Program:
        options = {
            "prefix": prefix, "batch_size": 1, "claim_timeout": 0.5, "reply_ttl": 5,
            "model_init_args": [*arguments, *([] if gate is None else [str(gate.__getstate__())])],
            **common, **options,
        }  # fmt: skip
        programs.append(Program("host", options))
        programs[-1].await_ready()
        return programs[-1]

    yield program
    for each in programs:
        each.close()
    # Here and not above: workers import this file, too, and need none of it.
    from serve_process import until

    until(lambda: not ask.keys(f"*{prefix}:host:*"))
    if left := ask.keys(f"*{prefix}*"):
        ask.delete(*left)


# -- the other side


def host(options: dict[str, Any]) -> None:
    """A worker host, as in production but that it tells its stats."""
    from service_streamer import RedisWorker, run_redis_workers_forever

    made: list[RedisWorker] = []
    is_made = threading.Event()
    make = RedisWorker.__init__

    def make_watched(worker: RedisWorker, *args: Any, **kwargs: Any) -> None:
        make(worker, *args, **kwargs)
        made.append(worker)
        is_made.set()

    def stats() -> Any:
        found = made[0].stats()
        return None if found is None else dataclasses.asdict(found)

    def announce() -> None:
        is_made.wait()
        made[0].wait_ready()
        say(ready=True)
        answer(lambda: say(stats=stats()))

    RedisWorker.__init__ = make_watched  # of the one that it makes
    threading.Thread(target=announce, daemon=True).start()
    model = options.pop("model", "Recording")
    name = model if ":" in model else f"redis_processes:{model}"
    run_redis_workers_forever(name, **options)
    say(left=stats())


def client(options: dict[str, Any]) -> None:
    """A web server that makes calls, and is never heard of again."""
    from service_streamer import RedisStreamer

    calls = options.pop("calls")
    streamer = RedisStreamer(**options)
    futures = [streamer.submit([number]) for number in range(calls)]
    say(ready=len(futures))
    answer(lambda: None)


def say(**told: Any) -> None:
    os.write(1, f"{json.dumps(told)}\n".encode())


def answer(ask: Callable[[], None]) -> None:
    # Not sys.stdin: the interpreter, when it ends, waits for the lock that this would hold.
    while asked := os.read(0, 4096):
        for _ in range(asked.count(b"?")):
            ask()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    {"host": host, "client": client}[sys.argv[1]](json.loads(sys.argv[2]))
