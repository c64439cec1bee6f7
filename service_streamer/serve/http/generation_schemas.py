"""Schemas of requests for generated text and of their answers, and the form of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from .refusals import invalid
from .schemas import (
    HarmlessFields,
    HarmlessMessageFields,
    HubTextRequest,
    Ignored,
    Parameters,
    Stream,
    TextRequest,
    TextsOrTokens,
    Usage,
    log_harmless,
)


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """A text to continue, or to make another of.

    It is ``text``, or ``inputs`` as text-generation-inference has it.
    """

    text: str | None = None
    inputs: str | None = None
    parameters: Parameters = {}
    stream: Stream = None


class GenerateResponse(Struct, omit_defaults=True):
    """To ``text``, the text with its continuation, or the other text.

    To ``inputs``, ``generated_text`` alone.
    """

    text: str | None = None
    generated_text: str | None = None
    details: dict[str, Any] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Of a stream; ``include_usage`` adds a chunk with the numbers of tokens.

    With ``continuous_usage_stats``, too, each chunk has those of its text so far, as vLLM has it.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Annotated[bool | None, Meta(description="has no effect")] = None


_Penalty = Annotated[
    float, Meta(ge=-2, le=2, description="above 0, what the answer has becomes less likely")
]
_Biases = Annotated[
    dict[str, float], Meta(description="numbers of tokens, and what is added to their logits")
]
_Alternatives = Annotated[int, Meta(ge=0, le=20)]
_Most = Annotated[int, Meta(ge=1, le=16)]
_Format = Annotated[
    dict[str, Any] | None,
    Meta(
        description='{"type": "json_schema", "json_schema": {"schema": ...}}, {"type": '
        '"json_object"}, {"type": "regex", "value": ...} or {"type": "text"}'
    ),
]
_TopK = Annotated[
    int, Meta(ge=0, le=1_000_000, description="sample from so many of the likeliest tokens")
]
_Share = Annotated[
    float,
    Meta(ge=0, le=1, description="sample from tokens with this share of the largest probability"),
]
_Repetition = Annotated[
    float, Meta(ge=0.1, le=10, description="above 1, what the text has becomes less likely")
]
_Temperature = Annotated[
    float, Meta(ge=0, le=2, description="0 always takes the most likely token")
]
_TopP = Annotated[
    float,
    Meta(gt=0, le=1, description="sample from the likeliest tokens that add up to this"),
]
_Tokens = Annotated[int, Meta(ge=1, description="maximum number of generated tokens")]
_Least = Annotated[
    int, Meta(ge=0, description="no end token or stop string ends the text before so many tokens")
]
_FewTokens = Annotated[
    int, Meta(ge=0, description="maximum number of generated tokens; 0 with echo only")
]
_StopText = Annotated[str, Meta(min_length=1, max_length=2000)]
_Stop = Annotated[
    str | Annotated[list[_StopText], Meta(max_length=4)] | None,
    Meta(description="strings that end the text; they are left out"),
]
_Seed = Annotated[
    int, Meta(ge=0, le=2**63 - 1, description="makes sampling repeatable on the same machine")
]
_Tools = list[Annotated[Any, Meta(description="not supported")]] | None  # items have a schema


class GenerationFields(HarmlessFields, kw_only=True):
    """What both of OpenAI's forms have; unsupported fields must have their default values."""

    model: Ignored = None
    temperature: _Temperature | None = 1.0
    top_p: _TopP | None = 1.0
    n: _Most | None = 1
    stop: _Stop = None
    seed: _Seed | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = 0.0
    frequency_penalty: _Penalty | None = 0.0
    logit_bias: _Biases | None = None
    response_format: _Format = None
    top_k: _TopK | None = None
    min_p: _Share | None = None
    repetition_penalty: _Repetition | None = None
    min_tokens: _Least | None = None
    ignore_eos: bool | None = None


class CompletionsRequest(GenerationFields, forbid_unknown_fields=True):
    """OpenAI's form of a prompt to continue."""

    prompt: TextsOrTokens
    max_tokens: _FewTokens | None = 16
    max_completion_tokens: _FewTokens | None = None
    echo: bool | None = False
    best_of: _Most | None = None
    logprobs: _Alternatives | None = None
    suffix: str | None = None

    @property
    def most_tokens(self) -> int | None:
        asked = (self.max_completion_tokens, self.max_tokens)  # load tools send both
        return next((most for most in asked if most is not None), 16)

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are returned; None without log probabilities."""
        return self.logprobs


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(HarmlessMessageFields, forbid_unknown_fields=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    name: Ignored = None
    function_call: None = None
    tool_calls: list[Raw] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its text, and what it has of tools."""
        log_harmless(self)
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:  # as JSON: a message has strings only
            calls = b",".join(map(bytes, self.tool_calls))
            message |= {"content": text or "", "tool_calls": f"[{calls.decode(errors='replace')}]"}
        if self.role == "tool":
            given = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {name: each for name, each in given.items() if each is not None}
        return message


class ChatRequest(GenerationFields, forbid_unknown_fields=True):
    """OpenAI's form of a chat."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: _Alternatives | None = None
    tools: _Tools = None
    tool_choice: Any = None
    functions: _Tools = None
    function_call: Any = None
    modalities: list[str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are returned; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatAnswer(Struct):
    """The message that the model adds."""

    content: str
    role: str = "assistant"


class ChatChoice(Struct):
    """One answer to a chat."""

    index: int
    message: ChatAnswer
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None = None


class ChatResponse(Struct):
    """OpenAI's form."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


_Inputs = Annotated[
    str | list[str | ChatMessage | list[ChatMessage]],
    Meta(description="a prompt, or a chat: a list of messages; or a list of prompts and chats"),
]


class GenerationRequest(TextRequest):
    """A prompt, a chat, or a list of them."""

    inputs: _Inputs  # type: ignore[assignment]


class HubGenerationRequest(HubTextRequest):
    """The form of Hugging Face's InferenceClient, for models that continue texts."""

    inputs: _Inputs  # type: ignore[assignment]


def texts_of(
    inputs: str | Sequence[str | ChatMessage | list[ChatMessage]],
) -> tuple[list[str | list[dict[str, str]]], bool]:
    """The prompts and chats of a request, and whether it is a single one.

    Raises:
        Refusal: a message stands among prompts or chats.
    """
    if isinstance(inputs, str):
        return [inputs], True
    messages = [each for each in inputs if isinstance(each, ChatMessage)]
    if messages and len(messages) == len(inputs):
        return [[message.plain() for message in messages]], True
    texts: list[str | list[dict[str, str]]] = []
    for number, each in enumerate(inputs):
        if isinstance(each, ChatMessage):
            raise invalid(
                f"inputs[{number}]",
                "is a message among prompts; a chat is a list of messages and nothing else",
            )
        texts.append(each if isinstance(each, str) else [message.plain() for message in each])
    return texts, False


#: Unsupported fields of OpenAI's requests, and their values that have no effect.
NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
}


class Completion(Struct):
    """One continuation of a prompt."""

    text: str
    index: int
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None = None


class CompletionsResponse(Struct):
    """OpenAI's form."""

    id: str
    created: int
    model: str
    choices: list[Completion]
    usage: Usage
    object: str = "text_completion"


#: The types of forms, under all of their names.
FORM_KINDS = ("text", "json_object", "json_schema", "json", "regex")


def text_form(value: object, field: str) -> dict[str, Any]:
    """The model's parameter for a ``response_format`` or a ``grammar``; empty for any text.

    Args:
        field: the name of the value in the request.

    Raises:
        Refusal: it is none of the forms.
    """
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in FORM_KINDS:
        raise invalid(f"{field}.type", f"must be one of {', '.join(map(repr, FORM_KINDS))}")
    if kind == "text":
        return {}
    if kind == "regex":
        name = "pattern" if "pattern" in value else "value"
        _check_names(value, {"type", name}, field)
        pattern = value.get(name)
        if not isinstance(pattern, str) or not pattern:
            raise invalid(f"{field}.{name}", "must be a regular expression")
        return {"regex": pattern}
    if kind == "json_object" and value.keys() == {"type"}:
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and "json_schema" in value:  # OpenAI's
        _check_names(value, {"type", "json_schema"}, field)
        inner, place = value["json_schema"], f"{field}.json_schema"
        if not isinstance(inner, Mapping):
            raise invalid(place, "must be an object with a schema")
        _check_names(inner, {"name", "description", "schema", "strict"}, place)
        return {"json_schema": _schema(inner.get("schema"), f"{place}.schema")}
    _check_names(value, {"type", "value"}, field)
    wanted = value.get("value")
    if kind == "json_schema" and isinstance(wanted, Mapping) and "schema" in wanted:
        return {"json_schema": _schema(wanted["schema"], f"{field}.value.schema")}
    return {"json_schema": _schema(wanted, f"{field}.value")}


def _schema(value: object, place: str) -> Any:
    if isinstance(value, str):  # text-generation-inference takes it as a text, too
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise invalid(place, "must be a JSON schema, which is an object")
    return value


def _check_names(value: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in value:
        if name not in known:
            raise invalid(place, f"unknown field `{name[:60]}`", "unknown_parameter")
