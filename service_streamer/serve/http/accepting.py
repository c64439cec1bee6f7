"""Connections of several web processes on one socket: each takes its share of them.

The process that wakes up first accepts, and that is often the same one. Connections that are kept
alive would clump there: its requests wait while another process has nothing to do.

A process may have as many connections as its limit of open files allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
from collections.abc import Callable, MutableSequence

from .tls import HANDSHAKE, TLS

logger = logging.getLogger(__name__)

#: Seconds that a process with more connections than another leaves a new one to that.
_YIELD = 0.002

#: Seconds until the next attempt if no descriptors are left, as asyncio has it.
_RETRY = 1.0

#: Connections that it then accepts at once: as many per second as if it did not wait.
_AFTER_YIELD = 16

_CLOSED, _ENDING = -1, -2

#: Seconds until an encrypted connection that is closed is cut off. That may be before the client
#: has read the last answer, so ``Connection`` sees to it with better knowledge.
_FAREWELL = 3600.0


class Turns:
    """The open connections of each process, in memory that all of them have. Without a lock.

    Args:
        counts: of connections by process; negative for one that accepts none, or is to end.
        number: of this process.

    Attributes:
        on_ending: called when this process has to leave new connections to the others.
    """

    def __init__(self, counts: MutableSequence[int], number: int) -> None:
        self._counts = counts
        self._number = number
        self.on_ending: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Accept from now on."""
        self._counts[self._number] = 0

    def close(self) -> None:
        """Accept no more."""
        self._counts[self._number] = _CLOSED

    def end(self) -> None:
        """Accept no more if another process does that is not to end.

        Of processes that end together the last goes on: clients are told so, and do not wait.
        """
        self._counts[self._number] = _ENDING  # before the others are looked at
        if any(each >= 0 for each in self._counts):
            self.on_ending()

    def changed(self, by: int) -> None:
        """A connection was opened or closed."""
        if self._counts[self._number] >= 0:
            self._counts[self._number] += by

    @property
    def count(self) -> int:
        """The open connections of this process."""
        return self._counts[self._number]

    @property
    def is_ours(self) -> bool:
        """Whether no other process has fewer connections."""
        counts = self._counts[:]
        return counts[self._number] <= min((each for each in counts if each >= 0), default=0)


class Acceptor:
    """Accepts connections of a shared socket when it is this process's turn. Of one event loop.

    Args:
        sock: the listening socket; its owner closes it, after ``close``.
        protocol: makes the protocol of a connection.
        tls: encrypts the connections; None for plain ones.
        most: maximum number of connections; half of it, at most 2,048, may be TLS handshakes.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        turns: Turns,
        tls: TLS | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._protocol = protocol
        self._turns = turns
        self._tls = tls
        self._timer: asyncio.TimerHandle | None = None
        self._most = most
        self._connecting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._has_many = False  # and the log says so
        sock.setblocking(False)
        turns.open()
        turns.on_ending = self._stop
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """Accept no more."""
        self._turns.close()
        self._stop()
        if self._tls is not None:  # a client may take its time for the handshake
            for task in self._connecting:
                task.cancel()

    def _stop(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._timer is not None:
            self._timer.cancel()

    async def wait_closed(self) -> None:
        """As of ``asyncio.Server``: connections that are being made are there."""
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _readable(self) -> None:
        if self._turns.is_ours:
            self._accept()
        else:
            self._pause(_YIELD, self._accept_some)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._sock)

        def resume() -> None:
            self._loop.add_reader(self._sock, self._readable)
            then()

        self._timer = self._loop.call_later(seconds, resume)

    def _accept_some(self) -> None:
        """The other process does not take its turn, or not soon enough."""
        for _ in range(_AFTER_YIELD):
            is_full = self._turns.count + len(self._connecting) >= self._most
            if (is_full and not self._turns.is_ours) or not self._accept():
                break

    def _accept(self) -> bool:
        """Accept a connection; false if there is none."""
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another one has it
            return False
        except OSError as error:
            logger.error("no connection can be accepted: %s; retrying in %g s", error, _RETRY)
            self._pause(_RETRY, lambda: None)
            return False
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # macOS refuses it once the client is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self._end_handshakes()
        task = self._loop.create_task(self._connect(connection))
        self._connecting[task] = None
        task.add_done_callback(lambda task: self._connecting.pop(task, None))
        return True

    def _end_handshakes(self) -> None:
        """Make room for one more."""
        connecting, most = self._connecting, min(self._most // 2, 2048)
        if len(connecting) < most:
            self._has_many = self._has_many and len(connecting) > most // 2
            return
        if not self._has_many:
            self._has_many = True
            logger.warning("more than %d TLS handshakes at once: the oldest ones are ended", most)
        oldest = next(iter(connecting))
        del connecting[oldest]
        oldest.cancel()

    async def _connect(self, connection: socket.socket) -> None:
        # The client is gone again; or it does not speak TLS, or has no valid certificate.
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol, connection, ssl=self._tls.context,
                    ssl_handshake_timeout=HANDSHAKE, ssl_shutdown_timeout=_FAREWELL,
                )  # fmt: skip
        except OSError:
            connection.close()


#: Connections of one process, however many files it may open. Arbitrary; bounds their memory.
_MOST = 1 << 14

#: Open files that macOS allows where the hard limit is infinite.
_OPEN_MAX = 10240


def max_connections() -> int:
    """Raise the soft limit of open files to the hard one; returns the bound that follows.

    The soft limit is often 1,024, for programs that use ``select``. The bound is half of the limit:
    TLS handshakes, refused connections, gRPC, pools and models need files, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, max(soft, _OPEN_MAX)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit == resource.RLIM_INFINITY else min(_MOST, limit // 2)
