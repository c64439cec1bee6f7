"""The states of calls that do not wait: they change here. Of those that do, in ``CallQueue``."""

from __future__ import annotations

from ..observe.record import Call, CallState

#: Members of an enum are looked up in Python, and every call asks for these.
_RUNNING, _OVER = CallState.RUNNING, CallState.OVER


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
