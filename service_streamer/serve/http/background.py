"""Background tasks: what they raise unexpectedly is logged with its traceback."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Failures:
    """Keeps a task going that repeats something: an exception within the block ends there.

    The first one is logged with its traceback, and then no other one until the block succeeds.

    Args:
        what: what has failed, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_logged = False

    def __enter__(self) -> None:
        """The next attempt begins."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        if error is not None and not self._is_logged:
            logger.error("%s; trying again", self._what, exc_info=error)
        self._is_logged = error is not None
        return True


def start_task(work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
    """Start a task that is not awaited.

    Args:
        what: what has failed if it raises, for the log.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(functools.partial(_log_failure, what))
    return task


def _log_failure(what: str, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("%s", what, exc_info=error)
