"""The web server's side: puts calls into Redis, and hands out the replies.

     caller threads            sender                          receiver
     --------------            ------                          --------
     submit(call)
       encode, sign
       unsent ── doorbell ───▶ ENQUEUE, with all that
                               came in meanwhile ─▶ Redis
                                                      │
                               worker host ◀── calls ─┘
                                    └──── replies ──────────▶ XREAD blocks until there are some
     ◀────────────────────────────────────────────────────── reply.complete / reply.fail
       decode, in the caller's thread again

Each of the two threads has a connection of its own and makes it anew when it is lost. Nothing is
lost by that: a batch of calls is sent again, and Redis knows which of it came before; replies wait
in a stream, which is read on from the last one that was received.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from typing import Any

from ..engine.timer import Doorbell, Timer, is_owned, start_thread
from ..errors import (
    BadMessage,
    BrokerUnavailable,
    ModelError,
    Overloaded,
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    StreamerForked,
    UnpicklableItem,
    WorkerStartTimeout,
)
from ..observe.record import Call
from ..workers.diagnosis import counted
from ..workers.protocol import Failure, summary
from .ledger import Patience, RemoteCall, SentCalls
from .legacy import OldWorkers
from .link import Address, Backoff, Link, LinkError, Outages, entries, log
from .redis_stats import RedisStreamerStats
from .scripts import CHECK, ENQUEUE, PART, REFRESH, WITHDRAW, Keys
from .wire import REASONS, Wire

__all__ = ["Client"]

#: How much is put in at once.
_MOST_CALLS = 512
_MOST_BYTES = 4 << 20

#: And by the thread that makes the call, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15

#: How often Redis is told that this client is alive, seconds.
_REFRESH = 5.0

#: How many calls are looked for in Redis at once, whether they are still there.
_MOST_DOUBTED = 1000

#: So many entries of replies, or bytes, are kept before those that were read are deleted.
_READ_ENTRIES = 64
_READ_BYTES = 4 << 20

#: How long the end waits for a thread that waits for Redis, seconds.
_LAST_GRACE = 1.0

#: And for Redis to hear that this client parts: a client of the user's may have no timeout.
_LONGEST_PARTING = 6.0


class Client:
    """Accepts calls from any thread, has them computed by worker hosts, answers each exactly once.

    Args:
        max_pending: the most calls, of all clients, that may wait or be computed.
        reply_ttl: for how long replies are kept for a client that cannot be reached, seconds.
        drain_timeout: how long a close waits without any progress, seconds; None for ever.
    """

    def __init__(
        self,
        address: Address,
        wire: Wire,
        *,
        prefix: str,
        max_pending: int,
        reply_ttl: float,
        drain_timeout: float | None,
    ) -> None:
        self._address = address
        self._wire = wire
        self._prefix = prefix
        self._keys = Keys(prefix)
        self._max_pending = max_pending
        self._reply_ttl = reply_ttl
        self._drain_timeout = math.inf if drain_timeout is None else drain_timeout
        self._lock = threading.RLock()  # a finalizer of a user's may run while it is held
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._orders = SentCalls()
        self._doorbell = Doorbell()
        self._timer = Timer(self._time_ended)
        self._name = ""
        self._pid = 0  # of the process that it was started in
        self._sender: threading.Thread | None = None
        self._receiver: threading.Thread | None = None
        self._turn = threading.Lock()  # whose it is uses the next line
        self._sending = Link(address)
        self._is_under_way = False  # ENQUEUE was sent, and its answer is not read yet
        self._failed: list[tuple[list[RemoteCall], Failure]] = []  # to be answered by the sender
        self._receiving = Link(address, blocks=address.longest_block)
        self._outages = Outages((self._sending, self._receiving), "calls and replies wait")
        self._is_closing = False  # new calls are refused
        self._is_ending = threading.Event()  # the threads end
        self._parting: threading.Thread | None = None  # who ends this client; others wait
        self._has_parted = threading.Event()
        self._is_abandoned = False  # nobody can make calls any more
        self._patience: Patience | None = None  # since then
        self._hosts: int | None = None  # when last asked, and so the next three
        self._old_workers = OldWorkers(address)  # looked for while there is no host
        self._queued: int | None = None
        self._models: tuple[str, ...] = ()
        self._announced = b""  # what the model says of itself, as the hosts announced it
        self._description: Mapping[str, Any] | None = None
        self._is_awaited = False  # somebody asked for it, and it was not known
        self._on_hosts: Callable[[], None] = lambda: None
        self._delivered = b""  # id of the last call that hosts were given
        self._is_noticed = False  # there are notices to look after
        self._was_forgotten = False  # Redis did not know this client any more
        self._suspects: dict[bytes, list[RemoteCall]] = {}  # by the mark; not in Redis any more
        self._marks: collections.deque[bytes] = collections.deque()  # that were read
        self._told: set[str] = set()  # what is said once
        self._unflushed: RemoteCall | None = None  # the last one, if it is small
        self._expired = self._cancelled = self._rejected = self._unreadable = self._lost = 0

    # -- calls

    def submit(self, call: Call) -> None:
        if self._pid != os.getpid() or self._is_closing:
            self._start()
        timeout, reply = call.timeout, call.reply
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("the call had no time left when it was made")
        if not call.size:
            reply.complete([])
            return
        number = next(self._numbers)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            message = self._wire.call(self._name, number, self._encoded(call.payloads))
            order = self._wire.order(call.precedence, message)
        except UnpicklableItem as error:
            reply.fail(Failure(error.with_traceback(None)))
            return
        except ValueError as error:
            reply.fail(Failure(UnpicklableItem(f"the call is too large: {error}")))
            return
        remote = RemoteCall(number, message, timeout, deadline, reply, order)
        with self._lock:
            if self._is_closing:
                raise StreamerClosed("the streamer is closed")
            if len(self._orders) >= self._max_pending:
                self._rejected += 1
                raise Overloaded(
                    f"{len(self._orders)} calls of this process wait already, and max_pending is "
                    f"{self._max_pending}; try again later"
                )
            reply.call = remote
            self._orders.add(remote)
        self._unflushed = remote if len(message) <= _AT_ONCE_BYTES else None
        if not call.more:
            self.flush()
        if call.is_watched and timeout is not None:
            self._timer.watch(remote)

    def _encoded(self, items: Sequence[Any]) -> list[bytes]:
        encode = self._wire.codec.encode
        payloads: list[bytes] = []
        item: Any = None
        try:
            for item in items:
                payloads.append(encode(item))
        except (Exception, SystemExit) as error:  # code of the item's
            raise UnpicklableItem(
                f"item {len(payloads)} of the call, of type {type(item).__qualname__}, "
                f"cannot be sent: {error}"
            ) from error.with_traceback(None)
        return payloads

    def decode(self, outputs: list[Any]) -> list[Any]:
        decode = self._wire.codec.decode
        try:
            return [decode(output) for output in outputs]
        except ValueError as error:
            raise ModelError(f"a result cannot be decoded here: {error}") from error

    def flush(self) -> None:
        call, self._unflushed = self._unflushed, None  # if another thread's, that does no harm
        try:
            if call is not None:
                self._put_in_now(call)
        finally:  # whatever comes of it: others of the same pass have left it to this call
            self._doorbell.ring()

    def cancel(self, call: RemoteCall) -> bool:
        """Give up a call. Whether a host has claimed it is not known: if so, that is in vain."""
        return self._give_up(call, "_cancelled")

    def withdraw(self, call: RemoteCall) -> None:
        self._give_up(call, "_cancelled")

    def expire(self, call: RemoteCall) -> None:
        self._give_up(call, "_expired")

    def _give_up(self, call: RemoteCall, count: str) -> bool:
        self.check_process()
        with self._lock:
            is_news = self._orders.give_up(call)
            if is_news:
                setattr(self, count, getattr(self, count) + 1)
                call.reply = None
                self._changed.notify_all()
        if is_news:
            self._doorbell.ring()
        return is_news

    def late(self, timeout: float | None) -> StreamerError:
        failure = self._sending.failure or self._receiving.failure
        if failure is None:
            why = "" if self._hosts != 0 else ", and no worker host was there"
            if why and self._old_workers.may_be_there:
                why += (
                    "; this Redis may have workers of service_streamer 0.1.2, which cannot serve "
                    "this version: upgrade them"
                )
            return PredictTimeout(f"no result within {timeout} s{why} ({self.describe()})")
        error = BrokerUnavailable(f"no result within {timeout} s: {failure}")
        error.__cause__ = failure
        return error

    def _time_ended(self, call: RemoteCall) -> None:
        with self._lock:
            reply = call.reply
            if not self._orders.give_up(call):
                return
            self._expired += 1
            self._changed.notify_all()
        self._doorbell.ring()
        _answer(call, reply, failure=Failure(self.late(call.timeout)))

    # -- how it stands

    def check_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise StreamerForked(
                f"this streamer was used in process {self._pid} and came to process {os.getpid()} "
                "by fork; build it after the fork, or do not use it before"
            )

    def check_not_in_callback(self) -> None:
        if threading.current_thread() in (self._receiver, self._sender, self._timer.thread):
            self.check_process()  # in a fork made by a callback, that copy of the thread is ours
            raise StreamerError(
                "a callback of a future cannot wait for this streamer, whose thread it runs in; "
                "use submit, and a callback of that future"
            )

    def stats(self) -> RedisStreamerStats:
        with self._lock:
            return RedisStreamerStats(
                state=self._state(),
                pending=len(self._orders),
                queued=self._queued,
                hosts=self._hosts,
                outages=self._outages.count,
                expired=self._expired,
                cancelled=self._cancelled,
                rejected=self._rejected,
                models=self._models,
                unreadable=self._unreadable,
                lost=self._lost,
            )

    def describe(self) -> str:
        return f"{self._address} | {self.stats().gist}"

    def model_description(self) -> Mapping[str, Any] | None:
        """As the worker hosts announced it; None while none has, or where it cannot be read.

        Raises:
            StreamerClosed: the streamer is closed.
        """
        self._start()
        if self._hosts and self._description is not None:
            return self._description
        self._is_awaited = True
        self._doorbell.ring()
        return None

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """As the engine's. Called whenever Redis was asked for the worker hosts."""
        self._on_hosts = callback

    def _state(self) -> str:
        if self._is_ending.is_set():
            return "closed"
        if self._is_closing:
            return "draining"
        if self._sender is None:
            return "new"
        return "disconnected" if self._outages.is_on else "connected"

    def wait_ready(self, timeout: float | None) -> None:
        """Block until Redis answers and a worker host is there.

        Raises:
            BrokerUnavailable: the time ended, and Redis cannot be reached.
            WorkerStartTimeout: the time ended, and no worker host is there.
        """
        self._start()
        self.check_not_in_callback()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        link, backoff = Link(self._address), Backoff(random.random)
        try:
            while True:
                with contextlib.suppress(LinkError):
                    self._take_up(self._refreshed(link))
                    if self._hosts:
                        return
                delay = backoff.failed()
                if time.monotonic() + delay > deadline:
                    break
                if self._is_ending.wait(delay):
                    raise StreamerClosed("the streamer is closed")
            if link.failure is not None:
                error = BrokerUnavailable(f"not reached in {timeout} s: {link.failure}")
                raise error from link.failure
            raise WorkerStartTimeout(f"no worker host has come in {timeout} s ({self.describe()})")
        finally:
            link.close()

    # -- the threads

    def _start(self) -> None:
        """Start the threads, in the process that makes the first call."""
        self.check_process()
        with self._lock:
            if self._is_closing:
                raise StreamerClosed("the streamer is closed")
            if self._sender is None:
                self._name = secrets.token_hex(8)
                if self._receiver is None:
                    self._receiver = start_thread(self._receive, "receiver")
                self._sender = start_thread(self._send, "sender")
                # As for an engine: a hook of atexit's does not come in a child of multiprocessing.
                self._at_exit = util.Finalize(None, self._close_at_exit, exitpriority=100)
                self._pid = os.getpid()

    def _send(self) -> None:
        backoff = Backoff(random.random)
        refresh_at = 0.0
        while not self._is_ending.is_set():
            now = time.monotonic()
            if self._is_abandoned and self._is_hopeless(now):
                self.close(drain=False, timeout=None)
                return
            try:
                if self._is_awaited:
                    refresh_at = min(refresh_at, now + _REFRESH / 20)
                if refresh_at <= now:
                    self._refresh()
                    refresh_at = now + min(_REFRESH, self._reply_ttl / 3)
                    if not self._hosts and len(self._orders):  # so that it can be said in time
                        refresh_at = now + _REFRESH / 10
                is_any = self._put_in()
                is_any |= self._withdraw()
                if self._is_noticed:
                    self._check(0)
                self._fail_lost()
                self._answer_failed()
                if not is_any:
                    self._doorbell.wait(refresh_at - time.monotonic())
                self._outages.over(self._address)
                backoff.succeeded()
            except LinkError as error:
                if not self._is_ending.is_set():
                    self._outages.lost(error)
                self._is_ending.wait(backoff.failed())
                refresh_at = 0.0
            except BaseException:  # nobody may wait for a thread that is dead
                if self._is_ending.is_set():  # its connection was closed under it
                    return
                log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
                self._sending.close()
                self._is_ending.wait(backoff.failed())

    def _put_in_now(self, call: RemoteCall) -> None:
        """Put in a call that was made just now, if there is nothing else: no thread need wake up.

        Without waiting for the answer, which is the sender's part.
        """
        if not self._sending.is_connected or not self._orders.is_alone(call):
            return
        if self._turn.acquire(blocking=False):
            try:
                with self._lock:
                    is_alone = not self._is_under_way and self._orders.is_alone(call)
                if is_alone and self._sending.is_connected:
                    with contextlib.suppress(LinkError):  # the sender will see to it
                        self._begin()
            finally:
                self._turn.release()

    def _put_in(self) -> bool:
        """Put in what there is, or what somebody has begun to; whether there was anything."""
        with self._turn:
            if not self._is_under_way:
                self._begin()
            return self._end()

    def _end(self) -> bool:
        """Get the answer to what is under way; whether there is anything."""
        is_any, self._is_under_way = self._is_under_way, False
        if is_any:  # if that fails, the same is begun anew
            self._put_in_answered(*self._sending.receive())
        return is_any

    def _begin(self) -> None:
        orders = self._orders
        with self._lock:
            batch = orders.batch(_MOST_CALLS, _MOST_BYTES)
        if not batch:
            return
        now = time.monotonic()
        arguments: list[Any] = []
        for call in batch:
            left = call.deadline - now
            milliseconds = -1 if left == math.inf else max(0, math.ceil(left * 1000))
            arguments += (milliseconds, call.message, call.order)
        self._sending.send(
            ENQUEUE,
            (self._keys.calls, self._keys.client(self._name)),
            self._max_pending,
            math.ceil(self._reply_ttl * 1000),
            orders.first,
            *arguments,
        )
        self._is_under_way = True

    def _put_in_answered(self, is_known: int, ids: list[bytes]) -> None:
        orders = self._orders
        with self._lock:
            self._was_forgotten |= orders.is_known and not is_known
            refused = orders.put_in(ids)
            self._rejected += len(refused)
            if refused:
                self._changed.notify_all()
        if refused:
            text = (
                f"{self._max_pending} calls of all clients wait already, as many as max_pending "
                "allows; try again later"
            )
            self._failed.append((refused, Failure(Overloaded(text))))

    def _withdraw(self) -> bool:
        ids = self._orders.to_withdraw[:1000]
        if ids:
            with self._turn:
                self._end()
                self._sending.run(WITHDRAW, (self._keys.calls,), self._keys.inboxes, *ids)
            with self._lock:
                del self._orders.to_withdraw[: len(ids)]
        return bool(ids)

    def _refresh(self) -> None:
        with self._turn:
            self._end()
            orders = self._orders
            put_in = orders.count_put_in if orders.is_known else -1
            is_known = self._take_up(self._refreshed(self._sending, put_in))
            self._was_forgotten |= orders.is_known and not is_known
        if not self._hosts:
            self._old_workers.look()
        if self._is_closing:
            with self._lock:
                self._changed.notify_all()  # who drains wants to know whether it goes on
        self._check(_MOST_DOUBTED)

    def _refreshed(self, link: Link, put_in: int = -1) -> Any:
        return link.run(
            REFRESH,
            (self._keys.calls, self._keys.client(self._name), self._keys.model),
            math.ceil(self._reply_ttl * 1000),
            self._keys.inboxes,
            put_in,
        )

    def _take_up(self, told: Any) -> bool:
        """What Redis has said of hosts and calls; returns whether it knew this client."""
        is_known, models, self._queued, self._delivered, announced = told
        if announced != self._announced:
            self._announced, self._description = announced, None
            with contextlib.suppress(BadMessage):  # the answer to a call says why
                self._description = self._wire.read_announcement(announced)
        self._hosts = len(models)
        self._models = tuple(sorted({each.decode(errors="replace") for each in models if each}))
        if len(self._models) > 1:
            text = "worker hosts of prefix %r serve different models: %s"
            self._warn_once("models", text, self._prefix, ", ".join(self._models))
        self._is_awaited = False
        self._on_hosts()
        return bool(is_known)

    def _warn_once(self, about: str, text: str, *arguments: Any) -> None:
        if about not in self._told:
            self._told.add(about)
            log(logging.WARNING, text, *arguments)

    # -- calls that are gone

    def _check(self, most: int) -> None:
        """Look whether calls are still in Redis: those of notices, and so many that wait for long.

        What is not there has been answered, or never will be. The mark that Redis puts behind all
        replies so far tells which: see ``_fail_lost``.
        """
        self._is_noticed = False
        is_all = self._was_forgotten and most > 0
        is_more = True
        while is_more:
            with self._lock:
                calls = self._orders.doubtful(most, all_sent=is_all)
            if not calls:
                break
            mark = secrets.token_hex(8).encode()
            with self._turn:
                self._end()
                gone = self._sending.run(
                    CHECK,
                    (self._keys.calls, self._keys.replies(self._name)),
                    mark,
                    math.ceil(self._reply_ttl * 1000),
                    *(call.id or b"0-0" for call in calls),
                )
            suspects = {**self._suspects, mark: [calls[position] for position in gone]}
            self._suspects = {
                mark: calls
                for mark, calls in suspects.items()
                if not all(call.is_over for call in calls)
            }
            is_more = is_all and self._orders.has_more_doubts
        self._was_forgotten &= not is_all

    def _fail_lost(self) -> None:
        """What was not in Redis, and has no reply before the mark, gets none."""
        while self._marks:
            suspects = self._suspects.pop(self._marks.popleft(), ())
            with self._lock:
                lost = self._orders.gone(suspects)
                self._unreadable += sum(bool(reason) for _, reason in lost)
                self._lost += sum(not reason for _, reason in lost)
                if lost:
                    self._changed.notify_all()
            for call, reason in lost:
                self._failed.append(([call], Failure(self._why_lost(reason))))

    def _why_lost(self, reason: str) -> StreamerError:
        if not reason:
            return BrokerUnavailable(
                "the call is no longer in Redis and has no reply: Redis could not be reached for "
                f"more than reply_ttl of {self._reply_ttl} s, or has lost its data, or its clock "
                "was set forward, or the call was deleted"
            )
        side, _, word = reason.partition(" ")
        what = (
            "a worker host could not read this call"
            if side == "call"
            else "this client could not read the reply to the call"
        )
        text = f"{what}: {REASONS[word]}"
        self._warn_once(reason, "%s (prefix %r)", text, self._prefix)
        return BadMessage(text, reason=word)

    def _answer_failed(self) -> None:
        """Not where it is noticed: callbacks of users must not run while the turn is ours."""
        while self._failed:
            calls, failure = self._failed.pop()
            for call in calls:
                _answer(call, call.reply, failure=failure)

    def _receive(self) -> None:
        backoff = Backoff(random.random)
        key = self._keys.replies(self._name)
        last, entries_read, bytes_read = b"0", 0, 0
        block = round(1000 * self._address.longest_block)
        while not self._is_ending.is_set():
            try:
                if self._receiving.failure is not None:  # to know it before the next reply
                    self._receiving.call("PING")
                    self._outages.over(self._address)
                if entries_read >= _READ_ENTRIES or bytes_read >= _READ_BYTES:
                    self._receiving.call("XTRIM", key, "MINID", _after(last))
                    entries_read = bytes_read = 0
                answer = self._receiving.call(
                    "XREAD", "COUNT", _READ_ENTRIES, "BLOCK", block, "STREAMS", key, last
                )
                for _, last, fields in entries(answer):  # noqa: B007 - it is where to go on
                    entries_read += 1
                    bytes_read += sum(map(len, fields))
                    if fields and fields[0] != b"r":
                        self._read_other(fields)
                    else:
                        self._deliver(fields[1::2])
                if not answer:
                    # Time to drop what was read, and to begin anew: Redis may have, too, with a
                    # clock that is behind. What comes twice is answered once.
                    if entries_read:
                        self._receiving.call("XTRIM", key, "MINID", _after(last))
                    last, entries_read, bytes_read = b"0", 0, 0
                backoff.succeeded()
            except LinkError as error:
                if not self._is_ending.is_set():
                    self._outages.lost(error)
                self._is_ending.wait(backoff.failed())
            except BaseException:  # as in the other thread
                if self._is_ending.is_set():
                    return
                log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
                self._is_ending.wait(backoff.failed())

    def _deliver(self, messages: list[bytes]) -> None:
        replies: list[tuple[int, list[bytes], Failure | None]] = []
        for message in filter(None, messages):  # an empty one only wakes us up
            try:
                replies.append(self._wire.read_reply(message, self._name))
            except Exception as error:  # of any kind: this thread is everybody's
                log(logging.WARNING, "a reply in Redis was dropped: %.200s", summary(error))
                sender = self._wire.sender(message)
                if sender is not None and sender[0] == self._name:
                    reason = error.reason if isinstance(error, BadMessage) else "unreadable"
                    self._notice(sender[1], f"reply {reason}")
        with self._lock:
            calls = [self._orders.answered(number) for number, _, _ in replies]
            if self._is_closing:
                self._changed.notify_all()
        if self._is_abandoned:
            self._doorbell.ring()
        for call, (_, payloads, failure) in zip(calls, replies, strict=True):
            if call is not None:
                _answer(call, call.reply, payloads, failure)

    def _read_other(self, fields: list[bytes]) -> None:
        """What is no reply. Anybody may have written it, so it is but a hint where to look."""
        name, value = fields[:2]
        if name == b"c":
            self._marks.append(value)
            self._doorbell.ring()
        elif name == b"n" and (notice := self._wire.read_notice(value)) is not None:
            self._notice(notice[0], f"call {notice[1]}")

    def _notice(self, number: int, reason: str) -> None:
        with self._lock:
            self._is_noticed |= self._orders.noticed(number, reason)
        self._doorbell.ring()

    # -- the end

    def abandon(self) -> None:
        """Have the sender finish what was accepted, and close. For a finalizer, under any lock."""
        self._is_abandoned = True
        self._doorbell.ring()

    def _close_at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # which would only print a traceback here
            self.close(drain=False, timeout=None)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        if self._pid not in (0, os.getpid()):
            return  # a fork's copy: nothing of it is here to be ended
        if is_owned(self._lock) or self._timer.is_held:
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        with self._changed:
            self._is_closing = True
            ours = (self._sender, self._receiver, self._timer.thread)
            self._doorbell.ring()  # who was to flush may be waiting for this
            if drain and threading.current_thread() not in ours:
                self._drain(timeout)
            calls = self._orders.give_up_all()
            is_first = self._parting is None
            if is_first:
                self._parting = threading.current_thread()
            self._changed.notify_all()  # others may be draining
        why = self._why_cut_off() if drain else ""
        if calls and drain:
            cut_off = counted(len(calls), "call")
            log(logging.WARNING, "the streamer was closed with %s unanswered%s", cut_off, why)
        for call in calls:
            failure = StreamerClosed(f"the streamer was closed before the call was served{why}")
            _answer(call, call.reply, failure=Failure(failure))
        if is_first:
            try:
                self._is_ending.set()
                self._timer.close()
                self._doorbell.ring()
                self._part()
                if self._sender is not None:
                    self._at_exit.cancel()
            finally:
                self._has_parted.set()
        elif threading.current_thread() not in (*ours, self._parting):
            self._has_parted.wait()

    def _drain(self, timeout: float | None) -> None:
        """Wait until every call is over, or nothing goes on any more. ``_changed`` is held."""
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        patience = Patience(self._drain_timeout if timeout is None else math.inf, now)
        while len(self._orders):
            sign = self._orders.progress(self._delivered)
            now = time.monotonic()
            left = min(deadline - now, patience.left(sign, now))
            if left <= 0:
                return
            self._changed.wait(None if left == math.inf else left)

    def _is_hopeless(self, now: float) -> bool:
        """Whether no call is open, or none of them goes on any more."""
        with self._lock:
            if not len(self._orders):
                return True
            if self._patience is None:
                self._patience = Patience(self._drain_timeout, now)
            return self._patience.left(self._orders.progress(self._delivered), now) <= 0

    def _why_cut_off(self) -> str:
        failure = self._sending.failure or self._receiving.failure
        if failure is not None:
            return f": {failure}"
        return ": no worker host was there" if self._hosts == 0 else ""

    def _part(self) -> None:
        """Leave nothing of this client in Redis, and end the threads."""
        sender, receiver = self._sender, self._receiver
        if sender is None or receiver is None:
            return
        link = Link(self._address)
        # It ends when this thread lets it, which may be the sender's.
        sender_ends = None if sender is threading.current_thread() else sender
        parting = start_thread(lambda: self._take_leave(link, sender_ends, receiver), "parting")
        parting.join(_LONGEST_PARTING)
        if parting.is_alive():
            text = "%s does not answer; the keys of this client will expire there"
            log(logging.WARNING, text, self._address)
        for each in (self._sending, self._receiving, link):  # cuts off what still reads
            each.close()
        for thread in (parting, sender, receiver):
            _join(thread)
        self._answer_failed()

    def _take_leave(
        self, link: Link, sender: threading.Thread | None, receiver: threading.Thread
    ) -> None:
        """What may take as long as Redis takes to answer.

        Args:
            sender: to wait for, and ``receiver``.
        """
        keys = self._keys
        own = (keys.client(self._name), keys.replies(self._name))
        if sender is not None:
            sender.join(_LAST_GRACE)
        if sender is None or not sender.is_alive():
            with contextlib.suppress(LinkError):
                self._end()  # to know by what id to withdraw it
            self._sending.close()  # it may be dead, and a client of the user's may allow two only
        try:
            # What wakes the receiver up, which may be blocked in reading.
            link.call("XADD", own[1], "*", "end", "")
            link.call("PEXPIRE", own[1], round(1000 * self._reply_ttl))
            receiver.join(_LAST_GRACE)
            while self._orders.to_withdraw:
                ids = self._orders.to_withdraw[:1000]
                link.run(WITHDRAW, (keys.calls,), keys.inboxes, *ids)
                del self._orders.to_withdraw[:1000]
            link.run(PART, (keys.calls, *own), keys.inboxes)
        except LinkError as error:
            if self._orders.is_known:
                log(logging.WARNING, "%s; what is left there of this client will expire", error)
        finally:
            link.close()


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join(_LAST_GRACE)


def _answer(
    call: RemoteCall, reply: Any, payloads: list[bytes] | None = None, failure: Any = None
) -> None:
    call.reply = None
    try:
        if failure is None:
            reply.complete(payloads)
        else:
            reply.fail(failure)
    except BaseException:  # a callback of a user's may raise anything; others wait for this thread
        log(logging.ERROR, "a callback of a future raised", exc_info=True)


def _after(id_: bytes) -> bytes:
    """The first id after this one."""
    time_, _, number = id_.partition(b"-")
    return b"%b-%d" % (time_, int(number or b"0") + 1)
