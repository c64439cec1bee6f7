"""``service-streamer serve`` in a process of its own, and the processor time that it takes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Service", "Used", "serving"]

#: How long loading may take, and ending, seconds.
_STARTS_WITHIN, _ENDS_WITHIN = 180, 30
_TICK = os.sysconf("SC_CLK_TCK")
#: Of the fields of /proc/PID/stat, from the state on.
_PARENT, _USER, _KERNEL = 1, 11, 12


class Used(NamedTuple):
    """What a service has had so far.

    Attributes:
        seconds: processor time of the web process and its workers.
        batches: computed.
        items: in those.
    """

    seconds: float
    batches: float
    items: float


class Service:
    """A service that is ready. Attributes: port: on this machine."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._pid = pid

    def used(self) -> Used:
        size = "service_streamer_batch_size"
        found = dict(
            line.split() for line in self.read("/metrics").splitlines() if line.startswith(size)
        )
        batches, items = (float(found.get(f"{size}_{name}", 0)) for name in ("count", "sum"))
        return Used(self._processor_seconds(), batches, items)

    def read(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def _processor_seconds(self) -> float:
        stats = dict(_stats())
        family = {self._pid}
        while more := {p for p, stat in stats.items() if int(stat[_PARENT]) in family} - family:
            family |= more
        return sum(
            (int(stats[pid][_USER]) + int(stats[pid][_KERNEL])) / _TICK
            for pid in family & stats.keys()
        )


@contextlib.contextmanager
def serving(
    model: str, options: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[Service]:
    """Serve a model, until the end of ``with``.

    Args:
        options: of the command, without dashes.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: it is not ready in time, or has ended; why is on standard error.
    """
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    process = subprocess.Popen(
        [sys.executable, "-m", "service_streamer", "serve", model, "--port", "0", *given],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    alarm = threading.Timer(_STARTS_WITHIN, process.kill)
    alarm.start()
    try:
        yield Service(_port(process), process.pid)
    finally:
        alarm.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _port(process: subprocess.Popen[str]) -> int:
    """That of the line in which it says that it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise RuntimeError(f"serve: it ended with exit code {process.wait()} before it was ready")


def _stats() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
