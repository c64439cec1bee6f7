"""Models whose workers run out of device memory, or have a share of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from models import NothingToLoad
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


class NamesTexts(NothingToLoad):
    """Names what its library says by a text."""

    out_of_memory_errors = ("arena exhausted",)

    def predict(self, batch: list[Any]) -> list[int]:
        if len(batch) > 4:
            raise ValueError(f"the arena exhausted: {len(batch)} rows")
        return [len(batch)] * len(batch)


class Environment(NothingToLoad):
    """Answers with variables of its environment."""

    def predict(self, batch: list[str]) -> list[Any]:
        return [self.gpu_id if name == "gpu_id" else os.environ.get(name) for name in batch]


# -- limits of memory

GB = 1 << 30

#: Environment variable: this module "imports torch".
STUB_AT_IMPORT = "TORCH_STUB_AT_IMPORT"


class CudaMemory:
    """torch.cuda, as far as it limits memory: fractions, by device."""

    def __init__(self, *, is_old: bool = False, count: int = 1) -> None:
        self.limits = dict.fromkeys(range(count), 1.0)
        self.queued: list[Callable[[], None]] | None = []
        self.current = 0
        if not is_old:
            self.get_per_process_memory_fraction = self.limits.__getitem__

    def is_initialized(self) -> bool:
        return self.queued is None

    def device_count(self) -> int:
        return len(self.limits)

    def initialize(self) -> None:
        queued, self.queued = self.queued or [], None
        for call in queued:
            call()

    def _lazy_call(self, call: Callable[[], None]) -> None:
        assert self.queued is not None
        self.queued.append(call)

    def get_device_properties(self, _: int) -> Any:
        return SimpleNamespace(total_memory=8 * GB)

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        yield
        self.current = before

    def set_per_process_memory_fraction(self, fraction: float, device: int = 0) -> None:
        if self.queued is not None:
            self.initialize()
        self.limits[device] = fraction
        self.current = device


def _import_torch(cuda: CudaMemory) -> None:
    sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
        cuda=cuda, set_num_threads=lambda _: None
    )


if STUB_AT_IMPORT in os.environ:
    _import_torch(CudaMemory(is_old=True))


class MemoryLimits(ManagedModel):
    """Answers with its GPU and the share of its memory."""

    def init_model(self) -> None:
        if STUB_AT_IMPORT not in os.environ:
            _import_torch(CudaMemory())
        sys.modules["torch"].cuda.initialize()

    def predict(self, batch: list[Any]) -> list[Any]:
        limit = sys.modules["torch"].cuda.limits[0]
        return [(os.environ["CUDA_VISIBLE_DEVICES"], limit)] * len(batch)
