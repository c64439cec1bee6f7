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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from .checks import LONGEST_TENANT, LONGEST_WAIT, is_sequence

_SHORTEST_SECRET = 16

#: What CUDA_VISIBLE_DEVICES takes: indices, GPU or MIG identifiers, several with commas between.
_DEVICE_NAME = re.compile(r"(cuda:)?\d+(,\d+)*|(GPU|MIG)-[\w/-]+(,(GPU|MIG)-[\w/-]+)*|cpu")


@dataclass(frozen=True)
class Kind:
    """Any value."""

    none: str = ""  # what None stands for, such as "no bound"; empty if None is not allowed
    auto: bool = False  # whether "auto" is allowed

    types: ClassVar[tuple[Any, ...]] = (object,)  # True and False are only of ``bool``

    @property
    def words(self) -> str:
        """What a value must be, such as "a whole number of at least 1"."""
        return "a value"

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
        if not isinstance(value, self.types) or isinstance(value, bool) > (bool in self.types):
            raise TypeError
        if not self.is_valid(value):
            raise ValueError
        return value

    def is_valid(self, value: Any) -> bool:
        """Whether a value of the right type is in range."""
        return value is not None


class Flag(Kind):
    words = "True or False"
    types = (bool,)

    def convert(self, value: Any) -> Any:
        if self.auto and isinstance(value, str):  # no wrong type, where "auto" would be right
            raise ValueError
        return super().convert(value)


@dataclass(frozen=True)
class Count(Kind):
    """A whole number."""

    least: float = 1
    most: float = math.inf
    unit: str = ""  # "bytes", say
    note: str = ""  # why it is no more than that, for instance

    types = (int, numbers.Integral)

    @property
    def words(self) -> str:
        bounds = f" of at least {self.least}" if self.least > -math.inf else ""
        if self.most < math.inf:
            bounds = f" from {self.least} to {self.most}"
        unit = f", in {self.unit}" if self.unit else ""
        return f"a whole number{bounds}{unit}" + (f" ({self.note})" if self.note else "")

    def is_valid(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most)


class WorkerNumber(Kind):
    """A number of workers, or the least and the most in a tuple."""

    words = "a whole number of at least 1, or the least and the most, such as (1, 16)"

    def convert(self, value: Any) -> Any:
        if not is_sequence(value):
            return int(Count().convert(value))
        if len(value) != 2:
            raise ValueError
        least, most = (int(Count().convert(each)) for each in value)
        if least > most:
            raise ValueError
        return least, most


@dataclass(frozen=True)
class Number(Kind):
    """A finite number above 0, or with ``zero`` of at least 0."""

    zero: bool = False
    most: float = 1e300  # arbitrary: a multiple of it is finite, too

    types = (float, numbers.Real)
    noun = "a finite number"

    @property
    def words(self) -> str:
        return f"{self.noun} {'of at least' if self.zero else 'above'} 0"

    def convert(self, value: Any) -> Any:
        if super().convert(value) > self.most:
            raise ValueError(f"must be {self.words}, and at most {self.most:.0e}; not {value}")
        return float(value)

    def is_valid(self, value: Any) -> bool:
        return bool(value > 0 or (self.zero and value == 0))


@dataclass(frozen=True)
class Seconds(Number):
    most: float = LONGEST_WAIT

    noun = "a number of seconds"


#: How long a caller waits for something to end.
PATIENCE = Seconds(none="no limit", zero=True)


class Numbers(Number):
    """Numbers by name; None for none."""

    noun = "a dict of numbers"

    @property
    def words(self) -> str:
        return f"{super().words}, by name"

    def check(self, name: str, value: Any) -> Any:
        return super().check(name, {} if value is None else value)

    def convert(self, value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise TypeError
        longest = max(map(len, value), default=0)
        if longest > LONGEST_TENANT:
            raise ValueError(f"has a name of {longest} characters; {LONGEST_TENANT} are the most")
        convert = super().convert
        return {name: convert(number) for name, number in value.items()}


@dataclass(frozen=True)
class Text(Kind):
    """A string, perhaps of some pattern."""

    pattern: str = ".*"
    words: str = "a string"

    types = (str,)

    def is_valid(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value, re.DOTALL) is not None


#: The name of a shared pool, which is also that of its files.
POOL_NAME = Text(
    pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    words="a name of 1 to 64 letters, digits, '.', '_' and '-' that starts with a letter or digit",
)


@dataclass(frozen=True)
class Choice(Kind):
    """One of several strings."""

    among: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.among)}"

    def is_valid(self, value: Any) -> bool:
        return value in self.among


class Devices(Kind):
    words = 'GPU numbers such as 0,1, strings such as "GPU-1a2b", or cpu'

    def convert(self, value: Any) -> Any:
        if not is_sequence(value):
            raise TypeError(f'must be a list or tuple of devices, "auto" or None; not {value!r}')
        for device in value:
            if isinstance(device, bool) or not isinstance(device, (int, str)):
                raise TypeError
        return super().convert(value)

    def is_valid(self, value: Any) -> bool:
        return len(value) > 0 and all(_DEVICE_NAME.fullmatch(str(device)) for device in value)


@dataclass(frozen=True)
class Arguments(Kind):
    """Arguments for a model: a list or tuple, or with ``named`` a dict."""

    named: bool = False

    @property
    def words(self) -> str:
        return "a dict" if self.named else "a list or tuple"

    def convert(self, value: Any) -> Any:
        if not (isinstance(value, Mapping) if self.named else is_sequence(value)):
            raise TypeError
        return value


class Function(Kind):
    """An import string is looked at when it is imported."""

    words = 'a function, or an import string "package.module:function"'
    types = (str, Callable)


@dataclass(frozen=True)
class File(Kind):
    """The path of a file that can be made; with ``exists`` of one that is there."""

    exists: bool = False

    words = "the path of a file"
    types = (str, os.PathLike)

    def convert(self, value: Any) -> Any:
        path = Path(super().convert(value))
        if not path.parent.is_dir():
            raise ValueError(f"must be in a folder that exists; not in {str(path.parent)!r}")
        if path.is_dir():
            raise ValueError(f"must be the path of a file, and {str(path)!r} is a folder")
        if self.exists and not path.exists():
            raise ValueError(f"must be the path of a file that exists; not {str(path)!r}")
        return path


class Strategy(Kind):
    """A word, or an object of Ray's, which Ray itself looks at."""

    words = '"DEFAULT", "SPREAD" or an object of Ray\'s'

    def is_valid(self, value: Any) -> bool:
        return not isinstance(value, str) or value in ("DEFAULT", "SPREAD")


class Broker(Kind):
    """Looked at when it is connected to."""

    words = "an address of Redis, or a redis.Redis client"


class Secret(Kind):
    """A string or bytes, long enough to sign with. It is never part of a message."""

    words = f"a string of at least {_SHORTEST_SECRET} bytes"

    def convert(self, value: Any) -> Any:
        if not isinstance(value, (str, bytes)):
            raise TypeError("must be a string or bytes")
        length = len(value.encode() if isinstance(value, str) else value)
        if length < _SHORTEST_SECRET:
            raise ValueError(
                f"has {length} bytes, and {_SHORTEST_SECRET} are the least; make one "
                'with: python -c "import secrets; print(secrets.token_hex(32))"'
            )
        return value


class ErrorTypes(Kind):
    """Classes of exceptions."""

    words = "a tuple or list of exception classes"
    types = (tuple, list)

    def convert(self, value: Any) -> Any:
        for kind in super().convert(value):
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"must be {self.words}; {kind!r} is none")
        return value


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
