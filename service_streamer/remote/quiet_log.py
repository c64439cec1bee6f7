"""Logging in threads that others rely on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from ..errors import InternalError
from ..workers.protocol import summary

logger = logging.getLogger(__name__)

#: Seconds until a bug that repeats is logged again. Arbitrary.
_REPEAT = 60.0
_last_logged = ("", 0.0)  # its text, and when


def quiet_log(name: str) -> Callable[..., None]:
    """A function that logs for a module; exceptions of a user's filters and handlers are ignored.

    It takes the level, the text, its arguments and ``exc_info``.
    """
    logger = logging.getLogger(name)

    def log(
        level: int, text: str, *arguments: object, exc_info: bool | BaseException = False
    ) -> None:
        with contextlib.suppress(Exception):
            logger.log(level, text, *arguments, exc_info=exc_info)

    return log


def report_bug(what: str, error: BaseException) -> InternalError:
    """Log a bug of this package, once a minute if it repeats; what the calls in hand fail with."""
    global _last_logged
    text, now = f"{what} failed; this is a bug in it: {summary(error)}", time.monotonic()
    if text != _last_logged[0] or now - _last_logged[1] >= _REPEAT:
        _last_logged = text, now
        with contextlib.suppress(Exception):  # as above
            logger.critical("%s failed; this is a bug in it", what, exc_info=error)
    return InternalError(text)
