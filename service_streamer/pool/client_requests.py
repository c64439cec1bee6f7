"""What clients want of a pool: calls for its engine, orders about them, and questions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..engine.engine import Engine
from ..errors import RemoteTraceback, StreamerError, WorkerStartTimeout
from ..observe.record import ORDINARY, Call, Precedence
from ..workers.protocol import Failure
from .pool_protocol import (
    ANSWER,
    ASK,
    HOLD_STREAM,
    RELEASED,
    RESUME_STREAM,
    WITHDRAW,
    Items,
    own_fault,
    pack,
)
from .sessions import PoolReply, Session


class Deferred(NamedTuple):
    """What a method returns whose answer has to wait for the workers.

    Attributes:
        timeout: seconds that it may wait; None for ever.
        look: returns the answer; raises WorkerStartTimeout if it is too early for that.
    """

    timeout: float | None
    look: Callable[[], Any]


class ClientRequests:
    """Gives calls to the engine, and answers questions. For the thread that reads.

    Args:
        methods: what can be asked, by name; none of them blocks: see ``Deferred``.

    Attributes:
        is_ending: whether calls are left to the next pool.
        due: when ``answer_waiting`` is to be called; also whenever the workers have changed.
    """

    def __init__(self, engine: Engine, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._engine = engine
        self._methods = methods
        self.is_ending = False
        self.due = math.inf
        #: Questions that wait, and until when.
        self._waiting: dict[tuple[Session, int], tuple[float, Callable[[], Any]]] = {}

    def take(self, frames: list[tuple[Session, list[Any]]]) -> None:
        """Messages that have come together, from clients that have said hello."""
        has_company = len(frames) > 1 or any(len(messages) > 1 for _, messages in frames)
        for session, messages in frames:
            message: Any = None
            try:
                for message in messages:
                    if message[0] > 0:
                        if self.is_ending or session.is_gone:  # it goes to the next pool
                            continue
                        session.read += 1
                        if (call := _call_of(session, message, more=has_company)) is not None:
                            self._submit(call)
                    else:
                        self._obey(session, *message)
            except Exception as error:
                _break_off(session, message, own_fault(error))
        if has_company:  # they share batches
            self._engine.flush()

    def _submit(self, call: Call) -> None:
        try:
            self._engine.submit(call)
        except Exception as error:
            is_stated = isinstance(error, StreamerError)  # overloaded, closed or broken
            if (reply := call.reply) is not None:  # else it has an answer
                reply.fail(_with_causes(error) if is_stated else own_fault(error))

    def _obey(self, session: Session, kind: int, number: int, *rest: Any) -> None:
        if kind == ASK:
            method, arguments = rest
            self._ask(session, number, method, arguments)
            return
        if kind == RELEASED:
            if session.memory is not None:
                session.memory.released(*rest)
            return
        if kind in (HOLD_STREAM, RESUME_STREAM):
            session.hold(number, is_held=kind == HOLD_STREAM)
            return
        if kind == WITHDRAW:
            self._waiting.pop((session, number), None)
            call = session.calls.pop(number, None)
            if call is not None:
                self._engine.withdraw(call)

    def _ask(self, session: Session, number: int, method: str, arguments: Any) -> None:
        try:
            if method not in self._methods:
                raise ValueError(f"the pool has no answer to {method!r:.40}")
            value = self._methods[method](*arguments)
            if type(value) is Deferred:
                ends_at = math.inf if value.timeout is None else time.monotonic() + value.timeout
                self._waiting[session, number] = ends_at, value.look
                self.due = -math.inf
                return
            pack(value)  # refused here, and not among the answers of others
        except Exception as error:
            value = _with_causes(error)
        session.tell((ANSWER, number, value))

    def answer_waiting(self) -> None:
        """Answer the questions for which it is time, and forget those of clients that have gone."""
        now, self.due = time.monotonic(), math.inf
        for (session, number), (ends_at, look) in [*self._waiting.items()]:
            try:
                value = None if session.is_gone else look()
            except Exception as error:
                if type(error) is WorkerStartTimeout and now < ends_at:
                    self.due = min(self.due, ends_at)
                    continue
                value = _with_causes(error)
            del self._waiting[session, number]
            session.tell((ANSWER, number, value))


def _break_off(session: Session, message: Any, failure: Failure) -> None:
    """End a session for an exception of our own; the call of the message fails."""
    with contextlib.suppress(Exception):  # the message may be nonsense, and have none
        number = message[0] if message[0] > 0 else message[1]
        if message[0] > 0 or number in session.calls:
            session.give_up(number, failure)
        session.send()
    session.break_off()


def _call_of(session: Session, message: tuple[Any, ...], *, more: bool) -> Call | None:
    """The call of a message; None if it has failed."""
    if len(message) == 3:  # as nearly all
        number, payload, deadline = message
        payloads, precedence, lengths, is_stream = (payload,), None, None, False
    else:
        number, payloads, deadline, precedence, lengths, is_stream = message
    try:
        items = session.taken(number, payloads)
    except Exception as error:  # the client's memory cannot be read: nobody else suffers
        session.answer((number, _with_causes(error), None))
        return None
    if lengths is not None:
        items = Items(items)
        items.lengths = lengths
    call = Call(
        items,
        PoolReply(session, number),
        None if deadline is None else deadline - time.monotonic(),
        ORDINARY if precedence is None else Precedence(*precedence),
        False,  # the client watches the time
        more,
        is_stream,
    )
    session.calls[number] = call  # before it can be over
    return call


def _with_causes(error: BaseException) -> Failure:
    """For an exception that was raised here, with what has led to it."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        return Failure(error.with_traceback(None), cause.text)
    return Failure(error.with_traceback(None), cause=None if cause is None else _with_causes(cause))
