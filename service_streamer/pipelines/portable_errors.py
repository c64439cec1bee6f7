"""Errors of a worker that the web process can load, which has neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InvalidInput
from ..gpu.device_errors import is_out_of_memory


@contextmanager
def portable_errors() -> Iterator[None]:
    """Replace errors by those that the web process can load."""
    try:
        yield
    except Exception as error:
        known = portable(error)
        if known is error:
            raise
        raise known from error


def portable(error: Exception) -> Exception:
    """The error, or a substitute that the web process can load without transformers."""
    if is_out_of_memory(error):
        return error  # the worker makes the batch smaller
    module = type(error).__module__.partition(".")[0]
    if module in ("builtins", "service_streamer"):
        return error
    if type(error).__name__ == "PipelineException":  # of an input that a pipeline refuses
        return InvalidInput(f"inputs: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")
