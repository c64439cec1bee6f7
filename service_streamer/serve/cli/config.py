"""What a TOML file and the environment say about the options, checked as the command line is.

A setting that is mistyped must not be lost in silence: it could be the API key. So each table and
each key must be known, also in the tables of other commands, and each value must be one that its
option takes. Pure, but for reading the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ...gpu.accelerators import GPU_COUNT
from ..http.tls import PASSWORD

#: The command whose file may have several models.
SERVE = "serve"

_PREFIX = "SERVICE_STREAMER_"

#: Kubernetes sets these in every pod beside a Service of the name "service-streamer".
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")

#: Without these, or with them empty, the service is open, or is not what the file says.
_NEVER_BLANK = ("API_KEY", "API_KEY_FILE", "SECRET", "CONFIG")

Commands = Mapping[str, click.Command]


def tables_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """The tables of a file by name, and the tables ``[[model]]``; None if there are none.

    Raises:
        click.BadParameter: the file cannot be read, or the latter are none.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}") from None
    models = tables.get("model")
    if not isinstance(models, (list, dict)):
        return tables, None
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
        raise click.BadParameter(f"{path}: write [[model]] in two brackets, once for each model")
    del tables["model"]
    return tables, models


def read_defaults(path: Path, name: str, commands: Commands, context: click.Context) -> Any:
    """The values of a command's options in a TOML file, for ``context.default_map``.

    Args:
        name: of the command, whose table it must have.
        commands: all that may have a table.

    Raises:
        click.BadParameter: the file cannot be read, or says what no command knows or takes. The
            message names the file, the table and the key.
    """
    tables, models = tables_of(path)
    for table, content in tables.items():
        if table not in commands:
            raise click.BadParameter(f"{path}: {_unknown_table(table, content, commands)}")
        if not isinstance(content, dict):
            raise click.BadParameter(f"{path}: [{table}] must be a table, with a line per option")
    if name not in tables and (models is None or name != SERVE):
        raise click.BadParameter(f"{path}: there is no table [{name}]; add it, even if it is empty")
    read = {
        table: checked(f"{path}: [{table}]", content, table, commands, context)
        for table, content in tables.items()
    }
    return read.get(name, {})


def checked(
    where: str, content: Mapping[str, Any], table: str, commands: Commands, context: click.Context
) -> dict[str, Any]:
    """The options of one table, by the names that click has for them.

    Args:
        table: the name of a command.

    Raises:
        click.BadParameter: an option is unknown or mistyped.
    """
    options = _options(commands[table])
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        option = options.get(name)
        if option is None:
            raise click.BadParameter(f"{where} {_unknown_key(key, table, commands)}")
        if name in defaults:
            raise click.BadParameter(f"{where} {key}: is set twice, with - and with _")
        several = [value] if option.multiple and not isinstance(value, list) else value
        try:
            if several == []:
                raise click.UsageError("the list is empty; remove the line, or name a value")
            if option.type is click.BOOL and not isinstance(value, bool):  # click takes words, too
                raise click.UsageError(f"must be true or false; not {value!r}")
            option.type_cast_value(context, several)
        except click.UsageError as error:
            raise click.BadParameter(f"{where} {key}: {error.message}") from None
        defaults[name] = several
    return defaults


def _options(command: click.Command) -> dict[str, click.Parameter]:
    """Those that a file may set, by the names that Python has for them."""
    return {each.name: each for each in command.params if each.name and each.name != "config"}


def _unknown_table(table: str, content: object, commands: Commands) -> str:
    if isinstance(content, list) and content and all(isinstance(each, dict) for each in content):
        return f"[[{table}]] is unknown; the table of one of several models is [[model]]"
    if not isinstance(content, dict):
        owners = [name for name, each in commands.items() if _name(table) in _options(each)]
        place = owners[0] if owners else next(iter(commands))
        return f"{table!r} must be in a table: write it below a line [{place}]"
    return f"[{table}] belongs to no command{_meant(table, commands, '[{}]')}"


def _unknown_key(key: str, table: str, commands: Commands) -> str:
    known = [name.replace("_", "-") for name in _options(commands[table])]
    owners = [name for name, each in commands.items() if _name(key) in _options(each)]
    text = f"has {key!r}, which is not an option of {table}"
    if owners:
        return f"{text}; it is one of {owners[0]}: write it below [{owners[0]}]"
    return text + _meant(key, known, "{}")


def _meant(name: str, known: Iterable[str], form: str) -> str:
    """The end of a sentence about a name that is not known."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, 1)
    if near:
        return f"; did you mean {form.format(near[0])}?"
    return "; there are " + ", ".join(map(form.format, names))


def _name(key: str) -> str:
    return key.replace("-", "_")


def check_environment(environment: Mapping[str, str], commands: Commands) -> list[str]:
    """Refuse variables of ours that are mistyped, or that are blank and must not be.

    Returns:
        A warning for each variable that looks like one of ours and that no command knows.

    Raises:
        click.UsageError: a variable is nearly one of ours; or one that keeps the service closed is
            blank.
    """
    known = {
        GPU_COUNT,
        PASSWORD,
        *(
            str(each.envvar)
            for command in commands.values() for each in command.params if each.envvar
        ),
    }  # fmt: skip
    warnings = []
    for name in sorted(environment):
        rest = name.removeprefix(_PREFIX)
        if name in known:
            if rest in _NEVER_BLANK and not environment[name].strip():
                raise click.UsageError(f"{name} is empty; unset it, or give it a value")
            if rest == "PORT" and "://" in environment[name]:
                raise click.UsageError(
                    f"{name} is {environment[name]!r}, which Kubernetes sets for a Service of the "
                    "name service-streamer; set enableServiceLinks: false in the pod, or give "
                    "the Service another name"
                )
        elif rest != name and not _OF_KUBERNETES.fullmatch(rest):
            names = [each.removeprefix(_PREFIX) for each in known]
            # A secret under another name, such as REDIS_SECRET, would leave the service open.
            near = [each for each in _NEVER_BLANK if rest.endswith(each)]
            near = near or difflib.get_close_matches(rest, names, 1, cutoff=0.75)
            if near:
                raise click.UsageError(f"{name} is not an option; did you mean {_PREFIX}{near[0]}?")
            warnings.append(f"the environment has {name}, which is not an option; it has no effect")
    return warnings
