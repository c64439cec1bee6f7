"""No system at all: a plain loop in a process that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapters.adapter import ByHand
from adapters.workloads import BATCH_SIZE, WORKLOADS, is_answer

__all__ = ["Copy", "Direct", "rate"]


class Direct:
    """Batches by hand.

    Settings: ``batch_size``; ``is_sorted``, whether items are first put in the order of their
    lengths, which who has them all beforehand can.
    """

    drivers = frozenset({"beside-hand", "by-hand"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workers != 1:
            raise ValueError(f"by hand there is one worker, not {workers}")
        self._name = workload
        self._size: int = settings.get("batch_size", BATCH_SIZE)
        self._is_sorted: bool = settings.get("is_sorted", False)
        self._workload = WORKLOADS[workload]()
        self._workload.load()

    def batches(self, items: Sequence[Any]) -> Iterator[int]:
        if self._is_sorted:
            length: Any = getattr(self._workload, "length", None)
            items = sorted(items, key=length)
        for first in range(0, len(items), self._size):
            batch = list(items[first : first + self._size])
            answers = self._workload.predict(batch)
            if not is_answer(self._name, batch[-1], answers[len(batch) - 1]):
                raise ValueError("the model gave a wrong answer")
            yield len(batch)

    def close(self) -> None: ...


class Copy:
    """Each array into another, and from there into a third, as it goes to a worker and back."""

    drivers = frozenset({"by-hand"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workload != "arrays" or workers != 1 or settings:
            raise ValueError("only arrays are copied, by one process, without settings")
        self._targets: list[tuple[Any, Any]] = []

    def batches(self, items: Sequence[Any]) -> Iterator[int]:
        import numpy as np

        if [there.nbytes for there, _ in self._targets] != [item.nbytes for item in items]:
            self._targets = [(np.zeros_like(item), np.zeros_like(item)) for item in items]
        for item, (there, back) in zip(items, self._targets, strict=True):
            np.copyto(there, item)
            np.copyto(back, there)
        yield len(items)

    def close(self) -> None: ...


def rate(system: ByHand, work: Sequence[Any], seconds: float) -> float:
    """Items per second; all of them are computed over and over for ``seconds``, once at least."""
    done, started = 0, time.perf_counter()
    while not done or time.perf_counter() - started < seconds:
        done += sum(system.batches(work))
    return done / (time.perf_counter() - started)
