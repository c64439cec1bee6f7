"""Which device and how many CPU threads a worker process gets, through its environment.

Both must be in the environment before any user code is imported in the child: CUDA, OpenMP and the
numeric libraries read it once. A spawned child inherits the environment that the parent has at that
moment and imports the user's ``__main__`` before any code of ours runs, so the parent's environment
has to be right around the start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..options.table import WorkerOptions
from .diagnosis import counted
from .gpus import find_gpus
from .visibility import Inventory, Place, missing, places, visible

__all__ = [
    "Placement",
    "available_cores",
    "check_gpu",
    "check_loaded_torch",
    "limit_loaded_torch",
    "set_environment",
]

logger = logging.getLogger(__name__)

#: Read by OpenMP itself and, where their own variable is not set, by MKL, OpenBLAS and NumExpr.
_OPENMP = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (
    _OPENMP,
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

#: How long an OpenMP thread that has done its part spins before it sleeps: turns of GNU's loop
#: (about 0.05 ms), milliseconds of Intel's and LLVM's. By default they spin for 300,000 turns and
#: 200 ms. On cores that other processes use too, the thread that spins then keeps the one that it
#: waits for from running: a batch of 16 took 444 ms in place of 12. 1000 is what GNU OpenMP itself
#: takes when it knows that it has more threads than cores. On idle cores it costs some percent of
#: tiny models; to sleep at once (OMP_WAIT_POLICY=PASSIVE) would triple their time.
_WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_WAIT_VARIABLES = (*_WAITS, "OMP_WAIT_POLICY")

#: Guards os.environ while it is changed around a start.
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child that is forked within ``environment`` would keep the lock for ever.
os.register_at_fork(after_in_child=_renew_lock)


class Placement:
    """Where the workers of a streamer run.

    Found out once, so that a worker that is started again runs where the one before it did.

    Immutable, and for any thread. Looks for GPUs if it has to, which takes some milliseconds.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._cpu_threads = options.cpu_threads
        self._worker_num = options.worker_num
        devices, inventory = options.cuda_devices, Inventory(None)
        with _lock:  # or another streamer's worker may be about to start
            inherited = dict(os.environ)
        if _concerns_gpus(options):
            inventory = find_gpus()
        self._places = places(devices, options.worker_num, inventory, inherited)
        entries = visible(inventory, inherited) or ()
        if devices is None and options.worker_num > 1 and len(entries) > 1:
            logger.warning(
                "%s are visible, and each of the %d workers sees all of them: if the model uses "
                "the first one only, so do all workers; cuda_devices=\"auto\" spreads them",
                counted(len(entries), "GPU"), options.worker_num,
            )  # fmt: skip

    def at(self, place: int) -> Place:
        """Where worker number ``place`` runs."""
        return self._places[place % len(self._places)]

    def variables(
        self, place: int, worker_num: int, *, cores: int, inherited: Mapping[str, str]
    ) -> dict[str, str | None]:
        """What a worker's environment has beyond what it inherits; None removes a variable.

        Without a say from the user the cores are divided among the workers: four workers that each
        use all cores are slower than one. A thread variable that the user has set stays as it is,
        and one for OpenMP speaks for the others, which fall back on it. Threads that wait for each
        other sleep soon, unless the user has set how they wait.
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
        """Have the variables of a worker in ``os.environ`` within the block.

        They are found out under the lock too, so that nobody takes another's for the user's.
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
    """Set variables of this process; those that are None are removed."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_gpu(place: Place) -> None:
    """In a worker, before the model is loaded: refuse to start without its GPU.

    Raises:
        RuntimeError: it is not there. The model would run on the CPU, and nobody would know.
    """
    problem = place.problem
    if place.needs_gpu and not problem:
        problem = missing(place.device, find_gpus(), os.environ)
    if problem:
        raise RuntimeError(f'{problem}; name a device that is there, or "cpu"')


def check_loaded_torch(place: Place) -> None:
    """In a worker, when the model is loaded: the same where only torch can tell.

    Raises:
        RuntimeError: torch is built for GPUs, and the one that the user named is not there.
    """
    torch: Any = sys.modules.get("torch")
    if not place.needs_gpu or torch is None:
        return
    try:
        if torch.cuda.is_available():
            return
        version, is_for_gpus = torch.__version__, torch.backends.cuda.is_built()
    except AttributeError:  # it is not loaded to its end, or another module of that name
        return
    if place.gpu_id is not None and is_for_gpus:
        raise RuntimeError(
            f"device {place.device} was asked for, but torch {version} sees no GPU in the worker: "
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
    """In a child: tell a torch that was imported before the variables were set (after a fork)."""
    torch = sys.modules.get("torch")
    threads = variables.get(_OPENMP)
    if torch is not None and threads is not None:
        torch.set_num_threads(int(threads))


def available_cores() -> int:
    """The cores that this process may use: its affinity, and its container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        # "max 100000" or "200000 100000": microseconds of processor time per period (cgroup v2)
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
