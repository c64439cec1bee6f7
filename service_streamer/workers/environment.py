"""The environment of a worker: its GPU, and its number of CPU threads.

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
from typing import TYPE_CHECKING

from ..gpu.accelerators import allocator_variables
from ..gpu.places import UNKNOWN_GPUS, Place, places, set_environment, sharers, visible_gpus

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

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
        with _lock:  # another streamer's start may be changing it
            inherited = dict(os.environ)
        visible = visible_gpus(inherited) if _concerns_gpus(options) else UNKNOWN_GPUS
        self._visible = visible
        self._places = places(
            options.cuda_devices, options.most_workers, visible, options.devices_per_worker
        )
        count = visible.count or 0
        if options.cuda_devices is None and options.most_workers > 1 and count > 1:
            logger.warning(
                "%d GPUs are visible, and each of the %d workers sees all of them: if the model "
                "uses only the first GPU, all workers share it; cuda_devices=\"auto\" spreads them",
                count, options.most_workers,
            )  # fmt: skip

    def at(self, place: int) -> Place:
        """Where worker number ``place`` runs."""
        return self._places[place % len(self._places)]

    def sharers(self, place: int, worker_num: int) -> tuple[int, ...]:
        """How many workers compute on each GPU that this one sees; empty if unknown."""
        return sharers(self._places, self._visible, place, worker_num)

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
