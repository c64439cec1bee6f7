"""What the two sides of a broker are doing, as records."""

from __future__ import annotations

from dataclasses import dataclass

from ..observe.stats import StreamerStats

__all__ = ["RedisStreamerStats", "RedisWorkerStats"]


@dataclass(frozen=True, slots=True)
class RedisStreamerStats:
    """A snapshot of a client; totals are since the streamer was built.

    Attributes:
        state: "new" (nothing asked yet), "connected", "disconnected", "draining" or "closed".
        pending: calls of this streamer that are not over.
        queued: calls of all clients in Redis, waiting or being computed, when last asked (every 5
            seconds); None before that.
        hosts: worker hosts that are alive, when last asked.
        outages: how often Redis was lost, in total.
        expired: calls whose time ended before their result came, in total.
        cancelled: calls that were cancelled, or that nobody waited for any more, in total.
        rejected: calls that were refused with ``Overloaded``, in total.
        deduplicated: items that were answered by the computation of another caller's, in total.
        cached: items that were answered from the cache, in total.
        models: what those hosts serve, by name; there should be one.
        unreadable: calls that failed because one side could not read the message of the other, in
            total: another secret, serializer or ``max_message_bytes``.
        lost: calls that failed because they were no longer in Redis and had no reply, in total.
    """

    state: str
    pending: int
    queued: int | None
    hosts: int | None
    outages: int
    expired: int
    cancelled: int
    rejected: int
    deduplicated: int = 0
    cached: int = 0
    models: tuple[str, ...] = ()
    unreadable: int = 0
    lost: int = 0

    @property
    def gist(self) -> str:
        """What matters, in one line."""
        text = f"{self.state} | pending {self.pending}"
        if self.hosts is not None:
            text += f" | in Redis {self.queued} | worker hosts {self.hosts}"
        if len(self.models) > 1:
            text += f" | different models {', '.join(self.models)}"
        names = (
            "outages", "expired", "cancelled", "rejected", "unreadable", "lost", "deduplicated",
            "cached",
        )  # fmt: skip
        totals = (f"{name} {getattr(self, name)}" for name in names if getattr(self, name))
        return " | ".join([text, *totals])


@dataclass(frozen=True, slots=True)
class RedisWorkerStats:
    """A snapshot of a worker host; totals are since it was started.

    Attributes:
        state: "starting" (it has not joined yet), "serving", "disconnected" (from Redis), "leaving"
            or "failed".
        pool: what its workers are doing.
        held: calls that it has claimed and not finished.
        claimed: calls that it has claimed, in total.
        taken_over: those of them that another host had claimed before and not finished, in total.
        taken_away: calls that another host has claimed while this one held them, in total.
        late: calls that were not answered since another host had answered them, in total.
        handed_back: calls that were put in again at the end, in total.
        expired: calls that were over their time when they were claimed, in total.
        set_aside: messages that could not be read, in total.
        outages: how often Redis was lost, in total.
        clock_steps: how often Redis's clock was set by more than a second, in total.
    """

    state: str
    pool: StreamerStats
    held: int
    claimed: int
    taken_over: int
    taken_away: int
    late: int
    handed_back: int
    expired: int
    set_aside: int
    outages: int
    clock_steps: int

    @property
    def gist(self) -> str:
        """What matters, in one line."""
        names = (
            "taken_over", "taken_away", "late", "handed_back", "expired", "set_aside", "outages",
            "clock_steps",
        )  # fmt: skip
        totals = (
            f"{name.replace('_', ' ')} {getattr(self, name)}"
            for name in names
            if getattr(self, name)
        )
        return " | ".join([self.pool.gist, f"held {self.held}", f"claimed {self.claimed}", *totals])
