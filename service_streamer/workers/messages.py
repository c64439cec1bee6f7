"""What crosses the border to a worker, and how an exception travels over it.

    to a worker process      (batch_id, payloads[, ended])
    from a worker process    (READY[, wants_rows, pins])
                             (START_FAILED, failure)
                             (DEVICE_FAILED, batch_id, fault, error): see ``sticky``; the last one
                             (OUTCOME, *BatchOutcome without padding[, padding[, ended]])

Each is one pickled tuple. Not of classes: looking one up costs more than all the rest of a small
message. A payload is an item or output that is pickled already, each for itself, so that one that
does not unpickle fails alone; or where it lies in shared memory. What has ``ended`` is what the
sender does not look at there any more.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from ..errors import BadMessage, InvalidInput, ModelError, RemoteTraceback, UnpicklableItem

__all__ = [
    "DEVICE_FAILED",
    "OUTCOME",
    "READY",
    "START_FAILED",
    "BatchOutcome",
    "Failure",
    "summary",
]

#: What a message from a worker is. Plain ints, not an enum, which would be pickled by its name.
READY = 0
START_FAILED = 1
OUTCOME = 2
DEVICE_FAILED = 3

#: These say nothing of the worker that they come from.
_BLAMES_INPUT = (InvalidInput, UnpicklableItem, BadMessage)


class Failure:
    """An error on its way to callers: each of them gets an exception of its own.

    Sharing one instance would let the traceback grow with every caller that raises it and keep the
    frames of all of them alive. What the model raised stays pickled until a caller asks for it:
    unpickling imports modules and runs code of users, which must not hold up the engine's thread.

    Args:
        error: the exception to hand out copies of.
        remote_traceback: where it was raised, if that was in a worker; becomes the cause.
        cause: otherwise, what becomes the cause.

    Attributes:
        text: type and text of the exception, in a line.
        blames_input: whether it says that the sender of an item is at fault.
    """

    __slots__ = ("_cause", "_error", "_pickled", "blames_input", "remote_traceback", "text")

    def __init__(
        self,
        error: BaseException,
        remote_traceback: str | None = None,
        cause: Failure | None = None,
    ) -> None:
        self._error: BaseException | None = error
        self._pickled: bytes | None = None
        self._cause = cause
        self.remote_traceback = remote_traceback
        self.text = summary(error)
        self.blames_input = isinstance(error, _BLAMES_INPUT)

    @classmethod
    def caught(cls, error: BaseException) -> Failure:
        """In a worker, of the exception that was just caught there."""
        text = "".join(traceback.format_exception(error))
        # The text says it all. The frames would keep the whole batch alive.
        for name in ("__traceback__", "__context__", "__cause__"):
            _set(error, name, None)
        return cls(error, text)

    def exception(self) -> BaseException:
        """A copy of the error to raise at one caller. For the caller's thread."""
        original = self._error
        if original is None:
            original = self._error = self._unpickled()
        try:
            error = copy.copy(original)
        except (Exception, SystemExit):  # a constructor with other arguments than it kept
            error = original  # then they share it
        if type(error) is not type(original):
            error = original
        _set(error, "args", original.args)  # a constructor that words them would do it twice
        if self.remote_traceback is not None:
            _set(error, "__cause__", RemoteTraceback(self.remote_traceback))
        elif self._cause is not None:
            _set(error, "__cause__", self._cause.exception())
        else:
            _set(error, "__cause__", original.__cause__)
        return error

    def _unpickled(self) -> BaseException:
        reason = "it cannot be pickled"
        if self._pickled is not None:
            try:
                error, args = pickle.loads(self._pickled)
                _set(error, "args", args)
                return cast(BaseException, error)
            except (Exception, SystemExit) as error:  # its class cannot be imported here, say
                reason = f"it cannot be unpickled in this process: {summary(error)}"
        return ModelError(f"{self.text} (stands in for the worker's exception: {reason})")

    def __reduce__(self) -> tuple[Callable[..., Failure], tuple[Any, ...]]:
        pickled = self._pickled
        if self._error is not None:
            try:
                pickled = pickle.dumps((self._error, self._error.args), pickle.HIGHEST_PROTOCOL)
                pickle.loads(pickled)  # an odd constructor fails only here
            except (Exception, SystemExit):
                pickled = None
        return _received, (pickled, self.text, self.remote_traceback, self.blames_input)


def _received(
    pickled: bytes | None, text: str, remote_traceback: str | None, blames_input: bool
) -> Failure:
    failure = Failure.__new__(Failure)
    failure._error = failure._cause = None
    failure._pickled, failure.text, failure.remote_traceback = pickled, text, remote_traceback
    failure.blames_input = blames_input
    return failure


def _set(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute, also of an exception that is a frozen dataclass."""
    BaseException.__setattr__(error, name, value)


def summary(error: BaseException) -> str:
    """Type and text of an exception in one line; never raises."""
    try:
        text = str(error)
    except (Exception, SystemExit):
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
        started_at: when that began, by the worker's monotonic clock: on one host everybody's.
        ceiling: the most items that the worker now computes at once, since more did not fit into
            the device's memory; 0 for no such limit.
        padding: see ``ManagedModel.padding``.
    """

    batch_id: int
    outputs: list[Any]
    failures: dict[int, Failure]
    failure: Failure | None
    duration: float
    started_at: float
    ceiling: int = 0
    padding: float | None = None
