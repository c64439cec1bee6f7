"""Refuses regular expressions that take long and much memory when they are written out."""

from __future__ import annotations

import re

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
