"""What stands behind a streamer: the engine of this process, or worker hosts beyond a broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..errors import StreamerError
from ..observe.record import Call, Timing
from ..workers.protocol import Failure

__all__ = ["Accepted", "Backend", "PassThrough", "Reply"]


class Accepted(Protocol):
    """A call that a backend has accepted; whoever made it holds it to give it up."""

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker."""

    @property
    def timing(self) -> Timing | None:
        """Where its time went; None unless it was answered with results, and that is known."""


class Reply(Protocol):
    """Where the outcome of a call goes: one of the methods is called, once, never under a lock.

    Attributes:
        call: set by the backend when it makes the call, before it can be over. To let go of then.
    """

    call: Any

    def complete(self, outputs: list[Any]) -> None:
        """The call succeeded; ``outputs`` are in the order of its items, for ``decode``."""

    def fail(self, failure: Failure) -> None:
        """The call failed; who waits for it asks for the exception, in their own thread."""


class Backend(Protocol):
    """Accepts calls from any thread and answers each exactly once."""

    def submit(self, call: Call) -> None:
        """Accept a call of any number of items. What is not sent in its time is never computed.

        Raises:
            StreamerError: it was not accepted; its reply is not called.
        """

    def flush(self) -> None:
        """All the calls have been submitted that were said to follow: have them sent."""

    def cancel(self, call: Any) -> bool:
        """Withdraw a call if that is still of use; whether it was."""

    def withdraw(self, call: Any) -> None:
        """Nobody waits for the call any more: drop what is not with a worker, forget the rest."""

    def expire(self, call: Any) -> None:
        """The same, because the call's time has ended."""

    def decode(self, outputs: list[Any]) -> list[Any]:
        """What ``Reply.complete`` got, as the model returned it. Raises ModelError."""

    def late(self, timeout: float | None) -> StreamerError:
        """What to raise when the results were not there within ``timeout`` seconds."""

    def describe(self) -> str:
        """The state in one line, for a ``repr``."""

    def model_description(self) -> Mapping[str, Any] | None:
        """What the model says of itself; empty if nothing, None while that is not known.

        Raises:
            StreamerError: it never will be known: no worker can load the model, or it is closed.
        """

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """Have it called, in any thread, when ``model_description`` may have another answer.

        It must neither block nor raise. There is one at a time.
        """

    def check_process(self) -> None:
        """Raises StreamerForked in a forked child."""

    def check_not_in_callback(self) -> None:
        """Raises StreamerError in a thread that others' results depend on, which must not block."""

    def wait_ready(self, timeout: float | None) -> None:
        """Block until calls can be computed."""

    def close(self, *, drain: bool, timeout: float | None) -> None:
        """Refuse new calls, finish or fail the accepted ones, release everything. Idempotent."""


class PassThrough:
    """A backend that passes everything on to another one. A base for those that add one thing.

    Args:
        inner: what does the work.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def submit(self, call: Call) -> None:
        self._inner.submit(call)

    def flush(self) -> None:
        self._inner.flush()

    def cancel(self, call: Any) -> bool:
        return self._inner.cancel(call)

    def withdraw(self, call: Any) -> None:
        self._inner.withdraw(call)

    def expire(self, call: Any) -> None:
        self._inner.expire(call)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return self._inner.decode(outputs)

    def late(self, timeout: float | None) -> StreamerError:
        return self._inner.late(timeout)

    def describe(self) -> str:
        return self._inner.describe()

    def model_description(self) -> Mapping[str, Any] | None:
        return self._inner.model_description()

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        self._inner.when_workers_change(callback)

    def check_process(self) -> None:
        self._inner.check_process()

    def check_not_in_callback(self) -> None:
        self._inner.check_not_in_callback()

    def wait_ready(self, timeout: float | None) -> None:
        self._inner.wait_ready(timeout)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        self._inner.close(drain=drain, timeout=timeout)
