"""Compressed bodies: gzip and deflate, within the limit of a body."""

from __future__ import annotations

import functools
import gzip
import json
import zlib

import pytest

from http_in_process import StubClient, StubStreamer, in_still_time, post, run, serving

pytestmark = pytest.mark.no_gevent

MOST = 1 << 20
BAD = (400, "invalid_content_encoding")
TOO_LARGE = (413, "request_too_large")
UNKNOWN = (415, "unsupported_content_encoding")

packed = functools.partial(gzip.compress, mtime=0)
#: As long as what is in it, and 23 bytes more.
stored = functools.partial(packed, compresslevel=0)


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def sized(size: int) -> bytes:
    """A request for the model that has so many bytes."""
    empty = len(b'{"inputs": ""}')
    return b'{"inputs": "%b"}' % (b"a" * (size - empty))


TEXT = b'{"inputs": "%b"}' % (b"hello " * 50)
HALVES = packed(TEXT[:99]) + packed(TEXT[99:])


def result(body: bytes, coding: bytes, most: int = MOST) -> bytes | tuple[int, str]:
    """The request that the model got, or status and code of the refusal."""

    async def main() -> tuple[int, bytes]:
        async with serving(StubStreamer(), max_body=most) as application:
            request = post(body, b"content-encoding:%b\r\n" % coding, b"/predict")
            return await StubClient(application.site).ask(request)

    status, answer = run(main())
    if status == 200:
        return b'{"inputs": %b}' % answer
    return status, json.loads(answer)["error"]["code"]


def str_of_coding(value: object) -> str:
    """Short names of cases; bodies have none."""
    return value.decode() if value in (b"gzip", b"deflate", b"br") else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "coding", "expected"),
    [
        (packed(TEXT), b"gzip", TEXT),
        (packed(TEXT), b" X-GZIP ", TEXT),
        (zlib.compress(TEXT), b"deflate", TEXT),
        (packed(b""), b"gzip", (400, "invalid_json")),
        (TEXT, b"identity", TEXT),
        (packed(sized(MOST)), b"gzip", sized(MOST)),
        (packed(sized(MOST + 1)), b"gzip", TOO_LARGE),
        (packed(sized(100 * MOST)), b"gzip", TOO_LARGE),
        (packed(TEXT), b"br", UNKNOWN),
        (packed(packed(TEXT)), b"gzip, gzip", UNKNOWN),
        (packed(TEXT), b"gzip, identity", UNKNOWN),
        (TEXT, b"gzip", BAD),
        (TEXT, b"deflate", BAD),
        (b"", b"gzip", BAD),
        (packed(TEXT)[:-1], b"gzip", BAD),
        (packed(TEXT) + b"x", b"gzip", BAD),
        (HALVES, b"gzip", TEXT),
        (packed(b"") + packed(TEXT) + packed(b""), b"gzip", TEXT),
        (packed(sized(MOST)[:-1]) + packed(b"}"), b"gzip", sized(MOST)),
        (packed(sized(MOST)) + packed(b" "), b"gzip", TOO_LARGE),
        (packed(b"") * 999 + packed(TEXT), b"gzip", TEXT),
        (packed(b"") * 1000 + packed(TEXT), b"gzip", BAD),
        (HALVES[:-1], b"gzip", BAD),
        (packed(TEXT) + zlib.compress(TEXT), b"gzip", BAD),
        (zlib.compress(TEXT) * 2, b"deflate", BAD),
        (packed(TEXT), b"deflate", BAD),
        (raw_deflate(TEXT), b"deflate", BAD),
        (packed(bytes(range(256)) * 1000)[:-9] + b"x" * 9, b"gzip", BAD),
    ],
    ids=str_of_coding,
)
def test_compressed_body_is_read_or_refused(
    body: bytes, coding: bytes, expected: bytes | tuple[int, str]
) -> None:
    assert result(body, coding) == expected


@pytest.mark.parametrize("size", [(64 << 10) - 1, 64 << 10, (64 << 10) + 1, 300_000])
@pytest.mark.parametrize("over", [0, 1])
def test_bound_of_what_comes_out_is_exact(size: int, over: int) -> None:
    body = sized(size + over)
    assert result(packed(body), b"gzip", size) == (TOO_LARGE if over else body)


@pytest.mark.parametrize("size", [4000, 4068, 4070, 4072, 4074, 4076, 4078, 8192, 100_000])
def test_members_of_gzip_may_end_anywhere(size: int) -> None:
    body = sized(2 * size + 300)
    members = (body[:size], body[size : size + 300], body[size + 300 :])
    assert result(b"".join(map(stored, members)), b"gzip") == body


@in_still_time
async def test_unsupported_coding_is_named_with_those_that_are_supported() -> None:
    twice = b"content-encoding: gzip\r\ncontent-encoding: gzip\r\n"
    async with serving(StubStreamer()) as application:
        client = StubClient(application.site)
        for headers, name in ((b"content-encoding: br\r\n", "'br'"), (twice, "'gzip, gzip'")):
            status, answer = await client.ask(post(packed(TEXT), headers, b"/predict"))
            assert status == 415
            assert name in json.loads(answer)["error"]["message"]
            assert b"accept-encoding: gzip, deflate, identity\r\n" in client.received


@pytest.mark.parametrize(
    ("coding", "status"), [(b"gzip, chunked", 501), (b"chunked", 200), (b" Chunked", 200)]
)
@in_still_time
async def test_transfer_coding_is_chunked_or_refused(coding: bytes, status: int) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: a\r\ntransfer-encoding:%b\r\n\r\n" % coding
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT), TEXT)
    async with serving(StubStreamer()) as application:
        client = StubClient(application.site)
        assert (await client.ask(head + chunks))[0] == status
