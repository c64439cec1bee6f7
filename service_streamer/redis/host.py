"""A worker host's side: claims as many calls as there is room for, has the pool compute them.

     Redis      claimer                    the pool                finisher
     -----      -------                    --------                --------
     calls ───▶ XREADGROUP, while
                there is room
                verify, read
                engine.submit ───────────▶ batches, retries,
                                           isolation, as ever
                                           reply.complete ───────▶ FINISH, with all that
     replies ◀──────────────────────────────────────────────────── came in meanwhile
     calls ◀─────────────────────────────────────────────────────▶ KEEP, every third of
                                                                   claim_timeout

What is claimed is finished once, whoever else claims it meanwhile: Redis takes the first reply.
Each of the two threads has a connection of its own and makes it anew when it is lost.
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
from .clock import TOLERANCE, RedisClock
from .ledger import Claim, Claims
from .legacy import OldClients
from .link import Address, Backoff, Link, LinkError, NoGroup, Outages, entries, log
from .redis_stats import RedisWorkerStats
from .scripts import FINISH, GROUP, JOIN, KEEP, LEAVE, LEFT, SET_ASIDE, TAKE, Keys
from .wire import Wire

__all__ = ["Host", "HostOptions"]

#: How much is answered at once.
_MOST_CALLS = 256
_MOST_BYTES = 4 << 20

#: And by the engine's thread, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15

#: How many messages that cannot be read are kept, how long (seconds), and how much of each.
_DEAD_LETTERS = 1000
_DEAD_LETTER_TTL = 7 * 86_400
_DEAD_LETTER_BYTES = 4096
_LONGEST_REASON = 1000  # characters

#: Beyond every deadline, milliseconds; exact as a float.
_FAR = 1 << 53

#: How long the end may take when Redis does not answer, seconds; and to tell it what is computed.
_LAST_GRACE = 6.0
_LAST_WORDS = 3.0
_LAST_MOMENT = 0.5

#: These say that this host cannot compute a call, not that the call is bad.
_OURS = (StreamerClosed, StreamerBroken, WorkerStartError)


class HostOptions(NamedTuple):
    """What a host does beside computing.

    Attributes:
        name: among the hosts of a Redis.
        prefix: of the keys.
        claim_timeout: after how long without a sign of life others claim what it holds, seconds.
        reply_ttl: for how long replies are kept for a client that does not fetch them, seconds.
        max_attempts: how many hosts may claim a call; 1 for models that must not compute it twice.
        model: its name: of one prefix all hosts should have the same.
        allow_other_models: whether to serve beside hosts with another one.
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
        self._turn = threading.Lock()  # whose it is uses the next two
        self._finishing = Link(address)
        self._parting = Link(address)
        self._is_handed_back = False
        self._under_way: list[_Outcome] = []  # FINISH was sent, and its answer is not read yet
        self._is_leaving = threading.Event()  # no more is claimed
        self._give_up_at = math.inf  # when to stop trying to reach Redis
        self._has_drained = False
        self._clock = RedisClock()
        self._answered_at = 0.0  # when Redis gave the claimer what it goes through now
        #: From when on it may claim what dead hosts had; infinity while it has not joined.
        self._takes_over_from = math.inf
        self._has_joined = False  # ever
        self._strangers_since: float | None = None  # hosts with another model are there
        self._has_orphans = False  # there may be calls that others have left
        self._life = math.ceil(3000 * options.claim_timeout)  # of the inbox, in milliseconds
        self._reply_ttl = math.ceil(1000 * options.reply_ttl)
        #: Called when this host can serve no more; then ``failure`` says why.
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        #: Why calls were neither answered nor handed back at the end, if that is so.
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
        self._engine.when_answered(self._tell_now)
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
                    room = self._claims.room(workers, self._engine.batch_duration)
                if not room:
                    self._has_room.wait(None)
                    continue
                if not is_in:
                    is_in = self._join(room)
                    self._outages.over(self._address)
                    if not is_in:
                        self._is_leaving.wait(backoff.failed())
                    continue  # there may be less room now
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
            except BaseException as error:  # nobody may wait for a thread that is dead
                if self._is_leaving.is_set():  # its connection was closed under it
                    return
                log(logging.CRITICAL, "the worker host failed; this is a bug in it", exc_info=True)
                self._fail(error)
                return

    def _join(self, room: int) -> bool:
        """Be a host, with all it takes in Redis; whether that may be now."""
        options = self._options
        keys = (self._keys.calls, self._inbox, self._keys.model)
        # A new host is no sign of an outage. After one, others have to come back first.
        is_new = not self._has_joined
        may_take_over = is_new and options.max_attempts > 1
        with self._turn:  # so that nothing is finished between what it tells and our hearing it
            self._end()
            asked = time.monotonic()
            redis_now, strangers, claimed, taken, more, takes_over = self._claiming.run(
                JOIN, keys, options.name, self._life, self._keys.inboxes, options.model,
                int(options.allow_other_models or not is_new), max(room, self._batch_size),
                math.ceil(1000 * options.claim_timeout) if may_take_over else LEFT,
                int(may_take_over), self._announcement(),
            )  # fmt: skip
            if strangers:
                self._check_strangers({each.decode(errors="replace") for each in strangers})
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
        """What the model says of itself, for the web services."""
        description: Mapping[str, Any] | None = None
        with contextlib.suppress(StreamerError):  # no worker has loaded it
            description = self._engine.model_description()
        return self._wire.announcement(description or {})

    def _check_strangers(self, models: set[str]) -> None:
        """Hosts with other models are there, or were until a moment ago: a killed one may be gone
        soon. Raises WorkerStartError when it would be."""
        now = time.monotonic()
        if self._strangers_since is None:
            self._strangers_since = now
        if now - self._strangers_since <= self._life / 1000:
            return
        raise WorkerStartError(
            f"worker hosts of prefix {self._options.prefix!r} serve {', '.join(sorted(models))}, "
            f"and this host would serve {self._options.model}: calls would get results of either. "
            "Give each model a prefix of its own, or set allow_other_models=True "
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
            else:  # somebody has left calls to others, or it is to wake us up
                self._has_orphans = True

    def _take(self, room: int) -> None:
        """Claim what others have left, which goes before what is new."""
        claimed, more = self._claiming.run(
            TAKE, (self._keys.calls,), self._options.name, room, self._least_idle
        )
        self._answered_at = time.monotonic()
        self._has_orphans = bool(more)
        for id_, fields, claims in claimed:
            self._claimed(id_, fields, claims, link=self._claiming)

    @property
    def _least_idle(self) -> int:
        """After how long to claim what others hold, milliseconds.

        After an outage they come back too, and have not had the time to say that they live.
        """
        if time.monotonic() < self._takes_over_from:
            return LEFT
        return math.ceil(1000 * self._options.claim_timeout)

    def _read_clock(self, redis_now: int, asked: float) -> None:
        """Redis has just said its time, in milliseconds; ``asked`` is ours of before."""
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
        """Have a call computed that this host has claimed, as the so manyeth one.

        Args:
            link: to ask Redis for its time; None if that has just been done.
        """
        told = dict(zip(fields[::2], fields[1::2], strict=False))
        try:
            client, number, payloads = self._wire.read_call(told.get(b"m"))
            precedence = self._wire.read_order(told.get(b"o"), told[b"m"])
            left = self._time_left(told.get(b"d", b"0"), link)
        except LinkError:
            raise
        except Exception as error:  # of any kind: one that got through would end every host in turn
            if not isinstance(error, BadMessage):
                error = BadMessage(f"it cannot be read: {summary(error)}")
            claim = Claim(id_, *(self._wire.sender(told.get(b"m")) or ("", 0)), 1)
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
            late = PredictTimeout("the call's time had ended when a worker host claimed it")
            self.computed(claim, failure=Failure(late))
        elif claims > self._options.max_attempts:
            lost = WorkerLost(
                f"{claims - 1} worker hosts in a row have claimed this call and not finished it: "
                "they died, or could not reach Redis any more"
            )
            self.computed(claim, failure=Failure(lost))
        else:
            reply = _Reply(self, claim)
            try:
                timeout = None if left == math.inf else left
                self._engine.submit(Call(payloads, reply, timeout, precedence, is_watched=True))
            except StreamerError as error:
                self.computed(claim, failure=Failure(error))
            except (Exception, SystemExit) as error:  # of the function that gives the lengths
                self.computed(claim, failure=Failure.caught(error))

    def _time_left(self, deadline: bytes, link: Link | None) -> float:
        milliseconds = max(-_FAR, min(int(deadline), _FAR))
        if milliseconds == 0:
            return math.inf
        now = time.monotonic()
        left = self._clock.left(milliseconds / 1000, now)
        if left <= 0 and link is not None and not self._clock.was_read_since(self._answered_at):
            # It may have been set between the last time that we asked and this call's coming.
            seconds, microseconds = link.call("TIME")
            self._read_clock(1000 * int(seconds) + int(microseconds) // 1000, now)
            left = self._clock.left(milliseconds / 1000, time.monotonic())
        # Far ones are none of ours, and no operating system waits for years.
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
        """There is an outcome, to be told. Any thread."""
        with self._lock:
            was_running = claim.call is not None and claim.call.is_running
            if not self._claims.computed(claim):
                return
            self._outcomes.append(_Outcome(claim, outputs or [], failure, was_running))
        self._has_work.ring()
        self._has_room.ring()

    # -- finishing

    def _finish(self) -> None:
        backoff = Backoff(random.random)
        keep_at = 0.0
        interval = self._options.claim_timeout / 3
        while not (self._has_drained and not self._outcomes and not self._under_way):
            try:
                now = time.monotonic()
                if now >= self._give_up_at:
                    return
                if keep_at <= now and self.failure is None:  # else let others claim it all
                    self._keep()
                    keep_at = now + interval
                if not self._tell():
                    self._has_work.wait(max(keep_at - time.monotonic(), 0.1))
                self._outages.over(self._address)
                backoff.succeeded()
            except NoGroup:  # somebody has deleted all there is; who claims makes it anew
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

    def _tell_now(self) -> None:
        """Tell Redis of what came back just now, if nothing is under way: no thread need wake up.

        Without waiting for the answer, which is the finisher's part. In the engine's thread, so
        only if it is little, and no exception is to be unpickled.
        """
        if not self._finishing.is_connected or not self._turn.acquire(blocking=False):
            return
        try:
            if not self._under_way and self._finishing.is_connected:
                outcomes = self._next_outcomes(_AT_ONCE_BYTES)
                if any(outcome.failure is not None for outcome in outcomes):
                    self._outcomes.extendleft(reversed(outcomes))
                else:
                    self._begin(outcomes)
        except LinkError:  # the finisher will see to it
            pass
        except Exception as error:
            log(logging.CRITICAL, "the worker host failed; this is a bug in it", exc_info=True)
            self._fail(error)
        finally:
            self._turn.release()

    def _tell(self) -> bool:
        """Tell Redis of outcomes, or end what somebody has begun; whether there was anything."""
        with self._turn:
            if not self._under_way:
                self._begin(self._next_outcomes(_MOST_BYTES) or self._next_outcomes(math.inf, 1))
            return self._end()

    def _end(self) -> bool:
        """Get the answer to what is under way; whether there is anything."""
        outcomes, self._under_way = self._under_way, []
        if not outcomes:
            return False
        try:
            late = self._finishing.receive()
        except LinkError:  # then it is begun anew: what Redis has heard it does not do twice
            self._outcomes.extendleft(reversed(outcomes))
            raise
        with self._lock:
            self._counts["late"] += late
            self._claims.finished([outcome.claim for outcome in outcomes])
        return True

    def _next_outcomes(self, most_bytes: float, most: int = _MOST_CALLS) -> list[_Outcome]:
        """Empty also if the first one is longer than that."""
        outcomes: list[_Outcome] = []
        size = 0
        while self._outcomes and len(outcomes) < most:
            size += sum(map(len, self._outcomes[0].outputs))
            if size > most_bytes:
                break
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def _begin(self, outcomes: list[_Outcome]) -> None:
        """Send FINISH for these; ``_under_way`` has those that it was sent for."""
        keys = [self._keys.calls]
        arguments: list[Any] = [self._reply_ttl]
        clients: dict[str, int] = {}
        told: list[_Outcome] = []
        size = 0
        try:
            for position, outcome in enumerate(outcomes):
                if size > _MOST_BYTES:  # an error may hold as much as a result
                    self._outcomes.extendleft(reversed(outcomes[position:]))
                    outcomes = outcomes[:position]
                    break
                reply = self._reply(outcome)
                if reply is None:
                    continue
                told.append(outcome)
                size += len(reply)
                claim, client = outcome.claim, 0
                if reply:
                    client = clients.setdefault(claim.client, len(clients) + 1)
                    if len(keys) <= 2 * client:
                        keys += (self._keys.client(claim.client), self._keys.replies(claim.client))
                    if claim.is_unread:
                        client = -client
                arguments += (claim.id, client, reply)
            if told:
                self._finishing.send(FINISH, keys, *arguments)
        except LinkError:
            self._outcomes.extendleft(reversed(outcomes))
            raise
        self._under_way = told

    def _reply(self, outcome: _Outcome) -> bytes | None:
        """For the client: empty if nobody waits for it, None if another host is to compute it."""
        claim = outcome.claim
        if outcome.failure is None:
            return self._wire.results(claim.client, claim.number, outcome.outputs)
        error = outcome.failure.exception()
        if self._is_ours(outcome.failure, error):
            if not self._is_leaving.is_set():
                # The engine may work again before the claimer looks, and this call is still owed.
                self._fail(error)
            if self._options.max_attempts > 1 or not outcome.was_running:
                return None  # it is handed back at the end
            error = WorkerLost("the worker host ended while it computed this call")
        if isinstance(error, BadMessage) and not claim.is_set_aside:
            self._set_aside(claim, error)
            claim.is_set_aside = True
        if not claim.client:
            return b""
        if claim.is_unread and isinstance(error, BadMessage):
            return self._wire.notice(claim.number, error.reason)
        return self._wire.failure(claim.client, claim.number, error)

    def _is_ours(self, failure: Failure, error: BaseException) -> bool:
        """Whether it is of this host, and not of the model, which may raise the same."""
        if failure.remote_traceback is None:
            return isinstance(error, _OURS)
        # Of a worker: of loading the model, if none was ever loaded.
        return isinstance(error, WorkerStartError) and not self._engine.can_recover

    def _set_aside(self, claim: Claim, error: BadMessage) -> None:
        self._finishing.run(
            SET_ASIDE, (self._keys.calls, self._keys.dead),
            claim.id, self._options.name, str(error)[:_LONGEST_REASON],
            _DEAD_LETTERS, 1000 * _DEAD_LETTER_TTL, _DEAD_LETTER_BYTES,
        )  # fmt: skip
        self._counts["set_aside"] += 1
        log(logging.WARNING, "a message in Redis was set aside: %.200s", error)

    def _keep(self) -> None:
        """Say that this host is alive and at work on what it holds; claim what others are not."""
        options = self._options
        with self._lock:
            ids = [claim.id for claim in self._claims]
            workers, duration = self._engine.serving, self._engine.batch_duration
            # At least a batch, however full it is here: they have waited longer than all others.
            room = max(self._claims.room(workers, duration), self._batch_size)
            is_in = self._takes_over_from < math.inf and not self._is_leaving.is_set()
            room = room if workers and is_in else 0
        with self._turn:
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
            with self._lock:
                calls = self._claims.gone(gone)
                self._counts["taken_away"] += len(calls)
            self._has_room.ring()
            for call in filter(None, calls):  # of which no worker here need begin any more
                self._engine.withdraw(call)
        for id_, fields, claims in claimed:
            self._claimed(id_, fields, claims)
        if more:  # for the claimer, before what is new
            self._has_orphans = True
            with self._turn:
                self._end()
                self._finishing.call("XADD", self._inbox, "NOMKSTREAM", "*", "left", "")

    # -- the end

    def _engine_ended(self) -> None:
        """In its thread: it was closed, since this host leaves, or it has failed by itself."""
        if not self._is_leaving.is_set():
            try:
                self._engine.wait_serving(0)
            except StreamerError as error:
                self._fail(error)
            self.leave()  # or the claimer would still take what comes next

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:  # the reason is the first one
            return
        self.failure = error
        # Why a model could not be loaded is in the log already.
        why = "it has no model" if isinstance(error, WorkerStartError) else error
        log(logging.ERROR, "worker host %s has stopped serving: %s", self._options.name, why)
        self.on_failure()

    def leave(self) -> None:
        """Claim nothing any more. Does not wait for Redis."""
        if self._has_drained:  # it has left already
            return
        self._is_leaving.set()
        self._has_room.ring()
        start_thread(self._wake_claimer, "leaving")

    def _wake_claimer(self) -> None:
        """It may be blocked in reading; if this fails it notices at its next read."""
        link = Link(self._address)
        with contextlib.suppress(LinkError):
            link.call("XADD", self._inbox, "NOMKSTREAM", "*", "end", "")
        link.close()

    def close(self) -> None:
        """Tell what there is to tell, hand back the rest. After ``leave``, when no call is open.

        If Redis does not answer for some seconds, ``left_behind`` says what stays there. Once.
        """
        if self._has_drained:
            return
        self._give_up_at = time.monotonic() + _LAST_WORDS
        self._has_drained = True
        self._has_work.ring()
        parting = start_thread(self._part, "parting")
        parting.join(_LAST_GRACE)
        self._parting.close()  # these cut off what still waits for Redis
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
            f"{failure or f'{self._address} does not answer'}; {counted(left, 'call')} that this "
            "worker host has claimed could not be answered or handed back: other hosts claim them "
            f"{self._options.claim_timeout} s after its last sign of life"
        )
        log(logging.WARNING, "%s", self.left_behind)

    def _part(self) -> None:
        """Leave. Over a connection of its own: those of the other threads may be dead."""
        self._claimer.join(2 * _LAST_MOMENT)
        self._finisher.join(_LAST_WORDS - _LAST_MOMENT)
        self._finishing.close()  # it may be dead, and a client of the user's may allow two only
        with self._lock:
            clients = [(claim.id, self._keys.client(claim.client)) for claim in self._claims]
        try:
            self._counts["handed_back"] += self._parting.run(
                LEAVE, (self._keys.calls, self._inbox, self._keys.model),
                self._options.name, self._keys.inboxes,
                *itertools.chain.from_iterable(clients),
            )  # fmt: skip
            self._is_handed_back = True
        except LinkError as error:
            log(logging.WARNING, "%s; this worker host leaves, and hands back no calls", error)
        finally:
            self._parting.close()


class _Outcome(NamedTuple):
    """What became of a call that was claimed, to be told to Redis."""

    claim: Claim
    outputs: list[bytes]
    failure: Failure | None
    was_running: bool


class _Reply:
    """Where the engine says what became of a call."""

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

    def complete(self, outputs: list[Any]) -> None:
        self._host.computed(self._claim, outputs)

    def fail(self, failure: Failure) -> None:
        self._host.computed(self._claim, failure=failure)
