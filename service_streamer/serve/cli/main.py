"""The command line: ``service-streamer serve``, ``worker``, ``simulate`` and ``info``."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...extras import missing

try:
    import click
except ModuleNotFoundError:
    sys.exit(missing("service-streamer", "click", "serve"))

from ... import __version__
from ...engine.operator_signals import hold_signals
from .cli_options import (
    HeaderType,
    HostNameType,
    SecondsType,
    SizeType,
    log_format,
    model_options,
    option,
    redis_options,
    sharing_options,
)
from .config import check_environment
from .failures import explain_name, reason, users_traceback
from .simulate_command import simulate_command

__all__ = ["main"]

#: Exit codes beside 0, and click's 2 for a wrong command line.
_MODEL_FAILED, _PORT_TAKEN, _NOT_INSTALLED, _CALLS_LEFT = 3, 4, 5, 6

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="service-streamer")
@click.pass_context
def main(context: click.Context) -> None:
    """A deep-learning model as a web service: requests one by one, computed in batches."""
    if context.invoked_subcommand != "info":
        for warning in check_environment(os.environ, main.commands):
            click.echo(f"service-streamer: {warning}", err=True)


@main.command()
@model_options
@option("--host", default="127.0.0.1", help="Address to listen at; 0.0.0.0 for all of them.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one.")
@option(
    "--timeout",
    default=30.0,
    type=SecondsType(),
    help="Time limit of a request, seconds; 504 then.",
)
@option(
    "--max-pending",
    type=click.IntRange(1),
    help="The most inputs that may wait; 503 beyond.  [default: 16 batches for each worker, 256 "
    "at least]",
    show_default=False,
)
@option(
    "--api-key",
    multiple=True,
    help="Key that requests need for the model, metrics and statistics; may be given several "
    "times. Better in the environment than here.",
    show_default=False,
)
@sharing_options
@option(
    "--priority-header",
    type=HeaderType(),
    help="Header with the priority of a request: a whole number, the higher the sooner. For a "
    "proxy in front to set.",
)
@option(
    "--tenant-header",
    type=HeaderType(),
    help="Header with the tenant of a request. Tenants share the model, so that none holds up the "
    "others. For a proxy in front to set. Without it each of several --api-key is a tenant.",
)
@option(
    "--allowed-host",
    multiple=True,
    type=HostNameType(),
    help="Answer only requests for this host, such as api.example.com or *.example.com; may be "
    "given several times. Health checks may name any host.  [default: any host]",
    show_default=False,
)
@option(
    "--max-body", default="16M", type=SizeType(), help="The longest body of a request; else 413."
)
@option(
    "--max-pixels",
    default=64_000_000,
    type=click.IntRange(1),
    help="The most pixels that the images of a request may decode to, all together; else 413. One "
    "image has 64,000,000 at the most.",
)
@option(
    "--max-audio-seconds",
    default=600.0,
    type=SecondsType(),
    help="How long the sounds of a request may be, all together, seconds; else 413. One sound has "
    "600 at the most.",
)
@option(
    "--max-characters",
    default=1_000_000,
    type=click.IntRange(1),
    help="The most characters of the texts of a request, all together, counted once per candidate "
    "label; else 413.",
)
@option(
    "--max-tokens",
    default=16_384,
    type=click.IntRange(1),
    help="The most tokens that a request may generate: tokens of an answer, times answers, "
    "times prompts; else 413.",
)
@option(
    "--write-timeout",
    default=30.0,
    type=SecondsType(),
    help="How long a client may leave an answer unread, seconds; its connection is closed then.",
)
@option(
    "--max-unread",
    default="256M",
    type=SizeType(),
    help="The most bytes of answers that all clients may leave unread at a time; beyond it the "
    "connection of the slowest is closed.",
)
@option(
    "--web-workers",
    default=1,
    type=click.IntRange(1),
    help="Processes that answer HTTP. Several share the workers over Redis: that of --redis, or "
    "one of their own.",
)
@option(
    "--server",
    default="uvicorn",
    type=click.Choice(["uvicorn", "granian"]),
    help="HTTP server; granian is faster and has to be installed.",
)
@option("--redis", metavar="URL", help="Only the web service here; the model is on worker hosts.")
@redis_options
@log_format
@option(
    "--opentelemetry",
    is_flag=True,
    help="Send spans of requests and batches to the collector of OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@option("--debug", is_flag=True, help="Answers show what went wrong inside. Not for the public.")
def serve(**given: Any) -> None:
    """Serve MODEL over HTTP, with a page to look at.

    MODEL is a folder, a name on the Hugging Face hub (perhaps NAME@REVISION), or module:Class of a
    ManagedModel. Without it a small text-infilling model is served, which comes with this package.

    Exit codes: 0 after SIGTERM or Ctrl-C; 2 for wrong options; 3 if the model cannot be loaded, or
    the service failed; 4 if the port is taken; 5 if a package is missing.
    """
    _check_model(given)
    _check_access(given)
    hold_signals()
    _need(
        "uvicorn", "starlette", "msgspec", "prometheus_client", "python_multipart", "uvloop",
        extra="web",
    )  # fmt: skip
    if given["server"] == "granian":
        _need("granian", extra="granian")
    if given["opentelemetry"]:
        _need(
            "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http",
            "opentelemetry.instrumentation.asgi", extra="opentelemetry",
        )  # fmt: skip
    if given["cache_size"]:
        _need("cachetools", extra="cache")
    from ..launching import CannotListen, ModelUnavailable, launch
    from ..running import ServiceFailed

    if given["web_workers"] > 1:
        _need("redis", "msgpack", extra="redis")
        from ..fleet import launch_fleet as launch
    try:
        failure = launch(given)
    except CannotListen as error:
        _end(_PORT_TAKEN, str(error))
    except ModelUnavailable as error:
        _end(_MODEL_FAILED, f"the model could not be loaded: {error}")
    except (TypeError, ValueError, FileNotFoundError) as error:
        _end(2, str(error))
    if isinstance(failure, ServiceFailed):
        _end(_MODEL_FAILED, str(failure))
    if failure is not None:
        if given["debug"]:
            logging.getLogger(__name__).error("the model could not be loaded", exc_info=failure)
        _end_without_model("the model could not be loaded, so the service ends", failure, given)


@main.command()
@model_options
@option("--redis", metavar="URL", default="localhost:6379", help="Where web services put calls.")
@redis_options
@option(
    "--allow-other-models",
    is_flag=True,
    help="Serve beside worker hosts with another model, while one replaces the other.",
)
@option(
    "--port",
    type=click.IntRange(0, 65535),
    envvar="SERVICE_STREAMER_WORKER_PORT",
    help="Answer GET of /health/live, /health/ready, /stats and /metrics here; 0 takes a free "
    "one.  [default: do not listen]",
    show_default=False,
)
@option("--host", default="127.0.0.1", help="Address for --port; 0.0.0.0 for all of them.")
@log_format
def worker(**given: Any) -> None:
    """Run a worker host: compute what ``serve --redis`` puts into Redis.

    Exit codes: 0 after SIGTERM or Ctrl-C; 2 for wrong options; 3 if the model cannot be served;
    4 if --port is taken; 5 if a package is missing; 6 if Redis did not answer at the end, and
    calls were left for other worker hosts to take over.
    """
    _check_model(given)
    hold_signals()
    _need("redis", "msgpack", extra="redis")
    if given["port"] is not None:
        _need("uvicorn", "starlette", "msgspec", "prometheus_client", extra="web")
    from ...errors import BrokerUnavailable, StreamerError
    from ..launching import CannotListen, ModelUnavailable, launch_worker

    try:
        launch_worker(given)
    except CannotListen as error:
        _end(_PORT_TAKEN, str(error))
    except ModelUnavailable as error:
        _end(_MODEL_FAILED, f"the worker host cannot serve: {error}")
    except BrokerUnavailable as error:
        _end(_CALLS_LEFT, str(error))
    except StreamerError as error:
        _end_without_model("the worker host cannot serve, so it ends", error, given)
    except (TypeError, ValueError) as error:
        _end(2, str(error))


main.add_command(simulate_command)


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
        if given["revision"] is not None:
            raise click.UsageError("with --redis give --revision to the worker hosts")
        return
    is_target = model is not None and _TARGET.fullmatch(model)
    name = (model or "").partition("@")[0]
    if given["revision"] is not None and not given["revision"].strip():
        raise click.UsageError("--revision is empty; leave it out to get the branch main")
    if given["revision"] is not None and (
        model is None or is_target or _exists(model, Path.exists)
    ):
        raise click.UsageError("--revision is for a model on the Hugging Face hub")
    if given["length"] is not None and (not is_target or _exists(model, Path.is_dir)):
        raise click.UsageError("--length is for a model of your own: module:Class")
    if model is None or _exists(model, Path.is_dir):
        return
    wrong = explain_name(model)
    if wrong is not None:
        raise click.UsageError(wrong)
    if _TARGET.fullmatch(model):
        if given["task"] is not None:
            raise click.UsageError(f"--task is for pipelines, and {model} is a model of its own")
        sys.path.insert(0, "")  # what is in this folder can be imported, as with python -m
    elif _exists(model, Path.exists) or model.startswith((".", "/", "~")) or name.count("/") > 1:
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
    if not all(each.strip() for each in given["api_key"]):
        raise click.UsageError("--api-key is empty; leave it out to let everybody in")
    if any(each != each.strip() for each in given["api_key"]):
        raise click.UsageError(
            "--api-key begins or ends with white space, which headers cannot carry"
        )
    if not os.environ.get("SERVICE_STREAMER_ALLOWED_HOST", "any").strip():
        raise click.UsageError("--allowed-host is empty; leave it out to allow any host")
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
            _end(_NOT_INSTALLED, missing("this", name, extra))


def _end_without_model(text: str, error: BaseException, given: dict[str, Any]) -> NoReturn:
    """Say why once: in the log, in the traceback of the user's code, or in the last line."""
    from ..logs import was_logged

    is_own = bool(given["model"]) and _TARGET.fullmatch(given["model"]) is not None
    traceback = "" if given.get("debug") else users_traceback(error, is_own=is_own)
    if traceback:
        logging.getLogger(__name__).error("the model raised\n%s", traceback.rstrip())
    why = reason(error)
    _end(_MODEL_FAILED, f"{text}: {'see the error above' if was_logged(why) else why}")


def _end(code: int, text: str) -> NoReturn:
    click.echo(f"service-streamer: {text}", err=True)
    sys.exit(code)
