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
     ◀────────────────────────────────────────────────────── reply.end, and of streams
                                                             reply.put_part
       decode, in the caller's thread again

Each of the two threads has its own connection, and reconnects when it is lost. No call is lost: the
sender repeats its batch, and Redis knows which calls it has; replies wait in a stream, which is
read from the last received one. What is not about Redis is in ``remote/``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.threads import is_owned, start_thread
from ..errors import (
    BadMessage,
    BrokerUnavailable,
    Overloaded,
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    WorkerStartTimeout,
)
from ..observe.record import Call
from ..options.table import RedisStreamerOptions
from ..remote.open_calls import RemoteCall, answer
from ..remote.remote_client import RemoteClient
from ..reporting import report_bug
from ..workers.protocol import Failure
from .link import Address, Backoff, Link, LinkError, Outages, log
from .receiver import Receiver
from .redis_stats import RedisStreamerStats
from .scripts import ENQUEUE, PART, REFRESH, TELL, Keys
from .sent_calls import SentCalls
from .wire import Wire

#: Seconds between two signs of life to Redis.
_REFRESH = 5.0

#: Maximum calls and bytes of one ENQUEUE, and ids of one TELL.
_MOST_CALLS = 512
_MOST_BYTES = 4 << 20
_MOST_IDS = 1000

#: Seconds that ``close`` waits for a thread that waits for Redis.
_LAST_GRACE = 1.0

#: Seconds that ``close`` waits for Redis to delete this client's keys.
_LONGEST_PARTING = 6.0


class HostsSeen:
    """What Redis said of the worker hosts when it was last asked. For any thread.

    Attributes:
        count: how many hosts are alive; None while that is not known.
        queued: number of calls of all clients; None while that is not known.
        models: the models of the hosts.
        is_awaited: the description is wanted soon.
        on_change: called, in any thread, whenever Redis was asked.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.count: int | None = None
        self.queued: int | None = None
        self.models: tuple[str, ...] = ()
        self.is_awaited = False
        self.on_change: Callable[[], None] = lambda: None
        self._announced = b""  # the model's description, as the hosts announced it
        self._description: Mapping[str, Any] | None = None
        self._was_described = False  # a description was read

    def description(self) -> Mapping[str, Any] | None:
        """That of the model; None while no host has announced one that can be read."""
        if self.count and self._description is not None:
            return self._description
        if not self._was_described:  # else the next time is soon enough
            self.is_awaited = True
        return None

    def update(self, models: list[bytes], queued: int, announced: bytes) -> None:
        """Redis has answered."""
        self.queued = queued
        if announced != self._announced:
            description: Mapping[str, Any] | None = None
            with contextlib.suppress(BadMessage):  # the answer to a call says why
                description = self._wire.read_announcement(announced)
                self._was_described = True
            self._announced, self._description = announced, description
        self.count = len(models)
        self.models = tuple(sorted({each.decode(errors="replace") for each in models if each}))
        self.is_awaited = False
        self.on_change()


class Client(RemoteClient[SentCalls]):
    """Accepts calls from any thread; worker hosts compute them; each is answered exactly once.

    The sender's thread has a link of its own, with which callers' threads send lone calls.
    """

    def __init__(self, options: RedisStreamerOptions) -> None:
        address, wire = Address(options.redis_broker), Wire(options)
        calls = SentCalls(options.max_pending)
        self._keys = Keys(options.prefix)
        self._receiver = Receiver(address, wire, calls, options, on_bug=self._fail_all)
        super().__init__(
            wire.codec.encode, wire.codec.decode, calls, self._receiver, options.drain_timeout
        )
        self._address = address
        self._wire = wire
        self._options = options
        self._answer_timeout = (
            math.inf if options.answer_timeout is None else options.answer_timeout
        )
        self._life = math.ceil(1000 * options.reply_ttl)
        self._name = ""
        self._hosts = HostsSeen(wire)
        self._lost = 0  # calls that made no progress
        self._send_lock = threading.RLock()  # guards the next two
        self._link = Link(address)  # of whichever thread sends
        self._is_under_way = False  # ENQUEUE is sent, its answer not read
        self._outages = Outages((self._link, self._receiver.link), "calls and replies wait")

    # -- calls

    def _encode_call(
        self, call: Call, number: int, payloads: list[bytes], deadline: float
    ) -> RemoteCall:
        message = self._wire.call(self._name, number, payloads, call.options)
        return RemoteCall(call, number, message, deadline)

    def _send_now(self, call: RemoteCall) -> None:
        """The sender's thread receives the answer."""
        if not self._link.is_connected or not self._calls.is_alone(call):
            return
        try:
            if not self._send_lock.acquire(blocking=False):
                return
            with self._calls.lock:
                is_alone = not self._is_under_way and self._calls.is_alone(call)
            if is_alone and self._link.is_connected:
                self._begin_batch()
        except Exception:  # the sender's thread repeats it
            pass
        finally:  # a signal handler may raise right after it is acquired
            if is_owned(self._send_lock):
                self._send_lock.release()

    def _interrupted(self) -> None:
        if is_owned(self._send_lock):  # just before ``_send_now`` was to release it
            self._send_lock.release()
        super()._interrupted()

    def late(self, timeout: float | None) -> StreamerError:
        return self._late(f"no result within {timeout} s")

    def _late(self, text: str) -> StreamerError:
        failure = self._failure
        if failure is None:
            why = "" if self._hosts.count != 0 else ", and there was no worker host"
            return PredictTimeout(f"{text}{why} ({self.describe()})")
        error = BrokerUnavailable(f"{text}: {failure}")
        error.__cause__ = failure
        return error

    # -- state

    @property
    def _failure(self) -> LinkError | None:
        """Why Redis cannot be reached now."""
        return self._link.failure or self._receiver.link.failure

    def stats(self) -> RedisStreamerStats:
        self.check_process()  # before the lock, which a fork may have copied while held
        open_calls, hosts = self._calls, self._hosts
        with open_calls.lock:
            return RedisStreamerStats(
                state=self._state(),
                pending=len(self._calls),
                queued=hosts.queued,
                hosts=hosts.count,
                outages=self._outages.count,
                expired=open_calls.expired,
                cancelled=open_calls.cancelled,
                rejected=open_calls.rejected,
                models=hosts.models,
                unreadable=self._receiver.unreadable,
                lost=self._lost + self._receiver.lost,
            )

    def describe(self) -> str:
        if self.is_forked:
            return f"{self._address} | of process {self._pid}"
        return f"{self._address} | {self.stats().gist}"

    def model_description(self) -> Mapping[str, Any] | None:
        """As the worker hosts announced it; None while none has, or where it cannot be read.

        Raises:
            StreamerClosed: the streamer is closed.
        """
        self._start()
        description = self._hosts.description()
        if self._hosts.is_awaited:
            self._calls.doorbell.ring()
        return description

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """As the engine's. Called whenever Redis was asked for the worker hosts."""
        self._hosts.on_change = callback

    def _state(self) -> str:
        if self._is_ending.is_set():
            return "closed"
        if self._calls.is_closing:
            return "draining"
        if not self._threads:
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
                    self._look(link)
                    if self._hosts.count:
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

    # -- the sender's thread

    def _start_threads(self) -> None:
        if not self._name:
            self._name = self._receiver.name = secrets.token_hex(8)
        self._start_thread("receiver", lambda: self._receiver.run(self._outages, self._is_ending))
        self._start_thread("sender", self._send)

    def _send(self) -> None:
        open_calls = self._calls
        backoff = Backoff(random.random)
        refresh_at = 0.0
        while not self._is_ending.is_set():
            now = time.monotonic()
            if open_calls.is_abandoned and self._is_hopeless(now):
                self.close(drain=False, timeout=None)
                return
            try:
                self._fail_silent(now)
                if self._hosts.is_awaited:
                    refresh_at = min(refresh_at, now + _REFRESH / 20)
                if refresh_at <= now:
                    self._refresh()
                    shortest = min(self._options.reply_ttl, self._answer_timeout)
                    refresh_at = now + min(_REFRESH, shortest / 3)
                    if not self._hosts.count and len(self._calls):  # to report missing ones in time
                        refresh_at = now + _REFRESH / 10
                is_any = self._send_batch()
                is_any |= self._tell()
                open_calls.answer_failed()
                if not is_any:
                    open_calls.doorbell.wait(refresh_at - time.monotonic())
                self._outages.over(self._address)
                backoff.succeeded()
            except LinkError as error:
                if not self._is_ending.is_set():
                    self._outages.lost(error)
                self._is_ending.wait(backoff.failed())
                refresh_at = 0.0
            except BaseException as bug:  # callers must not wait for a dead thread
                if self._is_ending.is_set():  # close() has closed its connection
                    return
                failure = Failure(report_bug("the streamer", bug))
                with self._send_lock, open_calls.lock:  # forget what is under way
                    self._link.close()
                    self._is_under_way = False
                    self._calls.skip_batch()
                self._fail_all(failure)
                self._is_ending.wait(backoff.failed())

    def _fail_all(self, failure: Failure) -> None:
        """Answer all open calls with an error of ours, in any thread."""
        with self._calls.lock:
            calls = self._calls.end_all()
            self._calls.changed.notify_all()
        for call in calls:
            answer(call, call.reply, failure=failure)

    def _fail_silent(self, now: float) -> None:
        """Fail calls that have made no progress for too long: nothing may hang for ever."""
        with self._calls.lock:
            silent = self._calls.silent(now, self._answer_timeout)
        for call in silent:
            text = f"no progress in {self._answer_timeout:g} s, which is answer_timeout"
            self._lost += self._calls.fail(call, self._late(text))
        self._calls.answer_failed()

    def _send_batch(self) -> bool:
        """Send the next calls, or finish those under way; whether there were any."""
        with self._send_lock:
            if not self._is_under_way:
                self._begin_batch()
            return self._end_batch()

    def _begin_batch(self) -> None:
        with self._calls.lock:
            batch = self._calls.batch(_MOST_CALLS, _MOST_BYTES)
        if not batch:
            return
        now = time.monotonic()
        arguments: list[Any] = []
        for call in batch:
            left = call.deadline - now
            milliseconds = -1 if left == math.inf else max(0, math.ceil(left * 1000))
            arguments += (milliseconds, call.message)
        self._link.send(
            ENQUEUE,
            (self._keys.calls, self._keys.client(self._name)),
            self._options.max_pending,
            self._life,
            self._calls.first,
            *arguments,
        )
        self._is_under_way = True

    def _end_batch(self) -> bool:
        """Receive the answer to the calls under way; whether there were any."""
        is_any, self._is_under_way = self._is_under_way, False
        if not is_any:
            return False
        ids = self._link.receive()  # if that fails, the same batch is sent again
        open_calls = self._calls
        with open_calls.lock:
            refused = self._calls.put_in(ids)
            open_calls.rejected += len(refused)
            if refused:
                open_calls.changed.notify_all()
        if refused:
            text = (
                f"{self._options.max_pending} calls of all clients are pending, which is "
                "max_pending; retry later"
            )
            open_calls.fail_soon(refused, Failure(Overloaded(text)))
        return True

    def _tell(self) -> bool:
        """Say what nobody waits for, and which streams rest; whether there was anything."""
        told = self._calls.to_tell[:_MOST_IDS]
        if told:
            with self._send_lock:
                self._end_batch()
                self._tell_over(self._link, told)
        return bool(told)

    def _tell_over(self, link: Link, told: list[tuple[bytes, bytes]]) -> None:
        """It may be told twice."""
        link.run(
            TELL,
            (self._keys.calls,),
            self._keys.inboxes,
            self._keys.orders,
            self._life,
            *itertools.chain.from_iterable(told),
        )
        with self._calls.lock:
            del self._calls.to_tell[: len(told)]

    def _refresh(self) -> None:
        """Give a sign of life, and look at the hosts."""
        with self._send_lock:
            self._end_batch()
            self._look(self._link, self._calls.count_put_in if self._calls.is_known else -1)
        if self._calls.is_closing:
            with self._calls.lock:
                self._calls.changed.notify_all()  # who drains watches the progress

    def _look(self, link: Link, put_in: int = -1) -> None:
        """Ask Redis for hosts and calls, over any link."""
        models, queued, self._calls.delivered, announced = link.run(
            REFRESH,
            (self._keys.calls, self._keys.client(self._name), self._keys.model),
            self._life,
            self._keys.inboxes,
            put_in,
        )
        self._hosts.update(models, queued, announced)

    # -- the end

    def _why_cut_off(self) -> str:
        if self._failure is not None:
            return f": {self._failure}"
        return ": there was no worker host" if self._hosts.count == 0 else ""

    def _part(self) -> None:
        """Delete this client's keys from Redis, and end the threads."""
        sending, receiving = self._threads.get("sender"), self._threads.get("receiver")
        if sending is None or receiving is None:
            return
        link = Link(self._address)
        # The sender itself may be the thread that closes.
        sender_ends = None if sending is threading.current_thread() else sending
        parting = start_thread(lambda: self._sign_off(link, sender_ends, receiving), "parting")
        parting.join(_LONGEST_PARTING)
        if parting.is_alive():
            text = "%s does not answer; this client's keys will expire there"
            log(logging.WARNING, text, self._address)
        for each in (self._link, self._receiver.link, link):  # ends blocked reads
            each.close()
        for thread in (parting, sending, receiving):
            _join(thread)
        self._calls.answer_failed()

    def _sign_off(
        self, link: Link, sending: threading.Thread | None, receiving: threading.Thread
    ) -> None:
        """The part of the end that waits for Redis.

        Args:
            sending, receiving: threads to wait for.
        """
        keys = self._keys
        name = self._name
        own = (keys.client(name), keys.replies(name), keys.unread(name))
        if sending is not None:
            sending.join(_LAST_GRACE)
        if sending is None or not sending.is_alive():
            with contextlib.suppress(LinkError):
                self._end_batch()  # to learn the ids to withdraw
            self._link.close()  # frees a connection: a user's client may allow only two
        try:
            # Wakes the receiver, which may be blocked in a read.
            link.call("XADD", own[1], "*", "end", "")
            link.call("PEXPIRE", own[1], round(1000 * self._options.reply_ttl))
            receiving.join(_LAST_GRACE)
            while told := self._calls.to_tell[:_MOST_IDS]:
                self._tell_over(link, told)
            link.run(PART, (keys.calls, *own), keys.inboxes)
        except LinkError as error:
            if self._calls.is_known:
                log(logging.WARNING, "%s; this client's keys will expire there", error)
        finally:
            link.close()


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join(_LAST_GRACE)
