"""One request and its answer, as endpoints see them, whatever speaks HTTP.

``HTTPExchange`` is that of our own connections, ``asgi.py`` has that of any ASGI server.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from time import perf_counter
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import httptools

from .access_log import log_request

if TYPE_CHECKING:
    from .connection import Connection

#: Names in lower case.
Headers = Sequence[tuple[bytes, bytes]]


class Disconnected(Exception):
    """The client has disconnected: no answer can be sent."""


class Exchange(Protocol):
    """A request and its answer. Belongs to one task of one event loop.

    Attributes:
        headers: of the request.
        is_read: whether the whole body has arrived.
        is_gone: whether the client has disconnected.
        on_gone: called in the loop when the client disconnects before the answer is complete.
        key, model: names of the API key and of the model, for the access log; empty if unknown.
    """

    headers: Headers
    is_read: bool
    is_gone: bool
    on_gone: Callable[[], object] | None
    key: str
    model: str

    @property
    def request_id(self) -> str:
        """The client's X-Request-ID, or one made for the request. Every answer repeats it."""

    def take(self) -> bytes:
        """What has arrived of the body since the last time."""

    async def more(self) -> bytes:
        """Wait for more of the body; empty at its end. Raises Disconnected."""

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer. To a client that has gone it is dropped.

        Args:
            headers: besides those of the length, the date and the connection.
        """

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        """Answer before the body has arrived, and close the connection afterwards.

        Many clients read the answer only after they have sent everything. So the body is received
        and dropped.

        Args:
            most: bytes to drop at most.
        """

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in parts."""

    async def write(self, part: bytes) -> None:
        """Send a part, and wait while the client does not read. Raises Disconnected."""

    async def end(self, part: bytes = b"") -> None:
        """Send the last part. Raises Disconnected."""


#: Answers an exchange.
Application = Callable[[Exchange], Awaitable[None]]


#: Bytes of a body that wait to be taken; then the client has to wait.
_MOST_UNTAKEN = 64 << 10

#: Larger bodies, and parts of them, are not copied behind their head.
_LARGE = 64 << 10

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
#: Status of a request whose client disconnected before the end of the answer, as nginx has it.
_GONE = 499

#: Statuses of answers without a body.
_BODILESS = (204, 304)

_EXPECTATION = (b"expect", b"100-continue")


class _Date:
    """The header Date, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


date_line = _Date().line


#: Request ids appear in logs and answers: printable ASCII without spaces.
_SAFE_ID = re.compile(rb"[!-~]{1,128}")

#: A random word of this process and a counter: random bytes for each request would cost more.
_MADE_ID = secrets.token_hex(6).encode() + b"-%x"
_numbers = itertools.count(1)


def new_request_id() -> bytes:
    """An id that no other request of any web process has."""
    return _MADE_ID % next(_numbers)


def find_request_id(headers: Headers) -> bytes | None:
    """Find X-Request-ID among a request's headers; None if it is missing, or unsafe to repeat."""
    for name, value in headers:
        if name == b"x-request-id":
            return value if _SAFE_ID.fullmatch(value) else None
    return None


class HTTPExchange:
    """An ``Exchange`` on one of our connections.

    Attributes:
        carrier: the connection.
        method: of the request.
        target: its path and query, or its whole URL, as the client has sent it.
        is_new: whether the client speaks HTTP/1.1, and not 1.0.
        keeps_alive: whether the connection stays open after the answer.
        is_over: whether the answer is complete.
        has_begun: whether the answer's head has been sent.
        more_lines: further lines of the answer's head.
        sent: bytes of the answer's body, without its framing.
        task: computes the answer; None before and after that.
    """

    __slots__ = (
        "_began",
        "_body",
        "_has_asked",
        "_id",
        "_is_chunked",
        "_is_logged",
        "_status",
        "_waiter",
        "carrier",
        "has_begun",
        "headers",
        "is_gone",
        "is_new",
        "is_over",
        "is_read",
        "keeps_alive",
        "key",
        "method",
        "model",
        "more_lines",
        "on_gone",
        "sent",
        "target",
        "task",
    )

    def __init__(
        self,
        carrier: Connection,
        method: bytes,
        target: bytes,
        headers: Headers,
        *,
        is_new: bool,
        keeps_alive: bool,
        is_logged: bool,
    ) -> None:
        self.carrier = carrier
        self.method = method
        self.target = target
        self.headers = headers
        self.is_new = is_new
        self.keeps_alive = keeps_alive
        self.is_read = self.is_gone = self.is_over = self.has_begun = False
        self.on_gone: Callable[[], object] | None = None
        self.task: asyncio.Task[None] | None = None
        self.key = self.model = ""
        self._body = self._id = self.more_lines = b""
        self._waiter: asyncio.Future[None] | None = None
        self._has_asked = self._is_chunked = False
        self._is_logged = is_logged
        self._began = perf_counter() if is_logged else 0.0
        self._status = self.sent = 0

    @property
    def request_id(self) -> str:
        return (self._id or self._identify()).decode()

    def _identify(self) -> bytes:
        self._id = find_request_id(self.headers) or new_request_id()
        return self._id

    def url(self) -> tuple[str, bytes, bytes]:
        """The decoded path, the path as it was sent, and the query.

        Raises:
            httptools.HttpParserInvalidURLError: the target is none.
        """
        url = httptools.parse_url(self.target)
        path = url.path or b"/"
        return unquote(path.decode("latin-1")), path, url.query or b""

    # -- the body

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def more(self) -> bytes:
        while not (self._body or self.is_read):
            if self.is_gone:
                raise Disconnected
            self._waiter = asyncio.get_running_loop().create_future()
            if self._awaits_word and not self.has_begun:
                self.carrier.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._has_asked = True
            self.carrier.look_at_reading()
            await self._waiter
        return self.take()

    @property
    def _awaits_word(self) -> bool:
        """Whether the client sends its body only when it is asked to."""
        if self._has_asked or not self.is_new:
            return False
        return _EXPECTATION in [(name, value.lower()) for name, value in self.headers]

    def arrived(self, part: bytes) -> None:
        """For the connection: a part of the body."""
        if not self.is_over:
            self._body = self._body + part if self._body else part
            self.wake()

    def wake(self) -> None:
        """For the connection: something about the body has changed."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def is_satiated(self) -> bool:
        """Whether so much of the body waits that no more should arrive."""
        return self._waiter is None and len(self._body) > _MOST_UNTAKEN and not self.is_over

    def lost(self) -> None:
        """For the connection: nothing can be sent any more."""
        if not self.is_over:
            self.log_once(_GONE)
        self.is_gone = True
        self.wake()
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None and not self.is_over:
            on_gone()

    # -- the answer

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        if self.is_gone or self.is_over:
            return
        if not self.is_read and self._awaits_word:
            self.keeps_alive = False  # whether the body comes is not known
        more = b"" if status in _BODILESS else b"content-length: %d\r\n" % len(body)
        head = self._head(status, headers, more)
        transport = self.carrier.transport
        if self.method == b"HEAD":
            body = b""
        self.sent = len(body)
        if self.sent < _LARGE:
            transport.write(head + body)
        elif not self.carrier.is_secure:
            transport.writelines((head, body))
        else:
            # An encrypting transport passes on each write as a whole, and does not count it among
            # what is unread. With small ones it stops passing on when the client does not read.
            transport.write(head)
            parts = memoryview(body)
            for start in range(0, len(body), _LARGE):
                transport.write(parts[start : start + _LARGE])
        self._is_complete()

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        self.keeps_alive = False
        if not self.is_read:
            self.carrier.spill(most)
        self.answer(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        if self.is_gone:
            return
        has_length = status in _BODILESS or any(name == b"content-length" for name, _ in headers)
        self._is_chunked = self.is_new and not has_length and self.method != b"HEAD"
        if not (has_length or self._is_chunked) and self.method != b"HEAD":
            self.keeps_alive = False  # the end of the connection is that of the body
        more = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        self.carrier.transport.write(self._head(status, headers, more))

    async def write(self, part: bytes) -> None:
        if self.is_gone or self.is_over:
            raise Disconnected
        if part and self.method != b"HEAD":
            self.sent += len(part)
            if self._is_chunked and len(part) >= _LARGE:
                self.carrier.transport.writelines((b"%x\r\n" % len(part), part, b"\r\n"))
            else:
                self.carrier.transport.write(self._framed(part))
        writable = self.carrier.writable
        if writable is not None:
            await writable.wait()
            if self.is_gone:
                raise Disconnected

    async def end(self, part: bytes = b"") -> None:
        if self.is_gone or self.is_over:
            raise Disconnected
        if self.method != b"HEAD":
            self.sent += len(part)
            last = self._framed(part) if part else b""
            last += b"0\r\n\r\n" if self._is_chunked else b""
            if last:
                self.carrier.transport.write(last)
        self._is_complete()

    def _head(self, status: int, headers: Headers, more: bytes) -> bytes:
        self._status = status
        lines = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        lines += date_line()
        for header in headers:
            lines += b"%b: %b\r\n" % header
        lines += b"x-request-id: %b\r\n%b" % (self._id or self._identify(), self.more_lines)
        if self.carrier.is_ending:
            self.keeps_alive = False
        if self.keeps_alive and not self.is_new:  # a client of HTTP/1.0 has to be told
            more += b"connection: keep-alive\r\n"
        return lines + more + (b"\r\n" if self.keeps_alive else b"connection: close\r\n\r\n")

    def _framed(self, part: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part

    def _is_complete(self) -> None:
        self.is_over = self.has_begun = True
        self.on_gone = None
        self._body = b""
        self.carrier.answered(self)
        if self._is_logged:
            self.log_once(self._status)

    def log_once(self, status: int) -> None:
        """Write its line in the access log, if there is one."""
        if self._is_logged:
            self._is_logged = False
            log_request(
                method=self.method,
                target=self.target,
                status=status,
                size=self.sent,
                seconds=perf_counter() - self._began,
                request_id=self.request_id,
                client=self.carrier.client,
                key=self.key,
                model=self.model,
            )
