"""Registers memory with CUDA, so that a GPU copies from it by itself, without a copy in between."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

__all__ = ["Pinned", "cuda_runtime", "synchronize"]

logger = logging.getLogger(__name__)

#: What is registered at a time, at least, bytes: a call takes about a millisecond for as much.
_STEP = 64 << 20

#: For all contexts of the process, not only for the current one.
#: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
_PORTABLE = 1


def cuda_runtime() -> Any:
    """torch's way to the CUDA runtime, or None where there is no torch, or no device."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available():
            return torch.cuda.cudart()
    return None


def synchronize() -> None:
    """Wait until the device has done all that it was given, also what it copies."""
    torch: Any = sys.modules["torch"]
    torch.cuda.synchronize()


class Pinned:
    """The start of a mapping, registered as far as it has been used. Belongs to one thread.

    In one piece, made anew when that grows: a copy from two of them may be refused. It grows to at
    least twice its size, so that is seldom; and what is registered exists, so it is not more than
    twice what has been used, and some 64 MB.

    Args:
        runtime: with ``cudaHostRegister`` and ``cudaHostUnregister``, as torch has them.
        address: of the mapping, at the start of a page.
        size: of it, in bytes.

    Attributes:
        size: how much is registered, bytes.
    """

    def __init__(self, runtime: Any, address: int, size: int) -> None:
        self.size = 0
        self._runtime = runtime
        self._address = address
        self._most = size

    def cover(self, stop: int) -> None:
        """Have it registered up to there. If that fails, it is said once, and copies are slower."""
        if stop > self.size and self._runtime is not None:
            try:
                self._grow(stop)
            except Exception as error:  # of a device that is of no use any more, say
                self._give_up(0, error)

    def _grow(self, stop: int) -> None:
        wanted = min(self._most, max(2 * self.size, -(-stop // _STEP) * _STEP))
        if self.size:
            synchronize()  # copies may be under way
            self._runtime.cudaHostUnregister(self._address)
            self.size = 0
        error = int(self._runtime.cudaHostRegister(self._address, wanted, _PORTABLE))
        if error:
            self._give_up(wanted, f"error {error}")
        else:
            self.size = wanted

    def _give_up(self, wanted: int, why: object) -> None:
        self._runtime = None
        with contextlib.suppress(Exception):  # of a filter or handler of a user's
            logger.warning(
                "%d MB cannot be registered with CUDA (%s): items are copied to the device by way "
                "of another buffer, which is slower",
                wanted // 1_000_000, why,
            )  # fmt: skip
