"""Schemas of requests for generated text and of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .schemas import Ignored, Metadata, Parameters, Stream, Usage

__all__ = [
    "NOT_OFFERED",
    "ChatAnswer",
    "ChatChoice",
    "ChatRequest",
    "ChatResponse",
    "Completion",
    "CompletionsRequest",
    "CompletionsResponse",
    "GenerateRequest",
    "GenerateResponse",
]


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A text to continue."""

    text: str
    parameters: Parameters = {}
    stream: Stream = None


class GenerateResponse(Struct):
    """The text with its continuation."""

    text: str


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Of a stream; ``include_usage`` adds a chunk with the numbers of tokens."""

    include_usage: bool | None = False


class CompletionsRequest(Struct, forbid_unknown_fields=True):
    """OpenAI's form; unsupported fields must have their default values."""

    prompt: str | list[str]
    model: Ignored = None
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
    user: Ignored = None
    metadata: Metadata = None

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
    name: Ignored = None
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
    model: Ignored = None
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
    user: Ignored = None
    metadata: Metadata = None

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
