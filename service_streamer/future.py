"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import Any

from .engine.backend import Accepted, Backend
from .errors import ModelError, StreamerError
from .observe.record import Timing
from .workers.protocol import Failure

#: What a future has failed with until somebody asks for it.
_UNDECODED = StreamerError("not decoded yet")

#: Held to make the condition of a future, and to finish one that has none: nobody waits for it, and
#: it has no callback. Reentrant, since a signal handler may run while it is held.
_making = threading.RLock()


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    def __init__(self, backend: Backend) -> None:
        # Not super().__init__(): its condition and lists are a dozen objects, which cost as much as
        # all the rest of a submission. Most futures are done before anybody waits for them.
        self._made: threading.Condition | None = None
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._backend = backend
        #: Set by the backend before the call can end, and let go of when it ends.
        self.call: Accepted | None = None
        self._answered: Accepted | None = None
        #: The outcome until somebody asks for it.
        self._encoded: list[Any] | Failure | None = None

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What the standard library uses, made for the first who waits or has a callback."""
        condition = self._made
        if condition is None:
            with _making:
                condition = self._made
                if condition is None:
                    self._waiters: list[Any] = []
                    self._done_callbacks: list[Any] = []
                    condition = self._made = threading.Condition()
        return condition

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None until it is done, and unless it has results.

        Also None where that is not known: over Redis, of a call of no items, and of one whose
        results were there already.
        """
        timing: Timing | None = getattr(self._answered, "timing", None)
        return timing

    def result(self, timeout: float | None = None) -> list[Any]:
        """The results.

        Args:
            timeout: how long to wait for them, seconds; None waits for as long as it takes. The
                call goes on when it ends: ask again, or ``cancel``.

        Raises:
            PredictTimeout: they are not there yet.
            concurrent.futures.CancelledError: the call was cancelled.
            Exception: whatever the call failed with.
        """
        self._decode(timeout)
        try:
            if self._exception is not None:
                raise self._exception
            outputs: list[Any] = self._result
            return outputs
        finally:
            del self  # as the standard one does: the exception holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None if it did not; waits and raises as ``result`` does."""
        self._decode(timeout)
        return self._exception

    def _decode(self, timeout: float | None) -> None:
        """Wait for the outcome, and decode it in this thread: that may run code of users.

        If several threads ask at the same time each does, and the last one counts.
        """
        if self._state != "FINISHED":  # it is set last, so that no lock is needed to see it
            self._backend.check_process()  # in a forked child it never comes
            try:
                super().exception(timeout)
            except TimeoutError:
                raise self._backend.late(timeout) from None
        encoded = self._encoded
        if encoded is None:
            return
        try:
            if isinstance(encoded, list):
                self._result = self._backend.decode(encoded)
            else:
                self._exception = encoded.exception()
        except ModelError as error:
            self._result, self._exception = None, error.with_traceback(None)
        self._encoded = None

    def cancel(self) -> bool:
        """Withdraw the call if none of it is with a worker yet; whether it is cancelled."""
        call = self.call
        if call is not None:
            try:
                if self._backend.cancel(call):
                    self._withdrawn()
            except BaseException:  # of a signal handler: it may be withdrawn already
                if call.is_over:
                    self._withdrawn()
                raise
        return self.cancelled()

    def _withdrawn(self) -> None:
        """The call is withdrawn: the future is cancelled, unless it has results by now."""
        if super().cancel() and self._state == "CANCELLED":
            self.set_running_or_notify_cancel()  # as_completed() and wait() hear of it
            self.call = None

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self.call
        return call is not None and not self.done() and call.is_running

    def complete(self, outputs: list[Any]) -> None:
        """For the backend: the call succeeded."""
        self._answered, self.call = self.call, None
        self._encoded = outputs
        with _making:
            is_watched = self._made is not None
            if not is_watched:
                self._result, self._state = outputs, "FINISHED"
        if is_watched:
            self.set_result(outputs)

    def fail(self, failure: Failure) -> None:
        """For the backend: the call failed."""
        self.call = None
        self._encoded = failure
        self.set_exception(_UNDECODED)


def _renew_in_forked_child() -> None:
    global _making
    _making = threading.RLock()  # another thread may have held it at the fork


os.register_at_fork(after_in_child=_renew_in_forked_child)
