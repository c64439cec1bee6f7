"""Logging of the command line to stderr: as text, or as JSON.

Worker processes log as the process that starts them does. In a service of several models, lines
about a model name it. What logs them is a thread of each model, its workers, or its pool.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ..workers import starting

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


#: The models whose lines threads log.
_models: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()


def name_lines(thread: threading.Thread, model: str) -> None:
    """Have the lines that a thread logs name a model."""
    _models[thread] = model


@contextlib.contextmanager
def lines_of(model: str) -> Iterator[None]:
    """Have the lines that this thread logs within the block name a model."""
    thread = threading.current_thread()
    name_lines(thread, model)
    try:
        yield
    finally:
        del _models[thread]


def _model_of_thread() -> str | None:
    return _models.get(threading.current_thread())


class _TextFormatter(logging.Formatter):
    def __init__(self, model: Callable[[], str | None]) -> None:
        super().__init__(_TEXT)
        self._model = model

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's
        model = self._model()
        if model is not None:
            record.message = f"model {model}: {record.message}"
        return super().formatMessage(record)


def prepare_workers(log_format: LogFormat, model: Callable[[], str | None]) -> None:
    """Have workers that this process starts log as it does.

    Args:
        model: the one of a worker, asked for in the thread that starts it; None for none.
    """
    starting.preparation = lambda: functools.partial(configure_logging, log_format, model=model())


def formatter(log_format: LogFormat, model: Callable[[], str | None]) -> logging.Formatter:
    """The form of a line.

    Args:
        model: the one that a line is about, asked for in the thread that logs it; None for none.
    """
    if log_format == "text":
        return _TextFormatter(model)
    from pythonjsonlogger.json import JsonFormatter

    class WithModel(JsonFormatter):
        def add_fields(
            self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
        ) -> None:
            super().add_fields(log_data, record, message_dict)
            name = model()
            if name is not None:
                log_data["model"] = name

    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    return WithModel("%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names)


def configure_logging(
    log_format: LogFormat, *, names_models: bool = False, model: str | None = None
) -> None:
    """Configure logging of the command line's processes; the library never calls it.

    Args:
        names_models: whether lines about one of several models name it.
        model: in a worker: what all its lines name; None for nothing.
    """
    shown = _model_of_thread if names_models else lambda: model
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter(log_format, shown))
    prepare_workers(log_format, shown)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # It warns about clients' malformed requests.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    logging.captureWarnings(True)


logger = logging.getLogger(__name__)

#: Seconds between two lines that say that a model still loads, where a line cannot be redrawn.
_PATIENCE = 15.0


class LoadingProgress:
    """Says that a model is loading, for as long as it is, so that it does not look like a hang."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._can_redraw = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> LoadingProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join()

    def close(self) -> None:
        """It is loaded, or never will be."""
        with self._lock:
            if not self._is_over.is_set() and self._can_redraw:
                sys.stderr.write("\r\x1b[K")
            self._is_over.set()

    def _run(self) -> None:
        self._say()
        while not self._is_over.wait(0.5 if self._can_redraw else _PATIENCE):
            self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._began
        with self._lock:
            if self._is_over.is_set():
                return
            if self._can_redraw:
                sys.stderr.write(f"\r\x1b[Kwaiting for {self._what} ... {seconds:.0f} s")
                sys.stderr.flush()
            else:
                logger.info("waiting for %s ... %.0f s", self._what, seconds)
