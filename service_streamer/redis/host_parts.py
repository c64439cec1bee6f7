"""What the threads of a worker host work with: its options, and its parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..engine.engine import Engine
from ..errors import StreamerError
from .link import Address
from .scripts import Keys
from .wire import Wire


class HostOptions(NamedTuple):
    """Options of a host.

    Attributes:
        name: unique name among the hosts of a Redis.
        prefix: prefix of the keys.
        claim_timeout: seconds without a sign of life until other hosts claim its calls.
        reply_ttl: seconds that replies are kept for a client that does not fetch them.
        max_attempts: how many hosts may claim a call; 1 if it must not be computed twice.
        model: name of the model; all hosts of a prefix have the same.
    """

    name: str
    prefix: str
    claim_timeout: float
    reply_ttl: float
    max_attempts: int
    model: str

    @property
    def life(self) -> int:
        """Of the host's inbox without a sign of life, milliseconds."""
        return math.ceil(3000 * self.claim_timeout)

    @property
    def reply_life(self) -> int:
        """The same of replies."""
        return math.ceil(1000 * self.reply_ttl)


class HostParts(NamedTuple):
    """What a host was made of."""

    address: Address
    wire: Wire
    keys: Keys
    engine: Engine
    options: HostOptions
    batch_size: int

    @property
    def inbox(self) -> str:
        """The host's own, which is there while it is alive."""
        return self.keys.inbox(self.options.name)

    def announcement(self) -> bytes:
        """The model's description, for the web services."""
        description: Mapping[str, Any] | None = None
        with contextlib.suppress(StreamerError):  # no worker has loaded it
            description = self.engine.model_description()
        return self.wire.announcement(description or {})
