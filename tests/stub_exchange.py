"""HTTP without a network: a request for what answers it, and a client of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from service_streamer.serve.http.access_log import AccessLog
from service_streamer.serve.http.connection import Connection, Listeners
from service_streamer.serve.http.exchange import Disconnected, Headers
from service_streamer.serve.http.slow_readers import SlowReaders

__all__ = ["StubClient", "StubExchange"]


class StubExchange:
    """An ``Exchange`` whose body is there.

    Args:
        on_part: called with all parts that have been sent, after each of them.

    Attributes:
        parts: of the answer.
        status: of the answer; 0 before it.
    """

    def __init__(
        self,
        headers: Headers = (),
        body: bytes = b"{}",
        on_part: Callable[[list[bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self.headers = headers
        self.is_read = True
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        self.key = self.model = ""
        self.request_id = "stub"
        self.status = 0
        self.parts: list[bytes] = []
        self._body = body
        self._on_part = on_part

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def more(self) -> bytes:
        return self.take()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.parts.append(body)

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        self.answer(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self.status = status

    async def write(self, part: bytes) -> None:
        if self.is_gone:
            raise Disconnected
        self.parts.append(part)
        if self._on_part is not None:
            await self._on_part(self.parts)

    async def end(self, part: bytes = b"") -> None:
        await self.write(part)

    def leave(self) -> None:
        """The client disconnects."""
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


class StubClient(asyncio.Transport):
    """A client, and the transport between it and a connection of the service.

    Args:
        application: answers the exchanges.

    Attributes:
        received: all that the service has sent.
        is_closed: whether the service has closed the connection.
        is_read: whether the service reads what is sent.
        unread: bytes of answers that the client has not read, as the service sees it.
        late: how often the service has written after it had closed the connection.
    """

    def __init__(
        self,
        application: Any,
        readers: SlowReaders | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        super().__init__()
        self.received = b""
        self.is_closed = False
        self.is_read = True
        self.unread = self.late = 0
        self.listeners = Listeners(
            application, readers or SlowReaders(30.0, 1 << 20), access_log=access_log
        )
        self.connection = Connection(self.listeners)
        self.connection.connection_made(self)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def leave(self) -> None:
        """Disconnect."""
        self.is_closed = True
        self.connection.connection_lost(None)

    def stop_reading(self) -> None:
        self.connection.pause_writing()

    def read_on(self) -> None:
        self.connection.resume_writing()

    # -- the transport's

    def write(self, data: Any) -> None:
        if self.is_closed:
            self.late += 1
        else:
            self.received += bytes(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
