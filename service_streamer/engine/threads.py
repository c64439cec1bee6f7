"""Threads: a bell that wakes one, deadlines of calls, and what holds after a fork and at exit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic

from ..batching.deadlines import Deadlines, TimedCall
from ..workers.protocol import Failure


class Doorbell:
    """Wakes the one thread that waits for work. Ringing costs nothing while it is at work."""

    def __init__(self) -> None:
        self._bell = threading.Lock()  # held until it rings
        self._bell.acquire()

    def ring(self) -> None:
        """For any thread, and for a finalizer at any line."""
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # another one rang just now
                self._bell.release()

    def wait(self, timeout: float | None) -> None:
        """Block until it has rung since the last time, or ``timeout`` seconds have passed."""
        self._bell.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that does not keep the interpreter from ending."""
    thread = threading.Thread(target=target, name=f"service_streamer {name}", daemon=True)
    thread.start()
    return thread


_copies: list[threading.Event] = []


def rest_if_copied(pid: int) -> None:
    """Let a thread of process ``pid`` go no further in a forked child.

    With gevent threads are greenlets, which a fork copies. What the copy reads from is closed. It
    rests for ever, since Python prints an error at the end of a thread that it does not know of.
    """
    if os.getpid() != pid and threading.get_ident() not in [t.ident for t in threading.enumerate()]:
        _copies.append(threading.Event())  # a greenlet that nothing refers to would end
        _copies[-1].wait()


#: Whether this thread holds a ``threading.RLock``. For any thread, also in a signal handler.
is_owned: Callable[[Any], bool] = operator.methodcaller("_is_owned")


class Timer(Generic[TimedCall]):
    """Tells of calls whose time has ended. Its thread is started with the first of them.

    Args:
        time_ended: called in that thread, if the call is not over.
        lock: of its owner, held for moments. Reentrant: a finalizer may run while it is held.
        clock: seconds from a monotonic clock; a test that moves it by hand calls ``look``.
    """

    def __init__(
        self,
        time_ended: Callable[[TimedCall], None],
        lock: threading.RLock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._time_ended = time_ended
        self._clock = clock
        self.lock = lock
        self._deadlines: Deadlines[TimedCall] = Deadlines()
        self._doorbell = Doorbell()
        self._is_closed = False
        self.thread: threading.Thread | None = None

    def watch(self, call: TimedCall) -> None:
        with self.lock:
            before = self._deadlines.next
            self._deadlines.add(call.deadline, call)
            is_earlier = self._deadlines.next < before
            if self.thread is None and not self._is_closed:
                self.thread = start_thread(self._run, "timer")
        if is_earlier:
            self._doorbell.ring()

    def look(self) -> None:
        """Have it look at the clock now."""
        self._doorbell.ring()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self.lock:
                ended = self._deadlines.ended(self._clock())
                ends_at = self._deadlines.next
            while ended:  # so that none of them is held here until the next ones
                self._time_ended(ended.pop(0))
            is_over = self._is_closed and ends_at == math.inf
            if not is_over:  # and no operating system waits for years at once
                self._doorbell.wait(min(ends_at - self._clock(), 1e5))

    def close(self) -> None:
        """End the thread when nothing is left to watch, and wait for that, unless it calls."""
        self.abandon()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def abandon(self) -> None:
        """The same without waiting. For a finalizer, which may run under any lock."""
        self._is_closed = True
        self._doorbell.ring()


#: How long daemon threads wait for the end of the interpreter, from the first on, seconds.
#: Chosen by reasoning: most are gone in a second. It bounds how long an exit handler of the user's
#: waits that joins such threads, and runs after ours.
LONGEST_EXIT = 5.0

#: Until when, once the first waits. One time for the process, which ends but once.
exit_waits_until: list[float] = []


class AtExit(Failure):
    """As of a streamer that is closed; but daemon threads wait for the end before they get it.

    They wait as those do that wait for a ``queue.Queue``, until the interpreter is gone. If they
    raised, each would print a traceback while it ends. Only for the replies of calls: where they
    are taken, no lock is held.
    """

    __slots__ = ()

    def exception(self) -> BaseException:
        if _may_wait(threading.current_thread()):
            now = time.monotonic()
            exit_waits_until.append(now + LONGEST_EXIT)  # of several threads, the first counts
            threading.Event().wait(max(exit_waits_until[0] - now, 0))
        return super().exception()


def _may_wait(thread: threading.Thread) -> bool:
    """Whether it is a daemon thread of Python that nothing else depends on."""
    # Ours run callbacks, and are waited for. Those that Python has not started (of uWSGI, mod_wsgi)
    # are daemons by name only: their server waits for them.
    if not thread.daemon or isinstance(thread, threading._DummyThread):
        return False
    if thread.name.startswith("service_streamer"):
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False  # other tasks of the loop go on
