"""The HTTP server: listens, hands connections to ``connection``, and ends them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from .accepting import Acceptor, Turns, max_connections
from .connection import Connection, Listeners, RefusedConnection
from .exchange import Application
from .slow_readers import MAX_UNREAD, WRITE_TIMEOUT, SlowReaders
from .tls import TLS

_BACKLOG = 2048

#: Seconds that connections get at the end; all requests are answered by then.
_GRACE = 5.0

#: Seconds that the answers get that say that the service has ended.
_HURRY = 0.5


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


class HTTPServer:
    """Serves on a listening socket in the running event loop. Made in that loop.

    Args:
        application: answers an exchange.
        sock: closed at the end.
        write_timeout: seconds that a client may leave an answer unread.
        max_unread: bytes that all clients together may leave unread.
        turns: with whom the socket is shared; None for nobody.
        tls: encrypts the connections; None for plain ones.
        access_log: whether each request is logged.

    Attributes:
        listeners: what its connections have in common.
    """

    def __init__(
        self,
        application: Application,
        sock: socket.socket,
        *,
        write_timeout: float = WRITE_TIMEOUT,
        max_unread: int = MAX_UNREAD,
        turns: Turns | None = None,
        tls: TLS | None = None,
        access_log: bool = False,
    ) -> None:
        self._sock = sock
        if tls is not None and turns is None:
            # asyncio's own server cannot change its certificates.
            turns = Turns([0], 0)
        self._turns = turns
        self._tls = tls
        readers = SlowReaders(write_timeout, max_unread)
        self.listeners = Listeners(application, readers, turns, access_log, max_connections())
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()

    def connected(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        listeners = self.listeners
        return Connection(listeners) if listeners.make_room() else RefusedConnection(listeners)

    def drain(self) -> None:
        """Go on serving, and close each connection after its next answer."""
        self.listeners.is_draining = True

    def stop(self, *, in_a_hurry: bool = False) -> None:
        """Accept no more connections; end once open requests are answered, or immediately."""
        self._stopping.set()
        if in_a_hurry:
            self._hurried.set()

    async def serve(self) -> None:
        """Serve until ``stop``, and until open requests are answered."""
        loop = asyncio.get_running_loop()
        listener: asyncio.Server | Acceptor
        if self._turns is None:
            listener = await loop.create_server(self.connected, sock=self._sock, backlog=_BACKLOG)
        else:
            most = self.listeners.most
            listener = Acceptor(self._sock, self.connected, self._turns, self._tls, most)
        try:
            await self._stopping.wait()
        finally:
            listener.close()
            self._sock.close()
            await self._close_connections()
        await listener.wait_closed()

    async def _close_connections(self) -> None:
        self.drain()
        listeners = self.listeners
        for connection in [*listeners.open]:
            connection.shut_down()
        if listeners.open:
            listeners.on_empty = self._hurried.set
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), _GRACE)
        cut_off = [task for each in listeners.open if (task := each.cancel()) is not None]
        if cut_off:
            await asyncio.wait(cut_off, timeout=_HURRY)
        for transport in (*(each.transport for each in listeners.open), *listeners.refused):
            transport.abort()
