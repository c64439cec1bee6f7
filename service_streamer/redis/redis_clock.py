"""Redis's clock, as seen from a worker host. No I/O."""

from __future__ import annotations

#: A larger difference from the expected time of Redis is a step of its clock, seconds.
TOLERANCE = 1.0

#: Seconds that the clock before a step is remembered: older calls may still wait.
_REMEMBERED = 600.0


class RedisClock:
    """Converts deadlines, which are times of Redis's clock, to our monotonic clock.

    Redis's clock may be set while calls wait, and it is unknown which calls came before. So a
    deadline has passed only if it has by every recent setting: computing too late does less harm
    than dropping a call. For one thread at a time.
    """

    def __init__(self) -> None:
        self._offset = 0.0  # Redis's time minus ours
        self._read_at: float | None = None
        self._left: list[tuple[float, float]] = []  # earlier offsets, and until when they count

    def read(self, redis_now: float, asked: float, answered: float) -> float:
        """Take in Redis's time; returns the step of its clock in seconds, 0 if there was none.

        Args:
            redis_now: Redis's time.
            asked, answered: our time before and after the request.
        """
        least, most = redis_now - answered, redis_now - asked
        step = 0.0
        if self._read_at is None:
            self._offset = least
        elif least - TOLERANCE <= self._offset <= most + TOLERANCE:
            self._offset = max(least, min(self._offset, most))
        else:
            step = (least + most) / 2 - self._offset
            self._left.append((self._offset, answered + _REMEMBERED))
            self._offset = least
        self._left = [each for each in self._left if each[1] > answered]
        self._read_at = answered
        return step

    def expected(self, now: float) -> float:
        """Redis's expected time now."""
        return self._offset + now

    def was_read_since(self, then: float) -> bool:
        """Whether Redis's time was read since then."""
        return self._read_at is not None and self._read_at >= then

    def left(self, deadline: float, now: float) -> float:
        """Seconds until a deadline; 0 or less if it has passed."""
        offset = min((offset for offset, _ in self._left), default=self._offset)
        return deadline - min(offset, self._offset) - now
