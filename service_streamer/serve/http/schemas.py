"""Schemas of requests and answers, which msgspec checks; texts or tokens; Hugging Face's client."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from .refusals import invalid

Token = Annotated[int, Meta(ge=0, le=2**31 - 1, description="the number of a token of the model")]

#: A text or its tokens, or a list of texts and lists of tokens.
TextsOrTokens = Annotated[
    str | list[str | Token | list[Token]],
    Meta(description="a text, a list of the model's tokens, or a list of texts and such lists"),
]


def inputs_of(
    value: str | Sequence[str | int | list[int]], field: str
) -> tuple[Sequence[str | int | list[int]], bool]:
    """The inputs of a request, each a text or a list of tokens, and whether it is a single one.

    Raises:
        Refusal: there is none, one has no tokens, or a token stands among texts.
    """
    if isinstance(value, str):
        return [value], True
    if not value:
        raise invalid(field, "is empty; send at least one text")
    numbers = [each for each in value if isinstance(each, int)]
    if len(numbers) == len(value):
        return [numbers], True
    if numbers:
        raise invalid(
            f"{field}[{value.index(numbers[0])}]",
            "is a token among texts; send the tokens of one text as a list of their own",
        )
    if [] in value:
        raise invalid(f"{field}[{value.index([])}]", "is empty; send at least one token")
    return value, False


logger = logging.getLogger(__name__)

Parameters = Annotated[
    dict[str, Any] | None, Meta(description="parameters of the pipeline, such as top_k")
]
_Options = Annotated[dict[str, Any], Meta(description="accepted for compatibility; has no effect")]
Stream = Annotated[
    bool | None,
    Meta(description="of one input: send its outputs as they come, as server-sent events"),
]


class PredictRequest(Struct, forbid_unknown_fields=True):
    """One input of any type, or a list of inputs."""

    inputs: Any
    parameters: Parameters = {}
    options: _Options = {}
    stream: Stream = None


class TextRequest(Struct, forbid_unknown_fields=True):
    """One text, or a list of texts."""

    inputs: str | list[str]
    parameters: Parameters = {}
    options: _Options = {}
    stream: Stream = None


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


class Usage(Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


Ignored = Annotated[str | None, Meta(description="has no effect")]
Metadata = Annotated[dict[str, Any] | None, Meta(description="has no effect")]


class HarmlessFields(Struct, kw_only=True):
    """Fields of OpenAI's requests that do nothing here."""

    metadata: Metadata = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None


class HarmlessMessageFields(Struct, kw_only=True):
    """Fields of OpenAI's messages, mostly of answers that are sent again, that do nothing here."""

    annotations: Any = None
    audio: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None


_logged: set[str] = set()


def log_harmless(sent: HarmlessFields | HarmlessMessageFields) -> None:
    """Name the fields with a value in the log, each once in the life of the process."""
    kind = HarmlessFields if isinstance(sent, HarmlessFields) else HarmlessMessageFields
    for name in kind.__struct_fields__:
        if name not in _logged and getattr(sent, name):
            _logged.add(name)
            logger.info("requests have the field %r, which has no effect here", name)


class _Error(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    id: str | None = None


class ErrorResponse(Struct):
    """The form of all errors; ``param`` names the wrong field."""

    error: _Error


#: Fields of text-embeddings-inference that are not supported.
_NEVER = ("normalize", "prompt_name", "truncation_direction", "dimensions", "encoding_format")


def refused_field(request: HubRequest | HubTextRequest) -> str | None:
    """The first unsupported field of the request; None if there is none."""
    return next((name for name in _NEVER if getattr(request, name) is not None), None)


def hub_parameters(request: HubRequest | HubTextRequest) -> dict[str, Any]:
    """The parameters with the pipeline's names."""
    parameters = {**(request.parameters or {})}
    if request.truncate is not None:
        parameters.setdefault("truncation", request.truncate)
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


def hub_info(description: Mapping[str, Any], max_pending: int | None) -> dict[str, Any]:
    """What ``/info`` says in the words of text-embeddings-inference and its sibling for texts.

    Args:
        max_pending: maximum number of queued inputs; None without a limit.
    """
    return {
        "model_id": description.get("model"),
        "model_sha": description.get("revision"),
        "model_dtype": description.get("dtype"),
        "model_pipeline_tag": description.get("task"),
        "max_input_length": description.get("max_tokens"),
        "max_client_batch_size": max_pending,
        "max_concurrent_requests": max_pending,
        "auto_truncate": False,
    }


def _labelled(output: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(output["labels"], output["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]
