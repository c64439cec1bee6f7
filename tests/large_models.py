"""Models that get and give what is large, at the top level of a module for spawned workers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from typing import Any

import numpy as np

from models import Gated, NothingToLoad
from service_streamer import ManagedModel
from service_streamer.testing import Gate


def checksum(item: Any) -> str:
    return hashlib.blake2b(memoryview(item).cast("B"), digest_size=16).hexdigest()


def checksums(batch: list[Any]) -> list[str]:
    return [checksum(item) for item in batch]


def is_mapped(array: Any) -> bool:
    """Whether an array lies in memory that two processes have."""
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0].split("-") for line in maps if "memfd:service_streamer" in line]
    return any(int(start, 16) <= address < int(end, 16) for start, end in mapped)


def are_mapped(batch: list[Any]) -> list[Any]:
    """For each item an array of its size, full of whether the item is mapped."""
    return [np.full_like(item, is_mapped(item)) for item in batch]


def negatives(batch: list[Any]) -> list[Any]:
    """In place: what a model does that owns its items."""
    for item in batch:
        np.negative(item, out=item)
    return batch


class Writes(ManagedModel):
    """Writes to all of its batch, and then fails if one of its items begins with -1.

    Given the path of a file, the first worker, which makes it, dies of the first batch.
    """

    def init_model(self, path: str = "") -> None:
        self.path = path

    def predict(self, batch: list[Any]) -> list[Any]:
        bad = [item[0] == -1 for item in batch]
        sums = [float(item.sum()) for item in batch]
        for item in batch:
            item[:] = 7
        if any(bad):
            raise ValueError("an item begins with -1")
        if self.path:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return sums


class SumsInOneStep(ManagedModel):
    """A model of steps whose state is the sum of its item."""

    def init_model(self) -> None:
        pass

    def start(self, items: list[Any]) -> list[float]:
        return [float(item.sum()) for item in items]

    def step(self, states: list[float]) -> list[tuple[float, bool]]:
        return [(state, True) for state in states]


class GivesTheSame(ManagedModel):
    """Gives the same array as each result, and goes on to change it in the next batch."""

    def init_model(self) -> None:
        self.array = np.zeros(50_000)

    def predict(self, batch: list[Any]) -> list[Any]:
        self.array += 1
        return [self.array for _ in batch]


class GatedEcho(Gated):
    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        return batch


class Historian(ManagedModel):
    """Waits at the gate, then looks at its items, and tells of all that it has ever seen."""

    def init_model(self, gate: Gate) -> None:
        self.gate = gate
        self.seen: list[str] = []

    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        self.seen += checksums(batch)
        return [list(self.seen)] * len(batch)


class TellsOfStack(ManagedModel):
    """Tells each row of the batch: its type, its shape, whether it was copied, and this sum."""

    stack = True

    def init_model(self, gate: Gate | None = None) -> None:
        self.gate = gate

    def predict(self, batch: Any) -> list[Any]:
        if self.gate is not None:
            self.gate.go_through()
        is_copy = batch.base is None if isinstance(batch, np.ndarray) else None
        sums = [float(row.sum()) for row in batch]
        batch[...] = 7  # which nobody is to notice
        if -1.0 in sums:
            raise ValueError("a row is -1 in all")
        return [(type(batch).__name__, tuple(batch.shape), is_copy, total) for total in sums]


class StackIsAMethod(NothingToLoad):
    """A model of before, which has something else of that name."""

    def stack(self, batch: list[Any]) -> Any:  # type: ignore[override]
        return np.stack(batch)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [type(batch).__name__, *self.stack(batch)[1:]]


def tensors(batch: list[Any]) -> Any:
    """For a dtype and a shape, a tensor that requires a gradient; for numbers, one tensor."""
    import torch

    if isinstance(batch[0], int):
        return torch.arange(len(batch) * 30_000.0).reshape(len(batch), 30_000)
    return [
        torch.ones(shape, dtype=getattr(torch, dtype)).requires_grad_(dtype == "float32")
        for dtype, shape in batch
    ]
