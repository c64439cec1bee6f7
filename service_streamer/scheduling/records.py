"""What the batcher moves about: calls, their spans, batches and slots. Records, no decisions."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Batch", "Call", "Slot", "SlotState", "Span", "Statistics"]


class Call:
    """One ``predict``/``submit``: its items as payloads, and its outputs as they come in.

    Attributes:
        outputs: by position; empty until the first batch with items of it is back.
        reply: where the outcome goes; opaque here.
        pending: items not yet cut into a batch.
        unanswered: items without an output.
        is_over: answered, failed or withdrawn; never changes back.
        failure: why it failed, opaque here; None when it has not.
    """

    __slots__ = (
        "arrived_at",
        "failure",
        "is_over",
        "outputs",
        "payloads",
        "pending",
        "reply",
        "size",
        "unanswered",
    )

    def __init__(self, payloads: Sequence[Any], reply: Any) -> None:
        self.payloads = payloads
        self.outputs: list[Any] = []
        self.reply = reply
        self.size = self.pending = self.unanswered = len(payloads)
        self.is_over = False
        self.failure: Any = None
        self.arrived_at = 0.0


class Span(NamedTuple):
    """The items ``start`` to ``stop`` of a call, in a batch."""

    call: Call
    start: int
    stop: int


class Batch:
    """One model invocation: its spans in order, and their payloads until they are sent."""

    __slots__ = ("id", "payloads", "size", "slot", "spans")

    def __init__(self, id: int, slot: int, spans: list[Span], payloads: list[Any]) -> None:
        self.id = id
        self.slot = slot
        self.spans = spans
        self.payloads = payloads
        self.size = len(payloads)


class SlotState(enum.Enum):
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    LOST = "lost"


class Slot:
    """Room for the batches of one worker, by their ids.

    Two threads may send to it at the same time, so the order in which they reach the worker, and
    come back, need not be that of their ids.
    """

    __slots__ = ("batches", "state")

    def __init__(self) -> None:
        self.state = SlotState.STARTING
        self.batches: dict[int, Batch] = {}


class Statistics(NamedTuple):
    """A count of everything the batcher holds."""

    pending_items: int
    batches_in_flight: int
    items_in_flight: int
    workers: Mapping[SlotState, int]
