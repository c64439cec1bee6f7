"""The records of single flight: the calls of callers, and the backend's. No decisions."""

from __future__ import annotations

from typing import Any

from ..observe.record import ORDINARY, Precedence, Timing


class Caller:
    """A call of a caller's.

    Attributes:
        reply: where its outcome goes; opaque here. None when it is over.
        outputs: by position, as they come in.
        missing: items without an output.
        timeout: how long its caller waits, seconds; None for ever.
        deadline: when that ends; infinity for never.
        precedence: as its caller wants it.
        computations: those that it waits for.
        own: the one that was made for it, until that is submitted; None if there is none.
        is_over: answered, failed or gone; never changes back.
        joined_at: when it came.
        answered_by: the backend's call that gave the last output, if one did; opaque here.
        missed: how long that had been under way when it came, seconds.
    """

    __slots__ = (
        "answered_by",
        "computations",
        "deadline",
        "is_over",
        "joined_at",
        "missed",
        "missing",
        "outputs",
        "own",
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
        self.computations: dict[Computation, None] = {}
        self.own: Computation | None = None
        self.is_over = False
        self.joined_at = self.missed = 0.0
        self.answered_by: Any = None

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker. Any thread."""
        return any(computation.is_running for computation in [*self.computations])

    @property
    def timing(self) -> Timing | None:
        """Where its time went, with the last computation. None from the cache."""
        call, missed = self.answered_by, self.missed
        timing = None if call is None else call.timing
        if timing is None or not missed:
            return timing
        first = timing.first_output
        if first is not None:
            first = max(0.0, first - missed)
        stages: list[float] = []
        for seconds in timing[:4]:
            before = min(seconds, missed)
            missed -= before
            stages.append(seconds - before)
        between, longest = timing.between_outputs, timing.longest_between
        queued, sent, computed, returned = stages
        return Timing(queued, sent, computed, returned, first, between, longest)


class Computation:
    """One call of the backend's, and the callers that wait for its items.

    Attributes:
        keys: of the items; None of an item that cannot be shared.
        items: as the backend gets them.
        waiting: by item: the callers, each with the position in its outputs.
        caller_count: how many callers wait for it and are not over.
        left_count: how many callers left it since ``waiting`` was last cleaned up.
        precedence: as the backend has it.
        due: when the time of the caller ends that it was made for.
        until: when the backend drops it, if it is not with a worker by then.
        submitted_at: when it was made.
        call: the backend's, set by the backend.
        accepted: the same, when the backend has accepted it; None before.
        owner: gets the outcome; opaque here.
        is_over: answered, failed or given up; never changes back.
    """

    __slots__ = (
        "accepted",
        "call",
        "caller_count",
        "due",
        "is_over",
        "items",
        "keys",
        "left_count",
        "owner",
        "precedence",
        "submitted_at",
        "until",
        "waiting",
    )

    def __init__(self, precedence: Precedence, due: float, until: float, now: float) -> None:
        self.keys: list[bytes | None] = []
        self.items: list[Any] = []
        self.waiting: list[list[tuple[Caller, int]]] = []
        self.caller_count = self.left_count = 0
        self.precedence = precedence
        self.due = due
        self.until = until
        self.submitted_at = now
        self.call: Any = None
        self.accepted: Any = None
        self.owner: Any = None
        self.is_over = False

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker."""
        call = self.accepted
        return call is not None and bool(call.is_running)

    def complete(self, outputs: list[Any]) -> None:
        """For the backend: it succeeded."""
        self.owner.answered(self, outputs)

    def fail(self, failure: Any) -> None:
        """For the backend: it failed."""
        self.owner.failed(self, failure)

    def add(self, key: bytes | None, item: Any) -> int:
        """Take on an item; returns its position."""
        self.keys.append(key)
        self.items.append(item)
        self.waiting.append([])
        return len(self.items) - 1
