"""A client as the pool sees it: its calls, and the answers that are on their way to it."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..engine.engine import Engine
from ..errors import RemoteTraceback, StreamerError, WorkerStartTimeout
from ..observe.record import ORDINARY, Call, CallOptions
from ..workers.arena import Memory
from ..workers.codec import Parts
from ..workers.protocol import Failure, FrameReader
from .pool_memory import ClientMemory, PoolMemory, inline_results
from .pool_protocol import (
    ANSWER,
    ASK,
    FRAME_MESSAGES,
    FRAME_SIZE,
    FREED,
    HOLD_STREAM,
    RELEASED,
    RESUME_STREAM,
    WITHDRAW,
    Hello,
    Items,
    Outbox,
    own_fault,
    pack,
    send_first,
    take_first,
)

#: From so many answers on that a client has not read, its streams rest.
_MAX_UNSENT = 2048


class PoolReply:
    """Notes the outcome of a call for its client. In the engine's thread."""

    __slots__ = ("call", "is_held", "number", "session")

    def __init__(self, session: Session, number: int) -> None:
        self.call: Any = None
        self.session = session
        self.number = number
        self.is_held = False

    def end(self, outcome: list[Any] | Failure) -> None:
        if isinstance(outcome, Failure):
            self.session.answer((self.number, outcome, None))
            return
        try:
            self.session.answer(self._answer(outcome))
        except Exception as error:
            self.end(own_fault(error))

    def _answer(self, outputs: list[Any]) -> tuple[Any, ...]:
        session, call = self.session, self.call
        # Nearly every call has one item, whose output is small.
        outcome = outputs[0] if len(outputs) == 1 and type(outputs[0]) is bytes else outputs
        if call is None:  # without items
            return self.number, outcome, None
        batch = call.batch
        if call.part_at is not None or batch.report.output_times is not None:
            return self.number, outcome, (*call.timing,)
        if batch.id != session.batch_id:
            session.batch_id, session.spent = batch.id, batch.spent()
        return self.number, outcome, batch.cut_at - call.arrived_at, session.spent

    def put_part(self, output: Any) -> None:
        try:
            self.session.put_part((self.number, output), self)
        except Exception as error:
            self.session.give_up(self.number, own_fault(error))


class Session:
    """A connection.

    Args:
        connection: does not block; closed with the session.
        dirty: gets the session when it has answers to send; emptied by ``send`` 's callers.
        wake: has ``send`` called soon; for any thread, and finalizers.

    Attributes:
        hello: None until the client has said it.
        calls: those without an answer, by number.
        read: how many calls were read.
        unsent: answers and other messages that are not in a frame yet.
        batch_id, spent: the last batch with an answer for this client, and what was spent on it.
    """

    def __init__(
        self,
        connection: socket.socket,
        pid: int,
        engine: Engine,
        dirty: set[Session],
        wake: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.pid = pid
        self.reader = FrameReader(connection.fileno())
        self.outbox = Outbox(connection.fileno(), self._next_frame)
        self.hello: Hello | None = None
        self.calls: dict[int, Call] = {}
        self.read = 0
        self.unsent: collections.deque[tuple[Any, ...]] = collections.deque()
        self.batch_id = -1
        self.spent: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self.memory: ClientMemory | None = None
        self.has_begun = False  # its first byte has come
        self.is_gone = False
        self.is_watched = False  # for room in the socket; the reader's thread's
        self._engine = engine
        self._dirty = dirty
        self._wake = wake
        self._freed: collections.deque[int] = collections.deque()  # calls whose items are read
        self._lock = threading.Lock()  # of ``send``
        self._paused: dict[int, PoolReply] = {}  # streams, until the client has read its answers
        self._streams_lock = threading.Lock()  # of ``_paused``, and what the engine was told

    @property
    def is_client(self) -> bool:
        """Whether it makes calls, and does not only ask."""
        return self.hello is not None and self.hello.fingerprint is not None

    def answer(self, answer: tuple[Any, ...]) -> None:
        """Note the last answer of a call."""
        self.calls.pop(answer[0], None)
        if self.is_gone:
            return
        outcome = answer[1]
        if type(outcome) is list:
            try:
                answer = (answer[0], self._share(outcome), *answer[2:])
            except Exception as error:  # no memory for a copy
                answer = (answer[0], Failure(error.with_traceback(None)), None)
        self.unsent.append(answer)
        self._dirty.add(self)

    def give_up(self, number: int, failure: Failure) -> None:
        """Fail a call that an exception of our own has touched; nobody waits for its results."""
        call = self.calls.get(number)
        self.answer((number, failure, None))
        if call is not None:
            self._engine.withdraw(call)

    def put_part(self, answer: tuple[Any, ...], stream: PoolReply) -> None:
        """Note an output of a stream."""
        if self.is_gone:
            return
        if type(answer[1]) is not bytes:
            answer = (answer[0], *self._share([answer[1]]))
        self.unsent.append(answer)
        self._dirty.add(self)
        if len(self.unsent) >= _MAX_UNSENT and not stream.call.is_held:
            with self._streams_lock:
                self._paused[stream.number] = stream
                self._engine.hold(stream.call, is_held=True)
            self._go_on()  # another thread may have sent everything before that

    def tell(self, message: tuple[Any, ...]) -> None:
        """Note a message, which goes after the answers that are noted."""
        self.unsent.append(message)
        self._dirty.add(self)

    def send(self) -> bool:
        """Send what is noted, as far as the client takes it; whether nothing is left."""
        with self._lock:
            try:
                self.outbox.write()
                if self._paused:
                    self._go_on()
            except OSError:  # the client is gone; the reader's thread sees it, too
                return True
            except Exception as error:
                own_fault(error)
                self.break_off()
            return not self.outbox.has_rest

    def _next_frame(self) -> bytes:
        """Of the answers that are noted."""
        noted, size = self.unsent, 0
        answers: list[tuple[Any, ...]] = []
        if self._freed:
            answers.append((FREED, [self._freed.popleft() for _ in range(len(self._freed))]))
        while noted and len(answers) < FRAME_MESSAGES and size < FRAME_SIZE:
            answer = noted.popleft()
            outcome = answer[1]
            if type(outcome) in (bytes, Parts):
                size += len(outcome)
            elif answer[0] > 0 and type(outcome) is list:
                size += sum(map(len, outcome))
            answers.append(answer)
        try:
            return pack(answers) if answers else b""
        except Exception as error:
            failure = own_fault(error)
            self.break_off()
            return pack([(answer[0], failure, None) for answer in answers if answer[0] > 0])

    def _share(self, outputs: list[Any]) -> list[Any]:
        memory = None if self.is_gone else self.memory
        return inline_results(outputs) if memory is None else memory.share(outputs)

    def place_items(self, number: int, payloads: Any) -> Any:
        """The payloads of a call, for workers; the client hears when large ones are read."""
        if len(payloads) == 1 and type(payloads[0]) is bytes:  # as nearly all
            return payloads
        if self.memory is None or tuple not in {*map(type, payloads)}:
            return payloads
        return self.memory.place_items(payloads, functools.partial(self._free, number))

    def _free(self, number: int) -> None:
        """No worker reads the items of a call any more. In a finalizer."""
        if not self.is_gone:
            self._freed.append(number)
            self._dirty.add(self)
            if number not in self.calls:  # else it goes with the answer, which is about to come
                self._wake()

    def begin(self, pool: PoolMemory) -> None:
        """Take the first byte, and answer it.

        Raises:
            BlockingIOError, EOFError, OSError: see ``take_first``.
        """
        descriptor = take_first(self.connection)
        self.has_begun = True
        if descriptor is not None:
            self.memory = ClientMemory(Memory(descriptor), pool)
        # If it is gone again, what it has said is still to be read: how long to stay after it.
        with contextlib.suppress(OSError):
            if self.memory is None:
                send_first(self.connection, None)
            else:
                receiver = self.memory.pop_receiver()
                send_first(self.connection, receiver.connection.fileno())

    def hold(self, number: int, *, is_held: bool) -> None:
        """The client wants an item to rest, or to go on."""
        call = self.calls.get(number)
        stream = None if call is None else call.reply
        if call is None or stream is None:
            return
        with self._streams_lock:
            stream.is_held = is_held
            if is_held or number not in self._paused:
                self._engine.hold(call, is_held=is_held)
        self._go_on()  # what another thread has left to this one

    def _go_on(self) -> None:
        """Let streams go on if the client has read most of its answers.

        Nobody waits here for who holds the lock: that thread calls this when it has released it.
        """
        while (
            self._paused
            and 2 * len(self.unsent) < _MAX_UNSENT
            and self._streams_lock.acquire(blocking=False)
        ):
            try:
                resting, self._paused = self._paused, {}
                for stream in resting.values():
                    if not stream.is_held:
                        self._engine.hold(stream.call, is_held=False)
            finally:
                self._streams_lock.release()

    def break_off(self) -> None:
        """Have the client connect again, and send what is open. Any thread.

        For an exception of our own: the reader's thread sees the end of the connection, and drops
        this session and nothing else. What is written until then arrives.
        """
        with contextlib.suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_RD)

    def close(self) -> ClientMemory | None:
        """The connection is gone: nobody waits for its calls.

        Returns what the client's process may still look at, to be freed when it does not.
        """
        self.is_gone = True
        self.outbox.close()
        self.connection.close()
        # Let go of: the server's thread may hold this session until the next event. Results go with
        # the message from here on.
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.leave()
        for number, call in [*self.calls.items()]:
            if self.calls.pop(number, None) is not None:  # else it was answered just now
                self._engine.withdraw(call)
        return memory


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
        has_more = len(frames) > 1 or any(len(messages) > 1 for _, messages in frames)
        for session, messages in frames:
            message: Any = None
            try:
                for message in messages:
                    if message[0] > 0:
                        if self.is_ending or session.is_gone:  # it goes to the next pool
                            continue
                        session.read += 1
                        if (call := _call_of(session, message, more=has_more)) is not None:
                            self._submit(call)
                    else:
                        self._handle(session, *message)
            except Exception as error:
                _break_off(session, message, own_fault(error))
        if has_more:  # they share batches
            self._engine.flush()

    def _submit(self, call: Call) -> None:
        try:
            self._engine.submit(call)
        except Exception as error:
            is_stated = isinstance(error, StreamerError)  # overloaded, closed or broken
            if (reply := call.reply) is not None:  # else it has an answer
                reply.end(_with_causes(error) if is_stated else own_fault(error))

    def _handle(self, session: Session, kind: int, number: int, *rest: Any) -> None:
        if kind == ASK:
            method, arguments = rest
            self._ask(session, number, method, arguments)
            return
        if kind == RELEASED:
            if session.memory is not None:
                session.memory.release(*rest)
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
        payloads, options, lengths = (payload,), None, None
    else:
        number, payloads, deadline, options, lengths = message
    try:
        items = session.place_items(number, payloads)
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
        ORDINARY if options is None else CallOptions(*options),
        False,  # the client watches the time
        more,
    )
    session.calls[number] = call  # before it can be over
    return call


def _with_causes(error: BaseException) -> Failure:
    """For an exception that was raised here, with what has led to it."""
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        return Failure(error.with_traceback(None), cause.text)
    return Failure(error.with_traceback(None), cause=None if cause is None else _with_causes(cause))
