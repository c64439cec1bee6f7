"""Every exception that this package raises. One root; names say whose fault it was.

An exception that the *model* raises is not in this list: it reaches its callers as itself, with the
worker's traceback as its cause.
"""

from __future__ import annotations

__all__ = [
    "BadMessage",
    "BadModelOutput",
    "BrokerError",
    "BrokerUnavailable",
    "InvalidInput",
    "ModelError",
    "Overloaded",
    "PredictTimeout",
    "RemoteTraceback",
    "SharedBatchError",
    "StreamerBroken",
    "StreamerClosed",
    "StreamerError",
    "StreamerForked",
    "UnpicklableItem",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
    "WorkerStartTimeout",
]


class StreamerError(Exception):
    """Root of every error of this package; never raised itself."""


class StreamerClosed(StreamerError, RuntimeError):
    """You closed the streamer (or it drains): the call was refused, or cut off by the close."""


class StreamerForked(StreamerError, RuntimeError):
    """The streamer was built in another process and came here by ``fork``: build it after that."""


class StreamerBroken(StreamerError):
    """No worker can be started at present, or the streamer failed: ``__cause__`` says why.

    Workers are tried again at least once a minute; calls are accepted again when one is ready.
    """


class Overloaded(StreamerError):
    """As many items wait as ``max_pending`` allows: nothing of the call was accepted."""


class PredictTimeout(StreamerError, TimeoutError):
    """The call's time ended before its result came, or was about to before it could be computed.

    Also a built-in ``TimeoutError``.
    """


class UnpicklableItem(StreamerError, TypeError):
    """An item of this call cannot be sent to a worker process. ``__cause__`` says why."""


class WorkerError(StreamerError):
    """A worker failed, not the model's computation; never raised itself."""


class WorkerStartError(WorkerError):
    """A worker could not start: importing the model or ``init_model`` failed.

    ``__cause__`` is the error as raised in the worker, whose own cause is the worker's traceback.
    """


class WorkerStartTimeout(WorkerStartError, TimeoutError):
    """``wait_ready(timeout)`` ended before every worker had loaded its model; they go on."""


class WorkerLost(WorkerError):
    """The worker died of this call, or the search for the cause was ended; says how, and why.

    Also if nothing may be computed twice (``retry=False``), and if the worker's GPU failed with it.
    ``__cause__``, if there is one, has the stacks of the worker's threads at that time.
    """


class ModelError(StreamerError):
    """Stands in for a model's exception or result that cannot cross to the web process."""


class SharedBatchError(ModelError):
    """The model raised on a batch that this call shared with others; whose fault is not known.

    Only with ``isolate_errors=False`` or ``retry=False``: then the items are not computed again to
    find out. The model's exception is in the log and not in this one, since it may quote the item
    of another caller. A call that had its batch to itself fails with the exception.
    """


class BadModelOutput(ModelError, ValueError):
    """``predict`` did not return a sequence with one result per item."""


class InvalidInput(StreamerError, ValueError):
    """An item is not what the model takes: its sender's fault, and to be told to them.

    For ``predict`` of a model to raise; the text should say what is wrong and what to send. Web
    services answer 422 with it, while other errors of models are 500 and only logged.
    """


class BrokerError(StreamerError):
    """Something is wrong with Redis, or with what came from it; never raised itself."""


class BrokerUnavailable(BrokerError):
    """Redis could not be reached, or did not let us in, until the call's time had ended; or has
    lost the call.

    ``__cause__`` is the last error of the connection. Whether the call is computed is not known.
    """


class BadMessage(BrokerError, ValueError):
    """A message in Redis is not what a party that shares codec and secret with us would send.

    A call fails with it if a worker host could not read it, or this side its reply: the text says
    what to set to the same on both sides.

    Attributes:
        reason: in a word: "signature", "secret", "serializer", "size", "format", "unreadable".
    """

    def __init__(self, text: str = "", reason: str = "unreadable") -> None:
        super().__init__(text)
        self.reason = reason


class RemoteTraceback(Exception):
    """Not raised: the ``__cause__`` of a worker's error; its text is the worker's traceback."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'
