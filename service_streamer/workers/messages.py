"""What crosses the border to a worker, and how an exception travels over it.

    to a worker process      (batch_id, payloads)
    from a worker process    (READY,)
                             (START_FAILED, failure)
                             (OUTCOME, *BatchOutcome)

Each is one pickled tuple. Not of classes: looking one up costs more than all the rest of a small
message. A payload is an item or output that is pickled already, each for itself, so that one that
does not unpickle fails alone.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ModelError, RemoteTraceback

__all__ = ["OUTCOME", "READY", "START_FAILED", "BatchOutcome", "Failure", "summary"]

#: What a message from a worker is. Plain ints, not an enum, which would be pickled by its name.
READY = 0
START_FAILED = 1
OUTCOME = 2


class Failure:
    """An error on its way to callers: each of them gets an exception of its own.

    Sharing one instance would let the traceback grow with every caller that raises it and keep the
    frames of all of them alive.

    Args:
        error: the exception to hand out copies of.
        remote_traceback: where it was raised, if that was in a worker; becomes the cause.
    """

    __slots__ = ("_error", "remote_traceback")

    def __init__(self, error: BaseException, remote_traceback: str | None = None) -> None:
        self._error = error
        self.remote_traceback = remote_traceback

    @classmethod
    def caught(cls, error: BaseException) -> Failure:
        """In a worker, of the exception that was just caught there."""
        text = "".join(traceback.format_exception(error))
        # The text says it all. The frames would keep the whole batch alive.
        for name in ("__traceback__", "__context__", "__cause__"):
            _set(error, name, None)
        return cls(error, text)

    def exception(self) -> BaseException:
        """A copy of the error to raise at one caller."""
        cause = self._error.__cause__
        if self.remote_traceback is not None:
            cause = RemoteTraceback(self.remote_traceback)
        try:
            error = copy.copy(self._error)
        except Exception:  # a constructor with other arguments than it kept: then they share it
            error = self._error
        if type(error) is not type(self._error):
            error = self._error
        _set(error, "args", self._error.args)  # a constructor that words them would do it twice
        _set(error, "__cause__", cause)
        return error

    def __reduce__(self) -> tuple[Callable[..., Failure], tuple[Any, ...]]:
        try:
            pickled = pickle.dumps((self._error, self._error.args), pickle.HIGHEST_PROTOCOL)
            pickle.loads(pickled)  # an odd constructor fails only here
        except (Exception, SystemExit):
            pickled = None
        return _unpickle_failure, (pickled, summary(self._error), self.remote_traceback)


def _unpickle_failure(pickled: bytes | None, text: str, remote_traceback: str | None) -> Failure:
    reason = "it cannot be pickled"
    if pickled is not None:
        try:
            error, args = pickle.loads(pickled)
            _set(error, "args", args)
            return Failure(error, remote_traceback)
        except (Exception, SystemExit) as error:  # its class cannot be imported here, say
            reason = f"it cannot be unpickled in this process: {summary(error)}"
    return Failure(
        ModelError(f"{text} (stands in for the worker's exception: {reason})"), remote_traceback
    )


def _set(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute, also of an exception that is a frozen dataclass."""
    BaseException.__setattr__(error, name, value)


def summary(error: BaseException) -> str:
    """Type and text of an exception in one line; never raises."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


class BatchOutcome(NamedTuple):
    """From the worker: what became of a batch.

    Attributes:
        outputs: one for each payload, as they are or encoded; empty when the batch failed.
        failures: by position, of the items or outputs that could not be decoded or encoded, and of
            items that did not fit into the device's memory.
        failure: of the batch as a whole, or None.
        duration: what ``predict`` took, in seconds.
        ceiling: the most items that the worker now computes at once, since more did not fit into
            the device's memory; 0 for no such limit.
    """

    batch_id: int
    outputs: list[Any]
    failures: dict[int, Failure]
    failure: Failure | None
    duration: float
    ceiling: int = 0
