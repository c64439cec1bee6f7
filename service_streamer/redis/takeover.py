"""When a worker host may take over the calls of silent ones: by Redis's clock, and by its own."""

from __future__ import annotations

import logging
import math
import time

from .held_calls import HeldCalls
from .host_parts import HostParts
from .link import log
from .redis_clock import RedisClock
from .scripts import LEFT


class Takeover:
    """For the threads of one host.

    After an outage, and after a step of Redis's clock, the other hosts need time for a sign of
    life: until then it only takes over what they have left.

    Attributes:
        has_orphans: there may be calls that others have left.
    """

    def __init__(self, parts: HostParts, held: HeldCalls) -> None:
        self._address = parts.address
        self._claim_timeout = parts.options.claim_timeout
        self._held = held
        self.has_orphans = False
        self._clock = RedisClock()
        #: Monotonic time from which it may claim dead hosts' calls; infinity until it has joined.
        self._takes_over_from = math.inf

    @property
    def has_joined(self) -> bool:
        """Whether this host is one of those of its prefix, as far as is known."""
        return self._takes_over_from < math.inf

    def joined(self, *, takes_over: bool) -> None:
        now = time.monotonic()
        self._takes_over_from = now if takes_over else now + self._claim_timeout

    def lost_redis(self) -> None:
        self._takes_over_from = math.inf

    @property
    def idle(self) -> int:
        """Milliseconds without a sign of life after which a call is another host's."""
        return math.ceil(1000 * self._claim_timeout)

    @property
    def least_idle(self) -> int:
        """The same, as far as this host may judge it now."""
        return LEFT if time.monotonic() < self._takes_over_from else self.idle

    def read_clock(self, redis_now: int, asked: float) -> None:
        """Take in Redis's time in milliseconds; ``asked`` is our time before the request."""
        now = time.monotonic()
        with self._held.lock:
            step = self._clock.read(redis_now / 1000, asked, now)
            self._held.counts["clock_steps"] += step != 0
        if step:
            if self.has_joined:
                self._takes_over_from = now + self._claim_timeout
            log(
                logging.WARNING,
                "the clock of %s was set %.1f s %s: hosts wait %s s for each other's signs of "
                "life, and calls keep their deadlines",
                self._address, abs(step), "forward" if step > 0 else "back", self._claim_timeout,
            )  # fmt: skip

    def expected(self, now: float) -> int:
        """Redis's expected time, milliseconds."""
        return math.floor(1000 * self._clock.expected(now))

    def was_read_since(self, then: float) -> bool:
        """Whether Redis's time was read since then."""
        return self._clock.was_read_since(then)

    def left(self, milliseconds: int) -> float:
        """Seconds until a time of Redis's clock; 0 or less if it has passed."""
        return self._clock.left(milliseconds / 1000, time.monotonic())
