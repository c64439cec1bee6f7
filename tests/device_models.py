"""Models of which workers run out of device memory by what a batch costs."""

from __future__ import annotations

import os
from typing import Any

from service_streamer import ManagedModel

#: What fits at once: items times the longest of them.
ROOM = 400


class NativeError(RuntimeError):
    """As torch.AcceleratorError: not the class of an out-of-memory error, but its text."""


class Padding(ManagedModel):
    """Pads a batch to its longest text, as a tokenizer does; answers with the cost of the run."""

    def init_model(self) -> None:
        self.runs: list[int] = []

    @staticmethod
    def length(item: str) -> int:
        return len(item)

    def predict(self, batch: list[str]) -> list[Any]:
        cost = len(batch) * max(map(len, batch))
        if cost > ROOM:
            raise NativeError(
                "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable"
            )
        self.runs.append(len(batch))
        return [len(batch)] * len(batch)


class NamesTexts(ManagedModel):
    """Names what its library says by a text."""

    out_of_memory_errors = ("arena exhausted",)

    def init_model(self) -> None:
        pass

    def predict(self, batch: list[Any]) -> list[int]:
        if len(batch) > 4:
            raise ValueError(f"the arena exhausted: {len(batch)} rows")
        return [len(batch)] * len(batch)


class Environment(ManagedModel):
    """Answers with variables of its environment."""

    def init_model(self) -> None:
        pass

    def predict(self, batch: list[str]) -> list[Any]:
        return [self.gpu_id if name == "gpu_id" else os.environ.get(name) for name in batch]
