"""How an option is declared, and the base class of the objects that options travel in.

An option is a field of a frozen dataclass in ``table``. Its metadata says the rest: what values it
may have, and what it does. A class that has the option with another default, check or sentence
declares it again. Docstrings, reference pages and the command line are derived from that.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from .kinds import Kind


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option.

    Attributes:
        name: that of its field, and of its argument in constructors.
        default: what holds if it is not given.
        kind: which values it may have.
        help: what it does, in one plain sentence.
        more: what else a user should know, in a few sentences.
        shown: the default in words, if its value says too little.
    """

    name: str
    default: Any
    kind: Kind
    help: str
    more: str = ""
    shown: str = ""


def option(
    default: Any,
    kind: Kind,
    help: str,  # noqa: A002
    more: str = "",
    *,
    shown: str = "",
    is_private: bool = False,
) -> Any:
    """A field of an ``Options`` class; for the arguments see ``Option``.

    Args:
        is_private: whether it may hold a password or key, so that no ``repr`` shows it.
    """
    metadata = {"kind": kind, "help": help, "more": more, "shown": shown}
    return field(default=default, repr=not is_private, metadata=metadata)


def changed(group: type[Options], name: str, **changes: Any) -> Any:
    """The field of an option of another class, with some of what is known of it changed."""
    [found] = [each for each in fields(group) if each.name == name]  # type: ignore[arg-type]
    default = changes.pop("default", found.default)
    return field(default=default, repr=found.repr, metadata={**found.metadata, **changes})


class Options:
    """A frozen object of options. Every value is checked when it is built.

    Raises:
        TypeError, ValueError: a value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if value is not each.default or value is None:
                object.__setattr__(self, each.name, each.kind.check(each.name, value))

    @classmethod
    def select(cls, given: Options | Mapping[str, Any], **changes: Any) -> Self:
        """Those of another object, or of a dictionary, that this class has too.

        Args:
            changes: values that are not taken from there.
        """
        values = given if isinstance(given, Mapping) else vars(given)
        known = {each.name for each in options_of(cls)}
        return cls(**{name: values[name] for name in known & values.keys()} | changes)

    def arguments(self, constructor: type) -> dict[str, Any]:
        """The values by name, for a constructor that has some of them."""
        return {each.name: getattr(self, each.name) for each in options_of(self, constructor)}


def options_of(of: Options | type[Options], constructor: type | None = None) -> Iterator[Option]:
    """The options of a class in order, or those of them that a constructor has."""
    names = None if constructor is None else inspect.signature(constructor).parameters
    for each in fields(of):  # type: ignore[arg-type]
        if "kind" in each.metadata and (names is None or each.name in names):
            yield Option(each.name, each.default, **each.metadata)


_Class = TypeVar("_Class", bound=type)


def documented(options: type[Options]) -> Callable[[_Class], _Class]:
    """Add the options of a class's constructor to the section "Args" of its docstring."""

    def add(cls: _Class) -> _Class:
        if cls.__doc__ is not None:  # it is with python -OO
            cls.__doc__ = with_arguments(cls.__doc__, options, inspect.signature(cls).parameters)
        return cls

    return add


def with_arguments(docstring: str, options: type[Options], names: Iterable[str]) -> str:
    """A docstring of Google's style, with a line in "Args" for each of some options."""
    known = {each.name: each for each in options_of(options)}
    entries = [
        textwrap.fill(
            f"{name}: {known[name].help}", 96, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
        for name in names if name in known
    ]  # fmt: skip
    own, raises, errors = inspect.cleandoc(docstring).partition("\n\nRaises:\n")
    head = [] if "\n\nArgs:\n" in own else ["\nArgs:"]
    return "\n".join([own, *head, *entries]) + raises + errors
