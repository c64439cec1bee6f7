"""What a client does whatever is between it and the workers: a broker, or the pool of a host.

     caller threads             a sender                       a receiver
     --------------             --------                       ----------
     submit(call)
       encode, number
       unsent ── doorbell ────▶ all calls since the last ones
                                                               what has come
     ◀──────────────────────────────────────────────────────── reply.end, and of streams
                                                               reply.put_part
       decode, in the caller's thread again

A subclass has the threads that send and receive. It is a ``Backend``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any, Generic, TypeVar

from ..engine.backend import IN_CALLBACK, Lengths
from ..engine.threads import AtExit, Timer, is_owned, start_thread
from ..errors import (
    ModelError,
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    StreamerForked,
    UnpicklableItem,
)
from ..observe.record import Call
from ..reporting import counted, quiet_log
from ..workers.protocol import Failure
from .deliveries import Deliveries
from .open_calls import OpenCalls, Patience, RemoteCall, answer

log = quiet_log(__name__)

#: A subclass, which knows more about the calls.
Calls = TypeVar("Calls", bound=OpenCalls, covariant=True)

#: Maximum bytes that the caller's thread sends itself, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15


class RemoteClient(ABC, Generic[Calls]):
    """Accepts calls from any thread; other processes compute them; each is answered exactly once.

    Args:
        encode: of an item.
        decode: of an output; raises ValueError.
        calls: the open ones.
        deliveries: of what comes back.
        drain_timeout: seconds that ``close`` waits without progress; None for ever.
    """

    def __init__(
        self,
        encode: Callable[[Any], bytes],
        decode: Callable[[Any], Any],
        calls: Calls,
        deliveries: Deliveries,
        drain_timeout: float | None,
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._calls = calls
        self._deliveries = deliveries
        self._drain_timeout = math.inf if drain_timeout is None else drain_timeout
        self._numbers = itertools.count(1)
        self._timer = Timer(self._time_ended, calls.lock)
        self._pid = 0  # the process that started it
        self._at_exit: Any = None  # once it was started
        self._is_exiting = False
        self._is_ending = threading.Event()  # ends the threads
        self._parting: threading.Thread | None = None  # the thread that ends this client
        self._has_parted = threading.Event()
        self._patience: Patience | None = None  # since it was abandoned
        self._unflushed: RemoteCall | None = None  # the last call, if small
        self._threads: dict[str, threading.Thread] = {}  # those that send and receive, by role

    #: Calls that were sent keep their time.
    extend: None = None

    # -- of a subclass

    lengths: Lengths | None = None

    @abstractmethod
    def _encode_call(
        self, call: Call, number: int, payloads: list[bytes], deadline: float
    ) -> RemoteCall:
        """A call as it is sent. Raises ValueError: it is too large."""

    @abstractmethod
    def _send_now(self, call: RemoteCall) -> None:
        """Send a new, small call from the caller's thread if it is alone: no thread wakes up."""

    @abstractmethod
    def _start_threads(self) -> None:
        """Begin to send and to receive. Locked; again if it has raised."""

    @abstractmethod
    def _part(self) -> None:
        """The end: take leave of the other side, and end the threads."""

    @abstractmethod
    def _why_cut_off(self) -> str:
        """Why calls have not been answered, to follow a sentence; or nothing."""

    @abstractmethod
    def late(self, timeout: float | None) -> StreamerError:
        """What to raise when the results were not there within ``timeout`` seconds."""

    # -- calls

    def submit(self, call: Call) -> None:
        if self._pid != os.getpid() or self._calls.is_closing:
            self._start()
        timeout, reply = call.timeout, call.reply
        if timeout is not None and timeout <= 0:
            raise PredictTimeout("the call had no time left when it was made")
        if not call.size:
            reply.end([])
            return
        number = next(self._numbers)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            remote = self._encode_call(call, number, self._encode_items(call.payloads), deadline)
        except UnpicklableItem as error:
            reply.end(Failure(error.with_traceback(None)))
            return
        except ValueError as error:
            reply.end(Failure(UnpicklableItem(f"the call is too large: {error}")))
            return
        try:
            self._calls.open(remote)
            self._unflushed = remote if len(remote.message) <= _AT_ONCE_BYTES else None
            if not call.more:
                self.flush()
            if call.is_watched and timeout is not None:
                self._timer.watch(remote)
        except StreamerError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _encode_items(self, items: Sequence[Any]) -> list[bytes]:
        encode = self._encode
        payloads: list[bytes] = []
        item: Any = None
        try:
            for item in items:
                payloads.append(encode(item))
        except (Exception, SystemExit) as error:  # raised by the item's code
            raise UnpicklableItem(
                f"item {len(payloads)} of the call, of type {type(item).__qualname__}, "
                f"cannot be sent: {error}"
            ) from error.with_traceback(None)
        return payloads

    def decode(self, outputs: list[Any]) -> list[Any]:
        decode = self._decode
        try:
            return [decode(output) for output in outputs]
        except ValueError as error:
            raise ModelError(f"a result cannot be decoded: {error}") from error

    def check_room(self) -> None:
        """Only the broker, or the pool, knows."""

    def flush(self) -> None:
        call, self._unflushed = self._unflushed, None  # may be another thread's, which is fine
        try:
            if call is not None:
                self._send_now(call)
        finally:  # always: other calls of the same pass rely on it
            self._calls.doorbell.ring()

    def _interrupted(self) -> None:
        """A signal handler has raised in a caller's thread, perhaps in the middle of a change."""
        self._calls.doorbell.ring()

    def cancel(self, call: RemoteCall) -> bool:
        """Give up a call, which is withdrawn wherever it is."""
        self.check_process()
        return self._calls.give_up(call, "cancelled")

    def withdraw(self, call: RemoteCall, *, has_expired: bool = False) -> None:
        self.check_process()
        self._calls.give_up(call, "expired" if has_expired else "cancelled")

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        """Have the item of a stream rest where it is computed, or go on."""
        assert call.inflow is not None
        with self._calls.lock:
            if is_held and self._calls.is_closing:
                return  # the consumer may be who waits for the end of it
            call.inflow.is_held = is_held
            self._calls.hold(call, is_held=is_held)
        self._calls.doorbell.ring()
        if not is_held:
            self._deliveries.pass_on(call)

    def _time_ended(self, call: RemoteCall) -> None:
        reply = call.reply
        if self._calls.give_up(call, "expired"):
            answer(call, reply, failure=Failure(self.late(call.timeout)))

    # -- state

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy, by fork, of one that another process has used."""
        return self._pid not in (0, os.getpid())

    def check_process(self) -> None:
        if self.is_forked:
            raise StreamerForked(
                f"this streamer was used in process {self._pid} before it was forked to process "
                f"{os.getpid()}; build it after the fork, or do not use it before"
            )

    def check_not_in_callback(self) -> None:
        if threading.current_thread() in (*self._threads.values(), self._timer.thread):
            self.check_process()  # a fork within a callback
            raise StreamerError(IN_CALLBACK)

    def _start(self) -> None:
        """Start the threads, in the process that makes the first call."""
        self.check_process()
        with self._calls.lock:
            if self._calls.is_closing:
                raise StreamerClosed("the streamer is closed")
            if self._at_exit is None:
                self._start_threads()
                # Not atexit, which does not run in children of multiprocessing.
                self._at_exit = util.Finalize(None, self._close_at_exit, exitpriority=100)
                self._pid = os.getpid()

    def _start_thread(self, role: str, run: Callable[[], object]) -> None:
        """Start a thread, unless it runs: an interrupted start is repeated."""

        def run_once() -> None:
            this = threading.current_thread()
            if self._threads.setdefault(role, this) is this:
                run()

        if role not in self._threads:
            self._threads.setdefault(role, start_thread(run_once, role))

    # -- the end

    def abandon(self) -> None:
        """Let the sender finish the accepted calls and close. For finalizers: takes no lock."""
        self._calls.is_abandoned = True
        self._calls.doorbell.ring()

    def _close_at_exit(self) -> None:
        self._is_exiting = True
        with contextlib.suppress(KeyboardInterrupt):  # would only print a traceback
            self.close(drain=False, timeout=None)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        if self.is_forked:
            return  # a copy by fork has no threads to end
        open_calls = self._calls
        if is_owned(open_calls.lock):
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        with open_calls.lock:
            open_calls.is_closing = True
            resting = open_calls.resting() if drain else []
        for call in resting:  # without the lock: their consumers are given what waits
            self.hold(call, is_held=False)
        open_calls.doorbell.ring()  # a thread about to flush may wait for this
        with open_calls.changed:
            ours = (*self._threads.values(), self._timer.thread)
            if drain and threading.current_thread() not in ours:
                self._drain(timeout)
            calls = open_calls.end_all()
            is_first = self._parting is None
            if is_first:
                self._parting = threading.current_thread()
            open_calls.changed.notify_all()  # wake other threads that drain
        why = self._why_cut_off() if drain else ""
        if calls and drain:
            cut_off = counted(len(calls), "call")
            log(logging.WARNING, "the streamer was closed with %s unanswered%s", cut_off, why)
        for call in calls:
            failure = StreamerClosed(f"the streamer was closed before the call was served{why}")
            kind = AtExit if self._is_exiting else Failure
            answer(call, call.reply, failure=kind(failure))
        if is_first:
            try:
                self._is_ending.set()
                self._timer.close()
                open_calls.doorbell.ring()
                self._part()
                if self._at_exit is not None:
                    self._at_exit.cancel()
            finally:
                self._has_parted.set()
        elif threading.current_thread() not in (*ours, self._parting):
            self._has_parted.wait()

    def _drain(self, timeout: float | None) -> None:
        """Wait until every call is over, or there is no progress. Needs ``changed``."""
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        patience = Patience(self._drain_timeout if timeout is None else math.inf, now)
        while len(self._calls):
            now = time.monotonic()
            left = min(deadline - now, patience.left(self._sign, now))
            if left <= 0:
                return
            self._calls.changed.wait(None if left == math.inf else left)

    def _is_hopeless(self, now: float) -> bool:
        """Whether no call is open, or none makes progress."""
        with self._calls.lock:
            if not len(self._calls):
                return True
            if self._patience is None:
                self._patience = Patience(self._drain_timeout, now)
            return self._patience.left(self._sign, now) <= 0

    @property
    def _sign(self) -> object:
        """What changes while calls make progress."""
        return self._calls.progress(), self._deliveries.outputs
