"""Programs for the tests that end badly, and the processes that must end with them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from leavings import children

#: Within so many seconds all are to be gone whose web process is; and what a busy machine may need
#: beyond that, for which nothing waits that is gone.
GONE = 2.0 + 120.0

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@contextlib.contextmanager
def running(
    source: str, folder: Path, *arguments: str, flags: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A program, run from its source; kills it at the end. The flags are those of Python."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    process = subprocess.Popen(
        [sys.executable, *flags, str(path), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER.parent}:{FOLDER}"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def outcome(source: str, folder: Path) -> tuple[int, str, str]:
    """The exit code of a program that ends by itself, and what it has printed on both streams."""
    with running(source, folder) as program:
        out, err = program.communicate()
    return program.returncode, out, err


def await_line(program: subprocess.Popen[str], line: str) -> None:
    """Block until the program has printed this line."""
    assert program.stdout is not None
    for printed in program.stdout:
        if printed == line + "\n":
            return
    assert program.stderr is not None
    raise AssertionError(f"the program has ended without {line!r}:\n{program.stderr.read()}")


def descendants(pid: int) -> set[int]:
    """The process ids of all that descend from a process and live."""
    direct = {*children(pid)}
    return direct.union(*(descendants(child) for child in direct))


class Watch:
    """Watches processes, children or not, that live now."""

    def __init__(self, pids: set[int]) -> None:
        self._names: dict[int, str] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was seen
                self._names[os.pidfd_open(pid)] = _command(pid)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._names:
            os.close(descriptor)

    def __len__(self) -> int:
        return len(self._names)

    def alive_after(self, seconds: float) -> list[str]:
        """Block until all have ended, or so long at the most; the commands of those that live."""
        poll = select.poll()
        for descriptor in self._names:
            poll.register(descriptor, select.POLLIN)
        alive = dict(self._names)
        until = time.monotonic() + seconds
        while alive and (ended := poll.poll(1000 * max(0.0, until - time.monotonic()))):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                del alive[descriptor]
        return sorted(alive.values())


def _command(pid: int) -> str:
    command = b""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return f"{pid} {command.decode()}"
