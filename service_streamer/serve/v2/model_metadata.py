"""What the protocol says of the server and of a model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import __version__
from ...pipelines.custom import TensorSpec
from ...pipelines.tasks import TASKS
from .infer_answer import VERSION

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
