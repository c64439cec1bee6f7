"""Schemas of requests and answers, which msgspec checks; the form of Hugging Face's client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

__all__ = [
    "NOT_OFFERED",
    "ChatAnswer",
    "ChatChoice",
    "ChatRequest",
    "ChatResponse",
    "Completion",
    "CompletionsRequest",
    "CompletionsResponse",
    "Embedding",
    "EmbeddingsRequest",
    "EmbeddingsResponse",
    "ErrorResponse",
    "GenerateRequest",
    "GenerateResponse",
    "HubRequest",
    "HubTextRequest",
    "PredictRequest",
    "TextRequest",
    "Usage",
    "hub_answer",
    "hub_parameters",
    "refused_field",
]

_Parameters = Annotated[
    dict[str, Any], Meta(description="parameters of the pipeline, such as top_k")
]
_Options = Annotated[dict[str, Any], Meta(description="accepted for compatibility; has no effect")]
_Stream = Annotated[
    bool | None,
    Meta(description="of one input: send its outputs as they come, as server-sent events"),
]


class PredictRequest(Struct, forbid_unknown_fields=True):
    """One input of any type, or a list of inputs."""

    inputs: Any
    parameters: _Parameters = {}
    options: _Options = {}
    stream: _Stream = None


class TextRequest(Struct, forbid_unknown_fields=True):
    """One text, or a list of texts."""

    inputs: str | list[str]
    parameters: _Parameters = {}
    options: _Options = {}
    stream: _Stream = None


_Truncate = Annotated[bool | None, Meta(description="same as the parameter truncation")]
_Not = Annotated[Any, Meta(description="not supported: must be null")]


class HubRequest(PredictRequest):
    """The form of Hugging Face's InferenceClient."""

    stream: Annotated[
        bool | None, Meta(description="of one text to continue: send tokens as they come")
    ] = None
    truncate: _Truncate = None
    normalize: _Not = None
    prompt_name: _Not = None
    truncation_direction: _Not = None
    dimensions: _Not = None
    encoding_format: _Not = None


class HubTextRequest(TextRequest):
    """The form of Hugging Face's InferenceClient, for models that take text."""

    stream: Annotated[
        bool | None, Meta(description="of one text to continue: send tokens as they come")
    ] = None
    truncate: _Truncate = None
    normalize: _Not = None
    prompt_name: _Not = None
    truncation_direction: _Not = None
    dimensions: _Not = None
    encoding_format: _Not = None


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A text to continue, or to make another of."""

    text: str
    parameters: _Parameters = {}
    stream: _Stream = None


class GenerateResponse(Struct):
    """The text with its continuation, or the other text."""

    text: str


class Usage(Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


_Ignored = Annotated[str | None, Meta(description="has no effect")]
_Metadata = Annotated[dict[str, Any] | None, Meta(description="has no effect")]


class EmbeddingsRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's form, and ``truncation``."""

    input: str | list[str]
    model: _Ignored = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncation: Annotated[
        bool, Meta(description="Truncate a text that is too long instead of refusing it.")
    ] = False
    user: _Ignored = None
    metadata: _Metadata = None


class Embedding(Struct):
    """Embedding of one text: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingsResponse(Struct):
    """OpenAI's form."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Of a stream; ``include_usage`` adds a chunk with the numbers of tokens."""

    include_usage: bool | None = False


class CompletionsRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's form; unsupported fields must have their default values."""

    prompt: str | list[str]
    model: _Ignored = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Meta(ge=1, le=16)] | None = 1
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    echo: bool | None = False
    stream: bool | None = False
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None
    user: _Ignored = None
    metadata: _Metadata = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or 16


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message of a chat, also as an answer has it."""

    role: str
    content: str | list[TextPart]
    name: _Ignored = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """The message with its text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's form; unsupported fields must have their default values."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: _Ignored = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Meta(ge=1, le=16)] | None = 1
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    user: _Ignored = None
    metadata: _Metadata = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class ChatAnswer(Struct):
    """The message that the model adds."""

    content: str
    role: str = "assistant"


class ChatChoice(Struct):
    """One answer to a chat."""

    index: int
    message: ChatAnswer
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatResponse(Struct):
    """OpenAI's form."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


#: Unsupported fields of OpenAI's requests, and their values that have no effect.
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),  # 0 would return the chosen tokens' logprobs
    "top_logprobs": (None,),
    "suffix": (None, ""),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
}


class Completion(Struct):
    """One continuation of a prompt."""

    text: str
    index: int
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class CompletionsResponse(Struct):
    """OpenAI's form."""

    id: str
    created: int
    model: str
    choices: list[Completion]
    usage: Usage
    object: str = "text_completion"


class _Error(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    id: str | None = None


class ErrorResponse(Struct):
    """The form of all errors; ``param`` names the wrong field."""

    error: _Error


#: Switches of text-generation-inference; false has no effect.
_SWITCHES = ("decoder_input_details", "details", "watermark")

#: Fields of text-embeddings-inference that are not supported.
_NEVER = ("normalize", "prompt_name", "truncation_direction", "dimensions", "encoding_format")


def refused_field(request: HubRequest | HubTextRequest) -> str | None:
    """The first unsupported field of the request; None if there is none."""
    return next((name for name in _NEVER if getattr(request, name) is not None), None)


def hub_parameters(request: HubRequest | HubTextRequest, task: str | None) -> dict[str, Any]:
    """The parameters with the pipeline's names."""
    parameters = {**request.parameters}
    if request.truncate is not None:
        parameters.setdefault("truncation", request.truncate)
    if task in ("text-generation", "text2text-generation"):
        for name in _SWITCHES:
            if parameters.get(name) is False:
                del parameters[name]
        if "stop_sequences" in parameters:
            parameters.setdefault("stop", parameters.pop("stop_sequences"))
        parameters.setdefault("return_full_text", False)
    if task == "text2text-generation" and parameters["return_full_text"] is False:
        del parameters["return_full_text"]  # it is another text
    return parameters


def hub_answer(outputs: list[Any], task: str | None, *, is_one: bool) -> Any:
    """The client's form of the pipeline's outputs.

    Args:
        is_one: whether a single input was sent instead of a list.
    """
    if task == "text-classification":  # a list per input, even for a single one
        return [each if isinstance(each, list) else [each] for each in outputs]
    if task == "zero-shot-classification":
        outputs = [_labelled(each) for each in outputs]
    return outputs[0] if is_one else outputs


def _labelled(output: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(output["labels"], output["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
