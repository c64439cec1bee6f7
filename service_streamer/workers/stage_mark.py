"""What a GPU does for a batch: how long it takes, and whether it has come to its end.

``forward`` returns before the GPU has computed. What the GPU takes is read from two CUDA events,
one before and one after its work. And after each batch it notes down a number in the host's memory.
When it fails, all calls to it raise the same error, in every stage; the numbers tell the first
batch that it did not finish.

Nothing here makes a CUDA context in a process that has none.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from .device import cuda_in_use, stream_of


class _Note:
    """Counts the batches that a device has finished. Belongs to the thread that computes.

    Two tiny operations on the current stream for each batch: adding one, and copying the sum to
    pinned memory, which can be read whatever has become of the device.
    """

    def __init__(self, device: int) -> None:
        torch: Any = sys.modules["torch"]
        self._taken = 0
        self._count = torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def take_down(self) -> int:
        """Launch it; returns the number that it will be."""
        self._taken += 1
        self._count.add_(1)
        self._seen.copy_(self._count, non_blocking=True)
        return self._taken

    @property
    def last(self) -> int:
        return int(self._seen)


_notes: dict[tuple[Any, int], _Note] = {}


def _note_of(device: int) -> _Note:
    key = sys.modules["torch"], device
    note = _notes.get(key)
    if note is None:
        note = _notes[key] = _Note(device)
    return note


class StageMark:
    """One batch in one stage, from the mark's making on.

    The thread of the stage makes and ends it. After that any one thread may ask for the seconds.
    """

    __slots__ = ("_began_at", "_events", "_has_gpu", "_numbers", "_seconds")

    def __init__(self) -> None:
        self._seconds: float | None = None
        #: Of each device that is in use: the events before and after the work.
        self._events: list[tuple[Any, Any]] = []
        #: By device, the number that it notes down after the work; None before ``end``.
        self._numbers: dict[int, int] | None = None
        self._began_at = time.monotonic()
        cuda = cuda_in_use()
        if cuda is not None:
            # A device that failed: the model's next call finds out, and says more about it.
            with contextlib.suppress(Exception):
                self._events = [_begun(cuda, device) for device in _devices(cuda)]
        self._has_gpu = bool(self._events)

    def end(self) -> None:
        """The stage has done its work for the batch, or launched it."""
        self._seconds = time.monotonic() - self._began_at
        if self._events:
            try:
                numbers: dict[int, int] = {}
                for start, end in self._events:
                    device = start.device.index
                    numbers[device] = _note_of(device).take_down()
                    end.record(cuda_in_use().current_stream(device))
                self._numbers = numbers
            except Exception:
                self._events = []

    @property
    def is_of_device(self) -> bool:
        """Whether the GPU's time is measured, so that ``seconds`` waits for its work."""
        return bool(self._events)

    @property
    def is_reached(self) -> bool:
        """Whether the GPU had done the stage's work before it failed.

        Asks nothing of the GPU: after a failure every call would raise the same error, whichever
        batch was computing. True where nothing is known.
        """
        if self._numbers is None:
            return not self._has_gpu
        return all(_note_of(device).last >= number for device, number in self._numbers.items())

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Have the GPU's work in the block follow the stage's work, and be done at its end.

        On a stream of its own. On the current one it would follow all that another thread has
        launched for the next batch meanwhile.
        """
        with contextlib.ExitStack() as streams:
            for start, end in self._events:
                stream = stream_of(cuda_in_use(), "results", start.device.index)
                stream.wait_event(end)
                streams.enter_context(cuda_in_use().stream(stream))
                # What was computed there may be freed by this thread afterwards.
                streams.callback(stream.synchronize)
            yield

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
        self._seconds = seconds
        return seconds


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
