"""The way of a result into an asyncio event loop. (gevent needs none: see ``docs/design.md``.)"""

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

__all__ = ["LoopReply", "predict_in_loop"]


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
