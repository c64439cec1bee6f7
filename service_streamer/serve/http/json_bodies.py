"""Bodies of JSON: small ones are read and written at once, large ones in threads, in pieces.

    a large body    ──▶  pieces, decoded one after the other   ──▶  request
    a large answer  ──▶  pieces, encoded one after the other   ──▶  as fast as the client reads

A thread that decodes 16 MB at once keeps the interpreter's lock for a second, and the event loop
waits as long. With pieces the lock changes hands between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from .refusals import Refusal, undecodable

if TYPE_CHECKING:
    from .exchange import Exchange, Headers

__all__ = [
    "READ_AT_ONCE",
    "WRITTEN_AT_ONCE",
    "JSONAnswer",
    "LargeAnswer",
    "decoded",
    "encode",
    "plain",
    "read_json",
    "write_json",
]

#: Bytes of JSON that are read in the event loop, and bytes as a worker sends them that are written
#: in it: both take some 10 ms. Four bytes of a number are 20 of JSON.
READ_AT_ONCE, WRITTEN_AT_ONCE = 1 << 20, 128 << 10

#: Bytes of a piece of JSON, and numbers that are about as much: they take some 2 ms.
_PIECE, _NUMBERS = 64 << 10, 4096

#: Bytes of JSON that are sent at once. Up to so many, an answer says how long it is.
_CHUNK = 1 << 20

_CONTAINERS = (list, tuple, dict, msgspec.Struct)

_decode: Callable[[Any], Any] = msgspec.json.Decoder().decode
_list_of: Callable[[Any], list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw]).decode
_dict_of: Callable[[Any], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
).decode


def plain(value: Any) -> Any:
    """For ``msgspec``: numpy and torch values as lists and numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(
        f"the model's result has a {type(value).__name__}, which is not JSON; return plain data"
    )


#: A result as JSON.
encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=plain).encode


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes | memoryview) -> Any:
    """Decode a body. Raises Refusal."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body:
            raise undecodable(msgspec.DecodeError("it is empty")) from None
        raise undecodable(error, getattr(decoder.type, "__struct_fields__", ())) from None


async def read_json(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a body. Raises Refusal."""
    if len(body) <= READ_AT_ONCE:
        return decoded(decoder, body)
    return await asyncio.to_thread(_decoded_in_pieces, decoder, body)


def _decoded_in_pieces(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return msgspec.convert(_in_pieces(body), decoder.type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise undecodable(error, getattr(decoder.type, "__struct_fields__", ())) from None
        return decoded(decoder, body)  # says where in the body it is


def _in_pieces(json: bytes | msgspec.Raw) -> Any:
    text = memoryview(json)
    if len(text) > _PIECE:
        first = bytes(text[:256]).lstrip()[:1]
        if first == b"[":
            parts = _list_of(json)
            count = _PIECE * len(parts) // len(text)  # of small ones, which are a piece
            if count < 2:
                return [_in_pieces(each) for each in parts]
            groups = (parts[at : at + count] for at in range(0, len(parts), count))
            return [each for group in groups for each in _in_pieces(b"[%b]" % b",".join(group))]
        if first == b"{":
            return {name: _in_pieces(each) for name, each in _dict_of(json).items()}
    return _decode(json)


class LargeAnswer:
    """A 200 whose JSON is sent in pieces, which are made as fast as the client reads them.

    Args:
        chunks: the first and the other bytes of the JSON, made in a thread.
        headers: besides Content-Type.
    """

    outputs = 0  # of a stream

    def __init__(
        self, first: bytes, chunks: Iterator[bytes], exchange: Exchange, headers: Headers
    ) -> None:
        self._first = first
        self._chunks = chunks
        self._exchange = exchange
        self._headers = headers

    async def send_to(self, refuse: Callable[[Exception], Refusal]) -> Refusal | None:
        """Send all of it. The connection is closed before the end if a part of it is no JSON.

        Args:
            refuse: says what is wrong, also to the log.

        Returns:
            What it has said; None if all is well.

        Raises:
            Disconnected: the client has disconnected.
        """
        loop, exchange, chunk = asyncio.get_running_loop(), self._exchange, self._first
        exchange.start(200, self._headers)
        while chunk:
            await exchange.write(chunk)
            try:
                chunk = await loop.run_in_executor(None, next, self._chunks, b"")
            except Exception as error:
                return refuse(error)
        await exchange.end()
        return None


#: What an operation returns: the JSON, or what sends it.
JSONAnswer = bytes | LargeAnswer


async def write_json(make: Callable[[], Any], exchange: Exchange, headers: Headers) -> JSONAnswer:
    """A large value as JSON, in a thread.

    Args:
        make: makes it of what was computed: plain data, arrays and structs.
        headers: of the answer, if it is sent in pieces.

    Raises:
        TypeError: it has a part that is no JSON.
    """
    chunks = _chunks(make)
    first = await asyncio.to_thread(next, chunks)
    if len(first) < _CHUNK:
        return first
    return LargeAnswer(first, chunks, exchange, headers)


def _chunks(make: Callable[[], Any]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for piece in _pieces(make()):
        chunk.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)


def _pieces(value: Any) -> Iterator[bytes]:
    """A value as JSON: what a struct, a dict or a list has in it part by part."""
    names = getattr(value, "__struct_fields__", None)
    if names is not None:
        value = {name: getattr(value, name) for name in names}
    is_list = isinstance(value, (list, tuple))
    dimensions = 1 if is_list else getattr(value, "ndim", 0)
    if isinstance(value, dict) and value and all(type(name) is str for name in value):
        opening = b"{"
        for name, each in value.items():
            yield b"%b%b:" % (opening, encode(name))
            yield from _pieces(each)
            opening = b","
        yield b"}"
    elif not dimensions or not len(value):
        yield encode(value)
    elif dimensions > 1 or (is_list and _has_parts(value[0])):
        opening = b"["
        for each in value:
            yield opening
            yield from _pieces(each)
            opening = b","
        yield b"]"
    else:
        opening = b"["
        for at in range(0, len(value), _NUMBERS):
            yield opening + encode(value[at : at + _NUMBERS])[1:-1]
            opening = b","
        yield b"]"


def _has_parts(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or hasattr(value, "tolist")
