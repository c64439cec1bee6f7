"""From the tensors of a request to items for the model: a row of each tensor makes an item. Pure.

model                       tensors                 item
-----                       -------                 ----
a task                      one, BYTES              a text, or the bytes of a file
a user's, one input         one                     a view of the row
a user's, several inputs    several                 {name: a view of the row}
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidInput
from ...pipelines.custom import TensorSpec
from ...pipelines.tasks import TASKS
from .infer_request import InferRequest, InputTensor, arrays


def count_of(inputs: Sequence[InputTensor]) -> int:
    """How many items the tensors have: the size of their first dimension. Raises InvalidInput."""
    if not inputs:
        raise InvalidInput("inputs: must have a tensor; it is empty")
    names: set[str] = set()  # a body has room for so many inputs that a list would take hours
    for number, each in enumerate(inputs):
        if each.name in names:
            raise InvalidInput(f"inputs[{number}].name: there are two inputs {each.name[:100]!r}")
        if each.shape[0] != inputs[0].shape[0]:
            raise InvalidInput(
                f"inputs[{number}].shape: the first size, that of the batch, must be that of the "
                f"other inputs, {inputs[0].shape[0]}; not {each.shape[0]}"
            )
        names.add(each.name)
    return inputs[0].shape[0]


def check_tensors(inputs: Sequence[InputTensor], specs: Sequence[TensorSpec]) -> None:
    """Compare a request with what the model declares.

    Args:
        specs: the declared inputs; empty for any.

    Raises:
        InvalidInput: they differ.
    """
    if not specs:
        return
    declared = {each["name"]: each for each in specs}
    for number, tensor in enumerate(inputs):
        where, spec = f"inputs[{number}]", declared.pop(tensor.name, None)
        if spec is None:
            names = ", ".join(repr(each["name"]) for each in specs)
            raise InvalidInput(
                f"{where}.name: the model has no input {tensor.name[:100]!r}; it has {names}"
            )
        if tensor.datatype != spec["datatype"]:
            raise InvalidInput(
                f"{where}.datatype: must be {spec['datatype']}; not {tensor.datatype}"
            )
        sizes = spec["shape"]
        is_alike = len(sizes) == len(tensor.shape) and all(
            wanted in (-1, size) for wanted, size in zip(sizes, tensor.shape, strict=True)
        )
        if not is_alike:
            raise InvalidInput(
                f"{where}.shape: must be {sizes}, where -1 is any size; not {[*tensor.shape]}"
            )
    if declared:
        names = ", ".join(map(repr, declared))
        raise InvalidInput(f"inputs: {names} must be there too; the request lacks it")


def items_of(request: InferRequest, description: Mapping[str, Any]) -> list[Any]:
    """The items, after ``count_of`` and ``check_tensors``. Raises InvalidInput."""
    inputs = request.inputs
    task = TASKS.get(description.get("task", ""))
    if task is not None:
        return _of_task(inputs, task.takes)
    is_declared = bool(description.get("inputs"))
    columns = [_rows(each, is_declared=is_declared) for each in inputs]
    if len(columns) == 1:
        return columns[0]
    names = [each.name for each in inputs]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


#: What a task takes.
_WANTED = {"text": "texts", "image": "images, as files", "audio": "sounds, as files"}


def _of_task(inputs: Sequence[InputTensor], takes: str) -> list[Any]:
    tensor = inputs[0]
    wanted = _WANTED[takes]
    if len(inputs) > 1:
        raise InvalidInput(f"inputs: the model takes one tensor, of {wanted}; not {len(inputs)}")
    if tensor.datatype != "BYTES":
        raise InvalidInput(
            f"inputs[0].datatype: must be BYTES, a tensor of {wanted}; not {tensor.datatype}"
        )
    if math.prod(tensor.shape) != tensor.shape[0]:
        raise InvalidInput(
            f"inputs[0].shape: must be [{tensor.shape[0]}], an element for each input; not "
            f"{[*tensor.shape]}"
        )
    elements: list[Any] = tensor.values
    return _texts(elements) if takes == "text" else elements


def _texts(elements: list[Any]) -> list[Any]:
    if type(elements[0]) is str:  # of JSON, and then all are
        return elements
    found = []
    for number, each in enumerate(elements):
        try:
            found.append(each.decode())
        except UnicodeDecodeError:
            raise InvalidInput(f"inputs[0]: element {number} is not valid UTF-8") from None
    return found


def _rows(tensor: InputTensor, *, is_declared: bool) -> list[Any]:
    if tensor.datatype == "BYTES":
        return _rows_of_texts(tensor, as_bytes=is_declared)
    return arrays().rows_of(tensor.values)  # type: ignore[no-any-return]


def _rows_of_texts(tensor: InputTensor, *, as_bytes: bool) -> list[Any]:
    """Texts or bytes; lists of them if the tensor has further dimensions."""
    elements: list[Any] = tensor.values
    if as_bytes:
        elements = [each.encode() if type(each) is str else each for each in elements]
    elif type(elements[0]) is bytes:
        with contextlib.suppress(UnicodeDecodeError):  # all stay bytes then, so that they are alike
            elements = [each.decode() for each in elements]
    if len(tensor.shape) == 1:
        return elements
    rows: list[Any] = arrays().array_of_texts(tensor.shape, elements).tolist()
    return rows
