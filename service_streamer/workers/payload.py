"""How an item or a result becomes bytes and buffers, and is made from them again.

Small things are pickled into one string of bytes. Of what is large, the bytes stay where they are,
in their array or tensor, until they are copied once, to where the other side finds them (pickle
protocol 5, PEP 574). What has no buffer to offer, such as ``bytes`` in a tuple, is handed on by the
pickler as it is, in the midst of its stream.
"""

from __future__ import annotations

import copyreg
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import reducers as numpy_reducers
from .tensors import reducers as torch_reducers

__all__ = ["LARGE", "PROTOCOL", "Parts", "dump", "dump_whole"]

PROTOCOL = 5

#: From so many bytes on, sharing memory costs less than a pipe: what it costs to find room, to keep
#: count and to make views is the same for any size. Measured, see docs/payloads.md.
LARGE = 32 << 10

#: What offers no buffer, and is not looked into.
_ATOMS = frozenset({str, int, float, bool, type(None)})


class Parts(NamedTuple):
    """Something large, pickled.

    Attributes:
        stream: the chunks of the pickle's stream: bytes, and what it passes through as it is.
        buffers: what goes beside the stream, as bytes; each of at least ``LARGE``.
    """

    stream: list[Any]
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.stream)) + sum(buffer.nbytes for buffer in self.buffers)


def dump(item: Any, large: float = LARGE) -> bytes | Parts:
    """Pickle an item: into bytes, or into parts if it has at least ``large`` bytes.

    The parts refer to the memory of the item: to be copied before it can change.

    Raises:
        Exception: whatever pickling it raises.
    """
    if type(item) in _ATOMS:
        pickled = pickle.dumps(item, PROTOCOL)
        if len(pickled) < large:
            return pickled
    try:
        pickling = _idle.pop()
    except IndexError:
        pickling = _Pickling()
    parts = pickling.dump(item, large)
    _idle.append(pickling)  # if it raised, it is not fit for another
    return parts


def dump_whole(item: Any) -> bytes:
    """Pickle an item into bytes, however large it is."""
    pickled: Any = dump(item, math.inf)
    return pickled  # type: ignore[no-any-return]


class _Pickling:
    """A pickler to be used again and again: to make one costs more than to pickle a number."""

    __slots__ = ("_buffers", "_chunks", "_large", "_pickler", "write")

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        self._large: float = LARGE
        # For the pickler, whose file this is. It hands over what is large without a copy.
        self.write: Callable[[Any], object] = self._chunks.append
        self._pickler = pickle.Pickler(self, PROTOCOL, buffer_callback=self._is_small)
        self._pickler.dispatch_table = _reducers

    def dump(self, item: Any, large: float) -> bytes | Parts:
        self._large = large
        self._pickler.dump(item)
        self._pickler.clear_memo()
        chunk: bytes = self._chunks.pop()
        if not self._chunks and not self._buffers and len(chunk) < large:
            return chunk
        chunks, buffers = [*self._chunks, chunk], self._buffers[:]
        self._chunks.clear()
        self._buffers.clear()
        if not buffers and (large == math.inf or sum(map(len, chunks)) < large):
            return b"".join(chunks)
        return Parts(chunks, buffers)

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether it is to be a part of the stream."""
        view = buffer.raw()
        if view.nbytes < self._large:
            return True
        self._buffers.append(view)
        return False


#: Those that nobody uses at the moment. A list, whose ``pop`` and ``append`` any thread may call,
#: and a finalizer that interrupts one.
_idle: list[_Pickling] = []


#: By the package that its classes are of, which is loaded then.
_PACKAGES = {"numpy": numpy_reducers, "torch": torch_reducers}


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How objects are pickled that do not know it, or do it badly; the others as always."""

    _asked: frozenset[str] = frozenset()

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        package = cls.__module__.partition(".")[0]
        if package in _PACKAGES and package not in self._asked:
            self._asked |= {package}
            self.update(_PACKAGES[package]())
            if cls in self:
                return self[cls]
        return copyreg.dispatch_table[cls]  # KeyError: ask the object itself


def _reduce_memoryview(view: memoryview) -> tuple[Callable[..., memoryview], tuple[Any, ...]]:
    """pickle itself refuses these."""
    data = view if view.c_contiguous else view.tobytes()
    shape = None if view.ndim == 1 else view.shape
    return _memoryview, (pickle.PickleBuffer(data), view.format, shape)


def _memoryview(data: Any, kind: Any, shape: tuple[int, ...] | None) -> memoryview:
    view = memoryview(data).cast("B")
    return view.cast(kind) if shape is None else view.cast(kind, shape)


_reducers = _Reducers({memoryview: _reduce_memoryview})
