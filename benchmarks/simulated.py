"""Models that cost what a GPU would, without one; they run under this project and the original."""

from __future__ import annotations

import time
from typing import Any

from service_streamer import ManagedModel


class SimulatedGPU(ManagedModel):
    """A batch of n takes 5 ms + 0.1 ms · n, as a small model on a GPU does. It sleeps."""

    def init_model(self, base: float = 5e-3, per_item: float = 1e-4) -> None:
        self.base = base
        self.per_item = per_item

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(self.base + self.per_item * len(batch))
        return batch


class LargeSimulatedGPU(SimulatedGPU):
    """A batch of n takes 20 ms + 0.5 ms · n, as a larger model does."""

    def init_model(self, base: float = 20e-3, per_item: float = 5e-4) -> None:
        super().init_model(base, per_item)


class Echo(ManagedModel):
    """Costs nothing: what is left is the middleware."""

    def init_model(self) -> None:
        """Nothing to load."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch
