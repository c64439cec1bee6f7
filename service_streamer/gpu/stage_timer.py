"""How long a stage takes for a batch, on the GPU if one is in use.

``forward`` returns before the GPU has computed. What the GPU takes is read from two events, one
before and one after its work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from .accelerators import kind_in_use
from .transfers import stream_of


class StageTimer:
    """Times one batch in one stage, from the timer's making on.

    The thread of the stage makes and stops it. After that any one thread may ask for the seconds.
    """

    __slots__ = ("_began_at", "_events", "_kind", "_seconds")

    def __init__(self) -> None:
        self._seconds: float | None = None
        #: Of each device that is in use: its number, and the events before and after the work.
        self._events: list[tuple[int, Any, Any]] = []
        self._began_at = time.monotonic()
        self._kind: Any = kind_in_use()
        if self._kind is not None:
            # A device that failed: the model's next call finds out, and says more about it.
            with contextlib.suppress(Exception):
                self._events = [self._started(device) for device in self._kind.devices_in_use()]

    def _started(self, device: int) -> tuple[int, Any, Any]:
        start, end = self._kind.event(timing=True), self._kind.event(timing=True)
        start.record(self._kind.torch.current_stream(device))
        return device, start, end

    def stop(self) -> None:
        """The stage has done its work for the batch, or launched it."""
        self._seconds = time.monotonic() - self._began_at
        try:
            for device, _, end in self._events:
                end.record(self._kind.torch.current_stream(device))
        except Exception:  # the device failed
            self._events = []

    @property
    def is_of_device(self) -> bool:
        """Whether the GPU's time is measured, so that ``seconds`` waits for its work."""
        return bool(self._events)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Have the GPU's work in the block follow the stage's work, and be done at its end.

        On a stream of its own. On the current one it would follow all that another thread has
        launched for the next batch meanwhile.
        """
        with contextlib.ExitStack() as streams:
            for device, _, end in self._events:
                stream = stream_of(self._kind, "results", device)
                stream.wait_event(end)
                streams.enter_context(self._kind.torch.stream(stream))
                # What was computed there may be freed by this thread afterwards.
                streams.callback(stream.synchronize)
            yield

    def seconds(self) -> float:
        """What the batch took: the longer of the thread's time and the GPU's, in seconds.

        Blocks until the GPU has done the work that was launched before ``stop``. Raises nothing: if
        the GPU fails, this is the thread's time.
        """
        if self._seconds is None:
            self.stop()
        seconds = self._seconds or 0.0
        with contextlib.suppress(Exception):
            for _, start, end in self._events:
                end.synchronize()  # other threads may run meanwhile
                seconds = max(seconds, start.elapsed_time(end) / 1000)
        self._seconds = seconds
        return seconds
