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
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import reducers as numpy_reducers
from .tensors import reducers as torch_reducers

__all__ = ["ATOMS", "LARGE", "PROTOCOL", "Parts", "dump", "dump_whole", "dump_with"]

PROTOCOL = 5

#: From so many bytes on, sharing memory costs less than a pipe: what it costs to find room, to keep
#: count and to make views is the same for any size. Measured, see docs/payloads.md.
LARGE = 32 << 10

#: A pickler with a stream beyond this is not used again: it keeps the table of all the objects that
#: it has seen, at its largest, and goes through all of it to clear it.
_SMALL = 4096

#: What offers no buffer, and is not looked into.
ATOMS = frozenset({str, int, float, bool, type(None)})


class Parts(NamedTuple):
    """Something large, pickled.

    Attributes:
        stream: the chunks of the pickle's stream: bytes, or what it passes through as it is; each
            with a length in bytes.
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
    if _known_to != (len(copyreg.dispatch_table), *map(sys.modules.__contains__, _PACKAGES)):
        _learn_reducers()
    try:
        pickling = _idle.pop()
    except IndexError:
        pickling = _Pickling()
    try:
        parts = pickling.dump(item, large)
    except BaseException:
        pickling.end()
        raise
    if pickling.is_small:
        _idle.append(pickling)
    else:
        pickling.end()
    return parts


def dump_whole(item: Any) -> bytes:
    """Pickle an item into bytes, however large it is."""
    pickled: Any = dump(item, math.inf)
    return pickled  # type: ignore[no-any-return]


def dump_with(make: Callable[..., pickle.Pickler], item: Any, large: float) -> bytes | Parts:
    """As ``dump``, with a pickler that ``make`` makes for this one item: slower."""
    _learn_reducers()
    pickling = _Pickling(make)
    try:
        return pickling.dump(item, large)
    finally:
        pickling.end()


class _Pickling:
    """A pickler to be used again and again: to make one costs more than to pickle a number."""

    __slots__ = ("_buffers", "_chunks", "_large", "_pickler", "is_small", "write")

    def __init__(self, make: Callable[..., pickle.Pickler] = pickle.Pickler) -> None:
        self.is_small = True
        self._chunks: list[Any] = []
        self._buffers: list[memoryview] = []
        self._large: float = LARGE
        # For the pickler, whose file this is. It hands over what is large without a copy.
        self.write: Callable[[Any], object] = self._chunks.append
        self._pickler = make(self, PROTOCOL, buffer_callback=self._is_small)
        self._pickler.dispatch_table = _reducers

    def dump(self, item: Any, large: float) -> bytes | Parts:
        self._large = large
        try:
            self._pickler.dump(item)
            last: bytes = self._chunks.pop()
            self.is_small = not self._chunks and len(last) <= _SMALL
            if not self._chunks and not self._buffers and len(last) < large:
                return last
            chunks = [
                chunk.raw() if type(chunk) is pickle.PickleBuffer else chunk
                for chunk in self._chunks
            ]
            parts = Parts([*chunks, last], self._buffers[:])
            return parts if parts.size >= large else b"".join(parts.stream)
        finally:
            self._pickler.clear_memo()  # which holds all that it has seen
            self._chunks.clear()
            self._buffers.clear()

    def end(self) -> None:
        """It is not used again, nor left to the garbage collector."""
        del self._pickler

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


def _reduce_memoryview(view: memoryview) -> tuple[Callable[..., memoryview], tuple[Any, ...]]:
    """pickle itself refuses these."""
    shape: Any = view.shape
    if view.format.removeprefix("@") not in _FORMATS or (0 in shape and view.ndim > 1):
        raise TypeError(
            f"a memoryview of format {view.format!r} and shape {shape} cannot be made anew; "
            "send what it is a view of, such as the array"
        )
    data: Any = view
    if not view.c_contiguous:
        data = view.tobytes() if view.readonly else bytearray(view.tobytes())
    shape = None if view.ndim == 1 else shape
    return _memoryview, (pickle.PickleBuffer(data), view.format, shape)


def _memoryview(data: Any, kind: Any, shape: tuple[int, ...] | None) -> memoryview:
    view = memoryview(data).cast("B")
    return view.cast(kind) if shape is None else view.cast(kind, shape)


#: What ``memoryview.cast`` knows.
_FORMATS = frozenset("cbB?hHiIlLqQnNfdP")

#: Who knows how the objects of a package are pickled, once that is loaded.
_PACKAGES = {"numpy": numpy_reducers, "torch": torch_reducers}

#: How objects are pickled that do not know it, or do it badly, beside what others have registered.
_reducers: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_memoryview}
#: What was there when these were looked for.
_known_to: tuple[object, ...] = ()


def _learn_reducers() -> None:
    """Something was registered, or a package loaded; perhaps another thread is doing that now."""
    global _known_to
    known_to = (len(copyreg.dispatch_table), *map(sys.modules.__contains__, _PACKAGES))
    found: dict[type, Callable[[Any], Any]] = {memoryview: _reduce_memoryview}
    for name, reducers in _PACKAGES.items():
        if name in sys.modules:
            try:
                found |= reducers(sys.modules[name])
            except AttributeError:  # it is only half loaded
                return
    found |= copyreg.dispatch_table  # what a user wants has precedence
    _reducers.update(found)
    for kind in _reducers.keys() - found.keys():
        _reducers.pop(kind, None)
    _known_to = known_to
