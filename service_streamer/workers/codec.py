"""Encode values as payloads, which travel in messages, and decode them where they arrive.

A payload is bytes, or stands for memory outside of the message and has a method ``load``. Each item
and each result is a payload of its own, so one that cannot travel fails alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pickle import dumps, loads
from typing import Any, Protocol

from ..errors import ModelError, UnpicklableItem
from ..reporting import summary
from .memory.payload import ATOMS, LARGE_IN_BATCH, PROTOCOL, Parts, dump
from .starting import ByValue, NotImportable

logger = logging.getLogger(__name__)

#: A pickled model beyond this is worth a warning: it is copied to every worker, and the web process
#: holds it as well.
_LARGE_SPEC_BYTES = 64 << 20


class Store(Protocol):
    """Memory outside of messages, for large values."""

    @property
    def large(self) -> float:
        """Values of this many bytes or more are put here."""

    def put(self, parts: Parts) -> Any:
        """Copy a pickled value; returns its payload, or None if there is no room."""


class Codec:
    """Pickles values; subclasses may encode them in another way. Any thread.

    Args:
        store: for large values; None puts everything into the message.
        by_value: sends classes that workers cannot import; None if they can import all.
        cannot_decode: what is said of results that cannot be decoded.
    """

    def __init__(
        self,
        store: Store | None = None,
        by_value: ByValue | None = None,
        cannot_decode: str = "a result cannot be unpickled",
    ) -> None:
        self._store = store
        self._make_pickler = None if by_value is None else by_value.pickler
        self._cannot_decode = cannot_decode

    def encode(self, value: Any) -> Any:
        """Returns the payload. Raises whatever pickling raises."""
        kind = type(value)
        if kind in ATOMS and (kind is not str or len(value) < LARGE_IN_BATCH):  # as most are
            return dumps(value, PROTOCOL)
        store = self._store
        if store is not None:
            pickled = dump(value, store.large, self._make_pickler)
            payload = pickled if isinstance(pickled, bytes) else store.put(pickled)
            if payload is not None:
                return payload
        return dump(value, math.inf, self._make_pickler)

    def decode(self, payload: Any) -> Any:
        """Returns the value. Raises whatever unpickling raises."""
        return loads(payload) if type(payload) is bytes else payload.load()

    def decode_again(self, payload: Any) -> Any:
        """Returns the value as it was sent, whoever has written to what ``decode`` returned."""
        if type(payload) is bytes:
            return loads(payload)
        return getattr(payload, "load_again", payload.load)()

    def refuse_item(self, error: BaseException, advice: str = "") -> Exception:
        """Returns the error for an item that raised ``error`` when a worker decoded it."""
        why = f"{summary(error)}{advice}"
        return UnpicklableItem(f"the item cannot be unpickled in the worker: {why}")

    def encode_items(self, items: Sequence[Any]) -> Sequence[Any]:
        """Encode the items of a call. Raises UnpicklableItem."""
        try:
            if len(items) == 1:  # the usual call; and the garbage collector ignores such a tuple
                (item,) = items
                return (self.encode(item),)
            return [self.encode(item) for item in items]
        except (Exception, SystemExit) as error:  # pickling must not end the caller's thread
            # Without its traceback, whose frames hold the items.
            raise self._unpicklable(items, error) from error.with_traceback(None)

    def decode_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Decode the outputs of a call. Raises ModelError."""
        try:
            if len(outputs) == 1:  # the usual call
                return [self.decode(outputs[0])]
            return [self.decode(output) for output in outputs]
        except (Exception, SystemExit) as error:
            failed = ModelError(f"{self._cannot_decode}: {summary(error)}")
            raise failed from error.with_traceback(None)

    def close(self) -> None:
        """Let go of the store. A thread that is just writing there still can."""
        self._store = None

    def _unpicklable(self, items: Sequence[Any], error: BaseException) -> UnpicklableItem:
        for position, item in enumerate(items):
            try:
                self.encode(item)
            except (Exception, SystemExit):
                where = f"item {position} of the batch, of type {type(item).__qualname__},"
                break
        else:
            where = "an item of the batch"  # the second attempt succeeded
        return UnpicklableItem(
            f"{where} cannot be sent to a worker process ({summary(error)}); "
            "pass plain data such as text, numbers, bytes or arrays"
        )


def encode_spec(spec: object, by_value: ByValue) -> bytes:
    """Pickle what workers load. Raises TypeError: it cannot be pickled."""
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
