"""How torch takes memory of a GPU: in growing segments, and its share where workers share the GPU.

Both are defaults that the user may change: torch's own variables, and torch's own functions in
``init_model``, take precedence.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Read by torch's allocator; the first one that is set counts.
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: A freed block of any size becomes part of a larger one. Batches of changing lengths otherwise
#: leave gaps that no later batch fits into.
_EXPANDABLE = "expandable_segments:True"

#: From this version on torch reads PYTORCH_ALLOC_CONF for CUDA:
#: https://github.com/pytorch/pytorch/issues/183387
_NEW_NAME_SINCE = (2, 11)

#: Of the driver for Linux, with a folder for each GPU; WSL has none.
_GPUS = Path("/proc/driver/nvidia/gpus")

#: Of Jetson's driver, under which torch has no expandable segments.
_JETSON = Path("/dev/nvhost-gpu")

#: Virtual GPUs, such as "NVIDIA A40-48C" and "GRID V100D-32Q", may refuse the calls that expandable
#: segments need: https://github.com/dmlc/xgboost/issues/12217
_VIRTUAL = re.compile(r"^Model:\s*(?:GRID .*|.*-\d+[ABCQ]\s*)$", re.MULTILINE)

#: What a process takes of a GPU's memory beside torch's allocator: its context and its kernels.
_CONTEXT = 512 << 20


def allocator_variables(
    inherited: Mapping[str, str],
    *,
    gpus: Path = _GPUS,
    jetson: Path = _JETSON,
    torch_version: str | None = None,
) -> dict[str, str]:
    """Environment variables that turn on expandable segments; none if the user has set any.

    Args:
        gpus, jetson: files of the driver.
        torch_version: that of the installed torch by default.
    """
    if any(name in inherited for name in _NAMES) or not _has_expandable_segments(gpus, jetson):
        return {}
    return {_name(torch_version): _EXPANDABLE}


@functools.lru_cache
def _has_expandable_segments(gpus: Path, jetson: Path) -> bool:
    try:
        models = [(each / "information").read_text(errors="replace") for each in gpus.iterdir()]
    except OSError:
        return False
    return bool(models) and not jetson.exists() and not any(map(_VIRTUAL.search, models))


@functools.lru_cache
def _name(torch_version: str | None) -> str:
    """The name that this torch reads, and that a name set by the model overrides."""
    from importlib.metadata import version  # only here: it takes some milliseconds to import

    with contextlib.suppress(Exception):
        major, minor = map(int, (torch_version or version("torch")).split(".")[:2])
        if (major, minor) >= _NEW_NAME_SINCE:
            return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_CUDA_ALLOC_CONF"


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


def limit_device_memory(sharers: Sequence[int]) -> bool:
    """In a worker: limit torch to its share; False if torch is not loaded.

    Without a CUDA context the limit waits for one, and makes none. A limit that the user has set by
    ``torch.cuda.set_per_process_memory_fraction`` stays.

    Args:
        sharers: workers on each GPU that this worker sees.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    if max(sharers, default=1) < 2:
        return True
    with contextlib.suppress(Exception):  # half loaded, or a GPU that the model will complain of
        if not cuda.is_initialized():
            cuda._lazy_call(lambda: _limit(cuda, sharers))  # there is no public name for it
        elif hasattr(cuda, "get_per_process_memory_fraction"):
            # An older torch does not say what it is limited to, perhaps by the user.
            _limit(cuda, sharers)
    return True


def _limit(cuda: Any, sharers: Sequence[int]) -> None:
    # Within the initialization of CUDA an error would be one of the model's.
    with contextlib.suppress(Exception):
        for device, workers in enumerate(sharers[: cuda.device_count()]):
            share = share_of_memory(cuda.get_device_properties(device).total_memory, workers)
            current = getattr(cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
            if share < 1.0 == current:
                with cuda.device(device):  # torch would leave the device that it has set
                    cuda.set_per_process_memory_fraction(share, device)
