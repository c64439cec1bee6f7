"""Models that take and return tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from models import NothingToLoad


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
