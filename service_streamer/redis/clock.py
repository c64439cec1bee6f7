"""Redis's clock as a worker host sees it, whatever steps it makes. No I/O."""

from __future__ import annotations

__all__ = ["TOLERANCE", "RedisClock"]

#: By how much Redis's clock may differ from what is expected before that is a step, seconds.
TOLERANCE = 1.0

#: For how long a clock that was left by a step is remembered, seconds: calls of before it may wait.
_MEMORY = 600.0


class RedisClock:
    """When deadlines are, which calls carry as times of Redis's clock, on our monotonic clock.

    Redis's clock may be set while calls wait. Which of them came before is not known, so a call's
    time has ended only if it has by every setting of late: what is computed too late does less
    harm than what is dropped. For one thread at a time.
    """

    def __init__(self) -> None:
        self._offset = 0.0  # Redis's time, less ours
        self._read_at: float | None = None
        self._left: list[tuple[float, float]] = []  # offsets of before steps, and until when

    def read(self, redis_now: float, asked: float, answered: float) -> float:
        """Redis has said its time; returns how far it was set, seconds: 0 if it was not.

        Args:
            redis_now: what it said.
            asked, answered: our time before and after; Redis's is of some instant in between.
        """
        least, most = redis_now - answered, redis_now - asked
        step = 0.0
        if self._read_at is None:
            self._offset = least
        elif least - TOLERANCE <= self._offset <= most + TOLERANCE:
            self._offset = max(least, min(self._offset, most))
        else:
            step = (least + most) / 2 - self._offset
            self._left.append((self._offset, answered + _MEMORY))
            self._offset = least
        self._left = [each for each in self._left if each[1] > answered]
        self._read_at = answered
        return step

    def expected(self, now: float) -> float:
        """What it should say now."""
        return self._offset + now

    def was_read_since(self, then: float) -> bool:
        """Whether Redis has said its time since then."""
        return self._read_at is not None and self._read_at >= then

    def left(self, deadline: float, now: float) -> float:
        """How much time there is until then, seconds; not above 0 if it has passed."""
        offset = min((offset for offset, _ in self._left), default=self._offset)
        return deadline - min(offset, self._offset) - now
