"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

from .errors import ModelError, StreamerError

if TYPE_CHECKING:
    from .backend import Accepted, Backend
    from .scheduling.records import Timing
    from .workers.messages import Failure

__all__ = ["Future"]

_RLock: Any = type(threading.RLock())


#: What a future has failed with until somebody asks for it.
_UNDECODED = StreamerError("not decoded yet")


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    def __init__(self, backend: Backend) -> None:
        # Not super().__init__(), which sets the same (a test compares them): it makes a Condition,
        # which costs more than all the rest of a submission, and most futures are never waited for
        # before they are done.
        self._condition: Any = _LazyCondition()
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._backend = backend
        #: The outcome until somebody asks for it, who decodes it into the two above.
        self._encoded: list[Any] | Failure | None = None
        #: Set by the backend before the call can end, and let go of when it ends.
        self.call: Accepted | None = None

    #: The call when it was answered. Not set before: most of what a future costs is its making.
    _answered: Accepted | None = None

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
        # Often it is there by now. It is set before the state is, so no lock is needed to see it.
        if self._state != "FINISHED":
            self._wait(timeout)
        encoded = self._encoded
        if encoded is not None:
            self._decode(encoded)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # as the standard one does: no cycle
        outputs: list[Any] = self._result
        return outputs

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None if it did not; waits and raises as ``result`` does."""
        if self._state != "FINISHED":
            self._wait(timeout)
        encoded = self._encoded
        if encoded is not None:
            self._decode(encoded)
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        self._backend.check_process()  # in a forked child it never comes
        try:
            super().exception(timeout)
        except TimeoutError:
            if not self.done():  # else it was done just now
                raise self._backend.late(timeout) from None
            super().exception(0)  # or it was cancelled

    def _decode(self, encoded: list[Any] | Failure) -> None:
        """Done by the first who asks, in their own thread: it may run code of users.

        If several ask at the same time each does, and the last one counts.
        """
        try:
            if isinstance(encoded, list):
                self._result = self._backend.decode(encoded)
            else:
                self._exception = encoded.exception()
        except ModelError as error:
            self._result, self._exception = None, error.with_traceback(None)
        self._encoded = None

    def __repr__(self) -> str:
        """Its state; not what is still encoded, as the standard one would show it."""
        state = self._state.lower()
        if self._encoded is not None or self._state == "FINISHED":
            state = "finished" if self._exception is None else "failed"
        return f"<{type(self).__name__} at {id(self):#x} {state}>"

    def cancel(self) -> bool:
        """Withdraw the call if none of it is with a worker yet; whether it is cancelled."""
        call = self.call
        if call is not None and self._backend.cancel(call) and super().cancel():
            self.call = None
            self.set_running_or_notify_cancel()  # tells wait() and as_completed()
        return self.cancelled()

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self.call
        return call is not None and not self.done() and call.is_running

    def complete(self, outputs: list[Any]) -> None:
        """For the backend: the call succeeded."""
        self._answered, self.call = self.call, None
        self._encoded = outputs
        self.set_result(outputs)

    def fail(self, failure: Failure) -> None:
        """For the backend: the call failed."""
        self.call = None
        self._encoded = failure
        self.set_exception(_UNDECODED)


class _LazyCondition(_RLock):  # type: ignore[misc]
    """As much of a ``threading.Condition`` as a future uses, made in full when somebody waits.

    The lock itself and not something that has one: entering and leaving it are then in C. It is
    reentrant as a Condition's is, since a finalizer may run while it is held.
    """

    _condition: threading.Condition | None = None

    def wait(self, timeout: float | None = None) -> bool:
        if self._condition is None:
            self._condition = threading.Condition(self)
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        condition, self._condition = self._condition, None  # each holds the other
        if condition is not None:
            condition.notify_all()
