"""What a pool sends to a client: answers and outputs to their calls, and words about the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ModelError
from ..remote.call_book import CallBook
from ..remote.deliveries import Deliveries
from ..remote.open_calls import OutputRun, RemoteAnswer
from ..workers.protocol import Failure
from .client_memory import ResultMemory
from .pool_calls import PoolCalls
from .pool_link import PoolLink
from .pool_protocol import ANSWER, FREED, PARTING, RELEASED, WORKERS

_UNREADABLE = "a result cannot be read: this process has too many files open"


class ClientInbox:
    """Hands out what has come. In the client's thread.

    Args:
        book: of the client's calls.

    Attributes:
        on_workers: called when the workers of the pool, or the connection to it, have changed.
    """

    def __init__(self, book: CallBook[PoolCalls], deliveries: Deliveries) -> None:
        self._book = book
        self._deliveries = deliveries
        self.on_workers: Callable[[], None] = lambda: None
        self._link: PoolLink | None = None
        self._results: ResultMemory | None = None  # large ones of this pool

    def connected(self, link: PoolLink) -> None:
        """What comes from now on is of this pool."""
        self._link = link
        self._results = link.results

    def close(self) -> None:
        """Let go of the memory of results: nothing more is taken in."""
        self._link = self._results = None

    def take_in(self, messages: list[Any]) -> None:
        """Messages have come."""
        answers: list[tuple[Any, ...]] = []
        for message in messages:
            if message[0] > 0:
                answers.append(message)
                continue
            if answers:  # they came first
                self._deliver(answers)
                answers = []
            self._hear(*message)
        if answers:
            self._deliver(answers)

    def _hear(self, kind: int, number: Any, *values: Any) -> None:
        if kind == ANSWER:
            (value,) = values
            question = self._book.calls.questions.pop(number, None)
            if question is not None:  # else whoever has asked has gone
                question.reply.set_result(value)
        elif kind == FREED:
            with self._book.lock:
                self._book.calls.freed(number)
        elif kind == PARTING:
            self._book.calls.read = number
        elif kind == WORKERS:
            self.on_workers()

    def _deliver(self, answers: list[tuple[Any, ...]]) -> None:
        """Hand out what has come at a time, outputs of a stream before its end."""
        ends: list[RemoteAnswer] = []
        runs: dict[int, OutputRun] = {}
        calls, results = self._book.calls, self._results
        for answer in answers:
            number, outcome = answer[0], answer[1]
            outputs = outcome if type(outcome) is list else [outcome]
            is_whole = results is None or type(outcome) is bytes or results.received(outputs)
            call = calls.get(number)
            if call is None:
                continue
            if not is_whole:
                ends.append(RemoteAnswer(number, [], Failure(ModelError(_UNREADABLE))))
            elif len(answer) == 2:  # an output of a stream
                if number not in runs and call.inflow is not None:
                    runs[number] = OutputRun(number, call.inflow.handed_out, [], b"")
                runs[number].outputs.extend(outputs)
            elif isinstance(outcome, Failure):
                ends.append(RemoteAnswer(number, [], outcome))
            else:
                call.spent = answer[2:] if len(answer) == 4 else answer[2]
                ends.append(RemoteAnswer(number, outputs))
        if runs:
            self._deliveries.hand_out(runs.values())
            self._book.answer_failed()  # streams whose consumers are too far behind
        if ends:
            self._deliveries.deliver(ends)
        if results is not None:
            released = results.pop_ended()
            link = self._link
            if released and link is not None:
                link.put((RELEASED, 0, released))
                if not len(calls):  # else it goes with what is sent next, or comes here again
                    link.write()
