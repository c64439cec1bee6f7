"""Encode values as payloads, which travel in messages, and decode them where they arrive.

A payload is bytes, or stands for memory outside of the message and has a method ``load``. Each item
and each result is a payload of its own, so one that cannot travel fails alone.

Small values become one byte string. The data of large arrays and tensors is copied only once, to
memory outside (pickle protocol 5, PEP 574). Large objects without buffers, such as ``bytes`` in a
tuple, pass through the pickle's stream without a copy. Plain numpy arrays are pickled in half of
numpy's time, and torch tensors as plain data on the CPU.

pickle sends a class or function as the names of its module and its own. Workers cannot import the
main module of a notebook or of ``python -c``. cloudpickle, an optional package, sends the code
instead. Only this module imports it. A worker keeps what it receives, under its name. Results of
such a class are pickled by name, and become the web process's own class.
"""

from __future__ import annotations

import copyreg
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
from pickle import PickleBuffer
from typing import Any

from ..errors import ModelError, UnpicklableItem
from ..reporting import PACKAGES, summary
from .starting import MAIN, has_main, is_importable

logger = logging.getLogger(__name__)

PROTOCOL = 5

#: Values of this many bytes or more use shared memory, whose overhead is constant. Smaller ones are
#: faster through a pipe. Measured, see docs/payloads.md.
LARGE = 16 << 10

#: A pickler is not reused after a longer stream: clearing its grown memo table would be slow.
_SHORT_STREAM = 4096

#: Longer texts may be large: a character has up to four bytes.
_SHORT_TEXT = LARGE // 4
_TEXTS = frozenset({str, bytes})

#: Types without buffers and parts.
_ATOMS = frozenset({int, float, bool, type(None)})

#: A pickled model beyond this is worth a warning: it is copied to every worker, and the web process
#: holds it as well.
_LARGE_SPEC_BYTES = 64 << 20


class Parts:
    """A pickled value with its large buffers beside the pickle's stream.

    The pickler's own parts are views of the value, which may change: ``put`` copies them at once.
    """

    __slots__ = ("buffers", "stream")

    outlives_worker = True  # as bytes do: a stream can go on where these outputs ended

    def __init__(self, stream: Sequence[Any], buffers: Sequence[Any]) -> None:
        self.stream = stream  # chunks of bytes
        self.buffers = buffers

    @property
    def nbytes(self) -> int:
        return sum(memoryview(each).nbytes for each in (*self.stream, *self.buffers))

    def __len__(self) -> int:
        """Bytes, as ``len`` of a payload that is ``bytes``: a pool adds up what it sends."""
        return self.nbytes

    def copy(self) -> Parts:
        """The same in memory of its own: to travel in a message, or to be loaded."""
        return Parts([b"".join(self.stream)], [bytes(each) for each in self.buffers])

    def load(self) -> Any:
        """The value, in memory of its own that may be written to. Any thread."""
        (stream,) = self.stream
        return pickle.loads(stream, buffers=map(bytearray, self.buffers))

    def view(self) -> Any:
        """The value, whose arrays are views of the buffers."""
        (stream,) = self.stream
        return pickle.loads(stream, buffers=self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        stream, *buffers = map(PickleBuffer, (b"".join(self.stream), *self.buffers))
        return Parts, ([stream], buffers)


class Codec:
    """Pickles values; subclasses may encode them in another way. Any thread.

    ``put`` copies a large value to memory outside of the message, and returns its payload, or None
    if there is no room. ``by_value`` has sent the model, and sends what else workers cannot import.
    """

    #: Values of so many bytes are put outside, and so are buffers in them.
    large = LARGE

    def __init__(
        self,
        put: Callable[[Parts], Any] | None = None,
        by_value: ByValue | None = None,
        cannot_decode: str = "a result cannot be unpickled in the web process",
    ) -> None:
        self._put = put
        self._cannot_decode = cannot_decode
        self._make_pickler: Callable[..., pickle.Pickler] = pickle.Pickler
        if by_value is not None and by_value.is_needed:
            self._make_pickler = by_value.pickler
        #: Idle picklers. A list: its ``pop`` and ``append`` are safe in any thread and in
        #: finalizers.
        self._idle: list[_Pickling] = []

    def encode(self, value: Any) -> Any:
        """Returns the payload. Raises whatever pickling raises."""
        kind = type(value)
        if kind in _ATOMS or (kind in _TEXTS and len(value) < _SHORT_TEXT):  # as most are
            return pickle.dumps(value, PROTOCOL)
        put = self._put
        if put is not None:
            pickled = self._dump(value, self.large)
            payload = pickled if isinstance(pickled, bytes) else put(pickled)
            if payload is not None:
                return payload
        return self._dump(value, math.inf)

    def _dump(self, value: Any, large: float) -> bytes | Parts:
        """Pickle into bytes, or into parts if it has at least ``large`` bytes."""
        if _known_to != (len(copyreg.dispatch_table), len(sys.modules)):
            _learn_reducers()
        try:
            pickling = self._idle.pop()
        except IndexError:
            pickling = _Pickling(self._make_pickler)
        try:
            return pickling.dump(value, large)
        finally:
            if pickling.is_reusable:
                self._idle.append(pickling)
            else:
                del pickling.pickler  # or the two would be a reference cycle

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
        """Let go of the memory outside. A thread that is just writing there still can."""
        self._put = None


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


# -- pickling into parts


class _Pickling:
    """A reusable pickler: making one costs more than pickling a number."""

    def __init__(self, make: Callable[..., pickle.Pickler]) -> None:
        self.is_reusable = False  # after the latest value
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        self._large: float = LARGE
        self.pickler = make(self, PROTOCOL, buffer_callback=self._stays)

    def write(self, chunk: Any) -> None:
        """As the pickler's file. Large objects arrive without a copy.

        Not ``append`` itself: between two chunks of a large value other threads run.
        """
        self._chunks.append(chunk)

    def dump(self, value: Any, large: float) -> bytes | Parts:
        self._large = large
        self.is_reusable = is_short = False
        self.pickler.dispatch_table = _reducers
        try:
            self.pickler.dump(value)
            last: bytes = self._chunks.pop()
            is_short = not self._chunks and len(last) <= _SHORT_STREAM
            if not self._chunks and not self._buffers and len(last) < large:
                return last
            chunks = [
                chunk.raw() if type(chunk) is PickleBuffer else chunk for chunk in self._chunks
            ]
            parts = Parts([*chunks, last], self._buffers[:])
            return parts if parts.nbytes >= large else b"".join(parts.stream)
        finally:
            self.pickler.clear_memo()  # which holds references to all objects
            self._chunks.clear()
            self._buffers.clear()
            self.is_reusable = is_short  # at last: a signal handler may raise before

    def _stays(self, buffer: PickleBuffer) -> bool:
        """Whether a buffer stays in the stream."""
        view = buffer.raw()
        if view.nbytes < self._large:
            return True
        self._buffers.append(view)
        return False


def _reduce_memoryview(view: memoryview) -> tuple[Callable[..., memoryview], tuple[Any, ...]]:
    """Reduce a memoryview, which pickle refuses."""
    shape: Any = view.shape
    if view.format.removeprefix("@") not in _FORMATS or (0 in shape and view.ndim > 1):
        raise TypeError(
            f"a memoryview of format {view.format!r} and shape {shape} cannot be restored; "
            "send the object behind it, such as the array"
        )
    data: Any = view
    if not view.c_contiguous:
        data = view.tobytes() if view.readonly else bytearray(view.tobytes())
    shape = None if view.ndim == 1 else shape
    return _memoryview, (PickleBuffer(data), view.format, shape)


def _memoryview(data: Any, kind: Any, shape: tuple[int, ...] | None) -> memoryview:
    view = memoryview(data).cast("B")
    return view.cast(kind) if shape is None else view.cast(kind, shape)


#: Formats that ``memoryview.cast`` supports.
_FORMATS = frozenset("cbB?hHiIlLqQnNfdP")

#: Reducers of this module, of the packages, and of ``copyreg``.
_reducers: dict[type, Callable[[Any], Any]] = {}
#: How many reducers and modules there were when ``_reducers`` was made.
_known_to = (0, 0)


def _learn_reducers() -> None:
    """Renew the reducers after a registration or an import, perhaps in progress in a thread."""
    global _known_to, _reducers
    known_to = len(copyreg.dispatch_table), len(sys.modules)
    found: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_memoryview}
    for package, kind, reduce in _REDUCERS:
        if package in sys.modules:
            try:
                found[getattr(sys.modules[package], kind)] = reduce
            except AttributeError:  # half loaded: asked again for the next value
                known_to = 0, 0
    _reducers = found | copyreg.dispatch_table  # the user's take precedence
    _known_to = known_to


#: Kinds of dtype that their names describe completely. numpy pickles arrays of objects, dates,
#: structures, of other orders than C's, and of subclasses.
_PLAIN = frozenset("biufc")


def _reduce_array(array: Any) -> Any:
    dtype = array.dtype
    is_plain = dtype.kind in _PLAIN and dtype.isbuiltin == 1 and dtype.metadata is None
    if is_plain and array.size and array.flags.c_contiguous:
        return _array, (PickleBuffer(array), dtype.str, array.shape)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _array(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype).reshape(shape)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to its data, dtype and shape.

    torch's own pickling sends the whole storage, even for one row. It still pickles sparse,
    quantized and nested tensors, and subclasses: of a ``Parameter`` its data come here.
    """
    import torch

    if tensor.is_meta:  # without data
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    try:
        data = tensor.reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # there is no numpy
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    name = str(tensor.dtype).removeprefix("torch.")
    return _tensor, (PickleBuffer(data), name, tuple(tensor.shape))


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


#: Packages, and how a class of theirs is reduced once they are loaded.
_REDUCERS = (("numpy", "ndarray", _reduce_array), ("torch", "Tensor", _reduce_tensor))


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
        #: The id and the code of what was sent. Two closures of equal code stay two.
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
        """An id for a class or function, and its code: once, or a worker would make two classes."""
        self._is_used = True
        with _by_value_lock:
            parts = self._sent.get(thing)
            if parts is None:
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
        return name != "__main__" or "<" in thing.__qualname__ or is_there(thing)


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


def is_there(thing: Any) -> bool:
    """Whether a class or function is found by its name in this process."""
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
            f"import. Run pip install {PACKAGES['notebook']}, define it in a module "
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


def _receive(name: bytes, code: bytes) -> Any:
    """In a worker: make what was sent, once."""
    if name not in _received:
        thing, classes = pickle.loads(code)
        for (module, qualname), each in classes.items():
            if "." not in qualname:  # nested ones are found through their parents
                setattr(sys.modules.setdefault(module, types.ModuleType(module)), qualname, each)
        _received[name] = thing
    return _received[name]
