"""Times of forward passes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

from on_gpu.running import Kind

__all__ = ["DeviceClock", "Pace", "pass_ms"]

#: Who sets the pace: the host, as it launches kernels; or the device, which has all of them before
#: it begins with the first one. Where they differ, the device waits for the host between kernels.
Pace = Literal["host", "device"]

_PASSES = 9
#: What the device waits before such a pass, so that all of it is there when it begins: some 20 ms.
_SLEEP_CYCLES = 40_000_000


def pass_ms(compute: Callable[[], Any], kind: Kind, pace: Pace) -> float | None:
    """Median of some passes, by CUDA's events, milliseconds; on the CPU by the clock.

    None where torch cannot have a device wait.
    """
    times = [_on_cpu(compute) if kind == "cpu" else _on_gpu(compute, pace) for _ in range(_PASSES)]
    known = [each for each in times if each is not None]
    return statistics.median(known) if known else None


def _on_cpu(compute: Callable[[], Any]) -> float:
    started = time.perf_counter()
    compute()
    return 1e3 * (time.perf_counter() - started)


def _on_gpu(compute: Callable[[], Any], pace: Pace) -> float | None:
    import torch

    cuda: Any = torch.cuda
    began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda.synchronize()
    if pace == "device":
        wait = getattr(cuda, "_sleep", None)  # torch's own, not promised to anybody
        if wait is None:
            return None
        wait(_SLEEP_CYCLES)
    began.record()
    compute()
    ended.record()
    cuda.synchronize()
    elapsed: float = began.elapsed_time(ended)
    return elapsed


class DeviceClock:
    """When a device did its work, by the monotonic clock.

    Times are counted from the end of one batch to that of the next one: an event's distance from
    one that is long ago is known to some 10 µs only.

    Args:
        cuda: ``torch.cuda``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last = self.mark()
        self._last.synchronize()
        self._last_at = time.monotonic_ns()

    def mark(self) -> Any:
        """An event, which happens when what was launched so far is done."""
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record(self._cuda.current_stream())
        return event

    def times(self, start: Any, end: Any) -> tuple[int, int]:
        """When two marks happened, nanoseconds. Both have; ask in the order of the batches."""
        start_at = self._last_at + round(self._last.elapsed_time(start) * 1e6)
        self._last_at = start_at + round(start.elapsed_time(end) * 1e6)
        self._last = end
        return start_at, self._last_at
