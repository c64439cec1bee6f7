"""Scripts in process groups of their own, of which nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from yardstick.environments import environment

__all__ = ["ENDED", "RunFailed", "end_group", "json_lines", "terminate_cleanly"]


#: What a script prints at its end.
ENDED = {"ended": True}

#: How often it is looked whether a silent process is still there, seconds.
_LOOK = 0.5


class RunFailed(Exception):
    """A system did not start, ended with an error, or not in time."""


def json_lines(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Each JSON object that a process prints on a line, as it comes; other lines are skipped.

    The last line must be ``ENDED``: what a script started may live on with its output open.

    Args:
        timeout: seconds for the whole of it.

    Raises:
        RunFailed: it ended with an error, or not in time; what it printed before was yielded.
    """
    with (
        tempfile.TemporaryDirectory(prefix="yardstick-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Some write files to where they are, or leave them among the temporary ones.
            env={**(environment() if env is None else env), "TMPDIR": folder},
            start_new_session=True,
            cwd=folder,
        )
        try:
            for line in _lines(process, time.monotonic() + timeout):
                if not line.startswith("{"):
                    continue
                try:
                    said = json.loads(line)
                except ValueError:
                    raise RunFailed(f"printed what is no JSON: {line[:200]}") from None
                if said == ENDED:
                    return
                yield said
            raise RunFailed(f"ended with exit code {process.wait()}, and not with its last line")
        except RunFailed as error:
            errors.seek(0)
            printed = "".join(errors.readlines()[-15:])
            raise RunFailed(f"{' '.join(command)}: {error}\n{printed}") from None
        finally:
            end_group(process)


def _lines(process: subprocess.Popen[str], ends: float) -> Iterator[str]:
    """Until the process has ended. Raises RunFailed when time is over."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError), process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    has_ended = False
    while True:
        try:
            line = lines.get(timeout=_LOOK)
        except queue.Empty:
            # Its last lines may have come while this was not looking: once more.
            line = None if has_ended else ""
            has_ended = process.poll() is not None
        if line is None:
            return
        if line:
            yield line
        if time.monotonic() > ends:
            raise RunFailed("did not end in time")


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process with all that it has started: the original's workers outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def terminate_cleanly() -> None:
    """Have SIGTERM end this process as an error does, so that what it has started ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
