"""What the process of a service's pool does first. It loads nothing of the web."""

from __future__ import annotations

import functools
import logging
import signal

from ..pool import directory, pool_process
from .logs import LogFormat, formatter

__all__ = ["prepare_pools"]


def prepare_pools(log_format: LogFormat, folder: str | None = None) -> None:
    """Have pools that this process starts log as the service does, and end with it.

    Args:
        folder: where their files are; None if this process chooses.
    """
    directory.chosen = folder
    pool_process.preparation = functools.partial(_prepare, log_format)


def _prepare(log_format: LogFormat) -> None:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in root.handlers:  # the pool's, which waits for no reader
        handler.setFormatter(formatter(log_format))
    logging.captureWarnings(True)
    # An init system sends one of them to all processes of a service at once. The pool ends after
    # its clients, which drain first; if it ended too, they would start the next one.
    for number in (signal.SIGTERM, signal.SIGINT):
        # Unlike SIG_IGN no program inherits it that a worker's model starts.
        signal.signal(number, lambda *_: None)
