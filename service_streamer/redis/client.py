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
read from the last received one. What is not about Redis is in ``remote/``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.timer import start_thread
from ..errors import (
    BrokerUnavailable,
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    WorkerStartTimeout,
)
from ..observe.record import Call
from ..remote.call_book import CallBook
from ..remote.open_calls import RemoteCall
from ..remote.remote_client import RemoteClient
from ..reporting import report_bug
from ..workers.protocol import Failure
from .hosts_seen import HostsSeen
from .ledger import SentCalls
from .link import Address, Backoff, Link, LinkError, Outages, log
from .lost_calls import LostCalls
from .receiver import Receiver, RedisDeliveries
from .redis_stats import RedisStreamerStats
from .scripts import PART, Keys
from .sender import Sender
from .wire import Wire

#: Seconds between two signs of life to Redis.
_REFRESH = 5.0

#: Seconds that ``close`` waits for a thread that waits for Redis.
_LAST_GRACE = 1.0

#: Seconds that ``close`` waits for Redis to delete this client's keys.
_LONGEST_PARTING = 6.0


class Client(RemoteClient[SentCalls]):
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
        book = CallBook(SentCalls(), max_pending)
        deliveries = RedisDeliveries(book)
        super().__init__(wire.codec.encode, wire.codec.decode, book, deliveries, drain_timeout)
        self._address = address
        self._wire = wire
        self._keys = Keys(prefix)
        self._reply_ttl = reply_ttl
        self._name = ""
        self._hosts = HostsSeen(wire)
        self._lost = LostCalls(book, prefix, reply_ttl)
        self._lost_outputs = deliveries
        self._sender = Sender(
            address,
            self._keys,
            book,
            self._hosts,
            self._lost,
            max_pending=max_pending,
            reply_ttl=reply_ttl,
        )
        self._receiver = Receiver(
            address, self._keys, wire, deliveries, self._lost, reply_ttl=reply_ttl
        )
        self._outages = Outages((self._sender.link, self._receiver.link), "calls and replies wait")

    # -- calls

    def _encode_call(
        self, call: Call, number: int, payloads: list[bytes], deadline: float
    ) -> RemoteCall:
        message = self._wire.call(
            self._name, number, payloads, call.precedence, is_stream=call.is_stream
        )
        return RemoteCall(
            number, message, call.timeout, deadline, call.reply, is_stream=call.is_stream
        )

    def _send_now(self, call: RemoteCall) -> None:
        self._sender.put_in_now(call)

    def _interrupted(self) -> None:
        self._sender.interrupted()
        super()._interrupted()

    def late(self, timeout: float | None) -> StreamerError:
        failure = self._failure
        if failure is None:
            why = "" if self._hosts.count != 0 else ", and there was no worker host"
            return PredictTimeout(f"no result within {timeout} s{why} ({self.describe()})")
        error = BrokerUnavailable(f"no result within {timeout} s: {failure}")
        error.__cause__ = failure
        return error

    # -- state

    @property
    def _failure(self) -> LinkError | None:
        """Why Redis cannot be reached now."""
        return self._sender.link.failure or self._receiver.link.failure

    def stats(self) -> RedisStreamerStats:
        book, hosts = self._book, self._hosts
        with book.lock:
            return RedisStreamerStats(
                state=self._state(),
                pending=len(self._calls),
                queued=hosts.queued,
                hosts=hosts.count,
                outages=self._outages.count,
                expired=book.expired,
                cancelled=book.cancelled,
                rejected=book.rejected,
                models=hosts.models,
                unreadable=self._lost.unreadable,
                lost=self._lost.lost + self._lost_outputs.lost,
            )

    def describe(self) -> str:
        return f"{self._address} | {self.stats().gist}"

    def model_description(self) -> Mapping[str, Any] | None:
        """As the worker hosts announced it; None while none has, or where it cannot be read.

        Raises:
            StreamerClosed: the streamer is closed.
        """
        self._start()
        description = self._hosts.description()
        if self._hosts.is_awaited:
            self._book.doorbell.ring()
        return description

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """As the engine's. Called whenever Redis was asked for the worker hosts."""
        self._hosts.on_change = callback

    def _state(self) -> str:
        if self._is_ending.is_set():
            return "closed"
        if self._book.is_closing:
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
                    self._sender.look(link)
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

    # -- the threads

    def _start_threads(self) -> None:
        if not self._name:
            self._name = secrets.token_hex(8)
            self._sender.name = self._receiver.name = self._name
        self._start_thread("receiver", lambda: self._receiver.run(self._outages, self._is_ending))
        self._start_thread("sender", self._send)

    def _send(self) -> None:
        sender, book = self._sender, self._book
        backoff = Backoff(random.random)
        refresh_at = 0.0
        while not self._is_ending.is_set():
            now = time.monotonic()
            if book.is_abandoned and self._is_hopeless(now):
                self.close(drain=False, timeout=None)
                return
            try:
                if self._hosts.is_awaited:
                    refresh_at = min(refresh_at, now + _REFRESH / 20)
                if refresh_at <= now:
                    sender.refresh()
                    refresh_at = now + min(_REFRESH, self._reply_ttl / 3)
                    if not self._hosts.count and len(self._calls):  # to report missing ones in time
                        refresh_at = now + _REFRESH / 10
                is_any = sender.put_in()
                is_any |= sender.tell()
                if self._lost.is_noticed:
                    sender.check(is_all=False)
                self._lost.fail()
                book.answer_failed()
                if not is_any:
                    book.doorbell.wait(refresh_at - time.monotonic())
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
                sender.begin_again()
                self._lost.fail_all(failure)
                self._is_ending.wait(backoff.failed())

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
        for each in (self._sender.link, self._receiver.link, link):  # ends blocked reads
            each.close()
        for thread in (parting, sending, receiving):
            _join(thread)
        self._book.answer_failed()

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
                self._sender.end()  # to learn the ids to withdraw
            self._sender.link.close()  # frees a connection: a user's client may allow only two
        try:
            # Wakes the receiver, which may be blocked in a read.
            link.call("XADD", own[1], "*", "end", "")
            link.call("PEXPIRE", own[1], round(1000 * self._reply_ttl))
            receiving.join(_LAST_GRACE)
            self._sender.tell_last(link)
            link.run(PART, (keys.calls, *own), keys.inboxes)
        except LinkError as error:
            if self._calls.is_known:
                log(logging.WARNING, "%s; this client's keys will expire there", error)
        finally:
            link.close()


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join(_LAST_GRACE)
