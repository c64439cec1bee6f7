"""Which batches a worker process is at, and which of them nobody waits for: in shared memory.

So the parent knows the first after the worker's end, however it ends, and the worker the second
while it computes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableSequence, Sequence
from typing import Any

from .memory.arena import PAGE, Memory

#: Numbers for the batches that nobody waits for: how many those were so far, and the last of them.
#: A worker has fewer at a time.
UNWANTED = 8

#: After so many seconds without news a worker says that it has not hung: between two steps, or two
#: runs of parts of one batch. For the engine takes it for hung that is silent for batch_timeout,
#: which may be short.
SIGN_OF_LIFE = 0.1


def add_unwanted(numbers: MutableSequence[int], batch_id: int) -> None:
    """Note a batch that nobody waits for any more; for the parent."""
    count = numbers[0]
    numbers[1 + count % (UNWANTED - 1)] = batch_id + 1
    numbers[0] = count + 1


def is_unwanted(numbers: Sequence[int], number: int) -> bool:
    """Whether the batch, of this id plus 1, is among those. False for 0, which is none."""
    return number > 0 and number in numbers[1:]


class StageProgress:
    """A number for each stage, in memory of both processes: a batch's id plus 1, or 0.

    Of a model of steps, a number from FORWARD on for each batch in the model's current call. Before
    these numbers are those that the parent writes.

    Each number is written by one store, so nobody reads a part of one.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        self._memory = Memory(PAGE)

    def for_worker(self, places: int = 0) -> tuple[MutableSequence[int], Sequence[int]]:
        """Where the stages write, and where they read what is unwanted. For the worker, once.

        Args:
            places: how many items a model of steps may have in a call.
        """
        os.truncate(self._memory.descriptor, PAGE + 8 * places)  # a number has 8 bytes
        numbers: Any = self._numbers()
        return numbers[UNWANTED:], numbers[:UNWANTED]

    def drop(self, batch_id: int) -> None:
        """Nobody waits for the batch any more. For the parent; never raises."""
        with contextlib.suppress(OSError):
            numbers: Any = self._numbers()
            add_unwanted(numbers, batch_id)

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
        return frozenset(number - 1 for number in numbers[UNWANTED + first :] if number)

    def _numbers(self) -> memoryview[int]:
        memory = self._memory
        memory.size = os.fstat(memory.descriptor).st_size  # the worker may have enlarged it
        return memoryview(memory.mapped()).cast("q")
