"""The operations over HTTP: each turns a body into items, and outputs into a body.

operation               items                                   form of the answer
---------               -------------------                     ----------------------
/predict                the inputs as they are, or              the Hugging Face pipeline
                        {"do": "predict", ...} for each
/                       the same                                Hugging Face's InferenceClient
/generate               {"do": "generate", ...}                 {"text": ...}
/v1/completions         {"do": "generate", ...} per prompt      OpenAI
/v1/chat/completions    {"do": "generate", ...}                 OpenAI
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
from .events import ChatEvents, CompletionEvents, Form, OutputEvents, TokenEvents
from .headers import Sent, read_sent
from .refusals import Refusal, undecodable
from .schemas import (
    NOT_OFFERED,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    ChatResponse,
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
        "text-generation", "text2text-generation", "token-classification",
        "zero-shot-classification",
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
    def has_steps(self) -> bool:
        """Whether the model is one of steps, whose outputs come one by one."""

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

#: Names of the model's parameters in OpenAI's requests.
_OPENAIS_NAMES = {
    "parameters.max_new_tokens": "max_tokens",
    "parameters.num_return_sequences": "n",
    **{f"parameters.{name}": name for name in ("temperature", "top_p", "stop", "seed")},
}
_COMPLETIONS_NAMES = {"inputs": "prompt", **_OPENAIS_NAMES}
_CHAT_NAMES = {"inputs": "messages", **_OPENAIS_NAMES}


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
_read_chat = msgspec.json.Decoder(ChatRequest)
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


async def _infer(body: bytes, context: Context) -> bytes | EventStream:
    task = context.description.get("task")
    is_text = task in _TEXT_TASKS
    request = _request(_read_hubs_texts if is_text else _read_hubs_any, body, context)
    refused = refused_field(request)
    if refused is not None:
        raise _unsupported(refused)
    inputs, parameters = request.inputs, hub_parameters(request, task)
    if request.stream:
        if task not in ("text-generation", "text2text-generation"):
            raise _unsupported("stream")
        _check_streams(context)
        _check_single(parameters)
        if not isinstance(inputs, str):
            raise _invalid("inputs", "a stream is of one text; send a request for each")
        parameters.pop("details", None)  # the last event of a stream has them
        [item] = _items(inputs, parameters, context)
        return await context.stream(item, TokenEvents())
    outputs = await context.compute(_items(inputs, parameters, context))
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


async def _generate(body: bytes, context: Context) -> bytes | EventStream:
    request: GenerateRequest = _decoded(_read_generate, body)
    _check_single(request.parameters)
    item = {"do": "generate", "inputs": request.text, "parameters": request.parameters}
    try:
        if request.stream:
            _check_streams(context)
            return await context.stream(item, TokenEvents())
        [[first, *_]] = await context.compute([item])
    except InvalidInput as error:
        raise _renamed(error, {"inputs": "text"}) from None
    is_another = context.description.get("task") == "text2text-generation"
    return encode(GenerateResponse(("" if is_another else request.text) + first["text"]))


def _check_single(parameters: Mapping[str, Any]) -> None:
    if parameters.get("num_return_sequences", 1) != 1:
        raise _invalid(
            "parameters.num_return_sequences", "/generate returns one text; use /v1/completions"
        )


def _check_streams(context: Context) -> None:
    if not context.has_steps:
        raise _unsupported("stream")


async def _completions(body: bytes, context: Context) -> bytes | EventStream:
    request: CompletionsRequest = _decoded(_read_completions, body)
    parameters = _openais_parameters(request, context)
    if request.best_of not in (None, request.n or 1):
        raise _unsupported("best_of", "is not supported beyond n; leave it out")
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not prompts:
        raise _invalid("prompt", "is empty; send at least one prompt")
    context.check_count(len(prompts))
    items = [{"do": "generate", "inputs": each, "parameters": parameters} for each in prompts]
    head = _head("cmpl", context)
    try:
        if request.stream:
            if len(prompts) > 1:
                raise _invalid("prompt", "a stream is of one prompt; send a request for each")
            chunks = CompletionEvents(
                {**head, "object": "text_completion"},
                include_usage=_wants_usage(request),
                echo=prompts[0] if request.echo else "",
            )
            return await context.stream(items[0], chunks)
        outputs = await context.compute(items)
    except InvalidInput as error:
        raise _renamed(error, _COMPLETIONS_NAMES) from None
    choices: list[Completion] = []
    for prompt, sequences in zip(prompts, outputs, strict=True):
        for sequence in sequences:
            text = prompt + sequence["text"] if request.echo else sequence["text"]
            choices.append(Completion(text, len(choices), sequence["finish_reason"]))
    return encode(CompletionsResponse(**head, choices=choices, usage=_usage(outputs)))


async def _chat(body: bytes, context: Context) -> bytes | EventStream:
    request: ChatRequest = _decoded(_read_chat, body)
    parameters = _openais_parameters(request, context)
    messages = [message.plain() for message in request.messages]
    item = {"do": "generate", "inputs": messages, "parameters": parameters}
    head = _head("chatcmpl", context)
    try:
        if request.stream:
            chunks = ChatEvents(
                {**head, "object": "chat.completion.chunk"}, include_usage=_wants_usage(request)
            )
            return await context.stream(item, chunks)
        [sequences] = await context.compute([item])
    except InvalidInput as error:
        raise _renamed(error, _CHAT_NAMES) from None
    choices = [
        ChatChoice(index, ChatAnswer(each["text"]), each["finish_reason"])
        for index, each in enumerate(sequences)
    ]
    return encode(ChatResponse(**head, choices=choices, usage=_usage([sequences])))


def _openais_parameters(
    request: CompletionsRequest | ChatRequest, context: Context
) -> dict[str, Any]:
    """The model's parameters. Raises Refusal: a field has an effect that is not supported."""
    for name, harmless in NOT_OFFERED.items():
        value = getattr(request, name, None)
        if not any(type(value) is type(each) and value == each for each in harmless):
            raise _unsupported(name)
    if request.stream:
        _check_streams(context)
    elif request.stream_options is not None:
        raise _unsupported("stream_options", "is not supported without stream; leave it out")
    parameters: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "num_return_sequences": request.n or 1,
    }
    if request.most_tokens is not None:
        parameters["max_new_tokens"] = request.most_tokens
    parameters["do_sample"] = parameters["temperature"] > 0
    if request.top_p is not None and request.top_p < 1:
        parameters["top_p"] = request.top_p
    if request.stop:
        parameters["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.seed is not None:
        parameters["seed"] = request.seed
    return parameters


def _head(kind: str, context: Context) -> dict[str, Any]:
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": context.model,
    }


def _wants_usage(request: CompletionsRequest | ChatRequest) -> bool:
    options = request.stream_options
    return options is not None and bool(options.include_usage)


def _usage(outputs: list[Any]) -> Usage:
    taken = sum(sequences[0]["prompt_tokens"] for sequences in outputs)
    made = sum(each["completion_tokens"] for sequences in outputs for each in sequences)
    return Usage(taken, taken + made, made)


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
    name, bracket, rest = field.partition("[")  # of a message of a chat
    return InvalidInput(names.get(name, name) + bracket + rest + colon + text)


OPERATIONS = (
    Operation(
        "/predict", "predict", "Run the model on one or several inputs",
        PredictRequest, None, _predict, streams=True,
    ),
    Operation(
        "/", "predict", "The same, in the form of Hugging Face's InferenceClient",
        HubRequest, None, _infer, streams=True,
    ),
    Operation(
        "/generate", "generate", "Continue a text",
        GenerateRequest, GenerateResponse, _generate, streams=True,
    ),
    Operation(
        "/v1/completions", "generate", "Completions, in OpenAI's form",
        CompletionsRequest, CompletionsResponse, _completions, is_openais=True, streams=True,
    ),
    Operation(
        "/v1/chat/completions", "generate", "Answers to a chat, in OpenAI's form",
        ChatRequest, ChatResponse, _chat, is_openais=True, streams=True,
    ),
    Operation(
        "/v1/embeddings", "embed", "Sentence embeddings, in OpenAI's form",
        EmbeddingsRequest, EmbeddingsResponse, _embeddings, is_openais=True,
    ),
)  # fmt: skip
