"""Accepts connections to a pool, and greets clients: those that want what the pool has."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import time
from typing import Any

from .client_memory import first_sent
from .fingerprint import Fingerprint, differences
from .outbox import framed, user_of
from .pool_protocol import FAILED, PROTOCOL, REFUSED, WELCOME, Hello, Unserved, pack
from .sessions import Session

logger = logging.getLogger(__name__)

#: Seconds until it accepts again when it could not: when a client has left, it can.
_ACCEPT_PAUSE = 0.25


class PoolAcceptor:
    """Takes connections from the pool's socket. In one thread.

    Args:
        listener: the socket; closed by ``close``.
        selector: of the thread; has the listener while this accepts.

    Attributes:
        resumes_at: when it accepts again, seconds of a monotonic clock; infinity while it does, and
            when it has ended.
    """

    def __init__(
        self, name: str, listener: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        self._name = name
        self._listener: socket.socket | None = listener
        self._selector = selector
        self.resumes_at = math.inf
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    @property
    def is_closed(self) -> bool:
        """Whether nobody can connect any more."""
        return self._listener is None

    def accept(self) -> list[tuple[socket.socket, int]]:
        """The connections that have come, with their processes."""
        accepted: list[tuple[socket.socket, int]] = []
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # no descriptors are left, or the client is gone again
                logger.warning("pool %s could not accept a client: %s", self._name, error)
                self.pause()
                break
            pid, user = user_of(connection)
            if user not in (os.geteuid(), 0):
                logger.warning("refused process %d of user %d", pid, user)
                connection.close()
                continue
            connection.setblocking(False)
            accepted.append((connection, pid))
        return accepted

    def pause(self) -> None:
        """Accept nobody for a moment: it would fail again at once, and again."""
        if self._listener is not None and self.resumes_at == math.inf:
            self._selector.unregister(self._listener)
            self.resumes_at = time.monotonic() + _ACCEPT_PAUSE

    def resume(self) -> None:
        """Accept again, after ``resumes_at``."""
        self.resumes_at = math.inf
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Nobody else can connect: the next one elects a new pool when this one has ended."""
        listener, self._listener = self._listener, None
        if listener is not None:
            if self.resumes_at == math.inf:
                self._selector.unregister(listener)
            listener.close()


def turn_away(listener: socket.socket, reason: Unserved) -> None:
    """Tell all that have connected why they are not served, and close. Does not block."""
    connections: list[socket.socket] = []
    listener.setblocking(False)
    # Closed before they are told: who tries again is not to come to this one once more.
    with listener, contextlib.suppress(OSError):  # nobody else, or none that can be told
        while True:
            connections.append(listener.accept()[0])
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # it has gone
            connection.setblocking(False)
            if user_of(connection)[1] in (os.geteuid(), 0):
                first_sent(connection, None)
                connection.send(framed(pack([(FAILED, *reason)])))


def is_client(message: Any) -> bool:
    """Whether a first message is of a client of this version, and not of a visitor.

    Raises:
        TypeError: it is no first message.
    """
    return message[0] == PROTOCOL and Hello(*message).fingerprint is not None


def greet(session: Session, message: Any, fingerprint: Fingerprint) -> bool:
    """Answer the first message of a client; whether it is one that makes calls, and may.

    Args:
        fingerprint: of whoever has started the pool.

    Raises:
        TypeError: it is no such message.
    """
    hello = Hello(*message) if message[0] == PROTOCOL else None
    if hello is None:
        session.tell((REFUSED, [f"the protocol is {PROTOCOL} there and {message[0]} here"]))
        return False
    differ = [] if hello.fingerprint is None else differences(fingerprint, hello.fingerprint)
    if differ:
        session.tell((REFUSED, differ))
        return False
    session.hello = hello
    session.tell((WELCOME, os.getpid()))
    return hello.fingerprint is not None
