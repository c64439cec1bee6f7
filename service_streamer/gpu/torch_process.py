"""What a worker sets in its torch, and asks of it, if its model has loaded torch.

Settings of the user take precedence: torch's own variables, and torch's own functions in
``init_model``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .accelerators import TORCH_KINDS, kind_in_use
from .places import Place

logger = logging.getLogger(__name__)

#: Memory of a GPU that a process takes beside torch's allocator: its context and its kernels.
_CONTEXT = 512 << 20


def check_torch(place: Place) -> None:
    """After the model is loaded: check that torch can use the worker's GPU.

    Raises:
        RuntimeError: torch is built for GPUs, but the user's GPU is missing.
    """
    torch: Any = sys.modules.get("torch")
    if not place.needs_gpu or torch is None:
        return
    try:
        if any(kind.is_available() for kind in TORCH_KINDS.values()):
            return
        version = torch.__version__
        is_for_gpus = any(kind.is_built() for kind in TORCH_KINDS.values())
    except AttributeError:  # half loaded, or another module of that name
        return
    if place.gpu_id is not None and is_for_gpus:
        raise RuntimeError(
            f"device {place.device} was requested, but torch {version} sees no GPU in the worker: "
            "perhaps its driver is too old, or the device is lost; see nvidia-smi"
        )
    logger.warning(
        "torch %s in the worker cannot use %s: if the model uses torch, it runs on the CPU",
        version, "any GPU" if place.device is None else f"device {place.device}",
    )  # fmt: skip


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
            if not module.is_initialized():
                _limit_later(module, sharers)
            elif hasattr(module, "get_per_process_memory_fraction"):
                # An older torch does not say what it is limited to, perhaps by the user.
                _limit(module, sharers)
    return bool(modules)


def _limit_later(module: Any, sharers: Sequence[int]) -> None:
    module._lazy_call(lambda: _limit(module, sharers))  # there is no public name for it


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
