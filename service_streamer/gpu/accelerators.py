"""Kinds of accelerators, which of them this machine has, and what a process does on its own.

All that differs between kinds is in their classes. To add one, write a subclass of ``Accelerator``
and add it to ``KINDS``.

Settings of the user take precedence: torch's own variables, and torch's own functions in
``init_model``. Nothing here imports torch, or makes a context on a device in a process that has
none: a context takes about 0.5 GB of the device's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..reporting import missing

#: Environment variable with the number of GPUs, for other accelerators. It is not checked.
GPU_COUNT = "SERVICE_STREAMER_GPU_COUNT"

#: Variables of torch's allocator; the first one that is set counts.
_OF_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: Memory of a GPU that a process takes beside torch's allocator: its context and its kernels.
_CONTEXT = 512 << 20

#: An error that says this is not about a broken device.
_OUT_OF_MEMORY = re.compile("out of memory|alloc_failed|memoryallocation", re.IGNORECASE)


class Gpu(NamedTuple):
    """A GPU, or a part of one that is used like a GPU (MIG)."""

    value: str  # of the environment variable that shows a process this GPU only
    name: str = ""  # such as "NVIDIA H100 80GB HBM3"; empty if unknown
    uuid: str = ""  # such as "GPU-8a2f..." or "MIG-1b3c..."; empty if unknown
    problem: str = ""  # the driver's reason why it cannot be used; empty if it can


class Accelerator:
    """A kind of accelerator. Has no state. Any thread.

    Attributes:
        variables: environment variables that each show a process a part of the devices.
        hidden: environment variables that hide all of them.
        torch_name: name of torch's module for the kind, and of its devices in torch.
        error_names: how the texts of its errors begin. This and the rest are regular expressions
            that ignore case, and spaces that are not escaped, for ``device_errors``.
        error_codes: its codes for lack of memory.
        libraries: those whose errors begin with their own name.
        words: words of errors that may be about a device.
    """

    variables: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[Mapping[str, str]] = {}
    torch_name: ClassVar[str] = ""
    error_names: ClassVar[str]
    error_codes: ClassVar[str] = ""
    libraries: ClassVar[str] = ""
    words: ClassVar[str]

    # -- in any process, without torch

    def find(self) -> Sequence[Gpu] | None:
        """All GPUs, including those that the environment hides; None if they cannot be counted."""
        raise NotImplementedError

    def require_count(self) -> None:
        """``find`` could not count the GPUs. Raises ImportError: a missing package would do it."""

    def visible(
        self, gpus: Sequence[Gpu] | None, environment: Mapping[str, str]
    ) -> Sequence[Gpu] | None:
        """Those of the GPUs that a process with this environment sees, in its order."""
        (variable,) = self.variables
        return select(gpus, environment.get(variable))

    def variables_to_show(self, value: str) -> dict[str, str | None]:
        """Environment variables that show a worker these GPUs only; None removes one."""
        (variable,) = self.variables
        return {variable: value}

    def allocator_variables(self) -> dict[str, str]:
        """Environment variables of torch's allocator that suit the GPUs of this machine."""
        return {}

    def is_built_for(self, version: str) -> bool:  # noqa: ARG002
        """Whether torch of this version is built for these devices, and for no others."""
        return False

    # -- in a process that may have loaded torch

    @property
    def torch(self) -> Any:
        """torch's module for the kind; None if torch is not loaded."""
        return getattr(sys.modules.get("torch"), self.torch_name, None)

    def is_in_use(self) -> bool:
        """Whether torch has a context on such a device in this process."""
        # torch may not be loaded, half loaded, or another module of that name.
        return bool(getattr(self.torch, "is_initialized", bool)())

    def is_available(self) -> bool:
        """Whether torch can use such a device."""
        return self.torch is not None and bool(self.torch.is_available())

    def is_built(self) -> bool:
        """Whether torch was built for the kind. Raises AttributeError: torch is half loaded."""
        raise NotImplementedError

    def devices_in_use(self) -> list[int]:
        """The devices on which torch has a context, once the kind is in use."""
        return [self.torch.current_device()]

    def event(self, *, timing: bool = False) -> Any:
        """An event to record on a stream; a thread that waits for it sleeps if possible."""
        return self.torch.Event(enable_timing=timing)

    def fault(self) -> str | None:
        """What is wrong with the devices that this process uses: see ``fault_in_use``."""
        devices: list[int] = []
        with contextlib.suppress(Exception):  # torch is half loaded
            if self.is_in_use():
                devices = self.devices_in_use()
        try:
            for device in devices:
                sys.modules["torch"].zeros(1, device=f"{self.torch_name}:{device}").add_(1)
                self.torch.synchronize(device)
        except Exception as error:
            text = str(error).partition("\n")[0] or type(error).__qualname__
            return None if _OUT_OF_MEMORY.search(text) else text
        return None


def select(gpus: Sequence[Gpu] | None, names: str | None) -> Sequence[Gpu] | None:
    """The GPUs in a list such as that of CUDA_VISIBLE_DEVICES; all of them without a list."""
    if names is None or (gpus is not None and not gpus):
        return gpus
    known = {gpu.value: gpu for gpu in gpus or ()}
    # Of GPUs that are named by UUID only the driver knows the numbers.
    has_numbers = gpus is not None and all(value.isdecimal() for value in known)
    found: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        is_missing = name not in known and name.isdecimal() and has_numbers
        if not name or name.startswith("-") or is_missing:
            break  # drivers ignore what follows an entry that they cannot use
        found.append(known.get(name, Gpu(name)))
    return found


# -- the kinds

_CUDA, _ROCR, _HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"

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

    variables: ClassVar[tuple[str, ...]] = (_CUDA,)
    hidden: ClassVar[Mapping[str, str]] = {_CUDA: ""}
    torch_name = "cuda"
    error_names = r"CUDA(?:\ driver|\ runtime)?"
    error_codes = (
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CU\w+_STATUS_ALLOC_FAILED"
        "|CUFFT_ALLOC_FAILED"
    )
    libraries = "cuDNN|cuBLAS|cuBLASLt|cuSPARSE|cuSOLVER|cuFFT|cuRAND"
    words = "cuda|cublas|cudnn|cufft|cusolver|cusparse|nccl"

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

    def variables_to_show(self, value: str) -> dict[str, str | None]:
        # Without those of ROCm: where the kind of the GPUs is unknown, they would take precedence.
        return {_ROCR: None, _HIP: None, _CUDA: value}

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
        return super().fault() or _driver_fault()


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


class Rocm(Cuda):
    """ROCm's devices. They are counted by the kernel's files.

    ROCm first applies ``ROCR_VISIBLE_DEVICES`` and numbers the rest anew. To these it applies
    ``HIP_VISIBLE_DEVICES``, or if that is not set ``CUDA_VISIBLE_DEVICES``.
    """

    variables: ClassVar[tuple[str, ...]] = (_ROCR, _HIP, _CUDA)
    hidden: ClassVar[Mapping[str, str]] = {_HIP: "-1"}  # ROCm ignores an empty list
    error_names = "HIP"
    error_codes = r"hipErrorOutOfMemory|HIP\w+_STATUS_ALLOC_FAILED"
    libraries = "MIOpen|hipBLAS|rocBLAS"
    words = r"hip\ ?error|rocm"

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
        rest = select(gpus, environment.get(_ROCR))
        if rest is not None:
            rest = [gpu._replace(value=str(number)) for number, gpu in enumerate(rest)]
        return select(rest, environment.get(_HIP) or environment.get(_CUDA) or None)

    def variables_to_show(self, value: str) -> dict[str, str | None]:
        # ROCR's list stays: these numbers refer to it.
        return {_CUDA: value, _HIP: value}


class Xpu(Accelerator):
    """Devices of Level Zero. Only the driver can count them, as it may divide a card into several.

    With ``cuda_devices=["cpu"]`` a worker still sees them: no value of the variable hides all.
    """

    variables: ClassVar[tuple[str, ...]] = ("ZE_AFFINITY_MASK",)
    torch_name = "xpu"
    error_names = "XPU"
    words = r"xpu|sycl|level.zero"

    def find(self) -> Sequence[Gpu] | None:
        has_any = any(Path("/dev/dri").glob("renderD*"))
        return None if has_any and self.is_built_for(torch_version()) else ()

    def is_built_for(self, version: str) -> bool:
        return "+xpu" in version

    def is_built(self) -> bool:
        return self.torch is not None and bool(sys.modules["torch"]._C._has_xpu)


CUDA, ROCM, XPU = Cuda(), Rocm(), Xpu()

#: In the order in which a machine is searched.
KINDS: tuple[Accelerator, ...] = (CUDA, ROCM, XPU)

#: By torch's name of the devices: those of ROCm are named as those of CUDA.
TORCH_KINDS = {kind.torch_name: kind for kind in KINDS if kind is not ROCM}


# -- of this machine


def find_gpus() -> tuple[Accelerator, Sequence[Gpu] | None]:
    """The kind of this machine's GPUs, and all of them, including hidden ones.

    None in place of the GPUs if they cannot be counted. Takes some milliseconds.
    """
    count = os.environ.get(GPU_COUNT, "")
    if count.isdecimal():
        version = torch_version()
        kind = next((each for each in KINDS if each.is_built_for(version)), CUDA)
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
    """Variables that let torch's allocator grow its segments, unless the user set any."""
    if any(name in inherited for name in _OF_ALLOCATOR):
        return {}
    return {name: value for kind in KINDS for name, value in kind.allocator_variables().items()}


def torch_version() -> str:
    """The version of the installed torch, which is not imported; empty if there is none."""
    from importlib.metadata import version  # only here: it takes some milliseconds to import

    with contextlib.suppress(Exception):
        return str(version("torch"))
    return ""


# -- of this process


def kind_in_use() -> Accelerator | None:
    """The kind on which torch has a context in this process; None if it has none."""
    if "torch" not in sys.modules:
        return None
    return next((kind for kind in TORCH_KINDS.values() if kind.is_in_use()), None)


def fault_in_use() -> str | None:
    """What is wrong with the GPU that this process uses, in its own words; None if nothing is.

    None also if its memory is full, or if the process uses none.
    """
    for kind in TORCH_KINDS.values():
        fault = kind.fault() and kind.fault()  # one that goes away belonged to an earlier call
        if fault:
            return fault
    return None


def share_of_memory(total: int, workers: int) -> float:
    """The fraction of a GPU's memory that torch may take in each of its workers.

    An equal part for each, less what its context takes. So a worker that needs more runs out of
    memory itself, and computes smaller batches, instead of the others. 1.0 for a single worker, or
    if the GPU is too small to be shared.
    """
    rest = total / workers - _CONTEXT
    return rest / total if workers > 1 and rest > 0 else 1.0


def limit_memory(sharers: Sequence[int]) -> bool:
    """Limit torch to its share of each GPU, which so many workers share; False without torch.

    Without a context on a GPU the limit waits for one, and makes none.
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
    modes: list[tuple[Callable[[Any], Any], Any]] = []
    with contextlib.suppress(Exception):  # torch is not loaded, half loaded, or an old one
        modes.append((torch.set_grad_enabled, torch.is_grad_enabled()))
        device = torch.get_default_device()
        if device.type != "cpu":  # it costs at each call of torch
            modes.append((torch.set_default_device, device))
        kind = kind_in_use()
        if kind is not None:
            modes.append((kind.torch.set_device, kind.torch.current_device()))

    def take_over() -> None:
        with contextlib.suppress(Exception):
            for set_mode, mode in modes:
                set_mode(mode)

    return take_over
