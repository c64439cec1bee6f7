"""A batch as one array, for models that ask for it (``ManagedModel.stack``).

    items of one shape and dtype, whose memory is that of one block, each right behind another
        -> one array that looks at all of them: nothing is copied
    of one shape and dtype, wherever they are
        -> one array that they are copied into
    of several shapes or dtypes
        -> as many arrays, each with those that are alike

Rows need not lie in the order in which their items were asked for: callers who come at the same
time take room and get into the line each at their own speed. So the order of a batch is the one
that its memory has, and its results are put in order again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Stack", "View", "stacks"]

#: The memory at an address, of so many bytes, if all of it is held and of one piece; else None.
View = Callable[[int, int], memoryview | None]


class Stack:
    """Items of a batch in one array.

    Attributes:
        batch: the array or tensor; its first dimension is that of the items.
        positions: in the whole batch, of the items as they stand in it.
    """

    __slots__ = ("batch", "positions")

    def __init__(self, batch: Any, positions: Sequence[int]) -> None:
        self.batch = batch
        self.positions = positions


def stacks(items: Sequence[Any], view: View | None) -> list[Stack]:
    """The items as arrays, as few as there are shapes and dtypes.

    Args:
        view: finds out whether their memory is of one piece; None copies them.

    Raises:
        TypeError: one is neither a numpy array nor a torch tensor.
    """
    alike: dict[Any, list[int]] = {}
    for position, item in enumerate(items):
        kind = _kind(item)
        alike.setdefault((kind, item.shape, item.dtype), []).append(position)
    return [_stack(kind, items, positions, view) for (kind, _, _), positions in alike.items()]


def _kind(item: Any) -> Any:
    """What it is stacked by."""
    for name, array in (("numpy", "ndarray"), ("torch", "Tensor")):
        module: Any = sys.modules.get(name)  # else it is none of these
        if module is not None and isinstance(item, getattr(module, array)):
            return module
    raise TypeError(
        "a model with stack = True gets numpy arrays or torch tensors, to be the rows of one; this "
        f"item is of type {type(item).__qualname__}"
    )


def _stack(kind: Any, items: Sequence[Any], positions: list[int], view: View | None) -> Stack:
    alike = [items[position] for position in positions]
    if view is not None and all(map(_is_plain, alike)):
        first, size = alike[0], alike[0].nbytes
        addresses = sorted(
            (_address(item), position) for item, position in zip(alike, positions, strict=True)
        )
        start = addresses[0][0]
        in_line = all(address == start + row * size for row, (address, _) in enumerate(addresses))
        memory = view(start, size * len(addresses)) if in_line else None
        if memory is not None:
            shape = (len(addresses), *first.shape)
            array = kind.frombuffer(memory, dtype=first.dtype).reshape(shape)
            return Stack(array, [position for _, position in addresses])
    return Stack(_copied(kind, alike), positions)


def _copied(kind: Any, alike: list[Any]) -> Any:
    if hasattr(alike[0], "data_ptr"):
        return kind.stack(alike)
    if any(isinstance(item, kind.ma.MaskedArray) for item in alike):
        return kind.ma.stack(alike)
    # numpy's own would have the machine's byte order, and structures without gaps.
    batch = kind.empty((len(alike), *alike[0].shape), alike[0].dtype)
    for row, item in enumerate(alike):
        batch[row, ...] = item  # also a single object is one
    return batch


def _is_plain(item: Any) -> bool:
    """Whether its memory says all about it."""
    if hasattr(item, "data_ptr"):
        is_strided = str(item.layout) == "torch.strided" and not item.is_quantized
        return bool(
            is_strided
            and item.nbytes
            and item.is_contiguous()
            and not (item.is_conj() or item.is_neg())
        )
    is_array = bool(item.nbytes and item.flags.c_contiguous and not item.dtype.hasobject)
    return is_array and not hasattr(item, "mask")


def _address(item: Any) -> int:
    if hasattr(item, "data_ptr"):
        return int(item.data_ptr())
    address, _ = item.__array_interface__["data"]
    return int(address)
