"""What single flight moves about: callers' calls, and the backend's. Records, no decisions."""

from __future__ import annotations

from typing import Any

from ..observe.record import ORDINARY, Precedence, Timing

__all__ = ["Caller", "Computation"]


class Caller:
    """A call of a caller's.

    Attributes:
        reply: where its outcome goes; opaque here. None when it is over.
        outputs: by position, as they come in.
        missing: items without an output.
        timeout: how long its caller waits, seconds; None for ever.
        deadline: when that ends; infinity for never.
        precedence: as its caller wants it.
        flights: those that it waits for.
        is_over: answered, failed or gone; never changes back.
        boarded_at: when it came.
        answered_by: the backend's call that gave the last output, if one did; opaque here.
        missed: how long that had been under way when it came, seconds.
    """

    __slots__ = (
        "answered_by",
        "boarded_at",
        "deadline",
        "flights",
        "is_over",
        "missed",
        "missing",
        "outputs",
        "precedence",
        "reply",
        "timeout",
    )

    def __init__(
        self,
        size: int,
        reply: Any,
        deadline: float,
        precedence: Precedence = ORDINARY,
        timeout: float | None = None,
    ) -> None:
        self.reply = reply
        self.outputs: list[Any] = [None] * size
        self.missing = size
        self.timeout = timeout
        self.deadline = deadline
        self.precedence = precedence
        self.flights: dict[Computation, None] = {}
        self.is_over = False
        self.boarded_at = self.missed = 0.0
        self.answered_by: Any = None

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker. Any thread."""
        return any(flight.is_running for flight in [*self.flights])

    @property
    def timing(self) -> Timing | None:
        """Where its time went, with the last flight that it waited for. None from the cache."""
        call, missed = self.answered_by, self.missed
        timing = None if call is None else call.timing
        if timing is None or not missed:
            return timing
        stages: list[float] = []
        for seconds in timing:
            before = min(seconds, missed)
            missed -= before
            stages.append(seconds - before)
        return Timing(*stages)


class Computation:
    """One call of the backend's, and who waits for its items.

    Attributes:
        keys: of the items; None of one that nobody can share.
        items: as the backend gets them.
        waiting: by item: the passengers, each with the position in its outputs.
        aboard: how many passengers that are not over.
        precedence: as the backend has it.
        due: when the time of the passenger ends that it was made for.
        until: when the backend drops it, if it is not with a worker by then.
        launched_at: when it was made.
        call: the backend's; None before it has accepted it.
        is_over: answered, failed or given up; never changes back.
    """

    __slots__ = (
        "aboard",
        "call",
        "due",
        "gone",
        "is_over",
        "items",
        "keys",
        "launched_at",
        "precedence",
        "until",
        "waiting",
    )

    def __init__(self, precedence: Precedence, due: float, until: float, now: float) -> None:
        self.keys: list[bytes | None] = []
        self.items: list[Any] = []
        self.waiting: list[list[tuple[Caller, int]]] = []
        self.aboard = self.gone = 0
        self.precedence = precedence
        self.due = due
        self.until = until
        self.launched_at = now
        self.call: Any = None
        self.is_over = False

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker."""
        call = self.call
        return call is not None and bool(call.is_running)

    def add(self, key: bytes | None, item: Any) -> int:
        """Take on an item; returns its position."""
        self.keys.append(key)
        self.items.append(item)
        self.waiting.append([])
        return len(self.items) - 1
