"""Start workers from unusual processes, and send them what they cannot import.

Under uWSGI ``sys.executable`` is uwsgi itself. Celery and ``multiprocessing.Pool`` run tasks in
daemonic processes, which may not have children. A program from standard input has a main module
without a file, which new processes would fail to import.

pickle sends a class or function as the names of its module and its own. Workers cannot import the
main module of a notebook or of ``python -c``. cloudpickle, an optional package, sends the code
instead. Only this module imports it. A worker keeps what it receives, under its name. Results of
such a class are pickled by name, and become the web process's own class.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import io
import multiprocessing.process
import os
import pickle
import shutil
import subprocess
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from typing import Any

from ..errors import WorkerStartError
from ..extras import PACKAGES

#: Names of interpreters; programs that embed Python have other names.
_NAMES = ("python", "pypy", "graalpy")

#: Seconds for a candidate to print its version; it takes some hundredths.
_PROBE_TIMEOUT = 10.0

#: Guards the state that is changed during a start: multiprocessing's executable, the daemon flag,
#: the main module's file, the working directory.
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
    with _lock, _interpreter(), _allow_children(), _importable_main(), _existing_folder():
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


# -- the working directory


@contextlib.contextmanager
def _existing_folder() -> Iterator[None]:
    """Have new processes run in ``/`` if the folder of this one was removed, as of an old release.

    multiprocessing asks for the folder. Only its answer is changed: to change the folder itself
    would move all threads of the program. And Python 3.13 cannot look for modules there (-P).
    """
    command: Callable[..., list[str]] = spawn.get_command_line

    def safe_command(**names: Any) -> list[str]:
        python, *others = command(**names)
        return [python, "-P", *others] if "-c" in others else [python, *others]

    try:
        os.getcwd()
    except FileNotFoundError:
        vars(spawn)["os"] = types.SimpleNamespace(**{**vars(os), "getcwd": lambda: "/"})
        vars(spawn)["get_command_line"] = safe_command
    try:
        yield
    finally:
        vars(spawn).update(os=os, get_command_line=command)


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


#: Types that are pickled by name.
_BY_NAME = (type, types.FunctionType)

#: The main module, in the web process and in a child of multiprocessing.
_MAIN = ("__main__", "__mp_main__")

#: Guards cloudpickle's global registry.
_by_value_lock = threading.RLock()

#: In a worker: what it received, by id.
_received: dict[bytes, Any] = {}


class NotImportable(TypeError):
    """Workers cannot import a class or function, and cloudpickle is not installed."""


class ByValue:
    """Pickles; sends by value what workers cannot import. Any thread.

    Each pool has its own: if a notebook's cell changes a function, the next pool gets the new one.
    """

    def __init__(self) -> None:
        self._importable: dict[str, bool] = {}
        # The id and the code of what was sent; both stay the same.
        self._sent: weakref.WeakKeyDictionary[Any, tuple[bytes, bytes]] = (
            weakref.WeakKeyDictionary()
        )
        #: Whether anything was sent by value.
        self.is_used = False

    def dumps(self, value: Any) -> bytes:
        """Pickle a value.

        Raises:
            NotImportable: cloudpickle is needed and not installed.
            Exception: whatever pickling it raises.
        """
        file = io.BytesIO()
        self.pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()

    def pickler(self, *arguments: Any, **options: Any) -> pickle.Pickler:
        """A pickler of this kind."""
        pickler = _Pickler(*arguments, **options)
        pickler.owner = self
        return pickler

    def parts(self, thing: Any) -> tuple[bytes, bytes]:
        """An id for a class or function, and its code."""
        parts = self._sent.get(thing)
        if parts is None:
            with _by_value_lock:
                parts = self._sent.get(thing)
                if parts is None:  # once, or a worker would make two classes
                    dissected = _dissected(thing, type(self)().is_known)
                    parts = self._sent[thing] = uuid.uuid4().bytes, dissected
        return parts

    def is_known(self, thing: Any) -> bool:
        """Whether a worker finds this class or function by its name."""
        name = getattr(thing, "__module__", None)
        if not isinstance(name, str):
            return True
        if name not in self._importable:
            self._importable[name] = is_importable(name) or (
                # A worker may find it nevertheless; else its error says what to do.
                name not in _MAIN and not _has_cloudpickle()
            )
        if not self._importable[name]:
            return False
        # A profiler or debugger runs a program as its own main module.
        return name != "__main__" or "<" in thing.__qualname__ or _is_there(thing)


class _Pickler(pickle.Pickler):
    owner: ByValue

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _BY_NAME) and not self.owner.is_known(value):
            self.owner.is_used = True
            return _receive, self.owner.parts(value)
        return NotImplemented


def _has_cloudpickle() -> bool:
    try:
        return importlib.util.find_spec("cloudpickle") is not None
    except ValueError:  # None in sys.modules
        return False


def _is_there(thing: Any) -> bool:
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _dissected(thing: Any, known: Callable[[Any], bool]) -> bytes:
    """The code of a thing, and of all classes that it refers to and that go by value."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotImportable(
            f"{thing.__qualname__} is defined in {_place(thing)}, which worker processes cannot "
            f"import. Run pip install {' '.join(PACKAGES['notebook'])}, define it in a module "
            '(.py file) and import it from there, or use mp_start_method="fork"'
        ) from None
    classes = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type) and not known(value):
                classes[value.__module__, value.__qualname__] = value
            return super().reducer_override(value)

    module = sys.modules.get(thing.__module__)
    is_registered = module is not None and thing.__module__ not in _MAIN
    if is_registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump((thing, classes))
    finally:
        if is_registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _place(thing: Any) -> str:
    if thing.__module__ in _MAIN:
        return "the main module (a notebook, python -c, standard input or the like)"
    return f"the module {thing.__module__!r}"


def _receive(name: bytes, parts: bytes) -> Any:
    """In a worker: make what was sent, once."""
    if name not in _received:
        thing, classes = pickle.loads(parts)
        for (module, qualname), each in classes.items():
            if "." not in qualname:  # nested ones are found through their parents
                setattr(sys.modules.setdefault(module, types.ModuleType(module)), qualname, each)
        _received[name] = thing
    return _received[name]
