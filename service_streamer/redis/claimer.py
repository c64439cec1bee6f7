"""The thread of a worker host that joins the others, claims calls and submits them."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import (
    BadMessage,
    PredictTimeout,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    WorkerLost,
    WorkerStartError,
)
from ..observe.record import Call
from ..reporting import report_bug, summary
from ..workers.protocol import Failure
from .claims import Claim, StreamClaim
from .finisher import Finisher
from .host_state import HostState
from .link import Backoff, Link, LinkError, NoGroup, Outages, entries, log
from .scripts import BEGUN, GROUP, JOIN, LEFT, TAKE

#: Later than every deadline, milliseconds; exact as a float.
_FAR = 1 << 53


class Claimer:
    """Claims as many calls as there is room for, and submits them in the order of arrival.

    Only this thread claims: so what Redis gives out later cannot overtake what it gave before.

    Args:
        on_failure: called if this host cannot go on.

    Attributes:
        link: its own, whose reads block.
    """

    def __init__(
        self,
        state: HostState,
        finisher: Finisher,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._state = state
        self._keys = state.keys
        self._finisher = finisher
        self._on_failure = on_failure
        self.link = Link(state.address, blocks=state.address.longest_block)
        self._has_joined = False  # at least once
        self._mismatch_since: float | None = None  # hosts with another model exist

    def run(self, outages: Outages) -> None:
        """Claim calls until the host leaves."""
        state = self._state
        backoff = Backoff(random.random)
        is_in = False
        while not state.is_leaving.is_set():
            try:
                workers = state.engine.wait_serving(None)
                room = state.room(workers)
                if state.takes_a_batch:
                    room = max(room, state.options.batch_size)
                if not room:
                    state.has_room.wait(None)
                    continue
                if not is_in:
                    is_in = self._join(room)
                    outages.over(state.address)
                    if not is_in:
                        state.is_leaving.wait(backoff.failed())
                    continue  # the room may have changed
                if state.has_orphans:
                    self._take(room)
                else:
                    self._read(room)
                backoff.succeeded()
            except LinkError as error:
                is_in = False
                state.lost_redis()
                if not isinstance(error, NoGroup) and not state.is_leaving.is_set():
                    outages.lost(error)
                state.is_leaving.wait(backoff.failed())
            except (StreamerBroken, StreamerClosed, WorkerStartError) as error:  # no calls any more
                if not state.is_leaving.is_set():
                    self._on_failure(error)
                return
            except BaseException as bug:  # callers must not wait for a dead thread
                if state.is_leaving.is_set():  # close() has closed its connection
                    return
                report_bug("the worker host", bug)
                is_in = False  # it gets all its claims again when it joins
                state.lost_redis()
                self.link.close()
                state.is_leaving.wait(backoff.failed())

    def _join(self, room: int) -> bool:
        """Join the hosts of the prefix; false if it must wait."""
        state = self._state
        keys = (self._keys.calls, state.inbox, self._keys.model)
        # A new host may take over calls. After an outage, the others have to come back first.
        is_new = not self._has_joined
        may_take_over = is_new and state.max_claims > 1
        # So that no call may finish between Redis's answer and its use.
        with self._finisher.lock:
            self._finisher.end()
            redis_now, other_models, claimed, taken, more, takes_over = self.link.run(
                JOIN, keys, state.name, state.life, self._keys.inboxes, state.options.model_name,
                max(room, state.options.batch_size), state.idle if may_take_over else LEFT,
                int(may_take_over), state.announcement(), int(is_new),
            )  # fmt: skip
            if other_models:
                self._check_other_models({each.decode(errors="replace") for each in other_models})
                return False
            self._mismatch_since = None
            state.read_clock(redis_now)
            for id_, fields, claims in (*claimed, *taken):
                self._submit_entry(id_, fields, claims)
        state.takes_a_batch, state.has_orphans = False, bool(more)
        if is_new:
            self._has_joined = True
            text = "worker host %s serves %r of %s"
            log(logging.INFO, text, state.name, state.options.prefix, state.address)
        state.joined(takes_over=bool(takes_over))
        state.has_work.ring()
        return True

    def _check_other_models(self, models: set[str]) -> None:
        """Wait for hosts with other models to end: a killed one disappears after its life.

        Raises:
            WorkerStartError: they are still there after that time.
        """
        now = time.monotonic()
        if self._mismatch_since is None:
            self._mismatch_since = now
        if now - self._mismatch_since <= self._state.life / 1000:
            return
        options = self._state.options
        raise WorkerStartError(
            f"worker hosts of prefix {options.prefix!r} serve {', '.join(sorted(models))}, "
            f"but this host has {options.model_name}: calls would get results of either model. "
            "Give each model its own prefix"
        )

    def _read(self, room: int) -> None:
        state = self._state
        answer = self.link.call(
            "XREADGROUP", "GROUP", GROUP, state.name, "COUNT", room,
            "BLOCK", round(1000 * state.address.longest_block),
            "STREAMS", self._keys.calls, state.inbox, ">", ">",
        )  # fmt: skip
        calls = self._keys.calls.encode()
        for stream, id_, fields in entries(answer):
            if stream == calls:
                self._submit_entry(id_, fields)
            else:  # a host has left calls, or this is a wake-up
                state.has_orphans = True

    def _take(self, room: int) -> None:
        """Claim calls left by others, before new ones."""
        state = self._state
        state.takes_a_batch = state.has_orphans = False  # may be set again meanwhile
        claimed, more = self.link.run(TAKE, (self._keys.calls,), state.name, room, state.least_idle)
        state.has_orphans |= bool(more)
        for id_, fields, claims in claimed:
            self._submit_entry(id_, fields, claims)

    # -- claimed calls

    def _submit_entry(self, id_: bytes, fields: Sequence[bytes], claims: int = 1) -> None:
        """Submit a claimed call to the engine, or refuse it.

        Args:
            claims: how many hosts have claimed it, including this one.
        """
        state = self._state
        entry = dict(zip(fields[::2], fields[1::2], strict=False))
        try:
            client, number, payloads, options = state.wire.read_call(entry.get(b"m"))
            left = self._seconds_left(entry.get(b"d", b"0"))
        except Exception as error:  # of any kind: else the call would end one host after the other
            if not isinstance(error, BadMessage):
                error = BadMessage(f"malformed: {summary(error)}")
            claim = Claim(id_, *(state.wire.sender(entry.get(b"m")) or ("", 0)), 1)
            claim.is_unread = True
            if state.add(claim, claims):
                state.finish(claim, failure=Failure(error.with_traceback(None)))
            return
        kind = StreamClaim if options.stream else Claim
        claim = kind(id_, client, number, len(payloads))
        if not state.add(claim, claims):
            return
        call = Call(
            payloads,
            _Reply(state, claim),
            None if left == math.inf else left,
            options,
            is_watched=True,
        )
        try:
            refusal = self._refusal(left, claims)
            if refusal is None:
                self._submit(claim, call)
            else:
                state.finish(claim, failure=Failure(refusal))
        except Exception as bug:
            state.finish(claim, failure=Failure(report_bug("the worker host", bug)))

    def _seconds_left(self, deadline: bytes) -> float:
        milliseconds = max(-_FAR, min(int(deadline), _FAR))
        if milliseconds == 0:
            return math.inf
        # The operating system refuses waits of years.
        return min(self._state.seconds_until(milliseconds), 1e9)

    def _refusal(self, left: float, claims: int) -> StreamerError | None:
        """Why a call is not to be computed that has so many seconds left; None if it is."""
        if left <= 0:
            with self._state.lock:
                self._state.counts["expired"] += 1
            return PredictTimeout("the call's deadline had passed when a worker host claimed it")
        if claims >= BEGUN // 2:
            return WorkerLost(
                "the stream's worker host died, or lost Redis, after outputs were handed out"
            )
        if claims > self._state.max_claims:
            return WorkerLost(
                f"{claims - 1} worker hosts in a row claimed this call and did not finish it: "
                "they died, or lost Redis"
            )
        return None

    def _submit(self, claim: Claim, call: Call) -> None:
        state = self._state
        if isinstance(claim, StreamClaim):
            with state.lock:
                state.flows.open(claim)
        try:
            state.engine.submit(call)
            if not state.submitted(claim):  # dropped meanwhile, or answered
                state.engine.withdraw(call)
        except StreamerError as error:
            state.finish(claim, failure=Failure(error))
        except (Exception, SystemExit) as error:  # raised by the length function
            state.finish(claim, failure=Failure.caught(error))


class _Reply:
    """Receives the outcome of a call from the engine."""

    __slots__ = ("_claim", "_state")

    def __init__(self, state: HostState, claim: Claim) -> None:
        self._state = state
        self._claim = claim

    @property
    def call(self) -> Any:
        return self._claim.call

    @call.setter
    def call(self, call: Any) -> None:
        self._claim.call = call

    def put_part(self, output: Any) -> None:
        assert isinstance(self._claim, StreamClaim)
        self._state.put(self._claim, output)

    def end(self, outcome: list[Any] | Failure) -> None:
        if isinstance(outcome, Failure):
            self._state.finish(self._claim, failure=outcome)
        else:
            self._state.finish(self._claim, outcome)
