"""The record of an option, and the base class of the objects that options travel in.

An option is a field of a frozen dataclass in ``table``. The field's metadata says the rest: what
values it may have, what it does, and which fronts have it. Constructors, the command line and the
reference pages are derived from that, or compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from .kinds import Kind

# The fronts: constructors by the names of their classes, and commands.
THREADED, STREAMER, RAY = "ThreadedStreamer", "Streamer", "RayStreamer"
REDIS_STREAMER, REDIS_WORKER = "RedisStreamer", "RedisWorker"
SERVE, WORKER, SIMULATE = "serve", "worker", "simulate"
CONSTRUCTORS = (THREADED, STREAMER, RAY, REDIS_STREAMER, REDIS_WORKER)
COMMANDS = (SERVE, WORKER, SIMULATE)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option.

    Attributes:
        default: what holds if the option is not given.
        kind: which values it may have.
        help: what it does, in one plain sentence.
        fronts: the constructors and commands that have it.
        more: what else a user should know, in a few sentences.
        shown: the default in words, if its value says too little.
        flag: its name on the command line; its own name with dashes if this is empty.
        variable: its environment variable, if that does not follow from the flag.
        several: whether it may be given more than once on the command line.
        is_private: whether it may hold a password or key, so that no ``repr`` shows it.
        at: by front, what is different there: the other attributes by their names.
        name: that of the field.
    """

    default: Any
    kind: Kind
    help: str
    fronts: tuple[str, ...]
    more: str = ""
    shown: str = ""
    flag: str = ""
    variable: str = ""
    several: bool = False
    is_private: bool = False
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""

    def on(self, front: str) -> Option:
        """The option as a front has it."""
        return replace(self, **self.at.get(front, {}))

    @property
    def written(self) -> Kind:
        """The kind on the command line and in files: without None where that is the default."""
        return self.kind if self.default is not None else replace(self.kind, none="")

    @property
    def key(self) -> str:
        """Its name on the command line and in TOML files, without dashes in front."""
        return self.flag.lstrip("-") or self.name.replace("_", "-")


def option(default: Any, kind: Kind, help: str, fronts: Iterable[str], **more: Any) -> Any:  # noqa: A002
    """A field of an ``Options`` class; for the arguments see ``Option``."""
    about = Option(default, kind, help, tuple(fronts), **more)
    return field(default=default, repr=not about.is_private, metadata={"option": about})


class Options:
    """A frozen object of options. Every value is checked when it is built.

    Raises:
        TypeError, ValueError: a value is of the wrong type or out of range.
    """

    #: Whose options they are, where fronts differ; None for all.
    front: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            about = each if self.front is None else each.on(self.front)
            value = getattr(self, each.name)
            if about.several:
                value = tuple(about.kind.check(each.name, part) for part in value)
            elif value is not each.default or value is None:
                value = about.kind.check(each.name, value)
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

    def arguments(self, front: str) -> dict[str, Any]:
        """The values by name, for the constructor of a front."""
        return {each.name: getattr(self, each.name) for each in options_of(type(self), front)}


def options_of(cls: type[Options], front: str | None = None) -> Iterator[Option]:
    """The options of a class in order, or those of them that a front has."""
    for each in fields(cls):  # type: ignore[arg-type]
        about: Option | None = each.metadata.get("option")
        if about is None:
            continue
        about = replace(about, name=each.name)
        if front is None:
            yield about
        elif front in about.fronts:
            yield about.on(front)
