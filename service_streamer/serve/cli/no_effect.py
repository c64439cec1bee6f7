"""Refuses options that have no effect with the others that are given.

An operator who gives such an option expects something that does not happen. On the command line and
in a file that is an error. In the environment, which several commands may share, it is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from ...options.checks import IMPORT_STRING
from ...options.declare import SERVE, SIMULATE, WORKER

__all__ = ["refuse_without_effect"]

_OF_HOSTS = (
    "task", "dtype", "revision", "workers", "devices", "cpu_threads", "batch_size", "max_latency",
    "length", "max_batch_cost", "batch_timeout", "start_timeout",
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
        lambda options: options.redis_broker is None and options.web_workers == 1,
        "without --redis; leave it out, or name a Redis",
    ),
    _Rule(
        (SERVE, WORKER), ("dtype", "task"), _is_own,
        "on a model of your own (module:Class); it is for pipelines",
    ),
    _Rule(
        (SERVE,), ("write_timeout", "max_unread"), lambda options: options.server == "granian",
        "with --server granian; use --server uvicorn",
    ),
    _Rule(
        (WORKER,), ("host",), lambda options: options.port is None,
        "without --port, since the worker host does not listen",
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
    for rule in _RULES:
        if front not in rule.fronts or not rule.applies(options):
            continue
        for name in rule.options:
            text = f"--{name.replace('_', '-')} has no effect {rule.why}"
            source = context.get_parameter_source(name)
            if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
                raise click.UsageError(text)
            if source is ParameterSource.ENVIRONMENT:
                click.echo(f"service-streamer: {text} (from the environment)", err=True)
