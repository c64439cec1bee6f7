"""Compressed bodies: gzip and deflate, within the limit of a body."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from serve_process import Serving
from service_streamer.serve.http.content_coding import decompressed
from service_streamer.serve.http.refusals import Refusal

pytestmark = pytest.mark.no_gevent

TEXT = b"hello " * 50
MOST = 1 << 20


def result(body: bytes, coding: bytes, most: int = MOST) -> bytes | int:
    """What comes out, or the status of the refusal."""
    try:
        return asyncio.run(decompressed(body, coding, most))
    except Refusal as refusal:
        return refusal.status


packed = functools.partial(gzip.compress, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


def str_of_coding(value: object) -> str:
    """Short names of cases; bodies have none."""
    return value.decode() if value in (b"gzip", b"deflate", b"br") else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "coding", "expected"),
    [
        (packed(TEXT), b"gzip", TEXT),
        (packed(TEXT), b" X-GZIP ", TEXT),
        (zlib.compress(TEXT), b"deflate", TEXT),
        (packed(b""), b"gzip", b""),
        (TEXT, b"identity", TEXT),
        (packed(b"a" * MOST), b"gzip", b"a" * MOST),
        (packed(b"a" * (MOST + 1)), b"gzip", 413),
        (packed(b"a" * (100 * MOST)), b"gzip", 413),
        (packed(TEXT), b"br", 415),
        (packed(packed(TEXT)), b"gzip, gzip", 415),
        (packed(TEXT), b"gzip, identity", 415),
        (TEXT, b"gzip", 400),
        (TEXT, b"deflate", 400),
        (b"", b"gzip", 400),
        (packed(TEXT)[:-1], b"gzip", 400),
        (packed(TEXT) + b"x", b"gzip", 400),
        (packed(TEXT) * 2, b"gzip", 400),
        (packed(TEXT), b"deflate", 400),
        (raw_deflate(TEXT), b"deflate", 400),
        (packed(bytes(range(256)) * 1000)[:-9] + b"x" * 9, b"gzip", 400),
    ],
    ids=str_of_coding,
)
def test_bodies(body: bytes, coding: bytes, expected: bytes | int) -> None:
    assert result(body, coding) == expected


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 300_000])
@pytest.mark.parametrize("over", [0, 1])
def test_the_bound_is_exact(size: int, over: int) -> None:
    body = packed(bytes(size + over))
    assert result(body, b"gzip", size) == (413 if over else bytes(size))


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with Serving("served_models:kinds", "--max-body", "100k") as service:
        yield service


def test_a_service_takes_compressed_bodies(service: Serving, wording: Callable[..., None]) -> None:
    body = json.dumps({"inputs": "a"}).encode()
    for coding, compressed in (("gzip", packed(body)), ("deflate", zlib.compress(body))):
        answer = service.post("/predict", compressed, content_encoding=coding)
        assert answer.json() == "str 'a'"
    bomb = packed(b" " * (64 << 20))
    assert len(bomb) < 100 << 10
    assert service.post("/predict", bomb, content_encoding="gzip").status_code == 413
    answer = service.post("/predict", body, content_encoding="br")
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, identity"
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    malformed = service.post("/predict", body, content_encoding="gzip")
    assert malformed.status_code == 400
    wording(*(each.json()["error"]["message"] for each in (answer, malformed)))
    twice = httpx.Headers([("content-encoding", "gzip"), ("content-encoding", "gzip")])
    answer = service.client.post("/predict", content=packed(body), headers=twice)
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("coding", "status"), [(b"gzip, chunked", b"501"), (b"chunked", b"200"), (b" Chunked", b"200")]
)
def test_transfer_codings(service: Serving, coding: bytes, status: bytes) -> None:
    url = httpx.URL(service.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as sock:
        body = b'{"inputs": 1}'
        sock.sendall(
            b"POST /predict HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding:%b"
            b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (coding, len(body), body)
        )
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 " + status)
