"""The command line: ``service-streamer serve``, ``worker`` and ``info``.

Every option can also come from an environment variable (SERVICE_STREAMER_PORT) or from a TOML file
(``port = 8000`` in the table of the command); what is nearer wins: line, environment, file.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

try:
    import click
except ModuleNotFoundError:
    sys.exit("service-streamer needs click: pip install 'service_streamer[serve]'")

from . import __version__
from .errors import RemoteTraceback

__all__ = ["main"]

#: Exit codes beside 0, and click's 2 for a wrong command line.
_MODEL_FAILED, _PORT_TAKEN, _NOT_INSTALLED = 3, 4, 5

_LONGEST = 1e9  # seconds; some thirty years
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

Command = Callable[..., Any]


class _Size(click.ParamType[int]):
    """A number of bytes: 16777216, 16M, 16MiB."""

    name = "size"

    def convert(self, value: Any, param: Any, context: Any) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or not int(match[1]):
            self.fail(
                f"{value!r} is no size; write bytes, or such as 512k, 16M, 1G", param, context
            )
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


class _Seconds(click.ParamType[float]):
    """A number of seconds.

    Args:
        least: if that is allowed; None for all above 0.
    """

    name = "seconds"

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


class _Devices(click.ParamType[tuple[str, ...]]):
    """Names of devices with commas between."""

    name = "devices"

    def convert(self, value: Any, _param: Any, _context: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            parts = [parts]
        return tuple(str(part).strip() for part in parts)


def _option(name: str, *more: Any, **attributes: Any) -> Callable[[Command], Command]:
    variable = "SERVICE_STREAMER_" + name.strip("-").replace("-", "_").upper()
    attributes.setdefault("show_default", True)
    return click.option(name, *more, envvar=variable, show_envvar=True, **attributes)


def _read_config(context: click.Context, _: Any, path: Path | None) -> None:
    """Take what a TOML file says as the defaults of this command."""
    if path is None:
        return
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}") from None
    known = {each.name: each for each in context.command.params}
    stray = [name for name, value in tables.items() if not isinstance(value, dict)]
    if stray:
        raise click.BadParameter(f"{path}: {stray[0]!r} must be in a table, such as [serve]")
    table = tables.get(context.info_name or "", {})
    if not isinstance(table, dict):
        raise click.BadParameter(f"{path}: [{context.info_name}] must be a table")
    defaults: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known or name == "config":
            names = ", ".join(sorted(str(each).replace("_", "-") for each in known if each))
            raise click.BadParameter(
                f"{path}: [{context.info_name}] has {key!r}, which is no option; there are {names}"
            )
        is_several = isinstance(value, str) and getattr(known[name], "multiple", False)
        defaults[name] = [value] if is_several else value
    context.default_map = defaults


_config = click.option(
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


_model_options = _together(
    click.argument("model", required=False, envvar="SERVICE_STREAMER_MODEL"),
    _config,
    _option(
        "--task",
        help="Of the Hugging Face pipeline: fill-mask, text-classification, token-classification, "
        "feature-extraction, text-generation, image-classification, zero-shot-classification, ... "
        "The model's own by default.",
    ),
    _option(
        "--dtype",
        default="auto",
        type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
        help="Of the model's numbers.",
    ),
    _option("--workers", default=1, type=click.IntRange(1), help="Processes with the model."),
    _option(
        "--devices",
        type=_Devices(),
        help="GPUs for them in turn, such as 0,1,2,3; or cpu.  [default: all that are visible]",
    ),
    _option("--batch-size", default=64, type=click.IntRange(1), help="The most inputs of a batch."),
    _option(
        "--max-latency",
        default=0.1,
        type=_Seconds(least=0),
        help="The longest that an input waits for company while a worker is free, seconds. A "
        "bound: a lone one never waits.",
    ),
)

_redis_options = _together(
    _option("--prefix", default="", help="Keeps models apart on one Redis; the same on all sides."),
    _option(
        "--secret",
        help="Signs messages in Redis; the same on all sides, 16 characters or more. Better in "
        "the environment than here.",
        show_default=False,
    ),
)

_log_format = _option(
    "--log-format", default="text", type=click.Choice(["text", "json"]), help="Of the log."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="service-streamer")
def main() -> None:
    """A deep-learning model as a web service: requests one by one, computed in batches."""


@main.command()
@_model_options
@_option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 for all of them.")
@_option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one.")
@_option(
    "--timeout",
    default=30.0,
    type=_Seconds(),
    help="How long a request may take, seconds; 504 then.",
)
@_option(
    "--max-pending",
    type=click.IntRange(1),
    help="The most inputs that may wait; 503 beyond.  [default: 16 batches for each worker, 256 "
    "at least]",
    show_default=False,
)
@_option(
    "--api-key",
    multiple=True,
    help="Needed by every request; may be given several times. Better in the environment than "
    "here.",
    show_default=False,
)
@_option("--max-body", default="16M", type=_Size(), help="The longest body of a request; else 413.")
@_option(
    "--web-workers",
    default=1,
    type=click.IntRange(1),
    help="Processes that speak HTTP. More than one share the model's over Redis: that of --redis, "
    "or one of their own.",
)
@_option(
    "--server",
    default="uvicorn",
    type=click.Choice(["uvicorn", "granian"]),
    help="What speaks HTTP; granian is faster and has to be installed.",
)
@_option("--redis", metavar="URL", help="Only the web service here; the model is on worker hosts.")
@_redis_options
@_log_format
@_option(
    "--opentelemetry",
    is_flag=True,
    help="Send spans of requests and batches to the collector of OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@_option("--debug", is_flag=True, help="Answers show what went wrong inside. Not for the public.")
def serve(**given: Any) -> None:
    """Serve MODEL over HTTP, with a page to look at.

    MODEL is a folder, a name on the Hugging Face hub, or module:Class of a ManagedModel. Without
    it a small text-infilling model is served, which comes with this package.
    """
    _check_model(given)
    _check_access(given)
    _need("uvicorn", "starlette", "msgspec", "prometheus_client", "uvloop", extra="web")
    if given["server"] == "granian":
        _need("granian", extra="granian")
    if given["opentelemetry"]:
        _need(
            "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http",
            "opentelemetry.instrumentation.asgi", extra="opentelemetry",
        )  # fmt: skip
    from .server.launching import CannotListen, launch

    if given["web_workers"] > 1:
        _need("redis", "msgpack", extra="redis")
        from .server.fleet import launch_fleet as launch
    try:
        failure = launch(given)
    except CannotListen as error:
        _end(_PORT_TAKEN, str(error))
    except (TypeError, ValueError, FileNotFoundError) as error:
        _end(2, str(error))
    if failure is not None:
        if given["debug"]:
            logging.getLogger(__name__).error("the model could not be loaded", exc_info=failure)
        _end(_MODEL_FAILED, f"the model could not be loaded: {_told(failure)}")


@main.command()
@_model_options
@_option("--redis", metavar="URL", default="localhost:6379", help="Where web services put calls.")
@_redis_options
@_log_format
def worker(**given: Any) -> None:
    """Run a worker host: compute what ``serve --redis`` puts into Redis."""
    _check_model(given)
    _need("redis", "msgpack", extra="redis")
    from .errors import StreamerError
    from .server.launching import launch_worker

    try:
        launch_worker(given)
    except StreamerError as error:
        _end(_MODEL_FAILED, f"the worker host cannot serve: {_told(error)}")
    except (TypeError, ValueError) as error:
        _end(2, str(error))


@main.command()
def info() -> None:
    """Print versions, cores and devices."""
    click.echo(f"service_streamer   {__version__}")
    click.echo(f"python             {sys.version.split()[0]}")
    for name in ("torch", "transformers", "starlette", "uvicorn", "granian", "redis"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        click.echo(f"{name:18} {version}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    click.echo(f"{'cores':18} {usable} of {os.cpu_count()}")
    for line in _devices():
        click.echo(f"{'device':18} {line}")


def _devices() -> list[str]:
    try:
        import torch
    except ModuleNotFoundError:
        return ["cpu (torch is not installed, so GPUs are not looked for)"]
    devices = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices.append(f"{number}: {properties.name}, {properties.total_memory >> 20} MiB")
    return devices or ["cpu (no CUDA device is visible)"]


def _check_model(given: dict[str, Any]) -> None:
    """Say at once what would otherwise be said by every worker, one import of torch later."""
    model = given["model"]
    if given.get("redis") and "web_workers" in given:
        if model is not None:
            raise click.UsageError(
                "with --redis the model is that of the worker hosts: give it to "
                f"'service-streamer worker {model} --redis ...', and leave it out here"
            )
        return
    if model is None or _exists(model, Path.is_dir):
        return
    if _TARGET.fullmatch(model):
        if given["task"] is not None:
            raise click.UsageError(f"--task is for pipelines, and {model} is a model of its own")
        sys.path.insert(0, "")  # what is in this folder can be imported, as with python -m
    elif _exists(model, Path.exists) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise click.UsageError(
            f"there is no model folder {model!r}; give a folder with config.json and "
            "model.safetensors, a name on the Hugging Face hub, or module:Class"
        )


def _exists(model: str, how: Callable[[Path], bool]) -> bool:
    try:
        return how(Path(model))
    except (OSError, ValueError) as error:  # too long for a name, or with a zero byte
        raise click.UsageError(f"there is no model {model[:60]!r}: {error}"[:300]) from None


def _check_access(given: dict[str, Any]) -> None:
    """An unset variable in a script must not open the service to everybody."""
    if not all(given["api_key"]) or os.environ.get("SERVICE_STREAMER_API_KEY") == "":
        raise click.UsageError("--api-key is empty; leave it out to let everybody in")
    if not given["host"]:
        raise click.UsageError("--host is empty; give an address, 0.0.0.0 for all of them")
    if given["server"] == "granian" and given["web_workers"] > 1:
        raise click.UsageError("--web-workers needs --server uvicorn: granian shares no socket")


def _need(*modules: str, extra: str) -> None:
    for name in modules:
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            if not (error.name and name.startswith(error.name)):
                raise
            text = f"this needs {name}: pip install 'service_streamer[{extra}]'"
            _end(_NOT_INSTALLED, text)


def _told(error: BaseException) -> str:
    """An error and its reason in a line."""
    texts = [str(error) or type(error).__name__]
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):  # for the log only
        cause = None
    if cause is not None and str(cause) and str(cause) not in texts[0]:
        texts.append(str(cause).strip().splitlines()[0])
    return ": ".join(texts)


def _end(code: int, text: str) -> NoReturn:
    click.echo(f"service-streamer: {text}", err=True)
    sys.exit(code)
