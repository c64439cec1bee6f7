"""A worker host's outcomes on their way to Redis, and what a client is told of each."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ..errors import BadMessage, StreamerBroken, StreamerClosed, WorkerLost, WorkerStartError
from ..workers.protocol import Failure
from .claims import Claim
from .held_calls import HeldCalls, HeldOutcome
from .host_parts import HostParts
from .host_scripts import FINISH, SET_ASIDE
from .link import Link, LinkError, log

#: Maximum outcomes and bytes of one FINISH.
_MOST_CALLS = 256
_MOST_BYTES = 4 << 20

#: Malformed messages that are kept: number, seconds, bytes of each.
_DEAD_LETTERS = 1000
_DEAD_LETTER_TTL = 7 * 86_400
_DEAD_LETTER_BYTES = 4096
_LONGEST_REASON = 1000  # characters

#: Errors of this host, not of the call.
_OURS = (StreamerClosed, StreamerBroken, WorkerStartError)


class HostOutcomes:
    """Those of one host. For one thread at a time.

    Args:
        on_failure: called if an outcome says that this host cannot go on.
    """

    def __init__(
        self, parts: HostParts, held: HeldCalls, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._parts = parts
        self._options = parts.options
        self._keys = parts.keys
        self._held = held
        self._waiting = held.outcomes
        self._on_failure = on_failure
        self._under_way: list[HeldOutcome] = []  # being sent, or their answer not read

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    @property
    def is_under_way(self) -> bool:
        """Whether a request is sent and its answer not read."""
        return bool(self._under_way)

    def send_now(self, link: Link, most_bytes: int) -> None:
        """Send what is there, unless there are exceptions to unpickle. Raises LinkError."""
        self._take(most_bytes)
        if any(outcome.failure is not None for outcome in self._under_way):
            self.put_back()
        else:
            self._send(link)

    def send(self, link: Link) -> None:
        """Send the next ones, one at least, if there are any. Raises LinkError."""
        self._take(_MOST_BYTES)
        if not self._under_way:
            self._take(math.inf, 1)
        self._send(link)

    def receive(self, link: Link) -> bool:
        """Take in the answer to what was sent; whether anything was. Raises LinkError."""
        if not self._under_way:
            return False
        try:
            late = link.receive()
        except LinkError:  # send them again; Redis ignores what it has done
            self.put_back()
            raise
        with self._held.lock:
            self._held.counts["late"] += late
            self._held.claims.finished([outcome.claim for outcome in self._under_way])
        self._under_way = []
        return True

    def put_back(self, failure: Failure | None = None) -> None:
        """Have those under way sent again, or an error of ours instead of them."""
        outcomes, self._under_way = self._under_way, []
        if failure is not None:
            outcomes = [outcome.failed(failure) for outcome in outcomes]
        self._waiting.extendleft(reversed(outcomes))

    def _take(self, most_bytes: float, most: int = _MOST_CALLS) -> None:
        """Begin with the next outcomes within both limits; with none if the first is too large."""
        size = 0
        while self._waiting and len(self._under_way) < most:
            outcome = self._waiting[0]
            size += sum(map(len, outcome.outputs))
            if outcome.claim.outflow is not None:
                size += outcome.claim.outflow.size
            if size > most_bytes:
                break
            self._under_way.append(self._waiting.popleft())

    def _send(self, link: Link) -> None:
        """Send FINISH for those under way, which then are those that were sent."""
        outcomes = self._under_way
        keys = [self._keys.calls]
        arguments: list[Any] = [self._options.reply_life, self._options.name]
        clients: dict[str, int] = {}
        answered: list[HeldOutcome] = []
        size = 0
        try:
            for position, outcome in enumerate(outcomes):
                if size > _MOST_BYTES:  # errors may be as large as results
                    self._waiting.extendleft(reversed(outcomes[position:]))
                    self._under_way = outcomes = outcomes[:position]
                    break
                reply = self._reply(link, outcome)
                if reply is None:
                    continue
                answered.append(outcome)
                size += len(reply)
                claim, client = outcome.claim, 0
                if reply:
                    client = clients.setdefault(claim.client, len(clients) + 1)
                    if len(keys) <= 2 * client:
                        keys += (
                            self._keys.client(claim.client),
                            self._keys.replies(claim.client),
                        )
                    if claim.is_unread:
                        client = -client
                arguments += (claim.id, client, reply, int(claim.outflow is not None))
            if answered:
                link.send(FINISH, keys, *arguments)
        except LinkError:
            self.put_back()
            raise
        self._under_way = answered

    def _reply(self, link: Link, outcome: HeldOutcome) -> bytes | None:
        """The client's reply; empty if it has no client, None if another host should compute it."""
        claim = outcome.claim
        flow = claim.outflow
        if outcome.failure is None:
            if flow is None:
                return self._parts.wire.results(claim.client, claim.number, outcome.outputs)
            rest = [*flow.waiting, *outcome.outputs]
            return self._parts.wire.stream_end(claim.client, claim.number, flow.written, rest)
        error = outcome.failure.exception()
        if self._is_ours(outcome.failure, error):
            if not self._held.is_leaving.is_set():
                # The engine may recover before the claimer looks, but this call is unanswered.
                self._on_failure(error)
            if flow is not None and flow.has_begun:
                error = WorkerLost("the worker host ended after outputs were handed out")
            elif self._options.max_attempts > 1 or not outcome.was_running:
                return None  # handed back at the end
            else:
                error = WorkerLost("the worker host ended while it computed this call")
        if isinstance(error, BadMessage) and not claim.is_set_aside:
            self._set_aside(link, claim, error)
            claim.is_set_aside = True
        if not claim.client:
            return b""
        if claim.is_unread and isinstance(error, BadMessage):
            return self._parts.wire.notice(claim.number, error.reason)
        if flow is not None and flow.waiting:
            return self._parts.wire.stream_end(
                claim.client, claim.number, flow.written, flow.waiting, error
            )
        return self._parts.wire.failure(claim.client, claim.number, error)

    def _is_ours(self, failure: Failure, error: BaseException) -> bool:
        """Whether it is this host's error, not the model's, which may have the same class."""
        if failure.remote_traceback is None:
            return isinstance(error, _OURS)
        # A worker's: the model could not be loaded, and never was.
        return isinstance(error, WorkerStartError) and not self._parts.engine.can_recover

    def _set_aside(self, link: Link, claim: Claim, error: BadMessage) -> None:
        link.run(
            SET_ASIDE, (self._keys.calls, self._keys.dead),
            claim.id, self._options.name, str(error)[:_LONGEST_REASON],
            _DEAD_LETTERS, 1000 * _DEAD_LETTER_TTL, _DEAD_LETTER_BYTES,
        )  # fmt: skip
        self._held.counts["set_aside"] += 1
        log(logging.WARNING, "set aside a malformed message in Redis: %.200s", error)
