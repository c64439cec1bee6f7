"""Compressed bodies of requests: gzip and deflate, within the limit of a body.

A small body may be made to grow a thousandfold, so what comes out is bounded, and its larger part
is computed in a thread: the event loop goes on.
"""

from __future__ import annotations

import asyncio
import zlib

from .refusals import Refusal, too_large

#: Window sizes for zlib: of gzip, and of the zlib format, which HTTP calls deflate.
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}

#: For the header Accept-Encoding.
CODINGS = b"gzip, deflate, identity"

#: Bytes that are decompressed in the event loop, in about 0.2 ms.
_AT_ONCE = 64 << 10

#: Members of a gzip body, each of which costs about 2 µs even if it is empty. Arbitrary.
_MOST_MEMBERS = 1000

#: Bytes that zlib gets at once. It copies those behind the end of a member.
_PIECE = 4096


async def decompressed(body: bytes, coding: bytes, most: int) -> bytes:
    """A body without its compression.

    Args:
        coding: the header Content-Encoding.
        most: bytes that it may have.

    Raises:
        Refusal: 415, another compression, or several; 400, the body is not compressed that way;
            413, it is too large.
    """
    coding = coding.strip().lower()
    if coding in (b"identity", b""):
        return body
    window = _WINDOWS.get(coding)
    if window is None:
        shown = coding[:40].decode("latin-1")
        raise Refusal(
            415,
            "invalid_request_error",
            f"Content-Encoding: {shown!r} is not supported; compress the body once with gzip or "
            "deflate, or send it as it is",
            reason="invalid",
            param="Content-Encoding",
            code="unsupported_content_encoding",
            more=((b"accept-encoding", CODINGS),),
        )
    text = _decompress(body, window, _AT_ONCE) if len(body) <= _AT_ONCE else None
    if text is None or len(text) > _AT_ONCE:
        text = await asyncio.to_thread(_decompress, body, window, most)
    if len(text) > most:
        raise too_large(most)
    return text


def _decompress(body: bytes, window: int, most: int) -> bytes:
    """A body without its compression; not more than one byte beyond ``most``. Raises Refusal."""
    name, members = ("gzip", _MOST_MEMBERS) if window == 31 else ("deflate", 1)
    parts: list[bytes] = []
    size = place = 0
    for _ in range(members):
        stream = zlib.decompressobj(window)
        while not stream.eof:
            piece = body[place : place + _PIECE]
            try:
                part = stream.decompress(piece, most + 1 - size)
            except zlib.error:
                raise _malformed(f"is not in the format of {name}") from None
            if not piece and not part:
                raise _malformed(f"ends before the end of its {name} data")
            parts.append(part)
            size += len(part)
            if size > most:
                return b"".join(parts)
            place += len(piece) - len(stream.unconsumed_tail) - len(stream.unused_data)
        if place == len(body):
            return b"".join(parts)
    limit = f" (member limit: {members})" if members > 1 else ""
    raise _malformed(f"goes on after the end of its {name} data{limit}")


def _malformed(problem: str) -> Refusal:
    return Refusal(
        400,
        "invalid_request_error",
        f"the body {problem}, which the header Content-Encoding announces",
        reason="invalid",
        param="Content-Encoding",
        code="invalid_content_encoding",
    )
