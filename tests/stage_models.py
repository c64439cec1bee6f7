"""Models with stages for the tests, importable by workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from models import NothingToLoad
from service_streamer import ManagedModel
from service_streamer.testing import Gate

STAGES = ("preprocess", "forward", "postprocess")


class DeviceFullError(Exception):
    pass


class Staged(ManagedModel):
    """Doubles numbers. Items are numbers, or pairs of a stage's name and what happens there.

    What happens: "raise", "full" (out of memory), "exit", "kill", "gate" (wait there), "meet" (wait
    for ``parties`` stages to do so), or "thread", whose result is the name of that stage's thread.
    """

    out_of_memory_errors = (DeviceFullError,)

    def init_model(
        self, gate: Gate | None = None, room: dict[str, int] | None = None, parties: int = 3
    ) -> None:
        self.gate = gate
        self.room = room or {}
        self.sizes: dict[str, list[int]] = {stage: [] for stage in STAGES}
        self.meeting = threading.Barrier(parties, timeout=60)
        self.running = dict.fromkeys(STAGES, 0)

    def preprocess(self, items: list[Any]) -> list[Any]:
        return self.stage("preprocess", items)

    def forward(self, batch: list[Any]) -> list[Any]:
        return self.stage("forward", batch)

    def postprocess(self, outputs: list[Any]) -> list[Any]:
        results = self.stage("postprocess", outputs)
        return [2 * item if isinstance(item, int) else item for item in results]

    def stage(self, stage: str, items: list[Any]) -> list[Any]:
        self.running[stage] += 1
        assert self.running[stage] == 1, "a stage runs once at a time"
        self.sizes[stage].append(len(items))
        try:
            if len(items) > self.room.get(stage, 1000):
                raise DeviceFullError(f"{len(items)} in {stage}")
            return [self._happens(stage, item) for item in items]
        finally:
            self.running[stage] -= 1

    def _happens(self, stage: str, item: Any) -> Any:
        if not isinstance(item, tuple) or item[0] != stage:
            return item
        match item[1]:
            case "raise":
                raise ValueError(f"in {stage}")
            case "full":
                raise DeviceFullError(f"in {stage}")
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "gate":
                assert self.gate is not None
                self.gate.go_through()
            case "meet":
                self.meeting.wait()
            case "thread":
                return threading.current_thread().name
        return 0


class SlowStages(Staged):
    """Its batches overlap, since each stage takes a millisecond."""

    def stage(self, stage: str, items: list[Any]) -> list[Any]:
        time.sleep(0.001)
        return super().stage(stage, items)


class ForwardOnly(NothingToLoad):
    def forward(self, batch: list[int]) -> list[int]:
        return [3 * item for item in batch]


class PredictWins(ForwardOnly):
    """A class of before stages existed, whose helper has the name of one."""

    def predict(self, batch: list[int]) -> list[int]:
        return self.forward(batch)

    def preprocess(self, _: Any, __: Any) -> Any:
        raise AssertionError("it is none of a stage")
