"""AMD's GPUs: ROCm. torch names them as those of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from .accelerator import Gpu, listed
from .cuda import ROCM_VARIABLES, Cuda

_CUDA = "CUDA_VISIBLE_DEVICES"
_ROCR, _HIP = ROCM_VARIABLES


class Rocm(Cuda):
    """ROCm's devices. They are counted by the kernel's files.

    ROCm first applies ``ROCR_VISIBLE_DEVICES`` and numbers the rest anew. To these it applies
    ``HIP_VISIBLE_DEVICES``, or if that is not set ``CUDA_VISIBLE_DEVICES``.
    """

    variables: ClassVar[tuple[str, ...]] = (*ROCM_VARIABLES, _CUDA)
    hidden: ClassVar[Mapping[str, str]] = {_HIP: "-1"}  # ROCm ignores an empty list

    #: Files of the kernel, which has a folder for each GPU and processor.
    nodes = Path("/sys/class/kfd/kfd/topology/nodes")

    def find(self) -> Sequence[Gpu]:
        gpus: list[Gpu] = []
        with contextlib.suppress(OSError):
            for node in sorted(self.nodes.iterdir(), key=lambda path: (len(path.name), path.name)):
                with contextlib.suppress(OSError, ValueError):  # another container's
                    if int((node / "gpu_id").read_text()):  # 0 for processors
                        lines = (node / "properties").read_text().splitlines()
                        properties = dict(line.split() for line in lines if len(line.split()) == 2)
                        unique = int(properties.get("unique_id", "0"))
                        uuid = f"GPU-{unique:016x}" if unique else ""
                        name = (node / "name").read_text().strip()
                        gpus.append(Gpu(str(len(gpus)), f"AMD {name}".strip(), uuid))
        return gpus

    def visible(
        self, gpus: Sequence[Gpu] | None, environment: Mapping[str, str]
    ) -> Sequence[Gpu] | None:
        rest = listed(gpus, environment.get(_ROCR))
        if rest is not None:
            rest = [gpu._replace(value=str(number)) for number, gpu in enumerate(rest)]
        return listed(rest, environment.get(_HIP) or environment.get(_CUDA) or None)

    def showing(self, value: str) -> dict[str, str | None]:
        # ROCR's list stays: these numbers refer to it.
        return {_CUDA: value, _HIP: value}

    def allocator_variables(self) -> dict[str, str]:
        return {}
