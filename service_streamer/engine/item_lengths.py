"""What items cost: the user's function, found, called in the caller's thread, and checked.

A cost is a number in any unit, such as tokens, characters or pixels: what it is worth in seconds
the batcher learns. It is asked for in the web process, so nothing here builds or imports a model.
"""

from __future__ import annotations

import importlib
import numbers
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from ..managed_model import ManagedModel, find_length
from ..workers.batch_ceiling import Measure
from ..workers.runner import ItemCodec, describe
from .engine import Lengths

__all__ = ["Length", "find_function", "make_lengths", "make_measure"]

#: A function of an item, or where to import it: "package.module:function".
Length = Callable[[Any], float] | str

#: Longer is no item. The model of costs squares n times this, which has to stay finite.
_LONGEST = 1e15


def make_lengths(
    length: Length | None, model: object, codec: ItemCodec | None = None
) -> Lengths | None:
    """What gives the lengths of items; None if nobody has said what they are.

    Args:
        length: the user's, imported here if it is a string; None for that of the model's class.
        model: as the streamer was given it. One that is named by a string stays unknown here.
        codec: what items come encoded with; None if they come as they are.

    Raises:
        TypeError, ValueError: it is no function, and no place to import one from.
        ImportError, AttributeError: there is none at that place.
    """
    function: Callable[[Any], object]
    if isinstance(length, str):
        function, name = find_function(length), length
    elif length is not None:
        if not callable(length):
            raise TypeError(
                "length must be a function of an item, or an import string "
                f'"package.module:function"; not {length!r}'
            )
        function, name = length, describe(length)
    elif isinstance(model, type) and find_length(model) is not None:
        function, name = _of_class(model, "length"), f"{describe(model)}.length"
    else:
        return None
    return _measuring(function if codec is None else _decoding(function, codec), name)


def make_measure(length: Length | None) -> Measure | None:
    """The user's function for workers; None if there is none: they ask the model's class."""
    if length is None:
        return None
    return Measure(find_function(length) if isinstance(length, str) else length)


def find_function(place: str) -> Callable[[Any], object]:
    """Import a function of an item, or a method of a model's that needs no model.

    Raises:
        TypeError, ValueError: it is none, or no place to import from.
        ImportError, AttributeError: there is none at that place.
    """
    module, colon, names = place.partition(":")
    if not (module and colon and all(map(str.isidentifier, names.split(".")))):
        raise ValueError(f'length must look like "package.module:function", not {place!r}')
    *outer, name = names.split(".")
    owner: Any = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    if isinstance(owner, type) and issubclass(owner, ManagedModel):
        return _of_class(owner, name)
    function: Any = getattr(owner, name)
    if not callable(function):
        raise TypeError(f"length={place!r} is not a function, but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _of_class(model: Any, name: str) -> Callable[[Any], object]:
    """A method of a model's, which is called without a model."""
    found = find_length(model, name)
    if found is None:
        raise TypeError(f"{describe(model)} has no method {name!r} of an item")
    if isinstance(found, (staticmethod, classmethod)) or not hasattr(type(found), "__get__"):
        return getattr(model, name)  # type: ignore[no-any-return]
    why = (
        f"{describe(model)}.{name} needs an instance, and the web process builds none; make it a "
        "@staticmethod (or a @classmethod), or pass length="
    )
    try:
        bare = model.__new__(model)
    except Exception as error:
        raise TypeError(why) from error
    method = getattr(bare, name)

    def length(item: Any) -> object:
        try:
            return method(item)
        except AttributeError as error:
            if error.obj is not bare:
                raise
            raise TypeError(f"{why} (it asked for self.{error.name})") from error

    return length


def _decoding(function: Callable[[Any], object], codec: ItemCodec) -> Callable[[Any], object]:
    decode = codec.decode

    def length(payload: bytes) -> object:
        try:
            item = decode(payload)
        except (Exception, SystemExit):  # it fails in the worker, which says why
            return 0
        return function(item)

    return length


def _measuring(function: Callable[[Any], object], name: str) -> Lengths:
    def lengths(items: Sequence[Any]) -> list[float]:
        found: list[float] = []
        for item in items:
            number = function(item)
            # What nearly all return is looked at once.
            if (type(number) is int or type(number) is float) and 0 <= number <= _LONGEST:
                found.append(number)
            else:
                found.append(_checked(number, name, len(found)))
        return found

    return lengths


def _checked(number: object, name: str, position: int) -> float:
    text = (
        f"{name} must return a finite number of at least 0, and at most {_LONGEST:.0e}; for item "
        f"{position} of the call it returned {reprlib.repr(number)}"
    )
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(text)
    try:
        value = float(number)
    except (OverflowError, ValueError):
        raise ValueError(text) from None
    if not 0 <= value <= _LONGEST:
        raise ValueError(text)
    return value
