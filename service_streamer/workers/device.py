"""The GPU's side of a stage: how long it computes.

A kernel is launched and not waited for, so ``forward`` returns before the GPU has computed. What it
takes is therefore read from two CUDA events, which the GPU passes before and after its work.

Nothing here imports torch, and nothing makes a CUDA context in a process that has none: it would
take about 0.5 GB of the device's memory.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

__all__ = ["StageClock", "StageMark", "stage_clock"]


def _cuda() -> Any:
    """``torch.cuda`` once it is in use in this process; else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return cuda if cuda is not None and cuda.is_initialized() else None
    except AttributeError:  # half loaded, or another module of that name
        return None


class StageMark:
    """The time of one batch in one stage, from its making on.

    The thread of the stage makes and ends it. After that any one thread may ask for the seconds.
    """

    __slots__ = ("_began_at", "_events", "_seconds")

    def __init__(self) -> None:
        self._seconds: float | None = None
        #: Of each device that is in use: the events before and after the work.
        self._events: list[tuple[Any, Any]] = []
        self._began_at = time.monotonic()
        cuda = _cuda()
        if cuda is not None:
            # A device that failed: the model's next call finds out, and says more about it.
            with contextlib.suppress(Exception):
                self._events = [_begun(cuda, device) for device in _devices(cuda)]

    def end(self) -> None:
        """The stage has done its work for the batch, or launched it."""
        self._seconds = time.monotonic() - self._began_at
        if self._events:
            try:
                for start, end in self._events:
                    end.record(_cuda().current_stream(start.device))
            except Exception:
                self._events = []

    def seconds(self) -> float:
        """What the batch took: the longer of the thread's time and the GPU's, in seconds.

        Blocks until the GPU has done the work that was launched before ``end``. Raises nothing: if
        the GPU fails, this is the thread's time.
        """
        if self._seconds is None:
            self.end()
        seconds = self._seconds or 0.0
        with contextlib.suppress(Exception):
            for start, end in self._events:
                end.synchronize()  # other threads may run meanwhile
                seconds = max(seconds, start.elapsed_time(end) / 1000)
        self._seconds, self._events = seconds, []
        return seconds


class StageClock:
    """Measures a stage. Any thread."""

    def begin(self) -> StageMark:
        """The stage begins with a batch."""
        return StageMark()


def stage_clock() -> StageClock:
    """The clock of one stage."""
    return StageClock()


def _devices(cuda: Any) -> list[int]:
    """The devices that this process computes on."""
    count = cuda.device_count()
    if count > 1:
        has_context = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", None)
        if has_context is not None:
            return [device for device in range(count) if has_context(device)]
    return [cuda.current_device()]


def _begun(cuda: Any, device: int) -> tuple[Any, Any]:
    """A start event, recorded, and an end event.

    They are blocking: a thread that waits for another kind keeps a core busy.
    """
    start = cuda.Event(enable_timing=True, blocking=True)
    start.record(cuda.current_stream(device))
    return start, cuda.Event(enable_timing=True, blocking=True)
