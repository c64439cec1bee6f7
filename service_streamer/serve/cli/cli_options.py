"""What the options of the command line are made of, and those that commands share.

Every option can also come from an environment variable (SERVICE_STREAMER_PORT) or from a TOML file
(``port = 8000`` in the table of the command); what is nearer wins: line, environment, file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .config import read_defaults

__all__ = [
    "HeaderType",
    "HostNameType",
    "SecondsType",
    "SizeType",
    "config",
    "log_format",
    "model_options",
    "option",
    "redis_options",
    "sharing_options",
]

_LONGEST = 1e9  # seconds; some thirty years
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*")
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)

Command = Callable[..., Any]


class SizeType(click.ParamType[int]):
    """A number of bytes: 16777216, 16M, 16MiB."""

    name = "size"
    toml = (str, int)

    def convert(self, value: Any, param: Any, context: Any) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or not int(match[1]):
            self.fail(
                f"{value!r} is no size; write bytes, or such as 512k, 16M, 1G", param, context
            )
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


class SecondsType(click.ParamType[float]):
    """A number of seconds.

    Args:
        least: if that is allowed; None for all above 0.
    """

    name = "seconds"
    toml = (float, int, str)

    def __init__(self, least: float | None = None) -> None:
        self._least = least

    def convert(self, value: Any, param: Any, context: Any) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (0 < seconds <= _LONGEST or seconds == self._least):
            bound = "above 0" if self._least is None else "of at least 0"
            self.fail(f"{value!r} is no number of seconds {bound}", param, context)
        return seconds


class _Timeout(click.ParamType["float | str | None"]):
    """A number of seconds, "auto" or "none"."""

    name = "seconds"

    def convert(self, value: Any, param: Any, context: Any) -> float | str | None:
        if value in ("none", None):
            return None
        if value == "auto":
            return "auto"
        try:
            return SecondsType().convert(value, param, context)
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a number of seconds above 0, nor auto or none", param, context
            )


class _Cost(click.ParamType[float]):
    """A finite number above 0."""

    name = "cost"
    toml = (float, int, str)

    def convert(self, value: Any, param: Any, context: Any) -> float:
        try:
            cost = float(value)
        except (TypeError, ValueError):
            cost = math.nan
        if not 0 < cost < math.inf:
            self.fail(f"{value!r} is no number above 0", param, context)
        return cost


class _Threads(click.ParamType[int | str]):
    """A number of threads, or auto."""

    name = "threads"
    toml = (str, int)

    def convert(self, value: Any, param: Any, context: Any) -> int | str:
        if value == "auto":
            return "auto"
        number = value if type(value) is int else -1
        if isinstance(value, str) and value.isdecimal() and len(value) < 9:
            number = int(value)
        if number < 1:
            self.fail(f"{value!r} is not a number of threads, at least 1, nor auto", param, context)
        return number


class HeaderType(click.ParamType[str]):
    """The name of a header."""

    name = "name"
    toml = (str,)

    def convert(self, value: Any, param: Any, context: Any) -> str:
        if not isinstance(value, str) or not _HEADER.fullmatch(value):
            self.fail(f"{value!r} is no name of a header; such as X-Priority", param, context)
        return value


class HostNameType(click.ParamType[str]):
    """The name or the address of a host, without a port; ``*.`` stands for all below."""

    name = "host"

    def convert(self, value: Any, param: Any, context: Any) -> str:
        host = value.lower().removeprefix("[").removesuffix("]") if isinstance(value, str) else ""
        if not _HOST.fullmatch(host):
            self.fail(
                f"{value!r} is not a host; write a name without scheme and port, such as "
                "api.example.com", param, context,
            )  # fmt: skip
        return host


class _Devices(click.ParamType[tuple[str, ...]]):
    """Names of devices with commas between."""

    name = "devices"
    toml = (str, int, list)

    def convert(self, value: Any, _param: Any, _context: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            parts = [parts]
        return tuple(str(part).strip() for part in parts)


def option(name: str, *more: Any, **attributes: Any) -> Callable[[Command], Command]:
    variable = "SERVICE_STREAMER_" + name.strip("-").replace("-", "_").upper()
    attributes = {"envvar": variable, "show_default": True, **attributes}
    return click.option(name, *more, show_envvar=True, **attributes)


def _read_config(context: click.Context, _: Any, path: Path | None) -> None:
    """Take what a TOML file says as the defaults of this command."""
    if path is not None:
        group = context.find_root().command
        everyone = group.commands if isinstance(group, click.Group) else {}
        commands = {
            name: each for name, each in everyone.items()
            if any(param.name == "config" for param in each.params)
        }  # fmt: skip
        name = context.command.name or ""
        context.default_map = read_defaults(
            path, name, {name: context.command, **commands}, context
        )


config = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="SERVICE_STREAMER_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="A TOML file with a table for each command, such as [serve], of these options.",
)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


model_options = _together(
    click.argument("model", required=False, envvar="SERVICE_STREAMER_MODEL"),
    config,
    option(
        "--task",
        help="Of the Hugging Face pipeline: fill-mask, text-classification, token-classification, "
        "feature-extraction, text-generation, image-classification, zero-shot-classification, ... "
        "The model's own by default.",
    ),
    option(
        "--dtype",
        default="auto",
        type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
        help="Data type of the model's weights.",
    ),
    option(
        "--revision",
        help="Branch, tag or commit of a model on the hub; also as NAME@REVISION. All "
        "workers load the commit that it means when the service starts.  [default: main]",
        show_default=False,
    ),
    option("--workers", default=1, type=click.IntRange(1), help="Processes with the model."),
    option(
        "--devices",
        type=_Devices(),
        help="GPUs for the workers in turn, such as 0,1,2,3, or cpu. A worker whose GPU is not "
        "there does not start.  [default: all visible GPUs in turn; a single worker sees all]",
        show_default=False,
    ),
    option(
        "--cpu-threads",
        default="auto",
        type=_Threads(),
        help="Threads of each worker for the model on the CPU (OpenMP, MKL, torch). auto divides "
        "the cores among the workers. 1 is best on cores that other programs use too.",
    ),
    option("--batch-size", default=64, type=click.IntRange(1), help="The most inputs of a batch."),
    option(
        "--max-latency",
        default=0.1,
        type=SecondsType(least=0),
        help="The longest that an input waits for other inputs while a worker is free, seconds. "
        "An upper bound: a lone input never waits.",
    ),
    option(
        "--length",
        metavar="MODULE:FUNCTION",
        help="A function that returns the cost of an input, in any unit, such as "
        "my_module:MyModel.length. Inputs of similar cost share a batch. For a model of your "
        "own. Imported in this process.",
    ),
    option(
        "--max-batch-cost",
        type=_Cost(),
        help="Upper bound on the inputs of a batch times the longest of them; pipelines count "
        "bytes of text.  [default: no bound]",
        show_default=False,
    ),
    option(
        "--batch-timeout",
        default="auto",
        type=_Timeout(),
        help="How long the model may take for a batch, seconds; then its process is killed and "
        "started again. auto: 60 s, twice the time limit of the requests, or ten times the longest "
        "batch so far, whichever is most; ten times as much at first. none: no bound.",
    ),
    option(
        "--start-timeout",
        default="auto",
        type=_Timeout(),
        help="The same for loading the model. auto: an hour, later ten times as long as loading "
        "took, at least 600 s. none: no bound.",
    ),
)

redis_options = _together(
    option("--prefix", default="", help="Keeps models apart on one Redis; the same on all sides."),
    option(
        "--secret",
        help="Signs messages in Redis; the same on all sides, 16 characters or more. Better in "
        "the environment than here.",
        show_default=False,
    ),
)

sharing_options = _together(
    option(
        "--deduplicate",
        is_flag=True,
        help="Compute an input once that several ask for at a time. For models whose result "
        "depends on the input only.",
    ),
    option(
        "--cache-size",
        default=0,
        type=click.IntRange(0),
        help="Keep the results of so many inputs for those who ask later; includes --deduplicate.",
    ),
    option(
        "--cache-ttl",
        type=SecondsType(),
        help="How long they are kept, seconds.  [default: while there is room]",
        show_default=False,
    ),
)

log_format = option(
    "--log-format", default="text", type=click.Choice(["text", "json"]), help="Format of the log."
)
