"""The kinds of accelerators, and which of them this machine or this process uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .accelerator import Accelerator, Gpu
from .cuda import Cuda
from .rocm import Rocm
from .xpu import Xpu, is_torch_for_xpu

CUDA, ROCM, XPU = Cuda(), Rocm(), Xpu()

#: In the order in which a machine is searched.
KINDS: tuple[Accelerator, ...] = (CUDA, ROCM, XPU)

#: By torch's name of the devices: those of ROCm are named as those of CUDA.
TORCH_KINDS = {kind.torch_name: kind for kind in KINDS if kind is not ROCM}

#: Environment variable with the number of GPUs, for other accelerators. It is not checked.
GPU_COUNT = "SERVICE_STREAMER_GPU_COUNT"

#: Variables of torch's allocator; the first one that is set counts.
_OF_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def find_gpus() -> tuple[Accelerator, Sequence[Gpu] | None]:
    """All GPUs of this machine, including hidden ones, and their kind. Takes some milliseconds.

    Returns:
        The kind, and the GPUs; None in place of the GPUs if they cannot be counted.
    """
    count = os.environ.get(GPU_COUNT, "")
    if count.isdecimal():
        kind: Accelerator = XPU if is_torch_for_xpu() else CUDA
        return kind, tuple(Gpu(str(number)) for number in range(int(count)))
    for kind in KINDS:
        gpus = kind.find()
        if gpus is None:
            return kind_of(os.environ) if kind is CUDA else kind, None
        if gpus:
            return kind, gpus
    return CUDA, ()


def kind_of(environment: Mapping[str, str]) -> Accelerator:
    """The kind of which a process with this environment sees a part; CUDA without any."""
    for kind in KINDS[1:]:
        if set(kind.variables).difference(CUDA.variables) & environment.keys():
            return kind
    return CUDA


def hidden_variables() -> dict[str, str | None]:
    """Environment variables that hide all GPUs."""
    return {name: value for kind in KINDS for name, value in kind.hidden.items()}


def allocator_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that let torch's allocator grow its segments; none if the user set any.

    Args:
        inherited: the environment of the parent.
    """
    if any(name in inherited for name in _OF_ALLOCATOR):
        return {}
    return {name: value for kind in KINDS for name, value in kind.allocator_variables().items()}


def kind_in_use() -> Accelerator | None:
    """The kind on which torch has a context in this process; None if it has none."""
    return next((kind for kind in TORCH_KINDS.values() if kind.is_in_use()), None)
