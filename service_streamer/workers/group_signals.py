"""Signals that go to a whole process group: a worker leaves them to its parent.

systemd, terminals and ``kill -- -PGID`` send SIGTERM, SIGHUP or SIGINT to every process of a
service. The web process then drains, and needs its workers for that; it ends them itself. A worker
whose parent dies notices that through its pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

__all__ = ["held_back", "leave_to_parent"]

_LEFT_TO_PARENT = (signal.SIGTERM, signal.SIGHUP)
_OF_GROUPS = (*_LEFT_TO_PARENT, signal.SIGINT)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold these signals back in this thread, and in a process that is started within the block.

    So none of them ends a worker that has just been started, before ``leave_to_parent``. This
    thread gets them after the block, its process at once if another thread takes them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Within the block, since it may raise the KeyboardInterrupt that came just before.
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a worker, before the model is loaded: have these signals do nothing from now on.

    By a handler and not by ignoring them: what is ignored stays so in every program that the model
    starts, which nobody could end by SIGTERM then. A handler of the model's own replaces ours.
    """
    # A forked worker has its parent's: a signal would wake the parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # nor should it disturb native code that waits
    os.register_at_fork(after_in_child=_take_again)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)


def _do_nothing(*_: object) -> None:
    """The handler."""


def _take_again() -> None:
    """In a process that the model has forked: who made it may end it."""
    for number in _LEFT_TO_PARENT:
        if signal.getsignal(number) is _do_nothing:
            signal.signal(number, signal.SIG_DFL)
