"""A request for an inference: its form in JSON, and what HTTP and gRPC both make of theirs. Pure.

{"id": ..., "parameters": {...}, "inputs": [{"name", "shape", "datatype", "parameters", "data"}],
 "outputs": [{"name", "parameters"}]}, followed by the binary data of the inputs that have
``binary_data_size`` in place of ``data``.

A row of each tensor makes an item for the model:

model                       tensors                 item
-----                       -------                 ----
a task                      one, BYTES              a text, or the bytes of a file
a user's, one input         one                     a view of the row
a user's, several inputs    several                 {name: a view of the row}
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from ...errors import InvalidInput
from ...pipelines.custom import DATATYPES, TensorSpec
from ...pipelines.tasks import TASKS
from .nested_lists import flat_texts

#: How many texts a tensor may have. Arbitrary: each takes 100 ns of the web process, and bytes.
_MOST_TEXTS = 1 << 18

_MOST_DIMENSIONS = 32

#: How many inputs a request may have, and how many outputs and parameters. Arbitrary: a body has
#: room for 300,000 and a message of gRPC for more, which take seconds.
_MOST_TENSORS = 1024

#: The protocol's sizes have 64 bits. Longer ones have products that Python does not print.
_LARGEST_SIZE = (1 << 63) - 1

_DATATYPES = frozenset(DATATYPES)


@functools.cache
def arrays() -> Any:
    """The module ``arrays``, as soon as a tensor needs it: it loads numpy."""
    from . import arrays as module

    return module


class InputTensor(NamedTuple):
    """A tensor of a request.

    Attributes:
        values: an array; of the datatype BYTES a flat list of texts or bytes.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    values: Any


class WantedOutput(NamedTuple):
    """A tensor that the answer is to have."""

    name: str
    is_binary: bool


class InferRequest(NamedTuple):
    """A request, whatever brought it.

    Attributes:
        id: repeated by the answer; empty if missing.
        parameters: of the whole request.
        wanted: the outputs to send; None for all.
        is_binary: whether outputs that say nothing of it are sent as binary data.
    """

    id: str
    parameters: dict[str, Any]
    inputs: list[InputTensor]
    wanted: list[WantedOutput] | None
    is_binary: bool


class _Input(Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Raw | UnsetType = UNSET


class _Output(Struct):
    name: str
    parameters: dict[str, Any] | None = None


class InferenceHeader(Struct):
    """The request's JSON."""

    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


_read_texts = msgspec.json.Decoder(list[str])


def parse_header(header: InferenceHeader, binary: memoryview) -> InferRequest:
    """The request of a header.

    Args:
        binary: what follows the header. Arrays are views of it.

    Raises:
        InvalidInput: an input or output is wrong.
    """
    check_counts(len(header.inputs), len(header.outputs or ()), len(header.parameters or ()))
    inputs = []
    for number, each in enumerate(header.inputs):
        where = f"inputs[{number}]"
        size = _binary_size(each, where)
        if size is None:
            values = _from_json(each, where)
        else:
            if size > len(binary):
                raise InvalidInput(
                    f"{where}.parameters.binary_data_size: {size} bytes are more than the "
                    f"{len(binary)} that follow the header and the inputs before"
                )
            values = read_binary(where, each.datatype, each.shape, binary[:size])
            binary = binary[size:]
        inputs.append(InputTensor(each.name, each.datatype, each.shape, values))
    if binary:
        raise InvalidInput(
            f"inputs: {len(binary)} bytes of binary data belong to no input; give each input its "
            "binary_data_size, and the header's length in Inference-Header-Content-Length"
        )
    parameters = header.parameters or {}
    is_binary = _flag(parameters.get("binary_data_output"), "parameters.binary_data_output")
    wanted = None
    if header.outputs:
        wanted = [
            _wanted(each, f"outputs[{number}]", is_binary=is_binary)
            for number, each in enumerate(header.outputs)
        ]
    if "binary_data_output" in parameters:
        parameters = {**parameters}
        del parameters["binary_data_output"]
    return InferRequest(header.id, parameters, inputs, wanted, is_binary)


def check_counts(inputs: int, outputs: int, parameters: int) -> None:
    """Before anything is made of them. Raises InvalidInput: there are too many."""
    for name, count, what in (
        ("inputs", inputs, "tensors"),
        ("outputs", outputs, "tensors"),
        ("parameters", parameters, "parameters"),
    ):
        if count > _MOST_TENSORS:
            raise InvalidInput(
                f"{name}: has {count} {what}, of which a request may have {_MOST_TENSORS}"
            )


def _binary_size(each: _Input, where: str) -> int | None:
    check_input(where, each.datatype, each.shape)
    size = None
    for name, value in (each.parameters or {}).items():
        if name != "binary_data_size":
            raise _unsupported(f"{where}.parameters", name)
        if type(value) is not int or value < 0:
            raise InvalidInput(f"{where}.parameters.binary_data_size: must be a number of bytes")
        size = value
    if (size is None) == (each.data is UNSET):
        raise InvalidInput(f"{where}: must have either data or the parameter binary_data_size")
    return size


def _unsupported(where: str, name: str) -> InvalidInput:
    return InvalidInput(f"{where}: {name[:100]!r} is not supported; leave it out")


def check_input(where: str, datatype: str, shape: Sequence[int]) -> None:
    """Raises InvalidInput: no tensor has this datatype or shape."""
    if datatype not in _DATATYPES:
        raise InvalidInput(
            f"{where}.datatype: must be one of {', '.join(DATATYPES)}; not {datatype[:40]!r}"
        )
    if not shape:
        raise InvalidInput(f"{where}.shape: must have a dimension, the batch; it is empty")
    if len(shape) > _MOST_DIMENSIONS:
        raise InvalidInput(f"{where}.shape: has more than {_MOST_DIMENSIONS} dimensions")
    if min(shape) < 1:
        raise InvalidInput(f"{where}.shape: each size must be at least 1; not {min(shape)}")
    if max(shape) > _LARGEST_SIZE:
        raise InvalidInput(f"{where}.shape: each size must be at most {_LARGEST_SIZE}")
    if datatype == "BYTES" and math.prod(shape) > _MOST_TEXTS:
        raise InvalidInput(
            f"{where}.shape: has {math.prod(shape)} elements of the type BYTES, of which a tensor "
            f"may have {_MOST_TEXTS}; send fewer at once"
        )


def read_binary(where: str, datatype: str, shape: Sequence[int], data: memoryview) -> Any:
    """The values of binary data. Raises InvalidInput."""
    try:
        if datatype == "BYTES":
            return split_texts(data, math.prod(shape))
        return arrays().array_of_bytes(datatype, shape, data)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _from_json(each: _Input, where: str) -> Any:
    assert isinstance(each.data, Raw)
    if each.datatype == "BF16":
        raise InvalidInput(f"{where}: BF16 has no form in JSON; send it as binary data")
    try:
        if each.datatype == "BYTES":
            return _texts(each.data, each.shape)
        return arrays().array_of_json(each.datatype, each.shape, each.data)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _texts(data: Raw, shape: Sequence[int]) -> list[str]:
    count = math.prod(shape)
    flat = flat_texts(bytes(data), count, len(shape))
    try:
        texts = _read_texts.decode(flat)
    except msgspec.DecodeError:
        raise ValueError("data must be a list of texts") from None
    if len(texts) != count:
        raise ValueError(f"its {len(texts)} elements are not the {count} of its shape")
    return texts


def split_texts(data: memoryview, count: int) -> list[bytes]:
    """The elements of the type BYTES: each behind its length, 4 bytes little-endian.

    Raises:
        ValueError: there are not so many, or one is cut off.
    """
    found: list[bytes] = []
    place, end = 0, len(data)
    while place < end and len(found) < count:
        if end - place < 4:
            raise ValueError("an element is cut off")
        (size,) = struct.unpack_from("<I", data, place)
        place += 4 + size
        if place > end:
            raise ValueError(f"an element of {size} bytes is cut off")
        found.append(bytes(data[place - size : place]))
    if len(found) != count or place != end:
        more = " or more" if place != end else ""
        raise ValueError(f"its {len(found)}{more} elements are not the {count} of its shape")
    return found


def _wanted(each: _Output, where: str, *, is_binary: bool) -> WantedOutput:
    for name, value in (each.parameters or {}).items():
        if name != "binary_data":
            raise _unsupported(f"{where}.parameters", name)
        is_binary = _flag(value, f"{where}.parameters.binary_data")
    return WantedOutput(each.name, is_binary)


def _flag(value: object, where: str) -> bool:
    if value is not None and type(value) is not bool:
        raise InvalidInput(f"{where}: must be true or false")
    return bool(value)


class Calling(NamedTuple):
    """What the parameters of a request say of its call.

    Attributes:
        timeout: seconds to wait for the result; None if it is not said.
        priority: higher goes first.
        parameters: the others, for the model.
    """

    timeout: float | None
    priority: int
    parameters: dict[str, Any]


_PLAIN = Calling(None, 0, {})

#: Of models with a state between requests, which there are none of here.
_OF_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")

#: The lowest of Triton's priorities that is taken.
_LOWEST = 1 << 30


def calling(parameters: Mapping[str, Any]) -> Calling:
    """Read ``timeout``, microseconds, and ``priority``, of which 1 is the highest; 0 is none.

    Raises:
        InvalidInput: one of them is wrong, or the request is one of a sequence.
    """
    if not parameters:
        return _PLAIN
    others = {  # Triton reserves these names for its own meanings
        name: value for name, value in parameters.items() if not name.startswith("triton_")
    }
    for name in _OF_SEQUENCES:
        if others.pop(name, None):
            raise _unsupported("parameters", name)
    timeout, priority = others.pop("timeout", None), others.pop("priority", 0)
    for name, value in (("timeout", timeout or 0), ("priority", priority)):
        if type(value) is not int or not 0 <= value <= (_LOWEST if name == "priority" else 1e15):
            wanted = "microseconds, a whole number" if name == "timeout" else "a whole number"
            raise InvalidInput(f"parameters.{name}: must be {wanted}, at least 0")
    return Calling(timeout / 1e6 if timeout else None, -priority, others)


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
    return _text_items(elements) if takes == "text" else elements


def _text_items(elements: list[Any]) -> list[Any]:
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
