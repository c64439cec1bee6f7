"""A ``torch.cuda`` that limits memory, and a model that says what it is limited to."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from service_streamer import ManagedModel

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
