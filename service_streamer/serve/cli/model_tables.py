"""The tables ``[[model]]`` of a TOML file: several models in one service.

What stands in ``[serve]``, in the environment and on the command line holds for each of them,
unless its own table says something else.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...options import kinds
from ...options.kinds import Option, options_of
from ..command_options import AddressOptions, ServeOptions
from ..configuration import NamedModel
from ..http.web_options import WebOptions
from .cli_options import parameter_of, without_effect
from .config import SERVE, checked, read_defaults, tables_of
from .written import Written

#: The name of the tables.
MODEL = "model"

#: Names are parts of paths, of metrics and of log lines.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")

#: What follows the name of a model in paths of the Open Inference Protocol.
_V2_PLACES = frozenset(("infer", "ready", "versions", "load", "unload"))

#: Bounds on requests that each model may have for itself. All else of a web process is common.
_OF_EACH = frozenset(("timeout", "max_pixels", "max_audio_seconds", "max_characters", "max_tokens"))
_COMMON = {
    *(each.name for group in (AddressOptions, WebOptions) for each in options_of(group)),
    "grpc_port", "web_workers",
} - _OF_EACH  # fmt: skip


def _fields() -> dict[str, str]:
    """The options that a model may have for itself: their fields, by the names that click has."""
    return {
        parameter_of(each): each.name
        for each in options_of(ServeOptions)
        if each.name not in _COMMON
    }


def model_command(serve: click.Command) -> click.Command:
    """What such a table may say, as if it was a command of its own."""
    fields = _fields()
    name = click.Option(["--name"], type=Written(Option("name", "", kinds.text(), "")))
    return click.Command(MODEL, params=[name, *(p for p in serve.params if p.name in fields)])


def read_models(
    path: Path, context: click.Context, serve: click.Command, common: ServeOptions
) -> list[NamedModel]:
    """The models of a file, in order; none if it has no such tables.

    Args:
        common: the options of the service.

    Raises:
        click.UsageError: the file cannot be read, or says what no model knows or takes.
    """
    commands = {MODEL: model_command(serve), SERVE: serve}
    models: list[NamedModel] = []
    for number, table in enumerate(tables_of(path)[1] or (), 1):
        where = f"{path}: [[{MODEL}]] {number}"
        values = checked(where, table, MODEL, commands, context)
        name = _name(where, values.pop("name", None), [each.name for each in models])
        where = f"{path}: [[{MODEL}]] {name}"
        try:
            options = dataclasses.replace(common, **_converted(values, serve, context))
        except (TypeError, ValueError) as error:
            raise click.BadParameter(f"{where}: {error}") from None
        for text in without_effect(values, options, SERVE):
            raise click.BadParameter(f"{where}: {text}")
        models.append(NamedModel(name, options))
    return models


def common_again(
    path: Path, context: click.Context, serve: click.Command, common: ServeOptions
) -> ServeOptions:
    """The options of the service with what its file says now of those that models have.

    All others belong to the web process, and stay as they were at its start.

    Raises:
        click.UsageError: the file cannot be read, or says what ``serve`` does not know or take.
    """
    root = context.find_root().command
    everyone = root.commands if isinstance(root, click.Group) else {}
    defaults = read_defaults(path, SERVE, {SERVE: serve, **everyone}, context)
    of_file = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    fields = {
        name: field
        for name, field in _fields().items()
        if context.get_parameter_source(name) in of_file
    }
    values = {name: value for name, value in defaults.items() if name in fields}
    own = {each.name: each.default for each in options_of(ServeOptions)}
    changed = {field: own[field] for field in fields.values()}
    try:
        return dataclasses.replace(common, **changed | _converted(values, serve, context))
    except (TypeError, ValueError) as error:
        raise click.BadParameter(f"{path}: [{SERVE}]: {error}") from None


def _name(where: str, name: Any, others: list[str]) -> str:
    if name is None:
        raise click.BadParameter(f'{where} has no name; add a line such as name = "sentiment"')
    if not _NAME.fullmatch(name) or "//" in name:
        raise click.BadParameter(
            f"{where} name: {name[:130]!r} must consist of letters, digits and . _ - /, begin and "
            "end with a letter or digit, and have at most 128 characters"
        )
    if name in others:
        raise click.BadParameter(f"{where} name: there are two models {name!r}; rename one")
    for other in others:
        short, long = sorted((name, other), key=len)
        place = long.removeprefix(f"{short}/")
        if place != long and place.partition("/")[0] in _places():
            raise click.BadParameter(
                f"{where} name: the requests of model {short!r} at .../{place} would be those of "
                f"model {long!r}; rename one"
            )
    return str(name)


def _places() -> frozenset[str]:
    """What begins a path behind the name of a model: there, no other model's name may go on."""
    from ..http.operations import OPERATIONS
    from ..http.pages import PAGES

    paths = [each.path for each in (*OPERATIONS, *PAGES)]
    return _V2_PLACES | {"static"} | {path.split("/")[1] for path in paths} - {""}


def _converted(
    values: dict[str, Any], serve: click.Command, context: click.Context
) -> dict[str, Any]:
    fields = _fields()
    parameters = {each.name: each for each in serve.params}
    return {
        fields[name]: parameters[name].type_cast_value(context, value)
        for name, value in values.items()
    }
