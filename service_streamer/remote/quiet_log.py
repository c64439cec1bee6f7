"""Logging in threads that others rely on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

__all__ = ["quiet_log"]


def quiet_log(name: str) -> Callable[..., None]:
    """A function that logs for a module; exceptions of a user's filters and handlers are ignored.

    It takes the level, the text, its arguments and ``exc_info``.
    """
    logger = logging.getLogger(name)

    def log(level: int, text: str, *arguments: object, exc_info: bool = False) -> None:
        with contextlib.suppress(Exception):
            logger.log(level, text, *arguments, exc_info=exc_info)

    return log
