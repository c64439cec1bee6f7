"""The command line: ``service-streamer serve``, ``worker``, ``pool``, ``key``, ``simulate`` ..."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...reporting import missing

try:
    import click
except ModuleNotFoundError:
    sys.stderr.write(missing("service-streamer", "click", "serve") + "\n")
    sys.exit(5)  # _NOT_INSTALLED

from ... import __version__
from ...engine.operator_signals import SAME_SIGNAL, hold_signals, run_below_init
from ...options.checks import IMPORT_STRING
from ..command_options import ModelCommandOptions, ServeOptions, WorkerCommandOptions
from .cli_options import CONFIG, SEVERAL, WORKER, in_flags, with_options
from .config import SERVE, check_environment, tables_of
from .failures import explain_name, reason, users_traceback
from .key_command import key_command
from .model_tables import common_again, read_models
from .pool_command import pool_command
from .simulate_command import simulate_command

if TYPE_CHECKING:
    from ..configuration import Configuration, NamedModel

#: Exit codes beside 0, and click's 2 for a wrong command line.
_MODEL_FAILED, _PORT_TAKEN, _NOT_INSTALLED, _CALLS_LEFT = 3, 4, 5, 6


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="service-streamer")
@click.pass_context
def main(context: click.Context) -> None:
    """A deep-learning model as a web service: requests one by one, computed in batches."""
    if context.invoked_subcommand != "info":
        for warning in check_environment(os.environ, main.commands):
            click.echo(f"service-streamer: {warning}", err=True)


@main.command()
@with_options(SERVE)
def serve(options: ServeOptions) -> None:
    """Serve MODEL over HTTP, with a page to look at.

    MODEL is a folder, a name on the Hugging Face hub (perhaps NAME@REVISION), or module:Class of a
    ManagedModel. Without it a small text-infilling model is served, which comes with this package.

    Exit codes: 0 after SIGTERM or Ctrl-C; 2 for wrong options; 3 if the model cannot be loaded, or
    the service failed; 4 if the port is taken; 5 if a package is missing.
    """
    run_below_init()
    context = click.get_current_context()
    try:
        models = _configuration(context, options)
    except ImportError as error:
        _end(_NOT_INSTALLED, str(error))
    _check_access(options)
    hold_signals()
    _need(
        "httptools", "starlette", "msgspec", "prometheus_client", "python_multipart", "uvloop",
        extra="web",
    )  # fmt: skip
    _check_files(options)
    if options.opentelemetry:
        _need(
            "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http",
            "opentelemetry.instrumentation.asgi", extra="opentelemetry",
        )  # fmt: skip
    if options.grpc_port is not None:
        _need("numpy", "grpc", "grpc_health", "grpc_reflection", extra="grpc")
    if any(each.options.cache_size for each in models):
        _need("cachetools", extra="cache")
    if any(each.options.redis_broker is not None for each in models):
        _need("redis", "msgpack", extra="redis")
    if any(each.options.ray is not None for each in models):
        _need("ray", extra="ray")
    from ..configuration import Configuration
    from ..fitting import with_count
    from ..hosted_model import ServiceFailed
    from ..launching import CannotListen
    from ..logs import configure_logging
    from ..opening import ClusterUnavailable, ModelUnavailable, open_model

    configure_logging(options.log_format)
    options, counted = with_count(options, models)
    several = bool(context.meta.get(SEVERAL))
    again = functools.partial(_configured_again, context, options) if several else None
    try:
        failure = run_service(Configuration(counted, open_model, again, several), options)
    except CannotListen as error:
        _end(_PORT_TAKEN, str(error))
    except ClusterUnavailable as error:
        address = next(each.options.ray for each in models if each.options.ray is not None)
        _end(_MODEL_FAILED, f"--ray {address}: {reason(error)}")
    except ModelUnavailable as error:
        _end(_MODEL_FAILED, f"the model could not be loaded: {error}")
    except (TypeError, ValueError, FileNotFoundError) as error:
        _end(2, in_flags(str(error)))
    if isinstance(failure, ServiceFailed):
        _end(_MODEL_FAILED, str(failure))
    if failure is not None:
        if options.debug:
            logging.getLogger(__name__).error("the model could not be loaded", exc_info=failure)
        _end_without_model("the model could not be loaded, so the service ends", failure, options)


@main.command()
@with_options(WORKER)
def worker(options: WorkerCommandOptions) -> None:
    """Run a worker host: compute what ``serve --redis`` puts into Redis.

    Exit codes: 0 after SIGTERM or Ctrl-C; 2 for wrong options; 3 if the model cannot be served;
    4 if --port is taken; 5 if a package is missing; 6 if Redis did not answer at the end, and
    calls were left for other worker hosts to take over.
    """
    run_below_init()
    try:
        _check_model(options)
    except ImportError as error:
        _end(_NOT_INSTALLED, str(error))
    hold_signals()
    _need("redis", "msgpack", extra="redis")
    if options.port is not None:
        _need("httptools", "starlette", "msgspec", "prometheus_client", extra="web")
    from ...errors import BrokerUnavailable, StreamerError
    from ..launching import CannotListen
    from ..opening import ModelUnavailable

    try:
        run_host(options)
    except CannotListen as error:
        _end(_PORT_TAKEN, str(error))
    except ModelUnavailable as error:
        _end(_MODEL_FAILED, f"the worker host cannot serve: {error}")
    except BrokerUnavailable as error:
        _end(_CALLS_LEFT, str(error))
    except StreamerError as error:
        _end_without_model("the worker host cannot serve, so it ends", error, options)
    except (TypeError, ValueError) as error:
        _end(2, in_flags(str(error)))


def run_service(
    configuration: Configuration, options: ServeOptions, same_signal: float = SAME_SIGNAL
) -> Exception | None:
    """See ``launch``, and ``launch_fleet`` for several web processes."""
    if options.web_workers != 1:
        from ..several_processes import launch_fleet

        return launch_fleet(configuration, options)
    from ..launching import launch

    return launch(configuration, options, same_signal)


def run_host(options: WorkerCommandOptions) -> None:
    """See ``launch_worker``."""
    from ..launching import launch_worker

    launch_worker(options)


main.add_command(simulate_command)
main.add_command(pool_command)
main.add_command(key_command)


@main.command()
def info() -> None:
    """Print versions, cores and devices."""
    click.echo(f"service_streamer   {__version__}")
    click.echo(f"python             {sys.version.split()[0]}")
    for name in ("torch", "transformers", "starlette", "httptools", "redis", "ray"):
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


def _configuration(context: click.Context, options: ServeOptions) -> list[NamedModel]:
    """The models to serve: those of the file, or the one of the command line.

    Raises:
        click.UsageError: their options do not fit.
        ImportError: a package is missing.
    """
    from ..opening import only_model

    if not context.meta.get(SEVERAL):
        _check_ray(options)
        _check_model(options)
        return [only_model(options)]
    path = context.meta[CONFIG]
    if options.model is not None:
        raise click.UsageError(
            f"MODEL and the [[model]] tables of {path} exclude each other: leave {options.model} "
            "out, or add a table for it"
        )
    models = read_models(path, context, context.command, options)
    for name, own in models:
        try:
            _check_ray(own)
            _check_model(own)
        except click.UsageError as error:
            raise click.UsageError(f"{path}: [[model]] {name}: {error.message}") from None
    return models


def _configured_again(context: click.Context, options: ServeOptions) -> list[NamedModel]:
    """The same while the service runs. Raises ValueError."""
    path = context.meta[CONFIG]
    try:
        options = common_again(path, context, context.command, options)
        if options.model is not None or not tables_of(path)[1]:
            raise ValueError(f"{path} has no [[model]] tables any more, or a model besides them")
        return _configuration(context, options)
    except click.UsageError as error:
        raise ValueError(error.message) from None
    except ImportError as error:
        raise ValueError(str(error)) from None


def _check_ray(options: ServeOptions) -> None:
    if options.ray is not None and options.redis_broker is not None:
        raise click.UsageError(
            "--redis and --ray exclude each other: the workers are either those of the worker "
            "hosts behind Redis, or those of the Ray cluster; leave one out"
        )


def _check_model(options: ModelCommandOptions) -> None:
    """Say at once what would otherwise be said by every worker, one import of torch later."""
    model = options.model
    if isinstance(options, ServeOptions) and options.redis_broker is not None:
        if model is not None:
            raise click.UsageError(
                "with --redis the model is that of the worker hosts: give it to "
                f"'service-streamer worker {model} --redis ...', and leave it out here"
            )
        return
    is_target = model is not None and IMPORT_STRING.fullmatch(model) is not None
    name = (model or "").partition("@")[0]
    if options.revision is not None and not options.revision.strip():
        raise click.UsageError("--revision is empty; leave it out to get the branch main")
    if options.revision is not None and (model is None or is_target or _exists(model, Path.exists)):
        raise click.UsageError("--revision is for a model on the Hugging Face hub")
    has_length = getattr(options, "length", None) is not None
    if has_length and (model is None or not is_target or _exists(model, Path.is_dir)):
        raise click.UsageError("--length is for a model of your own: module:Class")
    if not is_target or _exists(model or "", Path.is_dir):
        _check_pipeline(options)
    if model is None or _exists(model, Path.is_dir):
        return
    wrong = explain_name(model)
    if wrong is not None:
        raise click.UsageError(wrong)
    if is_target:
        sys.path.insert(0, "")  # what is in this folder can be imported, as with python -m
    elif _exists(model, Path.exists) or model.startswith((".", "/", "~")) or name.count("/") > 1:
        raise click.UsageError(
            f"there is no model folder {model!r}; give a folder with config.json and "
            "model.safetensors, a name on the Hugging Face hub, or module:Class"
        )


def _check_pipeline(options: ModelCommandOptions) -> None:
    from ..fitting import check_pipeline

    try:
        check_pipeline(options)
    except ValueError as error:
        raise click.UsageError(in_flags(str(error))) from None


def _exists(model: str, how: Callable[[Path], bool]) -> bool:
    try:
        return how(Path(model))
    except (OSError, ValueError) as error:  # too long for a name, or with a zero byte
        raise click.UsageError(f"there is no model {model[:60]!r}: {error}"[:300]) from None


def _check_access(options: ServeOptions) -> None:
    """An unset variable in a script must not open the service to everybody."""
    if not all(each.strip() for each in options.api_keys):
        raise click.UsageError("--api-key is empty; leave it out to let everybody in")
    if any(each != each.strip() for each in options.api_keys):
        raise click.UsageError(
            "--api-key begins or ends with white space, which headers cannot carry"
        )
    if not os.environ.get("SERVICE_STREAMER_ALLOWED_HOST", "any").strip():
        raise click.UsageError("--allowed-host is empty; leave it out to allow any host")
    if not options.host:
        raise click.UsageError("--host is empty; give an address, 0.0.0.0 for all of them")


def _check_files(options: ServeOptions) -> None:
    """Say at once what every web process would say."""
    from ..http.keyring import load_keys
    from ..http.tls import PASSWORD, TLS

    path = options.api_key_file
    if path is not None:
        try:
            load_keys(path)
            is_open = path.stat().st_mode & stat.S_IROTH
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--api-key-file {path}: {error}") from None
        if is_open:
            click.echo(
                f"service-streamer: every user of this machine can read --api-key-file {path}; "
                "chmod 600 keeps them out", err=True,
            )  # fmt: skip
    try:
        TLS.of(options)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if options.grpc_port is not None and options.ssl_certfile and os.environ.get(PASSWORD):
        raise click.UsageError(
            f"gRPC cannot read an encrypted key ({PASSWORD}); leave --grpc-port out, or decrypt "
            "the key: openssl pkey -in key.pem -out plain.pem"
        )


def _need(*modules: str, extra: str) -> None:
    for name in modules:
        try:
            module = importlib.import_module(name)
            # A folder of that name, as in the working directory, is no package.
            is_there = "." in name or getattr(module, "__file__", None) is not None
        except ModuleNotFoundError as error:
            if not (error.name and name.startswith(error.name)):
                raise
            is_there = False
        if not is_there:
            _end(_NOT_INSTALLED, missing("this", name, extra))


def _end_without_model(text: str, error: BaseException, options: ModelCommandOptions) -> NoReturn:
    """Say why once: in the log, in the traceback of the user's code, or in the last line."""
    from ..logs import was_logged

    is_own = options.model is not None and IMPORT_STRING.fullmatch(options.model) is not None
    traceback = "" if getattr(options, "debug", False) else users_traceback(error, is_own=is_own)
    if traceback:
        logging.getLogger(__name__).error("the model raised\n%s", traceback.rstrip())
    why = reason(error)
    _end(_MODEL_FAILED, f"{text}: {'see the error above' if was_logged(why) else why}")


def _end(code: int, text: str) -> NoReturn:
    click.echo(f"service-streamer: {text}", err=True)
    sys.exit(code)
