"""What a worker host holds: claimed calls until Redis has their outcomes. For all its threads."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import NamedTuple

from ..engine.timer import Doorbell
from ..workers.protocol import Failure
from .claims import Claim, Claims
from .host_parts import HostParts
from .host_streams import HostStreams


class HeldOutcome(NamedTuple):
    """The outcome of a claimed call, to be sent to Redis."""

    claim: Claim
    outputs: list[bytes]
    failure: Failure | None
    was_running: bool

    def failed(self, failure: Failure) -> HeldOutcome:
        """The same call with an error instead, and without outputs that were not written."""
        if self.claim.outflow is not None:
            self.claim.outflow.clear()
        return HeldOutcome(self.claim, [], failure, self.was_running)


class HeldCalls:
    """Those of one host.

    Attributes:
        lock: guards ``claims`` and ``counts``.
        outcomes: to be sent.
        streams: for whoever sends.
        has_room: wakes the thread that claims.
        has_work: wakes the thread that sends.
        is_leaving: no more calls are claimed.
        counts: what happened so far, by the names of ``RedisWorkerStats``.
    """

    def __init__(self, parts: HostParts) -> None:
        self._engine = parts.engine
        self.lock = threading.RLock()  # a finalizer of a user's may run while it is held
        self.claims = Claims(parts.batch_size)
        self.outcomes: collections.deque[HeldOutcome] = collections.deque()
        self.has_room = Doorbell()
        self.has_work = Doorbell()
        self.is_leaving = threading.Event()
        self.counts = dict.fromkeys(
            (
                "claimed", "taken_over", "taken_away", "late", "handed_back", "expired",
                "set_aside", "clock_steps",
            ),
            0,
        )  # fmt: skip
        self.streams = HostStreams(
            parts,
            self.claims,
            self.lock,
            on_failed=lambda claim, failure: self.computed(claim, failure=failure),
            on_outcome=self.outcomes.append,
            on_dropped=self.forget,
        )

    def __len__(self) -> int:
        with self.lock:
            return len(self.claims)

    def room(self, workers: int) -> int:
        """How many more calls to claim for so many workers."""
        engine = self._engine
        with self.lock:
            return self.claims.room(
                workers, engine.batch_duration, engine.room, is_stepping=engine.has_steps
            )

    def hold(self, claim: Claim, claims: int) -> bool:
        """Add a claim, of a call that so many hosts have claimed; false if it is known."""
        with self.lock:
            is_news = self.claims.claimed(claim)
            if is_news:
                self.counts["claimed"] += 1
                self.counts["taken_over"] += claims > 1
            return is_news

    def submitted(self, claim: Claim) -> bool:
        """The engine has it; whether it is still to be computed."""
        with self.lock:
            claim.is_submitted = True
            return claim.is_open

    def computed(
        self,
        claim: Claim,
        outputs: list[bytes] | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Queue an outcome for Redis. Any thread."""
        with self.lock:
            was_running = claim.call is not None and claim.call.is_running
            if not self.claims.computed(claim):
                return
            outcome = HeldOutcome(claim, outputs or [], failure, was_running)
            if not self.streams.keeps(claim, outcome):
                self.outcomes.append(outcome)
        self.has_work.ring()
        self.has_room.ring()

    def leave(self) -> None:
        """Claim no more calls."""
        self.is_leaving.set()
        self.has_room.ring()

    def forget(self, ids: Sequence[bytes]) -> int:
        """Drop claims that others have taken, or nobody wants; returns how many were open."""
        with self.lock:
            for claim in filter(None, map(self.claims.get, ids)):
                self.streams.close(claim)
            calls = self.claims.gone(ids)
        self.has_room.ring()
        for call in filter(None, calls):  # no worker here needs to go on with them
            self._engine.withdraw(call)
        return len(calls)
