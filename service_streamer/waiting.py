"""Waiting for the results of one call: by blocking a thread or greenlet, or in an asyncio loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from .engine import Engine
from .errors import PredictTimeout
from .scheduling.records import Call

__all__ = ["BlockingReply", "LoopReply", "predict_blocking", "predict_in_loop"]


def predict_blocking(engine: Engine, batch: Sequence[Any], timeout: float | None) -> list[Any]:
    """Submit a batch and block until its results are there. Under gevent only the greenlet blocks.

    Raises:
        PredictTimeout: after ``timeout`` seconds; the call is withdrawn.
    """
    reply = BlockingReply()
    engine.submit(batch, reply)
    try:
        is_over = reply.wait(timeout)
    finally:  # also for KeyboardInterrupt and a killed greenlet: nobody waits for it then
        call = reply.call
        if call is not None:
            engine.withdraw(call)
    if not is_over:
        raise PredictTimeout(f"no result within {timeout} s")
    return reply.result()


class BlockingReply:
    """Wakes the one thread that waits for it. A future can do that too, at twice the cost."""

    __slots__ = ("_arrived", "_error", "_outputs", "call")

    def __init__(self) -> None:
        self.call: Call | None = None
        self._outputs: list[Any] = []
        self._error: BaseException | None = None
        self._arrived = threading.Lock()  # held until the outcome is there
        self._arrived.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until the outcome is there; False when ``timeout`` seconds have passed first."""
        return self._arrived.acquire(timeout=-1 if timeout is None else timeout)

    def result(self) -> list[Any]:
        """The results; raises what the call failed with."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle, which would keep all of it
        return self._outputs

    def complete(self, outputs: list[Any]) -> None:
        self._outputs = outputs
        self.call = None
        self._arrived.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.call = None
        self._arrived.release()


async def predict_in_loop(engine: Engine, batch: Sequence[Any], timeout: float | None) -> list[Any]:
    """Submit a batch and await its results. Cancelling the task withdraws the call.

    Raises:
        PredictTimeout: after ``timeout`` seconds; the call is withdrawn.
    """
    reply = LoopReply(asyncio.get_running_loop())
    engine.submit(batch, reply)
    try:
        # Not asyncio.timeout: its TimeoutError would be mistaken for one of the model's.
        await asyncio.wait((reply.future,), timeout=timeout)
    finally:
        if not reply.future.done() and reply.call is not None:
            engine.withdraw(reply.call)
    if not reply.future.done():
        raise PredictTimeout(f"no result within {timeout} s")
    return reply.future.result()


class LoopReply:
    """Hands the outcome to a future of an asyncio loop, from any thread."""

    __slots__ = ("_mailbox", "call", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call: Call | None = None
        self.future: asyncio.Future[list[Any]] = loop.create_future()
        self._mailbox = _mailbox(loop)

    def complete(self, outputs: list[Any]) -> None:
        self.call = None
        self._mailbox.post(self.future, outputs, None)

    def fail(self, error: BaseException) -> None:
        self.call = None
        self._mailbox.post(self.future, [], error)


class _Mailbox:
    """Collects outcomes for a loop, so that those of one batch wake it once and not 64 times."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak, or this, being the value of a dict with the loop as its weak key, kept it alive.
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._outcomes: collections.deque[
            tuple[asyncio.Future[list[Any]], list[Any], BaseException | None]
        ] = collections.deque()

    def post(
        self, future: asyncio.Future[list[Any]], outputs: list[Any], error: BaseException | None
    ) -> None:
        with self._lock:
            is_first = not self._outcomes
            self._outcomes.append((future, outputs, error))
        loop = self._loop()
        if is_first and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, collections.deque()
        for future, outputs, error in outcomes:
            if future.done():  # cancelled, or its time has ended
                continue
            if error is None:
                future.set_result(outputs)
            else:
                future.set_exception(error)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox]
_mailboxes = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def _mailbox(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _mailboxes_lock:
            mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    return mailbox
