"""What a user's model says of its inputs and outputs, for clients that send tensors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

#: Names of the types of elements in the Open Inference Protocol.
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
)  # fmt: skip


class TensorSpec(TypedDict):
    """An input or output, in the form of the protocol's metadata.

    Attributes:
        shape: -1 for any size; the first dimension is the batch.
    """

    name: str
    datatype: str
    shape: list[int]


def declared_tensors(model: object, attribute: str) -> list[TensorSpec]:
    """The tensors that a model's class or function declares; empty if it declares none.

    Args:
        attribute: "inputs" or "outputs": a list of (name, datatype, shape).

    Raises:
        TypeError, ValueError: the attribute is there, and is no such list.
    """
    value = getattr(model, attribute, None)
    if value is None:
        return []
    where = f"{getattr(model, '__qualname__', model)}.{attribute}"
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{where} must be a list of (name, datatype, shape), such as "
            f'[("x", "FP32", (-1, 3))]; not {value!r:.100}'
        )
    specs = [_spec(each, f"{where}[{number}]") for number, each in enumerate(value)]
    names = [each["name"] for each in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where} has two tensors of the name {name!r}")
    return specs


def _spec(value: object, where: str) -> TensorSpec:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise TypeError(f"{where} must be (name, datatype, shape); not {value!r:.100}")
    name, datatype, shape = value
    if not isinstance(name, str) or not name:
        raise TypeError(f"{where}: the name must be a text; not {name!r:.100}")
    if datatype not in DATATYPES:
        raise ValueError(
            f"{where}: the datatype must be one of {', '.join(DATATYPES)}; not {datatype!r:.100}"
        )
    return {"name": name, "datatype": datatype, "shape": _shape(shape, where)}


def _shape(shape: Any, where: str) -> list[int]:
    is_shape = isinstance(shape, (list, tuple)) and all(
        type(size) is int and (size == -1 or size > 0) for size in shape
    )
    if not is_shape or not shape or shape[0] != -1:
        raise ValueError(
            f"{where}: the shape must be a list of sizes, or -1 for any size, of which the first, "
            f"that of the batch, is -1; not {shape!r:.100}"
        )
    return [*shape]
