"""The options of a command, derived from its class of options.

Every option can also come from an environment variable (SERVICE_STREAMER_PORT) or from a TOML file
(``port = 8000`` in the table of the command). The line wins over the environment, and that over the
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from ...options.checks import IMPORT_STRING
from ...options.kinds import Option, Options, options_of
from ...options.table import (
    BatchingOptions,
    HangOptions,
    LengthOptions,
    PlacementOptions,
    ResourceOptions,
    ScaleOptions,
)
from ..command_options import (
    PipelineOptions,
    ServeOptions,
    SimulateOptions,
    WorkerCommandOptions,
)
from .config import SERVE, read_defaults, tables_of
from .written import Written

WORKER, SIMULATE = "worker", "simulate"

#: The options of each command.
COMMANDS: dict[str, type[Options]] = {
    SERVE: ServeOptions, WORKER: WorkerCommandOptions, SIMULATE: SimulateOptions
}  # fmt: skip

#: Names on the command line that are not those of the library.
_FLAGS = {
    "worker_num": "workers", "cuda_devices": "devices", "redis_broker": "redis",
    "num_gpus": "ray-num-gpus", "num_cpus": "ray-num-cpus", "resources": "ray-resources",
    "runtime_env": "ray-runtime-env", "scheduling_strategy": "ray-scheduling-strategy",
    "api_keys": "api-key", "cors_origins": "cors-origin", "allowed_hosts": "allowed-host",
}  # fmt: skip

#: Environment variables that do not follow from the name: both commands may share an environment.
_VARIABLES = {(WORKER, "port"): "SERVICE_STREAMER_WORKER_PORT"}

#: In ``click.Context.meta``: the TOML file, and whether it has tables of several models. Each of
#: them is looked at with its own options, so the common ones may have no effect on some.
CONFIG, SEVERAL = "service_streamer.config", "service_streamer.several"


def _names(*groups: type[Options], without: Iterable[str] = ()) -> tuple[str, ...]:
    """The options of some groups, by the names that click has."""
    found = [parameter_of(each) for group in groups for each in options_of(group)]
    return tuple(name for name in found if name not in without)


def flag_of(option: Option) -> str:
    """The name of an option on the command line and in TOML files, without dashes in front."""
    return _FLAGS.get(option.name, option.name.replace("_", "-"))


def parameter_of(option: Option) -> str:
    """The name that click has for an option."""
    return flag_of(option).replace("-", "_")


_OF_PIPELINES = _names(PipelineOptions, without=("model", "revision"))
_OF_HOSTS = (
    *_OF_PIPELINES, "revision",
    *_names(ScaleOptions, PlacementOptions, BatchingOptions, LengthOptions, HangOptions),
)  # fmt: skip


class _Rule(NamedTuple):
    """Options that have no effect.

    Attributes:
        fronts: the commands that it is for.
        options: by their names in the environment, in lower case.
        applies: whether they have none with these options.
        why: the end of a sentence, and what to do.
    """

    fronts: tuple[str, ...]
    options: tuple[str, ...]
    applies: Callable[[Any], bool]
    why: str


def _is_own(options: Any) -> bool:
    return options.model is not None and IMPORT_STRING.fullmatch(options.model) is not None


_RULES = (
    _Rule(
        (SERVE,), _OF_HOSTS, lambda options: options.redis_broker is not None,
        "with --redis, where worker hosts compute; give it to 'service-streamer worker'",
    ),
    _Rule(
        (SERVE,), ("prefix", "secret"),
        lambda options: options.redis_broker is None,
        "without --redis; leave it out, or name a Redis",
    ),
    _Rule(
        (SERVE,), _names(PlacementOptions),
        lambda options: options.ray is not None,
        "with --ray, which gives each worker what it asks for; use --ray-num-gpus",
    ),
    _Rule(
        (SERVE,), _names(ResourceOptions),
        lambda options: options.ray is None, "without --ray; leave it out, or add --ray",
    ),
    _Rule(
        (SERVE, WORKER), _OF_PIPELINES, _is_own,
        "on a model of your own (module:Class); it is for pipelines",
    ),
    _Rule(
        (WORKER,), ("host",), lambda options: options.port is None,
        "without --port, since the worker host does not listen",
    ),
    _Rule(
        (SERVE,), ("ssl_keyfile", "ssl_ca_certs"), lambda options: options.ssl_certfile is None,
        "without --ssl-certfile",
    ),
    _Rule(
        (SIMULATE,), ("start_duration",),
        lambda options: isinstance(options.worker_num, int),
        "with a fixed number of workers; give the least and the most, such as --workers 1:16",
    ),
    _Rule(
        (SIMULATE,), ("think_time",), lambda options: options.closed_loop is None,
        "without --closed-loop",
    ),
    _Rule(
        (SIMULATE,), ("speed",), lambda options: options.trace is None or options.sweep,
        "without --trace, and with --sweep",
    ),
    _Rule(
        (SIMULATE,), ("items", "lengths"), lambda options: options.trace is not None,
        "with --trace, which has the items and lengths of each call",
    ),
    _Rule(
        (SIMULATE,), ("fixed_wait",), lambda options: options.sweep or options.plot is not None,
        "with --sweep",
    ),
)  # fmt: skip


def refuse_without_effect(context: click.Context, options: Any, front: str) -> None:
    """Refuse each option that was given and has no effect.

    Raises:
        click.UsageError: it is on the command line or in a file.
    """
    parameters = [each.name for each in context.command.params if each.name]

    def given(*sources: ParameterSource) -> list[str]:
        return [name for name in parameters if context.get_parameter_source(name) in sources]

    named = given(ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    for text in without_effect(named, options, front):
        raise click.UsageError(text)
    for text in without_effect(given(ParameterSource.ENVIRONMENT), options, front):
        click.echo(f"service-streamer: {text} (from the environment)", err=True)


def without_effect(given: Iterable[str], options: Any, front: str) -> Iterator[str]:
    """A sentence for each of some options that has no effect. Pure.

    Args:
        given: the names of those that were given, as click has them.
        options: all of them.
    """
    names = {*given}
    for rule in _RULES:
        if front in rule.fronts and names.intersection(rule.options) and rule.applies(options):
            for name in rule.options:
                if name in names:
                    yield f"--{name.replace('_', '-')} has no effect {rule.why}"


def in_flags(text: str, front: str = SERVE) -> str:
    """A message of the library, with the names that its options have on the command line."""
    flags = {each.name: f"--{flag_of(each)}" for each in options_of(COMMANDS[front])}
    # Names without an underscore, such as "length", are words of the sentence, too.
    names = "|".join(name for name in flags if "_" in name)
    return re.sub(rf"\b({names})\b", lambda found: flags[found[1]], text)


Command = Callable[..., Any]

#: No default to show: the option is off.
_NOTHING: tuple[Any, ...] = (None, False, "", b"", ())


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
        context.meta[CONFIG] = path
        context.default_map = read_defaults(
            path, name, {name: context.command, **commands}, context
        )
        context.meta[SEVERAL] = name == SERVE and tables_of(path)[1] is not None


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


def _parameter(option: Option, front: str) -> Callable[[Command], Command]:
    name, written = parameter_of(option), Written(option)
    variable = _VARIABLES.get((front, option.name), f"SERVICE_STREAMER_{name.upper()}")
    if name == "model":
        return click.argument(
            name, type=written, metavar="[MODEL]", required=False, envvar=variable
        )
    text = " ".join(filter(None, (option.help, option.more)))
    if option.shown:
        text += f"  [default: {option.shown}]"
    bare: dict[str, Any] = {} if written.bare is None else {"flag_value": written.bare}
    return click.option(
        f"--{flag_of(option)}", name,
        type=bool if written.is_flag else written,
        metavar=None if written.is_flag else written.metavar,
        is_flag=written.is_flag,
        multiple=written.is_repeated,
        default=option.default,
        show_default=not option.shown and option.default not in _NOTHING,
        envvar=variable,
        show_envvar=True,
        help=text,
        **bare,
    )  # fmt: skip


def with_options(front: str) -> Callable[[Command], Command]:
    """Give a command its options; it is called with one object of them."""
    group = COMMANDS[front]
    table = list(options_of(group))

    def add(command: Command) -> Command:
        @click.pass_context
        def called(context: click.Context, /, **given: Any) -> Any:
            try:
                options = group(**{each.name: given[parameter_of(each)] for each in table})
            except (TypeError, ValueError) as error:
                raise click.UsageError(in_flags(str(error), front)) from None
            if not context.meta.get(SEVERAL):
                refuse_without_effect(context, options, front)
            return command(options)

        called.__doc__ = command.__doc__
        called.__name__ = command.__name__
        decorated: Command = called
        for each in reversed(table):
            decorated = _parameter(each, front)(decorated)
        return _config(decorated)

    return add
