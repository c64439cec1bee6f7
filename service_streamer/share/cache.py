"""Results that are kept for those who ask for the same again. Needs ``cachetools``."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from ..extras import missing

try:
    from cachetools import LRUCache, TTLCache
except ImportError as error:
    if error.name != "cachetools":
        raise
    text = missing("cache_size", error.name, "cache")
    raise ImportError(text, name=error.name) from error

__all__ = ["make_cache"]


def make_cache(
    size: int, ttl: float | None, clock: Callable[[], float]
) -> MutableMapping[bytes, Any]:
    """Results by key. Beyond its size the one goes that nobody has asked for the longest.

    Args:
        size: the most entries.
        ttl: how long one is kept after it was computed, seconds; None for as long as there is room.
        clock: seconds from a monotonic clock.
    """
    if ttl is None:
        return LRUCache(size)
    return TTLCache(size, ttl, timer=clock)
