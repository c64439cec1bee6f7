"""Intel's GPUs: XPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from .accelerator import Accelerator, Gpu, torch_version


class Xpu(Accelerator):
    """Devices of Level Zero. Only the driver can count them, as it may divide a card into several.

    With ``cuda_devices=["cpu"]`` a worker still sees them: no value of the variable hides all.
    """

    variables: ClassVar[tuple[str, ...]] = ("ZE_AFFINITY_MASK",)
    torch_name = "xpu"

    def find(self) -> Sequence[Gpu] | None:
        return None if any(Path("/dev/dri").glob("renderD*")) and is_torch_for_xpu() else ()

    def is_built(self) -> bool:
        return self.torch is not None and bool(sys.modules["torch"]._C._has_xpu)


def is_torch_for_xpu() -> bool:
    """Whether the installed torch is built for XPU."""
    return "+xpu" in torch_version()
