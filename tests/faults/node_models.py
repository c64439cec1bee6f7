"""Models that go wrong on a Ray cluster, importable by its workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from service_streamer import ManagedModel
from service_streamer.testing import Gate


class Noting(ManagedModel):
    """Doubles numbers; notes each item in a file of its process before it computes it.

    Other items: "pid", its own; "die"; "hang"; "gate", which waits until the gate lets it.
    """

    def init_model(self, folder: Path, gate: Gate | None = None) -> None:
        self.gate = gate
        self.notes = (folder / f"{os.getpid()}").open("a", buffering=1)

    def predict(self, batch: list[Any]) -> list[Any]:
        for item in batch:
            self.notes.write(f"{item}\n")
        return [self._result(item) for item in batch]

    def _result(self, item: Any) -> Any:
        match item:
            case "pid":
                return os.getpid()
            case "hang":
                time.sleep(1e6)
            case "gate":
                assert self.gate is not None
                self.gate.go_through()
                return "went through"
        return 2 * item
