"""Sizes of batches for a model that pads them to a few sizes, as a compiled model does. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

#: Least ratio of the rates for which items are left. Arbitrary: costs are learned with some noise,
#: and every further batch takes time in the scheduler and in the worker.
_GAIN = 1.1


def fit_size(size: int, sizes: Sequence[int], duration: Callable[[float], float]) -> int:
    """How many of ``size`` items to cut now: all of them, or as many as need no padding.

    33 items that are padded to 64 take as long as 64. If a batch of 32 computes more items per
    second, the last item is better left to the next batch.

    Args:
        size: items that would be cut; at least 1.
        sizes: those that batches are padded to, ascending.
        duration: seconds for a batch of so many items.
    """
    at = bisect_right(sizes, size)
    if at in (0, len(sizes)) or sizes[at - 1] == size:
        return size
    below, above = sizes[at - 1], sizes[at]
    is_faster = below * duration(above) > _GAIN * size * duration(below)
    return below if is_faster else size


def read_sizes(sizes: object) -> tuple[int, ...]:
    """The sizes that a model's description names; none if they are not ascending whole numbers."""
    if not isinstance(sizes, (list, tuple)) or any(type(each) is not int for each in sizes):
        return ()
    is_ascending = all(left < right for left, right in zip((0, *sizes), sizes, strict=False))
    return tuple(sizes) if is_ascending else ()
