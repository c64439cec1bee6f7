"""What the batcher moves about: calls, their spans, batches and slots. Records, no decisions."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Batch", "Call", "Slot", "SlotState", "Span", "Statistics"]


class Call:
    """One ``predict``/``submit``: its items as payloads, and its outputs as they come in.

    Attributes:
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
        "unanswered",
    )

    def __init__(self, payloads: Sequence[Any], reply: Any) -> None:
        size = len(payloads)
        self.payloads = payloads
        self.outputs: list[Any] = [None] * size
        self.reply = reply
        self.pending = size
        self.unanswered = size
        self.is_over = False
        self.failure: Any = None
        self.arrived_at = 0.0


class Span:
    """The items ``start`` to ``stop`` of a call. Shrinks from the left while it is pending."""

    __slots__ = ("call", "start", "stop")

    def __init__(self, call: Call, start: int, stop: int) -> None:
        self.call = call
        self.start = start
        self.stop = stop


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
