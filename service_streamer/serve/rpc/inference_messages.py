"""The messages and the service of the Open Inference Protocol, package ``inference``.

Names and numbers of fields are the protocol's: clients of others depend on them. They are built
when this module is imported, in a pool of their own. So the protobuf of the user may be of any
version, and a program may have another copy of the same messages.

``read_message`` and ``write_message`` make requests of them, and of answers messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

#: Each method, and whether it has streams.
METHODS = {
    "ServerLive": False,
    "ServerReady": False,
    "ModelReady": False,
    "ServerMetadata": False,
    "ModelMetadata": False,
    "ModelConfig": False,
    "RepositoryIndex": False,
    "ModelInfer": False,
    "ModelStreamInfer": True,
}

#: Messages by name; an inner one has its outer one's name before a dot. A field is a number, a type
#: and a name; "*" is repeated, "map" is a map from strings to InferParameter, DataType is an enum.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 string* extensions",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": (
        "1 string name, 2 string* versions, 3 string platform, "
        "4 ModelMetadataResponse.TensorMetadata* inputs, "
        "5 ModelMetadataResponse.TensorMetadata* outputs"
    ),
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "ModelConfigRequest": "1 string name, 2 string version",
    "ModelInput": "1 string name, 2 DataType data_type, 4 int64* dims",
    "ModelOutput": "1 string name, 2 DataType data_type, 3 int64* dims",
    "ModelConfig": (
        "1 string name, 2 string platform, 17 string backend, 4 int32 max_batch_size, "
        "5 ModelInput* input, 6 ModelOutput* output"
    ),
    "ModelConfigResponse": "1 ModelConfig config",
    "RepositoryIndexRequest": "1 string repository_name, 2 bool ready",
    "RepositoryIndexResponse": "1 RepositoryIndexResponse.ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": (
        "1 string name, 2 string version, 3 string state, 4 string reason"
    ),
    "InferParameter": (
        "1 bool bool_param, 2 int64 int64_param, 3 string string_param, 4 double double_param, "
        "5 uint64 uint64_param"
    ),
    "InferTensorContents": (
        "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, "
        "4 uint32* uint_contents, 5 uint64* uint64_contents, 6 float* fp32_contents, "
        "7 double* fp64_contents, 8 bytes* bytes_contents"
    ),
    "ModelInferRequest": (
        "1 string model_name, 2 string model_version, 3 string id, 4 map parameters, "
        "5 ModelInferRequest.InferInputTensor* inputs, "
        "6 ModelInferRequest.InferRequestedOutputTensor* outputs, 7 bytes* raw_input_contents"
    ),
    "ModelInferRequest.InferInputTensor": (
        "1 string name, 2 string datatype, 3 int64* shape, 4 map parameters, "
        "5 InferTensorContents contents"
    ),
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 map parameters",
    "ModelInferResponse": (
        "1 string model_name, 2 string model_version, 3 string id, 4 map parameters, "
        "5 ModelInferResponse.InferOutputTensor* outputs, 6 bytes* raw_output_contents"
    ),
    "ModelInferResponse.InferOutputTensor": (
        "1 string name, 2 string datatype, 3 int64* shape, 4 map parameters, "
        "5 InferTensorContents contents"
    ),
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
}

#: Values of the enum DataType, in the order of their numbers.
_DATA_TYPES = (
    "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
)

_FIELD: Any = descriptor_pb2.FieldDescriptorProto


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="service_streamer/open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    kinds = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES.split()):
        kinds.value.add(name=f"TYPE_{name}", number=number)
    messages: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        outer, _, own = name.rpartition(".")
        message = (messages[outer].nested_type if outer else file.message_type).add(name=own)
        messages[name] = message
        if name == "InferParameter":
            message.oneof_decl.add(name="parameter_choice")
        for field in filter(None, fields.split(", ")):
            _add(message, name, *field.split())
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name, has_streams in METHODS.items():
        asked = "ModelInfer" if name == "ModelStreamInfer" else name
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.{asked}Request",
            output_type=f".{PACKAGE}.{name}Response",
            client_streaming=has_streams,
            server_streaming=has_streams,
        )
    return file


def _add(message: Any, owner: str, number: str, kind: str, name: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.endswith("*") or kind == "map":
        field.label = _FIELD.LABEL_REPEATED
        kind = kind.removesuffix("*")
    if kind == "map":
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        _add(entry, "", "1", "string", "key")
        _add(entry, "", "2", "InferParameter", "value")
        kind = f"{owner}.ParametersEntry"
    if kind[0].isupper():
        field.type = _FIELD.TYPE_ENUM if kind == "DataType" else _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
    if owner == "InferParameter":
        field.oneof_index = 0


POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(_file().SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ModelConfigRequest = _message("ModelConfigRequest")
ModelConfigResponse = _message("ModelConfigResponse")
ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelMetadataRequest = _message("ModelMetadataRequest")
ModelMetadataResponse = _message("ModelMetadataResponse")
ModelReadyRequest = _message("ModelReadyRequest")
ModelReadyResponse = _message("ModelReadyResponse")
ModelStreamInferResponse = _message("ModelStreamInferResponse")
RepositoryIndexRequest = _message("RepositoryIndexRequest")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
ServerLiveResponse = _message("ServerLiveResponse")
ServerMetadataResponse = _message("ServerMetadataResponse")
ServerReadyResponse = _message("ServerReadyResponse")


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
