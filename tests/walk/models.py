"""The models of the walks. Each item says what happens to it: "slow:12" is number 12, and slow."""

from __future__ import annotations

import os
import time
from typing import Any

from service_streamer import ManagedModel

#: Seconds that items of a kind take; of a model of steps, all of its steps.
_SECONDS = {"slow": 0.01, "long": 0.4}
#: So many outputs has an item.
STEPS = 4


def model(batch: list[str]) -> list[str]:
    """Each result names the process that made it."""
    for item in batch:
        kind, number = item.split(":")
        if kind == "bad":
            raise ValueError(f"bad {number}")
        time.sleep(_SECONDS.get(kind, 0.0))
    return [f"{item}@{os.getpid()}" for item in batch]


def length(item: str) -> int:
    return len(item)


class Steps(ManagedModel):
    """The same in steps, each of which has an output."""

    def init_model(self) -> None:
        self.held: set[int] = set()

    def start(self, items: list[str]) -> list[list[Any]]:
        return [[item, 0] for item in items]

    def step(self, states: list[list[Any]]) -> list[tuple[str, bool]]:
        pairs = []
        for state in states:
            item, at = state
            kind, number = item.split(":")
            if kind == "bad" and at == 1:
                raise ValueError(f"bad {number}")
        for state in states:
            item, at = state
            time.sleep(_SECONDS.get(item.split(":")[0], 0.0) / STEPS)
            state[1] = at + 1
            pairs.append((f"{item}.{at}@{os.getpid()}", at + 1 == STEPS))
        return pairs
