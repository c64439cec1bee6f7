"""Find the GPUs, and set a worker's device and number of CPU threads through its environment.

CUDA, OpenMP and numeric libraries read the environment once, at their import. A spawned child
inherits the parent's environment and imports the user's ``__main__`` before our code runs. So the
parent's environment must be right during the start.

The GPUs are found without CUDA. NVIDIA's come from NVML, a part of the driver: it makes no CUDA
context, takes no device memory and is safe before a fork. AMD's come from the kernel's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .device_memory import allocator_variables
from .diagnosis import counted
from .visibility import Gpu, Inventory, Place, missing, places, sharers, visible

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

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
    amd = gpus_by_kfd(Path("/sys/class/kfd/kfd/topology/nodes"))
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


def gpus_by_kfd(nodes: Path) -> list[Gpu]:
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


logger = logging.getLogger(__name__)

#: Read by OpenMP, and by MKL, OpenBLAS and NumExpr without a variable of their own.
_OPENMP = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (
    _OPENMP,
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",  # Hugging Face's tokenizers: each worker would wake a thread on every core
)

#: How long an idle OpenMP thread spins before it sleeps: turns of GNU's loop (1000 take about
#: 0.05 ms), milliseconds of Intel's and LLVM's. The defaults are 300,000 turns and 200 ms. On busy
#: cores a spinning thread blocks the thread that it waits for: a batch of 16 took 444 ms instead of
#: 12 ms. GNU OpenMP itself uses 1000 with more threads than cores. On idle cores it costs tiny
#: models a few percent; sleeping immediately (OMP_WAIT_POLICY=PASSIVE) would triple their time.
_WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_WAIT_VARIABLES = (*_WAITS, "OMP_WAIT_POLICY")

#: Guards os.environ while it is changed around a start.
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child forked within ``environment`` would hold the lock for ever.
os.register_at_fork(after_in_child=_renew_lock)


class Placement:
    """Where the workers of a streamer run.

    Determined once, so that a restarted worker runs where its predecessor ran. Immutable, for any
    thread. Looks for GPUs if needed, which takes some milliseconds.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._cpu_threads = options.cpu_threads
        devices, inventory = options.cuda_devices, Inventory(None)
        with _lock:  # another streamer's start may be changing it
            inherited = dict(os.environ)
        if _concerns_gpus(options):
            inventory = find_gpus()
        self._places = places(
            devices, options.most_workers, inventory, inherited, options.devices_per_worker
        )
        self._entries = entries = visible(inventory, inherited) or []
        if devices is None and options.most_workers > 1 and len(entries) > 1:
            logger.warning(
                "%s are visible, and each of the %d workers sees all of them: if the model uses "
                "only the first GPU, all workers share it; cuda_devices=\"auto\" spreads them",
                counted(len(entries), "GPU"), options.most_workers,
            )  # fmt: skip

    def at(self, place: int) -> Place:
        """Where worker number ``place`` runs."""
        return self._places[place % len(self._places)]

    def sharers(self, place: int, worker_num: int) -> tuple[int, ...]:
        """How many workers compute on each GPU that this one sees; empty if unknown."""
        return sharers(self._places, self._entries, place, worker_num)

    def variables(
        self, place: int, worker_num: int, *, cores: int, inherited: Mapping[str, str]
    ) -> dict[str, str | None]:
        """Variables to set in a worker's environment; None removes one.

        With "auto" the cores are divided among the workers: four workers that each use all cores
        are slower than one. Thread variables set by the user stay, and one for OpenMP counts for
        the others too. Idle threads sleep soon, unless the user has set how they wait.
        """
        variables: dict[str, str | None] = dict(self.at(place).variables)
        if self._cpu_threads == "auto":
            threads = str(max(1, cores // worker_num))
            if _OPENMP not in inherited:
                variables |= {name: threads for name in _THREAD_VARIABLES if name not in inherited}
        elif self._cpu_threads is not None:
            variables |= dict.fromkeys(_THREAD_VARIABLES, str(self._cpu_threads))
        is_waiting_set = any(name in inherited for name in _WAIT_VARIABLES)
        if self._cpu_threads is not None and not is_waiting_set:
            variables |= _WAITS
        return variables | allocator_variables(inherited)

    @contextlib.contextmanager
    def environment(self, place: int, worker_num: int) -> Iterator[dict[str, str | None]]:
        """Set a worker's variables in ``os.environ`` within the block.

        The lock also covers reading them: another start's variables must not look like the user's.
        """
        with _lock:
            variables = self.variables(
                place, worker_num, cores=available_cores(), inherited=os.environ
            )
            before = {name: os.environ.get(name) for name in variables}
            set_environment(variables)
            try:
                yield variables
            finally:
                set_environment(before)


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_gpu(place: Place) -> None:
    """In a worker, before the model is loaded: refuse to start without its GPU.

    Raises:
        RuntimeError: it is missing; the model would silently run on the CPU.
    """
    problem = place.problem
    if place.needs_gpu and not problem:
        problem = missing(place.device, find_gpus(), os.environ)
    if problem:
        raise RuntimeError(f'{problem}; name an available device, or "cpu"')


def check_loaded_torch(place: Place) -> None:
    """In a worker, after the model is loaded: check the GPU through torch.

    Raises:
        RuntimeError: torch is built for GPUs, but the user's GPU is missing.
    """
    torch: Any = sys.modules.get("torch")
    if not place.needs_gpu or torch is None:
        return
    try:
        if torch.cuda.is_available():
            return
        version, is_for_gpus = torch.__version__, torch.backends.cuda.is_built()
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


def _concerns_gpus(options: WorkerOptions) -> bool:
    devices = options.cuda_devices
    if devices is None:
        return options.most_workers > 1
    return isinstance(devices, str) or any(str(device) != "cpu" for device in devices)


def limit_loaded_torch(variables: Mapping[str, str | None]) -> None:
    """In a forked child: set torch's threads, as it was imported before the variables were set."""
    torch = sys.modules.get("torch")
    threads = variables.get(_OPENMP)
    if torch is not None and threads is not None:
        torch.set_num_threads(int(threads))


def available_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        # "max 100000" or "200000 100000": microseconds of processor time per period (cgroup v2)
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
