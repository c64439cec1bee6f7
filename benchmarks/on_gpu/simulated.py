"""A device that is none: a forward pass that sleeps as long as a device would compute.

It holds no processor, so it shows what the rest costs: how much of its time such a device would be
given work. It starts one batch when the one before has ended, as a stream does.
"""

from __future__ import annotations

import os
import time
from typing import Any

from service_streamer.pipelines.model import PipelineModel

__all__ = ["SimulatedPipeline", "device_ms", "forward", "of_pipeline"]

_FIXED_MS, _PER_16_TOKENS_MS = 5.0, 0.1
#: An image counts as so many tokens: ResNet-50 takes a device about as long as a short sentence.
_IMAGE_TOKENS = 32

_FOLDER, _TASK = "ON_GPU_FOLDER", "ON_GPU_TASK"


def device_ms(size: int, tokens: int) -> float:
    """How long a batch takes, milliseconds."""
    return _FIXED_MS + _PER_16_TOKENS_MS * size * tokens / 16


def forward(size: int, tokens: int) -> None:
    """Compute a batch."""
    time.sleep(device_ms(size, tokens) / 1e3)


class SimulatedPipeline(PipelineModel):
    """A pipeline of a small model, whose forward pass takes as long as that of a large one.

    For ``serve``, which gives a class of the user no arguments: they are in the environment.
    """

    def init_model(self) -> None:  # type: ignore[override]
        super().init_model(os.environ[_FOLDER], os.environ[_TASK])
        slow_down(self.model.model)


def of_pipeline(folder: str, task: str) -> dict[str, str]:
    """The environment in which ``SimulatedPipeline`` loads this model."""
    return {_FOLDER: folder, _TASK: task}


def slow_down(model: Any) -> None:
    """Have a torch module sleep before each forward pass."""

    def before(_: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named.get("input_ids", named.get("pixel_values"))
        shape = (arguments[0] if given is None else given).shape
        forward(shape[0], shape[1] if len(shape) == 2 else _IMAGE_TOKENS)

    model.register_forward_pre_hook(before, with_kwargs=True)
