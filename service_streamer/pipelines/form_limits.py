"""Refuses JSON schemas and regular expressions that take seconds and gigabytes to build."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

#: Least common multiple of each ``multipleOf`` of a value: the automaton has a state for each
#: remainder. 10,000 of them take 30 ms to build, a million 9 seconds, and a hundred million ended
#: the process.
_MOST_REMAINDERS = 10_000

#: The same, of all values of a schema together.
_MOST_IN_ALL = 50_000

#: Schemas that a value must match at the same time: time and memory double with each. Eighteen
#: patterns take 5 seconds and 850 MB, ten of them some milliseconds.
_MOST_TOGETHER = 10

#: Digits of a ``multipleOf`` that is a fraction; also keeps huge exponents from being written out.
_MOST_DIGITS = 20

_JOINING = ("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf")

#: Names whose schemas are for the same value as the one that they stand in.
_MERGING = (*_JOINING, "if", "then", "else", "not", "dependentSchemas", "dependencies")

#: Names of objects whose members are schemas.
_NAMED = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
)  # fmt: skip

#: Names of values that are no schemas, whatever they look like.
_VALUES = ("default", "enum", "const", "examples")

#: Names that ask nothing of a value, or nothing of its members.
_WITHOUT_EFFECT = (
    "$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "type",
)  # fmt: skip


def schema_obstacle(schema: object) -> str:
    """Why a schema may not be used; empty if it may."""
    parts = _schemas(schema, schema)
    if parts is None:
        parts = list(_objects(schema))  # any of them may be meant
        groups = [parts]
    else:
        groups = [parts] if _are_small(parts) else _merged(parts, schema)
    together = 0
    patterns: list[str] = []
    for part in parts:
        branches = part.get("allOf")
        together += len(branches) - 1 if isinstance(branches, list) and branches else 0
        is_pattern = isinstance(part.get("pattern"), str) or isinstance(part.get("format"), str)
        together += is_pattern and any(name in part for name in _JOINING)
        patterns += [part["pattern"]] if isinstance(part.get("pattern"), str) else []
        named = part.get("patternProperties")
        patterns += named if isinstance(named, Mapping) else []
    if together > _MOST_TOGETHER:
        return (
            f"has {together} schemas that a value must match at the same time (allOf, or a pattern "
            f"beside another schema), more than {_MOST_TOGETHER}"
        )
    if wrong := regex_obstacle(*patterns):
        return f"pattern: {wrong}"
    if not all(map(_are_small, groups)):
        return (
            "multipleOf: the least common multiple of numbers that a value must match together is "
            f"above {_MOST_REMAINDERS:,}"
        )
    if sum({math.lcm(*_scaled(group)) for group in groups}) > _MOST_IN_ALL:
        return f"multipleOf: the numbers add up to more than {_MOST_IN_ALL:,}"
    return ""


def _schemas(schema: object, root: object) -> list[Mapping[str, Any]] | None:
    """A schema, and all in it or that it refers to; values such as a default are none.

    None if it refers to something that is not found by its path.
    """
    found: list[Mapping[str, Any]] = []
    known: set[int] = set()
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += each
        if not isinstance(each, Mapping) or id(each) in known:
            continue
        known.add(id(each))
        found.append(each)
        if each is not root and isinstance(each.get("$id"), str):
            return None  # paths in it begin there
        for name, value in each.items():
            if name in _NAMED and isinstance(value, Mapping):
                todo += value.values()
            elif name in ("$ref", "$dynamicRef") and isinstance(value, str):
                target = _target(root, value) if name == "$ref" else None
                if target is None:
                    return None
                todo.append(target)
            elif name not in _VALUES:
                todo.append(value)
    return found


def _target(root: object, path: str) -> object:
    """What is at a path such as #/$defs/name; None if nothing is, or it is no such path."""
    if path != "#" and not path.startswith("#/"):
        return None
    each: Any = root
    for step in unquote(path).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(each, Mapping):
            each = each.get(name)
        elif isinstance(each, list) and name.isdecimal() and int(name[:9]) < len(each):
            each = each[int(name[:9])]
        else:
            return None
    return each


def _merged(parts: list[Mapping[str, Any]], root: object) -> list[list[Mapping[str, Any]]]:
    """Groups of schemas that a value may have to match at the same time.

    Where several schemas are for one value, those of its members may also be for one member.
    """
    groups = []
    for part in parts:
        joining = [name for name in _MERGING if name in part]
        other = part.keys() - {*_MERGING, *_VALUES, *_WITHOUT_EFFECT}
        branches = part.get("allOf")
        is_several = isinstance(branches, list) and len(branches) > 1
        if "patternProperties" in part or (joining and (other or is_several or len(joining) > 1)):
            groups.append(_schemas(part, root) or parts)
        else:
            groups.append([part])
    return groups


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


def _are_small(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the least common multiple of all their ``multipleOf`` is."""
    factors = _factors(parts)
    if not factors:
        return True
    try:
        digits = max(-int(factor.as_tuple().exponent) for factor in factors)
        if digits > _MOST_DIGITS or max(factors) > _MOST_REMAINDERS:
            return False
        return math.lcm(*_scaled(parts)) <= _MOST_REMAINDERS
    except (InvalidOperation, ValueError):  # infinite, or not a number
        return False


def _scaled(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    factors = _factors(parts)
    digits = max((-int(factor.as_tuple().exponent) for factor in factors), default=0)
    return [int(factor.scaleb(max(0, digits))) for factor in factors]


def _factors(parts: Sequence[Mapping[str, Any]]) -> list[Decimal]:
    found = (part.get("multipleOf") for part in parts)
    return [
        Decimal(str(each))
        for each in found
        if isinstance(each, (int, float)) and not isinstance(each, bool) and each > 0
    ]


# -- regular expressions


#: Characters of an expression whose counted repetitions are written out, as ``(ab){3}`` is ababab.
#: 10,000 of them take 8 ms, 100,000 take 90 ms, and a million 0.7 seconds and 140 MB.
_MOST_WRITTEN = 20_000

_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")

#: A group with a flag that makes blanks and comments mean nothing: what a count repeats is then
#: hard to say.
_SPACED = re.compile(r"\(\?[a-zA-Z-]*x")

#: What is one character of the text, although it has several letters, and the rest one by one.
_ATOM = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|.", re.DOTALL)


def regex_obstacle(*patterns: str) -> str:
    """Why regular expressions may not be used together; empty if they may."""
    sizes = [_written(pattern) for pattern in set(patterns)]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return "has the flag x; write it without blanks and comments"
    if sum(known) <= _MOST_WRITTEN:
        return ""
    return (
        f"has repetitions that are more than {_MOST_WRITTEN:,} characters together when they are "
        "written out, those within others multiplied; make the numbers in braces smaller"
    )


def _written(pattern: str) -> int | None:
    """How long it is when its repetitions are written out; of alternatives all count.

    None if it has the flag x.
    """
    sizes = [0]  # of the groups that are open
    last = at = 0  # the size of what a count behind it repeats
    while at < len(pattern):
        count = _COUNT.match(pattern, at)
        if count is not None:
            times = max(_number(count[1]), _number(count[2] or ""), 1)
            sizes[-1] += last * (times - 1)
            last *= times
            at = count.end()
            continue
        if pattern[at] == "[":
            at = _class_end(pattern, at)
            last = 1
            sizes[-1] += last
            continue
        found = _ATOM.match(pattern, at)
        atom = found[0] if found else pattern[at]
        at += len(atom)
        if atom == "(":
            if _SPACED.match(pattern, at - 1):
                return None
            sizes.append(0)
            last = 0
        elif atom == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif atom not in "*+?":  # those leave what they repeat, which a count may follow
            last = 1
            sizes[-1] += last
    return sum(sizes)


def _class_end(pattern: str, start: int) -> int:
    """Where a class of characters ends, such as [a-z], which may have others in it."""
    depth, at = 0, start
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "[":
            depth += 1
            # A bracket at the beginning is one of the characters.
            if pattern[at + 1 : at + 2] == "^":
                at += 1
            if pattern[at + 1 : at + 2] == "]":
                at += 1
        elif letter == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _number(digits: str) -> int:
    digits = digits.lstrip("0")
    return int(digits or 0) if len(digits) < 12 else 10**12  # Python refuses thousands of digits
