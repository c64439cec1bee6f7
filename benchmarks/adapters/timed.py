"""Models that tell when they were loaded, by the clock that all processes share; for workers."""
# mypy: ignore-errors

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import_began = time.monotonic()

from adapters import managed  # noqa: E402


class Loading(NamedTuple):
    """How a worker came to be; times are of the monotonic clock."""

    pid: int
    import_began: float
    init_began: float
    init_ended: float


class Gpu(managed.Gpu):
    """Has nothing to import or to load."""

    def init_model(self) -> None:
        init_began = time.monotonic()
        super().init_model()
        self.loading = Loading(os.getpid(), import_began, init_began, time.monotonic())

    def predict(self, batch: list[Any]) -> list[Loading]:
        return [self.loading for _ in super().predict(batch)]


class Infilling(managed.Infilling):
    """The shipped model. What it imports when it loads counts as importing."""

    def init_model(self) -> None:
        import torch  # noqa: F401
        from transformers import BertForMaskedLM  # noqa: F401  # lazy: this one's module too

        init_began = time.monotonic()
        super().init_model()
        self.loading = Loading(os.getpid(), import_began, init_began, time.monotonic())

    def predict(self, batch: list[str]) -> list[Loading]:
        return [self.loading for _ in super().predict(batch)]
