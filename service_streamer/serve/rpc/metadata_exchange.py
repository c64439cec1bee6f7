"""A call of gRPC in the place of a request over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..http.exchange import Headers
from ..http.http_exchange import find_request_id, new_request_id

_FRAMING = ("content-length", "transfer-encoding")


class MetadataExchange:
    """An ``Exchange`` whose headers are the metadata of a call. gRPC reads and answers by itself.

    Headers of HTTP's framing are left out: they say nothing about the message.

    gRPC cancels the task of a client that has gone, so nothing is watched here.
    """

    is_read = True
    is_gone = False
    key = model = ""

    def __init__(self, metadata: Any) -> None:
        self.headers: Headers = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in metadata or ()
            if name not in _FRAMING
        ]
        self.on_gone: Callable[[], object] | None = None
        self._request_id = ""

    @property
    def request_id(self) -> str:
        if not self._request_id:
            self._request_id = (find_request_id(self.headers) or new_request_id()).decode()
        return self._request_id

    def take(self) -> bytes:
        return b""

    async def more(self) -> bytes:
        return b""

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        raise NotImplementedError

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        raise NotImplementedError

    def start(self, status: int, headers: Headers) -> None:
        raise NotImplementedError

    async def write(self, part: bytes) -> None:
        raise NotImplementedError

    async def end(self, part: bytes = b"") -> None:
        raise NotImplementedError
