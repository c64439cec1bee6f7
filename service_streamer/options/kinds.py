"""What values options may have: each kind checks a value, and reads it from text."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .checks import (
    IMPORT_STRING,
    check_count,
    check_devices,
    check_pool_name,
    check_positive,
    check_seconds,
    check_tenant,
    check_workers,
    is_sequence,
)

_SHORTEST_SECRET = 16

_DURATION = re.compile(r"\s*([^a-z\s]+(?:e[+-]?\d+)?)\s*(s|ms|us|)\s*")
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_RANGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")
_BURSTS = re.compile(r"(\d+)/(.+)")
_LENGTHS = re.compile(r"([\d.]+)(?::([\d.]+))?")
_RAY = re.compile(r"any|auto|local|[^:/\s]+:\d+|\[[0-9a-f:.]+\]:\d+")


@dataclass(frozen=True)
class Kind:
    """Any value.

    Attributes:
        none: what None stands for, such as "no bound"; empty if None is not allowed.
        auto: whether "auto" is allowed.
        toml: the types that it has in a TOML file.
        metavar: stands for its value in the help of the command line.
        bare: what the option means without a value on the command line; None if it needs one.
    """

    none: str = ""
    auto: bool = False

    toml: ClassVar[tuple[type, ...]] = (str,)
    metavar: ClassVar[str] = "TEXT"
    bare: ClassVar[str | None] = None

    @property
    def words(self) -> str:
        """What a value must be, such as "a whole number of at least 1"."""
        return "a value"

    @property
    def written(self) -> str:
        """What a value must be on the command line and in a file."""
        more = [
            word for word, is_allowed in (("auto", self.auto), ("none", self.none)) if is_allowed
        ]
        return ", ".join([self.words, *more[:-1]]) + "".join(f" or {word}" for word in more[-1:])

    def check(self, name: str, value: Any) -> Any:
        """The value of the option ``name``, as the package uses it.

        Raises:
            TypeError, ValueError: it is of the wrong type or out of range.
        """
        if (value is None and self.none) or (self.auto and value is not None and _is_auto(value)):
            return value
        return self._check(name, value)

    def parse(self, value: Any) -> Any:
        """The value that is written so in the environment, on the command line or in a file.

        Raises:
            ValueError: it means none; the message says what is wanted, without a name.
        """
        if self.auto and value == "auto":
            return "auto"
        if self.none and value in ("none", None):
            return None
        try:
            return self._check("", self._read(value))
        except (TypeError, ValueError):
            raise ValueError(f"must be {self.written}; not {value!r}") from None

    def _check(self, name: str, value: Any) -> Any:  # noqa: ARG002 - of the kinds that derive
        return value

    def _read(self, value: Any) -> Any:
        return value

    def _refuse(self, name: str, value: object, kind: type[Exception] = TypeError) -> Exception:
        alternatives = f", or None for {self.none}" if self.none else ""
        return kind(f"{name} must be {self.words}{alternatives}; not {value!r}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


@dataclass(frozen=True)
class Flag(Kind):
    """True or False."""

    toml = (bool,)
    metavar = ""
    words = "True or False"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool):
            raise self._refuse(name, value)
        return value


@dataclass(frozen=True)
class Count(Kind):
    """A whole number.

    Attributes:
        least, most: the bounds; None for none.
        unit: "bytes", say.
    """

    least: int | None = 1
    most: int | None = None
    unit: str = ""

    toml = (int, str)
    metavar = "INTEGER"

    @property
    def words(self) -> str:
        if self.least is None:
            return "a whole number"
        bounds = f"from {self.least} to {self.most}" if self.most else f"of at least {self.least}"
        return f"a whole number {bounds}" + (f", in {self.unit}" if self.unit else "")

    def _check(self, name: str, value: Any) -> Any:
        others = " or ".join(['"auto"'] * self.auto + [f"None for {self.none}"] * bool(self.none))
        others = f"or {others}" if others and not self.auto else others
        alternatives = ", ".join(filter(None, (self.unit and f"in {self.unit}", others)))
        check_count(name, value, alternatives=alternatives, least=self.least)
        if self.most is not None and value > self.most:
            raise self._refuse(name, value, ValueError)
        return value

    def _read(self, value: Any) -> Any:
        return int(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class WorkerNumber(Kind):
    """A number of workers, or the least and the most; on the command line 4, or 1:16.

    Attributes:
        fixed: why it has to be one number; empty if it may be two.
    """

    fixed: str = ""

    toml = (int, str)

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return "INTEGER" if self.fixed else "N|LEAST:MOST"

    @property
    def words(self) -> str:
        if self.fixed:
            return f"a whole number of at least 1 ({self.fixed})"
        return "a whole number of at least 1, or the least and the most, such as (1, 16)"

    @property
    def written(self) -> str:
        return self.words.replace("(1, 16)", "1:16")

    def _check(self, name: str, value: Any) -> Any:
        if not self.fixed:
            return check_workers(name, value)
        if is_sequence(value):
            raise self._refuse(name, value, ValueError)
        check_count(name, value)
        return value

    def _read(self, value: Any) -> Any:
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            return int(match[1]), int(match[2])
        return int(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Seconds(Kind):
    """A number of seconds; on the command line also such as 5ms."""

    zero: bool = False

    toml = (float, int, str)
    metavar = "SECONDS"

    @property
    def words(self) -> str:
        return "a number of seconds " + ("of at least 0" if self.zero else "above 0")

    def _check(self, name: str, value: Any) -> Any:
        return check_seconds(name, value, zero=self.zero, none=bool(self.none), auto=self.auto)

    def _read(self, value: Any) -> Any:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        return value if match is None else float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Number(Kind):
    """A finite number above 0."""

    toml = (float, int, str)
    metavar = "NUMBER"
    words = "a finite number above 0"

    def _check(self, name: str, value: Any) -> Any:
        check_positive(name, value, f" or None for {self.none}" if self.none else "")
        return value

    def _read(self, value: Any) -> Any:
        return float(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Amount(Kind):
    """How much of something a worker has: a finite number of at least 0."""

    toml = (float, int, str)
    metavar = "NUMBER"
    words = "a finite number of at least 0"

    def _check(self, name: str, value: Any) -> Any:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and 0 <= value < math.inf):
            kind = ValueError if is_number else TypeError
            raise kind(f"{name} must be {self.words}, not {value!r}")
        return float(value)

    def _read(self, value: Any) -> Any:
        return float(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Amounts(Kind):
    """How much of each of several things; on the command line with commas between."""

    metavar = "NAME=NUMBER,..."
    words = "a dict of numbers of at least 0"
    written = "names with numbers, such as disk=1,accelerator_type:A100=0.001"

    def check(self, name: str, value: Any) -> Any:
        return {} if value is None else self._check(name, value)

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, not {value!r}")
        return {each: Amount().check(f"{name}[{each!r}]", value[each]) for each in value}

    def _read(self, value: Any) -> Any:
        parts = [part.rpartition("=") for part in str(value).split(",")]
        amounts = {name.strip(): float(amount) for name, _, amount in parts}
        if "" in amounts or len(amounts) < len(parts):
            raise ValueError
        return amounts


@dataclass(frozen=True)
class Strategy(Kind):
    """A word, or an object of Ray's, which Ray itself looks at."""

    metavar = "[DEFAULT|SPREAD]"
    words = '"DEFAULT", "SPREAD" or an object of Ray\'s'
    written = "DEFAULT or SPREAD"

    def _check(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value not in ("DEFAULT", "SPREAD"):
            raise ValueError(f"{name} must be {self.words}, not {value!r}")
        return value


@dataclass(frozen=True)
class Text(Kind):
    """A string."""

    words = "a string"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise self._refuse(name, value)
        return value


@dataclass(frozen=True)
class PoolName(Kind):
    """The name of a shared pool."""

    words = "a name of letters, digits, '.', '_' and '-'"

    def _check(self, name: str, value: Any) -> Any:
        return check_pool_name(name, value)


@dataclass(frozen=True)
class Broker(Kind):
    """The address of Redis, which is read when it is connected to, or a client of one's own."""

    metavar = "URL"
    words = "an address of Redis, or a redis.Redis client"


@dataclass(frozen=True)
class RayAddress(Kind):
    """Where a Ray cluster is, as the command line has it."""

    metavar = "[ADDRESS]"
    bare = "any"
    words = "host:port, auto, local or any"

    def parse(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("ray://"):
            raise ValueError(
                f"must not be {value}, since batches do not go through the Ray Client; run this on "
                "a node of the cluster, with host:port or auto"
            )
        try:
            return super().parse(value)
        except ValueError as error:
            is_model = isinstance(value, str) and IMPORT_STRING.fullmatch(value) is not None
            hint = "; write MODEL before --ray" if is_model else ""
            raise ValueError(f"{error}{hint}") from None

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, str) or not _RAY.fullmatch(value):
            raise self._refuse(name, value, ValueError)
        return value


@dataclass(frozen=True)
class Choice(Kind):
    """One of several strings."""

    among: tuple[str, ...] = ()

    @property
    def metavar(self) -> str:  # type: ignore[override]
        return f"[{'|'.join(self.among)}]"

    @property
    def words(self) -> str:
        return f"one of {', '.join(self.among)}"

    def _check(self, name: str, value: Any) -> Any:
        if value not in self.among:
            raise self._refuse(name, value, ValueError)
        return value


@dataclass(frozen=True)
class Size(Kind):
    """A number of bytes: 16777216, 16M, 16MiB."""

    toml = (str, int)
    metavar = "SIZE"
    words = "a number of bytes above 0, such as 16777216, 512k, 16M or 1G"

    def _check(self, name: str, value: Any) -> Any:
        check_count(name, value)
        return value

    def _read(self, value: Any) -> Any:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            raise ValueError
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


@dataclass(frozen=True)
class Devices(Kind):
    """The devices of workers; on the command line with commas between."""

    toml = (str, int, list)
    metavar = "DEVICES"
    words = 'GPU numbers such as 0,1, strings such as "GPU-1a2b", or cpu'

    def _check(self, name: str, value: Any) -> Any:
        check_devices(name, value)
        return value

    def _read(self, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        names = [str(part).strip() for part in parts]
        if self.auto and names == ["auto"]:
            return "auto"
        return tuple(int(name) if name.isdecimal() else name for name in names)


@dataclass(frozen=True)
class Arguments(Kind):
    """Arguments for a model: a list or tuple, or with ``named`` a dict."""

    named: bool = False

    metavar = "JSON"

    @property
    def words(self) -> str:
        return "a dict" if self.named else "a list or tuple"

    @property
    def written(self) -> str:
        return """JSON such as '{"working_dir": "."}'"""

    def _read(self, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    def _check(self, name: str, value: Any) -> Any:
        if not (isinstance(value, Mapping) if self.named else is_sequence(value)):
            raise TypeError(f"{name} must be {self.words}, not {value!r}")
        return value


@dataclass(frozen=True)
class Weights(Kind):
    """Positive numbers by the names of tenants."""

    words = "a dict of numbers above 0, by tenant"

    def check(self, name: str, value: Any) -> Any:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict, not {value!r}")
        for tenant, weight in value.items():
            check_tenant(tenant)
            check_positive(f"the weight of tenant {tenant!r}", weight)
        return value


@dataclass(frozen=True)
class Function(Kind):
    """A function, or where to import it; checked when it is imported."""

    metavar = "MODULE:FUNCTION"
    words = 'a function, or an import string "package.module:function"'


@dataclass(frozen=True)
class File(Kind):
    """The path of a file that can be made; with ``exists`` of one that is there."""

    exists: bool = False

    metavar = "FILE"
    words = "the path of a file"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, (str, os.PathLike)):
            raise self._refuse(name, value)
        path = Path(value)
        if not path.parent.is_dir():
            raise ValueError(f"{name}: there is no folder {str(path.parent)!r} for {path.name!r}")
        if path.is_dir():
            raise ValueError(f"{name} must be the path of a file, and {str(path)!r} is a folder")
        if self.exists and not path.exists():
            raise ValueError(f"{name}: there is no file {str(path)!r}")
        return path

    def parse(self, value: Any) -> Any:
        try:
            return self._check("", value)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error).lstrip(": ")) from None


@dataclass(frozen=True)
class Header(Kind):
    """The name of an HTTP header; kept as ASGI has it, in lower-case bytes. Empty for none."""

    metavar = "NAME"
    words = "the name of a header, such as X-Priority"

    def _check(self, name: str, value: Any) -> Any:
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not _HEADER.fullmatch(value):
            raise self._refuse(name, value)
        return value.lower().encode()


@dataclass(frozen=True)
class HostName(Kind):
    """The name or the address of a host, without a port; ``*.`` stands for all below."""

    metavar = "HOST"
    words = "a host name without scheme and port, such as api.example.com"

    def _read(self, value: Any) -> Any:
        host = value.lower().removeprefix("[").removesuffix("]") if isinstance(value, str) else ""
        if not _HOST.fullmatch(host):
            raise ValueError
        return host


@dataclass(frozen=True)
class Origin(Kind):
    """The origin of web pages, as browsers send it; ``*`` stands for all."""

    metavar = "ORIGIN"
    words = "* or an origin without a path, such as https://example.com"

    def _check(self, name: str, value: Any) -> Any:
        origin = value.lower() if isinstance(value, str) else ""
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise self._refuse(name, value)
        return origin


@dataclass(frozen=True)
class Prefix(Kind):
    """A string that names of keys in Redis begin with."""

    words = "a string without braces and zero bytes"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, not {value!r}")
        if set("{}\0") & set(value):
            raise ValueError(f"{name} must have no braces and no zero byte, not {value!r}")
        return value


@dataclass(frozen=True)
class Secret(Kind):
    """A string or bytes, long enough to sign with. It is never part of a message."""

    words = f"a string of at least {_SHORTEST_SECRET} bytes"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"{name} must be a string or bytes")
        length = len(value.encode() if isinstance(value, str) else value)
        if length < _SHORTEST_SECRET:
            raise ValueError(
                f"{name} has {length} bytes, and {_SHORTEST_SECRET} are the least; make one "
                'with: python -c "import secrets; print(secrets.token_hex(32))"'
            )
        return value

    def parse(self, value: Any) -> Any:
        return None if value is None else self._check("it", value)


@dataclass(frozen=True)
class ErrorTypes(Kind):
    """Classes of exceptions."""

    words = "a tuple or list of exception classes"

    def _check(self, name: str, value: Any) -> Any:
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"{name} must be {self.words}, not {value!r}")
        for kind in value:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"{name} must be {self.words}; {kind!r} is none")
        return value


@dataclass(frozen=True)
class BurstText(Kind):
    """So many calls every so many seconds: 40/0.5, 40/500ms."""

    metavar = "N/SECONDS"
    words = "a number of calls and seconds between bursts, such as 40/500ms"

    def _read(self, value: Any) -> tuple[int, float]:
        match = _BURSTS.fullmatch(str(value))
        if match is None or not int(match[1]):
            raise ValueError
        return int(match[1]), Seconds().parse(match[2])


@dataclass(frozen=True)
class LengthText(Kind):
    """The mean length of items, and how far lengths spread: 25, 25:0.6."""

    metavar = "MEAN[:SIGMA]"
    words = "a mean length, such as 25, or with its spread 25:0.6"

    def _read(self, value: Any) -> tuple[float, float]:
        match = _LENGTHS.fullmatch(str(value))
        if match is None or not float(match[1]):
            raise ValueError
        return float(match[1]), float(match[2] or 0.6)


@dataclass(frozen=True)
class LoadText(Kind):
    """Loads in turn, each for so many seconds: 0.2:60,3:120s."""

    metavar = "LOAD:SECONDS,..."
    words = "loads above 0 and how long each lasts, such as 0.2:60s,3:120s"

    def _read(self, value: Any) -> tuple[tuple[float, float], ...]:
        parts = [part.partition(":") for part in str(value).split(",")]
        return tuple((Number().parse(load), Seconds().parse(last)) for load, _, last in parts)
