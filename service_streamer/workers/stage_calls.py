"""What a worker calls of a model, stage by stage, for items that the model gets at once."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import BadModelOutput, InvalidItems
from ..gpu.transfers import PLAIN, first_value
from .model_spec import LoadedModel, Predict
from .stacking import stacks


class StageCalls(NamedTuple):
    """The functions of the stages, each of what the one before it returned.

    Attributes:
        prepare: called with the list of items; None where the model computes that.
        compute: called with the batch.
        finish: called with the outputs and the number of items; returns as many results.
        memory: called with the outputs; returns what ``memory_of`` does.
    """

    prepare: Predict | None
    compute: Predict
    finish: Callable[[Any, int], list[Any]]
    memory: Callable[[Any], weakref.ref[Any] | None]


class StackedRows(NamedTuple):
    """Items of one shape, on their way through the stages.

    Attributes:
        positions: of the items among those that are computed at once.
        data: what the last stage returned.
    """

    positions: Sequence[int]
    data: Any


def stacked(calls: StageCalls, model: LoadedModel) -> StageCalls:
    """The same for a model that gets items as rows: each stage is called for each shape."""

    def prepare(items: list[Any]) -> list[StackedRows]:
        return [
            StackedRows(each.positions, run(calls.prepare, each.positions, each.batch))
            for each in stacks(items, model.view)
        ]

    def compute(batch: list[StackedRows]) -> list[StackedRows]:
        return [
            StackedRows(positions, run(calls.compute, positions, data)) for positions, data in batch
        ]

    def run(stage: Predict | None, positions: Sequence[int], data: Any) -> Any:
        if stage is None:
            return data
        with at_positions(positions):
            return stage(data)

    def finish(outputs: list[StackedRows], size: int) -> list[Any]:
        results: list[Any] = [None] * size
        for positions, data in outputs:
            finished = calls.finish(data, len(positions))
            for position, result in zip(positions, finished, strict=True):
                results[position] = result
        return results

    def memory(outputs: list[StackedRows]) -> weakref.ref[Any] | None:
        return calls.memory(outputs[0].data)

    return StageCalls(prepare, compute, finish, memory)


@contextmanager
def at_positions(positions: Sequence[int]) -> Iterator[None]:
    """What is called with the items at these positions calls some of them invalid: say which."""
    try:
        yield
    except InvalidItems as error:
        raise InvalidItems(by_position(error, positions)) from None


def by_position(invalid: InvalidItems, positions: Sequence[int]) -> dict[int, Exception]:
    """The errors, of a call with the items at these positions.

    Raises:
        BadModelOutput: there were no such items.
    """
    wrong = [i for i in invalid.errors if type(i) is not int or not 0 <= i < len(positions)]
    if wrong:
        raise BadModelOutput(
            f"InvalidItems names item {wrong[0]!r}, but the model was called with "
            f"{len(positions)}: positions count from 0"
        )
    return {positions[i]: error for i, error in invalid.errors.items()}


def one_at_a_time(stage: Predict | None) -> Predict | None:
    """A stage that may be called in the thread of another one, but never twice at a time."""
    if stage is None:
        return None
    lock = threading.Lock()

    def call(data: Any) -> Any:
        with lock:
            return stage(data)

    return call


def memory_of(outputs: Any) -> weakref.ref[Any] | None:
    """The array or tensor in whose memory the outputs lie, by the first of them."""
    first = first_value(outputs)
    if type(first) in PLAIN:
        return None
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    array, tensor = getattr(numpy, "ndarray", ()), getattr(torch, "Tensor", ())
    base = first
    while base is not None:
        first = base
        if not isinstance(first, (array, tensor)):  # such as memory that is shared
            return None
        base = first._base if isinstance(first, tensor) else first.base
    return None if first is None else weakref.ref(first)
