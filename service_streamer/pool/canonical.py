"""Values in words that two processes can compare: equal if the values are equal.

A pickle is not such a word: it has sets in the order of hashes, which each process draws anew, and
tensors with addresses.
"""

from __future__ import annotations

import copyreg
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..workers.model_spec import describe
from .model_code import digest

_PLAIN = (str, bytes, int, float, complex, bool, type(None))

#: Characters from which on the words of a part are replaced by a digest.
_LONG = 1000


def canonical(value: Any) -> str:
    """The value in words.

    An object is known by its class and by what its pickle would be made of, tensors and arrays by
    their bytes. What cannot be pickled is known by its class only.
    """
    return _Walk().words(value)


class _Walk:
    """Through all that a value is made of, each part once."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # what contains the current part: its depth, by identity
        self._done: dict[int, tuple[Any, str]] = {}  # with the part, so that it keeps its identity

    def words(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        key = id(value)
        if key in self._done:
            return self._done[key][1]
        if key in self._open:  # a circle: which one it is, counted from here
            return f"^{len(self._open) - self._open[key]}"
        self._open[key] = len(self._open)
        try:
            words = self._of_parts(value)
        finally:
            del self._open[key]
        if self._open and len(words) > _LONG:
            words = digest(words.encode())
        self._done[key] = value, words
        return words

    def _of_parts(self, value: Any) -> str:
        words = self.words
        if isinstance(value, Mapping):
            pairs = sorted(f"{words(key)}: {words(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(words, value)))}}}"
        content = _content(value)
        if content is not None:
            return f"{describe(type(value))} {digest(content)}"
        if isinstance(value, Sequence):  # a list and a tuple of options mean the same
            return f"[{', '.join(map(words, value))}]"
        if isinstance(value, os.PathLike):
            return repr(os.fspath(value))
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            owner = getattr(value, "__self__", None)
            if owner is None or isinstance(owner, type):
                return describe(value)
            return f"{describe(value)} of {words(owner)}"
        kind = describe(type(value))
        try:
            parts = [words(each) for each in _parts(value)]
        except Exception:  # it is refused elsewhere, with more words
            return kind
        return f"{kind} {digest(repr(parts).encode())}"


def _parts(value: Any) -> Iterator[Any]:
    """What makes up an object."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
    if isinstance(reduced, str):  # the name of a constant
        yield reduced
        return
    for part in reduced:  # the items of a list or a mapping come in iterators
        yield [*part] if isinstance(part, Iterator) else part


def _content(value: Any) -> bytes | None:
    """The kind, the shape and the bytes of a tensor or an array; None of anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return f"{value.dtype} {(*value.shape,)} ".encode() + bytes(flat.numpy())
        except Exception:  # a sparse one, or one without data
            return f"{value.dtype} {(*value.shape,)}".encode()
    try:
        view = memoryview(value)
    except TypeError:
        return None
    if "O" in view.format:  # of objects, whose addresses say nothing
        return None
    return f"{view.format} {view.shape} ".encode() + view.tobytes()
