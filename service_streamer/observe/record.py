"""What the batcher moves about: calls, their spans and batches. Records, no decisions."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from ..batching.isolation import Search

__all__ = ["NO_OUTPUTS", "ORDINARY", "Batch", "Call", "Precedence", "Reason", "Span", "Timing"]


_NEVER = math.inf


class Precedence(NamedTuple):
    """Which calls go before a call, among those that wait.

    Attributes:
        priority: those with a higher one go first.
        tenant: whose it is; the tenants share the workers by their weights.
        has_deadline: whether its time was given with the call, and not by a default that all have:
            then it goes before all whose time ends later, whatever their priority.
    """

    priority: int = 0
    tenant: str = ""
    has_deadline: bool = False


#: Of nearly all calls: compared by identity.
ORDINARY = Precedence()


class Reason(enum.Enum):
    """Why a batch was cut when it was, and with no more items than it has."""

    FULL = "it had batch_size items"
    COST = "one item more would have been beyond max_batch_cost"
    PAYS = "more items at once would have been slower for each"
    TRIED = "so many were tried, to learn what batches cost"
    PADDING = "the other items were too unlike in length"
    SHARE = "the rest was left for the other workers"
    ALONE = "no company was expected"
    COMPANY = "the company that was expected had come"
    LATE = "the company that was expected did not come in time"
    MAX_LATENCY = "the oldest item had waited for max_latency"
    DEADLINE = "the time of an item was about to end"
    AGAIN = "its items were run again, after a failure"
    FAILING = "batches failed, and smaller ones do so less often"


class Timing(NamedTuple):
    """Where the time of a call went, in seconds; of its last batch, if it took several.

    Attributes:
        queued: it waited for a worker, or for company.
        sent: on its way to the model, and behind the batch before, if there was one.
        computed: in the model.
        returned: on its way back.
    """

    queued: float
    sent: float
    computed: float
    returned: float

    @property
    def total(self) -> float:
        """From when it was accepted to when its result went out to who waits for it."""
        return sum(self)


class Call:
    """One ``predict``/``submit``: its items as payloads, and its outputs as they come in.

    The edge makes it, with all that its caller wants, and hands it to a backend.

    Args:
        payloads: the items. The engine replaces them by what it sends to a worker.
        reply: where the outcome goes; opaque here.
        timeout: how long its caller waits, seconds; None for ever.
        precedence: among those that wait.
        is_watched: whether the backend fails the call when its time ends. If not, its caller does,
            with ``expire``.
        more: whether other calls follow at once, and then ``flush``, so that they share a batch.

    Attributes:
        outputs: by position; empty until the first batch with items of it is back.
        pending: items not yet cut into a batch.
        unanswered: items without an output.
        is_running: whether a part of it has been cut into a batch; never changes back.
        is_over: answered, failed, withdrawn or expired; never changes back.
        failure: why it failed, opaque here; None when it has not.
        deadline: the time at which nobody waits for it any more.
        context: what an observer noted when the call was submitted; opaque here.
        lengths: of its items, if lengths are known; else None, and each counts one.
        times: of the last batch with items of it that is back: when it was cut, when the model
            began (if its clock is ours; else any time at all), how long that took, and when it was
            back. Not there before the first.
    """

    __slots__ = (
        "arrived_at",
        "context",
        "deadline",
        "failure",
        "is_over",
        "is_running",
        "is_watched",
        "lengths",
        "more",
        "outputs",
        "payloads",
        "pending",
        "precedence",
        "reply",
        "size",
        "timeout",
        "times",
        "unanswered",
    )

    times: tuple[float, float, float, float]

    def __init__(
        self,
        payloads: Sequence[Any],
        reply: Any,
        timeout: float | None = None,
        precedence: Precedence = ORDINARY,
        is_watched: bool = False,
        more: bool = False,
    ) -> None:
        self.payloads = payloads
        self.outputs: list[Any] = NO_OUTPUTS
        self.reply = reply
        self.timeout = timeout
        self.precedence = precedence
        self.is_watched = is_watched
        self.more = more
        self.size = self.pending = self.unanswered = len(payloads)
        self.is_running = self.is_over = False
        self.failure: Any = None
        self.arrived_at = 0.0
        self.deadline = _NEVER
        self.lengths: Sequence[float] | None = None
        self.context: Any = None

    @property
    def timing(self) -> Timing | None:
        """Where its time went; None unless it was answered with results."""
        if self.unanswered or self.failure is not None:
            return None
        cut_at, started_at, duration, back_at = self.times
        took = back_at - cut_at
        # What the model says it took is by another clock, be it that of a test.
        computed = duration if duration < took else took
        sent = started_at - cut_at
        if not 0.0 <= sent <= took - computed:
            sent = took - computed
        return Timing(cut_at - self.arrived_at, sent, computed, took - computed - sent)


#: Never changed: a list of its own for each call is one thing more for the garbage collector.
NO_OUTPUTS: list[Any] = []

#: A call, and where its items that are in a batch start and stop. A plain tuple: one is made for
#: every call, and a NamedTuple takes five times as long.
Span: TypeAlias = tuple[Call, int, int]


class Batch:
    """One model invocation: its spans in order, and their payloads until they are sent.

    Those of a call stand together.

    Attributes:
        search: what it was split off for, if it is run again; None for a batch of new items.
        losses: how many workers died while they held its items. If any, it is computed alone.
        cut_at: when it was cut; 0 until then.
        cost: what the model pays for: its size times its longest item.
        reason: why it was cut then, and of no more items.
        calls: how many have items in it.
        is_full: whether more items waited than it took.
        arrived: items that had arrived when it was cut, since the start.
    """

    __slots__ = (
        "arrived",
        "calls",
        "cost",
        "cut_at",
        "id",
        "is_full",
        "losses",
        "payloads",
        "reason",
        "search",
        "size",
        "slot",
        "spans",
    )

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
        self.cost = float(self.size)
        self.reason = Reason.AGAIN
        self.calls = len(spans)  # unless one has several
        self.is_full = False
        self.arrived = 0
