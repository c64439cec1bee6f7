"""Clients who do not read their answers: each such answer is memory, so their connections are cut.

An answer goes into the connection's buffer at once. A client is watched while that is above its
high-water mark (64 kB). Its connection is cut if

- it takes less than LEAST_RATE for longer than some seconds; or
- all such clients together leave more bytes unread than allowed, and it is the slowest of them. The
  one whose answer has just been written is not: a single answer may be larger than that.
"""

from __future__ import annotations

import asyncio
import logging

__all__ = ["LEAST_RATE", "SlowReaders", "is_too_slow"]

logger = logging.getLogger(__name__)

#: What a client takes at least of an answer, bytes a second. Arbitrary: 15 MB take 8 minutes then.
LEAST_RATE = 32 << 10

#: How often clients are looked at that do not read, seconds, at the most.
_INTERVAL = 5.0


def is_too_slow(waited: float, taken: int, allowed: float) -> bool:
    """Whether a client may be cut.

    Args:
        waited: since the buffer was full, seconds.
        taken: bytes of it since.
        allowed: for how long it may take nothing, seconds.
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
        """The slowest comes first; of those that have taken nothing the one that waits longest."""
        waited = now - self.since
        return max(0, self.size - self.left) / (waited + 1), -waited


class SlowReaders:
    """Watches the connections that do not read what is written. Of one event loop.

    Args:
        allowed: for how long a client may leave an answer unread, seconds.
        most: bytes that all of them may leave unread at a time.

    Attributes:
        allowed: as given.
        cut: how many connections were closed so far.
    """

    def __init__(self, allowed: float, most: int) -> None:
        self.allowed = allowed
        self._most = most
        self._readers: dict[asyncio.Transport, _Reader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.cut = 0

    def stalled(self, transport: asyncio.Transport) -> None:
        """The buffer of a connection is full."""
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
        """Whether the buffer of a connection is full."""
        return transport in self._readers

    def flows(self, transport: asyncio.Transport) -> None:
        """It is read again, or is gone."""
        self._readers.pop(transport, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for reader in [*self._readers.values()]:
            waited = now - reader.since
            if is_too_slow(waited, reader.size - reader.left, self.allowed):
                self._cut(reader, f"it read next to nothing for {waited:.0f} s")
        self._timer = None
        if self._readers:
            self._timer = loop.call_later(min(_INTERVAL, self.allowed), self._look)

    def _cut(self, reader: _Reader, why: str) -> None:
        del self._readers[reader.transport]
        self.cut += 1
        peer = reader.transport.get_extra_info("peername")
        logger.warning(
            "closing the connection of a client (%s) with %d bytes of an answer unread: %s",
            peer[0] if peer else "unknown", reader.left, why,
        )  # fmt: skip
        reader.transport.abort()
