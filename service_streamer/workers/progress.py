"""Which batches a worker process is at, so that its parent knows after its end, however it ends."""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from typing import Any, cast

from .memory.arena import PAGE
from .memory.shared_memory import Memory

__all__ = ["StageProgress"]


class StageProgress:
    """A number for each stage, in memory of both processes: a batch's id plus 1, or 0.

    Of a model of steps, a number from FORWARD on for each batch in the model's current call.

    The worker writes each number by one store, so the parent never reads a part of one.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        self._memory = Memory(PAGE)

    def for_worker(self, places: int = 0) -> MutableSequence[int]:
        """Where the stages write. For the worker, once.

        Args:
            places: how many items a model of steps may have in a call.
        """
        os.truncate(self._memory.descriptor, PAGE + 8 * places)  # a number has 8 bytes
        numbers: Any = self._numbers()
        return cast(MutableSequence[int], numbers)

    def begun(self, first: int = 0) -> frozenset[int]:
        """Ids of the batches that are in a stage, or were when the worker ended.

        Empty if it is not known: this process has no free descriptor, or no address space.

        Args:
            first: the first stage that counts.
        """
        try:
            numbers = self._numbers()
        except OSError:
            return frozenset()
        return frozenset(number - 1 for number in numbers[first:] if number)

    def _numbers(self) -> memoryview[int]:
        memory = self._memory
        memory.size = os.fstat(memory.descriptor).st_size  # the worker may have enlarged it
        return memoryview(memory.mapped()).cast("q")
