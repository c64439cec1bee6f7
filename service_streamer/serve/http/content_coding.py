"""Compressed bodies of requests: gzip and deflate, within the limit of a body.

A small body may be made to grow a thousandfold, so what comes out is bounded, and its larger part
is computed in a thread: the event loop goes on.
"""

from __future__ import annotations

import asyncio
import zlib

from .refusals import Refusal, too_large

__all__ = ["CODINGS", "decompressed"]

#: Window sizes for zlib: of gzip, and of the zlib format, which HTTP calls deflate.
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}

#: For the header Accept-Encoding.
CODINGS = b"gzip, deflate, identity"

#: Bytes that are decompressed in the event loop, in about 0.2 ms.
_AT_ONCE = 64 << 10


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
    name = "gzip" if window == 31 else "deflate"
    stream = zlib.decompressobj(window)
    try:
        part = stream.decompress(body, min(_AT_ONCE, most + 1))
        if not stream.eof and stream.unconsumed_tail and len(part) <= most:
            left = most + 1 - len(part)
            part += await asyncio.to_thread(stream.decompress, stream.unconsumed_tail, left)
    except zlib.error:
        raise _malformed(f"is not in the format of {name}") from None
    if len(part) > most:
        raise too_large(most)
    if not stream.eof:
        raise _malformed(f"ends before the end of its {name} data")
    if stream.unused_data:
        raise _malformed(f"goes on after the end of its {name} data")
    return part


def _malformed(problem: str) -> Refusal:
    return Refusal(
        400,
        "invalid_request_error",
        f"the body {problem}, which the header Content-Encoding announces",
        reason="invalid",
        param="Content-Encoding",
        code="invalid_content_encoding",
    )
