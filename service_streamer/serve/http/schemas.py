"""What requests and answers look like. msgspec checks the former as it reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

__all__ = [
    "NOT_OFFERED",
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
]

_Parameters = Annotated[dict[str, Any], Meta(description="of the pipeline, such as top_k")]
_Options = Annotated[
    dict[str, Any], Meta(description="taken for compatibility with other services; has no effect")
]


class PredictRequest(Struct, forbid_unknown_fields=True):
    """Inputs of any kind: one, or a list of several."""

    inputs: Any
    parameters: _Parameters = {}
    options: _Options = {}


class TextRequest(Struct, forbid_unknown_fields=True):
    """Texts: one, or a list of several."""

    inputs: str | list[str]
    parameters: _Parameters = {}
    options: _Options = {}


_Truncate = Annotated[
    bool | None, Meta(description="the parameter truncation, as some clients send it")
]
_Not = Annotated[Any, Meta(description="not offered: only null is taken")]


class HubRequest(PredictRequest):
    """As Hugging Face's InferenceClient asks."""

    stream: Annotated[bool | None, Meta(description="not offered")] = None
    truncate: _Truncate = None
    normalize: _Not = None
    prompt_name: _Not = None
    truncation_direction: _Not = None
    dimensions: _Not = None
    encoding_format: _Not = None


class HubTextRequest(TextRequest):
    """As Hugging Face's InferenceClient asks of models that take text."""

    stream: Annotated[bool | None, Meta(description="not offered")] = None
    truncate: _Truncate = None
    normalize: _Not = None
    prompt_name: _Not = None
    truncation_direction: _Not = None
    dimensions: _Not = None
    encoding_format: _Not = None


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A text to go on with."""

    text: str
    parameters: _Parameters = {}


class GenerateResponse(Struct):
    """The text, and how it goes on."""

    text: str


class Usage(Struct):
    """How many tokens it took."""

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
        bool, Meta(description="Cut a text that is too long, instead of refusing it.")
    ] = False
    user: _Ignored = None
    metadata: _Metadata = None


class Embedding(Struct):
    """Of one text: numbers, or the base64 of little-endian float32."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingsResponse(Struct):
    """OpenAI's form."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"


class CompletionsRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's form; what is not offered may be sent with its default value only."""

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
    stream_options: dict[str, Any] | None = None
    user: _Ignored = None
    metadata: _Metadata = None


#: Fields of it that are refused, but for the values that ask for nothing.
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "logprobs": (None,),  # 0 asks for those of the tokens that were chosen
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}


class Completion(Struct):
    """One way in which a prompt goes on."""

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
    """What every error looks like; ``param`` names the field that is at fault."""

    error: _Error
