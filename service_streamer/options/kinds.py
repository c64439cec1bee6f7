"""What values an option may have, how it is declared, and the objects that options travel in.

Each kind checks a value, and says in words what it must be. An option is a field of a frozen
dataclass in ``table``, whose metadata has its kind and says what it does. A class that has the
option with another default, check or sentence declares it again. Docstrings, reference pages and
the command line are derived from that.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from .checks import LONGEST_TENANT, LONGEST_WAIT, is_sequence

_SHORTEST_SECRET = 16

#: What CUDA_VISIBLE_DEVICES takes: indices, GPU or MIG identifiers, several with commas between.
_DEVICE_NAME = re.compile(r"(cuda:)?\d+(,\d+)*|(GPU|MIG)-[\w/-]+(,(GPU|MIG)-[\w/-]+)*|cpu")


@dataclass(frozen=True)
class Kind:
    """Which values an option may have, and what they must be in words.

    Attributes:
        form: how values are written outside of Python: see ``serve.cli.written``.
        words: what a value must be, such as "a whole number of at least 1".
        types: other values are of the wrong type. True and False are only of ``bool``.
        is_valid: whether a value of these types is in range.
        normalize: makes of a valid value the one that the package uses, or raises what ``convert``
            does.
        none: what None stands for, such as "no bound"; empty if None is not allowed.
        auto: whether "auto" is allowed.
        among: all strings that it may be, if it is one of a few.
    """

    form: str
    words: str
    types: tuple[Any, ...] = (object,)
    is_valid: Callable[[Any], bool] = lambda _: True
    normalize: Callable[[Any], Any] = lambda value: value
    none: str = ""
    auto: bool = False
    among: tuple[str, ...] = ()

    def or_none(self, stands_for: str) -> Kind:
        """The same, or None."""
        return replace(self, none=stands_for)

    def or_auto(self) -> Kind:
        """The same, or the word "auto"."""
        return replace(self, auto=True)

    def check(self, name: str, value: Any) -> Any:
        """The value of the option ``name``, as the package uses it.

        Raises:
            TypeError, ValueError: it is of the wrong type or out of range.
        """
        if value is None and self.none:
            return None
        if self.auto and isinstance(value, str) and value == "auto":
            return value
        try:
            return self.convert(value)
        except (TypeError, ValueError) as error:
            others = ['"auto"'] * self.auto + [f"None for {self.none}"] * bool(self.none)
            text = f"must be {', or '.join([self.words, *others])}; not {value!r}"
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name} {str(error) or text}") from None

    def convert(self, value: Any) -> Any:
        """The checked value. An error's text goes behind the name; one without gets ``words``."""
        is_wrong = isinstance(value, bool) and bool not in self.types
        if is_wrong or not isinstance(value, self.types):
            raise TypeError
        if not self.is_valid(value):
            raise ValueError
        return self.normalize(value)


FLAG = Kind("flag", "True or False", (bool,))
#: Another word than "auto" is a ``ValueError``, not a ``TypeError``.
FLAG_OR_AUTO = Kind(
    "flag", "True or False", (bool, str), lambda value: isinstance(value, bool), auto=True
)


def count(least: float = 1, most: float = math.inf, *, more: str = "") -> Kind:
    """A whole number; ``more`` ends its words."""
    words = f"a whole number of at least {least}" if least > -math.inf else "a whole number"
    if most < math.inf:
        words = f"a whole number from {least} to {most}"
    types = (int, numbers.Integral)
    return Kind("count", words + more, types, lambda value: bool(least <= value <= most))


def _least_and_most(value: Any) -> Any:
    if not is_sequence(value):
        return int(count().convert(value))
    if len(value) != 2:
        raise ValueError
    least, most = (int(count().convert(each)) for each in value)
    if least > most:
        raise ValueError
    return least, most


#: A number of workers, or the least and the most in a tuple.
WORKERS = Kind(
    "workers",
    "a whole number of at least 1, or the least and the most, such as (1, 16)",
    normalize=_least_and_most,
)


def number(
    *,
    zero: bool = False,
    noun: str = "a finite number",
    most: float = 1e300,  # arbitrary: a multiple of it is finite, too
    form: str = "number",
) -> Kind:
    """A finite number above 0, or with ``zero`` of at least 0."""

    def normalize(value: Any) -> float:
        if not value <= most:
            raise ValueError(f"must be {words}, and at most {most:.0e}; not {value}")
        return float(value)

    words = f"{noun} {'of at least' if zero else 'above'} 0"
    types = (float, numbers.Real)
    return Kind(form, words, types, lambda value: not value < 0 and (zero or value != 0), normalize)


def seconds(*, zero: bool = False) -> Kind:
    """A time that the operating system can wait for."""
    return number(zero=zero, noun="a number of seconds", most=LONGEST_WAIT, form="seconds")


#: How long something may take.
TIME_LIMIT = seconds().or_none("no limit")
#: How long a caller waits for something to end.
PATIENCE = seconds(zero=True).or_none("no limit")


def named_numbers(*, zero: bool = False) -> Kind:
    """Numbers by name; None for none."""
    each = number(zero=zero, noun="a dict of numbers")

    def normalize(value: Any) -> dict[str, float]:
        if value is None:
            return {}
        if not all(isinstance(name, str) for name in value):
            raise TypeError
        longest = max(map(len, value), default=0)
        if longest > LONGEST_TENANT:
            raise ValueError(f"has a name of {longest} characters; {LONGEST_TENANT} are the most")
        return {name: each.convert(amount) for name, amount in value.items()}

    types = (Mapping, type(None))
    return Kind("numbers", f"{each.words}, by name", types, normalize=normalize)


def text(pattern: str = ".*", words: str = "a string") -> Kind:
    """A string, perhaps of some pattern."""
    fits = re.compile(pattern, re.DOTALL).fullmatch
    return Kind("text", words, (str,), lambda value: fits(value) is not None)


#: The name of a shared pool, which is also that of its files.
POOL_NAME = text(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    "a name of 1 to 64 letters, digits, '.', '_' and '-' that starts with a letter or digit",
)


def choice(*among: str) -> Kind:
    """One of several strings."""
    words = f"one of {', '.join(among)}"
    return Kind("choice", words, is_valid=among.__contains__, among=among)


def _devices(value: Any) -> Any:
    if not is_sequence(value):
        raise TypeError(f'must be a list or tuple of devices, "auto" or None; not {value!r}')
    if not len(value):
        raise ValueError
    for device in value:
        text = (
            f"has the entry {device!r}, which must be a GPU number such as 0, a string such as "
            '"0" or "GPU-1a2b", or "cpu"'
        )
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise TypeError(text)
        if not _DEVICE_NAME.fullmatch(str(device)):
            raise ValueError(text)
    return value


#: What CUDA_VISIBLE_DEVICES takes.
DEVICES = Kind(
    "devices", 'GPU numbers such as 0,1, strings such as "GPU-1a2b", or cpu', normalize=_devices
)


def _sequence(value: Any) -> Any:
    if not is_sequence(value):
        raise TypeError
    return value


#: Arguments for a model: positional ones, and by name.
ARGUMENTS = Kind("arguments", "a list or tuple", normalize=_sequence)
NAMED_ARGUMENTS = Kind("arguments", "a dict", (Mapping,))

#: An import string is looked at when it is imported.
FUNCTION = Kind(
    "function", 'a function, or an import string "package.module:function"', (str, Callable)
)


def file(*, exists: bool = False) -> Kind:
    """The path of a file that can be made; with ``exists`` of one that is there."""

    def normalize(value: Any) -> Path:
        path = Path(value)
        if not path.parent.is_dir():
            raise ValueError(f"must be in a folder that exists; not in {str(path.parent)!r}")
        if path.is_dir():
            raise ValueError(f"must be the path of a file, and {str(path)!r} is a folder")
        if exists and not path.exists():
            raise ValueError(f"must be the path of a file that exists; not {str(path)!r}")
        return path

    return Kind("file", "the path of a file", (str, os.PathLike), normalize=normalize)


#: Where Ray places workers: a word, or an object of Ray's, which Ray itself looks at.
STRATEGY = Kind(
    "strategy",
    '"DEFAULT", "SPREAD" or an object of Ray\'s',
    is_valid=lambda value: not isinstance(value, str) or value in ("DEFAULT", "SPREAD"),
)

#: Looked at when it is connected to.
BROKER = Kind("broker", "an address of Redis, or a redis.Redis client")


def _secret(value: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        raise TypeError("must be a string or bytes")
    length = len(value.encode() if isinstance(value, str) else value)
    if length < _SHORTEST_SECRET:
        raise ValueError(
            f"has {length} bytes, and {_SHORTEST_SECRET} are the least; make one "
            'with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return value


#: A string or bytes, long enough to sign with. It is never part of a message.
SECRET = Kind("text", f"a string of at least {_SHORTEST_SECRET} bytes", normalize=_secret)


def _error_types(value: Any) -> Any:
    for each in value:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise TypeError(f"must be {ERROR_TYPES.words}; {each!r} is none")
    return value


#: Classes of exceptions.
ERROR_TYPES = Kind(
    "text", "a tuple or list of exception classes", (tuple, list), normalize=_error_types
)


@dataclass(frozen=True)
class Option:
    """What is known of an option."""

    name: str  # that of its field, and of its argument in constructors
    default: Any  # what holds if it is not given
    kind: Kind  # which values it may have
    help: str  # what it does, in one plain sentence
    more: str = ""  # what else a user should know, in a few sentences
    shown: str = ""  # the default in words, if its value says too little


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
            value = each.kind.check(each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, value)

    @classmethod
    def select(cls, given: Options | Mapping[str, Any], **changes: Any) -> Self:
        """Those of another object, or of a dictionary, that this class has too.

        Args:
            changes: values that are not taken from there.
        """
        values = given if isinstance(given, Mapping) else vars(given)
        known = {each.name for each in options_of(cls)}
        return cls(**{name: values[name] for name in known & values.keys()} | changes)

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The values by name, for a constructor or function that has some of them."""
        return {each.name: getattr(self, each.name) for each in options_of(self, function)}


def options_of(
    of: Options | type[Options], function: Callable[..., Any] | None = None
) -> Iterator[Option]:
    """The options of a class in order, or those of them that a constructor or function has."""
    names = None if function is None else inspect.signature(function).parameters
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
