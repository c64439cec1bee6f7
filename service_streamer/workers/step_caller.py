"""Calls a method of a model of steps, says of which batches the call is, and what became of it."""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, MutableSequence
from typing import Any, NamedTuple, TypeAlias

from ..errors import BadModelOutput, InvalidItems, SharedBatchError
from .chunked_run import OutOfMemory, caught
from .model_spec import LoadedModel
from .protocol import Failure
from .stage_calls import by_position
from .stages import FORWARD
from .step_batch import StepRequest
from .step_results import UnreadableError

logger = logging.getLogger(__name__)


class Returned(NamedTuple):
    """What the model returned."""

    value: Any


class Invalid(NamedTuple):
    """The items that the model called invalid, by position in the call."""

    failures: dict[int, Failure]


class Unreadable(NamedTuple):
    """What the model returned, or the positions that it named, cannot be read."""

    failure: Failure


#: What became of a call. A Failure is what the model raised.
Ran: TypeAlias = Returned | Invalid | Unreadable | OutOfMemory | Failure


class StepCaller:
    """Calls one model. For the thread of the model.

    Args:
        check_owner: called after each call of the model: see ``Channel``.
        progress: where the batches in the current call are written, from FORWARD on: ids plus 1.
    """

    def __init__(
        self,
        model: LoadedModel,
        check_owner: Callable[[], None],
        progress: MutableSequence[int] | None = None,
    ) -> None:
        self._model = model
        self._check_owner = check_owner
        self._progress = progress

    def call(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Ran:
        """Call the model with these.

        Raises:
            DeviceFailed: of the model's guard; or whatever else ends the worker.
        """
        self._write_progress([request.batch_id + 1 for request in requests])
        ran = self._try(function, requests)
        self._write_progress([0] * len(requests))  # not if the worker ends: they are to blame
        self._check_owner()
        return ran

    def _try(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Ran:
        try:
            return Returned(function(requests))
        except UnreadableError as error:
            return Unreadable(Failure.caught(BadModelOutput(*error.args)))
        except InvalidItems as error:
            try:
                found = by_position(error, range(len(requests)))
            except BadModelOutput as wrong:
                return Unreadable(Failure.caught(wrong))
            return Invalid({i: Failure.caught(each) for i, each in found.items()})
        except BaseException as error:
            return caught(error, self._model, requests[0].batch_id)

    def _write_progress(self, numbers: list[int]) -> None:
        progress = self._progress
        if progress is not None:
            progress[FORWARD : FORWARD + len(numbers)] = array("q", numbers)

    def blame(self, requests: list[StepRequest], failure: Failure) -> Failure:
        """What the items of a call fail with: a single one with what the model raised."""
        return failure if len(requests) == 1 else self.not_blamed(failure)

    def not_blamed(self, failure: Failure) -> Failure:
        """For items that were in one call, if it is not known which of them it was.

        The model's exception may quote the item at fault, so it goes to the log only.
        """
        with contextlib.suppress(Exception):  # of a filter or handler of a user's
            text = "a model raised on several items, and which is at fault is not known:\n%s"
            logger.error(text, failure.remote_traceback)
        kind = failure.text.partition(": ")[0]
        return Failure(
            SharedBatchError(
                f"the model raised {kind} on a batch that this call shared with other calls, and "
                "the call at fault is not known; with retry=True only that call fails. The log has "
                "the exception"
            )
        )


def failure_of(ran: Invalid | Unreadable | OutOfMemory | Failure) -> Failure:
    """Of a call for a single item, or of one that is about no item."""
    if isinstance(ran, Failure):
        return ran
    return next(iter(ran.failures.values())) if isinstance(ran, Invalid) else ran.failure
