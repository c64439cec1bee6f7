"""A pipeline on the device that sleeps, for ``serve``."""

from __future__ import annotations

import os

from on_gpu.simulated import slow_down
from service_streamer.pipelines.model import PipelineModel

__all__ = ["SimulatedPipeline", "variables"]

_FOLDER, _TASK = "ON_GPU_FOLDER", "ON_GPU_TASK"


class SimulatedPipeline(PipelineModel):
    """A pipeline of a small model, whose forward pass takes as long as that of a large one.

    ``serve`` gives a class of the user no arguments: they are in the environment.
    """

    def init_model(self) -> None:  # type: ignore[override]
        super().init_model(os.environ[_FOLDER], os.environ[_TASK])
        slow_down(self.model.model)


def variables(folder: str, task: str) -> dict[str, str]:
    """The environment in which ``SimulatedPipeline`` loads this model."""
    return {_FOLDER: folder, _TASK: task}
