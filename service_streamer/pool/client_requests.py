"""What clients want of a pool: calls for its engine, orders about them, and questions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.engine import Engine
from ..engine.timer import start_thread
from ..errors import RemoteTraceback
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
    pack,
)
from .sessions import PoolReply, Session

__all__ = ["ClientRequests"]

#: Answers a question: the method, and its arguments.
Answers = Callable[[str, tuple[Any, ...]], Any]


#: Calls that the engine gets at once: its lock is held while it takes them.
_MOST_TOGETHER = 64


class ClientRequests:
    """Gives them to the engine, in the thread that reads; questions have threads of their own.

    Args:
        answers: to questions; in any thread.
        has_answered: called when an answer to a question waits in its session; in any thread.

    Attributes:
        is_ending: whether calls are left to the next pool.
    """

    def __init__(
        self, engine: Engine, answers: Answers, has_answered: Callable[[Session], None]
    ) -> None:
        self._engine = engine
        self._answers = answers
        self._has_answered = has_answered
        self.is_ending = False

    def take(self, frames: list[tuple[Session, list[Any]]]) -> None:
        """Messages that have come together, from clients that have said hello."""
        has_company = len(frames) > 1 or any(len(messages) > 1 for _, messages in frames)
        calls: list[Call] = []
        for session, messages in frames:
            for message in messages:
                if message[0] > 0:
                    if self.is_ending or session.is_gone:  # it goes to the next pool
                        continue
                    session.read += 1
                    if session.known and session.is_known(message[0]):
                        continue
                    try:
                        calls.append(_call_of(session, message, more=has_company))
                    except Exception as error:  # its memory cannot be read: nobody else suffers
                        session.answer((message[0], _with_causes(error), None))
                    continue
                if calls:  # it may be about one of them
                    self._submit(calls)
                    calls = []
                self._obey(session, *message)
        self._submit(calls)
        if has_company:  # they share batches
            self._engine.flush()

    def _submit(self, calls: list[Call]) -> None:
        if len(calls) == 1:  # the one of a lone caller
            try:
                self._engine.submit(calls[0])
            except Exception as error:  # nearly always one of ours: overloaded, closed, broken
                calls[0].reply.fail(_with_causes(error))
            return
        for start in range(0, len(calls), _MOST_TOGETHER):
            for call, refusal in self._engine.submit_all(calls[start : start + _MOST_TOGETHER]):
                call.reply.fail(_with_causes(refusal))

    def _obey(self, session: Session, kind: int, number: int, *rest: Any) -> None:
        if kind == ASK:
            method, arguments = rest
            start_thread(lambda: self._ask(session, number, method, arguments), "question")
            return
        if kind == RELEASED:
            if session.memory is not None:
                session.memory.released(*rest)
            return
        if kind in (HOLD_STREAM, RESUME_STREAM):
            session.hold(number, is_held=kind == HOLD_STREAM)
            return
        call = session.calls.pop(number, None)
        if call is not None and kind == WITHDRAW:
            self._engine.withdraw(call)

    def _ask(self, session: Session, number: int, method: str, arguments: Any) -> None:
        try:
            value = self._answers(method, arguments)
        except Exception as error:
            value = _with_causes(error)
        with contextlib.suppress(Exception):
            pack(value)  # refused here, and not among the answers of others
            session.tell((ANSWER, number, value))
            self._has_answered(session)


def _call_of(session: Session, message: tuple[Any, ...], *, more: bool) -> Call:
    """The call of a message."""
    if len(message) == 3:  # as nearly all
        number, payload, deadline = message
        payloads, precedence, lengths, handed_out = (payload,), None, None, None
    else:
        number, payloads, deadline, precedence, lengths, handed_out = message
    items: Sequence[Any] = session.taken(number, payloads)
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
        handed_out is not None,
    )
    call.handed_out = handed_out or None
    if call.is_stream:
        session.streams.add(number)
    session.calls[number] = call  # before it can be over
    return call


def _with_causes(error: BaseException) -> Failure:
    """For an exception that was raised here, with what has led to it."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        return Failure(error.with_traceback(None), cause.text)
    return Failure(error.with_traceback(None), cause=None if cause is None else _with_causes(cause))
