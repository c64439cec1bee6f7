"""A client's calls and questions, and what becomes of them when the pool is lost. No I/O."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from ..observe.record import Call, Timing
from ..remote.open_calls import OpenCalls, RemoteCall
from .pool_link import PoolLink
from .pool_protocol import ASK, HOLD_STREAM, RESUME_STREAM, WITHDRAW, pack

#: Calls that may wait if nothing bounds them.
_UNBOUNDED = 1 << 62


class PoolCall(RemoteCall):
    """A call on its way to the pool or back. What is sent is kept until the answer has come.

    Attributes:
        sent: its message.
        size: bytes of its payloads.
        key: of its message in the link.
        position: among the calls that this pool was sent, from 1; 0 if it was not sent.
        leases: of the shared memory that its large items are in.
        spent: where its time went, as the answer has it; None until it is answered.
    """

    __slots__ = ("key", "leases", "position", "sent", "size", "spent")

    def __init__(
        self,
        call: Call,
        number: int,
        sent: tuple[Any, ...],
        size: int,
        deadline: float,
        leases: Sequence[Any],
    ) -> None:
        super().__init__(call, number, b"", deadline)
        self.sent = sent
        self.size = size
        self.leases = leases
        self.key = self.position = 0
        self.spent: tuple[Any, ...] | None = None

    @property
    def timing(self) -> Timing | None:  # type: ignore[override]
        spent = self.spent
        if spent is None or len(spent) != 2:
            return None if spent is None else Timing(*spent)
        queued, batch = spent
        return Timing(queued, *batch)

    @property
    def has_begun(self) -> bool:
        """Whether it is a stream of which outputs were handed out."""
        return self.inflow is not None and self.inflow.handed_out > 0


class Question:
    """What a client asks the pool beside its calls: about its state, its workers and its model.

    Attributes:
        message: kept until the answer has come: the next pool gets it again.
        key: of its message in the link.
        reply: gets the answer, or a Failure.
    """

    def __init__(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        self.message = ASK, number, method, arguments
        pack(self.message)  # raises here, and not where it is sent with others
        self.key = 0
        self.reply: concurrent.futures.Future[Any] = concurrent.futures.Future()


class PoolCalls(OpenCalls):
    """The open calls of a client, those that the pool has and those that wait for the next one.

    A pool refuses calls beyond ``max_pending``, of all its clients. It refuses none before it is
    there, or while it hangs: then the calls of this client wait in this process, and are bounded.

    Args:
        max_pending: of the pool; None for no bound.
        max_in_flight: calls of this client that a pool may have beside those that wait there.

    Attributes:
        questions: those without an answer, by number.
        read: how many calls this pool has read, once it has said that it reads no more.
    """

    _calls: dict[int, PoolCall]  # type: ignore[assignment]
    _unsent: dict[int, PoolCall]  # type: ignore[assignment]

    def __init__(self, max_pending: int | None, max_in_flight: int) -> None:
        super().__init__(_UNBOUNDED if max_pending is None else max_pending)
        self._max_in_flight = max_in_flight
        self._link: PoolLink | None = None  # while connected
        self._position = 0
        self.questions: dict[int, Question] = {}
        self.read: int | None = None
        #: Leases of items that workers of this pool may be reading, also for calls that are over.
        self._lent: dict[int, Sequence[Any]] = {}

    def free(self, numbers: Iterable[int]) -> None:
        """No worker reads the large items of these calls any more."""
        for number in numbers:
            self._lent.pop(number, None)

    def get(self, number: int) -> PoolCall | None:
        return self._calls.get(number)

    def _why_full(self) -> str | None:
        unsent, count = len(self._unsent), len(self._calls)
        if unsent >= self._max_pending:
            return f"{unsent} calls of this process wait until the pool is there"
        if count >= self._max_pending + self._max_in_flight:
            return f"{count} calls of this process have no answer from the pool"
        return None

    def add(self, call: RemoteCall) -> None:
        assert isinstance(call, PoolCall)
        self._calls[call.number] = call
        if self._link is not None and self.read is None:
            self._send(self._link, call)
        else:
            self._unsent[call.number] = call

    def _send(self, link: PoolLink, call: PoolCall) -> None:
        sent = functools.partial(self._sent, call, call.leases)
        call.key = link.put(call.sent, call.size, sent)

    def _sent(self, call: PoolCall, leases: Sequence[Any]) -> None:
        """The pool is about to get a call. In any thread, one at a time."""
        self._position += 1
        call.position = self._position
        if leases:
            self._lent[call.number] = leases

    def ask(self, number: int, question: Question) -> None:
        """Send a question, or have the next pool get it."""
        self.questions[number] = question
        if self._link is not None:
            question.key = self._link.put(question.message)

    def withdraw_question(self, number: int) -> None:
        """Whoever has asked has gone."""
        question, link = self.questions.pop(number, None), self._link
        if question is not None and link is not None and not link.take_back(question.key):
            link.put((WITHDRAW, number))

    def connected(self, link: PoolLink) -> None:
        """A pool is there, and gets all calls that are open."""
        self._link, self._position, self.read = link, 0, None
        waiting = [self._calls[number] for number in sorted(self._calls)]
        self._unsent.clear()
        for call in waiting:
            self._send(link, call)
        for question in self.questions.values():
            question.key = link.put(question.message)

    def disconnected(self, *, may_rerun: bool) -> list[PoolCall]:
        """The pool is gone. What may not be computed again is over, and returned.

        The link must have been closed before.
        The others go to the next pool: all that this one had not read, and with ``may_rerun`` those
        that it may have computed, but for streams of which outputs were handed out.
        """
        self._link = None
        self._lent.clear()
        lost = []
        for call in self._calls.values():
            was_read = 0 < call.position <= (call.position if self.read is None else self.read)
            call.position = 0
            if was_read and (call.has_begun or not may_rerun):
                lost.append(call)
            else:
                self._unsent[call.number] = call
        # In the order in which they were made, also if some had not been sent.
        self._unsent = dict(sorted(self._unsent.items()))
        for call in lost:
            self._over(call)
        return lost

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        assert isinstance(call, PoolCall)
        if self._link is not None and call.number not in self._unsent and not call.is_over:
            self._link.put((HOLD_STREAM if is_held else RESUME_STREAM, call.number))

    def _drop(self, call: RemoteCall) -> None:
        assert isinstance(call, PoolCall)
        if self._link is not None and not self._link.take_back(call.key):
            self._link.put((WITHDRAW, call.number))

    def _over(self, call: RemoteCall) -> bool:
        assert isinstance(call, PoolCall)
        is_news = super()._over(call)
        call.leases = ()
        call.sent = ()  # a future keeps the call, for its timing
        return is_news
