"""The kinds of accelerators, which of them this machine has, and what a process does on its own.

Settings of the user take precedence: torch's own variables, and torch's own functions in
``init_model``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

#: Memory of a GPU that a process takes beside torch's allocator: its context and its kernels.
_CONTEXT = 512 << 20


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


def fault_in_use() -> str | None:
    """What is wrong with the GPU that this process uses, in its own words; None if nothing is.

    None also if its memory is full, or if the process uses none.
    """
    faults = (kind.fault() for kind in TORCH_KINDS.values())
    return next(filter(None, faults), None)


def share_of_memory(total: int, workers: int) -> float:
    """The fraction of a GPU's memory that torch may take in each of its workers.

    An equal part for each, less what its context takes. So a worker that needs more runs out of
    memory itself, and computes smaller batches, instead of the others.

    Args:
        total: of the GPU, bytes.
        workers: how many of a streamer's workers compute there.

    Returns:
        1.0 for a single worker, or if the GPU is too small to be shared.
    """
    rest = total / workers - _CONTEXT
    return rest / total if workers > 1 and rest > 0 else 1.0


def limit_memory(sharers: Sequence[int]) -> bool:
    """Limit torch to its share of each GPU; False if torch is not loaded.

    Without a context on a GPU the limit waits for one, and makes none.

    Args:
        sharers: workers on each GPU that this worker sees.
    """
    modules = [kind.torch for kind in TORCH_KINDS.values() if kind.torch is not None]
    for module in modules if max(sharers, default=1) > 1 else ():
        # torch may be half loaded. Of a GPU that fails the model's next call will complain.
        with contextlib.suppress(Exception):
            if not module.is_initialized():  # there is no public name for what waits for it
                module._lazy_call(functools.partial(_limit, module, sharers))
            elif hasattr(module, "get_per_process_memory_fraction"):
                # An older torch does not say what it is limited to, perhaps by the user.
                _limit(module, sharers)
    return bool(modules)


def _limit(module: Any, sharers: Sequence[int]) -> None:
    # Within the initialization of CUDA an error would be one of the model's.
    with contextlib.suppress(Exception):
        for device, workers in enumerate(sharers[: module.device_count()]):
            share = share_of_memory(module.get_device_properties(device).total_memory, workers)
            current = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
            if share < 1.0 == current:
                with module.device(device):  # torch would leave the device that it has set
                    module.set_per_process_memory_fraction(share, device)


def release_memory() -> None:
    """Give unused memory back to the device; a fragmented cache is of no use there."""
    gc.collect()  # a frame that holds its own exception is a cycle
    # Where that fails, so will the next run, and with an error that says more.
    with contextlib.suppress(Exception):
        kind = kind_in_use()
        if kind is not None:
            kind.torch.empty_cache()


def copy_thread_modes() -> Callable[[], None]:
    """A function that gives another thread this thread's modes of torch; it is called there.

    A model that switches gradients off in ``init_model`` does it for the thread that calls it. In
    another one ``postprocess`` would raise for a layer's parameters, and only while batches
    overlap. So it is with the current GPU, and the default device. Neither function raises.
    """
    torch: Any = sys.modules.get("torch")
    kind: Any = None
    has_gradients, device, number = True, None, 0
    with contextlib.suppress(Exception):  # torch is not loaded, half loaded, or an old one
        has_gradients = torch.is_grad_enabled()
        device = torch.get_default_device()
        kind = kind_in_use()
        number = 0 if kind is None else kind.torch.current_device()

    def take_over() -> None:
        with contextlib.suppress(Exception):
            if number:
                kind.torch.set_device(number)
            if not has_gradients:
                torch.set_grad_enabled(False)
            if device is not None and device.type != "cpu":  # it costs at each call of torch
                torch.set_default_device(device)

    return take_over
