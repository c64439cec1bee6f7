"""A client's open calls, whose answers come from other processes, and their outputs."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ..engine.threads import Doorbell
from ..errors import Overloaded, StreamerClosed
from ..observe.record import Call
from ..reporting import quiet_log
from ..workers.protocol import Failure

log = quiet_log(__name__)


class RemoteAnswer(NamedTuple):
    """The reply to a call.

    Attributes:
        number: the client's, of the call.
        outputs: encoded.
        failure: why it failed.
        first: the number of the first of the outputs, if it is a stream that was handed out.
    """

    number: int
    outputs: list[bytes]
    failure: Failure | None = None
    first: int | None = None


class OutputRun(NamedTuple):
    """Outputs of a stream that follow one another.

    Attributes:
        number: the client's, of the call.
        first: the number of the first of them, from 0.
        outputs: encoded.
        id: what the other side calls the call; empty except with the first outputs.
    """

    number: int
    first: int
    outputs: list[bytes]
    id: bytes


class Inflow:
    """Outputs of a client's stream on their way to its consumer.

    Attributes:
        handed_out: how many have come.
        missing: the number of an output that had not come before others, and the round of reading
            in which that was noticed.
        backlog: encoded, those that came while the consumer was behind.
        is_held: the consumer is behind: it has as much as it takes for now.
        is_passing: a thread is passing on the backlog.
        end: what comes after it, None before that has come: opaque here.
        counted, counted_at: how many had come when that was last looked at and they were more than
            before, and when.
    """

    __slots__ = (
        "backlog", "counted", "counted_at", "end", "handed_out", "is_held", "is_passing", "missing",
    )  # fmt: skip

    def __init__(self) -> None:
        self.handed_out = 0
        self.counted, self.counted_at = -1, 0.0
        self.missing: tuple[int, int] | None = None
        self.backlog: collections.deque[bytes] = collections.deque()
        self.is_held = self.is_passing = False
        self.end: Any = None

    def add(self, outputs: list[bytes]) -> None:
        """Outputs have come, each for the first time."""
        self.backlog += outputs
        self.handed_out += len(outputs)


class RemoteCall:
    """A client's call, on its way to those who compute it or back.

    Attributes:
        number: the client's number for it.
        message: what is sent.
        timeout: seconds that the caller waits; None for ever.
        deadline: end of that time on the client's clock.
        reply: receives the outcome; opaque here.
        is_over: answered, refused or given up; final.
        is_taken: being sent, or sent.
        id: what the other side calls it; empty until known.
        inflow: of a stream, its outputs; None for another call.
    """

    __slots__ = (
        "deadline", "id", "inflow", "is_over", "is_taken", "message", "number", "reply", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        number: int,
        message: bytes,
        deadline: float,
    ) -> None:
        self.number = number
        self.message = message
        self.timeout = call.timeout
        self.deadline = deadline
        self.reply = call.reply
        self.is_over = self.is_taken = False
        self.id = b""
        self.inflow = Inflow() if call.is_stream else None

    #: A client does not learn when a worker gets its call, nor the call's timing.
    is_running = False
    timing = None


class OpenCalls:
    """The open calls of a client, what callers' threads share with those that send and receive.

    state      held by                        leaves when
    -----      -------                        -----------
    unsent     _unsent                        it is sent, or its caller gives up
    sending    _sending, with _calls          the other side has it, or refuses it
    sent       _calls                         its reply arrives, or its caller gives up

    Attributes:
        lock: guards them. Methods need it, but for those that say otherwise.
        changed: notified when a call is over, while the client is being closed.
        doorbell: wakes the thread that sends.
        is_closing: whether new calls are refused.
        is_abandoned: whether the client ends by itself, when its calls are over.
        expired, cancelled, rejected: how many calls ended so.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._calls: dict[int, RemoteCall] = {}
        self._unsent: collections.OrderedDict[int, RemoteCall] = collections.OrderedDict()
        self._sending: list[RemoteCall] = []
        self._failed: list[tuple[Sequence[RemoteCall], Failure]] = []
        self.lock = threading.RLock()  # reentrant: a user's finalizer may run while it is held
        self.changed = threading.Condition(self.lock)
        self.doorbell = Doorbell()
        self.is_closing = self.is_abandoned = False
        self.expired = self.cancelled = self.rejected = 0

    # -- which take the lock themselves

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
            self.add(call)

    def _why_full(self) -> str | None:
        """Why no call can be accepted; None if one can. Locked."""
        count = len(self._calls)
        return f"{count} calls of this process are pending" if count >= self._max_pending else None

    def give_up(self, call: RemoteCall, why: Literal["expired", "cancelled"]) -> bool:
        """The caller of a call has gone; false if it was over already."""
        with self.lock:
            is_news = self.end(call)
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
            if not self.end(call):
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

    # -- with the lock held

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: RemoteCall) -> None:
        self._calls[call.number] = call
        self._unsent[call.number] = call

    def get(self, number: int) -> RemoteCall | None:
        """The open call with this number."""
        return self._calls.get(number)

    def resting(self) -> list[RemoteCall]:
        """Streams whose consumers are behind."""
        return [call for call in self._calls.values() if call.inflow and call.inflow.is_held]

    def is_alone(self, call: RemoteCall) -> bool:
        """Whether it is the only call to send."""
        return len(self._unsent) == 1 and not self._sending and call.number in self._unsent

    def batch(self, most_calls: int, most_bytes: int) -> list[RemoteCall]:
        """The next calls to send: exactly the same ones until ``accepted``."""
        if not self._sending:
            size = 0
            while self._unsent and len(self._sending) < most_calls and size < most_bytes:
                call = next(iter(self._unsent.values()))
                if not call.is_taken:  # else an interrupt came before the del below
                    call.is_taken = True
                    self._sending.append(call)
                    size += len(call.message)
                del self._unsent[call.number]
        return self._sending

    def accepted(self, count: int) -> list[RemoteCall]:
        """The other side has the first calls of the batch.

        Returns:
            The others, which it refused, and which are over now.
        """
        batch, self._sending = self._sending, []
        return [call for call in batch[count:] if self._over(call)]

    def answered(self, number: int) -> RemoteCall | None:
        """End a call whose reply arrived; None if it is over already."""
        call = self._calls.get(number)
        return call if call is not None and self._over(call) else None

    def end(self, call: RemoteCall) -> bool:
        """End a call without an answer of the other side; false if it was over already."""
        if not self._over(call):
            return False
        if self._unsent.pop(call.number, None) is not None:
            call.message = b""
        else:
            self._drop(call)
        return True

    def end_all(self) -> list[RemoteCall]:
        """End all calls; returns those that were open."""
        return [call for call in [*self._calls.values()] if self.end(call)]

    def stream(self, number: int, id_: bytes = b"") -> RemoteCall | None:
        """The open stream of which outputs have come, if it is one.

        Args:
            id_: what the other side calls it, if its first outputs have come.
        """
        call = self._calls.get(number)
        if call is None or call.inflow is None:
            return None
        call.id = call.id or id_
        return call

    def progress(self) -> object:
        """A value that changes when a call ends, or comes nearer to its end."""
        return len(self._calls)

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        """Have a stream rest, or go on: the host that has it is to be told."""
        raise NotImplementedError

    def _drop(self, call: RemoteCall) -> None:
        """It was sent, or is being sent, and its caller has gone."""
        raise NotImplementedError

    def _over(self, call: RemoteCall) -> bool:
        if call.is_over:
            return False
        call.is_over = True
        del self._calls[call.number]
        return True


def answer(
    call: RemoteCall,
    reply: Any,
    payloads: list[bytes] | None = None,
    failure: Failure | None = None,
) -> None:
    """Hand an outcome to a call's reply. Never under a lock."""
    call.reply = None
    try:
        reply.end(payloads if failure is None else failure)
    except BaseException:  # a user's callback may raise anything
        log(logging.ERROR, "a future's callback raised an exception", exc_info=True)


class Patience:
    """A timeout that starts again at each sign of progress.

    Args:
        limit: seconds without a new sign.
        now: monotonic time.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._since = now
        self._sign: object = None

    def left(self, sign: object, now: float) -> float:
        """Seconds left, given the current sign; 0 or less if the time is over."""
        if sign != self._sign:
            self._sign = sign
            self._since = now
        return self._since + self._limit - now
