"""Find the GPUs of this machine without CUDA.

NVIDIA's come from NVML, a part of the driver: it makes no CUDA context, takes no device memory and
is safe before a fork. AMD's come from the kernel's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from .visibility import Gpu, Inventory

__all__ = ["COUNT", "find_gpus"]

#: Environment variable with the number of GPUs, for other accelerators. It is not checked.
COUNT = "SERVICE_STREAMER_GPU_COUNT"

_NVML = "libnvidia-ml.so.1"

#: Return codes of NVML.
_DRIVER_NOT_LOADED = 9
_NO_PERMISSION = 4

_NAME_SIZE = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE; also enough for a UUID

#: Devices of systems with CUDA but without NVML: WSL, Jetson.
_OTHER_SIGNS = ("/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvmap")


def find_gpus() -> Inventory:
    """All GPUs, including those that the environment hides. Takes some milliseconds."""
    count_given = os.environ.get(COUNT, "")
    if count_given.isdecimal():
        why = f"{COUNT} is {count_given}"
        return Inventory(tuple(Gpu(number) for number in range(int(count_given))), why=why)
    inventory = _by_nvml()
    if inventory is not None and (inventory.gpus is None or inventory.gpus):
        return inventory
    amd = _by_kfd(Path("/sys/class/kfd/kfd/topology/nodes"))
    if amd:
        return Inventory(tuple(amd), "amd")
    if inventory is not None:
        return inventory
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count:  # a container without NVML
        return Inventory(tuple(Gpu(number) for number in range(count)), "nvidia")
    if any(map(os.path.exists, _OTHER_SIGNS)) or _has_cuda():
        return Inventory(None)
    return Inventory((), why="this machine has no NVIDIA or AMD driver")


def _has_cuda() -> bool:
    """Whether the CUDA driver is installed; it is loaded but not initialized."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _NvmlError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Nvml:
    """The used part of NVML."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(_NVML)  # OSError: not installed
        self._call("nvmlInit_v2")

    def close(self) -> None:
        with contextlib.suppress(_NvmlError):
            self._call("nvmlShutdown")

    def count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def device(self, index: int) -> ctypes.c_void_p:
        return self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))

    def text(self, function: str, device: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_NAME_SIZE)
        self._call(function, device, buffer, ctypes.c_uint(_NAME_SIZE))
        return buffer.value.decode(errors="replace")

    def parts(self, device: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """The MIG instances of a GPU; empty without MIG."""
        parts: list[ctypes.c_void_p] = []
        with contextlib.suppress(_NvmlError, AttributeError):  # an older GPU, or an older NVML
            current, pending = ctypes.c_uint(), ctypes.c_uint()
            self._call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
            if current.value:
                for index in range(self._number("nvmlDeviceGetMaxMigDeviceCount", device)):
                    with contextlib.suppress(_NvmlError):  # the slot is empty
                        number = ctypes.c_uint(index)
                        parts.append(
                            self._handle("nvmlDeviceGetMigDeviceHandleByIndex", device, number)
                        )
        return parts

    def _number(self, function: str, *arguments: Any) -> int:
        number = ctypes.c_uint()
        self._call(function, *arguments, ctypes.byref(number))
        return number.value

    def _handle(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, *arguments, ctypes.byref(handle))
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise _NvmlError(code, (describe(code) or b"unknown").decode(errors="replace"))


def _by_nvml() -> Inventory | None:
    """The GPUs according to NVML; None if it is not installed."""
    try:
        nvml = _Nvml()
    except (OSError, AttributeError):
        return None
    except _NvmlError as error:
        if error.code == _DRIVER_NOT_LOADED:
            return Inventory((), "nvidia", "the NVIDIA driver is not loaded")
        return Inventory(None, "nvidia")  # CUDA may know more
    try:
        gpus: list[Gpu] = []
        for index in range(nvml.count()):
            gpus += _gpus(nvml, index)
    except _NvmlError:
        return Inventory(None, "nvidia")
    finally:
        nvml.close()
    return Inventory(tuple(gpus), "nvidia", "the NVIDIA driver finds no GPU")


def _gpus(nvml: _Nvml, index: int) -> list[Gpu]:
    """A GPU, or its MIG instances."""
    try:
        device = nvml.device(index)
        uuid = nvml.text("nvmlDeviceGetUUID", device)
        name = nvml.text("nvmlDeviceGetName", device)
    except _NvmlError as error:
        if error.code == _NO_PERMISSION:  # another container's; CUDA does not count it either
            return []
        return [Gpu(index, problem=f"NVML says {str(error)!r}")]
    parts = nvml.parts(device)
    if not parts:
        return [Gpu(index, uuid, name)]
    return [
        Gpu(index, nvml.text("nvmlDeviceGetUUID", part), f"MIG of {name}", uuid) for part in parts
    ]


def _by_kfd(nodes: Path) -> list[Gpu]:
    """AMD's GPUs; empty without a driver."""
    gpus: list[Gpu] = []
    with contextlib.suppress(OSError):
        for node in sorted(nodes.iterdir(), key=lambda path: (len(path.name), path.name)):
            with contextlib.suppress(OSError, ValueError):  # another container's cannot be read
                if int((node / "gpu_id").read_text()):  # 0 for processors
                    lines = (node / "properties").read_text().splitlines()
                    properties = dict(line.split() for line in lines if len(line.split()) == 2)
                    unique = int(properties.get("unique_id", "0"))
                    uuid = f"GPU-{unique:016x}" if unique else ""
                    name = (node / "name").read_text().strip()
                    gpus.append(Gpu(len(gpus), uuid, f"AMD {name}".strip()))
    return gpus
