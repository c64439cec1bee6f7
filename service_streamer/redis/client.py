"""The web server's side: sends calls to Redis, and delivers the replies.

     caller threads            sender                          receiver
     --------------            ------                          --------
     submit(call)
       encode, sign
       unsent ── doorbell ───▶ ENQUEUE, all calls
                               since the last one ─▶ Redis
                                                      │
                               worker host ◀── calls ─┘
                                    └──── replies ──────────▶ XREAD blocks until there are some
     ◀────────────────────────────────────────────────────── reply.complete / reply.fail; and
                                                             reply.put_part of streams
       decode, in the caller's thread again

Each of the two threads has its own connection, and reconnects when it is lost. No call is lost: the
sender repeats its batch, and Redis knows which calls it has; replies wait in a stream, which is
read from the last received one.
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

from ..engine.backend import IN_CALLBACK, Mailbox
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
from .ledger import Inflow, Patience, RemoteCall, SentCalls
from .legacy import OldWorkers
from .link import Address, Backoff, Link, LinkError, Outages, entries, log
from .redis_stats import RedisStreamerStats
from .scripts import CHECK, ENQUEUE, PART, REFRESH, TELL, WITHDRAW, Keys
from .wire import REASONS, OutputRun, RemoteAnswer, Wire

__all__ = ["Client"]

#: Maximum calls and bytes of one ENQUEUE.
_MOST_CALLS = 512
_MOST_BYTES = 4 << 20

#: Maximum bytes that the caller's thread sends itself, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15

#: Seconds between two signs of life to Redis.
_REFRESH = 5.0

#: Maximum number of calls per check whether they are still in Redis.
_MOST_DOUBTED = 1000

#: Read replies are deleted from Redis after this many entries or bytes.
_READ_ENTRIES = 64
_READ_BYTES = 4 << 20

#: A stream fails of which so many outputs wait for the consumer: it is of a model that cannot rest.
_MOST_BEHIND = 100_000

#: Seconds that ``close`` waits for a thread that waits for Redis.
_LAST_GRACE = 1.0

#: Seconds that ``close`` waits for Redis to delete this client's keys.
_LONGEST_PARTING = 6.0


class Client:
    """Accepts calls from any thread; worker hosts compute them; each is answered exactly once.

    Args:
        max_pending: maximum number of open calls of all clients.
        reply_ttl: seconds that Redis keeps replies for an unreachable client.
        drain_timeout: seconds that ``close`` waits without progress; None for ever.
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
        self._lock = threading.RLock()  # reentrant: a user's finalizer may run while it is held
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._calls = SentCalls()
        self._doorbell = Doorbell()
        self._timer = Timer(self._time_ended)
        self._name = ""
        self._pid = 0  # the process that started it
        self._sender: threading.Thread | None = None
        self._receiver: threading.Thread | None = None
        self._sending_lock = threading.Lock()  # guards the next two
        self._sending = Link(address)
        self._is_under_way = False  # ENQUEUE is sent, its answer not read
        self._failed: list[tuple[list[RemoteCall], Failure]] = []  # answered by the sender
        self._receiving = Link(address, blocks=address.longest_block)
        self._outages = Outages((self._sending, self._receiving), "calls and replies wait")
        self._is_closing = False  # refuses new calls
        self._is_ending = threading.Event()  # ends the threads
        self._parting: threading.Thread | None = None  # the thread that ends this client
        self._has_parted = threading.Event()
        self._is_abandoned = False  # the streamer was garbage collected
        self._patience: Patience | None = None  # since it was abandoned
        self._hosts: int | None = None  # at the last refresh, like the next three
        self._old_workers = OldWorkers(address)  # while there is no host
        self._queued: int | None = None
        self._models: tuple[str, ...] = ()
        self._announced = b""  # the model's description, as the hosts announced it
        self._description: Mapping[str, Any] | None = None
        self._was_described = False  # a description was read
        self._is_awaited = False  # one was asked for before that
        self._on_hosts: Callable[[], None] = lambda: None
        self._delivered = b""  # id of the last call delivered to a host
        self._is_noticed = False  # there are notices to check
        self._was_forgotten = False  # Redis had forgotten this client
        self._suspects: dict[bytes, list[RemoteCall]] = {}  # calls missing in Redis, by mark
        self._marks: collections.deque[bytes] = collections.deque()  # marks that were read
        self._warned: set[str] = set()  # topics of warnings that are logged once
        self._unflushed: RemoteCall | None = None  # the last call, if small
        self._passing_lock = threading.RLock()  # guards what passes on outputs
        self._outputs = 0  # of streams, that have come
        self._reads_again = False  # outputs are missing: all replies that are there are read again
        self._rounds = 0  # how often that was done
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
            mark = self._wire.stream_mark(message) if call.is_stream else b""
        except UnpicklableItem as error:
            reply.fail(Failure(error.with_traceback(None)))
            return
        except ValueError as error:
            reply.fail(Failure(UnpicklableItem(f"the call is too large: {error}")))
            return
        remote = RemoteCall(number, message, timeout, deadline, reply, order, mark)
        with self._lock:
            if self._is_closing:
                raise StreamerClosed("the streamer is closed")
            if len(self._calls) >= self._max_pending:
                self._rejected += 1
                raise Overloaded(
                    f"{len(self._calls)} calls of this process are pending, and max_pending is "
                    f"{self._max_pending}; retry later"
                )
            reply.call = remote
            self._calls.add(remote)
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
        except (Exception, SystemExit) as error:  # raised by the item's code
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
            raise ModelError(f"a result cannot be decoded: {error}") from error

    def flush(self) -> None:
        call, self._unflushed = self._unflushed, None  # may be another thread's, which is fine
        try:
            if call is not None:
                self._put_in_now(call)
        finally:  # always: other calls of the same pass rely on it
            self._doorbell.ring()

    def cancel(self, call: RemoteCall) -> bool:
        """Give up a call. If a host has claimed it already, it is computed in vain."""
        return self._give_up(call, "_cancelled")

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        """Tell the host of a stream that its item rests, or goes on."""
        inflow = call.inflow
        assert inflow is not None
        inflow.is_held = is_held
        with self._lock:
            self._calls.hold(call, is_held=is_held)
        self._doorbell.ring()
        if not is_held:
            _post(self._pass_on(call, inflow))

    def withdraw(self, call: RemoteCall) -> None:
        self._give_up(call, "_cancelled")

    def expire(self, call: RemoteCall) -> None:
        self._give_up(call, "_expired")

    def _give_up(self, call: RemoteCall, count: str) -> bool:
        self.check_process()
        with self._lock:
            is_news = self._calls.give_up(call)
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
            why = "" if self._hosts != 0 else ", and there was no worker host"
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
            if not self._calls.give_up(call):
                return
            self._expired += 1
            self._changed.notify_all()
        self._doorbell.ring()
        _answer(call, reply, failure=Failure(self.late(call.timeout)))

    # -- state

    def check_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise StreamerForked(
                f"this streamer was used in process {self._pid} before it was forked to process "
                f"{os.getpid()}; build it after the fork, or do not use it before"
            )

    def check_not_in_callback(self) -> None:
        if threading.current_thread() in (self._receiver, self._sender, self._timer.thread):
            self.check_process()  # a fork within a callback
            raise StreamerError(IN_CALLBACK)

    def stats(self) -> RedisStreamerStats:
        with self._lock:
            return RedisStreamerStats(
                state=self._state(),
                pending=len(self._calls),
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
        if not self._was_described:  # else the next refresh is soon enough
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
        """Block until Redis answers and there is a worker host.

        Raises:
            BrokerUnavailable: Redis was unreachable for ``timeout`` seconds.
            WorkerStartTimeout: there was no worker host within ``timeout`` seconds.
        """
        self._start()
        self.check_not_in_callback()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        link, backoff = Link(self._address), Backoff(random.random)
        try:
            while True:
                with contextlib.suppress(LinkError):
                    self._take_in(self._refreshed(link))
                    if self._hosts:
                        return
                delay = backoff.failed()
                if time.monotonic() + delay > deadline:
                    break
                if self._is_ending.wait(delay):
                    raise StreamerClosed("the streamer is closed")
            if link.failure is not None:
                error = BrokerUnavailable(f"Redis was unreachable for {timeout} s: {link.failure}")
                raise error from link.failure
            raise WorkerStartTimeout(f"no worker host within {timeout} s ({self.describe()})")
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
                # Not atexit, which does not run in children of multiprocessing.
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
                    if not self._hosts and len(self._calls):  # to report missing hosts in time
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
            except BaseException:  # callers must not wait for a dead thread
                if self._is_ending.is_set():  # close() has closed its connection
                    return
                log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
                self._sending.close()
                self._is_ending.wait(backoff.failed())

    def _put_in_now(self, call: RemoteCall) -> None:
        """Send a new call from the caller's thread if it is the only one: no thread wakes up.

        The sender receives the answer.
        """
        if not self._sending.is_connected or not self._calls.is_alone(call):
            return
        if self._sending_lock.acquire(blocking=False):
            try:
                with self._lock:
                    is_alone = not self._is_under_way and self._calls.is_alone(call)
                if is_alone and self._sending.is_connected:
                    with contextlib.suppress(LinkError):  # the sender repeats it
                        self._begin()
            finally:
                self._sending_lock.release()

    def _put_in(self) -> bool:
        """Send the next batch, or finish the one under way; whether there was one."""
        with self._sending_lock:
            if not self._is_under_way:
                self._begin()
            return self._end()

    def _end(self) -> bool:
        """Receive the answer to the batch under way; whether there was one."""
        is_any, self._is_under_way = self._is_under_way, False
        if is_any:  # if that fails, the same batch is sent again
            self._put_in_answered(*self._sending.receive())
        return is_any

    def _begin(self) -> None:
        sent = self._calls
        with self._lock:
            batch = sent.batch(_MOST_CALLS, _MOST_BYTES)
        if not batch:
            return
        now = time.monotonic()
        arguments: list[Any] = []
        for call in batch:
            left = call.deadline - now
            milliseconds = -1 if left == math.inf else max(0, math.ceil(left * 1000))
            arguments += (milliseconds, call.message, call.order, call.mark)
        self._sending.send(
            ENQUEUE,
            (self._keys.calls, self._keys.client(self._name)),
            self._max_pending,
            math.ceil(self._reply_ttl * 1000),
            sent.first,
            *arguments,
        )
        self._is_under_way = True

    def _put_in_answered(self, is_known: int, ids: list[bytes]) -> None:
        sent = self._calls
        with self._lock:
            self._was_forgotten |= sent.is_known and not is_known
            refused = sent.put_in(ids)
            self._rejected += len(refused)
            if refused:
                self._changed.notify_all()
        if refused:
            text = (
                f"{self._max_pending} calls of all clients are pending, which is max_pending; "
                "retry later"
            )
            self._failed.append((refused, Failure(Overloaded(text))))

    def _withdraw(self) -> bool:
        ids = self._calls.to_withdraw[:1000]
        if ids:
            with self._sending_lock:
                self._end()
                self._sending.run(WITHDRAW, (self._keys.calls,), self._keys.inboxes, *ids)
            with self._lock:
                del self._calls.to_withdraw[: len(ids)]
        told = self._calls.to_tell[:1000]
        if told:
            with self._sending_lock:
                self._end()
                self._tell(self._sending, told)
        return bool(ids or told)

    def _tell(self, link: Link, told: list[tuple[bytes, bytes]]) -> None:
        """Tell worker hosts what to do with streams: it may be told twice."""
        link.run(
            TELL,
            (self._keys.calls,),
            self._keys.inboxes,
            self._keys.orders,
            math.ceil(self._reply_ttl * 1000),
            *itertools.chain.from_iterable(told),
        )
        with self._lock:
            del self._calls.to_tell[: len(told)]

    def _refresh(self) -> None:
        with self._sending_lock:
            self._end()
            sent = self._calls
            put_in = sent.count_put_in if sent.is_known else -1
            is_known = self._take_in(self._refreshed(self._sending, put_in))
            self._was_forgotten |= sent.is_known and not is_known
        if not self._hosts:
            self._old_workers.look()
        if self._is_closing:
            with self._lock:
                self._changed.notify_all()  # ``_drain`` watches the progress
        self._check(_MOST_DOUBTED)

    def _refreshed(self, link: Link, put_in: int = -1) -> Any:
        return link.run(
            REFRESH,
            (self._keys.calls, self._keys.client(self._name), self._keys.model),
            math.ceil(self._reply_ttl * 1000),
            self._keys.inboxes,
            put_in,
        )

    def _take_in(self, answer: Any) -> bool:
        """Take in Redis's answer on hosts and calls; returns whether it knew this client."""
        is_known, models, self._queued, self._delivered, announced = answer
        if announced != self._announced:
            description: Mapping[str, Any] | None = None
            with contextlib.suppress(BadMessage):  # the answer to a call says why
                description = self._wire.read_announcement(announced)
                self._was_described = True
            self._announced, self._description = announced, description
        self._hosts = len(models)
        self._models = tuple(sorted({each.decode(errors="replace") for each in models if each}))
        if len(self._models) > 1:
            text = "worker hosts of prefix %r serve different models: %s"
            self._warn_once("models", text, self._prefix, ", ".join(self._models))
        self._is_awaited = False
        self._on_hosts()
        return bool(is_known)

    def _warn_once(self, about: str, text: str, *arguments: Any) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log(logging.WARNING, text, *arguments)

    # -- lost calls

    def _check(self, most: int) -> None:
        """Check whether calls are still in Redis: those with notices, and ``most`` old ones.

        A missing call has been answered, or never will be. Redis adds a mark behind all replies so
        far, which tells the two apart: see ``_fail_lost``.
        """
        self._is_noticed = False
        is_all = self._was_forgotten and most > 0
        is_more = True
        while is_more:
            with self._lock:
                calls = self._calls.doubtful(most, all_sent=is_all)
            if not calls:
                break
            mark = secrets.token_hex(8).encode()
            with self._sending_lock:
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
            is_more = is_all and self._calls.has_more_doubts
        self._was_forgotten &= not is_all

    def _fail_lost(self) -> None:
        """Fail calls that were missing in Redis and had no reply before the mark."""
        while self._marks:
            suspects = self._suspects.pop(self._marks.popleft(), ())
            with self._lock:
                lost = self._calls.gone(suspects)
                self._unreadable += sum(bool(reason) for _, reason in lost)
                self._lost += sum(not reason for _, reason in lost)
                if lost:
                    self._changed.notify_all()
            for call, reason in lost:
                self._failed.append(([call], Failure(self._why_lost(reason))))

    def _why_lost(self, reason: str) -> StreamerError:
        if not reason:
            return BrokerUnavailable(
                "the call is no longer in Redis and has no reply: Redis was unreachable for more "
                f"than reply_ttl ({self._reply_ttl} s), lost its data, had its clock set forward, "
                "or the call was deleted"
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
        """Answer failed calls later, without the lock: users' callbacks may take long."""
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
                if self._receiving.failure is not None:  # to detect it before the next reply
                    self._receiving.call("PING")
                    self._outages.over(self._address)
                if entries_read >= _READ_ENTRIES or bytes_read >= _READ_BYTES:
                    self._receiving.call("XTRIM", key, "MINID", _after(last))
                    entries_read = bytes_read = 0
                answer = self._receiving.call(
                    "XREAD", "COUNT", _READ_ENTRIES, "BLOCK", block, "STREAMS", key, last
                )
                for _, last, fields in entries(answer):  # noqa: B007 - the next read starts there
                    entries_read += 1
                    bytes_read += sum(map(len, fields))
                    if fields and fields[0] == b"p":
                        self._hand_out(fields[1])
                    elif fields and fields[0] != b"r":
                        self._read_other(fields)
                    else:
                        self._deliver(fields[1::2])
                if self._reads_again:
                    self._reads_again = False
                    self._rounds += 1
                    last = b"0"
                if not answer:
                    # Idle: drop what was read, and read from the start again, since Redis may have
                    # restarted with an earlier clock. A repeated reply is ignored.
                    if entries_read:
                        self._receiving.call("XTRIM", key, "MINID", _after(last))
                    last, entries_read, bytes_read = b"0", 0, 0
                backoff.succeeded()
            except LinkError as error:
                if not self._is_ending.is_set():
                    self._outages.lost(error)
                self._is_ending.wait(backoff.failed())
            except BaseException:  # as in ``_send``
                if self._is_ending.is_set():
                    return
                log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
                self._is_ending.wait(backoff.failed())

    def _deliver(self, messages: list[bytes]) -> None:
        replies: list[RemoteAnswer] = []
        for message in filter(None, messages):  # an empty one only wakes this thread
            try:
                replies.append(self._wire.read_reply(message, self._name))
            except Exception as error:  # of any kind: all callers rely on this thread
                log(logging.WARNING, "dropped a malformed reply in Redis: %.200s", summary(error))
                sender = self._wire.sender(message)
                if sender is not None and sender[0] == self._name:
                    reason = error.reason if isinstance(error, BadMessage) else "unreadable"
                    self._notice(sender[1], f"reply {reason}")
        with self._lock:
            replies = [reply for reply in replies if self._is_next(reply)]
            calls = [self._calls.answered(reply.number) for reply in replies]
            if self._is_closing:
                self._changed.notify_all()
        if self._is_abandoned:
            self._doorbell.ring()
        for call, reply in zip(calls, replies, strict=True):
            if call is not None and call.inflow is not None:
                call.inflow.backlog += reply.outputs
                call.inflow.end = ([], reply.failure)
                _post(self._pass_on(call, call.inflow))
            elif call is not None:
                _answer(call, call.reply, reply.outputs, reply.failure)

    def _is_next(self, reply: RemoteAnswer) -> bool:
        """Whether a reply can be delivered: no output before those of it is missing. Locked.

        Of a stream, outputs that have come before are removed.
        """
        call = None if reply.first is None else self._calls.stream(reply.number, b"")
        if call is None or call.inflow is None or reply.first is None:
            return True
        if self._misses(call, call.inflow, reply.first):
            return False
        del reply.outputs[: call.inflow.handed_out - reply.first]
        return True

    def _misses(self, call: RemoteCall, inflow: Inflow, first: int) -> bool:
        """Whether outputs of a stream are missing that come before the ``first``. Locked.

        Redis may have restarted with an earlier clock, and what came then is found when all is read
        again. If it is not, Redis has lost it.
        """
        missing, rounds = inflow.missing or (-1, 0)
        if first <= inflow.handed_out:
            return False
        if missing != inflow.handed_out:
            inflow.missing = (inflow.handed_out, self._rounds)
            self._reads_again = True
        elif rounds < self._rounds and self._calls.give_up(call):
            self._lost += 1
            text = (
                f"Redis has lost the outputs of the stream from number {inflow.handed_out} to "
                f"{first - 1}"
            )
            self._failed.append(([call], Failure(BrokerUnavailable(text))))
            self._changed.notify_all()
            self._doorbell.ring()
        return True

    def _hand_out(self, message: bytes) -> None:
        """Hand out outputs of streams that have not come before."""
        try:
            runs = self._wire.read_outputs(message, self._name)
        except Exception as error:  # as of a reply; what is missing is noticed by the numbers
            log(logging.WARNING, "dropped malformed outputs in Redis: %.200s", summary(error))
            return
        mailboxes: set[Mailbox | None] = set()  # each loop is woken once
        for run in runs:
            call = self._take_over(run)
            if call is not None and call.inflow is not None:
                mailboxes.add(self._pass_on(call, call.inflow))
        for mailbox in mailboxes:
            _post(mailbox)

    def _take_over(self, run: OutputRun) -> RemoteCall | None:
        """Note the outputs of a run that have not come before; the call if they are to go on."""
        with self._lock:
            call = self._calls.stream(run.number, run.id)
            if call is None or call.inflow is None:
                if self._calls.to_tell:
                    self._doorbell.ring()
                return None
            inflow = call.inflow
            if self._misses(call, inflow, run.first):
                return None
            outputs = run.outputs[inflow.handed_out - run.first :]
            inflow.backlog += outputs
            inflow.handed_out += len(outputs)
            self._outputs += len(outputs)
            if len(inflow.backlog) > _MOST_BEHIND and self._calls.give_up(call):
                text = f"{len(inflow.backlog)} outputs of the stream wait for their consumer"
                self._failed.append(([call], Failure(Overloaded(text))))
                self._doorbell.ring()
            if self._is_closing:
                self._changed.notify_all()
            return call

    def _pass_on(self, call: RemoteCall, inflow: Inflow) -> Mailbox | None:
        """Give the consumer of a stream what it takes for now. In any thread.

        More may come at once than it takes before the host hears of it.

        Returns:
            The mailbox that is to be posted, to wake its task.
        """
        mailbox: Mailbox | None = None
        with self._passing_lock:
            if inflow.is_passing:  # the consumer lets it go on while it is given an output
                return None
            inflow.is_passing = True
            try:
                while (reply := call.reply) is not None and not inflow.is_held and inflow.backlog:
                    mailbox = reply.put_part(inflow.backlog.popleft()) or mailbox
                if reply is not None and inflow.end is not None and not inflow.backlog:
                    (outputs, failure), inflow.end = inflow.end, None
                    _answer(call, reply, outputs, failure)
            except BaseException:  # as of a callback
                log(logging.ERROR, "the consumer of a stream raised", exc_info=True)
            finally:
                inflow.is_passing = False
        return mailbox

    def _read_other(self, fields: list[bytes]) -> None:
        """Read a mark or a notice: unverified, so only a hint to check the call."""
        name, value = fields[:2]
        if name == b"c":
            self._marks.append(value)
            self._doorbell.ring()
        elif name == b"n" and (notice := self._wire.read_notice(value)) is not None:
            self._notice(notice[0], f"call {notice[1]}")

    def _notice(self, number: int, reason: str) -> None:
        with self._lock:
            self._is_noticed |= self._calls.noticed(number, reason)
        self._doorbell.ring()

    # -- the end

    def abandon(self) -> None:
        """Let the sender finish the accepted calls and close. For finalizers: takes no lock."""
        self._is_abandoned = True
        self._doorbell.ring()

    def _close_at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # would only print a traceback
            self.close(drain=False, timeout=None)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        if self._pid not in (0, os.getpid()):
            return  # a copy by fork has no threads to end
        if is_owned(self._lock) or self._timer.is_held:
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        with self._changed:
            self._is_closing = True
            ours = (self._sender, self._receiver, self._timer.thread)
            self._doorbell.ring()  # a thread about to flush may wait for this
            if drain and threading.current_thread() not in ours:
                self._drain(timeout)
            calls = self._calls.give_up_all()
            is_first = self._parting is None
            if is_first:
                self._parting = threading.current_thread()
            self._changed.notify_all()  # wake other threads that drain
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
        """Wait until every call is over, or there is no progress. Needs ``_changed``."""
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        patience = Patience(self._drain_timeout if timeout is None else math.inf, now)
        while len(self._calls):
            sign = self._calls.progress(self._delivered), self._outputs
            now = time.monotonic()
            left = min(deadline - now, patience.left(sign, now))
            if left <= 0:
                return
            self._changed.wait(None if left == math.inf else left)

    def _is_hopeless(self, now: float) -> bool:
        """Whether no call is open, or none makes progress."""
        with self._lock:
            if not len(self._calls):
                return True
            if self._patience is None:
                self._patience = Patience(self._drain_timeout, now)
            sign = self._calls.progress(self._delivered), self._outputs
            return self._patience.left(sign, now) <= 0

    def _why_cut_off(self) -> str:
        failure = self._sending.failure or self._receiving.failure
        if failure is not None:
            return f": {failure}"
        return ": there was no worker host" if self._hosts == 0 else ""

    def _part(self) -> None:
        """Delete this client's keys from Redis, and end the threads."""
        sender, receiver = self._sender, self._receiver
        if sender is None or receiver is None:
            return
        link = Link(self._address)
        # The sender itself may be the thread that closes.
        sender_ends = None if sender is threading.current_thread() else sender
        parting = start_thread(lambda: self._sign_off(link, sender_ends, receiver), "parting")
        parting.join(_LONGEST_PARTING)
        if parting.is_alive():
            text = "%s does not answer; this client's keys will expire there"
            log(logging.WARNING, text, self._address)
        for each in (self._sending, self._receiving, link):  # ends blocked reads
            each.close()
        for thread in (parting, sender, receiver):
            _join(thread)
        self._answer_failed()

    def _sign_off(
        self, link: Link, sender: threading.Thread | None, receiver: threading.Thread
    ) -> None:
        """The part of the end that waits for Redis.

        Args:
            sender, receiver: threads to wait for.
        """
        keys = self._keys
        own = (keys.client(self._name), keys.replies(self._name))
        if sender is not None:
            sender.join(_LAST_GRACE)
        if sender is None or not sender.is_alive():
            with contextlib.suppress(LinkError):
                self._end()  # to learn the ids to withdraw
            self._sending.close()  # frees a connection: a user's client may allow only two
        try:
            # Wakes the receiver, which may be blocked in a read.
            link.call("XADD", own[1], "*", "end", "")
            link.call("PEXPIRE", own[1], round(1000 * self._reply_ttl))
            receiver.join(_LAST_GRACE)
            while self._calls.to_withdraw:
                ids = self._calls.to_withdraw[:1000]
                link.run(WITHDRAW, (keys.calls,), keys.inboxes, *ids)
                del self._calls.to_withdraw[:1000]
            while told := self._calls.to_tell[:1000]:
                self._tell(link, told)
            link.run(PART, (keys.calls, *own), keys.inboxes)
        except LinkError as error:
            if self._calls.is_known:
                log(logging.WARNING, "%s; this client's keys will expire there", error)
        finally:
            link.close()


def _post(mailbox: Mailbox | None) -> None:
    if mailbox is not None:
        mailbox.post_looks()


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
    except BaseException:  # a user's callback may raise anything
        log(logging.ERROR, "a future's callback raised an exception", exc_info=True)


def _after(id_: bytes) -> bytes:
    time_, _, number = id_.partition(b"-")
    return b"%b-%d" % (time_, int(number or b"0") + 1)
