"""A claimed call on its way into the engine: read, refused or submitted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import BadMessage, PredictTimeout, StreamerError, WorkerLost
from ..observe.record import Call
from ..reporting import report_bug, summary
from ..workers.protocol import Failure
from .claims import Claim
from .held_calls import HeldCalls
from .host_parts import HostParts
from .link import Link, LinkError
from .scripts import BEGUN
from .takeover import Takeover

#: Later than every deadline, milliseconds; exact as a float.
_FAR = 1 << 53


class Intake:
    """For the threads of one host that get calls.

    Attributes:
        lock: held while a call is submitted. A thread that takes over calls holds it from its
            request until it has submitted them: what Redis gives out later cannot overtake them.
            Reentrant, for that.
        answered_at: monotonic time when Redis gave the claimer its current calls.
    """

    def __init__(self, parts: HostParts, held: HeldCalls, takeover: Takeover) -> None:
        self._engine = parts.engine
        self._wire = parts.wire
        self._max_attempts = parts.options.max_attempts
        self._held = held
        self._takeover = takeover
        self.lock = threading.RLock()
        self.answered_at = 0.0

    def claimed(
        self, id_: bytes, fields: Sequence[bytes], claims: int = 1, link: Link | None = None
    ) -> None:
        """Submit a claimed call to the engine.

        Args:
            claims: how many hosts have claimed it, including this one.
            link: to ask for Redis's time; None if it was just read.
        """
        held = self._held
        entry = dict(zip(fields[::2], fields[1::2], strict=False))
        try:
            client, number, payloads, precedence, is_stream = self._wire.read_call(entry.get(b"m"))
            left = self._time_left(entry.get(b"d", b"0"), link)
        except LinkError:
            raise
        except Exception as error:  # of any kind: else the call would end one host after the other
            if not isinstance(error, BadMessage):
                error = BadMessage(f"malformed: {summary(error)}")
            claim = Claim(id_, *(self._wire.sender(entry.get(b"m")) or ("", 0)), 1)
            claim.is_unread = True
            if held.hold(claim, claims):
                held.computed(claim, failure=Failure(error.with_traceback(None)))
            return
        claim = Claim(id_, client, number, len(payloads))
        if not held.hold(claim, claims):
            return
        call = Call(
            payloads,
            _Reply(held, claim),
            None if left == math.inf else left,
            precedence,
            is_watched=True,
            is_stream=is_stream,
        )
        try:
            self._submit(claim, call, left, claims)
        except Exception as bug:
            failure = Failure(report_bug("the worker host", bug))
            held.computed(claim, failure=failure)

    def _submit(self, claim: Claim, call: Call, left: float, claims: int) -> None:
        """Submit a call, which has so many seconds left, to the engine; or refuse it."""
        held = self._held
        if left <= 0:
            with held.lock:
                held.counts["expired"] += 1
            late = PredictTimeout("the call's deadline had passed when a worker host claimed it")
            held.computed(claim, failure=Failure(late))
        elif claims >= BEGUN // 2:
            lost = WorkerLost(
                "the stream's worker host died, or lost Redis, after outputs were handed out"
            )
            held.computed(claim, failure=Failure(lost))
        elif claims > self._max_attempts:
            lost = WorkerLost(
                f"{claims - 1} worker hosts in a row claimed this call and did not finish it: "
                "they died, or lost Redis"
            )
            held.computed(claim, failure=Failure(lost))
        else:
            if call.is_stream:
                held.streams.open(claim)
            try:
                with self.lock:
                    self._engine.submit(call)
                if not held.submitted(claim):  # dropped meanwhile, or answered
                    self._engine.withdraw(call)
            except StreamerError as error:
                held.computed(claim, failure=Failure(error))
            except (Exception, SystemExit) as error:  # raised by the length function
                held.computed(claim, failure=Failure.caught(error))

    def _time_left(self, deadline: bytes, link: Link | None) -> float:
        milliseconds = max(-_FAR, min(int(deadline), _FAR))
        if milliseconds == 0:
            return math.inf
        takeover = self._takeover
        left = takeover.left(milliseconds)
        if left <= 0 and link is not None and not takeover.was_read_since(self.answered_at):
            # The clock may have been set since it was last read.
            asked = time.monotonic()
            seconds, microseconds = link.call("TIME")
            takeover.read_clock(1000 * int(seconds) + int(microseconds) // 1000, asked)
            left = takeover.left(milliseconds)
        # The operating system refuses waits of years.
        return min(left, 1e9)


class _Reply:
    """Receives the outcome of a call from the engine."""

    __slots__ = ("_claim", "_held")

    def __init__(self, held: HeldCalls, claim: Claim) -> None:
        self._held = held
        self._claim = claim

    @property
    def call(self) -> Any:
        return self._claim.call

    @call.setter
    def call(self, call: Any) -> None:
        self._claim.call = call

    def put_part(self, output: Any) -> None:
        self._held.streams.put(self._claim, output)

    def complete(self, outputs: list[Any]) -> None:
        self._held.computed(self._claim, outputs)

    def fail(self, failure: Failure) -> None:
        self._held.computed(self._claim, failure=failure)
