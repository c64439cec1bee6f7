"""When a pool without clients ends. Pure."""

from __future__ import annotations

import math


class Linger:
    """Counts the clients of a pool, and says when it ends.

    Args:
        now: when the pool has started, seconds of a monotonic clock.
        first: seconds that it waits for its first client.

    Attributes:
        ends_at: when the pool ends; infinity while it has clients and no bound.
    """

    def __init__(self, now: float, first: float) -> None:
        self._clients = 0
        self._seconds = 0.0
        self._has_retired = False
        self._latest = math.inf
        self.ends_at = now + first

    @property
    def has_clients(self) -> bool:
        return self._clients > 0

    def joined(self, seconds: float) -> None:
        """A client has come, which wants the pool to stay for so long after the last one."""
        self._clients += 1
        self._seconds = max(self._seconds, seconds)
        self.ends_at = self._latest

    def left(self, now: float) -> None:
        """A client has gone."""
        self._clients -= 1
        if not self._clients:
            self.ends_at = now if self._has_retired else now + self._seconds

    def retired(self, now: float, bound: float) -> None:
        """No client can come any more: the pool ends with the last one.

        Args:
            bound: seconds after which it ends, whoever is left; infinity for none.
        """
        self._has_retired = True
        self._latest = min(self._latest, now + bound)
        self.ends_at = self._latest if self._clients else now
