"""Between the messages of gRPC and requests and answers as HTTP has them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...errors import InvalidInput
from ..v2.infer_answer import VERSION, OutputTensor, binary_of
from ..v2.infer_request import (
    InferRequest,
    InputTensor,
    WantedOutput,
    arrays,
    check_counts,
    check_input,
    read_binary,
)
from .inference_messages import ModelInferResponse

#: The field of each datatype's elements. The others have none, and come as raw contents only.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def read_message(message: Any) -> InferRequest:
    """The request of a ModelInferRequest. Raises InvalidInput."""
    check_counts(len(message.inputs), len(message.outputs), len(message.parameters))
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidInput(
            f"raw_input_contents: must have an element for each of the {len(message.inputs)} "
            f"inputs; not {len(raw)}"
        )
    inputs = []
    for number, each in enumerate(message.inputs):
        where, shape, datatype = f"inputs[{number}]", [*each.shape], each.datatype
        check_input(where, datatype, shape)
        for name in each.parameters:
            raise _unsupported(f"{where}.parameters", name)
        if raw:
            if each.HasField("contents"):
                raise InvalidInput(f"{where}: has contents beside raw_input_contents; send one")
            values = read_binary(where, datatype, shape, memoryview(raw[number]))
        else:
            values = _from_contents(where, datatype, shape, each.contents)
        inputs.append(InputTensor(each.name, datatype, shape, values))
    wanted = None
    if message.outputs:
        for number, each in enumerate(message.outputs):
            for name in each.parameters:
                raise _unsupported(f"outputs[{number}].parameters", name)
        wanted = [WantedOutput(each.name, True) for each in message.outputs]
    return InferRequest(message.id, _parameters(message.parameters), inputs, wanted, True)


def _unsupported(where: str, name: str) -> InvalidInput:
    return InvalidInput(f"{where}: {name[:100]!r} is not supported; leave it out")


def _from_contents(where: str, datatype: str, shape: Sequence[int], contents: Any) -> Any:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidInput(f"{where}: {datatype} has no contents; send it in raw_input_contents")
    values = getattr(contents, field)
    if len(values) != math.prod(shape):
        raise InvalidInput(
            f"{where}.contents.{field}: its {len(values)} elements are not the "
            f"{math.prod(shape)} of shape {[*shape]}"
        )
    if datatype == "BYTES":
        return [*values]
    try:
        return arrays().array_of(datatype, shape, values)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _parameters(given: Any) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidInput(f"parameters.{name[:100]}: has no value")
        found[name] = getattr(value, choice)
    return found


def write_message(
    model: str, request: InferRequest, tensors: Sequence[tuple[OutputTensor, bool]]
) -> Any:
    """The ModelInferResponse of some outputs."""
    answer = ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
    for tensor, _ in tensors:
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(bytes(binary_of(tensor)))
    return answer
