"""Models for the tests of shared pools, importable by workers."""

from __future__ import annotations

import os
from typing import Any

from service_streamer import ManagedModel
from stream_models import Countdown


class Recorded(ManagedModel):
    """Upper case; writes each item to a file when it is computed."""

    def init_model(self, path: str) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the model

    def predict(self, batch: list[str]) -> list[str]:
        self.file.write("".join(f"{item}\n" for item in batch))
        self.file.flush()
        return [item.upper() for item in batch]


def large_or_small(batch: list[str]) -> list[bytes | str]:
    return [b"x" * 100_000 if item == "large" else item for item in batch]


def echo_or_pid(batch: list[Any]) -> list[Any]:
    """The process of the worker in the place of None."""
    return [os.getpid() if item is None else item for item in batch]


class Crowded(Countdown):
    """Its outputs are how many items were in the step."""

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        return [(len(states), is_last) for _, is_last in super().step(states)]


def large(batch: list[Any]) -> list[bytearray]:
    return [bytearray(1_300_000) for _ in batch]
