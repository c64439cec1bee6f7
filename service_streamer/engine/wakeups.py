"""Wakes the threads whose calls a batch has answered: one by one, and not all at once.

     engine's thread      caller 1        caller 2        caller 3
     ---------------      --------        --------        --------
     wakes 1 and 2   ───▶ wakes 3    ───▶ wakes 4    ───▶ ...
     waits for events     goes on         goes on

Only one thread at a time has the interpreter lock. If 64 are woken at once, 63 of them go to sleep
again, and a model that computes in this process queues behind all of them for each of its steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

#: So many are woken by whoever answers: one that the operating system does not run for a while does
#: not hold up the others.
AT_ONCE = 2
#: After so many seconds the rest is woken at once. Else a thread that computes in Python would come
#: between any two of them, for 5 ms each time (``sys.getswitchinterval``).
PATIENCE = 2e-3


class Waiter(Protocol):
    """What one thread waits for.

    Attributes:
        relay: what the thread has to pass on; set before ``wake`` is called.
        has_left: set by the thread before it looks for a relay, if it does not wait any more.
    """

    relay: Relay | None
    has_left: bool

    def wake(self) -> None:
        """Let the thread go on, if it does not yet; never raises."""


class Relay:
    """Those that are still to be woken. For any thread.

    Args:
        waiters: in the order in which they are woken.
    """

    __slots__ = ("_all", "_clock", "_ends_at", "_waiters")

    def __init__(
        self, waiters: Sequence[Waiter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._all = waiters
        self._waiters = deque(waiters)
        self._clock = clock
        self._ends_at = clock() + PATIENCE

    def pass_on(self) -> None:
        """Wake the next, which will do the same; all that are left if this has taken too long."""
        waiters = self._waiters
        if not waiters:
            return
        wakes_all = self._clock() >= self._ends_at
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


def wake(waiters: Sequence[Waiter]) -> None:
    """Let all of these threads go on, soon."""
    if len(waiters) <= AT_ONCE:
        for waiter in waiters:
            waiter.wake()
        return
    relay = Relay(waiters)
    for _ in range(AT_ONCE):
        relay.pass_on()
