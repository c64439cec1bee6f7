"""Measurements in processes of their own, which answer in records: one JSON object in each line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["VARIABLES", "Ended", "Kind", "Row", "answer", "run"]

Row = dict[str, Any]

#: What computes: a GPU; the CPU, a small model; or a stage that sleeps.
Kind = Literal["cuda", "cpu", "simulated"]

_BENCHMARKS = Path(__file__).resolve().parents[1]

#: From the clone, for the workers too; whatever is there already comes after it.
_PATH = os.pathsep.join(
    filter(None, [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH")])
)
#: In which every process of the benchmark runs.
VARIABLES = {
    "PYTHONPATH": _PATH,
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that nvidia-smi's numbers are the same ones
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Ended(NamedTuple):
    """What came of a process.

    Attributes:
        rows: its records, also if it failed later.
        error: why it failed; empty if it did not.
    """

    rows: list[Row]
    error: str


def run(module: str, settings: Mapping[str, Any], *, timeout: float) -> Ended:
    """Run ``on_gpu.MODULE`` in a process group of its own, of which nothing is left. Never raises.

    What it writes to standard error is seen at once.

    Args:
        settings: its only argument, as JSON.
        timeout: how long it may take, seconds; then it is killed, and what it has said counts.
    """
    # Its end says to the process, which is in a session of its own, that this one was killed.
    theirs, ours = os.pipe()
    command = [sys.executable, "-m", f"on_gpu.{module}", json.dumps(settings), str(theirs)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **VARIABLES},
        start_new_session=True,
        pass_fds=(theirs,),
    )
    os.close(theirs)
    error = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        error = f"it did not end within {timeout:.0f} s and was killed"
        _end_group(process)
        output, _ = process.communicate()
    finally:
        _end_group(process)
        os.close(ours)
    rows: list[Row] = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # the line at which it was killed
            rows.append(json.loads(line))
    told = [row["error"] for row in rows if "error" in row]
    if not (error or told) and process.returncode:
        error = f"it ended with exit code {process.returncode}"
    error = "\n".join(filter(None, [*told, error]))
    return Ended([row for row in rows if "error" not in row], error)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(measure: Callable[[Row], Iterator[Row]]) -> None:
    """What the main function of such a process is: print what ``measure`` yields, as it comes.

    An exception becomes the last record. Whatever else is written to standard output, by a library
    or a worker, goes to standard error.
    """
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)

        def say(row: Row) -> None:
            print(json.dumps(row), file=output, flush=True)

        try:
            for row in measure(json.loads(sys.argv[1])):
                say(row)
        except Exception:
            say({"error": traceback.format_exc()})
            sys.exit(1)


def _end_with_parent(descriptor: int) -> None:
    """End this process and its workers when who has started it is no more."""
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGKILL)
