"""Send classes and functions that a worker cannot import by value, with cloudpickle.

pickle sends a class or function as the names of its module and its own. Workers cannot import the
main module of a notebook or of ``python -c``. cloudpickle, an optional package, sends the code
instead. Only this module imports it.

A worker keeps what it receives, under its name. Results of such a class are pickled by name, and
become the web process's own class.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
import threading
import types
import uuid
import weakref
from typing import Any

from ..extras import PACKAGES
from .memory.payload import LARGE, Parts, dump_with
from .starting import is_importable

__all__ = ["ByValue", "NotImportable"]

#: Types that are pickled by name.
_BY_NAME = (type, types.FunctionType)

#: The main module, in the web process and in a child of multiprocessing.
_MAIN = ("__main__", "__mp_main__")

#: Guards cloudpickle's global registry.
_lock = threading.RLock()

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

    def dump(self, item: Any, large: float = LARGE) -> bytes | Parts:
        """As ``payload.dump``, but slower.

        Raises:
            NotImportable: cloudpickle is needed and not installed.
            Exception: whatever pickling it raises.
        """
        return dump_with(self._pickler, item, large)

    def dumps(self, value: Any) -> bytes:
        """The same into bytes, whatever the size."""
        file = io.BytesIO()
        self._pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()

    def _pickler(self, *arguments: Any, **options: Any) -> pickle.Pickler:
        pickler = _Pickler(*arguments, **options)
        pickler.owner = self
        return pickler

    def parts(self, thing: Any) -> tuple[bytes, bytes]:
        """An id for a class or function, and its code."""
        parts = self._sent.get(thing)
        if parts is None:
            with _lock:
                parts = self._sent.get(thing)
                if parts is None:  # once, or a worker would make two classes
                    parts = self._sent[thing] = uuid.uuid4().bytes, _dissected(thing)
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


def _dissected(thing: Any) -> bytes:
    """The code of a thing, and of all classes that it refers to and that go by value."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotImportable(
            f"{thing.__qualname__} is defined in {_place(thing)}, which worker processes cannot "
            f"import. Run pip install {' '.join(PACKAGES['notebook'])}, define it in a module "
            '(.py file) and import it from there, or use mp_start_method="fork"'
        ) from None
    known, classes = ByValue().is_known, {}

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
