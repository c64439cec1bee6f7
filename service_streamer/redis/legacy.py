"""Applications of version 0.1.2 on the same Redis and prefix, noticed and named.

Old and new cannot serve each other. 0.1.2 puts pickled items into a list and publishes results on a
channel of each client. This version uses streams, and unpickles nothing that it cannot verify.
Without a word about it, the callers of either would wait until their time ends.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time

from ..workers.diagnosis import counted
from .link import Address, Link, LinkError, log

__all__ = ["OldClients", "OldWorkers"]

#: The names that 0.1.2 uses; the prefix follows. After that of the channel comes a client's UUID.
_QUEUE = "request_queue"
_CHANNEL = "response_pb_"
_UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: How often a worker host looks for old clients, and a client for old workers, seconds.
_INTERVAL = 10.0


class OldClients:
    """A worker host's look for clients of 0.1.2 at its prefix: they are logged once.

    Belongs to one thread.
    """

    def __init__(self, address: Address, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._next = 0.0
        self._has_said = False

    def look(self) -> None:
        """Look, if it is time to; what Redis refuses to tell stays unknown."""
        now = time.monotonic()
        if self._has_said or now < self._next:
            return
        self._next = now + _INTERVAL
        link = Link(self._address)
        try:
            with contextlib.suppress(LinkError):
                self._say(*_clients_and_items(link, self._prefix))
        finally:
            link.close()

    def _say(self, clients: int, items: int) -> None:
        if not (clients or items):
            return
        self._has_said = True
        log(
            logging.WARNING,
            "%s of service_streamer 0.1.2 at the prefix %r of %s, with %s in its queue: this "
            "version cannot serve them. Upgrade the clients, or run workers of 0.1.2 for them "
            "until then; see docs/upgrading.md",
            counted(clients, "client"), self._prefix, self._address, counted(items, "item"),
        )  # fmt: skip


def _clients_and_items(link: Link, prefix: str) -> tuple[int, int]:
    """How many old clients there are, and how many of their items wait. Raises LinkError."""
    start = f"{_CHANNEL}{prefix}".encode()
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", start.decode()) + "*"
    channels: list[bytes] = link.call("PUBSUB", "CHANNELS", pattern)
    # Other prefixes may begin with this one.
    clients = sum(bool(_UUID.fullmatch(channel.removeprefix(start))) for channel in channels)
    kind: bytes | str = link.call("TYPE", _QUEUE + prefix)
    is_list = kind in (b"list", "list")
    return clients, int(link.call("LLEN", _QUEUE + prefix)) if is_list else 0


class OldWorkers:
    """A client's look for workers of 0.1.2, while no worker host is there.

    Belongs to one thread.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._next = 0.0
        #: Whether somebody subscribes to patterns of channels, as each worker of 0.1.2 does. Others
        #: may do so, too; and of which prefix they are Redis does not tell.
        self.may_be_there = False

    def look(self) -> None:
        """Look, if it is time to: each look is a connection more, of every client."""
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
