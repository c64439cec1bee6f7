"""Models for the tests of workers on Ray, importable by them."""

from __future__ import annotations

import os
from typing import Any

from service_streamer import ManagedModel


class Placed(ManagedModel):
    """Tells where it is: its ``gpu_id``, the GPUs that it sees, and its process."""

    def init_model(self) -> None:
        """Nothing to load."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [(self.gpu_id, os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid()) for _ in batch]


def writes(batch: list[Any]) -> list[str]:
    """Tries to change its items."""
    for item in batch:
        try:
            item[0] = 1
        except ValueError as error:
            return [str(error)] * len(batch)
    return ["written"] * len(batch)
