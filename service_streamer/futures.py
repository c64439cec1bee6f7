"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

from .errors import ModelError, PredictTimeout

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduling.records import Call
    from .workers.messages import Failure

__all__ = ["Future"]

_RLock: Any = type(threading.RLock())


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    def __init__(self, engine: Engine) -> None:
        # Not super().__init__(), which sets the same (a test compares them): it makes a Condition,
        # which costs more than all the rest of a submission, and most futures are never waited for
        # before they are done.
        self._condition: Any = _LazyCondition()
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._engine = engine
        self._failure: Failure | None = None
        self._is_decoded = False  # that, or the result
        #: Set by the engine before the call can end, and let go of when it ends.
        self.call: Call | None = None

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
        if self._state == "FINISHED":
            return self._decoded()
        self._engine.check_process()  # in a forked child it never comes
        try:
            super().result(timeout)
        except TimeoutError:
            if not self.done():  # else it is the model's own, or it was done just now
                raise self._timeout(timeout) from None
            super().result(0)
        return self._decoded()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None if it did not; waits and raises as ``result`` does."""
        self._engine.check_process()
        try:
            error = super().exception(timeout)
        except TimeoutError:
            if not self.done():
                raise self._timeout(timeout) from None
            error = super().exception(0)
        if error is None and not self._is_decoded:
            self._decode()
        return self._exception

    def cancel(self) -> bool:
        """Withdraw the call if none of it is with a worker yet; whether it is cancelled."""
        call = self.call
        if call is not None and self._engine.cancel(call) and super().cancel():
            self.call = None
            self.set_running_or_notify_cancel()  # tells wait() and as_completed()
        return self.cancelled()

    def _decoded(self) -> list[Any]:
        """The results; raises what the call failed with."""
        if not self._is_decoded:
            self._decode()
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # as the standard one does: no cycle
        results: list[Any] = self._result
        return results

    def _decode(self) -> None:
        """Done by the first who asks, in their own thread: it may run code of users."""
        outputs: list[Any] = []
        error: BaseException | None = None
        if self._failure is not None:
            error = self._failure.exception()
        else:
            try:
                outputs = self._engine.decode(self._result)
            except ModelError as caught:
                error = caught.with_traceback(None)
        with self._condition:  # not before: if two decode it, the first counts
            if not self._is_decoded:
                self._result, self._exception, self._is_decoded = outputs, error, True
                self._failure = None

    def _timeout(self, timeout: float | None) -> PredictTimeout:
        return PredictTimeout(f"no result within {timeout} s ({self._engine.describe()})")

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self.call
        return call is not None and not self.done() and call.pending < call.size

    def complete(self, outputs: list[Any]) -> None:
        """For the engine: the call succeeded."""
        self.call = None
        self.set_result(outputs)

    def fail(self, failure: Failure) -> None:
        """For the engine: the call failed."""
        self.call = None
        self._failure = failure
        self.set_result([])


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
