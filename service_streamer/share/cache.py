"""When two items are the same, how results are kept for later, and copies of them."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, MutableMapping
from typing import Any

from ..errors import ModelError
from ..reporting import explain_missing, summary

#: Not the highest one, so that a key means the same whatever Python computes it.
_PROTOCOL = 5

#: Keys beyond so many bytes are replaced by digests, or the cache would hold every image twice.
_LONGEST_KEY = 256
#: What begins so is no pickle.
_DIGEST = b"#"


def key_of(item: Any) -> bytes | None:
    """What is the same for the same items only; None if the item has none."""
    try:
        key = pickle.dumps(item, _PROTOCOL)
    except (Exception, SystemExit):  # code of the item's
        return None
    if len(key) > _LONGEST_KEY:
        return _DIGEST + hashlib.blake2b(key, digest_size=32).digest()
    return key


class SharedOutput:
    """An output that several get. It stays as it was computed: each gets a copy of their own."""

    __slots__ = ("_output",)

    def __init__(self, output: Any) -> None:
        self._output = output

    @property
    def nbytes(self) -> int:
        """Bytes of it if it is encoded; 0 if that is unknown."""
        output = self._output
        size: int = len(output) if type(output) is bytes else getattr(output, "nbytes", 0)
        return size

    def copy(self) -> Any:
        """For the caller's thread: this may be code of the user's."""
        try:
            return copy.deepcopy(self._output)
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"a result of type {type(self._output).__qualname__} cannot be copied for one of "
                f"several callers, which deduplicate=True needs: {summary(error)}"
            ) from error.with_traceback(None)


def make_cache(
    size: int, ttl: float | None, clock: Callable[[], float]
) -> MutableMapping[Any, Any]:
    """Results by key. Beyond its size the least recently used one is dropped.

    Args:
        size: the most entries.
        ttl: how long one is kept after it was computed, seconds; None for as long as there is room.
        clock: seconds from a monotonic clock.

    Raises:
        ImportError: cachetools is not installed.
    """
    with explain_missing("cache_size", "cache", "cachetools"):
        from cachetools import LRUCache, TTLCache
    if ttl is None:
        return LRUCache(size)
    return TTLCache(size, ttl, timer=clock)
