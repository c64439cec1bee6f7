"""The open calls of a client, for all its threads: the lock that guards them, and who is woken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from ..engine.timer import Doorbell
from ..errors import Overloaded, StreamerClosed
from ..reporting import quiet_log
from ..workers.protocol import Failure
from .open_calls import OpenCalls, RemoteCall

log = quiet_log(__name__)

#: Of a subclass, which knows more about the calls.
Ledger = TypeVar("Ledger", bound=OpenCalls, covariant=True)


class CallBook(Generic[Ledger]):
    """What callers' threads share with those that send and receive.

    Attributes:
        calls: the open ones; guarded by ``lock``.
        changed: notified when a call is over, while the client is being closed.
        doorbell: wakes the thread that sends.
        is_closing: whether new calls are refused.
        is_abandoned: whether the client ends by itself, when its calls are over.
        expired, cancelled, rejected: how many calls ended so.
    """

    def __init__(self, calls: Ledger, max_pending: int) -> None:
        self.calls = calls
        self.lock = threading.RLock()  # reentrant: a user's finalizer may run while it is held
        self.changed = threading.Condition(self.lock)
        self.doorbell = Doorbell()
        self.is_closing = self.is_abandoned = False
        self.expired = self.cancelled = self.rejected = 0
        self._max_pending = max_pending
        self._failed: list[tuple[Sequence[RemoteCall], Failure]] = []

    def open(self, call: RemoteCall) -> None:
        """Accept a call.

        Raises:
            StreamerClosed, Overloaded: it was not accepted.
        """
        with self.lock:
            if self.is_closing:
                raise StreamerClosed("the streamer is closed")
            why = self._why_full()
            if why is not None:
                self.rejected += 1
                raise Overloaded(f"{why}, and max_pending is {self._max_pending}; retry later")
            call.reply.call = call
            self.calls.add(call)

    def _why_full(self) -> str | None:
        """Why no call can be accepted; None if one can. Locked."""
        count = len(self.calls)
        return f"{count} calls of this process are pending" if count >= self._max_pending else None

    def give_up(self, call: RemoteCall, why: Literal["expired", "cancelled"]) -> bool:
        """The caller of a call has gone; false if it was over already."""
        with self.lock:
            is_news = self.calls.give_up(call)
            if is_news:
                setattr(self, why, getattr(self, why) + 1)
                call.reply = None
                self.changed.notify_all()
        if is_news:
            self.doorbell.ring()
        return is_news

    def fail(self, call: RemoteCall, error: Exception) -> bool:
        """End a call: the thread that sends answers it. False if it was over already."""
        with self.lock:
            if not self.calls.give_up(call):
                return False
            self.changed.notify_all()
        self.fail_soon([call], Failure(error))
        self.doorbell.ring()
        return True

    def fail_soon(self, calls: Sequence[RemoteCall], failure: Failure) -> None:
        """Have the thread that sends answer calls that are over."""
        self._failed.append((calls, failure))

    def answer_failed(self) -> None:
        """Answer them, without the lock: users' callbacks may take long."""
        while self._failed:
            calls, failure = self._failed.pop()
            for call in calls:
                answer(call, call.reply, failure=failure)


def answer(
    call: RemoteCall,
    reply: Any,
    payloads: list[bytes] | None = None,
    failure: Failure | None = None,
) -> None:
    """Hand an outcome to a call's reply. Never under a lock."""
    call.reply = None
    try:
        if failure is None:
            reply.complete(payloads)
        else:
            reply.fail(failure)
    except BaseException:  # a user's callback may raise anything
        log(logging.ERROR, "a future's callback raised an exception", exc_info=True)
