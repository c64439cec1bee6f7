"""Ray of a test's own: apart from any other on this machine, and gone when the test ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from serve_process import environment

_MARK = "TEST_RAY_NODES"


def printed(text: str) -> str:
    """What a program has printed itself: Ray prints there too, of what it thinks of its nodes."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"(\x1b\[\d+m)?\(\w+", line))


class RayNodes:
    """Where Ray's processes of a test have their files; ends them all.

    ``ray stop`` would end those of everybody. They have no common parent, so they are known by a
    variable of their environment.

    Attributes:
        environment: for each program that starts or uses Ray.
    """

    def __init__(self) -> None:
        # Short: a path of a socket has at most 107 bytes, and Ray adds most of them.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._mark = uuid.uuid4().hex
        programs = self.folder / "bin"
        programs.mkdir()
        modules = {"ray": "ray.scripts.scripts", "service-streamer": "service_streamer"}
        for name, module in modules.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            program.chmod(0o755)
        self.environment = {
            _MARK: self._mark,
            "HOME": str(self.folder),  # of the file with the token
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RAY_ADDRESS": "", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
            "RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip

    def start_head(self, *, cpus: int = 2) -> str:
        """Start a cluster of one node; its address."""
        command = [
            "ray", "start", "--head", "--port=0", f"--num-cpus={cpus}",
            "--include-dashboard=false", "--dashboard-agent-listen-port=0",
        ]  # fmt: skip
        settings = environment(**self.environment)
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return next(self.folder.rglob("ray_current_cluster")).read_text().strip()

    def processes(self) -> Iterator[int]:
        """Those that run, but for this one."""
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if f"{_MARK}={self._mark}".encode() in (each / "environ").read_bytes().split(b"\0"):
                    yield int(each.name)

    def close(self) -> None:
        while running := [*self.processes()]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
