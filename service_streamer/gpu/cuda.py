"""NVIDIA's GPUs: CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..reporting import missing
from .accelerator import Accelerator, Gpu, reported_twice, torch_version

ROCM_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

#: Devices of systems with CUDA but without NVML: WSL, Jetson.
_JETSON = Path("/dev/nvhost-gpu")
_OTHER_SIGNS = (_JETSON, Path("/dev/dxg"), Path("/dev/nvgpu"), Path("/dev/nvmap"))

#: Virtual GPUs, such as "NVIDIA A40-48C" and "GRID V100D-32Q", may refuse the calls that expandable
#: segments need: https://github.com/dmlc/xgboost/issues/12217
_VIRTUAL = re.compile(r"^Model:\s*(?:GRID .*|.*-\d+[ABCQ]\s*)$", re.MULTILINE)

#: From this version on torch reads PYTORCH_ALLOC_CONF for CUDA:
#: https://github.com/pytorch/pytorch/issues/183387
_NEW_NAME_SINCE = (2, 11)

#: From cuda.h: CUDA_ERROR_OUT_OF_MEMORY.
_CUDA_OUT_OF_MEMORY = 2


class Cuda(Accelerator):
    """CUDA's devices. They are counted through NVML, a part of the driver, without a context."""

    variables: ClassVar[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES",)
    hidden: ClassVar[Mapping[str, str]] = {"CUDA_VISIBLE_DEVICES": ""}
    torch_name = "cuda"

    #: Files of the driver for Linux, which has a folder for each GPU; WSL has none.
    driver = Path("/proc/driver/nvidia")

    def find(self) -> Sequence[Gpu] | None:
        with contextlib.suppress(ImportError):
            return _find_by_nvml()
        if self._has_parts():
            return None
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if not count and any(map(Path.exists, _OTHER_SIGNS)):
            return None
        return [Gpu(str(number)) for number in range(count)]

    def showing(self, value: str) -> dict[str, str | None]:
        # Without those of ROCm: where the kind of the GPUs is unknown, they would take precedence.
        return dict.fromkeys(ROCM_VARIABLES) | super().showing(value)

    def require_count(self) -> None:
        if self._has_parts():
            need = 'cuda_devices="auto" on GPUs that are divided into MIG instances'
            raise ImportError(missing(need, "nvidia-ml-py", "gpu"))

    def _has_parts(self) -> bool:
        """Whether GPUs are divided into MIG instances."""
        return any((self.driver / "capabilities").glob("gpu*/mig/gi*"))

    def allocator_variables(self) -> dict[str, str]:
        # A freed block of any size becomes part of a larger one. Batches of changing lengths
        # otherwise leave gaps that no later batch fits into.
        try:
            gpus = (self.driver / "gpus").iterdir()
            models = [(each / "information").read_text(errors="replace") for each in gpus]
        except OSError:
            return {}
        if not models or _JETSON.exists() or any(map(_VIRTUAL.search, models)):
            return {}
        return {_allocator_variable(): "expandable_segments:True"}

    def is_built(self) -> bool:
        return bool(sys.modules["torch"].backends.cuda.is_built())

    def devices_in_use(self) -> list[int]:
        has_context = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", None)
        if has_context is None:
            return super().devices_in_use()
        return [device for device in range(self.torch.device_count()) if has_context(device)]

    def event(self, *, timing: bool = False) -> Any:
        # A thread that waits for an event of the other kind keeps a core busy.
        return self.torch.Event(enable_timing=timing, blocking=True)

    def fault(self) -> str | None:
        return super().fault() or reported_twice(_driver_fault)


def _find_by_nvml() -> Sequence[Gpu] | None:
    """Raises ImportError: NVIDIA's package, or the library of the driver, is missing."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise ImportError(str(error)) from error
    except pynvml.NVMLError_DriverNotLoaded:
        return ()
    except pynvml.NVMLError:
        return None  # CUDA may know more
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = [gpu for number in range(count) for gpu in _gpus_at(pynvml, number)]
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    # The number of a divided GPU shows its first part only, so all are named by UUID.
    has_parts = any(gpu.value == gpu.uuid for gpu in gpus)
    return [gpu._replace(value=gpu.uuid) for gpu in gpus] if has_parts else gpus


def _gpus_at(nvml: Any, number: int) -> Iterator[Gpu]:
    """The GPU with NVML's number, or its MIG instances."""
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid, name = nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetName(device)
    except nvml.NVMLError_NoPermission:  # another container's; CUDA does not count it either
        return
    except nvml.NVMLError as error:
        yield Gpu(str(number), problem=f"NVML says {str(error)!r}")
        return
    parts = []
    with contextlib.suppress(nvml.NVMLError):  # an older GPU, or an older driver
        if nvml.nvmlDeviceGetMigMode(device)[0]:
            parts = [*range(nvml.nvmlDeviceGetMaxMigDeviceCount(device))]
    for each in parts:
        with contextlib.suppress(nvml.NVMLError):  # the slot is empty
            part = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, each))
            yield Gpu(part, f"MIG of {name}", part)
    if not parts:
        yield Gpu(str(number), name, uuid)


def _allocator_variable() -> str:
    """The name that this torch reads, and that a name set by the model overrides."""
    found = re.match(r"(\d+)\.(\d+)", torch_version())
    is_new = found is not None and tuple(map(int, found.groups())) >= _NEW_NAME_SINCE
    return "PYTORCH_ALLOC_CONF" if is_new else "PYTORCH_CUDA_ALLOC_CONF"


def _driver_fault() -> str | None:
    """What is wrong with the CUDA context of this thread: of CuPy, JAX, ONNX Runtime, ..."""
    with contextlib.suppress(Exception):  # no driver is loaded in this process
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        context = ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            return None
        error = driver.cuCtxSynchronize()
        if error and error != _CUDA_OUT_OF_MEMORY:
            name = ctypes.c_char_p()
            driver.cuGetErrorName(error, ctypes.byref(name))
            return f"CUDA error {error}: {(name.value or b'unknown').decode(errors='replace')}"
    return None
