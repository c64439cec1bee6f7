"""Pickle a model for workers, items on their way to it, and results on their way back."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ModelError, UnpicklableItem
from .memory.payload import ATOMS, LARGE_IN_BATCH
from .model_spec import ModelSpec
from .payload_channel import Dump
from .protocol import summary
from .starting import ByValue, NotImportable

logger = logging.getLogger(__name__)

_PROTOCOL = pickle.HIGHEST_PROTOCOL

#: A pickled model beyond this is worth a warning: it is copied to every worker, and the web process
#: holds it as well.
_LARGE_SPEC_BYTES = 64 << 20


class Encoding(Protocol):
    """Makes a value into what goes with a message. Any thread."""

    def encode(self, value: Any) -> Any:
        """Bytes, or what has a method ``load``. Raises whatever pickling it raises."""

    def encode_with(self, dump: Dump, value: Any) -> Any:
        """The same, pickled by another function."""


class ItemPickling:
    """Pickles the items of calls, and unpickles their results. Any thread.

    Args:
        encoder: for what is large.
        by_value: for classes that workers cannot import; None if they can import all.
        cannot_load: what is said of a result that cannot be unpickled.
    """

    def __init__(self, encoder: Encoding, by_value: ByValue | None, cannot_load: str) -> None:
        self._encode: Callable[[Any], Any] = encoder.encode
        if by_value is not None:
            self._encode = functools.partial(encoder.encode_with, by_value.dump)
        self._cannot_load = cannot_load

    def encode(self, items: Sequence[Any]) -> Sequence[Any]:
        """Raises UnpicklableItem."""
        try:
            if len(items) == 1:  # the usual call; and the garbage collector ignores such a tuple
                (item,) = items
                kind = type(item)
                if kind in ATOMS and (
                    kind is not str or len(item) < LARGE_IN_BATCH
                ):  # one call less
                    return (pickle.dumps(item, _PROTOCOL),)
                return (self._encode(item),)
            return [self._encode(item) for item in items]
        except (Exception, SystemExit) as error:  # in pickling it is no wish to end
            # Without its traceback, whose frames hold the items.
            raise _unpicklable(items, error, self._encode) from error.with_traceback(None)

    def decode(self, outputs: list[Any]) -> list[Any]:
        """Raises ModelError."""
        try:
            if len(outputs) == 1:  # the usual call
                (output,) = outputs
                return [pickle.loads(output) if type(output) is bytes else output.load()]
            return [
                pickle.loads(output) if type(output) is bytes else output.load()
                for output in outputs
            ]
        except (Exception, SystemExit) as error:
            raise self.unloadable(error) from error.with_traceback(None)

    def unloadable(self, error: BaseException) -> ModelError:
        """The error for results that could not be unpickled."""
        return ModelError(f"{self._cannot_load}: {summary(error)}")


def _unpicklable(
    items: Sequence[Any], error: BaseException, encode: Callable[[Any], object]
) -> UnpicklableItem:
    """The error for a batch of which an item raised ``error`` when it was pickled."""
    for position, item in enumerate(items):
        try:
            encode(item)
        except (Exception, SystemExit):
            where = f"item {position} of the batch, of type {type(item).__qualname__},"
            break
    else:
        where = "an item of the batch"  # not the second time
    return UnpicklableItem(
        f"{where} cannot be sent to a worker process ({summary(error)}); "
        "pass plain data such as text, numbers, bytes or arrays"
    )


def pickled_spec(spec: ModelSpec, by_value: ByValue) -> bytes:
    """Raises TypeError: it cannot be pickled."""
    try:
        pickled = by_value.dumps(spec)
    except NotImportable:
        raise
    except Exception as error:
        raise TypeError(
            f"the model or its init arguments cannot be sent to a worker process "
            f"({summary(error)}); define the function or class at the top level of a module, or "
            'name it by an import string "package.module:Name"'
        ) from error
    if len(pickled) > _LARGE_SPEC_BYTES:
        logger.warning(
            "the model is %d MB when pickled, and every worker gets a copy; "
            "with a ManagedModel subclass the workers load it themselves",
            len(pickled) >> 20,
        )
    return pickled
