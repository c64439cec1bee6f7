"""A request inside a worker, and the call of a pipeline for several requests."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

__all__ = ["Request", "call_pipeline", "plain"]

_numbers = itertools.count()


class Request:
    """One item of a batch.

    Attributes:
        do: the operation.
        inputs: as sent; decoded by the handler's ``prepare``.
        parameters: checked.
        tokens: number of tokens of the inputs, once counted.
        key: requests with the same key are computed together.
    """

    __slots__ = ("do", "inputs", "key", "parameters", "tokens")

    def __init__(self, do: str, inputs: Any, parameters: dict[str, Any]) -> None:
        self.do = do
        self.inputs = inputs
        self.parameters = parameters
        self.tokens = 0
        self.key: Hashable = None

    def group_by(self, options: Mapping[str, Any], *more: Hashable) -> None:
        """Share a batch with requests that have the same options, and the same ``more``."""
        self.key = (self.do, tuple(sorted(options.items())), more)

    def be_alone(self) -> None:
        """Share a batch with no other request."""
        self.key = next(_numbers)


def call_pipeline(
    pipeline: Any, inputs: list[Any], options: Mapping[str, Any], batch_size: int
) -> list[Any]:
    """Call a transformers pipeline; one output per input.

    A single input is passed alone: pipelines return another form for it.
    """
    options = {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    if len(inputs) == 1:
        return [pipeline(inputs[0], batch_size=batch_size, **options)]
    return list(pipeline(inputs, batch_size=batch_size, **options))


def plain(value: Any) -> Any:
    """A result as JSON data: numpy and torch values become numbers and lists.

    Other values stay as they are.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {plain(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is float and type(value[-1]) is float:
            return value  # an embedding: already plain floats
        return [plain(each) for each in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()
