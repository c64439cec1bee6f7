"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from .engine.backend import Accepted, Backend
from .errors import ModelError, StreamerError
from .observe.record import Timing
from .workers.protocol import Failure

_RLock: Any = type(threading.RLock())


_CANCELLED = frozenset({"CANCELLED", "CANCELLED_AND_NOTIFIED"})
#: The states that do not change any more.
_OVER = frozenset({"FINISHED", *_CANCELLED})

#: What a future has failed with until somebody asks for it.
_UNDECODED = StreamerError("not decoded yet")


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    def __init__(self, backend: Backend) -> None:
        # Not super().__init__(), which makes a Condition and two lists: they cost more than all the
        # rest of a submission, most futures are never waited for before they are done, and what
        # many futures hold the garbage collector goes through again and again.
        self._backend = backend
        # Of each, since Python 3.11 finds what is of all in five times as long.
        self._state = "PENDING"
        #: The lock, where somebody has needed it. See ``_making``.
        self._own_lock: Any = None

    #: Set by the backend before the call can end, and let go of when it ends.
    call: Accepted | None = None

    # What a standard one sets for itself (a test compares them): until they change, of all.
    _result: Any = None
    _exception: BaseException | None = None
    #: The outcome until it is asked for; then it is decoded into the two above.
    _encoded: list[Any] | Failure | None = None
    #: The call when it was answered.
    _answered: Accepted | None = None
    #: For threads that wait in ``result`` and ``exception``; made by the first of them.
    _awaited: threading.Condition | None = None
    _own_waiters: list[Any] | None = None
    _own_callbacks: list[Any] | None = None

    if not TYPE_CHECKING:  # for which they are attributes of the standard one

        @property
        def _condition(self) -> Any:
            with _making:
                if self._own_lock is None:
                    self._own_lock = _Lock()
            return self._own_lock

        # The standard library holds the lock when it adds to the next two.

        @property
        def _waiters(self) -> list[Any]:
            if self._own_waiters is None:
                self._own_waiters = []
            return self._own_waiters

    @property
    def _done_callbacks(self) -> list[Any]:
        if self._own_callbacks is None:
            self._own_callbacks = []
        return self._own_callbacks

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
            self._wait(timeout)
        encoded = self._encoded
        if encoded is not None:
            self._decode(encoded)
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        self._backend.check_process()  # in a forked child it never comes
        with self._condition:
            if self._state not in _OVER:
                if self._awaited is None:
                    self._awaited = threading.Condition(self._own_lock)
                self._awaited.wait(timeout)
            state = self._state
        if state not in _OVER:
            raise self._backend.late(timeout)
        if state != "FINISHED":
            raise concurrent.futures.CancelledError

    def _decode(self, encoded: list[Any] | Failure) -> None:
        """Done by the first thread that asks: it may run code of users.

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
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._finish(None, None, "CANCELLED_AND_NOTIFIED")
            self.call = None

    def done(self) -> bool:
        """Whether it has results or an error, or was cancelled. Needs no lock: it stays so."""
        return self._state in _OVER

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._state in _CANCELLED

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self.call
        return call is not None and not self.done() and call.is_running

    def complete(self, outputs: list[Any]) -> None:
        """For the backend: the call succeeded."""
        self._answered, self.call = self.call, None
        with _making:
            self._encoded = outputs
            if self._own_lock is None and self._state == "PENDING":
                self._state = "FINISHED"
                return
        self._finish(None, None)

    def fail(self, failure: Failure) -> None:
        """For the backend: the call failed."""
        self.call = None
        self._encoded = failure
        self._finish(None, _UNDECODED)

    def set_result(self, result: Any) -> None:
        """As of a standard one; the backend has ``complete`` instead."""
        self._finish(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """As of a standard one; the backend has ``fail`` instead."""
        self._finish(None, exception)

    def _finish(
        self, result: Any, exception: BaseException | None, state: str = "FINISHED"
    ) -> None:
        with self._condition:
            if self._state in _OVER:
                raise concurrent.futures.InvalidStateError(f"{self._state}: {self!r}")
            self._result = result
            self._exception = exception
            self._state = state
            for waiter in self._own_waiters or ():  # wait() and as_completed()
                if state != "FINISHED":
                    waiter.add_cancelled(self)
                else:
                    (waiter.add_result if exception is None else waiter.add_exception)(self)
            awaited = self._awaited
            if awaited is not None:
                self._awaited = None  # it holds the lock, which need not live longer
                awaited.notify_all()
        if self._own_callbacks:  # last: they may do, and raise, anything
            self._invoke_callbacks()  # type: ignore[attr-defined]  # typeshed lacks it


def _know_attributes() -> None:
    """Set every attribute once, before there are other futures.

    Python 3.11 and later keep the attributes of an instance without a dict, as long as they have
    room in the keys that all instances share. Each instance that is made leaves less room there, so
    what the thousandth one sets first has none, and it gets a dict.
    """
    future = Future(None)  # type: ignore[arg-type]
    for name in (
        "call", "_result", "_exception", "_encoded", "_answered", "_awaited", "_own_waiters",
        "_own_callbacks",
    ):  # fmt: skip
        setattr(future, name, None)


_know_attributes()


class _Lock(_RLock):  # type: ignore[misc]
    """The lock of a future, in the place of a standard one's Condition.

    The lock itself and not something that has one: entering and leaving it are then in C. It is
    reentrant as a Condition's is, since a signal handler may run while it is held. And one that
    raises within ``Condition.__enter__``, which is Python, would leave it locked for ever.
    """

    __slots__ = ()


#: Held to make the lock of a future, and to finish one that has none. Most futures are asked
#: for their results when they have them. To make a lock for each of these, and to take it once,
#: would be a tenth of what such a call costs. A future that has no lock has no waiter and no
#: callback, since the lock is made first. No lock is taken while this one is held, and nothing
#: waits. Reentrant, as above.
_making = threading.RLock()


def _renew_in_forked_child() -> None:
    global _making
    _making = threading.RLock()  # another thread may have held it at the fork


os.register_at_fork(after_in_child=_renew_in_forked_child)
