"""How numpy's plain arrays travel: as numpy pickles them, but in half the time.

numpy looks its dtype and two functions up by name, for each array. What is no plain array (one of
objects, dates or structures, in another order than C's, of a subclass) is pickled by numpy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

__all__ = ["reducers"]

#: The kinds of dtype that a name says all about, and that can be had as bytes.
_PLAIN = frozenset("biufc")


def reducers(numpy: Any) -> dict[type, Callable[[Any], Any]]:
    """By class, for a pickler's ``dispatch_table``. AttributeError: it is not loaded yet."""
    return {numpy.ndarray: _reduce}


def _reduce(array: Any) -> Any:
    dtype = array.dtype
    is_plain = dtype.kind in _PLAIN and dtype.isbuiltin == 1 and dtype.metadata is None
    if is_plain and array.size and array.flags.c_contiguous:
        return _array, (pickle.PickleBuffer(array), dtype.str, array.shape)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _array(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype).reshape(shape)
