"""What the process of a service's pool does first. It loads nothing of the web."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
from collections.abc import Iterator

from ..pool import directory, pool_protocol
from .logs import LogFormat, formatter, prepare_workers


def prepare_pools(
    log_format: LogFormat, folder: str | None = None, *, names_models: bool = False
) -> None:
    """Have pools that this process starts log as the service does, and end with it.

    Args:
        folder: where their files are; None if this process chooses.
        names_models: whether the lines of a pool name its model, if ``preparing`` has named it.
    """
    directory.chosen = folder
    pool_protocol.preparation = functools.partial(_prepare, log_format, names_models)


@contextlib.contextmanager
def preparing(model: str) -> Iterator[None]:
    """Name the model of the pools whose clients are made in the block. For one thread at a time."""
    before = pool_protocol.preparation
    if isinstance(before, functools.partial):  # of ``prepare_pools``
        log_format, names_models = before.args
        pool_protocol.preparation = functools.partial(_prepare, log_format, names_models, model)
    try:
        yield
    finally:
        pool_protocol.preparation = before


def _prepare(log_format: LogFormat, names_models: bool, model: str | None = None) -> None:
    shown = model if names_models else None
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in root.handlers:  # the pool's
        handler.setFormatter(formatter(log_format, lambda: shown))
    logging.captureWarnings(True)
    prepare_workers(log_format, lambda: shown)
    # An init system sends one of them to all processes of a service at once. The pool ends after
    # its clients, which drain first; if it ended too, they would start the next one.
    for number in (signal.SIGTERM, signal.SIGINT):
        # Unlike SIG_IGN no program inherits it that a worker's model starts.
        signal.signal(number, lambda *_: None)
