"""What the batcher moves about: calls, their spans and batches. Records, no decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .isolation import Search

__all__ = ["Batch", "Call", "Span"]


_NEVER = math.inf


class Call:
    """One ``predict``/``submit``: its items as payloads, and its outputs as they come in.

    Attributes:
        outputs: by position; empty until the first batch with items of it is back.
        reply: where the outcome goes; opaque here.
        pending: items not yet cut into a batch.
        unanswered: items without an output.
        is_running: whether a part of it has been cut into a batch; never changes back.
        is_over: answered, failed, withdrawn or expired; never changes back.
        failure: why it failed, opaque here; None when it has not.
        deadline: the time at which nobody waits for it any more.
    """

    __slots__ = (
        "arrived_at",
        "deadline",
        "failure",
        "is_over",
        "is_running",
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
        self.is_running = self.is_over = False
        self.failure: Any = None
        self.arrived_at = 0.0
        self.deadline = _NEVER


#: A call, and where its items that are in a batch start and stop. A plain tuple: one is made for
#: every call, and a NamedTuple takes five times as long.
Span: TypeAlias = tuple[Call, int, int]


class Batch:
    """One model invocation: its spans in order, and their payloads until they are sent.

    Attributes:
        search: what it was split off for, if it is run again; None for a batch of new items.
        losses: how many workers died while they held its items.
        cut_at: when it was cut; 0 until then.
    """

    __slots__ = ("cut_at", "id", "losses", "payloads", "search", "size", "slot", "spans")

    def __init__(
        self,
        id: int,
        slot: int,
        spans: list[Span],
        payloads: list[Any],
        search: Search | None = None,
        losses: int = 0,
    ) -> None:
        self.id = id
        self.slot = slot
        self.spans = spans
        self.payloads = payloads
        self.size = len(payloads)
        self.search = search
        self.losses = losses
        self.cut_at = 0.0
