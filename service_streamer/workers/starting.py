"""What has to be right around the start of a worker, wherever the application runs.

* The interpreter: under uWSGI ``sys.executable`` is uwsgi itself.
* The parent: Celery and ``multiprocessing.Pool`` run tasks in daemonic processes, which may not
  have children.
* The main module: new processes import it again, and fail with one from standard input.
* The environment: CUDA, OpenMP and numeric libraries read it once, at their import. A spawned child
  inherits the parent's and imports the user's ``__main__`` before our code runs. So the parent's
  environment must be right during the start.
* Signals: one that is for the whole group must not end a worker before it has its handlers.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import logging
import multiprocessing.process
import os
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import WorkerStartError
from ..gpu.accelerators import allocator_variables
from ..gpu.places import UNKNOWN_GPUS, Place, places, set_environment, sharers, visible_gpus

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

logger = logging.getLogger(__name__)

#: The main module, in the web process and in a child of multiprocessing.
MAIN = ("__main__", "__mp_main__")

#: What workers that this process starts call first, asked for at each start; picklable.
preparation: Callable[[], Callable[[], None]] | None = None

#: Guards what is changed during a start: the environment, in which another start's variables must
#: not look like the user's, multiprocessing's executable, the daemon flag, the main module's file,
#: what multiprocessing takes for the working directory.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A child forked during a start would hold the lock for ever.
os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def startable() -> Iterator[None]:
    """Within the block, multiprocessing can start a process. Any thread.

    Raises:
        WorkerStartError: no Python interpreter was found.
    """
    process: Any = multiprocessing.process
    with _lock, contextlib.ExitStack() as undo:
        interpreter = find_interpreter()
        if interpreter is not None:
            undo.callback(spawn.set_executable, spawn.get_executable())
            spawn.set_executable(interpreter)
        # multiprocessing refuses children to a daemonic process, as in a pool of its own or
        # Celery's, since they could outlive it. Ours always end with their parent. And Celery's
        # pool puts a process object of billiard there, whose key only billiard can pass on.
        config = process.current_process()._config
        undo.callback(config.update, {"daemon": False, **config})
        key = process.AuthenticationString(config["authkey"])
        config.update(daemon=False, authkey=key)
        main = sys.modules["__main__"]
        if hasattr(main, "__file__") and not is_importable("__main__"):
            undo.callback(setattr, main, "__file__", main.__file__)
            del main.__file__
        _leave_removed_folder(undo)
        yield


def find_interpreter() -> str | None:
    """The interpreter for workers; None if multiprocessing's own choice is right.

    Raises:
        WorkerStartError: there is none.
    """
    executable = sys.executable or ""
    chosen = spawn.get_executable()
    if chosen and os.fsencode(chosen) != os.fsencode(executable):
        return None  # the application has called multiprocessing.set_executable
    is_python = os.path.basename(executable).lower().startswith(("python", "pypy", "graalpy"))
    if is_python or getattr(sys, "frozen", False):  # a frozen program is its own interpreter
        return None
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # The virtual environment's first.
    prefixes = sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix
    folders = [os.path.join(prefix, "bin") for prefix in prefixes]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    found = shutil.which(f"python{version}{sys.abiflags}", path=path)
    if found is not None:
        return found
    raise WorkerStartError(
        f"worker processes need a Python {version} interpreter, "
        f"but sys.executable is {executable!r}, and {sys.prefix!r} has none. Set it with "
        'multiprocessing.set_executable("/path/to/python3"), or use a ThreadedStreamer'
    )


def _leave_removed_folder(undo: contextlib.ExitStack) -> None:
    """Have new processes run in ``/`` if the folder of this one was removed, as of an old release.

    Only what multiprocessing is told is changed: to change the folder itself would move all threads
    of the program. And Python 3.13 cannot look for modules there (-P).
    """
    try:
        os.getcwd()
        return
    except FileNotFoundError:
        pass
    command: Callable[..., list[str]] = spawn.get_command_line

    def safe_command(**names: Any) -> list[str]:
        python, *others = command(**names)
        return [python, "-P", *others] if "-c" in others else [python, *others]

    here = vars(spawn)
    undo.callback(here.update, os=os, get_command_line=command)
    here["os"] = types.SimpleNamespace(**{**vars(os), "getcwd": lambda: "/"})
    here["get_command_line"] = safe_command


# -- the main module


_EXIT_UNGUARDED_MAIN = 78  # EX_CONFIG of sysexits.h
_EXIT_NO_FREEZE_SUPPORT = 79

#: What is wrong with the main module, by the exit code of the worker; a retry would fail too.
MAIN_FAILURES = {
    _EXIT_UNGUARDED_MAIN: (
        "the Streamer is built while the main module is imported, and every worker imports "
        "that module again: build it under `if __name__ == '__main__':`, or in a function "
        "that only the web process calls"
    ),
    _EXIT_NO_FREEZE_SUPPORT: (
        "this is a frozen program, which every worker runs again: call "
        "multiprocessing.freeze_support() first under `if __name__ == '__main__':`"
    ),
}


def refuse_unguarded_main() -> None:
    """When a Streamer is built: end a child that imports ``__main__`` again. The parent says why.

    multiprocessing has its own check, of which every worker would print twenty lines.
    """
    # Set by multiprocessing while a child prepares itself; there is no public name for it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_EXIT_UNGUARDED_MAIN)
    # What multiprocessing starts a frozen program with, as PyInstaller makes it. Without
    # freeze_support() the program runs anew in every worker, and would start workers of its own.
    if sys.argv[1:2] == ["--multiprocessing-fork"]:
        sys.exit(_EXIT_NO_FREEZE_SUPPORT)


def has_main() -> bool:
    """Whether the main module is a program: not a notebook, ``python -c`` or standard input."""
    is_named = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    return is_named or is_importable("__main__")


def is_importable(module: str) -> bool:
    """Whether a new process can import the module, the main module as multiprocessing does.

    Not importable: the main module of a notebook, ``python -c``, standard input, or a package or
    archive (``__main__.py``); a module loaded under a server's own name, as by uWSGI's
    ``wsgi-file``.
    """
    # A new process searches the folder in which this process started.
    folder = str(getattr(multiprocessing.process, "ORIGINAL_DIR", None) or "")
    if module not in MAIN:
        package = module.partition(".")[0]
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        if any(find is not None and find(package, None) is not None for find in finders):
            return True
        finder = importlib.machinery.PathFinder
        return "" in sys.path and finder.find_spec(package, [folder]) is not None
    main = sys.modules.get("__main__")
    spec: importlib.machinery.ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None:
        return not f".{spec.name}".endswith(".__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str):
        return False
    name = os.path.splitext(os.path.basename(file))[0]
    return name != "ipython" and os.path.isfile(os.path.join(folder, file))


# -- the environment


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


class Placement:
    """Where the workers of a streamer run. A restarted worker runs where its predecessor ran.

    Immutable, for any thread. Looks for GPUs if needed, which takes some milliseconds.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._cpu_threads = options.cpu_threads
        devices = options.cuda_devices
        if devices is None:
            uses_gpus = options.most_workers > 1
        else:
            uses_gpus = isinstance(devices, str) or any(str(each) != "cpu" for each in devices)
        with _lock:  # another streamer's start may be changing the environment
            visible = visible_gpus() if uses_gpus else UNKNOWN_GPUS
        self._visible = visible
        self._places = places(devices, options.most_workers, visible, options.devices_per_worker)
        count = visible.count or 0
        if devices is None and options.most_workers > 1 and count > 1:
            logger.warning(
                "%d GPUs are visible, and each of the %d workers sees all of them: if the model "
                "uses only the first GPU, all workers share it; cuda_devices=\"auto\" spreads them",
                count, options.most_workers,
            )  # fmt: skip

    def at(self, place: int) -> Place:
        """Where worker number ``place`` runs."""
        return self._places[place % len(self._places)]

    @contextlib.contextmanager
    def environment(self, place: int, worker_num: int) -> Iterator[Place]:
        """Set a worker's variables in ``os.environ`` within the block, which is ``startable``.

        Yields the place with all of them, and with how many workers share it.
        With "auto" the cores are divided among the workers: four workers that each use all cores
        are slower than one. What the user has set stays; a limit for OpenMP counts for the others.
        """
        inherited = os.environ
        variables: dict[str, str | None] = dict(self.at(place).variables)
        if self._cpu_threads == "auto" and _OPENMP not in inherited:
            threads = str(max(1, available_cores() // worker_num))
            variables |= {name: threads for name in _THREAD_VARIABLES if name not in inherited}
        elif isinstance(self._cpu_threads, int):
            variables |= dict.fromkeys(_THREAD_VARIABLES, str(self._cpu_threads))
        if self._cpu_threads is not None and inherited.keys().isdisjoint(_WAIT_VARIABLES):
            variables |= _WAITS
        variables |= allocator_variables(inherited)
        before = {name: inherited.get(name) for name in variables}
        set_environment(variables)
        try:
            shared_by = sharers(self._places, self._visible, place, worker_num)
            yield self.at(place)._replace(variables=variables, sharers=shared_by)
        finally:
            set_environment(before)


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


# -- signals


#: Makes a worker write down the stacks of its threads, whatever they are doing.
STACKS_SIGNAL = signal.SIGUSR2

_LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGHUP)
_GROUP_SIGNALS = (*_LEFT_TO_PARENT, signal.SIGINT)


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block these signals in this thread, and in a process that is started within the block.

    So none of them ends a worker that has just been started, before ``ignore_group_signals``. This
    thread gets them after the block, its process at once if another thread takes them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Within the block, since it may raise the KeyboardInterrupt that came just before.
        signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_group_signals() -> None:
    """In a worker, before the model is loaded: have these signals do nothing from now on.

    By a handler and not by ignoring them: what is ignored stays so in every program that the model
    starts, which SIGTERM could not end then. A handler of the model's own replaces ours.
    """
    # A forked worker has its parent's: a signal would wake the parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # nor should it disturb native code that waits
    os.register_at_fork(after_in_child=_restore_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def _do_nothing(*_: object) -> None:
    """The handler."""


def _restore_signals() -> None:
    """In a process that the model has forked: its parent may end it."""
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)
