"""Tells when this process leaves its Ray cluster, as by ``ray.shutdown``.

Then Ray forgets the calls that are open: what they call back is never called. Ray has a thread for
each connection, which ends with it, and that is all that there is to wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable

from ..reporting import quiet_log

log = quiet_log(__name__)

#: The name of Ray's thread.
_LISTENER = "ray_listen_error_messages"

_lock = threading.Lock()
_wanted: dict[threading.Thread, set[Callable[[], None]]] = {}
_last: list[tuple[int, Callable[[], None]]] = []


def when_left(then: Callable[[], None]) -> Callable[[], None]:
    """Have it called once, in any thread, when the connection ends that there is now.

    One thread waits for that, however many want to know. It lives as long as the connection.

    Returns:
        What to call if it is not to be called any more.
    """
    with _lock:
        for thread in threading.enumerate():
            if thread.name == _LISTENER:
                if thread not in _wanted:
                    _wanted[thread] = set()
                    name = "service_streamer Ray connection"
                    threading.Thread(target=_wait, args=(thread,), name=name, daemon=True).start()
                wanted = _wanted[thread]
                wanted.add(then)
                return lambda: wanted.discard(then)
    return lambda: None


def _wait(listener: threading.Thread) -> None:
    listener.join()
    with _lock:
        wanted = [*_wanted.pop(listener)]
    for then in wanted:
        then()


def when_exiting(then: Callable[[], None]) -> Callable[[], None]:
    """Have it called when the interpreter ends, before Ray leaves its cluster.

    Returns:
        What to call if it is not to be called any more.
    """
    entry = os.getpid(), then
    _last.append(entry)

    def forget() -> None:
        with contextlib.suppress(ValueError):
            _last.remove(entry)

    return forget


@atexit.register  # after that of Ray, whose module has been imported before: so it runs first
def _exit() -> None:
    """Close what has workers on Ray; nobody is to start workers again, or to log that."""
    try:
        for pid, then in [*_last]:
            if pid == os.getpid():  # a fork has neither the cluster nor the streamers
                try:
                    then()
                except Exception:  # the others are to be closed all the same
                    log(logging.ERROR, "a streamer could not be closed at exit", exc_info=True)
    finally:
        with _lock:
            for wanted in _wanted.values():
                wanted.clear()
