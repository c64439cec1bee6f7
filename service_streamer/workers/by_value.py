"""Classes and functions that a worker cannot import, sent by value.

pickle sends a class or function as the name of its module and its own. In a notebook, with
``python -c`` and the like, no worker can import that module. cloudpickle sends what it is made of
instead. It is an optional package, and this is the one module that imports it.

A worker keeps what it gets so, and puts it where its name says. Results of such a class then travel
by name again, and become the web process's own class there.
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

#: Both are pickled by name.
_BY_NAME = (type, types.FunctionType)

#: The main module, in the web process and in a process of multiprocessing's.
_MAIN = ("__main__", "__mp_main__")

#: Guards what cloudpickle is told for the time of one call.
_lock = threading.RLock()

#: In a worker: what has come, by that name.
_received: dict[bytes, Any] = {}


class NotImportable(TypeError):
    """A class or function that workers cannot import, and no cloudpickle to send it by value."""


class ByValue:
    """Pickles; what a worker could not import goes by value. Any thread.

    Each pool has its own: a cell of a notebook may change a function that a model calls, and the
    next pool is to have the new one.
    """

    def __init__(self) -> None:
        self._importable: dict[str, bool] = {}
        # Of what was sent: a name for it, and what it is made of. Both stay the same.
        self._sent: weakref.WeakKeyDictionary[Any, tuple[bytes, bytes]] = (
            weakref.WeakKeyDictionary()
        )
        #: Whether anything went by value so far.
        self.is_used = False

    def dump(self, item: Any, large: float = LARGE) -> bytes | Parts:
        """As ``payload.dump``, and slower.

        Raises:
            NotImportable: cloudpickle is not installed, and it is needed.
            Exception: whatever pickling it raises.
        """
        return dump_with(self._pickler, item, large)

    def dumps(self, value: Any) -> bytes:
        """The same into bytes, however large it is."""
        file = io.BytesIO()
        self._pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()

    def _pickler(self, *arguments: Any, **options: Any) -> pickle.Pickler:
        pickler = _Pickler(*arguments, **options)
        pickler.owner = self
        return pickler

    def parts(self, thing: Any) -> tuple[bytes, bytes]:
        """A name for a class or function, and what it is made of."""
        parts = self._sent.get(thing)
        if parts is None:
            with _lock:
                parts = self._sent.get(thing)
                if parts is None:  # or a worker would make two classes of one
                    parts = self._sent[thing] = uuid.uuid4().bytes, _dissected(thing)
        return parts

    def is_known(self, thing: Any) -> bool:
        """Whether a worker finds this class or function by its name."""
        name = getattr(thing, "__module__", None)
        if not isinstance(name, str):
            return True
        if name not in self._importable:
            self._importable[name] = is_importable(name) or (
                # Perhaps it is there for a worker nevertheless, whose error says what to do if not.
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
    except ValueError:  # it was ruled out, in sys.modules
        return False


def _is_there(thing: Any) -> bool:
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _dissected(thing: Any) -> bytes:
    """What it is made of, and every class that this refers to and that goes by value as well."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotImportable(
            f"{thing.__qualname__} is defined in {_place(thing)}, which worker processes cannot "
            f"import. Do one of these: pip install {' '.join(PACKAGES['notebook'])}, which sends "
            "it by value; define it "
            'in a module (.py file) and import it from there; or use mp_start_method="fork"'
        ) from None
    known, classes = ByValue().is_known, {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type) and not known(value):
                classes[value.__module__, value.__qualname__] = value
            return super().reducer_override(value)

    module = sys.modules.get(thing.__module__)
    is_told = module is not None and thing.__module__ not in _MAIN
    if is_told:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump((thing, classes))
    finally:
        if is_told:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _place(thing: Any) -> str:
    if thing.__module__ in _MAIN:
        return "the main module (a notebook, python -c, standard input or the like)"
    return f"the module {thing.__module__!r}"


def _receive(name: bytes, parts: bytes) -> Any:
    """In a worker: what was sent, made once."""
    if name not in _received:
        thing, classes = pickle.loads(parts)
        for (module, qualname), each in classes.items():
            if "." not in qualname:  # one within another, or within a function, is found through it
                setattr(sys.modules.setdefault(module, types.ModuleType(module)), qualname, each)
        _received[name] = thing
    return _received[name]
