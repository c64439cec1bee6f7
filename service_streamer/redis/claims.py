"""Bookkeeping of a worker host's claims. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from .outflow import Outflow

#: Seconds to claim ahead: an answer, a claim, and a busy interpreter in between.
_CLAIMING_TIME = 0.01
#: Batches to claim ahead for an instant model; measured, more did not help.
_MOST_AHEAD = 7


class Claim:
    """A call that a worker host has claimed.

    Attributes:
        id: id of its entry in Redis.
        client: name of the client; empty if unreadable, unverified if ``is_unread``.
        number: the client's number for it.
        size: number of items.
        call: the engine's call, until it is over; opaque here.
        is_open: whether it is still to be computed.
        is_submitted: whether the engine has it, which may be asked to drop it only then.
        is_set_aside: whether its message is in the stream of malformed ones.
        is_unread: whether this host could not read its message.
        outflow: of a stream, its outputs on their way to Redis; None for another call.
    """

    __slots__ = (
        "call", "client", "id", "is_open", "is_set_aside", "is_submitted", "is_unread", "number",
        "outflow", "size",
    )  # fmt: skip

    def __init__(self, id: bytes, client: str, number: int, size: int) -> None:
        self.id = id
        self.client = client
        self.number = number
        self.size = size
        self.call: Any = None
        self.outflow: Outflow | None = None
        self.is_open = True
        self.is_set_aside = self.is_submitted = self.is_unread = False


class Claims:
    """A worker host's claims in progress, and how much more it should claim.

    It claims as many items as its workers compute at once, and enough further batches to keep them
    busy during a request to Redis: one, if a batch takes longer. No more, since other hosts cannot
    compute what this host has claimed.

    Attributes:
        open_items: items that are claimed and not computed yet. Of a call at most a batch: a larger
            one takes turns with those that come after it, so it must not keep them from being
            claimed.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._claims: dict[bytes, Claim] = {}
        self._mean_size = 1.0
        self._is_full = False
        self.open_items = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    def get(self, id_: bytes) -> Claim | None:
        return self._claims.get(id_)

    def room(
        self, workers: int, batch_duration: float, held: int = 2, *, is_stepping: bool = False
    ) -> int:
        """How many calls to claim.

        Args:
            workers: how many serve.
            batch_duration: seconds between two batches of a worker.
            held: the most batches that a worker holds.
            is_stepping: whether the model is one of steps: a batch is one item then, and those that
                a worker holds beyond its places are enough to claim ahead.

        Once full, 0 until there is room for half a batch, so that few requests claim many calls.
        """
        ahead = _CLAIMING_TIME / batch_duration if batch_duration > 0 else _MOST_AHEAD
        batches = held - 1 + min(max(1, math.ceil(ahead)), _MOST_AHEAD)
        most = (held if is_stepping else batches * self._batch_size) * workers
        items = most - self.open_items
        is_little = items < self._batch_size // 2 and not is_stepping
        self._is_full = items <= 0 or (self._is_full and is_little)
        if self._is_full:
            return 0
        return max(1, math.floor(items / self._mean_size))

    def claimed(self, claim: Claim) -> bool:
        """Add a claim; false if it is known: after a lost connection claims may come twice."""
        if claim.id in self._claims:
            return False
        self._claims[claim.id] = claim
        size = min(claim.size, self._batch_size)
        self.open_items += size
        # A moving average over about thirty calls.
        self._mean_size += (size - self._mean_size) / 32
        return True

    def computed(self, claim: Claim) -> bool:
        """Note that there is an outcome; false if there was one already."""
        if not claim.is_open:
            return False
        claim.is_open = False
        claim.call = None
        self.open_items -= min(claim.size, self._batch_size)
        return True

    def finished(self, claims: Iterable[Claim]) -> None:
        """Forget claims: Redis has the outcome, or another host has claimed the call."""
        for claim in claims:
            self._claims.pop(claim.id, None)

    def gone(self, ids: Iterable[bytes]) -> list[Any]:
        """Forget claims that other hosts took; returns the engine's calls to withdraw."""
        claims = [self._claims[id_] for id_ in ids if id_ in self._claims]
        self.finished(claims)
        calls = [claim.call for claim in claims if claim.is_open and claim.is_submitted]
        for claim in claims:
            self.computed(claim)
        return calls
