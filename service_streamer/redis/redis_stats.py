"""Snapshots of a Redis client and of a worker host."""

from __future__ import annotations

from dataclasses import dataclass

from ..observe.metrics import StreamerStats, nonzero


@dataclass(frozen=True, slots=True)
class RedisStreamerStats:
    """A snapshot of a client; totals are since the streamer was built.

    Attributes:
        state: "new" (before the first call), "connected", "disconnected", "draining" or "closed".
        pending: unfinished calls of this streamer.
        queued: calls of all clients in Redis, waiting or in progress; updated every 5 seconds, None
            before the first update.
        hosts: live worker hosts; updated likewise.
        outages: total of lost connections to Redis.
        expired: total of calls that timed out.
        cancelled: total of cancelled calls.
        rejected: total of calls refused with ``Overloaded``.
        deduplicated: total of items answered by another caller's computation.
        cached: total of items answered from the cache.
        models: names of the hosts' models: all hosts of a prefix have the same one.
        unreadable: total of calls that failed because client and host could not read each other:
            their secret, serializer or ``max_message_bytes`` differ.
        lost: total of calls that made no progress for ``answer_timeout``, and of streams whose
            outputs Redis has lost.
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
        """A one-line summary."""
        text = f"{self.state} | pending {self.pending}"
        if self.hosts is not None:
            text += f" | in Redis {self.queued} | worker hosts {self.hosts}"
        totals = nonzero(
            self, "outages", "expired", "cancelled", "rejected", "unreadable", "lost",
            "deduplicated", "cached",
        )  # fmt: skip
        return " | ".join([text, *totals])


@dataclass(frozen=True, slots=True)
class RedisWorkerStats:
    """A snapshot of a worker host; totals are since it was started.

    Attributes:
        state: "starting" (before it has joined), "serving", "disconnected" (from Redis), "leaving"
            or "failed".
        pool: snapshot of its workers.
        held: claimed calls in progress.
        claimed: total of claimed calls.
        taken_over: total of claimed calls that another host had left unfinished.
        taken_away: total of calls that another host took over from this one.
        late: total of results that came after another host's.
        handed_back: total of calls handed back at the end.
        expired: total of calls claimed after their deadline.
        set_aside: total of malformed messages.
        outages: total of lost connections to Redis.
    """

    state: str
    pool: StreamerStats
    held: int
    claimed: int = 0
    taken_over: int = 0
    taken_away: int = 0
    late: int = 0
    handed_back: int = 0
    expired: int = 0
    set_aside: int = 0
    outages: int = 0

    @property
    def gist(self) -> str:
        """A one-line summary."""
        totals = nonzero(
            self, "taken_over", "taken_away", "late", "handed_back", "expired", "set_aside",
            "outages",
        )  # fmt: skip
        return " | ".join([self.pool.gist, f"held {self.held}", f"claimed {self.claimed}", *totals])
