"""Exceptions in the middle of the package's code, as a handler of a signal raises them.

``interrupted_at`` raises at an exact place, the same in every run, and ``interrupted_everywhere``
at one place after the other. A handler may also return.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import service_streamer

#: The code that is interrupted: of the package, and what it uses of the standard library's.
_CODE = (service_streamer.__path__[0], concurrent.futures.__path__[0], threading.__file__)


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


#: The interpreter looks for signals when a function begins, after a call, and in a loop: only
#: there. An exception elsewhere, as between the end of a ``with`` block and the release of its
#: lock, does not happen.
_LOOKS_AFTER = ("CALL", "PRECALL", "RESUME", "JUMP_BACKWARD")


@contextlib.contextmanager
def _quiet(raised: type[BaseException] = Interrupted) -> Iterator[None]:
    """Without a word about those that come in a finalizer, where Python drops exceptions."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not raised:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would drop the exception, and what the finalizer was about to do is undone.

    No code can help that: it may come before the first line of the finalizer.
    """
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


_places: dict[CodeType, frozenset[int]] = {}


def _places_of(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal may be handled.

    What a handler raises belongs to the instruction before. Here it is raised in the next one,
    which must have the same ``except`` or ``with`` around it. After the call of ``return f()`` in a
    ``with`` block that is not so: the lock would stay locked, which cannot happen.
    """
    found = _places.get(code)
    if found is None:
        entries = getattr(dis.Bytecode(code), "exception_entries", ())
        offsets, before = set(), None
        for each in dis.get_instructions(code):
            if before is not None and _handler_at(before, entries) == _handler_at(
                each.offset, entries
            ):
                offsets.add(each.offset)
            looks = each.opname.startswith(_LOOKS_AFTER) and each.opname != "PRECALL"
            before = each.offset if looks else None
        found = _places[code] = frozenset(offsets)
    return found


def _handler_at(offset: int, entries: Any) -> int | None:
    """Where an exception at an offset goes on; None if it leaves the function."""
    return next((each.target for each in entries if each.start <= offset < each.end), None)


@contextlib.contextmanager
def interrupted_at(
    place: int,
    raised: type[BaseException] = Interrupted,
    handler: Callable[[], object] | None = None,
) -> Iterator[threading.Event]:
    """Raise it at the ``place``-th point, from 0, where a signal may be handled: then it is set.

    If there is a handler, it is called there instead.

    Only code of the package and of its futures and locks is interrupted, and only in this thread.
    """
    left, has_come = place, threading.Event()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_CODE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _places_of(frame.f_code):
            left -= 1
            if left < 0 and not _is_in_finalizer(frame):
                sys.settrace(None)
                has_come.set()
                if handler is None:
                    raise raised
                handler()
        return trace

    before = sys.gettrace()
    with _quiet(raised):
        sys.settrace(trace)
        try:
            yield has_come
        finally:
            sys.settrace(before)


def interrupted_everywhere(
    call: Callable[[], object],
    raised: type[BaseException] = Interrupted,
    *,
    step: int = 1,
    handler: Callable[[], object] | None = None,
) -> Iterator[int]:
    """Call it again and again, interrupted at each place in turn; after each call it yields that.

    Args:
        step: how far apart the places are.
    """
    place, was_interrupted = 0, True
    while was_interrupted:
        with contextlib.suppress(raised), interrupted_at(place, raised, handler) as has_come:
            call()
        was_interrupted = has_come.is_set()
        yield place
        place += step
    assert place > 20, "the trace function did not see what was called"
