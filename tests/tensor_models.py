"""Models that take and return tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from models import Echoing, NothingToLoad


def twice(batch: list[Any]) -> list[Any]:
    return [2 * item for item in batch]


def echo(batch: list[Any]) -> list[Any]:
    return list(batch)


class Rows(NothingToLoad):
    """Tells of each item whether it is a row of one array, and its sum."""

    inputs = (("x", "FP32", (-1, 3, -1)),)
    outputs = (("rows", "INT32", (-1,)), ("sum", "FP32", (-1,)))
    stack = True

    def predict(self, batch: Any) -> list[Any]:
        return [{"rows": len(batch), "sum": row.sum()} for row in batch]


class Added(NothingToLoad):
    """Adds two inputs."""

    inputs = (("a", "INT64", (-1, 2)), ("b", "INT64", (-1, 2)))
    outputs = (("sum", "INT64", (-1, 2)), ("names", "BYTES", (-1,)))

    def predict(self, batch: list[Any]) -> list[Any]:
        return [{"sum": item["a"] + item["b"], "names": f"{item['a']}"} for item in batch]


class Lying(NothingToLoad):
    """Returns something else than it declares."""

    outputs = (("y", "FP32", (-1, 2)),)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [np.zeros(3, np.float32) for _ in batch]


class Undeclarable(NothingToLoad, Echoing):
    """Declares what is no tensor."""

    inputs = (("x", "float32", (-1,)),)


class Counting(NothingToLoad):
    """A model of steps: counts to the item."""

    def start(self, items: list[Any]) -> list[list[int]]:
        return [[0, int(item)] for item in items]

    def step(self, states: list[list[int]]) -> list[tuple[Any, bool]]:
        found = []
        for state in states:
            state[0] += 1
            found.append((state[0], state[0] == state[1]))
        return found


class Viewed(NothingToLoad):
    """Tells of each item whether its batch is a view of memory that was there."""

    stack = True

    def predict(self, batch: Any) -> list[bool]:
        return [not batch.flags.owndata] * len(batch)
