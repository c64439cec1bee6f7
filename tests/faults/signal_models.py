"""Models for the tests of signals, importable by workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from service_streamer import ManagedModel
from service_streamer.testing import Gate


class Gated(ManagedModel):
    """Loads, and computes each batch, when the gate lets it; tells its process."""

    def init_model(self, gate: Gate) -> None:
        self.gate = gate
        gate.go_through()

    def predict(self, batch: list[Any]) -> list[int]:
        self.gate.go_through()
        return [os.getpid()] * len(batch)


class HandlesSigterm(ManagedModel):
    """Has a handler of its own, which leaves a file behind."""

    def init_model(self, path: Path) -> None:
        signal.signal(signal.SIGTERM, lambda *_: path.touch())

    def predict(self, batch: list[Any]) -> list[Any]:
        return [os.getpid()] * len(batch)


def _wait(ready: Any) -> None:
    ready.set()
    threading.Event().wait()


def exit_codes_of_children(batch: list[str]) -> list[int | None]:
    """Starts a process of each kind, sends it SIGTERM, and tells how it ended."""
    codes: list[int | None] = []
    for kind in batch:
        if kind == "program":
            program = subprocess.Popen(["sleep", "1000"])
            program.terminate()
            codes.append(program.wait())
        else:
            context: Any = multiprocessing.get_context(kind)
            ready = context.Event()
            process = context.Process(target=_wait, args=(ready,), daemon=True)
            process.start()
            ready.wait()
            process.terminate()
            process.join()
            codes.append(process.exitcode)
    return codes
