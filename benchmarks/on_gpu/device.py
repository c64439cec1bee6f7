"""The devices that torch sees, and their names.

As a program it answers with what torch sees: so no other process here touches CUDA for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator

from on_gpu.nvml import opened
from on_gpu.running import Row, answer

__all__ = ["as_visible"]


def measure(_: Row) -> Iterator[Row]:
    found: Row = {"torch": None, "transformers": None, "cuda": None, "driver": None, "devices": []}
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        for number, name in enumerate(_visible(torch.cuda.device_count())):
            about = torch.cuda.get_device_properties(number)
            found["devices"].append(
                {"name": about.name, "memory_gb": round(about.total_memory / 1e9, 1), "id": name}
            )
    except ImportError as error:
        found["why_not"] = f"torch cannot be imported ({error})"
    except RuntimeError as error:  # a driver that is too old, say
        found["why_not"] = f"torch cannot use the device ({error})"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    nvml = opened([device["id"] for device in found["devices"]])
    if nvml is not None:
        with nvml:
            found["driver"] = nvml.driver()
            for device, more in zip(found["devices"], nvml.about(), strict=True):
                device.update(more)
    yield found


def _visible(count: int) -> list[str]:
    """How each of the devices is to be named to a worker."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if named is None else named.split(",")
    return [name.strip() for name in names[:count]]


def as_visible(name: str) -> str:
    """A device of ``_visible`` as ``cuda_devices`` names it: by its number among those."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if named is None else [each.strip() for each in named.split(",")]
    return str(names.index(name)) if name in names else name


if __name__ == "__main__":
    answer(measure)
