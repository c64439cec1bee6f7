"""What calls fail with when the interpreter ends before they are answered."""

from __future__ import annotations

import threading

from ..workers.protocol import Failure

__all__ = ["AtExit"]

#: How long a daemon thread waits for the end of the interpreter, seconds.
#: Chosen by reasoning: most are gone in a second. It bounds how long an exit handler of the user's
#: waits that joins such a thread, and runs after ours.
_LONGEST_EXIT = 5.0


class AtExit(Failure):
    """As of a streamer that is closed; but daemon threads wait for the end before they get it.

    They wait as those do that wait for a ``queue.Queue``, until the interpreter is gone. If they
    raised, each would print a traceback while it ends.
    """

    __slots__ = ()

    def exception(self) -> BaseException:
        thread = threading.current_thread()
        # Ours run callbacks, and are waited for.
        if thread.daemon and not thread.name.startswith("service_streamer"):
            threading.Event().wait(_LONGEST_EXIT)
        return super().exception()
