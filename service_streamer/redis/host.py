"""A worker host's side: claims calls, lets the pool compute them, and answers them.

     Redis      claimer                    the pool                finisher
     -----      -------                    --------                --------
     calls ───▶ XREADGROUP, while
                there is room
                verify, read
                engine.submit ───────────▶ batches, retries,
                                           isolation
                                           reply.complete ───────▶ FINISH, all outcomes
     replies ◀──────────────────────────────────────────────────── since the last one; and
                                           reply.put_part ───────▶ OUTPUTS of streams
     calls ◀─────────────────────────────────────────────────────▶ KEEP, every third of
                                                                   claim_timeout

Redis takes only the first reply of a call, whichever hosts have claimed it. Each of the two threads
has its own connection, and reconnects when it is lost.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.engine import Engine
from ..engine.timer import Doorbell, start_thread
from ..errors import (
    BadMessage,
    BrokerUnavailable,
    PredictTimeout,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    WorkerLost,
    WorkerStartError,
)
from ..observe.record import Call
from ..workers.diagnosis import counted
from ..workers.protocol import Failure, summary
from .claims import Claim, Claims
from .host_streams import HostStreams
from .legacy import OldClients
from .link import Address, Backoff, Link, LinkError, NoGroup, Outages, entries, log
from .redis_clock import TOLERANCE, RedisClock
from .redis_stats import RedisWorkerStats
from .scripts import BEGUN, FINISH, GROUP, JOIN, KEEP, LEAVE, LEFT, SET_ASIDE, TAKE, Keys
from .wire import Wire

__all__ = ["Host", "HostOptions"]

#: Maximum outcomes and bytes of one FINISH.
_MOST_CALLS = 256
_MOST_BYTES = 4 << 20

#: Maximum bytes that the engine's thread sends itself, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15

#: Malformed messages that are kept: number, seconds, bytes of each.
_DEAD_LETTERS = 1000
_DEAD_LETTER_TTL = 7 * 86_400
_DEAD_LETTER_BYTES = 4096
_LONGEST_REASON = 1000  # characters

#: Later than every deadline, milliseconds; exact as a float.
_FAR = 1 << 53

#: Seconds that the end may take if Redis does not answer: in total, and to send outcomes.
_LAST_GRACE = 6.0
_LAST_OUTCOMES = 3.0
_LAST_MOMENT = 0.5

#: Errors of this host, not of the call.
_OURS = (StreamerClosed, StreamerBroken, WorkerStartError)


class HostOptions(NamedTuple):
    """Options of a host.

    Attributes:
        name: unique name among the hosts of a Redis.
        prefix: prefix of the keys.
        claim_timeout: seconds without a sign of life until other hosts claim its calls.
        reply_ttl: seconds that replies are kept for a client that does not fetch them.
        max_attempts: how many hosts may claim a call; 1 if it must not be computed twice.
        model: name of the model; all hosts of a prefix should have the same.
        allow_other_models: whether to serve beside hosts with another model.
    """

    name: str
    prefix: str
    claim_timeout: float
    reply_ttl: float
    max_attempts: int
    model: str
    allow_other_models: bool


class Host:
    """Serves the calls of one prefix with an engine, whose items come encoded. Any thread.

    Args:
        engine: started; owned by whoever made it.
        batch_size: of the engine.
        predecessor: the one that served with this engine before, and is closed: its totals go on.
    """

    def __init__(
        self,
        address: Address,
        wire: Wire,
        engine: Engine,
        batch_size: int,
        options: HostOptions,
        predecessor: Host | None = None,
    ) -> None:
        self._address = address
        self._wire = wire
        self._engine = engine
        self._options = options
        self._keys = Keys(options.prefix)
        self._inbox = self._keys.inbox(options.name)
        self._lock = threading.RLock()  # a finalizer of a user's may run while it is held
        self._batch_size = batch_size
        self._claims = Claims(batch_size)
        self._outcomes: collections.deque[_Outcome] = collections.deque()
        self._has_room = Doorbell()
        self._has_work = Doorbell()
        self._claiming = Link(address, blocks=address.longest_block)
        self._finishing_lock = threading.Lock()  # guards the next two
        self._finishing = Link(address)
        self._parting = Link(address)
        self._is_handed_back = False
        self._under_way: list[_Outcome] = []  # FINISH is sent, its answer not read
        self._is_leaving = threading.Event()  # claims no more calls
        self._give_up_at = math.inf  # monotonic time to stop retrying Redis
        self._has_drained = False
        self._clock = RedisClock()
        self._answered_at = 0.0  # when Redis gave the claimer its current calls
        #: Monotonic time from which it may claim dead hosts' calls; infinity until it has joined.
        self._takes_over_from = math.inf
        self._has_joined = False  # at least once
        self._mismatch_since: float | None = None  # hosts with another model exist
        self._has_orphans = False  # there may be calls left by others
        self._life = math.ceil(3000 * options.claim_timeout)  # of the inbox, milliseconds
        self._reply_ttl = math.ceil(1000 * options.reply_ttl)
        self._streams = HostStreams(
            engine,
            wire,
            self._keys,
            options.name,
            self._reply_ttl,
            self._claims,
            self._lock,
            on_failed=lambda claim, failure: self.computed(claim, failure=failure),
            on_outcome=self._outcomes.append,
            on_dropped=self._forget,
        )  # guarded by ``_finishing_lock``
        self._is_outputs_turn = True
        #: Called when this host fails, with the reason in ``failure``.
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        #: Why calls were neither answered nor handed back at the end, if any.
        self.left_behind: BrokerUnavailable | None = None
        self._counts = dict.fromkeys(
            (
                "claimed", "taken_over", "taken_away", "late", "handed_back", "expired",
                "set_aside", "clock_steps",
            ),
            0,
        )  # fmt: skip
        self._outages = Outages((self._claiming, self._finishing), "this worker host waits")
        if predecessor is not None:
            self._counts = predecessor._counts
            self._outages.count = predecessor._outages.count
        self._claimer = threading.Thread(
            target=self._claim, name="service_streamer claimer", daemon=True
        )
        self._finisher = threading.Thread(
            target=self._finish, name="service_streamer finisher", daemon=True
        )

    def start(self) -> None:
        self._engine.when_answered(self._finish_now)
        self._engine.when_ended(self._engine_ended)
        self._claimer.start()
        self._finisher.start()

    def stats(self) -> RedisWorkerStats:
        with self._lock:
            held = len(self._claims)
        return RedisWorkerStats(
            state=self._state(),
            pool=self._engine.stats(),
            held=held,
            outages=self._outages.count,
            **self._counts,
        )

    def _state(self) -> str:
        if self.failure is not None:
            return "failed"
        if self._is_leaving.is_set():
            return "leaving"
        if self._outages.is_on:
            return "disconnected"
        return "serving" if self._takes_over_from < math.inf else "starting"

    # -- claiming

    def _claim(self) -> None:
        backoff = Backoff(random.random)
        old_clients = OldClients(self._address, self._options.prefix)
        is_in = False
        while not self._is_leaving.is_set():
            try:
                workers = self._engine.wait_serving(None)
                with self._lock:
                    engine = self._engine
                    room = self._claims.room(
                        workers, engine.batch_duration, engine.room, is_stepping=engine.has_steps
                    )
                if not room:
                    self._has_room.wait(None)
                    continue
                if not is_in:
                    is_in = self._join(room)
                    self._outages.over(self._address)
                    if not is_in:
                        self._is_leaving.wait(backoff.failed())
                    continue  # the room may have changed
                old_clients.look()
                if self._has_orphans:
                    self._take(room)
                else:
                    self._read(room)
                backoff.succeeded()
            except LinkError as error:
                is_in = False
                self._takes_over_from = math.inf
                if not isinstance(error, NoGroup) and not self._is_leaving.is_set():
                    self._outages.lost(error)
                self._is_leaving.wait(backoff.failed())
            except StreamerError as error:
                if not self._is_leaving.is_set():
                    self._fail(error)
                return
            except BaseException as error:  # callers must not wait for a dead thread
                if self._is_leaving.is_set():  # close() has closed its connection
                    return
                log(logging.CRITICAL, "the worker host failed; this is a bug in it", exc_info=True)
                self._fail(error)
                return

    def _join(self, room: int) -> bool:
        """Join the hosts of the prefix; false if it must wait."""
        options = self._options
        keys = (self._keys.calls, self._inbox, self._keys.model)
        # A new host may take over calls. After an outage, the others have to come back first.
        is_new = not self._has_joined
        may_take_over = is_new and options.max_attempts > 1
        with self._finishing_lock:  # no call may finish between Redis's answer and its use
            self._end()
            asked = time.monotonic()
            redis_now, other_models, claimed, taken, more, takes_over = self._claiming.run(
                JOIN, keys, options.name, self._life, self._keys.inboxes, options.model,
                int(options.allow_other_models or not is_new), max(room, self._batch_size),
                math.ceil(1000 * options.claim_timeout) if may_take_over else LEFT,
                int(may_take_over), self._announcement(),
            )  # fmt: skip
            if other_models:
                self._check_other_models({each.decode(errors="replace") for each in other_models})
                return False
            self._read_clock(redis_now, asked)
            for id_, fields, claims in (*claimed, *taken):
                self._claimed(id_, fields, claims)
        self._has_orphans = bool(more)
        if is_new:
            self._has_joined = True
            text = "worker host %s serves %r of %s"
            log(logging.INFO, text, options.name, options.prefix, self._address)
        now = time.monotonic()
        self._takes_over_from = now if takes_over else now + options.claim_timeout
        self._has_work.ring()
        return True

    def _announcement(self) -> bytes:
        """The model's description, for the web services."""
        description: Mapping[str, Any] | None = None
        with contextlib.suppress(StreamerError):  # no worker has loaded it
            description = self._engine.model_description()
        return self._wire.announcement(description or {})

    def _check_other_models(self, models: set[str]) -> None:
        """Wait for hosts with other models to end: a killed one disappears after its life.

        Raises:
            WorkerStartError: they are still there after that time.
        """
        now = time.monotonic()
        if self._mismatch_since is None:
            self._mismatch_since = now
        if now - self._mismatch_since <= self._life / 1000:
            return
        raise WorkerStartError(
            f"worker hosts of prefix {self._options.prefix!r} serve {', '.join(sorted(models))}, "
            f"but this host has {self._options.model}: calls would get results of either model. "
            "Give each model its own prefix, or set allow_other_models=True "
            "(--allow-other-models) while the new model replaces the old one"
        )

    def _read(self, room: int) -> None:
        answer = self._claiming.call(
            "XREADGROUP", "GROUP", GROUP, self._options.name, "COUNT", room,
            "BLOCK", round(1000 * self._address.longest_block),
            "STREAMS", self._keys.calls, self._inbox, ">", ">",
        )  # fmt: skip
        self._answered_at = time.monotonic()
        calls = self._keys.calls.encode()
        for stream, id_, fields in entries(answer):
            if stream == calls:
                self._claimed(id_, fields, link=self._claiming)
            else:  # a host has left calls, or this is a wake-up
                self._has_orphans = True

    def _take(self, room: int) -> None:
        """Claim calls left by others, before new ones."""
        claimed, more = self._claiming.run(
            TAKE, (self._keys.calls,), self._options.name, room, self._least_idle
        )
        self._answered_at = time.monotonic()
        self._has_orphans = bool(more)
        for id_, fields, claims in claimed:
            self._claimed(id_, fields, claims, link=self._claiming)

    @property
    def _least_idle(self) -> int:
        """Idle milliseconds after which to claim other hosts' calls.

        After an outage the other hosts need time for a sign of life.
        """
        if time.monotonic() < self._takes_over_from:
            return LEFT
        return math.ceil(1000 * self._options.claim_timeout)

    def _read_clock(self, redis_now: int, asked: float) -> None:
        """Take in Redis's time in milliseconds; ``asked`` is our time before the request."""
        now = time.monotonic()
        with self._lock:
            step = self._clock.read(redis_now / 1000, asked, now)
            self._counts["clock_steps"] += step != 0
        if step:
            if self._takes_over_from < math.inf:
                self._takes_over_from = now + self._options.claim_timeout
            log(
                logging.WARNING,
                "the clock of %s was set %.1f s %s: hosts wait %s s for each other's signs of "
                "life, and calls keep their deadlines",
                self._address, abs(step), "forward" if step > 0 else "back",
                self._options.claim_timeout,
            )  # fmt: skip

    def _claimed(
        self, id_: bytes, fields: Sequence[bytes], claims: int = 1, link: Link | None = None
    ) -> None:
        """Submit a claimed call to the engine.

        Args:
            claims: how many hosts have claimed it, including this one.
            link: to ask for Redis's time; None if it was just read.
        """
        entry = dict(zip(fields[::2], fields[1::2], strict=False))
        try:
            client, number, payloads = self._wire.read_call(entry.get(b"m"))
            precedence = self._wire.read_order(entry.get(b"o"), entry[b"m"])
            is_stream = self._wire.read_stream_mark(entry.get(b"s"), entry[b"m"])
            left = self._time_left(entry.get(b"d", b"0"), link)
        except LinkError:
            raise
        except Exception as error:  # of any kind: else the call would end one host after the other
            if not isinstance(error, BadMessage):
                error = BadMessage(f"malformed: {summary(error)}")
            claim = Claim(id_, *(self._wire.sender(entry.get(b"m")) or ("", 0)), 1)
            claim.is_unread = True
            if self._hold(claim, claims):
                self.computed(claim, failure=Failure(error.with_traceback(None)))
            return
        claim = Claim(id_, client, number, len(payloads))
        if not self._hold(claim, claims):
            return
        if left <= 0:
            with self._lock:
                self._counts["expired"] += 1
            late = PredictTimeout("the call's deadline had passed when a worker host claimed it")
            self.computed(claim, failure=Failure(late))
        elif claims >= BEGUN // 2:
            lost = WorkerLost(
                "the stream's worker host died, or lost Redis, after outputs were handed out"
            )
            self.computed(claim, failure=Failure(lost))
        elif claims > self._options.max_attempts:
            lost = WorkerLost(
                f"{claims - 1} worker hosts in a row claimed this call and did not finish it: "
                "they died, or lost Redis"
            )
            self.computed(claim, failure=Failure(lost))
        else:
            reply = _Reply(self, claim)
            if is_stream:
                self._streams.open(claim)
            try:
                timeout = None if left == math.inf else left
                self._engine.submit(
                    Call(payloads, reply, timeout, precedence, is_watched=True, is_stream=is_stream)
                )
            except StreamerError as error:
                self.computed(claim, failure=Failure(error))
            except (Exception, SystemExit) as error:  # raised by the length function
                self.computed(claim, failure=Failure.caught(error))

    def _time_left(self, deadline: bytes, link: Link | None) -> float:
        milliseconds = max(-_FAR, min(int(deadline), _FAR))
        if milliseconds == 0:
            return math.inf
        now = time.monotonic()
        left = self._clock.left(milliseconds / 1000, now)
        if left <= 0 and link is not None and not self._clock.was_read_since(self._answered_at):
            # The clock may have been set since it was last read.
            seconds, microseconds = link.call("TIME")
            self._read_clock(1000 * int(seconds) + int(microseconds) // 1000, now)
            left = self._clock.left(milliseconds / 1000, time.monotonic())
        # The operating system refuses waits of years.
        return min(left, 1e9)

    def _hold(self, claim: Claim, claims: int) -> bool:
        with self._lock:
            is_news = self._claims.claimed(claim)
            if is_news:
                self._counts["claimed"] += 1
                self._counts["taken_over"] += claims > 1
            return is_news

    def computed(
        self, claim: Claim, outputs: list[bytes] | None = None, failure: Failure | None = None
    ) -> None:
        """Queue an outcome for Redis. Any thread."""
        with self._lock:
            was_running = claim.call is not None and claim.call.is_running
            if not self._claims.computed(claim):
                return
            outcome = _Outcome(claim, outputs or [], failure, was_running)
            if not self._streams.keeps(claim, outcome):
                self._outcomes.append(outcome)
        self._has_work.ring()
        self._has_room.ring()

    def put_part(self, claim: Claim, output: bytes) -> None:
        """Queue an output of a stream for Redis. In the engine's thread."""
        self._streams.put(claim, output)

    def _forget(self, ids: Sequence[bytes]) -> int:
        """Drop claims that others have taken, or nobody wants; returns how many were open."""
        with self._lock:
            for claim in filter(None, map(self._claims.get, ids)):
                self._streams.close(claim)
            calls = self._claims.gone(ids)
        self._has_room.ring()
        for call in filter(None, calls):  # no worker here needs to go on with them
            self._engine.withdraw(call)
        return len(calls)

    # -- finishing

    def _finish(self) -> None:
        backoff = Backoff(random.random)
        keep_at = 0.0
        interval = self._options.claim_timeout / 3
        while not self._has_finished:
            try:
                now = time.monotonic()
                if now >= self._give_up_at:
                    return
                if keep_at <= now and self.failure is None:  # else others should claim its calls
                    self._keep()
                    keep_at = now + interval
                if not self._finish_next():
                    now = time.monotonic()
                    self._has_work.wait(min(max(keep_at - now, 0.1), self._streams.wait(now)))
                self._outages.over(self._address)
                backoff.succeeded()
            except NoGroup:  # the keys were deleted; the claimer makes them again
                keep_at = time.monotonic() + interval
                time.sleep(backoff.failed())
            except LinkError as error:
                self._outages.lost(error)
                time.sleep(backoff.failed())
                keep_at = 0.0
            except BaseException as error:
                log(logging.CRITICAL, "the worker host failed; this is a bug in it", exc_info=True)
                self._fail(error)
                return

    @property
    def _has_finished(self) -> bool:
        """Whether nothing more is to be sent."""
        if not self._has_drained or self._outcomes or self._under_way:
            return False
        return not len(self._streams)

    def _finish_now(self) -> None:
        """Send what is new from the engine's thread if nothing is under way: no thread wakes up.

        The finisher receives the answer. Only few bytes, and no exceptions to unpickle.
        """
        if self._streams.is_ready:
            self._has_work.ring()
        if not self._finishing.is_connected or not self._finishing_lock.acquire(blocking=False):
            return
        try:
            is_free = not self._under_way and not self._streams.is_under_way
            if is_free and self._finishing.is_connected:
                if self._streams.is_ready:
                    self._streams.send(self._finishing, time.monotonic(), _AT_ONCE_BYTES)
                    return
                outcomes = self._next_outcomes(_AT_ONCE_BYTES)
                if any(outcome.failure is not None for outcome in outcomes):
                    self._outcomes.extendleft(reversed(outcomes))
                else:
                    self._begin(outcomes)
        except LinkError:  # the finisher repeats it
            pass
        except Exception as error:
            log(logging.CRITICAL, "the worker host failed; this is a bug in it", exc_info=True)
            self._fail(error)
        finally:
            self._finishing_lock.release()

    def _finish_next(self) -> bool:
        """Send the next outcomes, or finish those under way; whether there were any."""
        with self._finishing_lock:
            if not self._under_way and not self._streams.is_under_way:
                # In turn, or one kind could hold up the other.
                self._is_outputs_turn = not self._is_outputs_turn
                if self._is_outputs_turn or not self._outcomes:
                    self._streams.send(self._finishing, time.monotonic(), _MOST_BYTES)
                if not self._streams.is_under_way:
                    self._begin(
                        self._next_outcomes(_MOST_BYTES) or self._next_outcomes(math.inf, 1)
                    )
            return self._end()

    def _end(self) -> bool:
        """Receive the answer to what is under way; whether there was anything."""
        if self._streams.is_under_way:
            self._streams.receive(self._finishing)
            return True
        outcomes, self._under_way = self._under_way, []
        if not outcomes:
            return False
        try:
            late = self._finishing.receive()
        except LinkError:  # send them again; Redis ignores what it has done
            self._outcomes.extendleft(reversed(outcomes))
            raise
        with self._lock:
            self._counts["late"] += late
            self._claims.finished([outcome.claim for outcome in outcomes])
        return True

    def _next_outcomes(self, most_bytes: float, most: int = _MOST_CALLS) -> list[_Outcome]:
        """The next outcomes within both limits; empty if the first one is too large."""
        outcomes: list[_Outcome] = []
        size = 0
        while self._outcomes and len(outcomes) < most:
            outcome = self._outcomes[0]
            size += sum(map(len, outcome.outputs))
            if outcome.claim.outflow is not None:
                size += outcome.claim.outflow.size
            if size > most_bytes:
                break
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def _begin(self, outcomes: list[_Outcome]) -> None:
        """Send FINISH for outcomes; ``_under_way`` has those that were sent."""
        keys = [self._keys.calls]
        arguments: list[Any] = [self._reply_ttl, self._options.name]
        clients: dict[str, int] = {}
        answered: list[_Outcome] = []
        size = 0
        try:
            for position, outcome in enumerate(outcomes):
                if size > _MOST_BYTES:  # errors may be as large as results
                    self._outcomes.extendleft(reversed(outcomes[position:]))
                    outcomes = outcomes[:position]
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
                        keys += (self._keys.client(claim.client), self._keys.replies(claim.client))
                    if claim.is_unread:
                        client = -client
                arguments += (claim.id, client, reply, int(claim.outflow is not None))
            if answered:
                self._finishing.send(FINISH, keys, *arguments)
        except LinkError:
            self._outcomes.extendleft(reversed(outcomes))
            raise
        self._under_way = answered

    def _reply(self, outcome: _Outcome) -> bytes | None:
        """The client's reply; empty if it has no client, None if another host should compute it."""
        claim = outcome.claim
        flow = claim.outflow
        if outcome.failure is None:
            if flow is None:
                return self._wire.results(claim.client, claim.number, outcome.outputs)
            rest = [*flow.waiting, *outcome.outputs]
            return self._wire.stream_end(claim.client, claim.number, flow.written, rest)
        error = outcome.failure.exception()
        if self._is_ours(outcome.failure, error):
            if not self._is_leaving.is_set():
                # The engine may recover before the claimer looks, but this call is unanswered.
                self._fail(error)
            if flow is not None and flow.has_begun:
                error = WorkerLost("the worker host ended after outputs were handed out")
            elif self._options.max_attempts > 1 or not outcome.was_running:
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
        if flow is not None and flow.waiting:
            return self._wire.stream_end(
                claim.client, claim.number, flow.written, flow.waiting, error
            )
        return self._wire.failure(claim.client, claim.number, error)

    def _is_ours(self, failure: Failure, error: BaseException) -> bool:
        """Whether it is this host's error, not the model's, which may have the same class."""
        if failure.remote_traceback is None:
            return isinstance(error, _OURS)
        # A worker's: the model could not be loaded, and never was.
        return isinstance(error, WorkerStartError) and not self._engine.can_recover

    def _set_aside(self, claim: Claim, error: BadMessage) -> None:
        self._finishing.run(
            SET_ASIDE, (self._keys.calls, self._keys.dead),
            claim.id, self._options.name, str(error)[:_LONGEST_REASON],
            _DEAD_LETTERS, 1000 * _DEAD_LETTER_TTL, _DEAD_LETTER_BYTES,
        )  # fmt: skip
        self._counts["set_aside"] += 1
        log(logging.WARNING, "set aside a malformed message in Redis: %.200s", error)

    def _keep(self) -> None:
        """Send a sign of life for this host and its claims; claim calls of silent hosts."""
        options = self._options
        with self._lock:
            ids = [claim.id for claim in self._claims]
            workers, duration = self._engine.serving, self._engine.batch_duration
            # At least a batch, even if this host is full: these calls have waited longest.
            room = self._claims.room(
                workers, duration, self._engine.room, is_stepping=self._engine.has_steps
            )
            room = max(room, self._batch_size)
            is_in = self._takes_over_from < math.inf and not self._is_leaving.is_set()
            room = room if workers and is_in else 0
        with self._finishing_lock:
            self._end()
            asked = time.monotonic()
            expected = math.floor(1000 * self._clock.expected(asked))
            redis_now, gone, claimed, more = self._finishing.run(
                KEEP, (self._keys.calls, self._inbox, self._keys.model),
                options.name, self._life, room, self._least_idle, self._keys.inboxes,
                expected, math.ceil(1000 * TOLERANCE), self._announcement() if is_in else b"",
                *ids,
            )  # fmt: skip
        self._read_clock(redis_now, asked)
        if gone:
            taken_away = self._forget(gone)
            with self._lock:
                self._counts["taken_away"] += taken_away
        for id_, fields, claims in claimed:
            self._claimed(id_, fields, claims)
        if more:  # for the claimer, before new calls
            self._has_orphans = True
            with self._finishing_lock:
                self._end()
                self._finishing.call("XADD", self._inbox, "NOMKSTREAM", "*", "left", "")

    # -- the end

    def _engine_ended(self) -> None:
        """In the engine's thread: it was closed, or it failed."""
        if not self._is_leaving.is_set():
            try:
                self._engine.wait_serving(0)
            except StreamerError as error:
                self._fail(error)
            self.leave()  # or the claimer would claim further calls

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:  # keep the first reason
            return
        self.failure = error
        # The log already says why the model could not be loaded.
        why = "its model could not be loaded" if isinstance(error, WorkerStartError) else error
        log(logging.ERROR, "worker host %s has stopped serving: %s", self._options.name, why)
        self.on_failure()

    def leave(self) -> None:
        """Claim no more calls. Does not wait for Redis."""
        if self._has_drained:  # it has left already
            return
        self._is_leaving.set()
        self._has_room.ring()
        start_thread(self._wake_claimer, "leaving")

    def _wake_claimer(self) -> None:
        """Wake the claimer from a blocked read; if this fails, the read ends by itself."""
        link = Link(self._address)
        with contextlib.suppress(LinkError):
            link.call("XADD", self._inbox, "NOMKSTREAM", "*", "end", "")
        link.close()

    def close(self) -> None:
        """Send the last outcomes, hand back the other claims. Call after ``leave``.

        If Redis does not answer within seconds, ``left_behind`` says what stays there.
        """
        if self._has_drained:
            return
        self._give_up_at = time.monotonic() + _LAST_OUTCOMES
        self._has_drained = True
        self._has_work.ring()
        parting = start_thread(self._part, "parting")
        parting.join(_LAST_GRACE)
        self._parting.close()  # ends blocked reads, like the next two
        self._claiming.close()
        self._finishing.close()
        for thread in (parting, self._claimer, self._finisher):
            thread.join(_LAST_MOMENT)
        with self._lock:
            left = len(self._claims)
        if self._is_handed_back or not left:
            return
        failure = self._parting.failure or self._finishing.failure or self._claiming.failure
        self.left_behind = BrokerUnavailable(
            f"{failure or f'{self._address} does not answer'}; {counted(left, 'call')} claimed by "
            "this worker host could not be answered or handed back: other hosts claim them "
            f"{self._options.claim_timeout} s after its last sign of life"
        )
        log(logging.WARNING, "%s", self.left_behind)

    def _part(self) -> None:
        """Leave, over its own connection: those of the other threads may be dead."""
        self._claimer.join(2 * _LAST_MOMENT)
        self._finisher.join(_LAST_OUTCOMES - _LAST_MOMENT)
        self._finishing.close()  # frees a connection: a user's client may allow only two
        with self._lock:
            clients = [(claim.id, self._keys.client(claim.client)) for claim in self._claims]
        try:
            self._counts["handed_back"] += self._parting.run(
                LEAVE,
                (
                    self._keys.calls, self._inbox, self._keys.model,
                    self._keys.orders_of(self._options.name),
                ),
                self._options.name, self._keys.inboxes,
                *itertools.chain.from_iterable(clients),
            )  # fmt: skip
            self._is_handed_back = True
        except LinkError as error:
            log(
                logging.WARNING, "%s; this worker host leaves without handing back its calls", error
            )
        finally:
            self._parting.close()


class _Outcome(NamedTuple):
    """The outcome of a claimed call, to be sent to Redis."""

    claim: Claim
    outputs: list[bytes]
    failure: Failure | None
    was_running: bool


class _Reply:
    """Receives the outcome of a call from the engine."""

    __slots__ = ("_claim", "_host")

    def __init__(self, host: Host, claim: Claim) -> None:
        self._host = host
        self._claim = claim

    @property
    def call(self) -> Any:
        return self._claim.call

    @call.setter
    def call(self, call: Any) -> None:
        self._claim.call = call

    def put_part(self, output: Any) -> None:
        self._host.put_part(self._claim, output)

    def complete(self, outputs: list[Any]) -> None:
        self._host.computed(self._claim, outputs)

    def fail(self, failure: Failure) -> None:
        self._host.computed(self._claim, failure=failure)
