"""HTTP/1.1 on one connection: httptools parses it, uvloop carries it.

    bytes ──▶ parser ──▶ HTTPExchange, one per request ──▶ a task that answers it
                         those behind it wait until it has  ◀── answer, or start, write, end

It is made for many small requests: an answer is one write, and a request has one task and no timer.
A general server's connection takes twice the processor time (docs/http.md, Performance).

Limits of a client: 64 kB of head within 30 s. The body is read as fast as it is taken, and the next
request is begun when the client has read the answers before it. For answers that it does not read
see ``slow_readers``. Limits of all clients together: see ``Listeners.make_room``.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools

from .accepting import Turns
from .access_log import log_unreadable
from .exchange import Application, Disconnected, HTTPExchange, date_line
from .slow_readers import SlowReaders

logger = logging.getLogger(__name__)

#: Seconds that an idle connection is kept. Load balancers keep it 60 s; a shorter time here would
#: make them send requests into closing connections.
_KEEP_ALIVE = 75.0

#: Maximum bytes of a request's line and headers, and seconds for them to arrive.
_LONGEST_HEAD = 64 << 10
_HEAD_TIME = 30.0

#: Seconds between two looks at the limits.
_INTERVAL = 10.0

#: Bytes of a body that are received and dropped when its request has been answered, and seconds.
_SPILL = 64 << 20
_SPILL_TIME = 30.0

#: Seconds without a request after which a connection is idle. Sooner the request may be under way:
#: of many clients that connect at once all are accepted before any of their requests is read.
_IDLE = 0.1

#: Seconds that a refused client gets to read the answer.
_FAREWELL = 2.0

_TEXT = (b"content-type", b"text/plain; charset=utf-8")


def _plain(status: bytes, text: str, more: bytes = b"") -> bytes:
    """An answer that ends the connection."""
    return b"HTTP/1.1 %b\r\n%b%b: %b\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        status, date_line(), *_TEXT, more, len(text), text.encode("ascii"),
    )  # fmt: skip


class _BadHead(ValueError):
    """The parser would take it; it makes an error of its own of this one."""


class Listeners:
    """What the connections of one server have in common. Belongs to one event loop.

    Args:
        application: answers an exchange.
        readers: watches clients that do not read their answers.
        turns: counts the connections for the other processes on the socket; None if there are none.
        access_log: whether each request is logged.
        most: maximum number of connections.

    Attributes:
        open: the connections.
        refused: those beyond the maximum that are being answered, the oldest first.
        on_empty: called when the last one has closed.
        is_draining: whether a connection ends with its next answer. A client that kept it would
            send its retries here, although a load balancer has other servers for new connections.
    """

    def __init__(
        self,
        application: Application,
        readers: SlowReaders,
        turns: Turns | None = None,
        access_log: bool = False,
        most: int = sys.maxsize,
    ) -> None:
        self.application = application
        self.access_log = access_log
        self.readers = readers
        self.turns = turns
        self.open: set[Connection] = set()
        self.refused: dict[asyncio.Transport, None] = {}
        self.on_empty: Callable[[], None] = lambda: None
        self.is_draining = False
        self.most = most
        self._is_full = False  # and the log says so
        self._search_at = 0.0

    def make_room(self) -> bool:
        """Whether one more connection may be open.

        At the maximum some without a request are closed for it: first those whose request has not
        come yet, the longest-waiting first, then those that are kept alive.
        """
        if len(self.open) < self.most:
            return True
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "clients hold %d connections, the maximum of this process: those without a request "
                "are closed, and if there are none, new ones get 503. The maximum is half of the "
                "limit of open files, at most 16,384: raise `ulimit -Hn`, or use more "
                "`--web-workers`: each process has its own maximum",
                self.most,
            )
        now = asyncio.get_running_loop().time()
        if now < self._search_at:
            return False
        idle = sorted(
            (each for each in self.open if each.is_idle(now)), key=lambda each: each.idle_since
        )
        if not idle:
            self._search_at = now + _IDLE
        for each in idle[: max(1, self.most // 16)]:  # several: a search looks at all
            self.open.discard(each)
            each.transport.abort()
        return bool(idle)

    def opened(self, connection: Connection) -> None:
        self.open.add(connection)
        if self.turns is not None:
            self.turns.changed(1)

    def closed(self, connection: Connection) -> None:
        self.open.discard(connection)
        if len(self.open) < self.most // 2:
            self._is_full = False
        if self.turns is not None:
            self.turns.changed(-1)
        if not self.open:
            self.on_empty()


class Connection(asyncio.Protocol):
    """A client's connection: its requests are answered one after the other.

    A request with ``Upgrade: h2c`` is served like any other, with its body. It is the last one of
    its connection.
    """

    transport: asyncio.Transport

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        #: Set while the client reads slowly: exchanges wait for it before the next write.
        self.writable: asyncio.Event | None = None
        #: Addresses, as ASGI has them.
        self.server: tuple[str, int] | None = None
        self.client: tuple[str, int] | None = None
        self._parser = self._made_parser(self)
        self._serving: HTTPExchange | None = None
        self._arriving: HTTPExchange | None = None  # whose body is not complete
        self._queue: deque[HTTPExchange] = deque()
        self._is_reading = True
        self._is_deaf = False  # nothing that comes is parsed any more
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._unended_bytes = self._unread = 0
        self._has_got_on = False  # whether a head or a part of a body came to its end
        self._spills: int | None = None  # bytes of a body that may still be dropped
        self._spills_until = 0.0
        now = self._loop.time()
        self._idle_since = self._awaits_head_since = self._unread_since = now
        self._awaits_head = True

    @staticmethod
    def _made_parser(target: object) -> Any:
        parser = httptools.HttpRequestParser(target)
        # What follows the last request of a connection is ignored, and is no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def is_ending(self) -> bool:
        """Whether no request is answered after the current one."""
        return self._listeners.is_draining and not self._queue

    @property
    def is_secure(self) -> bool:
        return self.transport.get_extra_info("sslcontext") is not None

    # -- the transport's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # Now, since a transport that is closed does not know them any more.
        self.server = _address(transport.get_extra_info("sockname"))
        self.client = _address(transport.get_extra_info("peername"))
        self._listeners.opened(self)
        self._interval = min(_INTERVAL, self._listeners.readers.allowed)
        self._timer = self._loop.call_later(self._interval, self._check_limits)

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._listeners.readers.flows(self.transport)
        self._is_deaf = True
        if self.writable is not None:
            self.writable.set()
        for exchange in (self._serving, self._arriving, *self._queue):
            if exchange is not None and not exchange.is_gone:
                exchange.lost()
        self._queue.clear()
        self._serving = self._arriving = self._parser = None  # they hold this object
        self._listeners.closed(self)

    def pause_writing(self) -> None:
        self.writable = asyncio.Event()
        self._listeners.readers.stalled(self.transport)

    def resume_writing(self) -> None:
        self._listeners.readers.flows(self.transport)
        writable, self.writable = self.writable, None
        if writable is not None:
            writable.set()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if not self._is_deaf:
            self._parse(data)
        if self._spills is not None:
            self._spills -= len(data)
            if self._spills < 0:
                self._close()

    def _parse(self, data: bytes) -> None:
        self._has_got_on = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._is_deaf:
                self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                cause = error.__context__
                if cause is not None and not isinstance(cause, _BadHead):
                    logger.error("a request cannot be read; this is a bug", exc_info=cause)
                self._refuse("Invalid HTTP request received.")
            return
        # The parser buffers a header or a trailer until its end, which must come.
        if (self._awaits_head or self._arriving is not None) and not self._has_got_on:
            self._unended_bytes += len(data)
            if self._unended_bytes > _LONGEST_HEAD:
                self._refuse("The request head is too long.")
        else:
            self._unended_bytes = 0

    # -- the parser's

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._head_bytes = 0
        self._awaits_head = True
        self._awaits_head_since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits_head:  # else it is a trailer, which proxies do not look at
            self._headers.append((name.lower(), value))
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _LONGEST_HEAD:
            raise _BadHead("the head is too long")

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        is_new = version == "1.1"
        if self._head_bytes > _LONGEST_HEAD or not (is_new or version == "1.0"):
            raise _BadHead(f"{self._head_bytes} bytes of HTTP/{version}")
        self._awaits_head = False
        self._has_got_on = True
        # Proxies of HTTP/1.0 may not see where a chunked body ends.
        is_framed = is_new or all(name != b"transfer-encoding" for name, _ in self._headers)
        exchange = HTTPExchange(
            self, parser.get_method(), self._target, self._headers,
            is_new=is_new, keeps_alive=is_framed and parser.should_keep_alive(),
            is_logged=self._listeners.access_log,
        )  # fmt: skip
        self._arriving = exchange
        if self._serving is None and self.writable is None and not self._queue:
            self._begin(exchange)
        else:
            self._queue.append(exchange)
            self.look_at_reading()

    def on_body(self, part: bytes) -> None:
        self._has_got_on = True
        exchange = self._arriving
        if exchange is not None:
            exchange.arrived(part)
            if exchange.is_satiated:
                self.look_at_reading()

    def on_message_complete(self) -> None:
        exchange, self._arriving = self._arriving, None
        if exchange is not None:
            exchange.is_read = True
            exchange.wake()
            if exchange.is_over:  # answered before its body had arrived
                self._spills = None
                self._settle(exchange)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the body of a request with ``Upgrade``, which its parser does not.

        Args:
            rest: the bytes after its head.
        """
        exchange = self._queue[-1] if self._queue else self._serving
        if exchange is None:
            return
        exchange.is_read = exchange.keeps_alive = False
        self._arriving = exchange
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % each for each in exchange.headers if each[0] in framing]
        self._parser = self._made_parser(_Body(self))
        self._parse(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(lines), rest))

    def ignore_the_rest(self) -> None:
        """Whatever comes now belongs to no request."""
        self._is_deaf = True

    def _refuse(self, text: str) -> None:
        """Answer bytes that are not HTTP, after the requests before them, and close."""
        self._is_deaf = True
        arriving, self._arriving = self._arriving, None
        if self._queue and self._queue[-1] is arriving:
            self._queue.pop()
        before = self._queue[-1] if self._queue else self._serving
        if before is not None and before is not arriving:
            before.keeps_alive = False
            return
        if before is None or not before.has_begun:
            self.transport.write(_plain(b"400 Bad Request", text))
            if before is not None:
                before.sent = len(text)
                before.log_once(400)
            elif self._listeners.access_log:
                log_unreadable(self.client, len(text))
        if before is not None:
            before.lost()
        self.transport.close()

    # -- one exchange after the other

    def _begin(self, exchange: HTTPExchange) -> None:
        self._serving = exchange
        exchange.task = self._loop.create_task(self._serve(exchange))

    async def _serve(self, exchange: HTTPExchange) -> None:
        try:
            if not exchange.is_gone:
                await self._listeners.application(exchange)
        except Disconnected:
            pass
        except Exception:
            id_ = exchange.request_id
            logger.exception("request %s failed; this is a bug", id_, extra={"request_id": id_})
        finally:
            exchange.task = None
            if not (exchange.is_over or exchange.is_gone):
                self._failed(exchange)

    def _failed(self, exchange: HTTPExchange) -> None:
        if exchange.has_begun:
            self.transport.abort()  # the client sees that something is missing
        else:
            exchange.answer_early(500, (_TEXT,), b"Internal Server Error", _SPILL)

    def answered(self, exchange: HTTPExchange) -> None:
        self._idle_since = self._loop.time()
        if exchange.is_read:
            self._settle(exchange)
        else:
            if self._spills is None:
                self.spill()
            self.look_at_reading()

    def _settle(self, exchange: HTTPExchange) -> None:
        """Go on with the next request, when one is over and its body has arrived."""
        if exchange is not self._serving:
            return
        if not exchange.keeps_alive or self.is_ending:
            self._close()
            return
        self._serving = None
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request if it is its turn, and if its client reads the answers."""
        if self._queue and self._serving is None and self.writable is None:
            self._begin(self._queue.popleft())
        if not self._is_reading:
            self.look_at_reading()

    def look_at_reading(self) -> None:
        arriving = self._arriving
        wants = not self._queue and (arriving is None or not arriving.is_satiated)
        if wants != self._is_reading and not self.transport.is_closing():
            self._is_reading = wants
            if wants:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # -- the end

    def spill(self, most: int | None = None) -> None:
        self._spills = _SPILL if most is None else most
        self._spills_until = self._loop.time() + _SPILL_TIME

    def _close(self) -> None:
        self._is_deaf = True
        self._spills = None
        self._idle_since = self._loop.time()
        self.transport.close()

    def shut_down(self) -> None:
        """Close the connection if no request is open; others end with their last answer."""
        if self._serving is None or self._serving.is_over:
            self._close()

    def cancel(self) -> asyncio.Task[None] | None:
        """End the computation of the answer; its task."""
        exchange = self._serving
        task = None if exchange is None else exchange.task
        if task is not None:
            task.cancel()
        return task

    def _check_limits(self) -> None:
        """Check all limits periodically; a timer per request would cost every request."""
        transport, readers, now = self.transport, self._listeners.readers, self._loop.time()
        self._timer = self._loop.call_later(self._interval, self._check_limits)
        unread = transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        if unread:
            waited = now - self._unread_since
            if waited >= readers.allowed and not readers.watches(transport):
                readers.cut_off(transport, waited)
        elif transport.is_closing():
            # Encrypted, and the client does not answer to the end; or it has not read it yet.
            if now - max(self._idle_since, self._unread_since) >= readers.allowed:
                transport.abort()
        elif self._is_late(now):
            self._close()

    def _is_late(self, now: float) -> bool:
        if self._spills is not None:
            return now >= self._spills_until
        if self._serving is not None and not self._serving.is_over:
            return False
        is_kept_alive, since = self.idle_since
        return now - since >= (_KEEP_ALIVE if is_kept_alive else _HEAD_TIME)

    @property
    def idle_since(self) -> tuple[bool, float]:
        """Whether a client without a request has sent one before, and when it became idle."""
        since = self._awaits_head_since if self._awaits_head else self._idle_since
        return not self._awaits_head, since

    def is_idle(self, now: float) -> bool:
        """Whether the client has no request, and has read all answers."""
        if self._serving is not None or self._queue or self.transport.get_write_buffer_size():
            return False
        return now - self.idle_since[1] >= _IDLE


class RefusedConnection(asyncio.Protocol):
    """A connection beyond the maximum: the client is answered, and what it sends is dropped.

    To close it at once could destroy the answer: the kernel resets a connection of which something
    was not read.
    """

    def __init__(self, listeners: Listeners) -> None:
        self._refused, self._most = listeners.refused, max(1, listeners.most // 8)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if len(self._refused) >= self._most:  # the oldest client has most likely read its answer
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.abort()
        self._refused[transport] = None
        text = "The service has too many connections; retry soon."
        transport.write(_plain(b"503 Service Unavailable", text, b"retry-after: 1\r\n"))
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()
        asyncio.get_running_loop().call_later(_FAREWELL, transport.abort)

    def connection_lost(self, _: Exception | None) -> None:
        self._refused.pop(self._transport, None)


class _Body:
    """Passes on one body from a parser, and has the connection ignore what follows."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    def on_body(self, body: bytes) -> None:
        if self._connection is not None:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_message_complete()
            connection.ignore_the_rest()


def _address(name: Any) -> tuple[str, int] | None:
    """Of a socket, as ASGI has it."""
    return (str(name[0]), int(name[1])) if isinstance(name, (tuple, list)) else None
