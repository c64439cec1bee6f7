"""The monotonic clock of another host, by this one's. Pure."""

from __future__ import annotations

import math

#: Clocks that differ by less count as one, which all processes of a host have. Clocks of two hosts
#: count from when each was started; that both were within this time is not to be expected.
_SAME = 0.05

#: How fast two clocks may run apart, seconds in a second. Quartz: 1e-5 to 1e-4.
_DRIFT = 1e-4


class RemoteClock:
    """Learns how far the clock is ahead from when messages were sent and when they came.

    The message that was fastest tells most, so what is learned is wrong by the time that it took.
    """

    def __init__(self) -> None:
        self._behind = math.inf  # this clock less the other one
        self._learned_at = 0.0

    def learn(self, sent: float, received: float) -> None:
        """A message came.

        Args:
            sent: when, by the other clock.
            received: when, by this one.
        """
        seen = received - sent
        self._behind = min(self._behind + _DRIFT * (received - self._learned_at), seen)
        self._learned_at = received

    def local(self, time: float) -> float:
        """A time of the other clock by this one; after ``learn``."""
        return time if abs(self._behind) < _SAME else time + self._behind
