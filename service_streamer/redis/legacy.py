"""Detect clients and workers of version 0.1.2 on the same Redis.

Old and new versions cannot serve each other: 0.1.2 pushes pickled items to a list and publishes
results on a channel per client. This version uses streams, and unpickles only verified data.
Without a warning, the callers of either version would wait until they time out.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time

from ..workers.diagnosis import counted
from .link import Address, Link, LinkError, log

__all__ = ["OldClients", "OldWorkers"]

#: Names of 0.1.2, followed by the prefix, and for channels by the client's UUID.
_QUEUE = "request_queue"
_CHANNEL = "response_pb_"
_UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: Seconds between two looks for old clients or workers.
_INTERVAL = 10.0


class OldClients:
    """Finds clients of 0.1.2 at a worker host's prefix, and logs them once. For one thread."""

    def __init__(self, address: Address, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._next = 0.0
        self._has_warned = False

    def look(self) -> None:
        """Look, if the interval has passed; errors of Redis are ignored."""
        now = time.monotonic()
        if self._has_warned or now < self._next:
            return
        self._next = now + _INTERVAL
        link = Link(self._address)
        try:
            with contextlib.suppress(LinkError):
                self._warn(*_clients_and_items(link, self._prefix))
        finally:
            link.close()

    def _warn(self, clients: int, items: int) -> None:
        if not (clients or items):
            return
        self._has_warned = True
        log(
            logging.WARNING,
            "%s of service_streamer 0.1.2 at the prefix %r of %s, with %s in its queue: this "
            "version cannot serve them. Upgrade the clients, or run workers of 0.1.2 for them "
            "until then; see docs/upgrading.md",
            counted(clients, "client"), self._prefix, self._address, counted(items, "item"),
        )  # fmt: skip


def _clients_and_items(link: Link, prefix: str) -> tuple[int, int]:
    """Numbers of old clients and of their waiting items. Raises LinkError."""
    start = f"{_CHANNEL}{prefix}".encode()
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", start.decode()) + "*"
    channels: list[bytes] = link.call("PUBSUB", "CHANNELS", pattern)
    # Other prefixes may begin with this one.
    clients = sum(bool(_UUID.fullmatch(channel.removeprefix(start))) for channel in channels)
    kind: bytes | str = link.call("TYPE", _QUEUE + prefix)
    is_list = kind in (b"list", "list")
    return clients, int(link.call("LLEN", _QUEUE + prefix)) if is_list else 0


class OldWorkers:
    """Finds workers of 0.1.2 while there is no worker host. For one thread."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._next = 0.0
        #: Whether there are pattern subscriptions, which each worker of 0.1.2 has. Others may have
        #: them too, and Redis does not report their prefix.
        self.may_be_there = False

    def look(self) -> None:
        """Look, if the interval has passed: each look costs a connection."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        link = Link(self._address)
        try:
            with contextlib.suppress(LinkError):
                self.may_be_there = int(link.call("PUBSUB", "NUMPAT")) > 0
        finally:
            link.close()
