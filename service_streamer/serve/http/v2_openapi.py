"""The Open Inference Protocol in the OpenAPI document of a service."""

from __future__ import annotations

from typing import Any

from ...pipelines.declared_tensors import DATATYPES
from ..v2.infer_answer import VERSION, inputs_of
from .service import Service
from .v2_pages import CONTROL

_ERRORS = {
    "400": "The request is malformed, or does not fit the model",
    "401": "The key is missing or wrong",
    "403": "The key is not for this",
    "404": "There is no such model or version",
    "408": "The body did not arrive in time",
    "413": "The request is too large",
    "415": "The body is compressed in another way than gzip or deflate",
    "429": "The limit of the key is reached; see the header Retry-After",
    "500": "The model failed; find the error's id in the service's log",
    "501": "The service lacks numpy, or the header Transfer-Encoding is not supported",
    "503": "Overloaded, loading or stopping; see the header Retry-After",
    "504": "The result was not ready in time",
}

_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Bytes of JSON at the beginning of a body with binary data",
    "schema": {"type": "integer", "minimum": 1},
}


def v2_components(service: Service) -> dict[str, Any]:
    """The schemas."""
    inputs = inputs_of(service.description)
    name: dict[str, Any] = {"type": "string"}
    if service.description.get("inputs"):
        name["enum"] = [each["name"] for each in inputs]
    kinds = sorted({each["datatype"] for each in inputs}) if inputs else [*DATATYPES]
    shape = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
    parameters = {"type": "object"}
    spec = {
        "name": {"type": "string"},
        "datatype": {"enum": [*DATATYPES]},
        "shape": {"type": "array", "items": {"type": "integer"}},
    }
    tensor = {
        "name": name,
        "shape": shape,
        "datatype": {"enum": kinds},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
        },
        "data": {"type": "array", "items": {}, "description": "The elements, flat or nested"},
    }
    wanted = {
        "name": {"type": "string"},
        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
    }
    output = {**spec, "parameters": parameters, "data": _list({})}
    return {
        "V2Error": _object({"error": {"type": "string"}}, "error"),
        "V2Server": _object(
            {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "extensions": {"type": "array", "items": {"type": "string"}},
            },
            "name", "version", "extensions",
        ),
        "V2Model": _object(
            {
                "name": {"type": "string"},
                "versions": {"type": "array", "items": {"type": "string"}},
                "platform": {"type": "string"},
                "inputs": _list(_object(spec, *spec)),
                "outputs": _list(_object(spec, *spec)),
            },
            "name", "versions", "platform", "inputs", "outputs",
        ),
        "V2Request": _object(
            {
                "id": {"type": "string"},
                "parameters": {
                    "type": "object",
                    "properties": {
                        "timeout": {"type": "integer", "minimum": 0, "description": "µs"},
                        "priority": {"type": "integer", "minimum": 0},
                        "binary_data_output": {"type": "boolean"},
                    },
                },
                "inputs": {
                    **_list(_object(tensor, "name", "shape", "datatype")), "minItems": 1,
                },
                "outputs": _list(_object(wanted, "name")),
            },
            "inputs",
        ),
        "V2Answer": _object(
            {
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                "id": {"type": "string"},
                "outputs": _list(_object(output, "name", "datatype", "shape")),
            },
            "model_name", "model_version", "outputs",
        ),
    }  # fmt: skip


def v2_paths(service: Service) -> dict[str, Any]:
    """The paths."""
    name = {
        "name": "model_name", "in": "path", "required": True, "schema": {"enum": [service.model]},
    }  # fmt: skip
    version = {
        "name": "model_version", "in": "path", "required": True, "schema": {"enum": [VERSION]},
    }  # fmt: skip
    is_open: dict[str, Any] = {"security": []}
    paths: dict[str, Any] = {
        "/v2": {"get": _get("The server and its extensions", "V2Server") | is_open},
        "/v2/health/live": {"get": _get("Whether the web process answers") | is_open},
        "/v2/health/ready": {"get": _get("Whether the service is ready", unready=True) | is_open},
    }
    for middle, parameters in (("", [name]), ("/versions/{model_version}", [name, version])):
        place = f"/v2/models/{{model_name}}{middle}"
        about = _get("A model's inputs and outputs", "V2Model", unready=True)
        ready = _get("Whether the model is ready", unready=True)
        config = _get("A model's configuration, in Triton's form", unready=True)
        for each in (about, ready, config):
            for status in ("401", "404") if service.options.needs_key else ("404",):
                each["responses"][status] = _response(_ERRORS[status], "V2Error")
        infer = _infer(service)
        for each in (about, ready, config, infer):
            each["parameters"] = [*parameters, *each.get("parameters", ())]
        paths[place] = {"get": about}
        paths[f"{place}/ready"] = {"get": ready}
        paths[f"{place}/config"] = {"get": config}
        paths[f"{place}/infer"] = {"post": infer}
    control = _control_paths(service)
    paths |= control if service.options.needs_key else {CONTROL[0]: control[CONTROL[0]]}
    for path, item in paths.items():
        for method, operation in item.items():
            operation["operationId"] = method + path.translate(_NO_SIGNS)
            operation["tags"] = ["open inference protocol"]
    return paths


def _control_paths(service: Service) -> dict[str, Any]:
    """Loading and unloading of models."""
    name = {
        "name": "model", "in": "path", "required": True, "schema": {"type": "string"},
        "example": service.model,
    }  # fmt: skip
    refusals = ("400", "401", "403", "404", "413", "501", "503")
    more = {"409": "It is the last model"}
    paths: dict[str, Any] = {}
    for path, summary in zip(CONTROL, ("All models", "Load", "Unload"), strict=True):
        is_index = path == CONTROL[0]
        found: Any = {"description": "The models" if is_index else "It is done"}
        if is_index:
            found = _response(found["description"], None)
            found["content"]["application/json"]["schema"] = _list(
                _object({each: {"type": "string"} for each in _INDEX}, *_INDEX)
            )
        own = {} if is_index else {status: more[status] for status in more}
        texts = {**{status: _ERRORS[status] for status in refusals}, **own}
        operation: dict[str, Any] = {
            "summary": summary if is_index else f"{summary} a model",
            "responses": {
                "200": found,
                **{status: _response(text, "V2Error") for status, text in texts.items()},
            },
        }
        if not is_index:
            operation["parameters"] = [name]
        paths[path] = {"post": operation}
    return paths


_INDEX = ("name", "version", "state", "reason")


_NO_SIGNS = str.maketrans({"/": "_", "{": "", "}": ""})


def _infer(service: Service) -> dict[str, Any]:
    statuses = {**_ERRORS}
    for status in () if service.options.needs_key else ("401", "403", "429"):
        del statuses[status]
    result = _response("The outputs", "V2Answer")
    result["content"]["application/octet-stream"] = {}
    return {
        "summary": "Run the model on tensors",
        "parameters": [_LENGTH],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _ref("V2Request")},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "200": result,
            **{status: _response(text, "V2Error") for status, text in statuses.items()},
        },
    }


def _get(summary: str, schema: str | None = None, *, unready: bool = False) -> dict[str, Any]:
    responses = {"200": _response(summary, schema)}
    if unready:
        responses["503"] = _response("Not ready", None)
    return {"summary": summary, "responses": responses}


def _response(text: str, schema: str | None) -> dict[str, Any]:
    content = {"type": "object"} if schema is None else _ref(schema)
    return {"description": text, "content": {"application/json": {"schema": content}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}
