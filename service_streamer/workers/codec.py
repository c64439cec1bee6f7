"""Encode values as payloads, which travel in messages, and decode them where they arrive.

A payload is bytes, or stands for memory outside of the message and has a method ``load``. Each item
and each result is a payload of its own, so one that cannot travel fails alone.

pickle sends a class or function as the names of its module and its own. Workers cannot import the
main module of a notebook or of ``python -c``. cloudpickle, an optional package, sends the code
instead. Only this module imports it. A worker keeps what it receives, under its name. Results of
such a class are pickled by name, and become the web process's own class.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import math
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ModelError, UnpicklableItem
from ..reporting import PACKAGES, summary
from .memory.payload import ATOMS, LARGE_IN_BATCH, PROTOCOL, Parts, dump
from .starting import MAIN, has_main, is_importable

logger = logging.getLogger(__name__)

#: A pickled model beyond this is worth a warning: it is copied to every worker, and the web process
#: holds it as well.
_LARGE_SPEC_BYTES = 64 << 20


class Store(Protocol):
    """Memory outside of messages, for large values."""

    @property
    def large(self) -> float:
        """Values of this many bytes or more are put here."""

    def put(self, parts: Parts) -> Any:
        """Copy a pickled value; returns its payload, or None if there is no room."""


class Codec:
    """Pickles values; subclasses may encode them in another way. Any thread.

    Args:
        by_value: has sent the model, and sends what else workers cannot import.
        cannot_decode: what is said of results that cannot be decoded.
    """

    def __init__(
        self,
        store: Store | None = None,
        by_value: ByValue | None = None,
        cannot_decode: str = "a result cannot be unpickled in the web process",
    ) -> None:
        self._store = store
        self._cannot_decode = cannot_decode
        is_by_value = by_value is not None and by_value.is_needed
        self._make_pickler = by_value.pickler if by_value is not None and is_by_value else None

    def encode(self, value: Any) -> Any:
        """Returns the payload. Raises whatever pickling raises."""
        kind = type(value)
        if kind in ATOMS and (kind is not str or len(value) < LARGE_IN_BATCH):  # as most are
            return pickle.dumps(value, PROTOCOL)
        store = self._store
        if store is not None:
            pickled = dump(value, store.large, self._make_pickler)
            payload = pickled if isinstance(pickled, bytes) else store.put(pickled)
            if payload is not None:
                return payload
        return dump(value, math.inf, self._make_pickler)

    def decode(self, payload: Any) -> Any:
        """Returns the value. Raises whatever unpickling raises."""
        return pickle.loads(payload) if type(payload) is bytes else payload.load()

    def decode_again(self, payload: Any) -> Any:
        """Returns the value as it was sent, whoever has written to what ``decode`` returned."""
        if type(payload) is bytes:
            return self.decode(payload)
        return getattr(payload, "load_again", payload.load)()

    def refuse_item(self, error: BaseException, advice: str = "") -> Exception:
        """Returns the error for an item that raised ``error`` when a worker decoded it."""
        why = f"{summary(error)}{advice}"
        return UnpicklableItem(f"the item cannot be unpickled in the worker: {why}")

    def encode_items(self, items: Sequence[Any]) -> list[Any]:
        """Encode the items of a call. Raises UnpicklableItem."""
        encode = self.encode
        payloads: list[Any] = []
        try:
            for item in items:
                payloads.append(encode(item))
            return payloads
        except (Exception, SystemExit) as error:  # pickling must not end the caller's thread
            which, position = "an item of the batch", len(payloads)
            if position < len(items):  # else a signal handler raised when all was done
                kind = type(items[position]).__qualname__
                which = f"item {position} of the batch, of type {kind},"
            refused = UnpicklableItem(
                f"{which} cannot be sent to a worker process ({summary(error)}); "
                "pass plain data such as text, numbers, bytes or arrays"
            )
            # Without its traceback, whose frames hold the items.
            raise refused from error.with_traceback(None)

    def decode_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Decode the outputs of a call. Raises ModelError."""
        try:
            return [*map(self.decode, outputs)]
        except (Exception, SystemExit) as error:
            failed = ModelError(f"{self._cannot_decode}: {summary(error)}")
            raise failed from error.with_traceback(None)

    def close(self) -> None:
        """Let go of the store. A thread that is just writing there still can."""
        self._store = None


def encode_spec(spec: object, by_value: ByValue) -> bytes:
    """Pickle what workers load. Raises TypeError: it cannot be pickled."""
    file = io.BytesIO()
    try:
        by_value.pickler(file, pickle.HIGHEST_PROTOCOL).dump(spec)
    except NotImportable:
        raise
    except Exception as error:
        raise TypeError(
            f"the model or its init arguments cannot be sent to a worker process "
            f"({summary(error)}); define the function or class at the top level of a module, or "
            'name it by an import string "package.module:Name"'
        ) from error
    pickled = file.getvalue()
    if len(pickled) > _LARGE_SPEC_BYTES:
        logger.warning(
            "the model is %d MB when pickled, and every worker gets a copy; "
            "with a ManagedModel subclass the workers load it themselves",
            len(pickled) >> 20,
        )
    return pickled


# -- classes and functions that go by value


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
        self._is_used = False

    @property
    def is_needed(self) -> bool:
        """Whether items may be of classes that workers cannot import, by what the model was."""
        return self._is_used or not has_main()

    def pickler(self, *arguments: Any, **options: Any) -> pickle.Pickler:
        """A pickler of this kind. Its ``dump`` raises NotImportable, too."""
        pickler = _Pickler(*arguments, **options)
        pickler.owner = self
        return pickler

    def parts(self, thing: Any) -> tuple[bytes, bytes]:
        """An id for a class or function, and its code."""
        self._is_used = True
        with _by_value_lock:
            parts = self._sent.get(thing)
            if parts is None:  # once, or a worker would make two classes
                parts = self._sent[thing] = uuid.uuid4().bytes, _dissect(thing, self.is_known)
            return parts

    def is_known(self, thing: Any) -> bool:
        """Whether a worker finds this class or function by its name."""
        name = getattr(thing, "__module__", None)
        if not isinstance(name, str):
            return True
        if name not in self._importable:
            self._importable[name] = is_importable(name) or (
                # A worker may find it nevertheless; else its error says what to do.
                name not in MAIN and not _has_cloudpickle()
            )
        if not self._importable[name]:
            return False
        # A profiler or debugger runs a program as its own main module.
        return name != "__main__" or "<" in thing.__qualname__ or _is_there(thing)


class _Pickler(pickle.Pickler):
    owner: ByValue

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and not self.owner.is_known(value):
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


def _dissect(thing: Any, known: Callable[[Any], bool]) -> bytes:
    """The code of a thing, and of all classes that it refers to and that go by value."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        place = f"the module {thing.__module__!r}"
        if thing.__module__ in MAIN:
            place = "the main module (a notebook, python -c, standard input or the like)"
        raise NotImportable(
            f"{thing.__qualname__} is defined in {place}, which worker processes cannot "
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
    is_registered = module is not None and thing.__module__ not in MAIN
    if is_registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump((thing, classes))
    finally:
        if is_registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def _receive(name: bytes, parts: bytes) -> Any:
    """In a worker: make what was sent, once."""
    if name not in _received:
        thing, classes = pickle.loads(parts)
        for (module, qualname), each in classes.items():
            if "." not in qualname:  # nested ones are found through their parents
                setattr(sys.modules.setdefault(module, types.ModuleType(module)), qualname, each)
        _received[name] = thing
    return _received[name]
