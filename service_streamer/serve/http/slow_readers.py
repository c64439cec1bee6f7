"""Clients that do not read their answers: their connections are closed."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

#: Minimum rate of a client, bytes per second. Arbitrary: 15 MB may take 8 minutes.
LEAST_RATE = 32 << 10

#: Seconds that a client may leave an answer unread, and bytes that all clients together may.
WRITE_TIMEOUT = 30.0
MAX_UNREAD = 256 << 20

#: Maximum seconds between two checks.
_INTERVAL = 5.0


def is_too_slow(waited: float, taken: int, allowed: float) -> bool:
    """Whether to close a client's connection.

    Args:
        waited: seconds since the buffer became full.
        taken: bytes read since then.
        allowed: seconds that a client may read nothing.
    """
    return waited > allowed + taken / LEAST_RATE


class _Reader:
    __slots__ = ("since", "size", "transport")

    def __init__(self, transport: asyncio.Transport, since: float) -> None:
        self.transport = transport
        self.since = since
        self.size = transport.get_write_buffer_size()

    @property
    def left(self) -> int:
        return self.transport.get_write_buffer_size()

    def rate(self, now: float) -> tuple[float, float]:
        """Sort key: the slowest first; among those that read nothing, the longest."""
        waited = now - self.since
        return self.taken() / (waited + 1), -waited

    def taken(self) -> int:
        """Bytes that were read. More may be written after the part that filled the buffer."""
        left = self.left
        self.size = max(self.size, left)
        return self.size - left


class SlowReaders:
    """Watches connections whose clients do not read. Belongs to one event loop.

    Args:
        allowed: seconds that a client may leave an answer unread.
        most: bytes that all clients together may leave unread.

    Attributes:
        allowed: as given.
        cut: number of closed connections.
    """

    def __init__(self, allowed: float, most: int) -> None:
        self.allowed = allowed
        self._most = most
        self._readers: dict[asyncio.Transport, _Reader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.cut = 0

    def stalled(self, transport: asyncio.Transport) -> None:
        """Watch a connection whose buffer is full."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        others = [each for each in self._readers.values() if each.transport is not transport]
        newest = self._readers[transport] = _Reader(transport, now)
        unread = newest.left + sum(each.left for each in others)
        if unread > self._most:
            others.sort(key=lambda each: each.rate(now), reverse=True)
        while unread > self._most and others:
            slowest = others.pop()
            unread -= slowest.left
            self._cut(slowest, f"all clients together left more than {self._most} bytes unread")
        if self._timer is None:
            self._timer = loop.call_later(min(_INTERVAL, self.allowed), self._look)

    def watches(self, transport: asyncio.Transport) -> bool:
        """Whether a connection's buffer is full."""
        return transport in self._readers

    def flows(self, transport: asyncio.Transport) -> None:
        """Stop watching: the client reads again, or is gone."""
        self._readers.pop(transport, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        if self._readers:  # first, so that a failure below does not end the watch
            self._timer = loop.call_later(min(_INTERVAL, self.allowed), self._look)
        for reader in [*self._readers.values()]:
            waited = now - reader.since
            if is_too_slow(waited, reader.taken(), self.allowed):
                self._cut(reader, f"it read almost nothing for {waited:.0f} s")

    def _cut(self, reader: _Reader, why: str) -> None:
        del self._readers[reader.transport]
        self._abort(reader.transport, why)

    def cut_off(self, transport: asyncio.Transport, waited: float) -> None:
        """Close the connection of a client that read nothing, and whose buffer is not full."""
        self._abort(transport, f"it read nothing for {waited:.0f} s")

    def _abort(self, transport: asyncio.Transport, why: str) -> None:
        self.cut += 1
        peer = transport.get_extra_info("peername")
        logger.warning(
            "closing the connection of a client (%s) with %d bytes of an answer unread: %s",
            peer[0] if peer else "unknown", transport.get_write_buffer_size(), why,
        )  # fmt: skip
        transport.abort()
