"""Texts about errors, numbers and missing packages; logging in threads that others rely on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from .errors import InternalError

#: Maximum characters of an exception's text that messages, tracebacks and logs repeat. Arbitrary.
MAX_TEXT = 16_384

#: Seconds until a bug that repeats is logged again. Arbitrary.
_REPEAT = 60.0
_last_logged = ("", 0.0)  # its text, and when

_WEB = (
    "click httptools msgspec prometheus-client python-json-logger python-multipart starlette uvloop"
)

#: The packages of each extra in ``setup.cfg``. The package index has version 0.1.2 of 2019 under
#: this project's name, which ``service_streamer[redis]`` would install. So messages name these.
PACKAGES = {
    "cache": "cachetools",
    "gpu": "nvidia-ml-py",
    "grpc": "grpcio grpcio-health-checking grpcio-reflection numpy protobuf",
    "notebook": "cloudpickle",
    "opentelemetry": "opentelemetry-api opentelemetry-exporter-otlp-proto-http "
    "opentelemetry-instrumentation-asgi opentelemetry-sdk",
    "oip": "numpy",
    "plot": "matplotlib",
    "ray": "cloudpickle ray",
    "redis": "hiredis msgpack redis",
    "serve": f"{_WEB} nvidia-ml-py pillow safetensors tokenizers torch transformers",
    "structured": "llguidance",
    "web": _WEB,
}


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 item", "2 items", "3 batches"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def missing(what: str, package: str | None, extra: str) -> str:
    """The message for a feature, such as an option, that needs a package of an extra."""
    return f"{what} needs {package}: pip install {PACKAGES[extra]}"


@contextlib.contextmanager
def explain_missing(what: str, extra: str, *packages: str) -> Iterator[None]:
    """Imports within the block that fail for one of the packages say what to install."""
    try:
        yield
    except ImportError as error:
        # "redis.backoff" if the package is only a folder of that name in the working directory.
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise ImportError(missing(what, package, extra), name=package) from error


def summary(error: BaseException) -> str:
    """Type and text of an exception in one line; never raises."""
    try:
        text = str(error)
    except (Exception, SystemExit):
        text = "its text cannot be made"
    more = len(text) - MAX_TEXT
    if more > 0:
        text = f"{text[:MAX_TEXT]}... ({more} more characters)"
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def quiet_log(name: str, *, once: bool = False) -> Callable[..., None]:
    """A function that logs for a module; exceptions of a user's filters and handlers are ignored.

    It takes the level, the text, its arguments and ``exc_info``.

    Args:
        once: whether it logs only when it is called for the first time.
    """
    logger = logging.getLogger(name)
    is_silent = False

    def log(
        level: int, text: str, *arguments: object, exc_info: bool | BaseException = False
    ) -> None:
        nonlocal is_silent
        if not is_silent:
            is_silent = once
            with contextlib.suppress(Exception):
                logger.log(level, text, *arguments, exc_info=exc_info)

    return log


def report_bug(what: str, error: BaseException) -> InternalError:
    """Log a bug of this package, once a minute if it repeats; what the calls in hand fail with."""
    global _last_logged
    text, now = f"{what} failed; this is a bug in it: {summary(error)}", time.monotonic()
    if text != _last_logged[0] or now - _last_logged[1] >= _REPEAT:
        _last_logged = text, now
        _log(logging.CRITICAL, "%s failed; this is a bug in it", what, exc_info=error)
    return InternalError(text)


_log = quiet_log(__name__)
