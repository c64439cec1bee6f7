"""Let multiprocessing start workers in unusual processes.

Under uWSGI ``sys.executable`` is uwsgi itself. Celery and ``multiprocessing.Pool`` run tasks in
daemonic processes, which may not have children. A program from standard input has a main module
without a file, which new processes would fail to import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import multiprocessing.process
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import spawn
from typing import Any

from ..errors import WorkerStartError

__all__ = ["find_interpreter", "has_main", "is_importable", "startable"]

#: Names of interpreters; programs that embed Python have other names.
_NAMES = ("python", "pypy", "graalpy")

#: Seconds for a candidate to print its version; it takes some hundredths.
_PROBE_TIMEOUT = 10.0

#: Guards the state that is changed during a start: multiprocessing's executable, the daemon flag,
#: the main module's file.
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child forked within ``startable`` would hold the lock for ever.
os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def startable() -> Iterator[None]:
    """Within the block, multiprocessing can start a process. Any thread.

    Raises:
        WorkerStartError: no Python interpreter was found.
    """
    with _lock, _interpreter(), _allow_children(), _importable_main():
        yield


# -- the interpreter


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Make multiprocessing start Python even if ``sys.executable`` is another program."""
    found = find_interpreter()
    if found is None:
        yield
        return
    before = spawn.get_executable()
    spawn.set_executable(found)
    try:
        yield
    finally:
        spawn.set_executable(before)


def find_interpreter() -> str | None:
    """The interpreter for workers; None if multiprocessing's own choice is right.

    Raises:
        WorkerStartError: there is none.
    """
    executable = sys.executable or ""
    chosen = spawn.get_executable()
    if chosen and os.fsencode(chosen) != os.fsencode(executable):
        return None  # the application has called multiprocessing.set_executable
    is_python = os.path.basename(executable).lower().startswith(_NAMES)
    if is_python or getattr(sys, "frozen", False):  # a frozen program is its own interpreter
        return None
    return _search(executable, sys.prefix)


@functools.lru_cache
def _search(executable: str, prefix: str) -> str:
    for candidate in _candidates(prefix):
        if os.access(candidate, os.X_OK) and _version_of(candidate) == _version():
            return candidate
    raise WorkerStartError(
        f"worker processes need a Python {sys.version_info[0]}.{sys.version_info[1]} interpreter, "
        f"but sys.executable is {executable!r}, and {prefix!r} has none. Set it with "
        'multiprocessing.set_executable("/path/to/python3"), or use a ThreadedStreamer'
    )


def _candidates(prefix: str) -> Iterator[str]:
    """Possible interpreters, the virtual environment's first."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for folder in dict.fromkeys((prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)):
        for each in (name, "python3", "python"):
            yield os.path.join(folder, "bin", each)
    base = getattr(sys, "_base_executable", None)
    if base and os.path.basename(base).lower().startswith(_NAMES):
        yield base
    found = shutil.which(name)
    if found:
        yield found


def _version() -> str:
    return f"{sys.implementation.cache_tag} {sys.abiflags}"


def _version_of(candidate: str) -> str | None:
    """``_version`` of a candidate; None if it is no interpreter."""
    program = "import sys; print(sys.implementation.cache_tag, sys.abiflags)"
    try:
        run = subprocess.run(
            [candidate, "-I", "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.removesuffix("\n")


# -- daemonic processes


@contextlib.contextmanager
def _allow_children() -> Iterator[None]:
    """Let a daemonic process have children, as in a pool of multiprocessing or Celery.

    multiprocessing refuses them since they could outlive it. Ours always end with their parent: see
    ``child.py``. Celery's pool replaces multiprocessing's process object by one of billiard, whose
    key only billiard can pass to a child.
    """
    config = getattr(multiprocessing.process.current_process(), "_config", None)
    changed: dict[str, Any] = {}
    if isinstance(config, dict):
        if config.get("daemon"):
            changed["daemon"] = False
        key = config.get("authkey")
        authentication: Any = getattr(multiprocessing.process, "AuthenticationString", bytes)
        if isinstance(key, bytes) and type(key) is not authentication:
            changed["authkey"] = authentication(key)
    if not (changed and isinstance(config, dict)):
        yield
        return
    before = {name: config[name] for name in changed}
    config.update(changed)
    try:
        yield
    finally:
        config.update(before)


# -- the main module


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Keep new processes from importing a main module that they cannot import."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__") or is_importable("__main__"):
        yield
        return
    file = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def has_main() -> bool:
    """Whether the main module is a program: not a notebook, ``python -c`` or standard input."""
    is_named = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    return is_named or is_importable("__main__")


def _is_found(module: str) -> bool:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(module, None) is not None:
            return True
    # A new process searches the folder in which this process started.
    folder = getattr(multiprocessing.process, "ORIGINAL_DIR", None)
    if "" not in sys.path or folder is None:
        return False
    return importlib.machinery.PathFinder.find_spec(module, [folder]) is not None


def is_importable(module: str) -> bool:
    """Whether a new process can import the module, the main module as multiprocessing does.

    Not importable: the main module of a notebook, ``python -c``, standard input, or a package or
    archive (``__main__.py``); a module loaded under a server's own name, as by uWSGI's
    ``wsgi-file``.
    """
    if module not in ("__main__", "__mp_main__"):
        return _is_found(module.partition(".")[0])
    main = sys.modules.get("__main__")
    spec: importlib.machinery.ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None:
        return not f".{spec.name}".endswith(".__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str):
        return False
    folder = getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""
    name = os.path.splitext(os.path.basename(file))[0]
    return name != "ipython" and os.path.isfile(os.path.join(folder, file))
