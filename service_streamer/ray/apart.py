"""Payloads on their way through Ray: what is large goes beside the pickle, where Ray stores it.

Ray copies the buffers of a pickle into its store, and gives views of them to who reads them there.
So a batch is one object: a pickle of what is small, and the buffers of what is large. A caller may
change its item as soon as it has been accepted, and a model may use the memory of its results
again, so what is large is copied once before that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from ..workers.memory.payload import LARGE, PROTOCOL, Parts

#: A message: the pickle, and what lies beside it, if anything does.
Frame = bytes | tuple[bytes, list[Any]]


class Apart:
    """A pickled payload of which large buffers lie beside it."""

    __slots__ = ("_buffers", "_stream")

    def __init__(self, stream: Any, buffers: list[Any]) -> None:
        self._stream = stream
        self._buffers = buffers

    @property
    def nbytes(self) -> int:
        return sum(memoryview(each).nbytes for each in (self._stream, *self._buffers))

    def load(self) -> Any:
        """The value, whose arrays are its own and may be written to. Any thread."""
        return pickle.loads(self._stream, buffers=[bytearray(each) for each in self._buffers])

    def view(self) -> Any:
        """The value, whose arrays are views of Ray's memory, which nobody may write to."""
        return pickle.loads(self._stream, buffers=self._buffers)

    def parts(self) -> tuple[Any, list[Any]]:
        """The stream of its pickle, and its buffers."""
        return self._stream, self._buffers

    def __reduce__(self) -> tuple[Callable[..., Apart], tuple[Any, ...]]:
        buffers = [PickleBuffer(each) for each in (self._stream, *self._buffers)]
        return _apart, (*buffers,)


def _apart(stream: Any, *buffers: Any) -> Apart:
    return Apart(stream, list(buffers))


class ApartStore:
    """Where a codec puts what is large."""

    large = LARGE

    def put(self, parts: Parts) -> Apart:
        return Apart(b"".join(parts.stream), [bytes(each) for each in parts.buffers])


def frame(message: Any) -> Frame:
    """Pickle a message; with what is large beside it, for Ray to take it from there."""
    buffers: list[PickleBuffer] = []
    pickled = pickle.dumps(message, PROTOCOL, buffer_callback=buffers.append)
    return (pickled, buffers) if buffers else pickled


def unframed(received: Frame) -> Any:
    """The message. Raises whatever unpickling raises."""
    if isinstance(received, bytes):
        return pickle.loads(received)
    pickled, buffers = received
    return pickle.loads(pickled, buffers=buffers)
