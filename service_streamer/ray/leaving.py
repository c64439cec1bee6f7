"""Tells when this process leaves its Ray cluster, as by ``ray.shutdown``.

Then Ray forgets the calls that are open: what they call back is never called. Ray has a thread for
each connection, which ends with it, and that is all that there is to wait for.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["when_left"]

#: The name of Ray's thread.
_LISTENER = "ray_listen_error_messages"

_lock = threading.Lock()
_wanted: dict[threading.Thread, set[Callable[[], None]]] = {}


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


@atexit.register  # after that of Ray, whose module has been imported before: so it runs first
def _forget() -> None:
    """The interpreter ends, and Ray with it: nobody is to start workers again, or to log that."""
    with _lock:
        for wanted in _wanted.values():
            wanted.clear()
