"""The thread of a worker host that sends outcomes, outputs and signs of life."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from ..errors import BadMessage, StreamerBroken, StreamerClosed, WorkerLost, WorkerStartError
from ..reporting import report_bug
from ..workers.protocol import Failure
from .claims import Claim, StreamClaim
from .host_state import HostState, Outcome
from .host_streams import HostStreams
from .link import Backoff, Link, LinkError, NoGroup, Outages, log
from .scripts import FINISH, KEEP, SET_ASIDE

#: Maximum outcomes and bytes of one request.
_MOST_CALLS = 256
_MOST_BYTES = 4 << 20

#: Maximum bytes that the engine's thread sends itself, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15

#: Malformed messages that are kept: number, seconds, bytes of each.
_DEAD_LETTERS = 1000
_DEAD_LETTER_TTL = 7 * 86_400
_DEAD_LETTER_BYTES = 4096
_LONGEST_REASON = 1000  # characters

#: Errors of this host, not of the call.
_OURS = (StreamerClosed, StreamerBroken, WorkerStartError)


class Finisher:
    """Sends what the engine's thread has queued, or lets that thread send it.

    Args:
        on_failure: called if this host cannot go on.

    Attributes:
        lock: guards the next one, and what is under way.
        link: of whichever thread sends.
        has_drained: the engine has ended: nothing new comes.
        give_up_at: monotonic time to stop retrying Redis.
    """

    def __init__(self, state: HostState, *, on_failure: Callable[[BaseException], None]) -> None:
        self._state = state
        self._keys = state.keys
        self._wire = state.wire
        self._on_failure = on_failure
        self.lock = Lock()
        self.link = Link(state.address)
        self._streams = HostStreams(state)
        self._waiting = state.outcomes
        self._under_way: list[Outcome] = []  # being sent, or their answer not read
        self._is_outputs_turn = True
        self.has_drained = False
        self.give_up_at = math.inf

    def run(self, outages: Outages, has_failed: Callable[[], bool]) -> None:
        """Send until all is sent after the engine has ended.

        Args:
            has_failed: whether other hosts should claim the calls of this one.
        """
        backoff = Backoff(random.random)
        keep_at = 0.0
        interval = self._state.options.claim_timeout / 3
        while not self._has_finished:
            try:
                now = time.monotonic()
                if now >= self.give_up_at:
                    return
                if keep_at <= now and not has_failed():
                    self._keep()
                    keep_at = now + interval
                if not self._finish_next():
                    now = time.monotonic()
                    self._state.has_work.wait(min(max(keep_at - now, 0.1), self._streams.wait(now)))
                outages.over(self._state.address)
                backoff.succeeded()
            except NoGroup:  # the keys were deleted; the claimer makes them again
                keep_at = time.monotonic() + interval
                time.sleep(backoff.failed())
            except LinkError as error:
                outages.lost(error)
                time.sleep(backoff.failed())
                keep_at = 0.0
            except BaseException as bug:  # callers must not wait for a dead thread
                with self.lock:
                    self._begin_again(bug)
                time.sleep(backoff.failed())

    @property
    def _has_finished(self) -> bool:
        """Whether nothing more is to be sent."""
        is_empty = not self._waiting and not self._under_way and not len(self._state.flows)
        return self.has_drained and is_empty

    @property
    def _is_busy(self) -> bool:
        """Whether a request is sent and its answer not read. Locked."""
        return bool(self._under_way) or self._streams.is_under_way

    def finish_now(self) -> None:
        """Send what is new from the engine's thread if nothing is under way: no thread wakes up.

        The finisher receives the answer. Only few bytes, and no exceptions to unpickle.
        """
        if self._streams.is_ready:
            self._state.has_work.ring()
        if not self.link.is_connected or not self.lock.acquire(blocking=False):
            return
        try:
            if self._is_busy or not self.link.is_connected:
                return
            if self._streams.is_ready:
                self._streams.send(self.link, time.monotonic(), _AT_ONCE_BYTES)
                return
            self._take(_AT_ONCE_BYTES)
            if any(outcome.failure is not None for outcome in self._under_way):
                self._put_back()  # there are exceptions to unpickle
            else:
                self._send()
        except LinkError:  # the finisher repeats it
            pass
        except Exception as bug:
            self._begin_again(bug)
        finally:
            self.lock.release()

    def _begin_again(self, bug: BaseException) -> None:
        """What was being sent fails: a bug of ours came in between. Locked."""
        failure = Failure(report_bug("the worker host", bug))
        self.link.close()
        self._put_back(failure)
        self._streams.fail(failure)
        self._state.has_work.ring()

    def _finish_next(self) -> bool:
        """Send the next outcomes, or finish those under way; whether there were any."""
        with self.lock:
            if not self._is_busy:
                # In turn, or one kind could hold up the other.
                self._is_outputs_turn = not self._is_outputs_turn
                if self._is_outputs_turn or not self._waiting:
                    self._streams.send(self.link, time.monotonic(), _MOST_BYTES)
                if not self._streams.is_under_way:
                    self._take(_MOST_BYTES)
                    if not self._under_way:
                        self._take(math.inf, 1)
                    self._send()
            return self.end()

    def end(self) -> bool:
        """Receive the answer to what is under way; whether there was anything."""
        if self._streams.is_under_way:
            self._streams.receive(self.link)
            return True
        if not self._under_way:
            return False
        try:
            late = self.link.receive()
        except LinkError:  # send them again; Redis ignores what it has done
            self._put_back()
            raise
        with self._state.lock:
            self._state.counts["late"] += late
            self._state.claims.remove(outcome.claim for outcome in self._under_way)
        self._under_way = []
        return True

    def _keep(self) -> None:
        """Send a sign of life for this host and its claims; look for calls of silent hosts."""
        state = self._state
        with state.lock:
            ids = [claim.id for claim in state.claims]
        is_in = state.has_joined and not state.is_leaving.is_set()
        with self.lock:
            self.end()
            redis_now, gone, more = self.link.run(
                KEEP, (self._keys.calls, state.inbox, self._keys.model),
                state.name, state.life, self._keys.inboxes, state.least_idle,
                state.announcement() if is_in else b"", *ids,
            )  # fmt: skip
        state.read_clock(redis_now)
        if gone:
            taken_away = state.forget(gone)
            with state.lock:
                state.counts["taken_away"] += taken_away
        if more and is_in:  # for the claimer, before new calls
            state.has_orphans = state.takes_a_batch = True
            state.has_room.ring()

    # -- outcomes; locked

    def _put_back(self, failure: Failure | None = None) -> None:
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
            if isinstance(outcome.claim, StreamClaim):
                size += outcome.claim.bytes_waiting
            if size > most_bytes:
                break
            self._under_way.append(self._waiting.popleft())

    def _send(self) -> None:
        """Send FINISH for those under way, which then are those that were sent."""
        outcomes = self._under_way
        keys = [self._keys.calls]
        arguments: list[Any] = [self._state.reply_life, self._state.name]
        clients: dict[str, int] = {}
        answered: list[Outcome] = []
        size = 0
        try:
            for position, outcome in enumerate(outcomes):
                if size > _MOST_BYTES:  # errors may be as large as results
                    self._waiting.extendleft(reversed(outcomes[position:]))
                    self._under_way = outcomes = outcomes[:position]
                    break
                reply = self._reply(outcome)
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
                arguments += (claim.id, client, reply, int(isinstance(claim, StreamClaim)))
            if answered:
                self.link.send(FINISH, keys, *arguments)
        except LinkError:
            self._put_back()
            raise
        self._under_way = answered

    def _reply(self, outcome: Outcome) -> bytes | None:
        """The client's reply; empty if it has no client, None if another host should compute it."""
        claim = outcome.claim
        stream = claim if isinstance(claim, StreamClaim) else None
        if outcome.failure is None:
            if stream is None:
                return self._wire.results(claim.client, claim.number, outcome.outputs)
            rest = [*stream.waiting, *outcome.outputs]
            return self._wire.stream_end(claim.client, claim.number, stream.written, rest)
        error = outcome.failure.exception()
        if self._is_ours(outcome.failure, error):
            if not self._state.is_leaving.is_set():
                # The engine may recover before the claimer looks, but this call is unanswered.
                self._on_failure(error)
            if stream is not None and stream.has_begun:
                error = WorkerLost("the worker host ended after outputs were handed out")
            elif self._state.max_claims > 1 or not outcome.was_running:
                return None  # handed back at the end
            else:
                error = WorkerLost("the worker host ended while it computed this call")
        if isinstance(error, BadMessage) and not claim.is_set_aside:
            self._set_aside(claim, error)
            claim.is_set_aside = True
        if not claim.client:
            return b""
        if claim.is_unread and isinstance(error, BadMessage):
            return self._wire.notice(claim.number, error.reason)
        if stream is not None and stream.waiting:
            return self._wire.stream_end(
                claim.client, claim.number, stream.written, stream.waiting, error
            )
        return self._wire.failure(claim.client, claim.number, error)

    def _is_ours(self, failure: Failure, error: BaseException) -> bool:
        """Whether it is this host's error, not the model's, which may have the same class."""
        if failure.remote_traceback is None:
            return isinstance(error, _OURS)
        # A worker's: the model could not be loaded, and never was.
        return isinstance(error, WorkerStartError) and not self._state.engine.can_recover

    def _set_aside(self, claim: Claim, error: BadMessage) -> None:
        self.link.run(
            SET_ASIDE, (self._keys.calls, self._keys.dead),
            claim.id, self._state.name, str(error)[:_LONGEST_REASON],
            _DEAD_LETTERS, 1000 * _DEAD_LETTER_TTL, _DEAD_LETTER_BYTES,
        )  # fmt: skip
        self._state.counts["set_aside"] += 1
        log(logging.WARNING, "set aside a malformed message in Redis: %.200s", error)
