"""Nested lists in JSON as flat ones, without an object for each of the lists. Pure.

[[1, 2], [3, 4]]  ──▶  skeleton [[,],[,]]  ──▶  are all lists of one depth alike?  ──▶  [1, 2, 3, 4]

14 MB of nested lists are millions, which take 6 s to make. All here are operations on bytes, each
of which takes milliseconds.

The texts given must be valid JSON, as ``msgspec.Raw`` is.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLANKS = b" \t\r\n"
_ALL_BUT_SKELETON = bytes({*range(256)} - {*b"[],"})

#: Bytes of a piece: they are decoded in about 2 ms. Other threads get the interpreter's lock then.
_PIECE = 64 << 10

#: In place of escaped backslashes and quotes. JSON has no such characters in a text.
_BACKSLASH, _QUOTE = b"\x00", b"\x01"


def flat_numbers(data: bytes, count: int, dimensions: int) -> bytes:
    """A list of numbers that may be nested, as a flat one.

    Args:
        count: the numbers that it should have.
        dimensions: lists may be nested so deep.

    Raises:
        ValueError: it has more numbers, or its lists are not alike, or nested deeper.
    """
    _check_count(data.count(b",") + 1, count)
    if data.count(b"[") < 2:
        return data
    _check_alike(data.translate(None, _ALL_BUT_SKELETON), dimensions)
    return b"[%b]" % data.translate(None, b"[]")


def flat_texts(data: bytes, count: int, dimensions: int) -> bytes:
    """As ``flat_numbers``, of texts, which may have brackets and commas in them."""
    masked = data.replace(b"\\\\", _BACKSLASH).replace(b'\\"', _QUOTE)
    _check_count(masked.count(b'"') // 2, count)
    parts = masked.split(b'"')  # every other one is a text
    between = [part.translate(None, _BLANKS) for part in parts[::2]]
    if b"[" not in b"".join((between[0][1:], *between[1:])):
        return data
    skeleton = b"".join(between)
    if skeleton.strip(b"[],"):
        raise ValueError("data must be a list of texts, or of lists of one depth")
    _check_alike(skeleton, dimensions)
    parts[::2] = [part.translate(None, b"[]") for part in between]
    flat = b'"'.join(parts).replace(_QUOTE, b'\\"').replace(_BACKSLASH, b"\\\\")
    return b"[%b]" % flat


def _check_count(found: int, count: int) -> None:
    """Before anything is made of them. Fewer are an error, too, but no cost."""
    if found > count:
        raise ValueError(f"its {found} elements are not the {count} of its shape")


def _check_alike(skeleton: bytes, dimensions: int) -> None:
    """Compare all lists of a depth with the first one. Raises ValueError."""
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    if depth > dimensions:
        raise ValueError(
            f"data: its lists are nested {depth} deep, but the shape has "
            f"{dimensions} dimension{'s' if dimensions > 1 else ''}"
        )
    first = b""
    for height in range(1, depth + 1):
        # Where the first list of this height ends, so many end together for the first time.
        end = skeleton.find(b"]" * height) + height
        whole = skeleton[depth - height : end]
        count = (len(whole) - 1) // (len(first) + 1)
        if whole != b"[%b]" % ((first + b",") * count)[:-1]:
            raise _unlike()
        first = whole
    if first != skeleton:
        raise _unlike()


def _unlike() -> ValueError:
    return ValueError("the lists within it differ in length")


def pieces(flat: bytes) -> Iterator[bytes]:
    """Lists that make up a flat list of numbers; a short one is the only piece."""
    start, end = 0, flat.find(b",", _PIECE)
    if end < 0:
        yield flat
        return
    while end >= 0:
        yield (b"%b]" if not start else b"[%b]") % flat[start:end]
        start = end + 1
        end = flat.find(b",", start + _PIECE)
    yield b"[%b" % flat[start:]
