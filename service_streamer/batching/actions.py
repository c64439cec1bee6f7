"""What a batcher wants done: batches to send, calls to answer, workers to end or to replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..observe.record import BatchRecord, Call
from .isolation import Raised, Search


class Actions(NamedTuple):
    """What to do now, in this order.

    Attributes:
        batches: to send.
        calls: to answer; they are over.
        hung: slots whose batch has taken too long: end their workers, or say so.
        vacant: retiring slots that have nothing left to do: let their workers end.
        searches: for the items at fault that have come to an end, for the log.
        condemned: slots whose workers fail everything while others do not: replace them.
    """

    batches: Sequence[BatchRecord] = ()
    calls: Sequence[Call] = ()
    hung: Sequence[int] = ()
    vacant: Sequence[int] = ()
    searches: Sequence[Search | Raised] = ()
    condemned: Sequence[int] = ()


#: The usual answer to a submission while all workers are busy.
NOTHING = Actions()
