"""What calls fail with when it is not known whose fault a failure was: our words, nobody's text.

The text of a model's exception may quote the item that it was raised on. So it goes to the call
whose item that is, and to no other.
"""

from __future__ import annotations

from ..errors import PredictTimeout, SharedBatchError, WorkerLost
from ..workers.protocol import Failure

__all__ = ["EXPIRED", "EXPIRED_SUSPECT", "not_blamed", "of_shared_call"]

#: Of calls whose time ends before they are computed.
EXPIRED = Failure(PredictTimeout("the call could not be computed in its time"))

#: The same after a worker died with them.
EXPIRED_SUSPECT = Failure(
    PredictTimeout(
        "a worker died while it held this call, and the call's time ended before the item at fault "
        "was found; the log says what the worker died of"
    )
)


def not_blamed(failure: Failure, is_loss: bool) -> Failure:
    """For the calls of a batch that failed, if it is not known which of them it was.

    Args:
        failure: of the batch.
        is_loss: whether workers died of it, so many that the search was ended; otherwise the model
            raised, and nothing may be computed again.
    """
    kind, _, text = failure.text.partition(": ")
    if is_loss:
        lost = WorkerLost(
            f"{text}; after too many deaths of workers the search for the items at fault in this "
            "batch was ended, so this call may not be to blame"
        )
        return Failure(lost, failure.remote_traceback)
    return Failure(
        SharedBatchError(
            f"the model raised {kind} on a batch that this call shared with other calls, and the "
            "call at fault is not known; with isolate_errors=True and retry=True only that call "
            "fails. The log has the exception"
        )
    )


def of_shared_call(failure: Failure) -> Failure:
    """For a call that shared only some of its items with the one that failed."""
    kind = failure.text.partition(": ")[0]
    return Failure(
        SharedBatchError(
            f"a call that shared items with this one failed with {kind}, and with "
            "retry=False those items are not computed again"
        )
    )
