"""The operations over HTTP: each turns a body into items, and outputs into a body.

operation               items                                   form of the answer
---------               -------------------                     ----------------------
/predict                the inputs as they are, or              the Hugging Face pipeline
                        {"do": "predict", ...} for each
/                       the same                                Hugging Face's InferenceClient
/generate               {"do": "generate", ...}                 {"text": ...}
/v1/completions         {"do": "generate", ...} per prompt      OpenAI
/v1/embeddings          {"do": "embed", ...} per text           OpenAI
"""

from __future__ import annotations

import array
import base64
import math
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from ...errors import InvalidInput
from ...pipelines.tasks import TASKS
from .events import Form, OutputEvents
from .headers import Sent, read_sent
from .refusals import Refusal, undecodable
from .schemas import (
    NOT_OFFERED,
    Completion,
    CompletionsRequest,
    CompletionsResponse,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    GenerateRequest,
    GenerateResponse,
    HubRequest,
    HubTextRequest,
    PredictRequest,
    TextRequest,
    Usage,
    hub_answer,
    hub_parameters,
    refused_field,
)
from .streaming import EventStream

__all__ = ["OPERATIONS", "Description", "Operation", "encode", "plain"]

#: A model's description, see ``pipelines.PipelineModel``; empty for models without one.
Description = Mapping[str, Any]

#: Tasks whose inputs are texts only.
_TEXT_TASKS = frozenset(
    (
        "feature-extraction", "fill-mask", "ner", "sentiment-analysis", "text-classification",
        "text-generation", "token-classification", "zero-shot-classification",
    )
)  # fmt: skip


class Context(Protocol):
    """An operation's view of the service and the request."""

    @property
    def description(self) -> Description:
        """The model's description."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def content_type(self) -> bytes:
        """The header Content-Type; empty if missing."""

    def check_count(self, count: int) -> None:
        """Raises Refusal if the queue can never hold this many inputs."""

    async def compute(self, items: list[Any]) -> list[Any]:
        """Compute items in batches with other callers' items."""

    async def stream(self, item: Any, form: Form) -> EventStream:
        """Compute one item; its outputs are sent as they come. Returns with the first of them."""


class Operation(NamedTuple):
    """An operation, served by POST.

    Attributes:
        path: its path.
        does: the operation that the model must support.
        summary: for the documentation.
        request, response: schemas; None for anything.
        is_openais: whether its errors have OpenAI's statuses.
        streams: whether the answer may be server-sent events.
        run: computes the answer's body from the request's, or begins the stream that it is.
    """

    path: str
    does: str
    summary: str
    request: type[msgspec.Struct]
    response: type[msgspec.Struct] | None
    run: Callable[[bytes, Context], Awaitable[bytes | EventStream]]
    is_openais: bool = False
    streams: bool = False

    def request_for(self, description: Description) -> type[msgspec.Struct]:
        """The schema of this model's requests."""
        is_text = description.get("task") in _TEXT_TASKS
        return _OF_TEXTS.get(self.request, self.request) if is_text else self.request

    @property
    def takes_files(self) -> bool:
        """Whether a body may be a file, or a form with files."""
        return self.request in _OF_TEXTS


#: Schemas of requests for any model, and for models that take text.
_OF_TEXTS: Mapping[type[msgspec.Struct], type[msgspec.Struct]] = {
    PredictRequest: TextRequest,
    HubRequest: HubTextRequest,
}

#: Names of the model's parameters in /v1/completions.
_COMPLETIONS_NAMES = {
    "inputs": "prompt",
    "parameters.max_new_tokens": "max_tokens",
    "parameters.num_return_sequences": "n",
    **{f"parameters.{name}": name for name in ("temperature", "top_p", "stop", "seed")},
}


def plain(value: Any) -> Any:
    """For ``msgspec``: numpy and torch values as lists and numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(
        f"the model's result has a {type(value).__name__}, which is not JSON; return plain data"
    )


#: A result as JSON.
encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=plain).encode

_read_any = msgspec.json.Decoder(PredictRequest)
_read_texts = msgspec.json.Decoder(TextRequest)
_read_hubs_any = msgspec.json.Decoder(HubRequest)
_read_hubs_texts = msgspec.json.Decoder(HubTextRequest)
_read_parameters = msgspec.json.Decoder(dict[str, Any])
_read_generate = msgspec.json.Decoder(GenerateRequest)
_read_embeddings = msgspec.json.Decoder(EmbeddingsRequest)
_read_completions = msgspec.json.Decoder(CompletionsRequest)


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a body. Raises Refusal."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body:
            raise undecodable(msgspec.DecodeError("it is empty")) from None
        raise undecodable(error, getattr(decoder.type, "__struct_fields__", ())) from None


async def _predict(body: bytes, context: Context) -> bytes | EventStream:
    is_text = context.description.get("task") in _TEXT_TASKS
    request = _request(_read_texts if is_text else _read_any, body, context)
    inputs = request.inputs
    if request.stream:
        if isinstance(inputs, list) and len(inputs) != 1:
            raise _invalid(
                "stream",
                f"a stream is of one input, not of {len(inputs)}; send a request for each, or "
                "leave stream out",
            )
        [item] = _items(inputs, request.parameters, context)
        return await context.stream(item, OutputEvents(encode))
    outputs = await context.compute(_items(inputs, request.parameters, context))
    return encode(outputs if isinstance(inputs, list) else outputs[0])


async def _infer(body: bytes, context: Context) -> bytes:
    task = context.description.get("task")
    is_text = task in _TEXT_TASKS
    request = _request(_read_hubs_texts if is_text else _read_hubs_any, body, context)
    refused = refused_field(request)
    if refused is not None:
        raise _unsupported(refused)
    inputs = request.inputs
    outputs = await context.compute(_items(inputs, hub_parameters(request, task), context))
    return encode(hub_answer(outputs, task, is_one=not isinstance(inputs, list)))


def _request(decoder: msgspec.json.Decoder[Any], body: bytes, context: Context) -> Any:
    """Read a request from JSON, a file or a form. Raises Refusal."""
    if context.content_type[:16] != b"application/json":
        task = TASKS.get(context.description.get("task", ""))
        sent = read_sent(context.content_type, body, task.takes if task else None)
        if sent is not None:
            return _of_file(decoder, sent)
    return _decoded(decoder, body)


def _of_file(decoder: msgspec.json.Decoder[Any], sent: Sent) -> Any:
    parameters: Any = {}
    if sent.parameters is not None:
        try:
            parameters = _decoded(_read_parameters, sent.parameters)
        except Refusal as refused:
            raise _invalid("parameters", f"is not a JSON object: {refused}") from None
    return decoder.type(sent.inputs, parameters)


def _items(inputs: Any, parameters: dict[str, Any], context: Context) -> list[Any]:
    """Items of an input, or of a list of inputs. Raises Refusal."""
    description = context.description
    context.check_count(len(inputs) if isinstance(inputs, list) else 1)
    if parameters and not description.get("takes_parameters"):
        raise _unsupported("parameters", "this model takes none; leave them out")
    items = inputs if isinstance(inputs, list) else [inputs]
    # A bare input means the same and halves the transport's cost of a text. A model without a
    # description takes any item as it is, as does one of steps; ours take anything but a dict.
    takes_any = not description or description.get("bare_items", False)
    if parameters or (not takes_any and any(type(each) is dict for each in items)):
        items = [{"do": "predict", "inputs": each, "parameters": parameters} for each in items]
    return items


async def _generate(body: bytes, context: Context) -> bytes:
    request: GenerateRequest = _decoded(_read_generate, body)
    if request.parameters.get("num_return_sequences", 1) != 1:
        raise _invalid(
            "parameters.num_return_sequences", "/generate returns one text; use /v1/completions"
        )
    item = {"do": "generate", "inputs": request.text, "parameters": request.parameters}
    try:
        [[first, *_]] = await context.compute([item])
    except InvalidInput as error:
        raise _renamed(error, {"inputs": "text"}) from None
    return encode(GenerateResponse(request.text + first["text"]))


async def _completions(body: bytes, context: Context) -> bytes:
    request: CompletionsRequest = _decoded(_read_completions, body)
    _check_offered(request)
    parameters: dict[str, Any] = {
        "max_new_tokens": request.max_tokens or 16,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "num_return_sequences": request.n or 1,
    }
    parameters["do_sample"] = parameters["temperature"] > 0
    if request.top_p is not None and request.top_p < 1:
        parameters["top_p"] = request.top_p
    if request.stop:
        parameters["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.seed is not None:
        parameters["seed"] = request.seed
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not prompts:
        raise _invalid("prompt", "is empty; send at least one prompt")
    context.check_count(len(prompts))
    items = [{"do": "generate", "inputs": each, "parameters": parameters} for each in prompts]
    try:
        outputs = await context.compute(items)
    except InvalidInput as error:
        raise _renamed(error, _COMPLETIONS_NAMES) from None
    choices: list[Completion] = []
    taken = made = 0
    for prompt, sequences in zip(prompts, outputs, strict=True):
        taken += sequences[0]["prompt_tokens"]
        for sequence in sequences:
            made += sequence["completion_tokens"]
            text = prompt + sequence["text"] if request.echo else sequence["text"]
            choices.append(Completion(text, len(choices), sequence["finish_reason"]))
    answer = CompletionsResponse(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=context.model,
        choices=choices,
        usage=Usage(taken, taken + made, made),
    )
    return encode(answer)


def _check_offered(request: CompletionsRequest) -> None:
    """Refuse unsupported fields that have an effect. Raises Refusal."""
    for name, harmless in NOT_OFFERED.items():
        if getattr(request, name) not in harmless:
            raise _unsupported(name)
    if request.best_of not in (None, request.n or 1):
        raise _unsupported("best_of", "is not supported beyond n; leave it out")


async def _embeddings(body: bytes, context: Context) -> bytes:
    request: EmbeddingsRequest = _decoded(_read_embeddings, body)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise _invalid("input", "is empty; send at least one text")
    context.check_count(len(texts))
    parameters = {"truncation": True} if request.truncation else {}
    items = [{"do": "embed", "inputs": each, "parameters": parameters} for each in texts]
    try:
        outputs = await context.compute(items)
    except InvalidInput as error:
        raise _renamed(error, {"inputs": "input"}) from None
    data = []
    for index, output in enumerate(outputs):
        numbers = _shortened(output["embedding"], request.dimensions)
        is_text = request.encoding_format == "base64"
        data.append(Embedding(_base64(numbers) if is_text else numbers, index))
    tokens = sum(output["tokens"] for output in outputs)
    return encode(EmbeddingsResponse(data, context.model, Usage(tokens, tokens)))


def _shortened(numbers: list[float], dimensions: int | None) -> list[float]:
    if dimensions is None or dimensions == len(numbers):
        return numbers
    if dimensions > len(numbers):
        raise _invalid("dimensions", f"must be at most {len(numbers)}, the model's dimensions")
    part = numbers[:dimensions]
    norm = math.hypot(*part) or 1.0
    return [number / norm for number in part]


def _base64(numbers: list[float]) -> str:
    packed = array.array("f", numbers)
    if sys.byteorder != "little":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _invalid(param: str, text: str, code: str = "invalid_value") -> Refusal:
    return Refusal(
        422, "invalid_request_error", f"{param}: {text}", reason="invalid", param=param, code=code
    )


def _unsupported(param: str, text: str = "is not supported; leave it out") -> Refusal:
    return _invalid(param, text, "unsupported_parameter")


def _renamed(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same error with the field's name in the request."""
    field, colon, text = str(error).partition(":")
    return InvalidInput(names.get(field, field) + colon + text)


OPERATIONS = (
    Operation(
        "/predict", "predict", "Run the model on one or several inputs",
        PredictRequest, None, _predict, streams=True,
    ),
    Operation(
        "/", "predict", "The same, in the form of Hugging Face's InferenceClient",
        HubRequest, None, _infer,
    ),
    Operation(
        "/generate", "generate", "Continue a text",
        GenerateRequest, GenerateResponse, _generate,
    ),
    Operation(
        "/v1/completions", "generate", "Completions, in OpenAI's form",
        CompletionsRequest, CompletionsResponse, _completions, is_openais=True,
    ),
    Operation(
        "/v1/embeddings", "embed", "Sentence embeddings, in OpenAI's form",
        EmbeddingsRequest, EmbeddingsResponse, _embeddings, is_openais=True,
    ),
)  # fmt: skip
