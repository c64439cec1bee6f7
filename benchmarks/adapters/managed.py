"""The workloads as ManagedModels, of this project or of the original: whichever is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapters import workloads
from service_streamer import ManagedModel

__all__ = [
    "MODELS",
    "STAGED",
    "Arrays",
    "Counted",
    "Echo",
    "EvenStages",
    "Gpu",
    "GpuStages",
    "Infilling",
    "LargeGpu",
    "MiniLM",
    "MiniLMWithoutLength",
    "TitanXp",
]


class Echo(ManagedModel):
    workload = workloads.Echo

    def init_model(self) -> None:
        self._loaded = self.workload()
        self._loaded.load()

    def predict(self, batch: list[Any]) -> list[Any]:
        return self._loaded.predict(batch)


class Arrays(Echo):
    workload = workloads.Arrays


class Gpu(Echo):
    workload = workloads.Gpu


class Counted(Gpu):
    """Notes each item that it computes in a file of its process's, before it computes."""

    def init_model(self, folder: str) -> None:  # type: ignore[override]
        super().init_model()
        self._file = open(Path(folder) / str(os.getpid()), "a")  # noqa: SIM115

    def predict(self, batch: list[Any]) -> list[Any]:
        self._file.write("".join(f"{item}\n" for item in batch if item >= 0))
        self._file.flush()
        return super().predict(batch)


class LargeGpu(Echo):
    workload = workloads.LargeGpu


class TitanXp(Echo):
    workload = workloads.TitanXp


class EvenStages(Echo):
    workload = workloads.EvenStages


class GpuStages(Echo):
    workload = workloads.GpuStages


class StagedEven(ManagedModel):
    """The same, told apart; of this project only, since the original knows ``predict`` only."""

    workload: Any = workloads.EvenStages

    def init_model(self) -> None:
        self._loaded: Any = self.workload()
        self._loaded.load()

    def preprocess(self, items: Any) -> Any:
        return self._loaded.preprocess(items)

    def forward(self, batch: Any) -> Any:
        return self._loaded.forward(batch)

    def postprocess(self, outputs: Any) -> Any:
        return self._loaded.postprocess(outputs)


class StagedGpu(StagedEven):
    workload = workloads.GpuStages


class Infilling(Echo):
    workload = workloads.Infilling
    length = staticmethod(workloads.Infilling.length)


class StagedInfilling(StagedEven):
    workload = workloads.Infilling
    length = staticmethod(workloads.Infilling.length)


class MiniLMWithoutLength(Echo):
    workload = workloads.MiniLM


class MiniLM(MiniLMWithoutLength):
    length = staticmethod(workloads.MiniLM.length)


#: By the names of the workloads.
MODELS: dict[str, type[ManagedModel]] = {
    "echo": Echo,
    "counted": Counted,
    "gpu": Gpu,
    "large-gpu": LargeGpu,
    "titan-xp": TitanXp,
    "even-stages": EvenStages,
    "gpu-stages": GpuStages,
    "infilling": Infilling,
    "minilm": MiniLM,
    "arrays": Arrays,
}
#: Those with stages, by the same names.
STAGED: dict[str, type[ManagedModel]] = {
    "even-stages": StagedEven,
    "gpu-stages": StagedGpu,
    "infilling": StagedInfilling,
}
