"""Models that tell when they were loaded, by the clock that all processes share; for workers."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import_began = time.monotonic()

from bert_model import ManagedBertModel  # noqa: E402
from simulated import SimulatedGPU  # noqa: E402


class Loading(NamedTuple):
    """How a worker came to be; times are of the monotonic clock."""

    pid: int
    import_began: float
    init_began: float
    init_ended: float


class TimedSimulatedGPU(SimulatedGPU):
    """Has nothing to import or to load."""

    loading: Loading

    def init_model(self, base: float = 5e-3, per_item: float = 1e-4) -> None:
        init_began = time.monotonic()
        super().init_model(base, per_item)
        self.loading = Loading(os.getpid(), import_began, init_began, time.monotonic())

    def predict(self, batch: list[Any]) -> list[Loading]:
        return [self.loading for _ in super().predict(batch)]


class TimedBert(ManagedBertModel):
    """The shipped model. What it imports when it loads counts as importing."""

    loading: Loading

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        import torch  # noqa: F401
        from transformers import BertForMaskedLM  # noqa: F401  # lazy: this one's module too

        init_began = time.monotonic()
        super().init_model(*args, **kwargs)
        self.loading = Loading(os.getpid(), import_began, init_began, time.monotonic())

    def predict(self, batch: list[str]) -> list[Loading]:  # type: ignore[override]
        return [self.loading for _ in super().predict(batch)]
