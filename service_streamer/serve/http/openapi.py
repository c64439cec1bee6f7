"""The OpenAPI 3.1 document of a service, from the schemas that check its requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ... import __version__
from ...options.checks import LONGEST_TENANT
from ...pipelines.custom import DATATYPES
from ...pipelines.tasks import TASKS, parameter_schemas
from ..v2.infer_answer import VERSION, inputs_of
from .generation_schemas import FORM_KINDS
from .hub_generation import HUB_PARAMETERS
from .operations import OPERATIONS, Operation, Page
from .predicting import TEXT_FROM_TEXT
from .schemas import ErrorResponse
from .service import Service
from .v2_pages import CONTROL

_REF = "#/components/schemas/{name}"

_ERRORS = {
    "400": "The body is not JSON",
    "401": "The key is missing or wrong",
    "403": "The key is not for this",
    "404": "The model does not support this operation",
    "408": "The body did not arrive in time",
    "413": "The request is too large",
    "415": "The model does not take files, or the body is compressed in another way than gzip or "
    "deflate",
    "422": "A field has a wrong type or value, or the model refuses the input",
    "429": "The limit of the key is reached; see the header Retry-After",
    "500": "The model failed; find the error's id in the service's log",
    "501": "The header Transfer-Encoding is not supported",
    "503": "Overloaded, loading or stopping; see the header Retry-After",
    "504": "The result was not ready in time",
}

_V2_ERRORS = {
    **{status: text for status, text in _ERRORS.items() if status != "422"},
    "400": "The request is malformed, or does not fit the model",
    "404": "There is no such model or version",
    "415": "The body is compressed in another way than gzip or deflate",
    "501": "The service lacks numpy, or the header Transfer-Encoding is not supported",
}

_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Seconds to wait for the result, up to the service's limit",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
}

_REQUEST_ID = {
    "name": "X-Request-ID",
    "in": "header",
    "description": "Your id of this request. The answer and the log repeat it",
    "schema": {"type": "string", "maxLength": 128},
}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

_PRIORITY = {"description": "Higher priorities go first", "schema": {"type": "integer"}}
_TENANT = {
    "description": "Tenant of the request; tenants get fair shares of the model",
    "schema": {"type": "string", "maxLength": LONGEST_TENANT},
}


def openapi(service: Service, pages: Iterable[Page]) -> dict[str, Any]:
    """The document, with the operations of this model, and what GET answers."""
    operations = [op for op in OPERATIONS if service.offers(op.does)]
    requests = [op.request_for(service.description) for op in operations]
    answers = [Any if op.response is None else op.response for op in operations]
    (error, *schemas), components = msgspec.json.schema_components(
        [ErrorResponse, *answers, *requests], ref_template=_REF
    )
    task = service.description.get("task")
    for op in operations:
        schema = components[op.request_for(service.description).__name__]["properties"]
        if task is not None and "parameters" in schema:
            schema["parameters"]["properties"] = parameter_schemas(task, op.does)
            schema["parameters"]["additionalProperties"] = False
            if task in TEXT_FROM_TEXT and op.path in ("/", "/generate"):
                schema["parameters"]["properties"] |= _hub_parameters()
    security: list[Any] = [{"bearer": []}, {"key": []}] if service.options.needs_key else []
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": service.model,
            "summary": f"{task or 'a model'}, served by service_streamer",
            "version": __version__,
        },
        "paths": {
            op.path: {"post": _post(service, op, answer, error)}
            for op, answer in zip(operations, schemas, strict=False)
        },
        "components": {"schemas": components},
    }
    document["paths"] |= {
        page.path: {"get": _get(page, service, error)} for page in pages if page.summary
    }
    document["paths"] |= _v2_paths(service)
    components |= _v2_components(service)
    if security:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = security
    return document


def _hub_parameters() -> dict[str, Any]:
    """Schemas of the parameters of text-generation-inference."""
    schemas = {name: parameter.schema() for name, parameter in HUB_PARAMETERS.items()}
    form = {"type": {"enum": FORM_KINDS}, "value": {}, "json_schema": {}, "pattern": {}}
    about = "The text's form: a JSON schema, or a regular expression."
    schemas["grammar"] = {"type": ["object", "null"], "properties": form, "description": about}
    return schemas


def _post(service: Service, operation: Operation, answer: Any, error: Any) -> dict[str, Any]:
    request = operation.request_for(service.description)
    statuses = {**_ERRORS}
    for status in () if service.options.needs_key else ("401", "403", "429"):
        del statuses[status]
    if operation.is_openais:
        statuses["400"] = f"{statuses['400']}. {statuses.pop('422')}"
    result = _response("The result", answer)
    if operation.streams:
        result["content"]["text/event-stream"] = {}
        result["description"] += (
            '. With "stream": true an event for each output, then [DONE], or an error'
        )
    content: dict[str, Any] = {"schema": _ref(request.__name__)}
    value = service.description.get("example")
    if value is not None and operation.example is not None:
        content["example"] = operation.example(value)
    return {
        "summary": operation.summary,
        "tags": ["model"],
        "operationId": _id(operation.path),
        "parameters": [
            _TIMEOUT,
            _REQUEST_ID,
            *(
                {"name": name.title().decode(), "in": "header", **rest}
                for name, rest in (
                    (service.options.priority_header, _PRIORITY),
                    (service.options.tenant_header, _TENANT),
                )
                if name
            ),
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": content}
            | (_files(service) if operation.takes_files else {}),
        },
        "responses": {
            "200": result,
            **{status: _error(status, text, error) for status, text in statuses.items()},
        },
    }


def _files(service: Service) -> dict[str, Any]:
    """Content types besides JSON that the model takes."""
    task = TASKS.get(service.description.get("task", ""))
    text = {"type": "string"}
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    of_form = text if task is not None and task.takes == "text" else file
    form = {
        "type": "object",
        "properties": {
            "inputs": {"anyOf": [of_form, {"type": "array", "items": of_form, "minItems": 1}]},
            "parameters": {"type": "string", "contentMediaType": "application/json"},
        },
        "required": ["inputs"],
    }
    content: dict[str, Any] = {"multipart/form-data": {"schema": form}}
    if of_form is file:
        kinds = ("image/*", "audio/*") if task is None else (f"{task.takes}/*",)
        content |= {kind: {"schema": {}} for kind in (*kinds, "application/octet-stream")}
    return content


def _get(page: Page, service: Service, error: Any) -> dict[str, Any]:
    schema = {"text/plain": {"type": "string"}, "application/json": {"type": "object"}}
    content = {"schema": schema[page.media]} if page.media in schema else {}
    responses: dict[str, Any] = {
        "200": {"description": page.response, "content": {page.media: content}}
    }
    if page.unready:
        responses["503"] = _response(page.unready, {"type": "object"})
    operation: dict[str, Any] = {
        "summary": page.summary,
        "operationId": _id(page.path),
        "tags": ["service"],
        "responses": responses,
    }
    if "{model}" in page.path:
        operation["parameters"] = [{**_MODEL, "example": service.model}]
        responses["404"] = _error("404", "There is no such model", error)
    if not page.needs_key:
        operation["security"] = []
    elif service.options.needs_key:
        for status in ("401",) if page.scope is None else ("401", "403"):
            responses[status] = _error(status, _ERRORS[status], error)
    return operation


def _id(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_") or "infer"


def _error(status: str, text: str, schema: Any) -> dict[str, Any]:
    response = _response(text, schema)
    if status in ("429", "503"):
        seconds = {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}
        response["headers"] = {"Retry-After": seconds}
    return response


def _response(text: str, schema: Any) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


# -- the Open Inference Protocol

_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Bytes of JSON at the beginning of a body with binary data",
    "schema": {"type": "integer", "minimum": 1},
}


def _v2_components(service: Service) -> dict[str, Any]:
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


def _v2_paths(service: Service) -> dict[str, Any]:
    """The paths."""
    name = {
        "name": "model_name", "in": "path", "required": True, "schema": {"enum": [service.model]},
    }  # fmt: skip
    version = {
        "name": "model_version", "in": "path", "required": True, "schema": {"enum": [VERSION]},
    }  # fmt: skip
    is_open: dict[str, Any] = {"security": []}
    paths: dict[str, Any] = {
        "/v2": {"get": _v2_get("The server and its extensions", "V2Server") | is_open},
        "/v2/health/live": {"get": _v2_get("Whether the web process answers") | is_open},
        "/v2/health/ready": {
            "get": _v2_get("Whether the service is ready", unready=True) | is_open
        },
    }
    for middle, parameters in (("", [name]), ("/versions/{model_version}", [name, version])):
        place = f"/v2/models/{{model_name}}{middle}"
        about = _v2_get("A model's inputs and outputs", "V2Model", unready=True)
        ready = _v2_get("Whether the model is ready", unready=True)
        config = _v2_get("A model's configuration, in Triton's form", unready=True)
        for each in (about, ready, config):
            for status in ("401", "404") if service.options.needs_key else ("404",):
                each["responses"][status] = _v2_response(_V2_ERRORS[status], "V2Error")
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
            found = _v2_response(found["description"], None)
            found["content"]["application/json"]["schema"] = _list(
                _object({each: {"type": "string"} for each in _INDEX}, *_INDEX)
            )
        own = {} if is_index else {status: more[status] for status in more}
        texts = {**{status: _V2_ERRORS[status] for status in refusals}, **own}
        operation: dict[str, Any] = {
            "summary": summary if is_index else f"{summary} a model",
            "responses": {
                "200": found,
                **{status: _v2_response(text, "V2Error") for status, text in texts.items()},
            },
        }
        if not is_index:
            operation["parameters"] = [name]
        paths[path] = {"post": operation}
    return paths


_INDEX = ("name", "version", "state", "reason")


_NO_SIGNS = str.maketrans({"/": "_", "{": "", "}": ""})


def _infer(service: Service) -> dict[str, Any]:
    statuses = {**_V2_ERRORS}
    for status in () if service.options.needs_key else ("401", "403", "429"):
        del statuses[status]
    result = _v2_response("The outputs", "V2Answer")
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
            **{status: _v2_response(text, "V2Error") for status, text in statuses.items()},
        },
    }


def _v2_get(summary: str, schema: str | None = None, *, unready: bool = False) -> dict[str, Any]:
    responses = {"200": _v2_response(summary, schema)}
    if unready:
        responses["503"] = _v2_response("Not ready", None)
    return {"summary": summary, "responses": responses}


def _v2_response(text: str, schema: str | None) -> dict[str, Any]:
    return _response(text, {"type": "object"} if schema is None else _ref(schema))


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}
