"""How calls end without results: they fail, their time ends, or they are withdrawn.

A call that ends is over at once. Its items that wait are dropped from the queue, and its spans in
batches and searches are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..observe.record import NO_OUTPUTS, BatchRecord, Call, CallState, Span
from .call_queue import CallQueue, end
from .isolation import Retries

_NOT_OPEN = (CallState.NEW, CallState.OVER)


class Endings:
    """Ends calls that get no results, and counts them.

    Args:
        retries: parts of batches that wait to be run again.
        expired, expired_suspect, shared: as for ``Batcher``.

    Attributes:
        pending: calls with items that are not cut; set by the batcher.
        failed: calls that failed of anything but their time, so far.
        expired: calls whose time ended, so far.
        cancelled: calls that were withdrawn, so far.
    """

    pending: CallQueue

    def __init__(
        self,
        retries: Retries,
        *,
        expired: Any,
        expired_suspect: Any,
        shared: Callable[[Any, bool], Any],
    ) -> None:
        self._retries = retries
        self._expired = expired
        self._expired_suspect = expired_suspect
        self._shared = shared
        self.failed = self.expired = self.cancelled = 0
        #: Calls that are over while a worker may still be at them; None if it is not to be told.
        self.abandoned: list[Call] | None = None

    def fail_if(
        self, call: Call, failures: Mapping[int, Any], positions: range, batch: BatchRecord
    ) -> None:
        """Fail the call if one of its items, at these positions of the batch, has failed."""
        failed = next((failures[i] for i in positions if i in failures), None)
        if failed is None:
            return
        if batch.calls > 1:  # one failure of several calls is that of what they were computed with
            owners = (owner for owner, start, stop in batch.spans for _ in range(start, stop))
            if any(
                owner is not call and failures.get(i) is failed for i, owner in enumerate(owners)
            ):
                failed = self._shared(failed, False)
        self.fail(call, failed)

    def fail(self, call: Call, failure: Any) -> None:
        """The call, which is not over, fails."""
        self._end(call, failure)
        self.failed += 1

    def fail_spans(self, spans: Sequence[Span], failure: Any) -> list[Call]:
        """Fail the calls of the spans that are not over; returns those."""
        calls: list[Call] = []
        for call, _, _ in spans:
            if not call.is_over:
                self.fail(call, failure)
                calls.append(call)
        return calls

    def fail_shared(self, spans: Sequence[Span], failure: Any, *, is_loss: bool) -> list[Call]:
        """The same where another call may be at fault, so that nothing of its may be shown.

        Args:
            is_loss: whether the failure is the loss of a worker.
        """
        return self.fail_spans(spans, self._shared(failure, is_loss))

    def expire(self, call: Call) -> None:
        """The time of the call, which is not over, has ended."""
        is_suspect = self._retries.has_waiting_alone and any(
            part.losses and call is suspect
            for part in self._retries.waiting
            for suspect, _, _ in part.spans
        )
        self._end(call, self._expired_suspect if is_suspect else self._expired)
        self.expired += 1

    def left(self, call: Call, *, has_expired: bool) -> bool:
        """The caller has gone, since its time has ended or for another reason.

        Returns:
            False if the call was over already, or never accepted.
        """
        if call.state in _NOT_OPEN:
            return False
        self._end(call)
        if has_expired:
            self.expired += 1
        else:
            self.cancelled += 1
        return True

    def _end(self, call: Call, failure: Any = None) -> None:
        """The call is over. Whoever counts it does so next.

        A signal handler can raise when a function begins, or after a call of C code: so not from
        ``end`` on until it is counted.
        """
        if self.abandoned is not None and call.is_running:
            self.abandoned.append(call)
        if call.state is CallState.WAITING:
            self.pending.remove(call)
        end(call)
        call.failure, call.outputs = failure, NO_OUTPUTS
