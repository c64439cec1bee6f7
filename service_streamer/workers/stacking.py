"""A batch as one array, for models that ask for it (``ManagedModel.stack``).

    items of one shape and dtype, adjacent in one block
        -> one array, a view of all items without a copy
    items of one shape and dtype elsewhere
        -> one array with copies
    items of several shapes or dtypes
        -> one array per shape and dtype

Items may lie in another order in memory than in the batch, as concurrent callers allocate and queue
at their own speed. So the array has the order of the memory, and the results are sorted back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .mending import at_positions

#: Returns the memory at (address, size) if it is in use in one block; else None.
View = Callable[[int, int], memoryview | None]


class Stack(NamedTuple):
    """Items of a batch in one array, on their way through the stages of the model."""

    batch: Any  # its first dimension is the items; or what a stage made of it
    positions: Sequence[int]  # of its items in the whole batch

    def through(self, stage: Callable[[Any], Any]) -> Stack:
        """What a stage makes of it. Raises what that raises."""
        with at_positions(self.positions):
            return Stack(stage(self.batch), self.positions)


def stacks(items: Sequence[Any], view: View | None) -> list[Stack]:
    """The items as arrays, one per shape and dtype; without ``view`` they are copied.

    Raises TypeError: an item is neither a numpy array nor a torch tensor.
    """
    alike: dict[Any, list[int]] = {}
    for position, item in enumerate(items):
        kind = _kind(item)
        alike.setdefault((kind, item.shape, item.dtype), []).append(position)
    return [_stack(kind, items, positions, view) for (kind, _, _), positions in alike.items()]


def _kind(item: Any) -> Any:
    """The module that stacks an item."""
    for name, array in (("numpy", "ndarray"), ("torch", "Tensor")):
        module: Any = sys.modules.get(name)  # not loaded: the item is not of this module
        if module is not None and isinstance(item, getattr(module, array)):
            return module
    raise TypeError(
        "a model with stack = True takes numpy arrays or torch tensors as items; this item is a "
        f"{type(item).__qualname__}"
    )


def _stack(kind: Any, items: Sequence[Any], positions: list[int], view: View | None) -> Stack:
    alike = [items[position] for position in positions]
    addresses = [] if view is None else [_address(item) for item in alike]
    if view is not None and None not in addresses:
        first, size = alike[0], alike[0].nbytes
        order = sorted(zip(addresses, positions, strict=True))
        start = order[0][0]
        in_line = all(address == start + row * size for row, (address, _) in enumerate(order))
        memory = view(start, size * len(order)) if in_line else None
        if memory is not None:
            array = kind.frombuffer(memory, dtype=first.dtype).reshape(len(order), *first.shape)
            return Stack(array, [position for _, position in order])
    return Stack(_copied(kind, alike), positions)


def _copied(kind: Any, alike: list[Any]) -> Any:
    if hasattr(alike[0], "data_ptr"):
        return kind.stack(alike)
    if any(isinstance(item, kind.ma.MaskedArray) for item in alike):
        return kind.ma.stack(alike)
    # numpy.stack would change the byte order, and the gaps of structures.
    batch = kind.empty((len(alike), *alike[0].shape), alike[0].dtype)
    for row, item in enumerate(alike):
        batch[row, ...] = item  # the ellipsis keeps arrays of objects intact
    return batch


def _address(item: Any) -> Any:
    """Of its values, if the memory there alone determines them; else None."""
    if hasattr(item, "data_ptr"):
        is_strided = str(item.layout) == "torch.strided" and not item.is_quantized
        is_plain = is_strided and item.nbytes and item.is_contiguous()
        return item.data_ptr() if is_plain and not (item.is_conj() or item.is_neg()) else None
    is_plain = item.nbytes and item.flags.c_contiguous and not item.dtype.hasobject
    is_masked = hasattr(item, "mask")
    return item.__array_interface__["data"][0] if is_plain and not is_masked else None
