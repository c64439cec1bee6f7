"""What a streamer hands its calls to, and how callers wait for them: in a thread or in asyncio.

A backend is the engine of this process, or the client of worker hosts beyond a broker.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ..errors import StreamerError
from ..observe.record import NO_OUTPUTS, Call
from ..reporting import quiet_log
from ..workers.protocol import Failure

log = quiet_log(__name__)

#: To a callback that would wait for its own thread.
IN_CALLBACK = (
    "a future's callback runs in this streamer's thread and cannot wait for it; use submit, and a "
    "callback of that future"
)

#: What items cost, in any unit. Raises what the user's function raises, or ValueError.
Lengths: TypeAlias = Callable[[Sequence[Any]], list[float]]

#: The outputs, encoded and in the order of the items, or why there are none.
Outcome: TypeAlias = list[Any] | Failure


class Reply(Protocol):
    """Where the outcome of a call goes.

    Attributes:
        call: what the backend gives to its caller, to withdraw the call, when it accepts that and
            before it can be over. It knows ``is_running``, ``is_over`` and ``timing``.
    """

    call: Any

    def end(self, outcome: Outcome) -> None:
        """The call is over. Called once, never under a lock; decoding is the caller's, later."""


class Backend(Protocol):
    """Accepts calls from any thread and answers each exactly once."""

    def submit(self, call: Call) -> None:
        """Accept a call of any number of items. What is not sent in its time is never computed.

        Raises:
            StreamerError: it was not accepted; its reply is not called.
        """

    @property
    def lengths(self) -> Lengths | None:
        """What gives the lengths of items; None if each counts one, or they are not known here."""

    @property
    def extend(self) -> Callable[[Any, float], bool] | None:
        """Keeps a call until a deadline; False if it is over. None if that cannot be had."""

    def check_room(self) -> None:
        """Raises Overloaded, which counts, if it is known that no call would be accepted now."""

    def flush(self) -> None:
        """The calls that were to follow (``Call.more``) have been submitted: send all of them."""

    def cancel(self, call: Any) -> bool:
        """Withdraw a call if that is still of use; whether it was."""

    def withdraw(self, call: Any, *, has_expired: bool = False) -> None:
        """The caller has gone, perhaps for lack of time: drop what is not with a worker."""

    def hold(self, call: Any, *, is_held: bool) -> None:
        """Let the item of a stream rest for a while, or go on: a hint, if that can be had."""

    def decode(self, outputs: list[Any]) -> list[Any]:
        """What ``Reply.end`` got, as the model returned it. Raises ModelError."""

    def late(self, timeout: float | None) -> StreamerError:
        """What to raise when the results were not there within ``timeout`` seconds."""

    def describe(self) -> str:
        """The state in one line, for a ``repr``."""

    def model_description(self) -> Mapping[str, Any] | None:
        """What the model says of itself; empty if nothing, None while that is not known.

        Raises StreamerError if it never will be: no worker can load the model, or it is closed.
        """

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """Have it called, in any thread, when ``model_description`` may have another answer.

        Perhaps also for nothing. It must neither block nor raise. There is one at a time.
        """

    def check_process(self) -> None:
        """Raises StreamerForked in a forked child."""

    def check_not_in_callback(self) -> None:
        """Raises StreamerError in a thread that others' results depend on, which must not block."""

    def wait_ready(self, timeout: float | None) -> None:
        """Block until calls can be computed."""

    def close(self, *, drain: bool, timeout: float | None) -> None:
        """Refuse new calls, finish or fail the accepted ones, release everything. Idempotent."""

    def abandon(self) -> None:
        """Drain and end, soon. For a finalizer, which may run under any lock."""


class PassThrough:
    """Passes everything on to another backend, but for what a subclass defines itself."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def predict_blocking(backend: Backend, call: Call) -> list[Any]:
    """Submit a call and block until its results are there. Under gevent only the greenlet blocks.

    Raises:
        PredictTimeout, BrokerUnavailable: its time has ended; the call is withdrawn.
    """
    backend.check_not_in_callback()
    reply = call.reply = BlockingReply()
    timeout = call.timeout
    try:
        backend.submit(call)
        is_there = reply.wait(timeout)
    except BaseException:  # as KeyboardInterrupt, or a killed greenlet: no caller waits then
        reply.leave()
        if (accepted := reply.call) is not None:
            backend.withdraw(accepted)
        raise
    if not is_there:
        if (accepted := reply.call) is not None:
            backend.withdraw(accepted, has_expired=True)
        raise backend.late(timeout)
    try:
        return backend.decode(reply.result())
    finally:
        del call, reply  # they may hold the error, whose traceback has this frame: a cycle


class BlockingReply:
    """Wakes the one thread that waits for it. A future can do that too, at twice the cost."""

    __slots__ = ("_arrived", "call", "has_left", "outcome", "relay")

    def __init__(self) -> None:
        #: None again when the outcome is there: no caller gives it up then.
        self.call: Any = None
        #: What the thread has to pass on; set before it is woken.
        self.relay: Relay | None = None
        #: Set by the thread before it looks for a relay, if it does not wait any more.
        self.has_left = False
        self.outcome: Outcome = []
        self._arrived = threading.Lock()  # held until the outcome is there
        self._arrived.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until the outcome is there; False when ``timeout`` seconds have passed first.

        If it raises, call ``leave``.
        """
        is_there = self._arrived.acquire(timeout=-1 if timeout is None else timeout)
        if not is_there:
            self.has_left = True
        if self.relay is not None:  # first of all: others wait for it
            self.relay.pass_on()
            self.relay = None  # a cycle, which would keep the results of the whole batch
        return is_there

    def leave(self) -> None:
        """The thread does not wait for the outcome."""
        self.has_left = True
        if self.relay is not None:
            self.relay.wake_all()

    def result(self) -> list[Any]:
        """The outputs, encoded; raises what the call failed with."""
        if isinstance(self.outcome, Failure):
            try:
                raise self.outcome.exception()
            finally:
                del self  # as in ``predict_blocking``
        return self.outcome

    def end(self, outcome: Outcome) -> None:
        self.outcome, self.call = outcome, None
        self.wake()

    def wake(self) -> None:
        try:
            self._arrived.release()
        except RuntimeError:
            return  # it goes on already


#: So many are woken by whoever answers: one that the operating system does not run for a while does
#: not hold up the others.
AT_ONCE = 2
#: After so many seconds the rest is woken at once. Else a thread that computes in Python would come
#: between any two of them, for 5 ms each time (``sys.getswitchinterval``).
PATIENCE = 2e-3


class Relay:
    """Wakes the threads whose calls a batch has answered, one by one and in order.

         engine's thread      caller 1        caller 2        caller 3
         ---------------      --------        --------        --------
         wakes 1 and 2   ───▶ wakes 3    ───▶ wakes 4    ───▶ ...
         waits for events     goes on         goes on

    Only one thread at a time has the interpreter lock. If 64 are woken at once, 63 of them go to
    sleep again, and a model that computes in this process queues behind all of them for each of its
    steps.
    """

    __slots__ = ("_all", "_ends_at", "_waiters")

    def __init__(self, waiters: Sequence[BlockingReply]) -> None:
        self._all = waiters
        self._waiters = deque(waiters)
        self._ends_at = time.monotonic() + PATIENCE

    def pass_on(self) -> None:
        """Wake the next, which will do the same; all that are left if this has taken too long."""
        waiters = self._waiters
        wakes_all = bool(waiters) and time.monotonic() >= self._ends_at
        while waiters:
            try:
                waiter = waiters.popleft()
            except IndexError:  # another thread was faster
                return
            waiter.relay = self
            waiter.wake()
            # Either this sees that the thread has left, or the thread sees the relay; or both do,
            # and two are woken.
            if not (waiter.has_left or wakes_all):
                return

    def wake_all(self) -> None:
        """Wake all, also those that go on already: an exception may have come within ``pass_on``.

        A signal handler raised between taking one out and waking it, say.
        """
        for waiter in self._all:
            waiter.wake()


def wake(waiters: Sequence[BlockingReply]) -> None:
    """Let all of these threads go on, soon."""
    if len(waiters) <= AT_ONCE:
        for waiter in waiters:
            waiter.wake()
        return
    relay = Relay(waiters)
    for _ in range(AT_ONCE):
        relay.pass_on()


async def predict_in_loop(backend: Backend, call: Call) -> list[Any]:
    """Submit a call and await its results. Cancelling the task withdraws the call.

    Raises:
        PredictTimeout, BrokerUnavailable: its time has ended; the call is withdrawn.
    """
    loop = asyncio.get_running_loop()
    reply = call.reply = LoopReply(loop)
    timeout, call.more = call.timeout, True
    backend.submit(call)
    timer: asyncio.TimerHandle | None = None
    outcome, is_cancelled = None, True
    try:
        reply.flush_soon(backend)
        # Neither asyncio.wait nor asyncio.timeout: the first costs as much as all the rest of a
        # call, and the TimeoutError of the second would be mistaken for one of the model's.
        if timeout is not None:
            timer = loop.call_later(timeout, _end_wait, reply.future)
        outcome = await reply.future
        is_cancelled = False
    finally:
        if timer is not None:
            timer.cancel()
        accepted = reply.call
        if outcome is None and accepted is not None:
            backend.withdraw(accepted, has_expired=not is_cancelled)
    if outcome is None:
        raise backend.late(timeout)
    if not isinstance(outcome, Failure):
        return backend.decode(outcome)
    error = outcome.exception()
    if isinstance(error, StopIteration):  # which no coroutine may raise
        raise RuntimeError("the model raised StopIteration") from error
    try:
        raise error
    finally:
        # Its traceback has this frame: a cycle, which would keep all of it.
        del accepted, call, error, outcome, reply


def _end_wait(future: asyncio.Future[Outcome | None]) -> None:
    if not future.done():
        future.set_result(None)


class LoopReply:
    """Hands the outcome to a future of an asyncio loop, from any thread.

    Args:
        mailbox: of the loop, if it is known; to find it takes a microsecond.
    """

    __slots__ = ("_mailbox", "call", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox | None = None) -> None:
        self.call: Any = None
        #: None is for whoever ends the wait.
        self.future: asyncio.Future[Outcome | None] = loop.create_future()
        self._mailbox = mailbox or mailbox_of(loop)

    def flush_soon(self, backend: Backend) -> None:
        """Flush the backend when all tasks of this pass of the loop have made their calls.

        Otherwise the first of many that are answered together, and call again, would be computed
        alone, by a worker that is free, and the others after that. For the loop's own thread.
        """
        if self.call is not None and not self.call.is_over:  # else it is answered already
            self._mailbox.flush_soon(backend)

    def end(self, outcome: Outcome) -> None:
        self.put(outcome).deliver_soon()

    def put(self, outcome: Outcome) -> Mailbox:
        """The call is over; returns the mailbox that is to deliver it, with others."""
        self._mailbox.put(self.future, outcome)
        return self._mailbox


class Mailbox:
    """What a loop gets and gives at once: the outcomes of a batch wake it once and not 64 times.

    Any thread puts in, the loop's takes out, without a lock: a deque's ends are safe by themselves.
    A thread puts in first, and then looks at ``_is_due``: if that is set, the delivery that will
    clear it takes what was put in.

    Attributes:
        at_once: how many futures get their results until the loop may do something else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, at_once: int = sys.maxsize) -> None:
        self._loop = loop
        self.at_once = at_once
        self._results: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._is_due = False  # the loop is about to deliver
        self._unflushed: list[Backend] = []  # for the loop's thread only; mostly one

    def flush_soon(self, backend: Backend) -> None:
        if backend not in self._unflushed:
            self._unflushed.append(backend)
            self._loop.call_soon(self._flush, backend)

    def _flush(self, backend: Backend) -> None:
        self._unflushed.remove(backend)
        backend.flush()

    def put(self, future: asyncio.Future[Any], result: Any) -> None:
        """Give a future its result, unless it has one by then, with the next delivery."""
        self._results.append((future, result))

    def deliver_soon(self) -> None:
        """Wake the loop, unless it is about to deliver: call it when all of a batch is put."""
        if self._is_due:
            return
        self._is_due = True  # before the call: the delivery clears it
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: no task waits any more
            self._is_due = False
            self._results.clear()

    def _deliver(self) -> None:
        self._is_due = False  # first: what comes from now on has a delivery of its own
        results = self._results
        # Not until they are empty: others put in as fast as we take out.
        for _ in range(min(len(results), self.at_once)):
            future, result = results.popleft()
            if not future.done():  # else it was cancelled, or its time has ended
                future.set_result(result)
        if results and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._deliver)


#: The mailbox of each loop, by its id, while a reply or a delivery on its way holds it: not longer,
#: since it holds the loop.
_mailboxes: weakref.WeakValueDictionary[int, Mailbox] = weakref.WeakValueDictionary()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """For the loop's own thread."""
    mailbox = _mailboxes.get(id(loop))
    if mailbox is None:
        mailbox = _mailboxes[id(loop)] = Mailbox(loop)
    return mailbox


def answer(calls: Sequence[Call], parts: Sequence[tuple[Call, Any]] = ()) -> None:
    """Answer calls that are over; then wake threads and loops, once for all of their calls.

    Args:
        parts: outputs of streams, which come first.
    """
    waiters: list[BlockingReply] = []
    mailboxes: set[Mailbox | None] = set()
    for call, output in parts:
        reply = call.reply
        if reply is not None:  # else its caller has gone meanwhile
            mailboxes.add(reply.put_part(output))
    for call in calls:
        reply, outcome = call.reply, call.outputs if call.failure is None else call.failure
        call.reply, call.outputs = None, NO_OUTPUTS  # who still holds the call holds no results
        kind = type(reply)
        try:
            if kind is BlockingReply:
                reply.outcome, reply.call = outcome, None
                waiters.append(reply)
            elif kind is LoopReply:
                mailboxes.add(reply.put(outcome))
            elif reply is not None:  # else it is answered already
                reply.end(outcome)
        except BaseException:
            # A callback of a user's may raise anything, SystemExit too. Others wait for their
            # answers, and the thread does not end for it.
            log(logging.ERROR, "a callback of a future raised", exc_info=True)
    wake(waiters)
    for mailbox in mailboxes:
        if mailbox is not None:
            mailbox.deliver_soon()
