"""Which device and how many CPU threads a worker process gets, through its environment.

Both must be in the environment before any user code is imported in the child: CUDA, OpenMP and the
numeric libraries read it once. A spawned child inherits the environment that the parent has at that
moment and imports the user's ``__main__`` before any code of ours runs, so the parent's environment
has to be right around the start.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..managed_model import visible_devices
from ..options import WorkerOptions

__all__ = ["available_cores", "child_environment", "environment", "limit_loaded_torch"]

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


def child_environment(
    options: WorkerOptions,
    place: int,
    worker_num: int,
    *,
    cores: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The variables to set for a worker, on top of what it inherits.

    Without a say from the user the cores are divided among the workers: four workers that each use
    all cores are slower than one. A thread variable that the user has set stays as it is, and one
    for OpenMP speaks for the others, which fall back on it. Threads that wait for each other sleep
    soon, unless the user has set how they wait.
    """
    variables: dict[str, str] = {}
    device = options.device(place)
    if device is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(device)
    if options.cpu_threads == "auto":
        threads = str(max(1, cores // worker_num))
        if _OPENMP not in inherited:
            variables |= {name: threads for name in _THREAD_VARIABLES if name not in inherited}
    elif options.cpu_threads is not None:
        variables |= dict.fromkeys(_THREAD_VARIABLES, str(options.cpu_threads))
    if options.cpu_threads is not None and not any(name in inherited for name in _WAIT_VARIABLES):
        variables |= _WAITS
    return variables


@contextlib.contextmanager
def environment(options: WorkerOptions, place: int, worker_num: int) -> Iterator[dict[str, str]]:
    """Have the variables of a worker in ``os.environ`` within the block.

    They are found out under the lock too, so that nobody takes another's for the user's.
    """
    with _lock:
        variables = child_environment(
            options, place, worker_num, cores=available_cores(), inherited=os.environ
        )
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield variables
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def limit_loaded_torch(variables: Mapping[str, str]) -> None:
    """In a child: tell a torch that was imported before the variables were set (after a fork)."""
    torch = sys.modules.get("torch")
    if torch is not None and _OPENMP in variables:
        torch.set_num_threads(int(variables[_OPENMP]))


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
