"""Pickle items and results into bytes and buffers.

Small payloads become one byte string. The data of large arrays and tensors is copied only once, to
shared memory (pickle protocol 5, PEP 574). Large objects without buffers, such as ``bytes`` in a
tuple, pass through the pickle's stream without a copy. Plain numpy arrays are pickled in half of
numpy's time, and torch tensors as plain data on the CPU.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

PROTOCOL = 5

#: Payloads of this many bytes or more use shared memory, whose overhead is constant. Smaller ones
#: are faster through a pipe. Measured, see docs/payloads.md.
LARGE = 32 << 10

#: The same for payloads that travel with others: a pipe holds 64 kB, and one side waits for the
#: other when it is full. Measured as well.
LARGE_IN_BATCH = 16 << 10

#: A pickler is not reused after a longer stream: clearing its grown memo table would be slow.
_SMALL = 4096

#: Types without buffers and parts.
ATOMS = frozenset({str, int, float, bool, type(None)})


class Parts(NamedTuple):
    """A pickled large payload."""

    stream: list[Any]  # chunks of the pickle's stream: bytes-like objects
    buffers: list[memoryview]  # data beside the stream, each of at least ``large`` bytes

    @property
    def size(self) -> int:
        """Total bytes."""
        return sum(map(len, self.stream)) + sum(buffer.nbytes for buffer in self.buffers)


def dump(
    item: Any, large: float = LARGE, make: Callable[..., pickle.Pickler] | None = None
) -> bytes | Parts:
    """Pickle an item into bytes, or into parts if it has at least ``large`` bytes.

    The parts refer to the item's memory, so copy them before it can change. With ``make`` the item
    gets a pickler of its own, which is slower. Raises whatever pickling raises.
    """
    if _known_to != (len(copyreg.dispatch_table), len(sys.modules)):
        _learn_reducers()
    try:
        pickling = _idle.pop() if make is None else _Pickling(make)
    except IndexError:
        pickling = _Pickling()
    try:
        return pickling.dump(item, large)
    finally:
        if pickling.is_reusable and make is None:
            _idle.append(pickling)
        else:
            pickling.end()


class _Pickling:
    """A reusable pickler: making one costs more than pickling a number.

    Attributes:
        is_reusable: whether the latest item was pickled, and into a short stream: see ``_SMALL``.
    """

    def __init__(self, make: Callable[..., pickle.Pickler] = pickle.Pickler) -> None:
        self.is_reusable = False
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        self._large: float = LARGE
        self._pickler = make(self, PROTOCOL, buffer_callback=self._stays)
        self._pickler.dispatch_table = _reducers

    def write(self, chunk: Any) -> None:
        """As the pickler's file. Large objects arrive without a copy.

        Not ``append`` itself: between two chunks of a large item other threads run.
        """
        self._chunks.append(chunk)

    def dump(self, item: Any, large: float) -> bytes | Parts:
        self._large = large
        self.is_reusable = False
        try:
            self._pickler.dump(item)
            last: bytes = self._chunks.pop()
            self.is_reusable = not self._chunks and len(last) <= _SMALL
            if not self._chunks and not self._buffers and len(last) < large:
                return last
            chunks = [
                chunk.raw() if type(chunk) is pickle.PickleBuffer else chunk
                for chunk in self._chunks
            ]
            parts = Parts([*chunks, last], self._buffers[:])
            return parts if parts.size >= large else b"".join(parts.stream)
        finally:
            self._pickler.clear_memo()  # which holds references to all objects
            self._chunks.clear()
            self._buffers.clear()

    def end(self) -> None:
        """Break the reference cycle with the pickler."""
        del self._pickler

    def _stays(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the stream."""
        view = buffer.raw()
        if view.nbytes < self._large:
            return True
        self._buffers.append(view)
        return False


#: Idle picklers. A list: its ``pop`` and ``append`` are safe in any thread and in finalizers.
_idle: list[_Pickling] = []


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
    return _memoryview, (pickle.PickleBuffer(data), view.format, shape)


def _memoryview(data: Any, kind: Any, shape: tuple[int, ...] | None) -> memoryview:
    view = memoryview(data).cast("B")
    return view.cast(kind) if shape is None else view.cast(kind, shape)


#: Formats that ``memoryview.cast`` supports.
_FORMATS = frozenset("cbB?hHiIlLqQnNfdP")

#: Reducers of this module, of the packages, and of ``copyreg``.
_reducers: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_memoryview}
#: How many reducers and modules there were when ``_reducers`` was made.
_known_to = (0, 0)


def _learn_reducers() -> None:
    """Renew the reducers after a registration or an import, perhaps in progress in a thread."""
    global _known_to
    known_to = len(copyreg.dispatch_table), len(sys.modules)
    found: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_memoryview}
    for name, reducers in _PACKAGES.items():
        if name in sys.modules:
            try:
                found |= reducers(sys.modules[name])
            except AttributeError:  # half loaded
                return
    found |= copyreg.dispatch_table  # the user's take precedence
    _reducers.update(found)
    for kind in _reducers.keys() - found.keys():
        _reducers.pop(kind, None)
    _known_to = known_to


#: Kinds of dtype that their names describe completely. numpy pickles arrays of objects, dates,
#: structures, of other orders than C's, and of subclasses.
_PLAIN = frozenset("biufc")


def _numpy_reducers(numpy: Any) -> dict[type, Callable[[Any], Any]]:
    """Reducers for a pickler's ``dispatch_table``. AttributeError: numpy is half loaded."""
    return {numpy.ndarray: _reduce_array}


def _reduce_array(array: Any) -> Any:
    dtype = array.dtype
    is_plain = dtype.kind in _PLAIN and dtype.isbuiltin == 1 and dtype.metadata is None
    if is_plain and array.size and array.flags.c_contiguous:
        return _array, (pickle.PickleBuffer(array), dtype.str, array.shape)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _array(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype).reshape(shape)


def _torch_reducers(torch: Any) -> dict[type, Callable[[Any], Any]]:
    """Reducers for a pickler's ``dispatch_table``. AttributeError: torch is half loaded."""
    return {torch.Tensor: _reduce_tensor}


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to its data, dtype and shape.

    torch's own pickling sends the whole storage, even for one row. Here a tensor of any size
    arrives on the CPU, contiguous, without graph and attributes. torch pickles sparse, quantized
    and nested tensors, moved to the CPU, and subclasses: of a ``Parameter`` its data come here.
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
    return _tensor, (pickle.PickleBuffer(data), name, tuple(tensor.shape))


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


#: Functions that return the reducers of a package, once it is loaded.
_PACKAGES = {"numpy": _numpy_reducers, "torch": _torch_reducers}
