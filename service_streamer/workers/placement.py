"""Set the device and the number of CPU threads of a worker process through its environment.

CUDA, OpenMP and numeric libraries read the environment once, at their import. A spawned child
inherits the parent's environment and imports the user's ``__main__`` before our code runs. So the
parent's environment must be right during the start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .diagnosis import counted
from .gpus import find_gpus
from .visibility import Inventory, Place, missing, places, visible

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

__all__ = [
    "Placement",
    "available_cores",
    "check_gpu",
    "check_loaded_torch",
    "limit_loaded_torch",
    "set_environment",
]

logger = logging.getLogger(__name__)

#: Read by OpenMP, and by MKL, OpenBLAS and NumExpr without a variable of their own.
_OPENMP = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (
    _OPENMP,
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
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
        self._worker_num = options.worker_num
        devices, inventory = options.cuda_devices, Inventory(None)
        with _lock:  # another streamer's start may be changing it
            inherited = dict(os.environ)
        if _concerns_gpus(options):
            inventory = find_gpus()
        self._places = places(devices, options.worker_num, inventory, inherited)
        entries = visible(inventory, inherited) or ()
        if devices is None and options.worker_num > 1 and len(entries) > 1:
            logger.warning(
                "%s are visible, and each of the %d workers sees all of them: if the model uses "
                "only the first GPU, all workers share it; cuda_devices=\"auto\" spreads them",
                counted(len(entries), "GPU"), options.worker_num,
            )  # fmt: skip

    def at(self, place: int) -> Place:
        """Where worker number ``place`` runs."""
        return self._places[place % len(self._places)]

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
        return variables

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
        return options.worker_num > 1
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
