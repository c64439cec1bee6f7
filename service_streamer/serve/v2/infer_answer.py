"""From the model's results to the tensors of an answer, and their form in JSON. Pure.

results, one for each item                  tensors
--------------------------                  -------
numbers, or arrays of one shape and type    "output", whose rows they are
dicts of those, with the same keys          one for each key
texts, or bytes                             "output", of the type BYTES
anything else                               "output", of the type BYTES: JSON

And what the protocol says of the server and of a model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ... import __version__
from ...errors import BadModelOutput, InvalidInput
from ...pipelines.custom import TensorSpec
from ...pipelines.requests import plain
from ...pipelines.tasks import TASKS
from .infer_request import InferRequest, WantedOutput, arrays

#: The version of every model: there is one.
VERSION = "1"

_TEXTS = frozenset((str, bytes))

#: The name of a tensor that the model does not name.
_OUTPUT = "output"


def _plain(value: Any) -> Any:
    """For ``msgspec``: numpy and torch values as lists and numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None and type(found := tolist()) is not type(value):  # as of np.longdouble
        return found
    raise TypeError(
        f"the model's result has a {type(value).__name__}, which is not JSON; return plain data"
    )


#: A result as JSON.
encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=_plain).encode


class OutputTensor(NamedTuple):
    """A tensor of an answer.

    Attributes:
        values: an array; of the datatype BYTES a list of texts or bytes.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    values: Any


def output_tensors(results: list[Any], specs: Sequence[TensorSpec]) -> list[OutputTensor]:
    """The tensors of some results, at least one.

    Args:
        specs: the outputs that the model declares; empty for whatever they are.

    Raises:
        BadModelOutput: the results are not what the model declares.
    """
    if specs:
        return _declared(results, specs)
    first = results[0]
    if isinstance(first, Mapping):
        columns = _columns(results, first)
        if columns is not None:
            return columns
    elif type(first) in _TEXTS:
        if _TEXTS.issuperset(map(type, results)):
            return [_of_texts(_OUTPUT, results)]
    else:
        tensor = _numeric(_OUTPUT, results)
        if tensor is not None:
            return [tensor]
    return [_of_texts(_OUTPUT, [encode(each).decode() for each in results])]


def _columns(results: Sequence[Any], first: Mapping[Any, Any]) -> list[OutputTensor] | None:
    """A tensor for each key; None if the results do not all have numbers at the same keys."""
    names = [*first]
    if not names or not all(type(name) is str and name for name in names):
        return None
    if any(type(value) in (str, type(None), dict) for value in first.values()):
        return None
    if not all(isinstance(each, Mapping) and each.keys() == first.keys() for each in results):
        return None
    columns = []
    for name in names:
        column = _numeric(name, [each[name] for each in results])
        if column is None:
            return None
        columns.append(column)
    return columns


def _numeric(name: str, results: Sequence[Any]) -> OutputTensor | None:
    found = arrays().stacked(results)
    if found is None:
        return None
    datatype, array = found
    return OutputTensor(name, datatype, array.shape, array)


def _of_texts(name: str, texts: Sequence[Any]) -> OutputTensor:
    return OutputTensor(name, "BYTES", [len(texts)], texts)


def _declared(results: Sequence[Any], specs: Sequence[TensorSpec]) -> list[OutputTensor]:
    if len(specs) == 1:
        [spec] = specs
        first = results[0]
        is_named = isinstance(first, Mapping) and spec["name"] in first
        # A dict is a text, too: as JSON.
        if not is_named and (spec["datatype"] == "BYTES" or not isinstance(first, Mapping)):
            return [_as_declared(results, spec)]
    found = []
    for spec in specs:
        name = spec["name"]
        for each in results:
            if not isinstance(each, Mapping) or name not in each:
                got = [*each] if isinstance(each, Mapping) else type(each).__qualname__
                raise BadModelOutput(
                    f"the model declares the output {name!r}, but a result is not a dict that has "
                    f"it; it is {got!r:.200}"
                )
        found.append(_as_declared([each[name] for each in results], spec))
    return found


def _as_declared(results: Sequence[Any], spec: TensorSpec) -> OutputTensor:
    name, datatype, wanted = spec["name"], spec["datatype"], spec["shape"]
    if datatype == "BYTES":
        return _of_bytes(name, results, wanted)
    found = arrays().stacked(results)
    if found is None:
        raise BadModelOutput(
            f"the output {name!r} is declared as {datatype}, but the results are no numbers or "
            "arrays of one shape and type"
        )
    _, array = found
    is_alike = len(wanted) == len(array.shape) and all(
        each in (-1, size) for each, size in zip(wanted, array.shape, strict=True)
    )
    if not is_alike:
        raise BadModelOutput(
            f"the output {name!r} is declared with shape {wanted}, but the results have shape "
            f"{[*array.shape]}"
        )
    return OutputTensor(name, datatype, array.shape, arrays().cast(array, datatype, name))


def _of_bytes(name: str, results: Sequence[Any], wanted: Sequence[int]) -> OutputTensor:
    """Texts, in lists as deep as the declared shape. Another value in place of a text is JSON."""
    shape, elements = [len(results)], [plain(each) for each in results]
    for size in wanted[1:]:
        lengths = {len(each) if isinstance(each, (list, tuple)) else None for each in elements}
        [length, *others] = lengths or {max(size, 0)}
        if length is None or others or size not in (-1, length):
            raise BadModelOutput(
                f"the output {name!r} is declared with shape {[*wanted]}, but a result is not of "
                f"that shape: {elements[0]!r:.100}"
            )
        shape.append(length)
        elements = [part for each in elements for part in each]
    texts = [each if type(each) in _TEXTS else encode(each).decode() for each in elements]
    return OutputTensor(name, "BYTES", shape, texts)


def chosen(
    tensors: Sequence[OutputTensor], request: InferRequest
) -> list[tuple[OutputTensor, bool]]:
    """The outputs that the request wants, and whether as binary data. Raises InvalidInput."""
    if request.wanted is None:
        return [(each, request.is_binary) for each in tensors]
    check_wanted(request.wanted, [each.name for each in tensors])
    by_name = {each.name: each for each in tensors}
    return [(by_name[each.name], each.is_binary) for each in request.wanted]


def check_wanted(wanted: Sequence[WantedOutput], names: Sequence[str]) -> None:
    """Raises InvalidInput: an output is asked for that is not there, or twice."""
    seen: set[str] = set()
    for number, each in enumerate(wanted):
        if each.name not in names:
            raise InvalidInput(
                f"outputs[{number}].name: the model has no output {each.name[:100]!r}; it has "
                f"{', '.join(map(repr, names))}"
            )
        if each.name in seen:
            raise InvalidInput(f"outputs[{number}].name: {each.name!r} is asked for twice")
        seen.add(each.name)


def binary_of(tensor: OutputTensor) -> bytes | memoryview:
    """The values as binary data."""
    if tensor.datatype == "BYTES":
        parts: list[bytes] = []
        for each in tensor.values:
            text = each.encode() if type(each) is str else each
            parts += struct.pack("<I", len(text)), text
        return b"".join(parts)
    return arrays().bytes_of(tensor.values, tensor.datatype)  # type: ignore[no-any-return]


def answer_of(
    model: str, request: InferRequest, tensors: Sequence[tuple[OutputTensor, bool]]
) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """The answer, for JSON, and the binary data that follow it. Raises InvalidInput."""
    outputs: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for tensor, is_binary in tensors:
        output: dict[str, Any] = {
            "name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape,
        }  # fmt: skip
        if is_binary:
            parts.append(binary_of(tensor))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = _data(tensor)
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if request.id:
        answer["id"] = request.id
    answer["outputs"] = outputs
    return answer, parts


def _data(tensor: OutputTensor) -> Any:
    """The values for JSON, flat."""
    if tensor.datatype != "BYTES":
        return tensor.values.reshape(-1)
    try:
        return [each if type(each) is str else each.decode() for each in tensor.values]
    except UnicodeDecodeError:
        raise InvalidInput(
            f"outputs: {tensor.name!r} has bytes that are no text; ask for it with the parameter "
            "binary_data"
        ) from None


#: What is understood besides the protocol itself, by Triton's names.
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters")
_OVER_HTTP = ("model_repository",)

#: Tasks whose results are numbers: so many dimensions.
_NUMERIC = {"feature-extraction": 3, "image-feature-extraction": 3}


def server_metadata(*, over_http: bool) -> dict[str, Any]:
    """The answer to ``GET /v2``, or to ``ServerMetadata`` of gRPC."""
    extensions = sorted(_EXTENSIONS + _OVER_HTTP if over_http else _EXTENSIONS)
    return {"name": "service_streamer", "version": __version__, "extensions": extensions}


def inputs_of(description: Mapping[str, Any]) -> list[TensorSpec]:
    """The inputs of a model; empty if it takes any."""
    task = TASKS.get(description.get("task", ""))
    if task is not None:
        return [{"name": task.takes, "datatype": "BYTES", "shape": [-1]}]
    return list(description.get("inputs") or ())


def outputs_of(description: Mapping[str, Any]) -> list[TensorSpec]:
    """The outputs of a model; empty if they are not known."""
    task = description.get("task", "")
    if task in _NUMERIC:
        return [{"name": "output", "datatype": "FP64", "shape": [-1] * _NUMERIC[task]}]
    if task in TASKS:
        return [{"name": "output", "datatype": "BYTES", "shape": [-1]}]
    return list(description.get("outputs") or ())


def wanted_of(description: Mapping[str, Any]) -> list[TensorSpec]:
    """What outputs have to be; empty where the results decide it.

    Those of ``feature-extraction`` are numbers, but of texts of several lengths they are no tensor.
    """
    return [] if description.get("task") in _NUMERIC else outputs_of(description)


def model_metadata(name: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to ``GET /v2/models/NAME``."""
    is_ours = description.get("task") in TASKS
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "transformers" if is_ours else "python",
        "inputs": inputs_of(description),
        "outputs": outputs_of(description),
    }


def model_config(name: str, description: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """The answer to ``GET /v2/models/NAME/config``; ``most`` rows are in a batch, if known."""
    about = model_metadata(name, description)
    return {
        "name": name,
        "platform": about["platform"],
        "backend": about["platform"],
        "max_batch_size": most or 1,  # with 0, dims would have the batch, too
        "input": [*map(_configured, about["inputs"])],
        "output": [*map(_configured, about["outputs"])],
    }


def _configured(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec["datatype"] == "BYTES" else spec["datatype"]
    return {"name": spec["name"], "data_type": f"TYPE_{kind}", "dims": [*spec["shape"][1:]]}
