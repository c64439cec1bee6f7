"""Bodies of JSON: small ones are read and written at once, large ones in threads, in pieces.

    a large body    ──▶  pieces, decoded one after the other   ──▶  request
    a large answer  ──▶  pieces, encoded one after the other   ──▶  as fast as the client reads

A thread that decodes 16 MB at once keeps the interpreter's lock for a second, and the event loop
waits as long. With pieces the lock changes hands between them.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ..v2.infer_answer import encode
from ..v2.nested_lists import pieces
from .exchange import Exchange, Headers
from .refusals import Refusal, undecodable

#: Bytes of JSON that are read in the event loop, and bytes as a worker sends them that are written
#: in it: both take some 10 ms. Four bytes of a number are 20 of JSON.
READ_AT_ONCE, WRITTEN_AT_ONCE = 1 << 20, 128 << 10

#: Bytes of a piece of JSON, and values that are about as much: they take some 2 ms. A value has
#: about so many bytes.
_PIECE, _VALUES, _LENGTH = 64 << 10, 4096, 16

#: How deep lists and dicts of a body are taken apart. Each level looks at all bytes once more.
_LEVELS = 4

#: It begins with fixed bytes, for which re looks fast: 16 MB that do not match take 0.2 s at most.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?<!\\\\u[dD])[89abAB]..(?:[^\\]|\\[^u]|\\u(?![dD][c-fC-F]))", re.DOTALL
)
_NO_NUMBERS = re.compile(rb'["{]')

#: Bytes of JSON that are sent at once. Up to so many, an answer says how long it is.
_CHUNK = 1 << 20

_decode: Callable[[Any], Any] = msgspec.json.Decoder().decode
_list_of: Callable[[Any], list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw]).decode
_dict_of: Callable[[Any], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
).decode


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes | memoryview) -> Any:
    """Decode a body, whose byte order mark is skipped. Raises Refusal."""
    body = body[3:] if body[:3] == b"\xef\xbb\xbf" else body
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body:
            raise undecodable(msgspec.DecodeError("it is empty")) from None
        if type(error) is msgspec.DecodeError and _HALF_PAIR.search(body):
            text = r"it has a lone surrogate, such as \ud83d; send whole pairs"
            raise undecodable(msgspec.DecodeError(text)) from None
        raise undecodable(error, getattr(decoder.type, "__struct_fields__", ())) from None


async def read_json(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a body. Raises Refusal."""
    if len(body) <= READ_AT_ONCE:
        return decoded(decoder, body)
    return await asyncio.to_thread(_decoded_in_pieces, decoder, body)


def _decoded_in_pieces(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return msgspec.convert(_in_pieces(body, _LEVELS), decoder.type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decoded(decoder, body)  # says what is wrong, and where


def _in_pieces(json: bytes | msgspec.Raw, levels: int) -> Any:
    text = bytes(json)
    if len(text) > _PIECE and levels:
        first = text[:256].lstrip()[:1]
        if first == b"{":
            return {name: _in_pieces(each, levels - 1) for name, each in _dict_of(json).items()}
        if first == b"[" and text.count(b"[") == 1 and not _NO_NUMBERS.search(text):
            return [each for piece in pieces(text.strip()) for each in _decode(piece)]
        if first == b"[":
            parts = _list_of(json)
            count = _PIECE * len(parts) // len(text)  # of small ones, which are a piece
            if count < 2:
                return [_in_pieces(each, levels - 1) for each in parts]
            groups = (parts[at : at + count] for at in range(0, len(parts), count))
            return [
                each
                for group in groups
                for each in _in_pieces(b"[%b]" % b",".join(group), levels - 1)
            ]
    return _decode(json)


class LargeAnswer:
    """A 200 whose JSON is sent in pieces, which are made as fast as the client reads them.

    Args:
        first, chunks: the first bytes of the JSON, and what makes the others, for a thread.
        headers: with Content-Type.
    """

    def __init__(
        self, first: bytes, chunks: Iterator[bytes], exchange: Exchange, headers: Headers
    ) -> None:
        self._first = first
        self._chunks = chunks
        self._exchange = exchange
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since, self._sent = self._loop.time(), 0

    def rate(self) -> float:
        """Bytes that the client reads in a second."""
        return self._sent / (1.0 + self._loop.time() - self._since)

    def end_if_slow(self, allowed: float) -> None:
        """Close the connection if the client has read for so many seconds."""
        if self._task is not None and self._loop.time() - self._since > allowed:
            self._task.cancel()

    async def send_to(self, refuse: Callable[[Exception], Refusal]) -> Refusal | None:
        """Send all of it. The connection is closed before the end if a part of it is no JSON.

        Args:
            refuse: says what is wrong, also to the log.

        Returns:
            What it has said; None if all is well.

        Raises:
            Disconnected: the client has disconnected.
        """
        exchange, chunk, self._first = self._exchange, self._first, b""
        try:
            exchange.start(200, self._headers)
            while chunk:
                await exchange.write(chunk)
                self._sent += len(chunk)
                try:
                    chunk = await self._loop.run_in_executor(None, next, self._chunks, b"")
                except Exception as error:
                    return refuse(error)
            await exchange.end()
        finally:
            self._task = None  # whose frames hold this object: a cycle
        return None


class BinaryAnswer(NamedTuple):
    """An answer that is not JSON.

    Attributes:
        headers: with Content-Type.
    """

    body: bytes
    headers: Headers


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
    pieces_of_value = _pieces(make())
    del make  # and with it the results, of which a client that does not read leaves their JSON
    for piece in pieces_of_value:
        chunk.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)


def _pieces(value: Any) -> Iterator[bytes]:
    """A value as JSON: a large dict, list or array part by part."""
    size = _values_in(value)
    if size > _VALUES and isinstance(value, dict) and all(type(name) is str for name in value):
        opening = b"{"
        for name, each in value.items():
            yield b"%b%b:" % (opening, encode(name))
            yield from _pieces(each)
            opening = b","
        yield b"}"
    elif size > _VALUES and (isinstance(value, (list, tuple)) or _is_array(value)):
        count = max(1, _VALUES * len(value) // size)
        opening = b"["
        for at in range(0, len(value), count):
            yield opening
            if count == 1:
                yield from _pieces(value[at])
            else:
                yield encode(value[at : at + count])[1:-1]
            opening = b","
        yield b"]"
    else:
        piece = encode(value)
        del value  # a long text takes as much again, for as long as the client reads
        yield piece


def _values_in(value: Any) -> int:
    """About how many numbers and texts a value has; of a list its ends stand for all parts."""
    if isinstance(value, (list, tuple)):
        return len(value) * max(map(_values_in, (value[0], value[-1]))) if value else 1
    if isinstance(value, dict):
        return 1 + sum(map(_values_in, value.values()))
    if isinstance(value, str):
        return 1 + len(value) // _LENGTH
    return int(value.size) if _is_array(value) else 1


def _is_array(value: Any) -> bool:
    """Whether it is an array with a dimension. While numpy is not imported, no value is one."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.ndim > 0
