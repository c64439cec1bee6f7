"""The states of calls, and how many items wait: both change here, and nowhere else."""

from __future__ import annotations

from ..observe.record import Call, CallState

#: Members of an enum are looked up in Python, and every call asks for these.
_WAITING, _RUNNING, _OVER = CallState.WAITING, CallState.RUNNING, CallState.OVER


class Waiting:
    """The count of a queue of calls.

    Attributes:
        items: how many of its calls are not cut into batches.
    """

    def __init__(self) -> None:
        self.items = 0

    def enter(self, call: Call) -> None:
        """The call waits here from now on."""
        call.state = _WAITING
        self.items += call.pending

    def cut(self, call: Call, size: int) -> None:
        """So many items of the call go into a batch."""
        self.items -= size
        call.pending -= size
        if not call.pending:
            call.state = _RUNNING

    def leave(self, call: Call) -> None:
        """The call is about to end, or waits in another queue from now on."""
        self.items -= call.pending


def run(call: Call) -> None:
    """All items of the call, which is new, go into a batch."""
    call.pending = 0
    call.state = _RUNNING


def lose_queue(call: Call) -> None:
    """The queue that the call may wait in is about to be made anew, without it."""
    call.state = _RUNNING


def end(call: Call) -> None:
    """The call, which has left its queue, is over: let go of its items."""
    call.state = _OVER
    call.payloads, call.lengths, call.handed_out = (), None, None
