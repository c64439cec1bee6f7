"""The OpenAPI 3.1 document of a service, from the schemas that check its requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ... import __version__
from ...options.checks import LONGEST_TENANT
from ...pipelines.tasks import TASKS, parameter_schemas
from .api_keys import METRICS
from .generation_schemas import FORM_KINDS
from .hub_generation import HUB_PARAMETERS
from .operations import OPERATIONS, Operation
from .predicting import TEXT_FROM_TEXT
from .schemas import ErrorResponse
from .service import Service
from .v2_openapi import v2_components, v2_paths

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

#: Paths that need the API key besides the operations: they reveal the traffic.
#: Each with the scope that the key must have; None for any.
LOCKED: Mapping[str, str | None] = {
    "/stats": METRICS,
    "/metrics": METRICS,
    "/events": METRICS,
    "/v1/models": None,
    "/v1/models/{model}": None,
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


def openapi(service: Service) -> dict[str, Any]:
    """The document, with the operations of this model."""
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
    document["paths"] |= _others(service, error) | v2_paths(service)
    components |= v2_components(service)
    for path in LOCKED if security else ():
        responses = document["paths"][path]["get"]["responses"]
        for status in ("401",) if LOCKED[path] is None else ("401", "403"):
            responses[status] = _error(status, _ERRORS[status], error)
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
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(name=request.__name__)}}
    example = _example(operation, service.description.get("example"))
    if example is not None:
        content["example"] = example
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


def _example(operation: Operation, value: Any) -> Any:
    make = _EXAMPLES.get(operation.path)
    return None if value is None or make is None else make(value)


#: A request for each operation that takes the example of the model.
_EXAMPLES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(
        ("/predict", "/", "/embed", "/embed_all", "/tokenize"), lambda value: {"inputs": value}
    ),
    "/generate": lambda value: {"text": value},
    "/v1/completions": lambda value: {"prompt": value},
    "/v1/chat/completions": lambda value: {"messages": [{"role": "user", "content": value}]},
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), lambda value: {"input": value}),
    "/rerank": lambda value: {"query": value, "texts": [value]},
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank"), lambda value: {"query": value, "documents": [value]}
    ),
}


def _others(service: Service, error: Any) -> dict[str, Any]:
    anything = {"type": "object"}
    text = {"text/plain": {"schema": {"type": "string"}}}
    metrics = {"description": "The metrics", "content": text}
    events = {"description": "Snapshots", "content": {"text/event-stream": {}}}
    unready = {"503": _response("The model is loading, stopping or broken", anything)}
    return {
        path: {"get": {"summary": summary, "operationId": _id(path), "tags": ["service"]} | rest}
        for path, summary, rest in (
            ("/health/live", "Whether the web process answers",
             {"responses": {"200": _response("It answers", anything)}, "security": []}),
            ("/health/ready", "Whether the model is ready",
             {"responses": {"200": _response("It is", anything)} | unready, "security": []}),
            ("/health", "The same, where text-embeddings-inference has it",
             {"responses": {"200": _response("It is", anything)} | unready, "security": []}),
            ("/info", "The served model and its limits",
             {"responses": {"200": _response("The model and the limits", anything)},
              "security": []}),
            ("/stats", "Current figures",
             {"responses": {"200": _response("A snapshot", anything)}}),
            ("/metrics", "Metrics for Prometheus", {"responses": {"200": metrics}}),
            ("/events", "A snapshot every second", {"responses": {"200": events}}),
            ("/v1/models", "The served models, in OpenAI's form",
             {"responses": {"200": _response("One model", anything)}}),
            ("/v1/models/{model}", "The model of this name, in OpenAI's form",
             {"parameters": [{**_MODEL, "example": service.model}],
              "responses": {"200": _response("The model", anything),
                            "404": _error("404", "There is no such model", error)}}),
        )
    }  # fmt: skip


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
