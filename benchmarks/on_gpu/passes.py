"""How long a device computes a forward pass on tensors that it has already."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

from on_gpu.running import Kind

__all__ = ["Pace", "pass_ms"]

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
