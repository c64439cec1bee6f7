"""The HTTP servers, uvicorn and granian, behind one small interface."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .accepting import Acceptor, Turns
from .slow_readers import SlowReaders

__all__ = [
    "HTTPServer",
    "ServerName",
    "bind",
    "make_server",
]

logger = logging.getLogger(__name__)

ServerName = Literal["uvicorn", "granian"]

_BACKLOG = 2048

#: Seconds that an idle connection is kept. Load balancers keep it 60 s; a shorter time here would
#: make them send requests into closing connections.
_KEEP_ALIVE = 75

#: Maximum bytes of a request's line and headers, and seconds for them to arrive.
_LONGEST_HEAD = 64 << 10
_HEAD_TIME = 30.0

#: Seconds that connections get at the end; all requests are answered by then.
_GRACE = 5


class HTTPServer(Protocol):
    """Serves an application in the running event loop."""

    async def serve(self) -> None:
        """Serve until ``stop``, and until open requests are answered."""

    def stop(self, *, in_a_hurry: bool = False) -> None:
        """Accept no more connections; end once open requests are answered, or immediately."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError: the address is in use, or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.set_inheritable(True)
    except BaseException:
        sock.close()
        raise
    return sock


def make_server(
    name: ServerName,
    app: ASGIApp,
    sock: socket.socket,
    *,
    write_timeout: float = 30.0,
    max_unread: int = 256 << 20,
    turns: Turns | None = None,
) -> HTTPServer:
    """A server on a listening socket, which it closes at the end.

    Args:
        turns: with whom the socket is shared; None for nobody.
        write_timeout: seconds that a client may leave an answer unread.
        max_unread: bytes that all clients together may leave unread.
    """
    if name == "granian":
        return _Granian(app, sock)
    return _Uvicorn(app, sock, SlowReaders(write_timeout, max_unread), turns)


class _Uvicorn:
    """uvicorn, on uvloop and httptools, without its signal handlers."""

    def __init__(
        self, app: ASGIApp, sock: socket.socket, readers: SlowReaders, turns: Turns | None
    ) -> None:
        connection: Any = functools.partial(_Connection, readers)
        if turns is not None:
            connection = functools.partial(_CountedConnection, turns, readers)
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = _UvicornServer(config) if turns is None else _SharingServer(config, turns)
        self._sock = sock

    async def serve(self) -> None:
        await self._server.serve([self._sock])

    def stop(self, *, in_a_hurry: bool = False) -> None:
        self._server.should_exit = True
        self._server.force_exit |= in_a_hurry


class _UvicornServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore uvicorn's handlers, which end the process before requests are drained."""
        yield


class _SharingServer(_UvicornServer):
    """Accepts connections in turn with other processes."""

    def __init__(self, config: uvicorn.Config, turns: Turns) -> None:
        super().__init__(config)
        self._turns = turns

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        servers: list[Any] = self.servers
        servers += [Acceptor(sock, self._protocol, self._turns) for sock in sockets or ()]

    def _protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits on request heads and on unread answers.

    Heads are read before the client's key is checked. A request with ``Upgrade: h2c`` is served
    with its body, which uvicorn alone would lose. This class relies on uvicorn's internals: see
    tests/test_foreign_internals.py.
    """

    def __init__(self, readers: SlowReaders, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._readers = readers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = self._unended_bytes = self._unread = 0
        self._awaits_head_since: float | None = self.loop.time()
        self._interval = min(_HEAD_TIME, self._readers.allowed)
        self._timer = self.loop.call_later(self._interval, self._check_limits)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._readers.flows(self.transport)
        super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._readers.stalled(self.transport)

    def resume_writing(self) -> None:
        self._readers.flows(self.transport)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        since, cycle = self._awaits_head_since, self.cycle
        self._has_body = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            # The parser buffers a header or a trailer until its end, which must come.
            is_head = since is not None and since is self._awaits_head_since
            is_trailer = cycle is not None and cycle.more_body and cycle is self.cycle
            if (is_head or is_trailer) and not self._has_body:
                self._unended_bytes += len(data)
                if self._unended_bytes > _LONGEST_HEAD:
                    self.send_400_response("The request head is too long.")
            else:
                self._unended_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the body of a request with ``Upgrade``, which its parser does not.

        Args:
            rest: the bytes after its head.
        """
        cycle = self.cycle
        cycle.more_body = True
        cycle.keep_alive = False  # this parser ends with the body
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%s: %s\r\n" % each for each in self.headers if each[0] in framing]
        self.parser = httptools.HttpRequestParser(_Body(self))
        self.data_received(b"POST / HTTP/1.1\r\n%s\r\n%s" % (b"".join(lines), rest))

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._awaits_head_since = self.loop.time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaits_head_since = None
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _LONGEST_HEAD:
            raise ValueError("the head is too long")  # which uvicorn answers with 400

    def _check_limits(self) -> None:
        """Check both limits periodically; a timer per request would cost every request."""
        since, now = self._awaits_head_since, self.loop.time()
        unread, before = self.transport.get_write_buffer_size(), self._unread
        self._unread = unread
        if unread and unread == before and not self._readers.watches(self.transport):
            self.transport.abort()  # below the high-water mark, so not watched
        elif since is not None and now - since >= _HEAD_TIME and not unread:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(self._interval, self._check_limits)


class _CountedConnection(_Connection):
    """Says to the other processes on the same socket that it is there."""

    def __init__(self, turns: Turns, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._turns.changed(1)

    def connection_lost(self, error: Exception | None) -> None:
        self._turns.changed(-1)
        super().connection_lost(error)


class _Body:
    """Passes on one body from a parser, and nothing after it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection

    def on_body(self, body: bytes) -> None:
        if self._connection is not None:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        if self._connection is not None:
            self._connection.on_message_complete()
            self._connection = None


class _Granian:
    """granian, written in Rust. It opens its own socket on the address of ours."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server

        host, port = sock.getsockname()[:2]
        sock.close()
        logging.getLogger("_granian").setLevel(logging.WARNING)
        self._server: Any = Server(
            app,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=_BACKLOG,
            http1_settings=HTTP1Settings(),
            log_enabled=False,
        )

    async def serve(self) -> None:
        await self._server.serve()

    def stop(self, *, in_a_hurry: bool = False) -> None:
        if in_a_hurry:  # ``serve`` is cancelled soon, before granian ends
            asyncio.get_running_loop().set_exception_handler(_without_late_ends)
        self._server.stop()


def _without_late_ends(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore granian's result for its future, if that has been cancelled."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)
