"""Tensors as numpy arrays: the one module that needs numpy. Pure.

Binary data is little-endian and row-major, and becomes a view of the request's own memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from ...errors import BadModelOutput
from .nested_lists import flat_numbers, pieces

_DTYPES = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
#: The upper halves of float32, which numpy has no type for.
_BF16 = np.dtype("<u2")

_DATATYPES = {dtype: name for name, dtype in _DTYPES.items()}

#: Bytes that are sooner copied than made a view of.
_SMALL = 4096

#: Numbers that are converted at once, in about 2 ms: other threads get the interpreter's lock then.
_PIECE = 16 << 10

_encode = msgspec.json.Encoder().encode

_NUMBERS = frozenset((int, float, bool))
_PLAIN = _NUMBERS | {list, tuple}


def array_of_bytes(datatype: str, shape: Sequence[int], data: memoryview) -> Any:
    """The elements as an array: a read-only view, but of BF16 a float32 copy.

    Raises:
        ValueError: the data is not as long as the shape says.
    """
    dtype = _BF16 if datatype == "BF16" else _DTYPES[datatype]
    size = dtype.itemsize * math.prod(shape)
    if len(data) != size:
        raise ValueError(f"its {len(data)} bytes are not the {size} of shape {[*shape]}")
    array = np.frombuffer(data, dtype)
    if datatype == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(shape)


def array_of_json(datatype: str, shape: Sequence[int], data: msgspec.Raw) -> Any:
    """The elements of a list, which may be nested, as an array.

    Raises:
        ValueError: they are of another type or number.
    """
    flat, decode = (
        flat_numbers(bytes(data), math.prod(shape), len(shape)),
        _decoder(datatype).decode,
    )
    found = []
    for piece in pieces(flat):
        try:
            values = decode(piece)
        except msgspec.DecodeError as error:
            if type(error) is msgspec.DecodeError:  # it was valid until it became flat
                raise ValueError("data: must be numbers, in lists that are not empty") from None
            text = str(error) if len(piece) == len(flat) else str(error).partition(" - at ")[0]
            raise ValueError(f"data: {_lower(text)}") from None
        found.append(_converted(datatype, values))
    return _shaped(found[0] if len(found) == 1 else np.concatenate(found), shape)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


@functools.cache
def _decoder(datatype: str) -> msgspec.json.Decoder[Any]:
    kind = _DTYPES[datatype].kind
    element: Any = bool if kind == "b" else float if kind == "f" else int
    return msgspec.json.Decoder(list[element])


def array_of(datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Any:
    """Numbers, at least one, as an array.

    Raises:
        ValueError: they are out of range, or their number is another.
    """
    found = [
        _converted(datatype, values[start : start + _PIECE])
        for start in range(0, len(values), _PIECE)
    ]
    return _shaped(found[0] if len(found) == 1 else np.concatenate(found), shape)


def _converted(datatype: str, values: Sequence[Any]) -> Any:
    dtype = _DTYPES[datatype]
    try:
        if dtype.kind == "f":
            with np.errstate(over="raise"):
                return np.array(values, dtype)
        return np.array(values, dtype)
    except (OverflowError, FloatingPointError):
        raise ValueError(f"a number is out of the range of {datatype}") from None


def _shaped(array: Any, shape: Sequence[int]) -> Any:
    size = math.prod(shape)
    if array.size != size:
        raise ValueError(f"its {array.size} elements are not the {size} of shape {[*shape]}")
    return array.reshape(shape)


def array_of_texts(shape: Sequence[int], elements: Sequence[Any]) -> Any:
    """Texts or bytes as an array of objects."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def rows_of(array: Any) -> list[Any]:
    """Views of the rows: of a tensor of one dimension arrays without dimensions."""
    return [array[row, ...] for row in range(len(array))]


def stacked(results: Sequence[Any]) -> tuple[str, Any] | None:
    """Results that are numbers or arrays as the rows of one array, behind its datatype.

    Returns:
        None if they are none, if they differ in shape or type, or if the protocol has no such type.
    """
    first = results[0]
    kind = type(first)
    if kind in _NUMBERS:
        kinds = set(map(type, results))
        if not (kinds <= {int, float} or kinds == {bool}):
            return None
    elif kind in (list, tuple):
        if not _are_numbers(results):
            return None
    elif not hasattr(first, "__array__"):
        return None
    try:
        if kind not in _PLAIN:
            array = _joined([np.asarray(each) for each in results])
        else:
            array = np.array(results)
    except (ValueError, TypeError, OverflowError):
        return None
    if array is None:
        return None
    dtype = array.dtype
    datatype = _DATATYPES.get(dtype) or _DATATYPES.get(dtype.newbyteorder("<"))
    return None if datatype is None else (datatype, array)


def _joined(arrays: list[Any]) -> Any:
    """Arrays of one shape and type as rows; None if they are not alike."""
    kinds = {(each.shape, each.dtype) for each in arrays}
    if len(kinds) != 1:
        return None
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _are_numbers(results: Iterable[Any]) -> bool:
    """Whether lists have numbers, and no booleans, which numpy would take for numbers beside them.

    It does not look at each number: the innermost lists are judged by the set of their types.
    """
    kinds: set[type] = set()
    lists: list[Any] = [*results]
    while lists:
        inner: list[Any] = []
        for each in lists:
            if type(each) not in (list, tuple):
                return False
            types = set(map(type, each))
            if types <= {list, tuple}:
                inner += each
            else:
                kinds |= types
        lists = inner
    return bool(kinds) and (kinds <= {int, float} or kinds == {bool})


def cast(array: Any, datatype: str, name: str) -> Any:
    """An output as its declared type.

    Raises:
        BadModelOutput: that would not do for what the model has returned.
    """
    dtype = np.dtype("<f4") if datatype == "BF16" else _DTYPES[datatype]
    if array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, "same_kind") and not (
        array.dtype.kind in "iu" and dtype.kind in "iuf"
    ):
        raise BadModelOutput(
            f"the output {name!r} is declared as {datatype}, but the model returned {array.dtype}"
        )
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def bytes_of(array: Any, datatype: str) -> bytes | memoryview:
    """The elements as binary data; without a copy if they lie so already."""
    if datatype == "BF16":
        halves = np.ascontiguousarray(array, "<f4").view("<u4") >> 16
        return halves.astype("<u2").tobytes()
    if array.dtype not in _DATATYPES or not array.flags.c_contiguous:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if array.nbytes < _SMALL:
        raw: bytes = array.tobytes()
        return raw
    view: memoryview = array.reshape(-1).view(np.uint8).data
    return view
