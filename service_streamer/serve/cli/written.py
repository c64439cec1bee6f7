"""How the values of options are written: on the command line, in the environment, in TOML files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import click

from ...options import kinds
from ...options.kinds import Option
from ..command_options import ANY_CLUSTER
from ..http.web_options import Several

_DURATION = re.compile(r"\s*([^a-z\s]+(?:e[+-]?\d+)?)\s*(s|ms|us|)\s*")
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_RANGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*")
_BURSTS = re.compile(r"(\d+)/(.+)")
_LENGTHS = re.compile(r"([\d.]+)(?::([\d.]+))?")


# How a text is read.


def _text(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """What is no text comes from a file, and is a value already."""
    return lambda value: read(value) if isinstance(value, str) else value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _seconds(value: Any) -> Any:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else float(match[1]) * _UNITS[match[2]]


def _workers(value: Any) -> Any:
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    return _text(int)(value) if match is None else (int(match[1]), int(match[2]))


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def _amounts(value: Any) -> dict[str, float]:
    parts = [part.rpartition("=") for part in str(value).split(",")]
    amounts = {name.strip(): float(amount) for name, _, amount in parts}
    if "" in amounts or len(amounts) < len(parts):
        raise ValueError
    return amounts


def _devices(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    names = [str(part).strip() for part in parts]
    if names == ["auto"]:
        return "auto"
    return tuple(int(name) if name.isdecimal() else name for name in names)


def _bursts(value: Any) -> tuple[int, float]:
    match = _BURSTS.fullmatch(str(value))
    if match is None or not int(match[1]):
        raise ValueError
    return int(match[1]), kinds.seconds().check("", _seconds(match[2]))


def _mean_length(value: Any) -> tuple[float, float]:
    match = _LENGTHS.fullmatch(str(value))
    if match is None or not float(match[1]):
        raise ValueError
    return float(match[1]), float(match[2] or 0.6)


def _phases(value: Any) -> tuple[tuple[float, float], ...]:
    parts = [part.partition(":") for part in str(value).split(",")]
    return tuple(
        (kinds.number().check("", float(load)), kinds.seconds().check("", _seconds(last)))
        for load, _, last in parts
    )


class WrittenForm(NamedTuple):
    """How the values of a kind are written.

    Attributes:
        metavar: stands for the value in the help.
        read: makes a value of a text, or of what a TOML file has.
        words: what a value must be, if it is written in other words than the library's.
    """

    metavar: str = "TEXT"
    read: Callable[[Any], Any] = lambda value: value
    words: str = ""


#: By the form of a kind.
_FORMS: dict[str, WrittenForm] = {
    "flag": WrittenForm(""),
    "count": WrittenForm("INTEGER", _text(int)),
    "workers": WrittenForm(
        "N|LEAST:MOST", _workers,
        "a whole number of at least 1, or the least and the most, such as 1:16",
    ),
    "seconds": WrittenForm("SECONDS", _seconds),
    "number": WrittenForm("NUMBER", _text(float)),
    "numbers": WrittenForm(
        "NAME=NUMBER,...", _amounts,
        "names with numbers, such as disk=1,accelerator_type:A100=0.001",
    ),
    "text": WrittenForm(),
    "choice": WrittenForm(),
    "strategy": WrittenForm("[DEFAULT|SPREAD]", _string, "DEFAULT or SPREAD"),
    "broker": WrittenForm("URL", _string, "an address of Redis"),
    "ray": WrittenForm("[ADDRESS]"),
    "size": WrittenForm("SIZE", _size),
    "devices": WrittenForm("DEVICES", _devices),
    "arguments": WrittenForm("JSON", _text(json.loads), """JSON such as '{"working_dir": "."}'"""),
    "function": WrittenForm("MODULE:FUNCTION", words='an import string "package.module:function"'),
    "file": WrittenForm("FILE"),
    "header": WrittenForm("NAME"),
    "host": WrittenForm("HOST"),
    "origin": WrittenForm("ORIGIN"),
    "bursts": WrittenForm("N/SECONDS", _bursts),
    "mean": WrittenForm("MEAN[:SIGMA]", _mean_length),
    "phases": WrittenForm("LOAD:SECONDS,...", _phases),
}  # fmt: skip


class Written(click.ParamType[Any]):
    """How the values of an option are written.

    Attributes:
        words: what a value must be.
        metavar: see ``WrittenForm``.
        is_flag: whether the option has no value on the command line.
        is_repeated: whether it may be given several times.
        bare: what it means without a value; None if it needs one.
    """

    def __init__(self, option: Option) -> None:
        kind = option.kind
        self.is_flag = kind.form == "flag"
        self.is_repeated = isinstance(kind, Several)
        self.bare = ANY_CLUSTER if kind.form == "ray" else None
        if isinstance(kind, Several):
            kind = kind.each
        if option.default is None:  # to say that, the option is left out
            kind = replace(kind, none="")
        form = _FORMS[kind.form]
        self._kind, self._read = kind, form.read
        self.metavar = f"[{'|'.join(kind.among)}]" if kind.among else form.metavar
        self.name = self.metavar.lower()
        others = ["auto"] * kind.auto + ["none"] * bool(kind.none)
        self.words = ", ".join([form.words or kind.words, *others[:-1]])
        self.words += "".join(f" or {word}" for word in others[-1:])

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        if isinstance(value, (list, dict)) and self._read is not _devices:
            shown = "list" if isinstance(value, list) else "table"
            self.fail(f"must be {self.words}; not a {shown}", param, context)
        if self._kind.auto and value == "auto":
            return value
        if self._kind.none and value == "none":
            return None
        text = f"must be {self.words}; not {value!r}"
        try:
            read = self._read(value)
        except (TypeError, ValueError):
            self.fail(text, param, context)
        if self._kind.auto and isinstance(read, str) and read == "auto":
            return read
        try:
            return self._kind.convert(read)
        except (TypeError, ValueError) as error:
            self.fail(str(error) or text, param, context)
