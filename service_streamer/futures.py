"""The future of one call: a standard one, so that whatever waits for those waits for these."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

from .errors import PredictTimeout

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduling.records import Call

__all__ = ["Future"]


class Future(concurrent.futures.Future[list[Any]]):
    """The results of one ``submit``, in the order of its items.

    A ``concurrent.futures.Future``: ``wait``, ``as_completed``, ``asyncio.wrap_future``, callbacks
    and ``result()`` from any thread and as often as one likes. Made by a streamer, not by users.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: Engine | None = None
        self._call: Call | None = None

    def attach(self, engine: Engine, call: Call) -> None:
        """Say whom to tell of a ``cancel``; both are let go of when the call ends."""
        self._engine, self._call = engine, call
        if self.done():  # it ended meanwhile
            self._detach()

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
        if not self._wait(timeout):
            raise PredictTimeout(f"no result within {timeout} s")
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call failed with, or None if it did not; waits and raises as ``result`` does."""
        if not self._wait(timeout):
            raise PredictTimeout(f"no result within {timeout} s")
        return super().exception(0)

    def cancel(self) -> bool:
        """Withdraw the call if none of it is with a worker yet; whether it is cancelled."""
        engine, call = self._engine, self._call
        if engine is not None and call is not None and engine.cancel(call) and super().cancel():
            self._detach()
            self.set_running_or_notify_cancel()  # tells wait() and as_completed()
        return self.cancelled()

    def withdraw(self) -> None:
        """For a caller that stops waiting: drop the call, whatever its state."""
        engine, call = self._engine, self._call
        if engine is not None and call is not None:
            engine.withdraw(call)
            self._detach()

    def running(self) -> bool:
        """Whether a part of the call is with a worker: it cannot be cancelled any more."""
        call = self._call
        return call is not None and not self.done() and call.pending < len(call.outputs)

    def complete(self, outputs: list[Any]) -> None:
        """For the engine: the call succeeded."""
        self.set_result(outputs)
        self._detach()  # after it is done: see ``attach``

    def fail(self, error: BaseException) -> None:
        """For the engine: the call failed."""
        self.set_exception(error)
        self._detach()

    def _detach(self) -> None:
        self._engine = self._call = None

    def _wait(self, timeout: float | None) -> bool:
        """Whether the call is over. Tells our time ending from a TimeoutError of the model's."""
        try:
            super().exception(timeout)
        except concurrent.futures.CancelledError:
            return True
        except TimeoutError:
            return self.done()
        return True
