"""Reads what a streamer with ``trace=`` has recorded."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..observe.record import ORDINARY, Precedence
from .loads import Arrival

__all__ = ["read_trace"]


def read_trace(path: str | os.PathLike[str]) -> list[Arrival]:
    """The calls of a trace, in the order of its lines.

    Args:
        path: of the file: one line of JSON for each call, such as ``{"at": 0.0015, "items": 2}``;
            "lengths", "priority" and "tenant" may be there, too. Empty lines are skipped.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is none of a trace; its message has the file and the line.
    """
    arrivals = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                arrivals.append(_arrival(json.loads(line)))
            except ValueError as error:
                what = "no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                raise ValueError(f"{path}, line {number}: {what}") from None
    return arrivals


def _arrival(found: Any) -> Arrival:
    if not isinstance(found, dict):
        raise ValueError('not an object such as {"at": 0.0015, "items": 2}')
    items = found.get("items", 1)
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise ValueError(f'"items" must be a whole number of at least 1, not {items!r}')
    lengths = found.get("lengths")
    if lengths is not None:
        if not isinstance(lengths, list) or len(lengths) != items:
            raise ValueError(f'"lengths" must be a list of {items}, one for each item')
        lengths = [_number(length, "a length") for length in lengths]
    priority, tenant = found.get("priority", 0), found.get("tenant", "")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f'"priority" must be a whole number, not {priority!r}')
    if not isinstance(tenant, str):
        raise ValueError(f'"tenant" must be a string, not {tenant!r}')
    precedence = Precedence(priority, tenant) if priority or tenant else ORDINARY
    return Arrival(_number(found.get("at"), '"at"'), items, lengths, precedence)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)
