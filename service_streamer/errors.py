"""All exceptions of this package, with one root.

An exception raised by the *model* reaches its callers as itself, with the worker's traceback as its
cause.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BadMessage",
    "BadModelOutput",
    "BrokerError",
    "BrokerUnavailable",
    "InternalError",
    "InvalidInput",
    "InvalidItems",
    "ModelError",
    "Overloaded",
    "PoolMismatch",
    "PredictTimeout",
    "RemoteTraceback",
    "SharedBatchError",
    "StreamerBroken",
    "StreamerClosed",
    "StreamerError",
    "StreamerForked",
    "TooLate",
    "UnpicklableItem",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
    "WorkerStartTimeout",
]


class StreamerError(Exception):
    """Root of all errors of this package; never raised itself."""


class StreamerClosed(StreamerError, RuntimeError):
    """The streamer is closed or draining: the call was refused, or cut off by ``close``."""


class StreamerForked(StreamerError, RuntimeError):
    """The streamer was built before a ``fork``: build it in the child process instead."""


class InternalError(StreamerError):
    """A bug in service_streamer ended the call. The text names it; the log has its traceback.

    Raised at every call that was open then. The streamer goes on, and so do its workers.
    """


class StreamerBroken(StreamerError):
    """No worker can be started at present, or the streamer failed: ``__cause__`` says why.

    The streamer retries at least once a minute, and accepts calls again once a worker is ready.
    """


class PoolMismatch(StreamerError):
    """The shared pool of this name has another model, other options or other code.

    The text says which. Nothing was computed.
    """


class Overloaded(StreamerError):
    """So much waits as ``max_pending`` allows: the whole call was refused."""


class PredictTimeout(StreamerError, TimeoutError):
    """The call timed out, or was given up since it could not be computed before its deadline.

    Over Redis also if it made no progress for ``answer_timeout``. Also a built-in ``TimeoutError``.
    """


class TooLate(PredictTimeout):
    """The call cannot be computed in its time: it was refused when it came.

    Too much waits before it, or it takes longer than its time by itself. Only once it is known what
    batches cost.
    """


class UnpicklableItem(StreamerError, TypeError):
    """An item of the call cannot be sent to a worker process. ``__cause__`` says why."""


class WorkerError(StreamerError):
    """A worker failed, not the model's computation; never raised itself."""


class WorkerStartError(WorkerError):
    """A worker could not start: importing the model or ``init_model`` failed.

    ``__cause__`` is the error as raised in the worker, whose own cause is the worker's traceback.
    """


class WorkerStartTimeout(WorkerStartError, TimeoutError):
    """``wait_ready(timeout)`` ended before all workers had loaded the model; they continue."""


class WorkerLost(WorkerError):
    """The worker died while it computed this call, and the call is not retried any more.

    The text says how it died, and the likely cause. Also raised with ``retry=False`` for all calls
    of a dead worker, and if the worker's GPU failed. ``__cause__``, if any, has the stacks of the
    worker's threads.
    """


class ModelError(StreamerError):
    """Replaces a model's exception or result that cannot be sent to the web process."""


class SharedBatchError(ModelError):
    """The model raised on a batch that this call shared with other calls.

    Only with ``isolate_errors=False`` or ``retry=False``, as the items are not computed again to
    find the bad one. The model's exception is only logged, since it may quote another caller's
    item. A call that was alone in its batch fails with the model's exception.
    """


class BadModelOutput(ModelError, ValueError):
    """``predict`` did not return a sequence with one result per item."""


class InvalidInput(StreamerError, ValueError):
    """An item is not valid for the model.

    For a model's ``predict`` to raise; the text should say what is wrong and what to send. Web
    services answer 422 with this text. Other errors of models are 500 and only logged.
    """


class InvalidItems(InvalidInput):
    """Some items of a batch are not valid for the model; the others are computed without them.

    For a model's ``preprocess`` to raise, or for ``predict`` of a model without stages. It is
    called again with the other items, in their order. So it should check all items before it
    computes any. After any other exception the model is called several times more, to find the item
    at fault. Callers get the exception of their own item, and never this one.

    Args:
        errors: exceptions, such as ``InvalidInput``, by the position of their items in the list
            with which the model was called. At least one.

    Raises:
        TypeError: one of them is no exception.
        ValueError: there is none.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        if not errors:
            raise ValueError("errors must have the exception of at least one item; it is empty")
        self.errors = dict(errors)
        for position, error in self.errors.items():
            if not isinstance(error, Exception):
                raise TypeError(
                    f"errors[{position!r}] must be an exception; it is a {type(error).__qualname__}"
                )
        more = len(self.errors) - 1
        first = next(iter(self.errors.values()))
        super().__init__(f"{first} (and {more} more)" if more else str(first))

    def __reduce__(self) -> tuple[type[InvalidItems], tuple[dict[int, Exception]]]:
        return type(self), (self.errors,)


class BrokerError(StreamerError):
    """An error of Redis or of a message from it; never raised itself."""


class BrokerUnavailable(BrokerError):
    """Redis was unreachable, or refused us, until the call's timeout; or it lost outputs.

    ``__cause__`` is the connection's last error. The call may or may not have been computed.
    """


class BadMessage(BrokerError, ValueError):
    """A message in Redis is malformed, or was made with another secret or serializer.

    A call fails with it if a worker host could not read the call, or this client its reply. The
    text says which option must be the same on both sides.

    Attributes:
        reason: "signature", "secret", "serializer", "size", "format" or "unreadable".
    """

    def __init__(self, text: str = "", reason: str = "unreadable") -> None:
        super().__init__(text)
        self.reason = reason


class RemoteTraceback(Exception):
    """Never raised: the ``__cause__`` of a worker's error; its text is the worker's traceback."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'
