"""Logging of the command line to stderr: as text, or as JSON."""

from __future__ import annotations

import collections
import logging
import sys
from typing import Literal

__all__ = ["LogFormat", "configure_logging", "formatter", "was_logged"]

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(message)s"


#: The last logged errors.
_errors: collections.deque[str] = collections.deque(maxlen=16)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.ERROR:
            _errors.append(record.getMessage())


def was_logged(text: str) -> bool:
    """Whether an error with this text was logged, so that it is not repeated."""
    return any(text in error for error in [*_errors])


def formatter(log_format: LogFormat) -> logging.Formatter:
    """The form of a line."""
    if log_format == "text":
        return logging.Formatter(_TEXT)
    from pythonjsonlogger.json import JsonFormatter

    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    return JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names)


def configure_logging(log_format: LogFormat) -> None:
    """Configure logging of the command line's processes; the library never calls it."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # They repeat our starts and stops, and warn about clients' malformed requests.
    for name in ("uvicorn", "uvicorn.error", "_granian", "granian", "python_multipart"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.captureWarnings(True)
