"""What blocked calls fail with when the interpreter ends before they are answered."""

from __future__ import annotations

import asyncio
import threading
import time

from ..workers.protocol import Failure

#: How long daemon threads wait for the end of the interpreter, from the first on, seconds.
#: Chosen by reasoning: most are gone in a second. It bounds how long an exit handler of the user's
#: waits that joins such threads, and runs after ours.
LONGEST_EXIT = 5.0

#: Until when, once the first waits. One time for the process, which ends but once.
waits_until: list[float] = []


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
            waits_until.append(now + LONGEST_EXIT)  # of several threads, the first counts
            threading.Event().wait(max(waits_until[0] - now, 0))
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
