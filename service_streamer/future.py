"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

from .engine.backend import Backend, Outcome
from .errors import ModelError, StreamerError
from .observe.record import Timing
from .workers.protocol import Failure

_RLock: Any = type(threading.RLock())

#: What a future has failed with until somebody asks for it.
_UNDECODED = StreamerError("not decoded yet")


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    # Without them each future has a dict, which takes a twentieth of a submission.
    __slots__ = (
        "_backend",
        "_encoded",
        "_exception",
        "_own_condition",
        "_result",
        "_state",
        "call",
    )

    #: Until the standard library takes the lock, and adds to them: see ``_condition``.
    _waiters: Any = ()
    _done_callbacks: Any = ()

    def __init__(self, backend: Backend) -> None:
        # Not super().__init__(), which makes a Condition and two lists: they take a fifth of a
        # submission, and most futures are never waited for before they are done.
        self._backend = backend
        self._state = "PENDING"
        #: Set by the backend before the call can end; let go of unless that has results.
        self.call: Any = None
        #: The outcome until somebody asks for it; then it is decoded into the next two.
        self._encoded: Outcome | None = None
        self._result: Any = None
        self._exception: BaseException | None = None
        self._own_condition: _Condition | None = None

    if not TYPE_CHECKING:  # for which it is an attribute, as of a standard one

        @property
        def _condition(self) -> Any:
            """The lock of a future, which the standard library takes before all else."""
            if self._own_condition is None:
                # Whichever thread is first, all get the same ones.
                made = vars(self)
                made.setdefault("_waiters", [])
                made.setdefault("_done_callbacks", [])
                self._own_condition = made.setdefault("_condition", _Condition())
            return self._own_condition

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None until it is done, and unless it has results.

        Also None where that is not known: over Redis, of a call of no items, and of one whose
        results were there already.
        """
        timing: Timing | None = None
        if self._state == "FINISHED":
            timing = getattr(self.call, "timing", None)
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
        exception = self.exception(timeout)
        if exception is not None:
            try:
                raise exception
            finally:
                exception = self = None  # type: ignore[assignment]  # or they would be a cycle
        outputs: list[Any] = self._result
        return outputs

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None if it did not; waits and raises as ``result`` does."""
        # Often it is there by now. It is set before the state is, so no lock is needed to see it.
        if self._state != "FINISHED":
            self._backend.check_process()  # in a forked child it never comes
            with self._condition:
                if not self.done():
                    self._condition.wait(timeout)
            if not self.done():
                raise self._backend.late(timeout)
            if self.cancelled():
                raise concurrent.futures.CancelledError
        encoded = self._encoded
        if encoded is not None:  # the first that asks decodes, which may run code of users
            try:  # if several ask at the same time each does, and the last one counts
                if isinstance(encoded, list):
                    self._result = self._backend.decode(encoded)
                else:
                    self._exception = encoded.exception()
            except ModelError as error:
                self._result, self._exception = None, error.with_traceback(None)
            self._encoded = None
        return self._exception

    def _get_snapshot(self) -> tuple[bool, bool, list[Any], BaseException | None]:
        """Done, cancelled, result and exception: what asyncio copies since Python 3.14."""
        exception = self.exception() if self._state == "FINISHED" else None  # decodes both
        return self.done(), self.cancelled(), self._result, exception

    def __repr__(self) -> str:
        """Its state; not what is still encoded, as the standard one would show it."""
        state = self._state.lower()
        if state == "finished" and self._exception is not None:
            state = "failed"
        return f"<{type(self).__name__} at {id(self):#x} {state}>"

    def cancel(self) -> bool:
        """Withdraw the call if none of it is with a worker yet; whether it is cancelled."""
        call = self.call
        if call is not None and not self.done():
            try:
                if self._backend.cancel(call):
                    self._set_cancelled()
            except BaseException:  # of a signal handler: it may be withdrawn already
                if call.is_over:
                    self._set_cancelled()
                raise
        return self.cancelled()

    def _set_cancelled(self) -> None:
        """The call is withdrawn: the future is cancelled, unless it has results by now."""
        try:
            super().cancel()
        finally:  # whatever a callback raises
            if self._state == "CANCELLED":
                self.call = None
                self.set_running_or_notify_cancel()

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self.call
        return call is not None and not self.done() and call.is_running

    def end(self, outcome: Outcome) -> None:
        """For the backend: the call is over."""
        self._encoded = outcome
        if isinstance(outcome, Failure):
            self.call = None
            self.set_exception(_UNDECODED)
            return
        # One statement without a call: within it the interpreter turns to no other thread, and to
        # no signal handler. A lock would take a twentieth of all that a call costs.
        self._state = "FINISHED" if self._own_condition is None else self._state
        if self._state != "FINISHED":  # somebody waits, or has looked
            self.set_result([])


class _Condition(_RLock):  # type: ignore[misc]
    """The Condition of a future, which is its own lock: entering and leaving it are in C.

    A signal handler that raised within ``Condition.__enter__``, which is Python, would leave it
    locked for ever.
    """

    #: Of the threads that wait.
    waiting: threading.Condition | None = None

    def wait(self, timeout: float | None = None) -> None:
        if self.waiting is None:
            self.waiting = threading.Condition(self)
        self.waiting.wait(timeout)

    def notify_all(self) -> None:
        waiting, self.waiting = self.waiting, None  # they refer to each other
        if waiting is not None:
            waiting.notify_all()
