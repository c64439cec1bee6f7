"""Encode items and results to bytes, and decode untrusted bytes.

msgpack supports these types, and restores them exactly:

    None, bool, int (up to 1 KiB), float, complex, str (lone surrogates, too), bytes
    list, tuple, dict (in order, with any hashable supported keys), nested 1000 deep
    set and frozenset of hashable supported values
    date, time, datetime, timedelta, timezone, ZoneInfo; another tzinfo becomes its offset then
    numpy arrays and scalars of bools, numbers, text, bytes, datetime64 and timedelta64
    dense torch tensors: detached, in the CPU's memory, C order

bytearray and memoryview become bytes. All other types, including subclasses, are refused. numpy and
torch are imported only to decode their values.

Types unknown to msgpack are packed as a list of a mark (extension 1), a kind and their parts. So
arrays are not copied first, and nested tuples do not recurse in the unpacker.
"""

from __future__ import annotations

import math
import pickle
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from importlib import import_module
from itertools import islice
from pathlib import PurePath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from msgpack import ExtType, Packer, Unpacker, unpackb

from ..errors import BadMessage
from ..reporting import summary
from ..workers.codec import Codec


class WireCodec(Codec):
    """Encodes items and results to bytes and back. Any thread.

    ``encode`` raises TypeError or ValueError, which say what cannot be encoded, and where.
    ``decode`` raises ValueError: the payload is malformed in any way.
    """

    name: str

    def refuse_item(self, error: BaseException, advice: str = "") -> BadMessage:  # noqa: ARG002
        return BadMessage(f"the item cannot be decoded: {summary(error)}")


class MsgpackCodec(WireCodec):
    """Supports the types above. Decoding untrusted bytes is safe."""

    name = "msgpack"

    def encode(self, item: Any) -> bytes:
        try:
            return _pack(item)
        except Exception as error:
            advice = 'pass plain data, or use serializer="pickle" with a secret'
            raise _refusal(item, error, _pack, advice) from error.with_traceback(None)

    def decode(self, payload: bytes) -> Any:
        try:
            check_complete(payload)
            return unpackb(
                payload,
                ext_hook=_mark,
                list_hook=_list,
                strict_map_key=False,
                unicode_errors="surrogatepass",
            )
        except Exception as error:
            raise ValueError(f"cannot be unpacked: {type(error).__name__}: {error}") from error


def check_complete(payload: bytes | memoryview) -> None:
    """Check that a payload is complete: msgpack allocates lists by their claimed lengths.

    Raises:
        Exception: it is incomplete, or not msgpack.
    """
    if len(payload) > _UNCHECKED:
        unpacker = Unpacker(max_buffer_size=len(payload))
        unpacker.feed(payload)
        unpacker.skip()


class PickleCodec(WireCodec):
    """Supports everything that pickles. Decode verified payloads only: they may run any code."""

    name = "pickle"

    def encode(self, item: Any) -> bytes:
        try:
            return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except (Exception, SystemExit) as error:
            why = "pass something that pickles"
            raise _refusal(item, error, pickle.dumps, why) from error.with_traceback(None)

    def decode(self, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot be unpickled: {type(error).__name__}: {error}") from error


#: First element of a list that stands for another type. Compared by identity.
_MARK = b"service_streamer"
_MARK_EXTENSION = ExtType(1, b"")
#: Kinds after the mark.
_TUPLE, _INT, _COMPLEX, _DATE, _TIME, _DATETIME, _TIMEDELTA, _TIMEZONE, _ZONE = range(9)
_ARRAY, _SCALAR, _TENSOR, _SET, _FROZENSET = range(9, 14)
_LONGEST_INT = 1024  # bytes; longer ones are slow to multiply or print
_UNCHECKED = 1024  # bytes; lists in so few bytes cannot claim much memory
_PACKER_KEPT = 1 << 18  # bytes; a packer keeps the memory of its largest item
_TRIES = 10_000  # parts of an item that are tried to find the bad one
_NUMPY_DTYPE = re.compile(  # lengths or units of 0 can do harm
    r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[US][1-9][0-9]{0,8}"
    r"|[mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_TORCH_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)")
_ZONE_KEY = re.compile(r"(?=.{1,64}\Z)[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")  # becomes a path
#: Idle packers: making one costs as much as packing a small item.
_packers: list[Any] = []


def _pack(item: Any) -> bytes:
    try:
        packer = _packers.pop()
    except IndexError:
        packer = Packer(default=_default, strict_types=True, unicode_errors="surrogatepass")
    payload: bytes = packer.pack(item)
    if len(payload) <= _PACKER_KEPT:
        _packers.append(packer)
    return payload


def _default(value: Any) -> list[Any]:
    """The list that stands for a value of a type unknown to msgpack."""
    kind = type(value)
    if kind in _ENCODERS:
        return [_MARK_EXTENSION, *_ENCODERS[kind](value)]
    # If they are not imported, no value is theirs.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if kind is getattr(numpy, "ndarray", None):
        return [_MARK_EXTENSION, *_encode_array(numpy, value)]
    if kind is getattr(getattr(value, "dtype", None), "type", None):
        return [_MARK_EXTENSION, *_encode_scalar(numpy, value)]
    if kind is getattr(torch, "Tensor", None):
        return [_MARK_EXTENSION, *_encode_tensor(torch, value)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{name} is not supported{_instead(value)}")


def _instead(value: Any) -> str:
    """What to send instead of an unsupported value."""
    if is_dataclass(value):
        return ": send dataclasses.asdict(...) of it"
    if isinstance(value, Enum):
        return ": send its .value"
    if isinstance(value, (list, tuple, dict, str, int, float, bytes)):
        kind = next(kind for kind in type(value).__mro__ if kind.__module__ == "builtins")
        return f": send {kind.__name__}(...) of it"
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return ": send numpy.asarray(...) of it, or the bytes of its file"
    if hasattr(value, "model_dump"):  # pydantic's
        return ": send its .model_dump()"
    if isinstance(value, (Decimal, UUID, PurePath)):
        return ": send str(...) of it"
    return ""


def _encode_int(value: int) -> list[Any]:
    size = value.bit_length() // 8 + 1
    if size > _LONGEST_INT:
        raise ValueError(f"an int of {size} bytes is too long; the limit is {_LONGEST_INT}")
    return [_INT, value.to_bytes(size, "big", signed=True)]


def _encode_time(value: Any) -> list[Any]:
    zone = value.tzinfo
    if not (zone is None or type(zone) is timezone or (type(zone) is ZoneInfo and zone.key)):
        zone = timezone(value.utcoffset())
    text = value.replace(tzinfo=None).isoformat()
    return [_DATETIME if type(value) is datetime else _TIME, text, value.fold, zone]


_ENCODERS: dict[type, Callable[[Any], list[Any]]] = {
    tuple: lambda value: [_TUPLE, *value],
    int: _encode_int,
    complex: lambda value: [_COMPLEX, value.real, value.imag],
    date: lambda value: [_DATE, value.isoformat()],
    time: _encode_time,
    datetime: _encode_time,
    timedelta: lambda value: [_TIMEDELTA, value.days, value.seconds, value.microseconds],
    timezone: lambda value: [_TIMEZONE, *value.__getinitargs__()],
    ZoneInfo: lambda value: [_ZONE, value.key],
    set: lambda value: [_SET, *value],
    frozenset: lambda value: [_FROZENSET, *value],
}


def _encode_array(numpy: Any, array: Any) -> list[Any]:
    name = array.dtype.str
    if not _NUMPY_DTYPE.fullmatch(name) or numpy.dtype(name) != array.dtype:
        raise TypeError(f"numpy dtype {array.dtype} is not supported")
    order = "F" if array.flags.fnc else "C"
    flat = numpy.ascontiguousarray(array.T if order == "F" else array).reshape(-1)
    return [_ARRAY, name, order, list(array.shape), memoryview(flat.view(numpy.uint8))]


def _encode_scalar(numpy: Any, scalar: Any) -> list[Any]:
    array = numpy.asarray(scalar)
    if array.dtype.kind in "US" and array[()] != scalar:
        raise TypeError("numpy text that ends in zeros is not supported")
    return [_SCALAR, array]


def _encode_tensor(torch: Any, tensor: Any) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or not _TORCH_DTYPE.fullmatch(name):
        raise TypeError(f"a tensor of {tensor.dtype} and {tensor.layout} is not supported")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [_TENSOR, name, list(tensor.shape), memoryview(flat.view(torch.uint8).numpy())]


def _mark(code: int, data: bytes) -> bytes:
    if code != _MARK_EXTENSION.code or data:
        raise ValueError(f"extension {code} is unknown")
    return _MARK


def _list(items: list[Any]) -> Any:
    if not items or items[0] is not _MARK:
        return items
    return _DECODERS[items[1]](*items[2:])


def _decode_int(data: bytes) -> int:
    if len(data) > _LONGEST_INT:
        raise ValueError("an int is too long")
    return int.from_bytes(data, "big", signed=True)


def _decode_zone(key: str) -> ZoneInfo:
    if not _ZONE_KEY.fullmatch(key):
        raise ValueError(f"invalid time zone: {reprlib.repr(key)}")
    return ZoneInfo(key)


def _decode_array(name: str, order: Any, shape: Any, data: bytes) -> Any:
    numpy = _imported("numpy", _NUMPY_DTYPE, name)
    dtype = numpy.dtype(name)
    _check_data(shape, dtype.itemsize, data, boolean=dtype.kind == "b")
    if data and dtype.kind == "U" and numpy.frombuffer(data, f"{name[0]}u4").max() > sys.maxunicode:
        raise ValueError("the text has invalid characters")
    return numpy.ndarray(shape, dtype, data, order=order).copy("K")  # the data itself is read-only


def _decode_tensor(name: str, shape: Any, data: bytes) -> Any:
    torch = _imported("torch", _TORCH_DTYPE, name)
    dtype = getattr(torch, name)
    _check_data(shape, dtype.itemsize, data, boolean=name == "bool")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _imported(package: str, dtypes: re.Pattern[str], dtype: str) -> Any:
    """Import the package of a dtype."""
    if not dtypes.fullmatch(dtype):
        raise ValueError(f"unsupported dtype: {reprlib.repr(dtype)}")
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f"it has data of {package}, which is not installed here: {error}"
        ) from error


def _check_data(shape: Any, itemsize: int, data: Any, *, boolean: bool) -> None:
    """Check that the data fill the shape, before anything is allocated for it."""
    if (
        type(shape) is not list
        or len(shape) > 64  # numpy's limit
        or any(type(length) is not int or length < 0 for length in shape)
        or type(data) is not bytes
        or math.prod(shape) * itemsize != len(data)
        or (boolean and data.translate(None, b"\0\1"))
    ):
        raise ValueError("dtype, shape and data do not match")


_DECODERS: dict[int, Callable[..., Any]] = {
    _TUPLE: lambda *items: items,
    _INT: _decode_int,
    _COMPLEX: complex,
    _DATE: date.fromisoformat,
    _TIME: lambda text, fold, tz: time.fromisoformat(text).replace(fold=fold, tzinfo=tz),
    _DATETIME: lambda text, fold, tz: datetime.fromisoformat(text).replace(fold=fold, tzinfo=tz),
    _TIMEDELTA: timedelta,
    _TIMEZONE: timezone,
    _ZONE: _decode_zone,
    _ARRAY: _decode_array,
    _SCALAR: lambda array: array[()],
    _TENSOR: _decode_tensor,
    _SET: lambda *items: set(items),
    _FROZENSET: lambda *items: frozenset(items),
}


def _refusal(item: Any, error: BaseException, encode: Any, advice: str) -> Exception:
    """The error for an item: what is wrong, where in it, and what to do."""
    if "recursion" in str(error):
        return ValueError("the item contains itself or is nested too deeply")
    path, parts = "item", islice(_parts(item), _TRIES)
    while step := next(parts, None):
        form, key, part = step
        try:
            encode(part)
        except (Exception, SystemExit) as failure:
            path, error = form.format(path, reprlib.repr(key)), failure
            parts = islice(_parts(part), _TRIES)
    wrong_type = isinstance(error, (TypeError, AttributeError, pickle.PicklingError))
    text = f"{path} cannot be encoded: {str(error) or type(error).__name__}; {advice}"
    return TypeError(text) if wrong_type else ValueError(text)


def _parts(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a container, each with a format of its path, and its key."""
    listed = enumerate(value) if type(value) in (list, tuple) else ()
    for key, part in list(value.items()) if type(value) is dict else listed:
        yield "the key {1} of {0}", key, key
        yield "{0}[{1}]", key, part
