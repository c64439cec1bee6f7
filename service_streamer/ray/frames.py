"""Messages on their way through Ray: what is large goes beside the pickle, where Ray stores it.

Ray copies the buffers of a pickle into its store, and gives views of them to who reads them there.
So a batch is one object: a pickle of what is small, and the buffers of what is large.
"""

from __future__ import annotations

import pickle
from pickle import PickleBuffer
from typing import Any

from ..workers.codec import PROTOCOL, Parts

#: A message: the pickle, and what lies beside it, if anything does.
Frame = bytes | tuple[bytes, list[Any]]


#: Keeps a large value as parts, for Ray to take their buffers when the message is sent. Copied at
#: once: a caller may change its item as soon as that has been accepted, and a model may use the
#: memory of its results again.
keep = Parts.copy


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
