"""What a service and a worker host do on SIGHUP and SIGUSR1, beside ending on SIGTERM and SIGINT.

SIGHUP    replace the workers, one at a time, so that they load new weights; no call fails.
          If the terminal has been closed, which sends it too: end, as on SIGTERM.
SIGUSR1   write to the log how things stand
SIGUSR2   write the stacks of all threads to standard error
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Self

from ..errors import StreamerClosed, StreamerError

logger = logging.getLogger(__name__)

_OURS = (signal.SIGHUP, signal.SIGUSR1)
_HELD_BACK = (*_OURS, signal.SIGINT)

#: One wish to end may come as two signals: to the process, and to its group. Seconds.
SAME_SIGNAL = 1.0


def run_below_init() -> None:
    """As process 1, return in a child; this process passes signals on, reaps, and ends with it.

    A container without an init would keep orphans as zombies. The child cannot reap them: it would
    take the exit status of others, for which multiprocessing or the model waits.
    """
    if os.getpid() != 1:
        return
    numbers = (*_HELD_BACK, signal.SIGTERM, signal.SIGUSR2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # so that none is lost meanwhile
    child = os.fork()
    if child:

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, number)

        for each in numbers:
            signal.signal(each, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while child:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)  # as shells say that a signal ended it


def hold_signals() -> None:
    """Until somebody handles them, SIGHUP and SIGUSR1 do nothing: by default they kill.

    SIGUSR2 writes the stacks from now on. What is ignored stays so: ``nohup`` means it. Only in the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _OURS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN no child inherits it
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _write_stacks)


def _write_stacks(*_: object) -> None:
    """The handler of SIGUSR2.

    It has the lock of the interpreter. ``faulthandler.register`` does without: it reads the stacks
    while other threads change them, and kills the process at times (CPython issue 116008).
    """
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no standard error
        faulthandler.dump_traceback(sys.stderr)


@contextlib.contextmanager
def passed_on_later() -> Iterator[None]:
    """Hold signals back in this thread, and in a process that is started meanwhile.

    That process handles them and calls ``take_signals``. Until then SIGHUP and SIGUSR1 would kill
    it, and SIGINT, which a terminal sends to all processes, would leave a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    try:
        # Its start unblocks SIGINT. It keeps SIGHUP blocked, which would kill it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    """Take the signals in this thread that ``passed_on_later`` holds back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)


def heeded() -> tuple[signal.Signals, ...]:
    """Those of SIGHUP and SIGUSR1 that are not ignored."""
    return tuple(each for each in _OURS if signal.getsignal(each) is not signal.SIG_IGN)


class OperatorSignals:
    """What a program does on its signals.

    Args:
        end: on the first signal to end.
        hurry: on each later one, but for those within ``same_signal`` seconds after the first.
        restart: on SIGHUP before the end, unless the terminal was closed.
        report: on SIGUSR1.

    Attributes:
        ends_since: when the end began; None before. Minus infinity if no signal began it, so that
            the first one is for a faster end.
    """

    def __init__(
        self,
        *,
        end: Callable[[], object],
        hurry: Callable[[], object],
        restart: Callable[[], object],
        report: Callable[[], object],
        same_signal: float = SAME_SIGNAL,
    ) -> None:
        self.ends_since: float | None = None
        self._end, self._hurry, self._restart, self._report = end, hurry, restart, report
        self._same_signal = same_signal
        self._had_terminal = _has_terminal()

    def heed(self, number: int) -> None:
        """Do what a signal asks for. Others do nothing, nor does SIGHUP restart during the end."""
        if number == signal.SIGUSR1:
            self._report()
        elif number == signal.SIGHUP and (_has_terminal() or not self._had_terminal):
            if self.ends_since is None:
                self._restart()
        elif number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            now = time.monotonic()
            if self.ends_since is None:
                self.ends_since = now
                self._end()
            elif now - self.ends_since > self._same_signal:
                self._hurry()


class SignalSocket:
    """Within the block signals come over a socket: those that end a program, and those heeded.

    A handler runs when the main thread next runs at all, and a signal that woke another thread does
    not end its waiting. For the main thread. ``ours`` is readable when something has come.
    """

    def __enter__(self) -> Self:
        self.ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGINT, signal.SIGTERM, *heeded())
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.ours.close()

    def end(self) -> None:
        """Give the signals back; ``answer`` returns nothing from then on. May be called again."""
        if self._theirs.fileno() >= 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._descriptor)
            self._theirs.close()

    def ring(self) -> None:
        """Say that it is time to end. From any thread."""
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")

    def answer(self) -> bytes:
        """Block for what comes: a byte for each signal, which is its number; 0 for a ``ring``.

        Signals of other handlers come here, too.
        """
        return self.ours.recv(4096)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


class RollingRestart:
    """Replaces workers when it is asked, in a thread of its own; then calls ``on_done`` there.

    A wish that comes while a restart goes on is for one more afterwards: the workers that are new
    by then may have read the weights before they changed again.
    """

    def __init__(
        self, restart: Callable[[], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        self._restart = restart
        self._on_done = on_done
        self._lock = threading.Lock()  # one restart at a time
        self._is_waiting = False  # whether one has not begun yet

    def begin(self) -> None:
        """Start it, or have it done once more. Does not block."""
        if not self._is_waiting:
            self._is_waiting = True
            # A daemon: the end of the service ends it, too.
            threading.Thread(target=self._run, name="rolling restart", daemon=True).start()

    def _run(self) -> None:
        with self._lock:
            self._is_waiting = False
            began = time.monotonic()
            logger.info(
                "SIGHUP: replacing the workers one at a time, so that they load new weights"
            )
            try:
                self._restart()
                logger.info("every worker has been replaced in %.1f s", time.monotonic() - began)
                self._on_done()
            except StreamerClosed:
                pass
            except StreamerError as error:
                logger.error("the restart failed; the remaining workers go on: %s", error)
            except Exception:  # our bug; the next wish is to be heard all the same
                logger.exception("the restart failed; the remaining workers go on")


def log_standing(lines: Iterable[str]) -> None:
    """Write to the log how things stand, as SIGUSR1 asks for."""
    for line in lines:
        logger.info("SIGUSR1: %s", line)
