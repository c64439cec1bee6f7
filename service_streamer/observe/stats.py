"""What a streamer and its workers are doing, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["StreamerStats", "WorkerStats"]


@dataclass(frozen=True, slots=True)
class StreamerStats:
    """A snapshot; totals are since the streamer was built.

    Attributes:
        state: "starting", "running", "broken", "draining" or "closed".
        pending: items that wait for a worker.
        in_flight: items that workers hold.
        batches_in_flight: batches that workers hold; at most two each.
        workers: how many are "starting", "idle", "busy", "retiring", "stopping", "backing off"
            (dead, about to be started again) and "failed" (could not be started; tried again at
            least once a minute). Every state is there.
        restarts: starts of workers in place of lost ones, in total.
        accepted: calls that were accepted, in total. Each is answered, fails, expires or is
            cancelled in the end.
        answered: calls whose results came, in total.
        failed: calls that ended with an error of the model, of a worker or of closing, in total.
        retries: items that were to be computed again because their worker died, in total; an item
            counts each time.
        expired: calls whose time ended before their result came, in total; also those that were not
            accepted since so much waited that they could not be computed in time.
        cancelled: calls that were cancelled, or whose callers stopped waiting, in total.
        rejected: calls that were refused with ``Overloaded``, in total.
        isolated: calls that failed alone, after a batch had failed with them in it, in total.
        ceilings: of the workers that run out of device memory, by their number: the most that they
            compute at once. An int is a number of items; where items have lengths it is a float,
            items times the longest of them.
        deduplicated: items that were answered by the computation of another caller's, in total. A
            call all of whose items are is not counted among the accepted ones.
        cached: items that were answered from the cache, in total; likewise.
        trouble: why no worker gives answers at present, in a sentence; None while one does.
    """

    state: str
    pending: int
    in_flight: int
    batches_in_flight: int
    workers: Mapping[str, int]
    restarts: int
    accepted: int
    answered: int
    failed: int
    retries: int
    expired: int
    cancelled: int
    rejected: int
    isolated: int
    ceilings: Mapping[int, float]
    deduplicated: int = 0
    cached: int = 0
    trouble: str | None = None

    @property
    def gist(self) -> str:
        """What matters, in one line."""
        workers = (f"{count} {state}" for state, count in self.workers.items() if count)
        text = (
            f"{self.state} | pending {self.pending} | in flight {self.batches_in_flight} "
            f"batches/{self.in_flight} items | workers {', '.join(workers) or 'none'}"
        )
        names = (
            "restarts", "failed", "retries", "expired", "cancelled", "rejected", "isolated",
            "deduplicated", "cached",
        )  # fmt: skip
        totals = (f"{name} {getattr(self, name)}" for name in names if getattr(self, name))
        return " | ".join([text, *totals])


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker. There are two of one number while one replaces the other.

    Attributes:
        number: as in messages: from 0, and kept by those that are started in its place.
        device: its entry of ``cuda_devices`` as it was written, with "auto" the GPU's number; None
            if it was given none.
        state: one of those in ``StreamerStats.workers``.
        restarts: how often a worker of this number was started in place of a lost one, in total.
    """

    number: int
    device: int | str | None
    state: str
    restarts: int
