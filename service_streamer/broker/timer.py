"""The time of calls of which nobody else watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..scheduling.pending import Deadlines
from .ledger import RemoteCall
from .redis import Doorbell

__all__ = ["Timer"]


class Timer:
    """Tells of calls whose time has ended. Its thread is started with the first of them.

    Args:
        time_ended: called in that thread, if the call is not over.
    """

    def __init__(self, time_ended: Callable[[RemoteCall], None]) -> None:
        self._time_ended = time_ended
        self._lock = threading.Lock()
        self._deadlines: Deadlines[RemoteCall] = Deadlines()
        self._doorbell = Doorbell()
        self._is_closed = False
        self.thread: threading.Thread | None = None

    def watch(self, call: RemoteCall) -> None:
        with self._lock:
            before = self._deadlines.next
            self._deadlines.add(call)
            is_earlier = self._deadlines.next < before
            if self.thread is None and not self._is_closed:
                thread = threading.Thread(
                    target=self._run, name="service_streamer timer", daemon=True
                )
                thread.start()
                self.thread = thread
        if is_earlier:
            self._doorbell.ring()

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                ended = self._deadlines.ended(time.monotonic())
                ends_at = self._deadlines.next
            while ended:  # so that none of them is held here until the next ones
                self._time_ended(ended.pop(0))
            # No operating system waits for years at once.
            self._doorbell.wait(min(ends_at - time.monotonic(), 1e5))

    def close(self) -> None:
        self._is_closed = True
        self._doorbell.ring()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
