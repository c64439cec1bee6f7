"""Refuses JSON schemas whose automaton would take seconds and gigabytes to build."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

__all__ = ["schema_obstacle"]

#: Least common multiple of all ``multipleOf``: the automaton has a state for each remainder.
#: 10,000 of them take 30 ms to build, a million 9 seconds, and a hundred million ended the process.
_MOST_REMAINDERS = 10_000

#: Schemas that a value must match at the same time: time and memory double with each. Eighteen
#: patterns take 5 seconds and 850 MB, ten of them some milliseconds.
_MOST_TOGETHER = 10

#: Digits of a ``multipleOf`` that is a fraction; also keeps huge exponents from being written out.
_MOST_DIGITS = 20

_JOINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf")


def schema_obstacle(schema: object) -> str:
    """Why a schema may not be used; empty if it may."""
    together = 0
    factors: list[Decimal] = []
    for part in _objects(schema):
        branches = part.get("allOf")
        together += len(branches) - 1 if isinstance(branches, list) and branches else 0
        is_pattern = isinstance(part.get("pattern"), str) or isinstance(part.get("format"), str)
        together += is_pattern and any(name in part for name in _JOINING)
        factor = part.get("multipleOf")
        if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0:
            factors.append(Decimal(str(factor)))
    if together > _MOST_TOGETHER:
        return (
            f"has {together} schemas that a value must match at the same time (allOf, or a pattern "
            f"beside another schema), more than {_MOST_TOGETHER}"
        )
    if factors and not _are_small(factors):
        return f"multipleOf: the numbers' least common multiple is above {_MOST_REMAINDERS:,}"
    return ""


def _objects(schema: object) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema, also those that are values: which does no harm."""
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, Mapping):
            yield each
            todo += each.values()
        elif isinstance(each, list):
            todo += each


def _are_small(factors: list[Decimal]) -> bool:
    try:
        digits = max(-int(factor.as_tuple().exponent) for factor in factors)
        if digits > _MOST_DIGITS or max(factors) > _MOST_REMAINDERS:
            return False
        scaled = [int(factor.scaleb(max(0, digits))) for factor in factors]
    except (InvalidOperation, ValueError):  # infinite, or not a number
        return False
    return math.lcm(*scaled) <= _MOST_REMAINDERS
