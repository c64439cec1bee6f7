"""What the threads of a worker host share: its options, its claims, and what is to be sent."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.engine import Engine
from ..engine.threads import Doorbell
from ..errors import ModelError, Overloaded, StreamerError
from ..options.table import RedisWorkerOptions
from ..workers.protocol import Failure
from .claims import Claim, Claims, Outflows, StreamClaim
from .link import Address
from .scripts import LEFT, Keys
from .wire import Wire

#: The item of a stream rests from so many outputs on that Redis has not taken; beyond the other
#: number its stream fails, since it is of a model that cannot rest.
_MOST_WAITING = 1024
_FAR_TOO_MANY = 8 * _MOST_WAITING

#: The same of bytes.
_MOST_BYTES_WAITING = 8 << 20
_FAR_TOO_MUCH = 16 * _MOST_BYTES_WAITING

#: Maximum bytes of outputs that go with the end of a stream.
_MOST_AT_END = 1 << 16

#: Bytes of a message beside its outputs.
_OVERHEAD = 320


class Outcome(NamedTuple):
    """The outcome of a claimed call, to be sent to Redis."""

    claim: Claim
    outputs: list[bytes]
    failure: Failure | None
    was_running: bool

    def failed(self, failure: Failure) -> Outcome:
        """The same call with an error instead, and without outputs that were not written."""
        if isinstance(self.claim, StreamClaim):
            self.claim.clear()
        return Outcome(self.claim, [], failure, self.was_running)


class HostState:
    """Of one host. What changes claims is for any thread.

    Args:
        name: unique among the hosts of a Redis.

    Attributes:
        max_claims: how many hosts may claim a call; 1 if it must not be computed twice.
        life: milliseconds that the host's inbox is kept without a sign of life.
        reply_life: milliseconds that replies are kept for a client that does not fetch them.
        idle: milliseconds without a sign of life after which a call is another host's.
        lock: guards the claims, their outputs and the counts.
        outcomes: to be sent.
        flows: outputs of streams to be sent.
        has_room: wakes the thread that claims.
        has_work: wakes the thread that sends.
        is_leaving: no more calls are claimed.
        has_orphans: there may be calls that other hosts have left.
        takes_a_batch: the claimer claims at least a batch of those, even if this host is full: they
            have waited longest.
        counts: what happened so far, by the names of ``RedisWorkerStats``.
    """

    def __init__(
        self,
        address: Address,
        wire: Wire,
        engine: Engine,
        options: RedisWorkerOptions,
        name: str,
    ) -> None:
        self.address = address
        self.wire = wire
        self.keys = Keys(options.prefix)
        self.engine = engine
        self.options = options
        self.name = name
        self.max_claims = options.max_attempts if options.retry else 1
        self.life = math.ceil(3000 * options.claim_timeout)
        self.reply_life = math.ceil(1000 * options.reply_ttl)
        self.idle = math.ceil(1000 * options.claim_timeout)
        #: Key of the host's own inbox, which is there while it is alive.
        self.inbox = self.keys.inbox(name)
        self.lock = threading.RLock()  # a finalizer of a user's may run while it is held
        self.claims = Claims(options.batch_size)
        self.flows = Outflows()
        self.outcomes: collections.deque[Outcome] = collections.deque()
        self.has_room = Doorbell()
        self.has_work = Doorbell()
        self.is_leaving = threading.Event()
        self.has_orphans = self.takes_a_batch = False
        self.counts: collections.Counter[str] = collections.Counter()
        self._most_at_end = min(_MOST_AT_END, wire.max_bytes // 2)
        self._pause_lock = threading.Lock()
        self._redis_ahead = 0.0  # seconds, of our monotonic clock
        #: Monotonic time from which it may claim dead hosts' calls; infinity until it has joined.
        self._takes_over_from = math.inf

    def announcement(self) -> bytes:
        """The model's description, for the web services."""
        description: Mapping[str, Any] | None = None
        with contextlib.suppress(StreamerError):  # no worker has loaded it
            description = self.engine.model_description()
        return self.wire.announcement(description or {})

    # -- among other hosts

    @property
    def has_joined(self) -> bool:
        """Whether this host is one of those of its prefix, as far as is known."""
        return self._takes_over_from < math.inf

    def joined(self, *, takes_over: bool) -> None:
        """Note it. After an outage, the other hosts first need time for a sign of life."""
        now = time.monotonic()
        self._takes_over_from = now if takes_over else now + self.options.claim_timeout

    def lost_redis(self) -> None:
        self._takes_over_from = math.inf

    @property
    def least_idle(self) -> int:
        """Milliseconds after which this host may claim a call of another one now."""
        return LEFT if time.monotonic() < self._takes_over_from else self.idle

    def read_clock(self, redis_now: int) -> None:
        """Redis has just said its time, in milliseconds."""
        self._redis_ahead = redis_now / 1000 - time.monotonic()

    def seconds_until(self, milliseconds: int) -> float:
        """Until a time of Redis's clock; 0 or less if it has passed."""
        return milliseconds / 1000 - self._redis_ahead - time.monotonic()

    # -- claims

    def __len__(self) -> int:
        with self.lock:
            return len(self.claims)

    def room(self, workers: int) -> int:
        """How many more calls to claim for so many workers."""
        batcher = self.engine.batcher
        with self.lock:
            return self.claims.room(
                workers,
                batcher.figures.batch_duration,
                batcher.slots.room,
                is_stepping=batcher.has_steps,
            )

    def add(self, claim: Claim, claims: int) -> bool:
        """Add a claim, of a call that so many hosts have claimed; false if it is known."""
        with self.lock:
            is_news = self.claims.add(claim)
            if is_news:
                self.counts["claimed"] += 1
                self.counts["taken_over"] += claims > 1
            return is_news

    def submitted(self, claim: Claim) -> bool:
        """The engine has it; whether it is still to be computed."""
        with self.lock:
            claim.is_submitted = True
            return claim.is_open

    def finish(
        self, claim: Claim, outputs: list[bytes] | None = None, failure: Failure | None = None
    ) -> None:
        """Queue an outcome for Redis, behind outputs that are too many to go with it."""
        with self.lock:
            was_running = claim.call is not None and claim.call.is_running
            if not self.claims.close(claim):
                return
            outcome = Outcome(claim, outputs or [], failure, was_running)
            if isinstance(claim, StreamClaim):
                claim.outcome = outcome
                self._end_flow(claim)
            else:
                self.outcomes.append(outcome)
        self.has_work.ring()
        self.has_room.ring()

    def forget(self, ids: Sequence[bytes]) -> int:
        """Drop claims that others have taken, or nobody wants; returns how many were open."""
        with self.lock:
            for claim in filter(None, map(self.claims.get, ids)):
                self.flows.close(claim)
            calls = self.claims.take_away(ids)
        self.has_room.ring()
        for call in filter(None, calls):  # no worker here needs to go on with them
            self.engine.withdraw(call)
        return len(calls)

    # -- outputs of streams

    def put(self, claim: StreamClaim, output: bytes) -> None:
        """An output has come. In the engine's thread."""
        if len(output) + _OVERHEAD > self.wire.max_bytes:
            text = f"{len(output)} bytes, but max_message_bytes is {self.wire.max_bytes}"
            error = ModelError(f"an output of the stream is too large: {text}")
            self._fail(claim, Failure(error))
            return
        with self.lock:
            if not claim.is_open:
                return
            call = claim.call
            waiting = self.flows.put(claim, output)
            claim.is_behind |= (
                waiting >= _MOST_WAITING or claim.bytes_waiting >= _MOST_BYTES_WAITING
            )
        if claim.is_paused and call is not None and not call.is_held:
            self._pause(claim)
            # Else its worker is about to end, and lets nothing rest; or this was the last one.
            if call.is_held or call.is_over:
                return
        if waiting >= _FAR_TOO_MANY or claim.bytes_waiting >= _FAR_TOO_MUCH:
            text = f"{waiting} outputs of the stream wait for Redis, or its client reads none"
            self._fail(claim, Failure(Overloaded(text)))

    def pause(self, id_: bytes, *, is_held: bool) -> None:
        """The client of a stream wants its item to rest, or to go on."""
        with self.lock:
            claim = self.claims.get(id_)
        if isinstance(claim, StreamClaim):
            claim.is_held = is_held
            self._pause(claim)

    def written(self, claim: StreamClaim, count: int) -> None:
        """Redis has taken the first outputs of a stream that waited."""
        with self.lock:
            self.flows.written(claim, count)
            has_room = 2 * len(claim.waiting) <= _MOST_WAITING
            goes_on = (
                claim.is_behind and has_room and 2 * claim.bytes_waiting <= _MOST_BYTES_WAITING
            )
            if goes_on:
                claim.is_behind = False
            self._end_flow(claim)
        if goes_on:
            self._pause(claim)

    def fail_streams(self, client: str, failure: Failure) -> None:
        """The streams of a client fail, and their outputs that wait go nowhere."""
        with self.lock:
            claims = self.flows.of(client)
            for claim in claims:
                claim.clear()
                if claim.outcome is not None:
                    self.outcomes.append(claim.outcome.failed(failure))
                self.flows.close(claim)
        for claim in claims:
            self._fail(claim, failure)

    def _end_flow(self, claim: StreamClaim) -> None:
        """Let the end of a stream go, if there is one and what waits may go with it. Locked."""
        if claim.outcome is not None and claim.bytes_waiting <= self._most_at_end:
            outcome, claim.outcome = claim.outcome, None
            self.flows.close(claim)
            self.outcomes.append(outcome)

    def _fail(self, claim: Claim, failure: Failure) -> None:
        with self.lock:
            call = claim.call if claim.is_submitted else None
        self.finish(claim, failure=failure)
        if call is not None:
            self.engine.withdraw(call)

    def _pause(self, claim: StreamClaim) -> None:
        """Have the item rest, or go on."""
        with self._pause_lock:  # the last one to come here finds how it is
            call = claim.call
            if call is not None:
                self.engine.hold(call, is_held=claim.is_paused)
